"""Locations: a folder in any storage, found by a path or URL."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import tensorstore as ts

from unickpt.backends import file, gcs, memory, s3
from unickpt.errors import InvalidPath
from unickpt.storage import contexts, local_folders, local_locks, local_values, ocdbt, ocdbt_nodes
from unickpt.storage.kvstore import Damaged, KvStore

Path = str | os.PathLike[str]

_SCHEMES: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "file": file.spec_from_url,
    "memory": memory.spec,
    "s3": s3.spec,
    "gs": gcs.spec,
}


@dataclass(frozen=True)
class Location:
    """A folder in any storage.

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
        return Location(self.url + tail, {**self.spec, "path": self.spec["path"] + tail})

    @property
    def parent(self) -> Location | None:
        """The folder that contains this one; None at the top of a bucket."""
        path = str(self.spec["path"]).rstrip("/")
        above, _, name = path.rpartition("/")
        if not name or (self.is_local and not above):
            return None
        url = self.url.rstrip("/").rpartition("/")[0] + "/"
        return Location(url, {**self.spec, "path": above + "/" if above else ""})

    @property
    def is_local(self) -> bool:
        return bool(self.spec["driver"] == "file")

    @property
    def is_remote(self) -> bool:
        """Whether each request crosses a network, so that many should be in flight."""
        return self.spec["driver"] not in ("file", "memory")

    def store(self, context: ts.Context) -> KvStore:
        """The plain key-value store of this folder, whose files may be of any kind."""
        opened = KvStore.open(dict(self.spec), context)
        return local_values.Store(opened.raw, self.spec["path"]) if self.is_local else opened

    # --- databases -----------------------------------------------------------------------------

    def database(self, context: ts.Context) -> KvStore:
        """The OCDBT database in this folder."""
        return KvStore.open(self.array_spec(""), context)

    def values(self, context: ts.Context) -> ocdbt.Values:
        """The values of the database in this folder, which is untrusted."""
        store = self.store(context)
        if self.is_local:
            files = local_values.Files(self.spec["path"])
            return local_values.Values(
                store, files, ocdbt.Tree(partial(self._manifest, context), files.read)
            )
        fetch = partial(ocdbt.fetch, store)
        return ocdbt.Values(store, ocdbt.Tree(partial(self._manifest, context), fetch))

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
        held = contexts.manifest(self.url)
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
        held = contexts.manifest(data)
        database = ocdbt.spec(self.spec, manifest=held, data=data)
        return (
            KvStore.open(database, context),
            KvStore.open(held, context),
        )

    # --- folders -------------------------------------------------------------------------------

    def foreign_files(self) -> list[str]:
        """Names in this folder that are not a checkpoint's; only for local folders."""
        return local_folders.foreign(self.spec["path"]) if self.is_local else []

    def folders(self, context: ts.Context) -> list[str]:
        """Names of the folders in this one."""
        if self.is_local:
            return local_folders.folders(self.spec["path"])
        keys = (key.decode() for key in self.store(context).list().result())
        return sorted({key.partition("/")[0] for key in keys if "/" in key})

    def make(self) -> None:
        """Creates this folder, if the storage has folders."""
        if self.is_local:
            local_folders.make(self.spec["path"])

    def files(self, context: ts.Context) -> list[str]:
        """Names of the files in this folder, without those in folders below."""
        if self.is_local:
            return local_folders.files(self.spec["path"])
        keys = (key.decode(errors="replace") for key in self.store(context).list().result())
        return [key for key in keys if "/" not in key]

    def remove(self, context: ts.Context) -> None:
        """Removes this folder and its contents."""
        if self.is_local:
            local_folders.remove(self.spec["path"])
        else:
            self.store(context).delete_range(ts.KvStore.KeyRange()).result()

    def remove_file(self, name: str, context: ts.Context) -> None:
        """Removes one file in this folder or below; never through a symbolic link."""
        if self.is_local:
            local_folders.remove_file(self.spec["path"], name)
        else:
            self.store(context).write(name, None).result()

    @property
    def link(self) -> str | None:
        """The target of this folder if it is a symbolic link, else None."""
        return local_folders.link(self.spec["path"]) if self.is_local else None

    def links(self) -> list[str]:
        """Names of the symbolic links in this folder."""
        return local_folders.links(self.spec["path"]) if self.is_local else []

    def unlink(self) -> None:
        """Removes this folder, a symbolic link, but not its target."""
        local_folders.unlink(self.spec["path"])

    def is_there(self) -> bool:
        """Whether this folder exists; always true on other than local storage."""
        return not self.is_local or local_folders.exists(self.spec["path"])

    def remove_empty(self) -> None:
        """Removes the empty folders of a checkpoint without files."""
        if self.is_local:
            local_folders.remove_empty(self.spec["path"])

    def count_missing(self) -> int:
        """The number of folders to create for this one to exist; 0 if the storage has no
        folders."""
        return local_folders.count_missing(self.spec["path"]) if self.is_local else 0

    def remove_made(self, count: int) -> None:
        """Removes the empty folders that were created for a checkpoint here.

        Arguments:
            count: the earlier result of `count_missing`.
        """
        if self.is_local:
            local_folders.remove_made(self.spec["path"], count)

    def locked(self, timeout_s: float) -> AbstractContextManager[None]:
        """Lets one process at a time replace the manifest, if the storage does not ensure this."""
        return local_locks.locked(self.spec["path"], timeout_s) if self.is_local else nullcontext()

    def sync(self, top: Location) -> None:
        """Makes the folders from `top` down to this one durable, if the storage needs it."""
        if self.is_local:
            local_folders.sync(self.spec["path"], top.spec["path"])

    def __str__(self) -> str:
        if self.is_local:
            return str(self.spec["path"]).rstrip("/")
        return self.url if self.url.endswith("://") else self.url.rstrip("/")


def resolve(path: Path, *, whole: bool = False) -> Location:
    """Finds the storage that a path or URL names.

    Arguments:
        path: a local path, or a URL with the scheme file, memory, s3 or gs.
        whole: also accept a whole bucket or memory://; a checkpoint needs a folder in it.

    Raises:
        InvalidPath: for an empty path, an unknown scheme, or a malformed URL.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        raise InvalidPath(
            f"the path is of type {type(path).__name__}; pass the path first, as a str or a Path"
        ) from None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidPath(f"{path!r} is not a path; give a local path or a URL ({_known()})")
    scheme, separator, _ = text.partition("://")
    if not separator:
        scheme, single, rest = text.partition(":/")
        if single and scheme.lower() in _SCHEMES:
            meant = f"{scheme}://{'/' if scheme.lower() == 'file' else ''}{rest}"
            raise InvalidPath(f"{text!r}: a URL has two slashes after its scheme: {meant}")
        spec = file.spec_from_path(text)
        return Location(file.url(spec["path"]), _checked(text, spec))
    make = _SCHEMES.get(scheme.lower())
    if make is None:
        raise InvalidPath(f"{text!r}: unknown scheme {scheme!r}; known are {_known()}")
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise InvalidPath(f"{text!r} is not a valid URL: {error}") from None
    if parts.query or parts.fragment:
        raise InvalidPath(f"{text!r}: a checkpoint's URL has no '?' or '#'")
    url = text if text.endswith("://") else text.rstrip("/") + "/"
    location = Location(url, _checked(text, make(text)))
    if not location.spec["path"] and not whole:
        raise InvalidPath(f"{text!r}: add the checkpoint's path, such as {url}run/1")
    return location


def _checked(text: str, spec: dict[str, Any]) -> dict[str, Any]:
    try:
        ts.KvStore.Spec(spec)
    except ValueError as error:
        raise InvalidPath(f"{text!r}: {error}") from None
    return spec


def _known() -> str:
    return ", ".join(f"{scheme}://" for scheme in _SCHEMES)
