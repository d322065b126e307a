"""The paths and URLs that users give, and the location that each names."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tensorstore as ts

from unickpt.errors import InvalidPath, StorageError
from unickpt.quoting import size_text
from unickpt.storage import local_folders, ocdbt, schemes
from unickpt.storage.errors import Failed, MissingFolder
from unickpt.storage.kvstore import KvStore
from unickpt.storage.local_files import LocalKvStore, RegularFiles, system_calls
from unickpt.storage.local_folders import LOCK_SUFFIX, FileLock, StoredFile
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST, RETIRED

_OURS = ("processes", RETIRED, MANIFEST)


@dataclass(frozen=True)
class LocalLocation(Location):
    """A folder in a local file system; its files may be of any kind, and links lead anywhere."""

    @cached_property
    def path(self) -> str:
        """The absolute path; ends with `/`."""
        return str(self.spec["path"])

    def name_for_users(self, name: str) -> str:
        return f"{self}/{name}"

    @property
    def parent(self) -> Location | None:
        is_top = os.path.dirname(self.path.rstrip("/")) in ("", "/")
        return None if is_top else super().parent

    is_local = True
    is_remote = False

    def store(self, context: ts.Context) -> KvStore:
        opened = LocalKvStore.open(dict(self.spec), context)
        opened.files = RegularFiles(self.path)
        return opened

    def exists(self) -> bool:
        return os.path.isdir(self.path)

    def names(self, context: ts.Context) -> set[str]:
        return set(local_folders.names(self.path))

    def folders(self, context: ts.Context) -> list[str]:
        if self.link is not None:  # which may lead anywhere
            return []
        return [e.name for e in self._entries() if e.is_dir(follow_symlinks=False)]

    def files(self, context: ts.Context) -> list[str]:
        return [e.name for e in self._entries() if e.is_file(follow_symlinks=False)]

    def links(self) -> list[str]:
        return [e.name for e in self._entries() if e.is_symlink()]

    def _entries(self) -> list[os.DirEntry[str]]:
        """All that is in it; nothing if it is not there, or just went, or is no folder."""
        if os.path.isdir(self.path):
            gone = suppress(FileNotFoundError, NotADirectoryError)
            with system_calls(), gone, os.scandir(self.path) as entries:
                return list(entries)
        return []

    def has_file(self, name: str, context: ts.Context) -> bool:
        return os.path.isfile(os.path.join(self.path, name))

    def is_file(self, context: ts.Context) -> bool:
        return os.path.isfile(self.path.rstrip("/"))

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
        found = ["."] if os.path.lexists(self.path + file) else []
        try:
            with system_calls(), os.scandir(self.path) as entries:
                there = [entry for entry in entries if entry.is_dir()]
                return found + [e.name for e in there if os.path.lexists(f"{e.path}/{file}")]
        except Failed as error:
            if error.errno == errno.ENOENT:
                raise MissingFolder(error.reason, error.errno) from error
            raise

    def folders_below(self, inside: str, context: ts.Context) -> dict[str, set[str]]:
        return {
            name: set(self._at("", f"{self.path}{name}/{inside}/").folders(context))
            for name in self.folders(context)
        }

    def files_by_folder(self, inside: str, context: ts.Context) -> dict[str, list[StoredFile]]:
        names = ["", *self.folders(context)]
        paths = {name: self.path + name + "/" if name else self.path for name in names}
        return {name: list(_walk(path, inside)) for name, path in paths.items()}

    def holds_only(self, inside: str, context: ts.Context) -> bool:
        return not self.foreign_files()  # which `inside` is not

    def remove(self, context: ts.Context) -> None:
        local_folders.remove(self.path)

    def remove_file(self, name: str, context: ts.Context) -> None:
        # Only if no folder between them is a symbolic link.
        top, between = os.path.realpath(self.path), os.path.dirname(name)
        above = os.path.join(top, between) if between else top
        if os.path.realpath(above) == above:
            with system_calls(), suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, name))

    def regular_files(self) -> RegularFiles:
        return RegularFiles(self.path)

    def foreign_files(self) -> list[str]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read: {error.strerror}") from error
        return sorted(
            n for n in names if not n.endswith(LOCK_SUFFIX) and n not in _OURS and n[0] != "."
        )

    @property
    def link(self) -> str | None:
        try:
            return os.readlink(self.path.rstrip("/"))
        except OSError:
            return None

    def unlink(self) -> None:
        path = self.path.rstrip("/")
        try:
            os.unlink(path)
        except OSError as error:
            why = f"{path}: the link cannot be removed: {error.strerror}"
            raise Failed(why, error.errno) from error

    def make(self, *, durable: bool = False) -> None:
        local_folders.make(self.path, durable=durable)

    def remove_empty(self) -> None:
        for name in ("processes", RETIRED, ""):
            folder = os.path.join(self.path, name)
            with suppress(OSError):
                if os.path.islink(folder.rstrip("/")):
                    break  # the target is not ours
                for entry in os.listdir(folder):
                    if entry.endswith(LOCK_SUFFIX):
                        os.unlink(os.path.join(folder, entry))
                os.rmdir(folder)

    def count_missing(self) -> int:
        return local_folders.count_missing(self.path)

    def remove_made(self, count: int) -> None:
        local_folders.remove_made(self.path, count)

    def sync(self, top: Location, made: int = 1) -> None:
        local_folders.sync(self.path, top.spec["path"], made)

    def room_text(self, error: Failed, needed: int, partial: str = "") -> str:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return ""
        with suppress(OSError):
            free = size_text(local_folders.free_bytes(self.path, partial))
            text = f"; this process has {size_text(needed)} to write, and {free} were free before"
            if error.errno == errno.EDQUOT:
                text += ", but the quota of this user or project is used up"
            return f"{text}. Remove what is not needed, or write to another disk"
        return ""

    @contextmanager
    def manifest_locked(self, timeout_s: float) -> Iterator[None]:
        # TensorStore's own lock file keeps the partial data of a killed process, and appends the
        # next process's data to it.
        with local_folders.locked(self.path, MANIFEST, timeout_s):
            with system_calls():
                for other in os.listdir(self.path):
                    if other.startswith(f"{MANIFEST}_") and other.endswith(LOCK_SUFFIX):
                        os.unlink(self.path + other)
            yield

    def file_lock(self, name: str) -> FileLock:
        return FileLock(self.path, name)

    def __str__(self) -> str:
        return self.path.rstrip("/")


def spec_of(path: str) -> dict[str, Any]:
    """The JSON of TensorStore's key-value store for a local path, of a folder or of a file.

    Raises:
        InvalidPath: it cannot be that of a folder.
    """
    absolute = "/" + os.path.abspath(os.path.expanduser(path)).strip("/")
    if "\\" in absolute or f"{LOCK_SUFFIX}/" in f"{absolute}/":
        raise InvalidPath(
            f"{path!r}: TensorStore accepts no '\\' in a path and no name that ends in "
            f"'{LOCK_SUFFIX}'"
        )
    try:
        absolute.encode()
    except UnicodeEncodeError:
        raise InvalidPath(f"{path!r} is not valid Unicode") from None
    existing = absolute
    while not _is_directory(existing, path, or_file=existing == absolute):
        existing = os.path.dirname(existing)
    return {"driver": "file", "path": absolute.rstrip("/") + "/"}


def _is_directory(existing: str, path: str, *, or_file: bool = False) -> bool:
    """Whether a directory exists; one system call, because another process may remove it."""
    try:
        mode = os.stat(existing).st_mode
        if stat.S_ISDIR(mode) or (or_file and stat.S_ISREG(mode)):
            return True
    except OSError as error:  # other errors show when the path is used
        if error.errno == errno.ENAMETOOLONG:
            raise InvalidPath(f"{path!r}: {error.strerror}; give a shorter one") from None
        if not os.path.islink(existing):
            return False
    where = repr(path) if existing == path else f"{path!r}: {existing!r}"
    raise InvalidPath(f"{where} is not a directory; a checkpoint needs its own directory")


def _walk(top: str, inside: str) -> Iterator[StoredFile]:
    """The files of a checkpoint's folder: those in it, and all that lie below its folder `inside`.

    Folders count, too: a file that was linked from an older checkpoint keeps its time, and the
    folder's is that of the link. If a checkpoint has a single folder in `inside`, which must be
    what it is made of, that folder stands for its files.

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


PathLike = str | os.PathLike[str]


def resolve(path: PathLike | Location, *, whole: bool = False, or_file: bool = False) -> Location:
    """Finds the storage that a path or URL names.

    Arguments:
        path: a local path, or a URL with a scheme of `schemes`: file, memory, s3, gs; or what was
            found for one.
        whole: also accept a whole bucket or memory://; a checkpoint needs a folder in it.
        or_file: also accept a file, as other systems' checkpoints may be.

    Raises:
        InvalidPath: for an empty path, an unknown scheme, or a malformed URL.
    """
    if isinstance(path, Location):
        return path
    text = _text(path)
    name, separator, _ = text.partition("://")
    if not separator:
        _check_slashes(text)
        spec = spec_of(text)
        local = LocalLocation(Path(spec["path"]).as_uri().rstrip("/") + "/", spec)
        return _checked(local, text, or_file)
    scheme = schemes.find(name)
    if scheme is None:
        raise InvalidPath(f"{text!r}: unknown scheme {name!r}; known are {_known()}{_meant(name)}")
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise InvalidPath(f"{text!r} is not a valid URL: {error}") from None
    if parts.query or parts.fragment:
        raise InvalidPath(f"{text!r}: a checkpoint's URL has no '?' or '#'")
    url = text if text.endswith("://") else text.rstrip("/") + "/"
    location = _checked(scheme.location(url, scheme.spec(text)), text, or_file)
    if not location.spec["path"] and not whole:
        raise InvalidPath(f"{text!r}: add the checkpoint's path, such as {url}run/1")
    return location


def absolute(path: PathLike, *, or_file: bool = False) -> str:
    """A path or URL that names the same storage after the program changes its working directory.

    Arguments, errors: as for `resolve`.
    """
    return str(resolve(path, or_file=or_file))


def _text(path: PathLike) -> str:
    try:
        text = os.fspath(path)
    except TypeError:
        raise InvalidPath(
            f"the path is of type {type(path).__name__}; pass the path first, as a str or a Path"
        ) from None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidPath(f"{path!r} is not a path; give a local path or a URL ({_known()})")
    return str.__str__(text)  # of a member of an enumeration of strings, its text


def _check_slashes(text: str) -> None:
    """Refuses a local path that was probably meant as a URL."""
    name, single, rest = text.partition(":/")
    if single and schemes.find(name) is not None:
        meant = f"{name}://{'/' if name.lower() == 'file' else ''}{rest}"
        raise InvalidPath(f"{text!r}: a URL has two slashes after its scheme: {meant}")


def _checked(location: Location, text: str, or_file: bool) -> Location:
    """A location that TensorStore accepts, and that is no file, unless it may be one."""
    try:
        ts.KvStore.Spec(dict(location.spec))
    except ValueError as error:
        raise InvalidPath(f"{text!r}: {error}") from None
    if isinstance(location, LocalLocation) and not or_file:
        _is_directory(location.path.rstrip("/") or "/", text)
    return location


def _meant(name: str) -> str:
    """Which scheme a storage has here that is called otherwise elsewhere."""
    own = {"gcs": "gs", "s3a": "s3", "s3n": "s3"}.get(name.lower())
    return f"; did you mean {own}://?" if own else ""


def _known() -> str:
    return ", ".join(f"{name}://" for name in schemes.names())


def context(*, fsync: bool = True) -> ts.Context:
    """A TensorStore context for one save or one opened checkpoint; all its databases share it."""
    constant, current = schemes.resources()
    resources = {
        "file_io_sync": fsync,
        "cache_pool": {"total_bytes_limit": 0},
        ocdbt.NODE_CACHE: {"total_bytes_limit": ocdbt.NODE_CACHE_BYTES},
        ocdbt.MANIFESTS: {},
        **constant,
    }
    for provide in current:
        resources |= provide()
    return ts.Context(resources, parent=root_context())


def is_durable(context: ts.Context) -> bool:
    """Whether what is written with a context is flushed to the disk."""
    return bool(context["file_io_sync"].to_json())


@cache
def root_context() -> ts.Context:
    """The parent of all contexts; TensorStore keeps memory:// in it."""
    context = ts.Context({"memory_key_value_store": {}})
    context["memory_key_value_store"]
    return context
