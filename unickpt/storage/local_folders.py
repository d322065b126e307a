"""Operations on folders of a local file system."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from unickpt.storage.errors import Failed, system_calls

LOCK_SUFFIX = ".__lock"
_TIMES_PARENTS_MAY_VANISH = 100
_HERE, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD, and a flag of renameat2


@dataclass(frozen=True)
class StoredFile:
    """A file or object.

    Arguments:
        name: below the folder that was listed. It ends in `/` for a folder that is empty or whose
            files were not needed, and in `?` for anything that is no file: a link, a FIFO, a folder
            that was not listed, an unreadable entry.
        nbytes: its size; None if the listing does not say.
        age_s: seconds since it was written; None if the listing does not say.
    """

    name: str
    nbytes: int | None = None
    age_s: float | None = None


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


def names(path: str) -> list[str]:
    """Names of all that is in a folder; empty if it cannot be listed."""
    try:
        return os.listdir(path)
    except OSError:
        return []


def walk_all(top: str) -> Iterator[StoredFile]:
    """A folder, or a file, and all below it; not through links."""
    now = time.time()
    for folder, _, names in os.walk(top):
        for name in ["", *names]:
            at = os.path.join(folder, name)
            with suppress(OSError):
                facts = os.lstat(at)
                yield StoredFile(at, facts.st_size if name else 0, max(0.0, now - facts.st_mtime))


def remove(path: str) -> None:
    """Removes a folder and everything below it, without following links."""
    shutil.rmtree(path.rstrip("/"), ignore_errors=True)


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
