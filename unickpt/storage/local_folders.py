"""Operations on folders of a local file system."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

from unickpt.errors import InvalidPath, StorageError
from unickpt.storage.errors import Failed, MissingFolder, system_calls
from unickpt.storage.ocdbt import MANIFEST
from unickpt.storage.stored_files import StoredFile

LOCK_SUFFIX = ".__lock"
_OURS = ("processes", MANIFEST)
_TIMES_PARENTS_MAY_VANISH = 100
_HERE, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD, and a flag of renameat2


def is_directory(existing: str, path: str) -> bool:
    """Whether a directory exists; one system call, because another process may remove it."""
    try:
        if stat.S_ISDIR(os.stat(existing).st_mode):
            return True
    except OSError as error:  # other errors show when the path is used
        if error.errno == errno.ENAMETOOLONG:
            raise InvalidPath(f"{path!r}: {error.strerror}; give a shorter one") from None
        if not os.path.islink(existing):
            return False
    where = repr(path) if existing == path else f"{path!r}: {existing!r}"
    raise InvalidPath(f"{where} is not a directory; a checkpoint needs its own directory")


def foreign(path: str) -> list[str]:
    """Names in a folder that are not a checkpoint's; ignores hidden ones."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    return sorted(
        n for n in names if not n.endswith(LOCK_SUFFIX) and n not in _OURS and n[0] != "."
    )


def folders(path: str) -> list[str]:
    """Names of the folders in a folder; empty for a link, which may lead anywhere."""
    if os.path.islink(path.rstrip("/")):
        return []
    return [entry.name for entry in _entries(path) if entry.is_dir(follow_symlinks=False)]


def _entries(path: str) -> list[os.DirEntry[str]]:
    """All that is in a folder; nothing if it is not there, or just went, or is no folder."""
    if os.path.isdir(path):
        gone = suppress(FileNotFoundError, NotADirectoryError)
        with system_calls(), gone, os.scandir(path) as entries:
            return list(entries)
    return []


def make(path: str, *, durable: bool = False) -> None:
    """Creates a folder and its parents.

    Arguments:
        path: of the folder.
        durable: whether their names must be on the disk.

    Raises:
        Failed: names the folder that cannot be created.
    """
    missing = count_missing(path) if durable else 0
    try:
        _make(path)
    except OSError as error:
        name = str(error.filename or path).rstrip("/")
        above = os.path.dirname(name)
        raise Failed(
            f"cannot make the directory {name}: {error.strerror}. Save to a path "
            f"where directories can be made, or let this user write to {above}",
            error.errno,
        ) from error
    if missing:
        above = os.path.dirname(path.rstrip("/"))
        sync(above, path, missing)


def _make(path: str) -> None:
    for _ in range(_TIMES_PARENTS_MAY_VANISH):
        try:
            return os.makedirs(path, exist_ok=True)
        except FileNotFoundError:  # a failed save beside this one removed the empty parents again
            continue
    return os.makedirs(path, exist_ok=True)


def link(path: str) -> str | None:
    """The target of a symbolic link as written in it; None if the path is not a link."""
    try:
        return os.readlink(path.rstrip("/"))
    except OSError:
        return None


def names(path: str) -> list[str]:
    """Names of all that is in a folder; empty if it cannot be listed."""
    try:
        return os.listdir(path)
    except OSError:
        return []


def folders_with(file: str, path: str) -> list[str]:
    """Names of the folders in a folder that hold a file of this name; "." for itself.

    Raises:
        MissingFolder: the folder does not exist.
        Failed: it cannot be listed.
    """

    def has_it(folder: str) -> bool:
        return os.path.lexists(os.path.join(folder, file))

    found = ["."] if has_it(path) else []
    try:
        with system_calls(), os.scandir(path) as entries:
            return found + [e.name for e in entries if e.is_dir() and has_it(e.path)]
    except Failed as error:
        if error.errno == errno.ENOENT:
            raise MissingFolder(error.reason, error.errno) from error
        raise


def walk(top: str, inside: str) -> Iterator[StoredFile]:
    """The files of a checkpoint's folder: those in it, and all that lie below its folder `inside`.

    Folders count, too: a file that was linked from an older checkpoint keeps its time, and the
    folder's is that of the link. If a checkpoint has a single folder in `inside`, which must be
    what it is made of, that folder stands for its files.

    Arguments:
        top: of the checkpoint; ends with `/`.
        inside: name of the folder.
    """
    now = time.time()
    single = len(names(os.path.join(top, inside))) == 1 and os.path.isfile(top + MANIFEST)
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


def walk_all(top: str) -> Iterator[StoredFile]:
    """A folder, or a file, and all below it; not through links."""
    now = time.time()
    for folder, _, names in os.walk(top):
        for name in ["", *names]:
            at = os.path.join(folder, name)
            with suppress(OSError):
                facts = os.lstat(at)
                yield StoredFile(at, facts.st_size if name else 0, max(0.0, now - facts.st_mtime))


def files(path: str) -> list[str]:
    """Names of the files in a folder; links do not count."""
    return [entry.name for entry in _entries(path) if entry.is_file(follow_symlinks=False)]


def links(path: str) -> list[str]:
    """Names of the symbolic links in a folder."""
    return [entry.name for entry in _entries(path) if entry.is_symlink()]


def unlink(path: str) -> None:
    """Removes a symbolic link, not its target.

    Raises:
        Failed: it cannot be removed.
    """
    try:
        os.unlink(path.rstrip("/"))
    except OSError as error:
        why = f"{path.rstrip('/')}: the link cannot be removed: {error.strerror}"
        raise Failed(why, error.errno) from error


def remove(path: str) -> None:
    """Removes a folder and everything below it, without following links."""
    shutil.rmtree(path.rstrip("/"), ignore_errors=True)


def remove_file(folder: str, name: str) -> None:
    """Removes a file below a folder, if no folder between them is a symbolic link."""
    top, between = os.path.realpath(folder), os.path.dirname(name)
    above = os.path.join(top, between) if between else top
    if os.path.realpath(above) == above:
        with system_calls(), suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))


def exists(path: str) -> bool:
    return os.path.isdir(path)


def remove_empty(path: str) -> None:
    """Removes a checkpoint's folders that contain only lock files."""
    for name in ("processes", ""):
        folder = os.path.join(path, name)
        with suppress(OSError):
            if os.path.islink(folder.rstrip("/")):
                break  # the target is not ours
            for entry in os.listdir(folder):
                if entry.endswith(LOCK_SUFFIX):
                    os.unlink(os.path.join(folder, entry))
            os.rmdir(folder)


def count_missing(path: str) -> int:
    """The number of folders to create for this one to exist, including itself."""
    at, count = path.rstrip("/"), 0
    while at and not os.path.lexists(at):
        at, count = os.path.dirname(at), count + 1
    return count


def remove_made(path: str, count: int) -> None:
    """Removes the folders that a failed save created, if empty: the checkpoint's and its parents.

    Arguments:
        path: of the checkpoint.
        count: the number of folders created for it, from `count_missing`.
    """
    at = path.rstrip("/")
    with suppress(OSError):
        os.rmdir(os.path.join(at, "processes"))
    with suppress(OSError):
        for _ in range(count):
            os.rmdir(at)
            at = os.path.dirname(at)


def exchange(one: str, other: str) -> bool:
    """Exchanges two names at once; False if this system or file system cannot.

    Raises:
        Failed: it can, and did not.
    """
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    with system_calls():
        raise OSError(number, os.strerror(number), other)


def sync_folder(path: str) -> None:
    """Syncs the entries of a folder. Raises Failed."""
    with system_calls():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync(path: str, top: str, made: int = 1) -> None:
    """Syncs the entries of a folder and of each parent up to the one that contains `top`;
    TensorStore does so only for the folder of a file.

    Arguments:
        path: of the folder.
        top: a folder above it, or the same.
        made: how many folders, from `top` upwards, are new; the name of each is in the next one.
    """
    end = os.path.dirname(top.rstrip("/"))
    for _ in range(made - 1):
        end = os.path.dirname(end)
    at = path.rstrip("/")
    while len(at) >= len(end):
        if os.path.isdir(at):
            sync_folder(at)
        if at == end:
            break
        at = os.path.dirname(at)
