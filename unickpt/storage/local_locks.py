"""Locks in folders of a local file system."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from unickpt.storage.errors import Failed, LockHeld, system_calls
from unickpt.storage.local_files import check_regular
from unickpt.storage.local_folders import LOCK_SUFFIX, make
from unickpt.storage.ocdbt import MANIFEST

_log = logging.getLogger("unickpt")
_EXCLUSIVE_S = 60.0  # how long to wait for a lock file
_LOCK_PAUSE_S = 0.02
# Errors of `flock` on file systems without locks: some NFS mounts and FUSE file systems.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@contextmanager
def manifest_locked(path: str, timeout_s: float) -> Iterator[None]:
    """Lets one process at a time compare a folder's manifest with what it expects and replace it.

    TensorStore's own lock file keeps the partial data of a killed process, and appends the next
    process's data to it.
    """
    with locked(path, MANIFEST, timeout_s):
        with system_calls():
            for other in os.listdir(path):
                if other.startswith(f"{MANIFEST}_") and other.endswith(LOCK_SUFFIX):
                    os.unlink(os.path.join(path, other))  # partial data of a killed process
        yield


@contextmanager
def locked(path: str, what: str, timeout_s: float) -> Iterator[None]:
    """Lets one process at a time change something in a folder, for a moment; others wait.

    A lock of the operating system is released when its holder ends. If the file system has no
    locks, a lock file is used, and its creator removes it.

    Arguments:
        path: of the folder, which is made if needed.
        what: the name of what is changed.
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
        os.close(handle)


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
            holder = os.pread(handle, 4096, 0).decode(errors="replace")
            os.close(handle)
            raise LockHeld(self._name, holder) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(handle)
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
                held = any(_is_lock_of(line, facts) for line in locks)
        except OSError:
            return None
        return text if held else None

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
            os.close(self._handle)


def _text_of(name: str) -> tuple[os.stat_result, str]:
    """What a lock file says, and the facts of the file; never blocks."""
    handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        facts = os.fstat(handle)
        check_regular(facts, name)
        return facts, os.pread(handle, 4096, 0).decode(errors="replace")
    finally:
        os.close(handle)


def _is_lock_of(line: str, facts: os.stat_result) -> bool:
    """Whether a line of /proc/locks refers to a file: `1: FLOCK ADVISORY WRITE 123 08:01:456 0
    EOF`."""
    fields = line.split()
    return len(fields) > 5 and fields[5].rpartition(":")[2] == str(facts.st_ino)


def _forget_held() -> None:
    """Forgets held locks in a forked child, which would keep the locks of a dead parent."""
    for handle in _held:
        os.close(handle)
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
        os.close(handle)
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
                os.close(handle)
                raise LockHeld(name) from None
        except OSError as error:
            os.close(handle)
            if error.errno not in _NO_LOCKS:
                raise
            with suppress(FileNotFoundError):
                os.unlink(name)
            return None
        os.close(handle)
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
        with suppress(OSError):  # someone may have removed it and a third process created it
            if os.path.samestat(os.fstat(handle), os.stat(name)):
                os.unlink(name)
        os.close(handle)


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
