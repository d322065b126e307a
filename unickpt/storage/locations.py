"""Locations: a folder in any storage, its files, and the database in it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import quote

import tensorstore as ts

from unickpt.storage import ocdbt, ocdbt_nodes
from unickpt.storage.errors import Damaged
from unickpt.storage.kvstore import KvStore
from unickpt.storage.local_locks import FileLock
from unickpt.storage.ocdbt import DatabaseReader
from unickpt.storage.stored_files import StoredFile


@dataclass(frozen=True)
class Location:
    """A folder in a key-value store, such as object storage: the common prefix of some keys.

    A storage that has folders of its own has a subclass, such as `LocalLocation`; what only such
    folders need, such as to be created, does nothing here.

    Arguments:
        url: for people; ends with `/`.
        spec: the JSON of TensorStore's key-value store for it; its `path` ends with `/`.
        manifest: the key-value store with the manifest of the folder's database, if it is not read
            from the folder.
        generation: the storage's name for the version of that manifest in the folder; empty if the
            folder does not have it (yet).
    """

    url: str
    spec: Mapping[str, Any]
    manifest: Mapping[str, Any] | None = None
    generation: bytes = b""

    def child(self, relative: str) -> Location:
        """A folder below this one; `relative` needs no escaping and has no leading slash."""
        tail = relative.strip("/") + "/"
        return self._at(self.url + tail, self.spec["path"] + tail)

    def name_for_users(self, name: str) -> str:
        """The path or URL of a folder in this one, as users give it.

        Arguments:
            name: of the folder, without escapes.
        """
        return f"{self.url}{quote(name) if self.is_remote else name}"  # memory:// has no escapes

    @property
    def parent(self) -> Location | None:
        """The folder that contains this one; None at the top of a bucket or a file system."""
        above, _, name = str(self.spec["path"]).rstrip("/").rpartition("/")
        if not name:
            return None
        url = self.url.rstrip("/").rpartition("/")[0] + "/"
        return self._at(url, above + "/" if above else "")

    def _at(self, url: str, path: str) -> Location:
        """Another folder in the same storage."""
        return type(self)(url, {**self.spec, "path": path})

    @property
    def is_local(self) -> bool:
        """Whether this is in a local file system, for decisions about speed."""
        return False

    @property
    def is_remote(self) -> bool:
        """Whether each request crosses a network, so that many should be in flight."""
        return bool(self.spec["driver"] != "memory")

    def store(self, context: ts.Context) -> KvStore:
        """The plain key-value store of this folder."""
        return KvStore.open(dict(self.spec), context)

    # --- databases -----------------------------------------------------------------------------

    def database(self, context: ts.Context) -> KvStore:
        """The OCDBT database in this folder."""
        return KvStore.open(self.array_spec(""), context)

    def values(self, context: ts.Context) -> DatabaseReader:
        """Reads the values of the database in this folder, which is untrusted."""
        store = self.store(context)
        tree = ocdbt.Tree(partial(self._manifest, context), partial(ocdbt.fetch, store))
        return DatabaseReader(store, tree)

    def _manifest(self, context: ts.Context) -> bytes | None:
        """The manifest of the database: the pinned one, or the one in the folder."""
        if self.manifest is None:
            read = self.read_manifest(context)
        else:
            read = KvStore.open(dict(self.manifest), context).read(ocdbt.MANIFEST).result()
        return read.value if read.state == "value" else None

    def read_manifest(self, context: ts.Context) -> ts.KvStore.ReadResult:
        """The manifest in the folder, and the storage's name for its version."""
        return self.store(context).read(ocdbt.MANIFEST).result()

    def array_spec(self, prefix: str) -> dict[str, Any]:
        """The key-value store of one array inside this folder's database."""
        database = ocdbt.spec(self.spec, manifest=self.manifest)
        return {**database, "path": prefix + "/" if prefix else ""}

    def pinned(self, context: ts.Context) -> Location | None:
        """The database as it is now, with a copy of its manifest in memory; None if there is none.

        Later reads are consistent even if another checkpoint replaces this one, and no chunk costs
        a second request that checks for a newer manifest.
        """
        read = self.read_manifest(context)
        if read.state != "value":
            return None
        return replace(self.with_manifest(read.value, context), generation=read.stamp.generation)

    def with_manifest(self, manifest: bytes, context: ts.Context) -> Location:
        """The database in this folder with a manifest in memory.

        Arguments:
            manifest: its bytes; the folder need not contain it.
            context: keeps the bytes; as for `database`.
        """
        held = ocdbt.manifest_in_memory(self.url)
        KvStore.open(held, context).write(ocdbt.MANIFEST, manifest).result()
        return replace(self, manifest=held)

    def change(self, context: ts.Context) -> str:
        """What happened to a database since it was pinned: "" (nothing), "replaced", or "removed".

        Call it after finding missing or wrong data: replacing or removing a checkpoint changes the
        manifest first and the other files later.
        """
        if not self.generation:
            return ""
        now = self.read_manifest(context)
        if now.state != "value":
            return "removed"
        # Not the bytes, which are the same after a copy was removed and made again.
        return "replaced" if now.stamp.generation != self.generation else ""

    def database_facts(self, context: ts.Context) -> ocdbt_nodes.Manifest:
        """The content of the database's manifest; reads nothing else.

        Raises:
            Failed: the manifest is missing or damaged.
        """
        manifest = self._manifest(context)
        if manifest is None:
            raise Damaged("the manifest is missing")
        return ocdbt_nodes.manifest(manifest)

    def draft(self, context: ts.Context, data: str) -> tuple[KvStore, KvStore]:
        """A new database that is not visible yet: its data is in the folder, its manifest in
        memory.

        Writing that manifest into the folder atomically makes it the folder's database.

        Arguments:
            context: as for `database`; databases from which data is copied must share it.
            data: folder for nodes and values below this one, ending with `/`; used only once.

        Returns:
            The database, and the key-value store that holds its manifest.
        """
        held = ocdbt.manifest_in_memory(data)
        database = ocdbt.spec(self.spec, manifest=held, data=data)
        return (
            KvStore.open(database, context),
            KvStore.open(held, context),
        )

    # --- folders and files ---------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether this folder exists; always true if the storage has no folders."""
        return True

    def names(self, context: ts.Context) -> set[str]:
        """Names of the folders and files in this folder."""
        return {key.partition("/")[0] for key in self._keys(context)}

    def folders(self, context: ts.Context) -> list[str]:
        """Names of the folders in this one."""
        return sorted({key.partition("/")[0] for key in self._keys(context) if "/" in key})

    def files(self, context: ts.Context) -> list[str]:
        """Names of the files in this folder, without those in folders below."""
        return [key for key in self._keys(context) if "/" not in key]

    def has_file(self, name: str, context: ts.Context) -> bool:
        """Whether a file is in this folder."""
        return bool(self.store(context).read(name).result().state == "value")

    def folders_with_database(self, context: ts.Context) -> list[str]:
        """Names of the folders in this one that hold a database; "." for this one itself.

        Raises:
            MissingFolder: this folder does not exist.
        """
        found = []
        for key in self._keys(context):
            folder, _, file = key.rpartition("/")
            if file == ocdbt.MANIFEST and "/" not in folder:
                found.append(folder or ".")
        return found

    def folders_below(self, inside: str, context: ts.Context) -> dict[str, set[str]]:
        """Names of the folders in the folder `inside` of each folder in this one."""
        found: dict[str, set[str]] = {}
        for key in self._keys(context):  # once for all folders
            folder, *between = key.split("/", 3)
            if between:
                names = found.setdefault(folder, set())
                if len(between) == 3 and between[0] == inside:
                    names.add(between[1])
        return found

    def files_by_folder(self, inside: str, context: ts.Context) -> dict[str, list[StoredFile]]:
        """The files of each folder in this one, by its name, and of this one itself, by "".

        Arguments:
            inside: the only folder in each of them whose files are needed, at any depth. Of other
                folders, it is only seen that they are there.
            context: as for `store`.
        """
        found: dict[str, list[StoredFile]] = {"": []}
        for key in self._keys(context):
            folder, _, rest = key.partition("/")
            if folder == inside or not rest:
                found[""].append(StoredFile(key))
            else:
                found.setdefault(folder, []).append(StoredFile(rest))
        return found

    def holds_only(self, inside: str, context: ts.Context) -> bool:
        """Whether all that a checkpoint's folder holds is in its folder `inside`; true if empty."""
        return all(key.startswith(f"{inside}/") for key in self._keys(context))

    def _keys(self, context: ts.Context) -> list[str]:
        """The names of all files below this folder, at any depth."""
        return [key.decode(errors="replace") for key in self.store(context).list().result()]

    def remove(self, context: ts.Context) -> None:
        """Removes this folder and its contents."""
        self.store(context).delete_range(ts.KvStore.KeyRange()).result()

    def remove_file(self, name: str, context: ts.Context) -> None:
        """Removes one file in this folder or below; never through a symbolic link."""
        self.store(context).write(name, None).result()

    # --- what only storage with folders of its own has ------------------------------------------

    def foreign_files(self) -> list[str]:
        """Names in this folder that are not a checkpoint's."""
        return []

    @property
    def link(self) -> str | None:
        """The target of this folder if it is a symbolic link, else None."""
        return None

    def links(self) -> list[str]:
        """Names of the symbolic links in this folder."""
        return []

    def unlink(self) -> None:
        """Removes this folder, a symbolic link, but not its target."""

    def make(self) -> None:
        """Creates this folder."""

    def remove_empty(self) -> None:
        """Removes the empty folders of a checkpoint without files."""

    def count_missing(self) -> int:
        """The number of folders to create for this one to exist."""
        return 0

    def remove_made(self, count: int) -> None:
        """Removes the empty folders that were created for a checkpoint here.

        Arguments:
            count: the earlier result of `count_missing`.
        """

    def sync(self, top: Location) -> None:
        """Makes the folders from `top` down to this one durable."""

    # --- locks ---------------------------------------------------------------------------------

    def manifest_locked(self, timeout_s: float) -> AbstractContextManager[None]:
        """Lets one process at a time replace the manifest, if the storage does not ensure this."""
        return nullcontext()

    def file_lock(self, name: str) -> FileLock | None:
        """The operating system's lock on a file in this folder; None if it has no such locks."""
        return None

    def __str__(self) -> str:
        return self.url if self.url.endswith("://") else self.url.rstrip("/")
