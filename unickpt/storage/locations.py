"""Locations: a folder in any storage, and the files and folders in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import tensorstore as ts

from unickpt.storage.errors import Failed
from unickpt.storage.kvstore import KvStore
from unickpt.storage.local_files import RegularFiles
from unickpt.storage.local_folders import FileLock, StoredFile


@dataclass(frozen=True)
class Location:
    """A folder in a key-value store, such as object storage: the common prefix of some keys.

    A storage that has folders of its own has a subclass, such as `LocalLocation`; what only such
    folders need, such as to be created, does nothing here.

    Arguments:
        url: for people; ends with `/`.
        spec: the JSON of TensorStore's key-value store for it; its `path` ends with `/`.
    """

    url: str
    spec: Mapping[str, Any]

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
        read = self.store(context).read(name, byte_range=slice(0, 0))
        return bool(read.result().state == "value")

    def folders_with(self, file: str, context: ts.Context) -> list[str]:
        """Names of the folders in this one that hold a file; "." for this one itself.

        Raises:
            MissingFolder: this folder does not exist.
        """
        found = []
        for key in self._keys(context):
            folder, _, name = key.rpartition("/")
            if name == file and "/" not in folder:
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

    def missing(self, files: Iterable[str], context: ts.Context) -> list[str]:
        """Those of some files below this folder that are not there."""
        there = set(self._keys(context))
        return [file for file in files if file not in there]

    def _keys(self, context: ts.Context) -> list[str]:
        """The names of all files below this folder, at any depth."""
        return [key.decode(errors="replace") for key in self.store(context).list().result()]

    def is_file(self, context: ts.Context) -> bool:
        """Whether there is a file of this name, and no folder. Costs a request."""
        folder, name = self.parent, str(self.spec["path"]).rstrip("/").rpartition("/")[2]
        return folder is not None and folder.has_file(name, context)

    def remove(self, context: ts.Context) -> None:
        """Removes this folder and its contents."""
        self.store(context).delete_range(ts.KvStore.KeyRange()).result()

    def remove_file(self, name: str, context: ts.Context) -> None:
        """Removes one file in this folder or below; never through a symbolic link."""
        self.store(context).write(name, None).result()

    # --- what only storage with folders of its own has ------------------------------------------

    def regular_files(self) -> RegularFiles | None:
        """Reads the files here, of which some may be devices or pipes; None if all are objects."""
        return None

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

    def make(self, *, durable: bool = False) -> None:
        """Creates this folder and those above it, on the disk if it must be `durable`."""

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

    def sync(self, top: Location, made: int = 1) -> None:
        """Makes the folders from `top` down to this one durable, and above `top` as many as were
        made with it."""

    def room_text(self, error: Failed, needed: int, partial: str = "") -> str:
        """For errors: how much room was needed and free, if a lack of it is what failed.

        Arguments:
            error: what failed.
            needed: bytes to write.
            partial: the path of a folder with what was written, which is removed after a failure.
        """
        return ""

    # --- locks ---------------------------------------------------------------------------------

    def manifest_locked(self, timeout_s: float) -> AbstractContextManager[None]:
        """Lets one process at a time replace the manifest, if the storage does not ensure this."""
        return nullcontext()

    def file_lock(self, name: str) -> FileLock | None:
        """The operating system's lock on a file in this folder; None if it has no such locks."""
        return None

    def __str__(self) -> str:
        return self.url if self.url.endswith("://") else self.url.rstrip("/")
