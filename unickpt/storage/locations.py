"""Locations: a folder in any storage, and the files and folders in it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar
from urllib.parse import quote

import tensorstore as ts

from unickpt.storage import local_folders
from unickpt.storage.errors import Failed, MissingFolder
from unickpt.storage.local_folders import LOCK_SUFFIX, StoredFile
from unickpt.storage.ocdbt import MANIFEST
from unickpt.storage.regular_files import RegularFiles, system_calls
from unickpt.storage.tensorstore_calls import KvStore


@dataclass(frozen=True)
class Location:
    """A folder in a key-value store, such as object storage: the common prefix of some keys.

    A storage with real folders has a subclass, such as `LocalLocation`; operations that only such
    folders need, such as their creation, do nothing here.

    Arguments:
        url: for people; ends with `/`.
        spec: the JSON of TensorStore's key-value store for it; its `path` ends with `/`.
    """

    url: str
    spec: Mapping[str, Any]

    is_local: ClassVar[bool] = False
    """Whether this is in a local file system, which has real folders, links and locks."""
    shares_data: ClassVar[bool] = True
    """Whether each process of a save can read the data files of the others."""
    most_object_bytes: ClassVar[int] = 1 << 62
    """The largest object that the storage takes in one request."""
    is_seen: ClassVar[bool] = True
    """Whether this process can read the files here."""

    @cached_property
    def path(self) -> str:
        """Its path in the storage; ends with `/`, or is empty for a whole bucket."""
        return str(self.spec["path"])

    def child(self, relative: str) -> Location:
        """A folder below this one; `relative` needs no escaping and has no leading slash."""
        tail = relative.strip("/") + "/"
        return type(self)(self.url + tail, {**self.spec, "path": self.spec["path"] + tail})

    def name_for_users(self, name: str) -> str:
        """The path or URL of a folder in this one, as users give it.

        Arguments:
            name: of the folder, without escapes.
        """
        return f"{self.url}{quote(name) if self.is_remote else name}"  # memory:// has no escapes

    @property
    def parent(self) -> Location | None:
        """The folder that contains this one; None at the top of a bucket or a file system."""
        above, _, name = self.path.rstrip("/").rpartition("/")
        if not name:
            return None
        url = self.url.rstrip("/").rpartition("/")[0] + "/"
        return type(self)(url, {**self.spec, "path": above + "/" if above else ""})

    @property
    def is_remote(self) -> bool:
        """Whether each request crosses a network, so that many should be in flight."""
        return bool(self.spec["driver"] != "memory")

    def store(self, context: ts.Context) -> KvStore:
        """The plain key-value store of this folder."""
        return KvStore.open(dict(self.spec), context)

    def exists(self) -> bool:
        """Whether this folder exists; always true if the storage has no folders."""
        return True

    def names(self, context: ts.Context) -> set[str]:
        """Names of the folders and files in this folder."""
        return {key.partition("/")[0] for key in keys_below(self, context)}

    def folders(self, context: ts.Context) -> list[str]:
        """Names of the folders in this one."""
        return sorted({key.partition("/")[0] for key in keys_below(self, context) if "/" in key})

    def files(self, context: ts.Context) -> list[str]:
        """Names of the files in this folder, without those in folders below."""
        return [key for key in keys_below(self, context) if "/" not in key]

    def has_file(self, name: str, context: ts.Context) -> bool:
        """Whether a file is in this folder."""
        read = self.store(context).read(name, byte_range=slice(0, 0))
        return bool(read.result().state == "value")

    def remove(self, context: ts.Context) -> None:
        """Removes this folder and its contents."""
        self.store(context).delete_range(ts.KvStore.KeyRange()).result()

    def remove_file(self, name: str, context: ts.Context) -> None:
        """Removes one file in this folder or below; never through a symbolic link."""
        self.store(context).write(name, None).result()

    @property
    def link(self) -> str | None:
        """The target of this folder if it is a symbolic link, else None."""
        return None

    def regular_files(self) -> RegularFiles | None:
        """Reads the files here; some may be devices or pipes. None if all are objects."""
        return None

    def foreign_files(self) -> list[str]:
        """Names in this folder that are not a checkpoint's."""
        return []

    def make(self, *, durable: bool = False) -> None:
        """Creates this folder and those above it, on the disk if it must be `durable`."""

    def sync(self, top: Location, made: int = 1) -> None:
        """Makes the folders from `top` down to this one durable, and above `top` as many as were
        made with it."""

    def __str__(self) -> str:
        return self.url if self.url.endswith("://") else self.url.rstrip("/")


def keys_below(location: Location, context: ts.Context) -> list[str]:
    """The names of all files below a folder of a key-value store, at any depth."""
    return [key.decode(errors="replace") for key in location.store(context).list().result()]


def is_object(location: Location, context: ts.Context) -> bool:
    """Whether there is an object of this name. Costs a request."""
    folder, name = location.parent, location.path.rstrip("/").rpartition("/")[2]
    return folder is not None and folder.has_file(name, context)


def folders_with(location: Location, file: str, context: ts.Context) -> list[str]:
    """Names of the folders in another one that hold a file; "." for the other one itself.

    Raises:
        MissingFolder: the folder does not exist.
    """
    if not location.is_local:
        keys = (key.rpartition("/") for key in keys_below(location, context))
        return [folder or "." for folder, _, name in keys if name == file and "/" not in folder]
    names = ["."] if os.path.lexists(location.path + file) else []
    try:
        with system_calls(), os.scandir(location.path) as entries:
            folders = [entry for entry in entries if entry.is_dir()]
            return names + [e.name for e in folders if os.path.lexists(f"{e.path}/{file}")]
    except Failed as error:
        if error.errno == errno.ENOENT:
            raise MissingFolder(error.reason, error.errno) from error
        raise


def folders_below(location: Location, inside: str, context: ts.Context) -> dict[str, set[str]]:
    """Names of the folders in the folder `inside` of each folder in another one."""
    if location.is_local:
        names = location.folders(context)
        return {n: set(location.child(f"{n}/{inside}").folders(context)) for n in names}
    names_by_folder: dict[str, set[str]] = {}
    for key in keys_below(location, context):  # once for all folders
        folder, *between = key.split("/", 3)
        if between:
            names_there = names_by_folder.setdefault(folder, set())
            if len(between) == 3 and between[0] == inside:
                names_there.add(between[1])
    return names_by_folder


def files_by_folder(
    location: Location, inside: str, context: ts.Context
) -> dict[str, list[StoredFile]]:
    """The files of each folder in another one, by its name, and of that one itself, by "".

    Arguments:
        location: of the folder.
        inside: the only folder in each of them whose files are needed, at any depth. Other folders
            are only listed.
        context: as for `Location.store`.
    """
    if location.is_local:
        top = location.path
        below = {name: f"{top}{name}/" for name in location.folders(context)}
        return {name: list(_walk(path, inside)) for name, path in {"": top, **below}.items()}
    files: dict[str, list[StoredFile]] = {"": []}
    for key in keys_below(location, context):
        folder, _, relative_path = key.partition("/")
        if folder == inside or not relative_path:
            files[""].append(StoredFile(key))
        else:
            files.setdefault(folder, []).append(StoredFile(relative_path))
    return files


def missing_files(location: Location, files: Iterable[str], context: ts.Context) -> list[str]:
    """Those of the given files below a folder that do not exist, as far as this process sees."""
    if not location.shares_data:
        return [file for file in files if _is_missing(location, file, context)]
    if not location.is_local:
        keys = set(keys_below(location, context))
        return [file for file in files if file not in keys]
    names_by_folder = dict[str, set[str]]()  # one listing for all files of a folder
    gone = []
    for file in files:
        folder, _, name = file.rpartition("/")
        if folder not in names_by_folder:
            names_by_folder[folder] = set(local_folders.names(location.path + folder))
        if name not in names_by_folder[folder]:
            gone.append(file)
    return gone


def _is_missing(location: Location, file: str, context: ts.Context) -> bool:
    folder, _, name = file.rpartition("/")
    holder = location.child(folder)
    return holder.is_seen and not holder.has_file(name, context)


@contextmanager
def manifest_locked(location: Location, timeout_s: float) -> Iterator[None]:
    """Lets one process at a time replace a manifest, if the storage does not ensure this."""
    if not location.is_local:
        yield
        return
    # TensorStore's own lock file keeps the partial data of a killed process, and appends the
    # next process's data to it.
    with local_folders.locked(location.path, MANIFEST, timeout_s):
        with system_calls():
            for other in os.listdir(location.path):
                if other.startswith(f"{MANIFEST}_") and other.endswith(LOCK_SUFFIX):
                    os.unlink(location.path + other)
        yield


def _walk(top: str, inside: str) -> Iterator[StoredFile]:
    """The files of a checkpoint's folder: those in it, and all that lie below its folder `inside`.

    Folders count, too: a file that was linked from an older checkpoint keeps its time, and the
    folder's time is that of the link. If a checkpoint has a single folder in `inside`, which must
    then hold all its data, that folder stands for its files.

    Arguments:
        top: of the checkpoint; ends with `/`.
        inside: name of the folder.
    """
    now = time.time()
    single = len(local_folders.names(os.path.join(top, inside))) == 1 and os.path.isfile(
        top + MANIFEST
    )
    stack = [""]
    while stack:
        folder = stack.pop()
        try:
            entries = sorted(os.scandir(top + folder), key=lambda entry: entry.name)
            changed = os.stat(top + folder, follow_symlinks=False).st_mtime
        except OSError:
            yield StoredFile(folder + "?", 0)
            continue
        if folder:
            yield StoredFile(folder, 0, max(0.0, now - changed))
        for entry in entries:
            name = folder + entry.name
            if entry.is_dir(follow_symlinks=False) and (folder or entry.name == inside):
                if single and folder:
                    yield StoredFile(name + "/", 0)
                else:
                    stack.append(name + "/")
            elif not entry.is_file(follow_symlinks=False):
                yield StoredFile(name + "?", 0)
            else:
                with suppress(FileNotFoundError):
                    facts = entry.stat(follow_symlinks=False)
                    yield StoredFile(name, facts.st_size, max(0.0, now - facts.st_mtime))
