"""Folders of a local file system, and locks on files in them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import shutil
import socket
import stat
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from unickpt.storage.errors import Failed, LockHeld
from unickpt.storage.regular_files import check_regular, close_quietly, closing, system_calls

LOCK_SUFFIX = ".__lock"
_TIMES_PARENTS_MAY_VANISH = 100
_HERE, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD, and a flag of renameat2


class StoredFile(NamedTuple):
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
        # Another failed save may remove the empty parents again.
        with suppress(FileNotFoundError):
            return os.makedirs(path, exist_ok=True)
    return os.makedirs(path, exist_ok=True)


def names(path: str) -> list[str]:
    """Names of all entries of a folder; empty if it cannot be listed."""
    try:
        return os.listdir(path)
    except OSError:
        return []


def walk_all(top: str) -> Iterator[StoredFile]:
    """A folder, or a file, and all below it; not through links."""
    now = time.time()
    for folder, _, names in os.walk(top):
        for name in ["", *names]:
            path = os.path.join(folder, name)
            with suppress(OSError):
                facts = os.lstat(path)
                yield StoredFile(path, facts.st_size if name else 0, max(0.0, now - facts.st_mtime))


def entries(path: str) -> list[os.DirEntry[str]]:
    """All entries of a folder; none if it does not exist, was just removed, or is no folder. Raises
    Failed."""
    if os.path.isdir(path):
        gone = suppress(FileNotFoundError, NotADirectoryError)
        with system_calls(), gone, os.scandir(path) as listing:
            return list(listing)
    return []


def unlink(path: str) -> None:
    """Removes a folder that is a symbolic link, but not its target. Raises Failed."""
    path = path.rstrip("/")
    try:
        os.unlink(path)
    except OSError as error:
        why = f"{path}: the link cannot be removed: {error.strerror}"
        raise Failed(why, error.errno) from error


def remove(path: str) -> None:
    """Removes a folder and everything below it, without following links."""
    shutil.rmtree(path.rstrip("/"), ignore_errors=True)


def count_missing(path: str) -> int:
    """The number of folders to create for this one to exist, including itself."""
    folder, count = path.rstrip("/"), 0
    while folder and not os.path.lexists(folder):
        folder, count = os.path.dirname(folder), count + 1
    return count


def remove_made(path: str, count: int) -> None:
    """Removes the folders that a failed save created, if empty: the checkpoint's and its parents.

    Arguments:
        path: of the checkpoint.
        count: the number of folders created for it, from `count_missing`.
    """
    folder = path.rstrip("/")
    with suppress(OSError):
        os.rmdir(os.path.join(folder, "processes"))
    with suppress(OSError):
        for _ in range(count):
            os.rmdir(folder)
            folder = os.path.dirname(folder)


def free_bytes(path: str, partial: str) -> int:
    """The bytes that are free for this user in the file system of a folder after another folder in
    it is removed.

    Arguments:
        path: of the folder, which need not exist.
        partial: the path of the other one; empty for none.

    Raises:
        OSError: the file system does not report it.
    """
    folder = path.rstrip("/")
    while not os.path.isdir(folder) and folder not in ("", "/"):
        folder = os.path.dirname(folder)
    facts = os.statvfs(folder or "/")
    written = 0
    for above, _, names in os.walk(partial) if partial else ():
        for name in names:
            with suppress(OSError):
                file = os.lstat(os.path.join(above, name))
                written += file.st_blocks * 512 if file.st_nlink == 1 else 0
    return facts.f_bavail * facts.f_frsize + written


def exchange(first: str, second: str) -> bool:
    """Exchanges two names at once; False if this system or file system cannot.

    Raises:
        Failed: it can, but failed.
    """
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(first), _HERE, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    with system_calls():
        raise OSError(number, os.strerror(number), second)


def sync_folder(path: str) -> None:
    """Syncs the entries of a folder. Raises Failed."""
    with system_calls():
        handle = os.open(path, os.O_RDONLY)
    with closing(handle, path), system_calls("flush the folder", path):
        os.fsync(handle)


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
    folder = path.rstrip("/")
    while len(folder) >= len(end):
        if os.path.isdir(folder):
            sync_folder(folder)
        if folder == end:
            break
        folder = os.path.dirname(folder)


_log = logging.getLogger("unickpt")
_EXCLUSIVE_S = 60.0  # how long to wait for a lock file
_LOCK_PAUSE_S = 0.02
# Errors of `flock` on file systems without locks: some NFS mounts and FUSE file systems.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@contextmanager
def locked(path: str, what: str, timeout_s: float) -> Iterator[None]:
    """Lets one process at a time change a folder for a moment; others wait.

    A lock of the operating system is released when its holder ends. If the file system has no
    locks, a lock file is used, and its creator removes it.

    Arguments:
        path: of the folder, which is made if needed.
        what: the name of the entry to change.
        timeout_s: how long to wait for others.

    Raises:
        Failed: it took too long, or the storage failed.
    """
    name = os.path.join(path, what + LOCK_SUFFIX)
    make(path)
    with system_calls():
        handle = _acquire(name, timeout_s)
    if handle is None:
        with _exclusive(os.path.join(path, f"{what}.exclusive{LOCK_SUFFIX}"), timeout_s):
            yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(name)
        close_quietly(handle)


_held: set[int] = set()


class FileLock:
    """A lock on a file in a folder, by the operating system; kept until the process ends.

    Arguments:
        folder: its path.
        name: of the lock file.
    """

    def __init__(self, folder: str, name: str) -> None:
        self._folder, self._name = folder, os.path.join(folder, name)
        self._handle = -1

    def acquire(self, text: str) -> None:
        """Takes the lock at once; creates the folder if needed.

        Arguments:
            text: for processes that do not get the lock.

        Raises:
            LockHeld: this or another process holds it; has the holder's text.
            Failed: the storage failed.
        """
        make(self._folder, durable=True)
        with system_calls():
            handle = _open_lock(self._name)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = ""
            with suppress(OSError):  # rclone reads no file that is open for writing
                holder = os.pread(handle, 4096, 0).decode(errors="replace")
            close_quietly(handle)
            raise LockHeld(self._name, holder) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                close_quietly(handle)
                raise Failed(f"{self._name}: {error}", error.errno) from error
            self._warn(error)
        self._handle = handle
        _held.add(handle)
        with suppress(OSError):  # on a full disk the text is missing, but not the lock
            os.ftruncate(handle, 0)
            os.pwrite(handle, text.encode(), 0)

    def _warn(self, error: OSError) -> None:
        message = (
            f"{self._folder}: this file system has no locks ({error.strerror}), so nothing stops a "
            "second job from saving into this folder and mixing its steps with these. Make "
            "sure that no other job does"
        )
        _log.warning("%s", message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)

    def holder(self) -> str | None:
        """The text of the lock's holder; None if no process on this machine holds it.

        Does not try to take the lock, which could make another process fail to get it.
        """
        try:
            facts, text = _text_of(self._name)
            with open("/proc/locks", encoding="ascii") as locks:
                is_held = any(_is_lock_of(line, facts) for line in locks)
        except OSError:
            return None
        return text if is_held else None

    def is_valid(self) -> bool:
        """Whether the locked file is still the one in the folder."""
        with system_calls():
            try:
                return os.path.samestat(os.fstat(self._handle), os.stat(self._name))
            except FileNotFoundError:
                return False

    def release(self) -> None:
        if self._handle in _held:
            _held.discard(self._handle)
            close_quietly(self._handle)


def _text_of(name: str) -> tuple[os.stat_result, str]:
    """The text of a lock file, and the facts of the file; never blocks."""
    handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        facts = os.fstat(handle)
        check_regular(facts, name)
        return facts, os.pread(handle, 4096, 0).decode(errors="replace")
    finally:
        close_quietly(handle)


def _is_lock_of(line: str, facts: os.stat_result) -> bool:
    """Whether a line of /proc/locks refers to a file: `1: FLOCK ADVISORY WRITE 123 08:01:456 0
    EOF`."""
    fields = line.split()
    return len(fields) > 5 and fields[5].rpartition(":")[2] == str(facts.st_ino)


def _forget_held() -> None:
    """Drops held locks in a forked child, which would else keep the locks of a dead parent."""
    for handle in _held:
        close_quietly(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_held)


def _open_lock(name: str) -> int:
    """Opens a lock file, and creates it if needed.

    Raises:
        Failed: it is a link, which may lead to any file, or not a regular file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        handle = os.open(name, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise Failed(f"{name} is not a regular file; remove it") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        close_quietly(handle)
        raise Failed(f"{name} is not a regular file; remove it")
    return handle


def _acquire(name: str, timeout_s: float) -> int | None:
    """A handle of the locked file; None if the file system has no locks."""
    deadline = time.monotonic() + timeout_s
    while True:
        handle = _open_lock(name)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(name)):
                    return handle
        except BlockingIOError:
            if time.monotonic() > deadline:
                close_quietly(handle)
                raise LockHeld(name) from None
        except OSError as error:
            close_quietly(handle)
            if error.errno not in _NO_LOCKS:
                raise
            with suppress(FileNotFoundError):
                os.unlink(name)
            return None
        close_quietly(handle)
        time.sleep(_LOCK_PAUSE_S)


@contextmanager
def _exclusive(name: str, timeout_s: float) -> Iterator[None]:
    """A lock by the existence of a file, which a killed process leaves behind.

    Raises:
        Failed: another process has held it for too long; names that process.
    """
    with system_calls():
        handle = _make_exclusively(name, timeout_s)
    who = f"process {os.getpid()} on {socket.gethostname()}"
    try:
        with suppress(OSError):  # on a full disk the text is missing, but not the lock
            os.pwrite(handle, who.encode(), 0)
        yield
    finally:
        with suppress(OSError):  # it may have been removed, and created by a third process
            if os.path.samestat(os.fstat(handle), os.stat(name)):
                os.unlink(name)
        close_quietly(handle)


def _make_exclusively(name: str, timeout_s: float) -> int:
    deadline = time.monotonic() + min(timeout_s, _EXCLUSIVE_S)
    while True:
        try:
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            if time.monotonic() > deadline:
                raise Failed(_why_held(name)) from None
        time.sleep(_LOCK_PAUSE_S)


def _why_held(name: str) -> str:
    who, age = "another process", 0.0
    with suppress(OSError):
        age = time.time() - os.stat(name).st_mtime
        who = _text_of(name)[1][:200] or who
    return (
        f"{name}: this file system has no locks (flock), so this file is the lock on the "
        f"checkpoint, and {who} has held it for {age:.0f} s. A commit takes less than a second. If "
        "that process no longer runs, delete the file and save again; else wait for it"
    )
