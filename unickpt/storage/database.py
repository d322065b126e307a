"""The OCDBT database in a folder: opened, pinned, read, and built without being visible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import tensorstore as ts
import xxhash

from unickpt.storage import ocdbt, schemes
from unickpt.storage.btree import nodes
from unickpt.storage.errors import Damaged
from unickpt.storage.kvstore import KvStore
from unickpt.storage.local_database import LocalDatabaseReader
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import DatabaseReader


@dataclass(frozen=True)
class Database:
    """The database in a folder; it need not exist.

    Arguments:
        location: the folder.
        context: the TensorStore context; databases from which data is copied must share it.
        manifest: the key-value store with the database's manifest, if it is not read from the
            folder.
        generation: the storage's name for the version of that manifest in the folder; empty if the
            folder does not have it (yet).
    """

    location: Location
    context: ts.Context
    manifest: Mapping[str, Any] | None = None
    generation: bytes = b""

    def store(self) -> KvStore:
        """Its keys and values, as TensorStore reads and writes them."""
        return KvStore.open(self.array_spec(""), self.context)

    def array_spec(self, prefix: str) -> dict[str, Any]:
        """The key-value store of one array inside this database."""
        database = ocdbt.spec(self.location.spec, manifest=self.manifest)
        return {**database, "path": prefix + "/" if prefix else ""}

    def reader(self) -> DatabaseReader:
        """Reads its values, which are untrusted."""
        store, files = self.location.store(self.context), self.location.regular_files()
        if files is None:
            return DatabaseReader(store, ocdbt.Tree(self._manifest, partial(ocdbt.fetch, store)))
        return LocalDatabaseReader(store, files, ocdbt.Tree(self._manifest, files.read))

    def read_manifest(self) -> ts.KvStore.ReadResult:
        """The manifest in the folder, and the storage's name for its version."""
        return self.location.store(self.context).read(ocdbt.MANIFEST).result()

    def facts(self) -> nodes.Manifest:
        """The content of its manifest; reads nothing else.

        Raises:
            Failed: the manifest is missing or damaged.
        """
        manifest = self._manifest()
        if manifest is None:
            raise Damaged("the manifest is missing")
        return nodes.manifest(manifest)

    def pinned(self) -> Database | None:
        """The database as it is now, with a copy of its manifest in memory; None if there is none.

        Later reads are consistent even if another checkpoint replaces this one, and no chunk costs
        a second request that checks for a newer manifest.
        """
        read = self.read_manifest()
        if read.state != "value":
            return None
        return replace(self.with_manifest(read.value), generation=read.stamp.generation)

    def with_manifest(self, manifest: bytes) -> Database:
        """The database with a manifest in memory, which the context keeps.

        Arguments:
            manifest: its bytes; the folder need not contain it.
        """
        held = ocdbt.manifest_in_memory(self.location.url)
        KvStore.open(held, self.context).write(ocdbt.MANIFEST, manifest).result()
        return replace(self, manifest=held)

    def manifest_digest(self) -> str:
        """The digest of the pinned manifest, or else of the one in the folder; see `digest_of`."""
        return digest_of(self._manifest() or b"")

    def change(self) -> str:
        """What happened to a database since it was pinned: "" (nothing), "replaced", or "removed".

        Call it after finding missing or wrong data: replacing or removing a checkpoint changes the
        manifest first and the other files later.
        """
        if not self.generation:
            return ""
        now = self.read_manifest()
        if now.state != "value":
            return "removed"
        # Not the bytes, which are the same after a copy was removed and made again.
        return "replaced" if now.stamp.generation != self.generation else ""

    def draft(self, data: str) -> tuple[KvStore, KvStore]:
        """A new database that is not visible yet: its data is in the folder, its manifest in
        memory.

        Writing that manifest into the folder atomically makes it the folder's database.

        Arguments:
            data: folder for nodes and values below this one, ending with `/`; used only once.

        Returns:
            The database, and the key-value store that holds its manifest.
        """
        held = ocdbt.manifest_in_memory(data)
        database = ocdbt.spec(self.location.spec, manifest=held, data=data)
        return KvStore.open(database, self.context), KvStore.open(held, self.context)

    def _manifest(self) -> bytes | None:
        """The pinned manifest, or else the one in the folder."""
        if self.manifest is None:
            read = self.read_manifest()
        else:
            read = KvStore.open(dict(self.manifest), self.context).read(ocdbt.MANIFEST).result()
        return read.value if read.state == "value" else None

    def __str__(self) -> str:
        return str(self.location)


def digest_of(manifest: bytes) -> str:
    """The digest by which a commit is known, of its manifest: 16 hexadecimal digits."""
    return f"{xxhash.xxh3_64_intdigest(manifest):016x}"


def context(*, fsync: bool = True) -> ts.Context:
    """A TensorStore context for one save or one opened checkpoint; all its databases share it."""
    return ts.Context(
        {
            "file_io_sync": fsync,
            "cache_pool": {"total_bytes_limit": 0},
            ocdbt.NODE_CACHE: {"total_bytes_limit": ocdbt.NODE_CACHE_BYTES},
            ocdbt.MANIFESTS: {},
            **schemes.resources(),
        },
        parent=root_context(),
    )


def is_durable(context: ts.Context) -> bool:
    """Whether what is written with a context is flushed to the disk."""
    return bool(context["file_io_sync"].to_json())


@cache
def root_context() -> ts.Context:
    """The parent of all contexts; TensorStore keeps memory:// in it."""
    context = ts.Context({"memory_key_value_store": {}})
    context["memory_key_value_store"]
    return context
