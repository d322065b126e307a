"""Locations in a local file system."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorstore as ts

from unickpt.errors import InvalidPath
from unickpt.storage import local_folders, local_locks
from unickpt.storage.kvstore import KvStore
from unickpt.storage.local_files import LocalKvStore, RegularFiles
from unickpt.storage.local_folders import LOCK_SUFFIX
from unickpt.storage.local_locks import FileLock
from unickpt.storage.locations import Location
from unickpt.storage.stored_files import StoredFile


@dataclass(frozen=True)
class LocalLocation(Location):
    """A folder in a local file system; its files may be of any kind, and links lead anywhere."""

    @property
    def path(self) -> str:
        """The absolute path; ends with `/`."""
        return str(self.spec["path"])

    def name_for_users(self, name: str) -> str:
        return f"{self}/{name}"

    @property
    def parent(self) -> Location | None:
        is_top = os.path.dirname(self.path.rstrip("/")) in ("", "/")
        return None if is_top else super().parent

    @property
    def is_local(self) -> bool:
        return True

    @property
    def is_remote(self) -> bool:
        return False

    def store(self, context: ts.Context) -> KvStore:
        return LocalKvStore(super().store(context).raw, self.path)

    def exists(self) -> bool:
        return local_folders.exists(self.path)

    def names(self, context: ts.Context) -> set[str]:
        return set(local_folders.names(self.path))

    def folders(self, context: ts.Context) -> list[str]:
        return local_folders.folders(self.path)

    def files(self, context: ts.Context) -> list[str]:
        return local_folders.files(self.path)

    def has_file(self, name: str, context: ts.Context) -> bool:
        return os.path.isfile(os.path.join(self.path, name))

    def is_file(self, context: ts.Context) -> bool:
        return os.path.isfile(self.path.rstrip("/"))

    def check_folder(self, text: str) -> None:
        local_folders.is_directory(self.path.rstrip("/") or "/", text)

    def missing(self, files: Iterable[str], context: ts.Context) -> list[str]:
        there = dict[str, set[str]]()  # one listing for all files of a folder
        gone = []
        for file in files:
            folder, _, name = file.rpartition("/")
            if folder not in there:
                there[folder] = set(local_folders.names(self.path + folder))
            if name not in there[folder]:
                gone.append(file)
        return gone

    def folders_with(self, file: str, context: ts.Context) -> list[str]:
        return local_folders.folders_with(file, self.path)

    def folders_below(self, inside: str, context: ts.Context) -> dict[str, set[str]]:
        return {
            name: set(local_folders.folders(os.path.join(self.path, name, inside)))
            for name in self.folders(context)
        }

    def files_by_folder(self, inside: str, context: ts.Context) -> dict[str, list[StoredFile]]:
        names = ["", *self.folders(context)]
        paths = {name: self.path + name + "/" if name else self.path for name in names}
        return {name: list(local_folders.walk(path, inside)) for name, path in paths.items()}

    def holds_only(self, inside: str, context: ts.Context) -> bool:
        return not self.foreign_files()  # which `inside` is not

    def remove(self, context: ts.Context) -> None:
        local_folders.remove(self.path)

    def remove_file(self, name: str, context: ts.Context) -> None:
        local_folders.remove_file(self.path, name)

    def regular_files(self) -> RegularFiles:
        return RegularFiles(self.path)

    def foreign_files(self) -> list[str]:
        return local_folders.foreign(self.path)

    @property
    def link(self) -> str | None:
        return local_folders.link(self.path)

    def links(self) -> list[str]:
        return local_folders.links(self.path)

    def unlink(self) -> None:
        local_folders.unlink(self.path)

    def make(self, *, durable: bool = False) -> None:
        local_folders.make(self.path, durable=durable)

    def remove_empty(self) -> None:
        local_folders.remove_empty(self.path)

    def count_missing(self) -> int:
        return local_folders.count_missing(self.path)

    def remove_made(self, count: int) -> None:
        local_folders.remove_made(self.path, count)

    def sync(self, top: Location, made: int = 1) -> None:
        local_folders.sync(self.path, top.spec["path"], made)

    def manifest_locked(self, timeout_s: float) -> AbstractContextManager[None]:
        return local_locks.manifest_locked(self.path, timeout_s)

    def file_lock(self, name: str) -> FileLock:
        return FileLock(self.path, name)

    def __str__(self) -> str:
        return self.path.rstrip("/")


def at_path(path: str) -> LocalLocation:
    """The location of a local path, as users give it.

    Raises:
        InvalidPath: it cannot be that of a folder.
    """
    spec = spec_of(path)
    return LocalLocation(Path(spec["path"]).as_uri().rstrip("/") + "/", spec)


def spec_of(path: str) -> dict[str, Any]:
    """The JSON of TensorStore's key-value store for a local path, of a folder or of a file.

    Raises:
        InvalidPath: it cannot be that of a folder.
    """
    absolute = "/" + os.path.abspath(os.path.expanduser(path)).strip("/")
    parts = absolute.split("/")
    if "\\" in absolute or any(part.endswith(LOCK_SUFFIX) for part in parts):
        raise InvalidPath(
            f"{path!r}: TensorStore accepts no '\\' in a path and no name that ends in "
            f"'{LOCK_SUFFIX}'"
        )
    try:
        absolute.encode()
    except UnicodeEncodeError:
        raise InvalidPath(f"{path!r} is not valid Unicode") from None
    existing = absolute
    while not os.path.isfile(existing) and not local_folders.is_directory(existing, path):
        existing = os.path.dirname(existing)
    if existing != absolute:
        local_folders.is_directory(existing, path)  # no file contains another
    return {"driver": "file", "path": absolute.rstrip("/") + "/"}
