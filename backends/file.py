"""Local files: paths and file:// URLs, and operations on folders."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import socket
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import tensorstore as ts

from unickpt.backends import ocdbt
from unickpt.backends.kvstore import Damaged, Failed, Future, KvStore, asking_system
from unickpt.backends.nodes import MOST_MANIFEST_BYTES, Place
from unickpt.backends.ocdbt import MANIFEST
from unickpt.errors import InvalidPath, StorageError

_log = logging.getLogger("unickpt")
_LOCK = ".__lock"
_OURS = ("processes", "manifest.ocdbt")
_EXCLUSIVE = "manifest.ocdbt.exclusive" + _LOCK
_EXCLUSIVE_S = 60.0  # how long to wait for a lock file
_LOCK_PAUSE_S = 0.02
# Errors of `flock` on file systems without locks: some NFS mounts and FUSE file systems.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_HOLE_BYTES = 1 << 20
_PIECE_BYTES = 2 << 20  # measured: a verified load is 7 % faster than with whole chunks of 8 MiB


def spec_from_path(path: str) -> dict[str, Any]:
    absolute = "/" + os.path.abspath(os.path.expanduser(path)).strip("/")
    parts = absolute.split("/")
    if "\\" in absolute or any(part.endswith(_LOCK) for part in parts):
        raise InvalidPath(
            f"{path!r}: TensorStore accepts no '\\' in a path and no name that ends in '{_LOCK}'"
        )
    try:
        absolute.encode()
    except UnicodeEncodeError:
        raise InvalidPath(f"{path!r} is not valid Unicode") from None
    existing = absolute
    while not _is_directory(existing, path):
        existing = os.path.dirname(existing)
    return {"driver": "file", "path": absolute.rstrip("/") + "/"}


def _is_directory(existing: str, path: str) -> bool:
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


def spec_from_url(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InvalidPath(f"{url!r}: a file URL has three slashes and an absolute path")
    return spec_from_path(unquote(parts.path))


def url(path: str) -> str:
    return Path(path).as_uri().rstrip("/") + "/"


def foreign(path: str) -> list[str]:
    """Names in a folder that are not a checkpoint's; ignores hidden ones."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    return sorted(n for n in names if not n.endswith(_LOCK) and n not in _OURS and n[0] != ".")


def folders(path: str) -> list[str]:
    """Names of the folders in a folder; empty for a link, which may lead anywhere."""
    if os.path.islink(path.rstrip("/")) or not os.path.isdir(path):
        return []
    with asking_system(), os.scandir(path) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


def make(path: str) -> None:
    """Creates a folder and its parents.

    Raises:
        Failed: names the folder that cannot be created.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        name = str(error.filename or path).rstrip("/")
        above = os.path.dirname(name)
        raise Failed(
            f"cannot make the directory {name}: {error.strerror}. Save to a path "
            f"where directories can be made, or let this user write to {above}",
            error.errno,
        ) from error


def link(path: str) -> str | None:
    """The target of a symbolic link as written in it; None if the path is not a link."""
    try:
        return os.readlink(path.rstrip("/"))
    except OSError:
        return None


def files(path: str) -> list[str]:
    """Names of the files in a folder; links do not count."""
    if not os.path.isdir(path):
        return []
    with asking_system(), os.scandir(path) as entries:
        return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]


def links(path: str) -> list[str]:
    """Names of the symbolic links in a folder."""
    if not os.path.isdir(path):
        return []
    with asking_system(), os.scandir(path) as entries:
        return [entry.name for entry in entries if entry.is_symlink()]


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
        with asking_system(), suppress(FileNotFoundError):
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
                if entry.endswith(_LOCK):
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


class Files:
    """The regular files of one folder; never blocks on other kinds of files.

    An untrusted checkpoint may contain a FIFO, which blocks forever, or a link to a device or to a
    file elsewhere on this machine, whose bytes must not get into arrays. The folder itself may be a
    link or lie below one.

    Arguments:
        folder: ends with `/`.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._known: dict[str, tuple[int, int]] = {}

    @cached_property
    def _top(self) -> str:
        return os.path.realpath(self.folder).rstrip("/") + "/"

    def check(self, path: str) -> None:
        """Checks that TensorStore may open a file.

        Arguments:
            path: below the folder.

        Raises:
            Damaged: it is missing, or no regular file, or not in the folder.
            Failed: the storage failed.
        """
        self._known[path] = _identity(self._look(path))

    def _look(self, path: str) -> os.stat_result:
        at = self.folder + path
        with asking_system():
            # Without a link on the way, the path cannot lead out of the folder.
            real = os.path.realpath(at) if self._has_link(path) else None
            try:
                found = os.stat(at)
            except FileNotFoundError:
                raise Damaged(f"no file {at}") from None
        if real is not None and not real.startswith(self._top):
            raise Damaged(
                f"{at} is {real}, outside of the checkpoint's folder: a link may not lead out of it"
            )
        _check_regular(found, at)
        return found

    def _has_link(self, path: str) -> bool:
        """Whether a file below the folder, or a folder on the way to it, is a symbolic link."""
        at = self.folder.rstrip("/")
        for name in path.split("/"):
            at = f"{at}/{name}"
            if os.path.islink(at) or name == "..":
                return True
        return False

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """Opens a file of the folder for reading.

        Raises:
            Damaged: it is missing, or no regular file, or not in the folder.
            Failed: the storage failed.
        """
        if path not in self._known:
            self.check(path)
        at = self.folder + path
        with asking_system():
            try:
                handle = os.open(at, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                raise Damaged(f"no file {at}") from None
        try:
            found = os.fstat(handle)
            _check_regular(found, at)
            if _identity(found) != self._known[path]:
                self.check(path)
                if _identity(found) != self._known[path]:
                    raise Damaged(f"{at} changed while it was being opened")
            yield handle
        finally:
            os.close(handle)

    def read(self, place: Place) -> bytes:
        """The bytes at a place, for values that are read at once, such as nodes and the index.

        Raises:
            Damaged: some are missing.
            Failed: the storage failed.
        """
        with self.opened(place.path) as handle:
            size, end = os.fstat(handle).st_size, place.offset + place.length
            # A hole takes no space and reads as zeros, and valid bytes never have thousands of
            # zeros in a row. So gigabytes of zeros are refused before they take memory.
            if size < end or _has_hole(handle, place.offset, end):
                raise Damaged(
                    f"{self.folder + place.path} has no bytes {place.offset} to {end}: its size is "
                    f"{size}, or it has a hole"
                )
            parts, at = [], place.offset
            while at < end:
                with asking_system():
                    part = os.pread(handle, end - at, at)
                if not part:
                    raise Damaged(f"{self.folder + place.path} ends at byte {at}")
                parts.append(part)
                at += len(part)
        return b"".join(parts)

    def check_if_present(self, path: str) -> None:
        """Checks that TensorStore may read a file, which may be missing.

        Raises:
            Damaged: it is no regular file, or not in the folder, or a manifest larger than any
                valid one.
            Failed: the storage failed.
        """
        at = self.folder + path
        if not os.path.lexists(at):
            return
        try:
            size = self._look(path).st_size
        except Damaged:
            if os.path.lexists(at):
                raise
            return  # removed meanwhile
        if path == MANIFEST and size > MOST_MANIFEST_BYTES:
            raise Damaged(f"{at} has {size} bytes, too many for a manifest")


class Store(KvStore):
    """The key-value store of a local folder; reads only its regular files, as `Files`.

    Arguments:
        raw: TensorStore's.
        folder: ends with `/`.
    """

    def __init__(self, raw: ts.KvStore, folder: str) -> None:
        super().__init__(raw)
        self._folder = folder

    def read(self, key: str, **options: Any) -> Future[ts.KvStore.ReadResult]:
        Files(self._folder).check_if_present(key)
        return super().read(key, **options)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _check_regular(found: os.stat_result, at: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        kinds = {
            stat.S_IFIFO: "a FIFO",
            stat.S_IFSOCK: "a socket",
            stat.S_IFDIR: "a directory",
            stat.S_IFCHR: "a device",
            stat.S_IFBLK: "a device",
        }
        kind = kinds.get(stat.S_IFMT(found.st_mode), "something else")
        raise Damaged(f"{at} is {kind}, not a file")


def _has_hole(handle: int, start: int, end: int) -> bool:
    if end - start < _HOLE_BYTES or not hasattr(os, "SEEK_HOLE"):
        return False
    try:
        return os.lseek(handle, start, os.SEEK_HOLE) < end
    except OSError:  # the file system does not support it
        return False


class Values(ocdbt.Values):
    """The values of a database in a local folder, read directly into existing memory.

    TensorStore reads a value into new memory or maps it, and then copies it: two thirds of this
    speed, as measured; and if a mapped file is truncated, the process is killed.

    Arguments:
        store: the key-value store of the folder.
        files: the files of the folder.
        tree: the database's B-tree.
    """

    def __init__(self, store: KvStore, files: Files, tree: ocdbt.Tree) -> None:
        super().__init__(store, tree)
        self._files = files

    def _bytes(self, place: Place) -> bytes:
        return self._files.read(place)

    def _check_file(self, path: str) -> None:
        self._files.check(path)

    def read_into(
        self, key: str, out: memoryview, length: int, look: Callable[[memoryview], object]
    ) -> None:
        """Reads the first bytes of a value, as many as `out` takes.

        Arguments:
            key: of the value.
            out: contiguous bytes.
            length: of the value, in bytes.
            look: called with each piece that was read, while it is in the processor's cache.

        Raises:
            Damaged: the value is missing or incomplete, or the database is damaged.
            Failed: the storage failed.
        """
        found = self.tree.find(key)
        if found is None:
            raise Damaged(f"no bytes stored, {length} expected")
        if ocdbt.length_of(found) != length:
            raise Damaged(f"{ocdbt.length_of(found)} bytes stored, {length} expected")
        if isinstance(found, Place):
            self._read_into(found, out, look)
        else:
            out[:] = found[: len(out)]
            look(out)

    def _read_into(
        self, place: Place, out: memoryview, look: Callable[[memoryview], object]
    ) -> None:
        offset = place.offset
        with self._files.opened(place.path) as handle:
            while out:
                with asking_system():
                    count = os.preadv(handle, [out[:_PIECE_BYTES]], offset)
                if count == 0:
                    path = self._files.folder + place.path
                    raise Damaged(f"{path} ends at byte {offset}")
                look(out[:count])
                offset, out = offset + count, out[count:]


@contextmanager
def locked(path: str, timeout_s: float) -> Iterator[None]:
    """Lets one process at a time compare a folder's manifest with what it expects and replace it.

    TensorStore's own lock file keeps the partial data of a killed process, and appends the next
    process's data to it. A lock of the operating system is released when its holder ends. If the
    file system has no locks, a lock file is used, and its creator removes it.
    """
    name = os.path.join(path, "manifest.ocdbt" + _LOCK)
    make(path)
    with asking_system():
        handle = _acquire(name, timeout_s)
    if handle is None:
        with _exclusive(os.path.join(path, _EXCLUSIVE), timeout_s):
            yield
        return
    try:
        with asking_system():
            for other in os.listdir(path):
                if other.startswith("manifest.ocdbt_") and other.endswith(_LOCK):
                    os.unlink(os.path.join(path, other))  # partial data of a killed process
        yield
    finally:
        with suppress(OSError):
            os.unlink(name)
        os.close(handle)


_held: set[int] = set()


class Hold:
    """A lock in a folder, kept until `release`, or until the process ends.

    Arguments:
        path: of the folder, which is created if needed.
        name: of the lock file.
        text: for processes that do not get the lock.

    Raises:
        BlockingIOError: this or another process holds it; the message is the holder's text.
        Failed: the storage failed.
    """

    def __init__(self, path: str, name: str, text: str) -> None:
        make(path)
        self._name = os.path.join(path, name)
        with asking_system():
            self._handle = _open_lock(self._name)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = os.pread(self._handle, 4096, 0).decode(errors="replace")
            os.close(self._handle)
            raise BlockingIOError(said) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(self._handle)
                raise Failed(f"{self._name}: {error}", error.errno) from error
            message = (
                f"{path}: this file system has no locks ({error.strerror}), so nothing stops a "
                "second job from saving into this folder and mixing its steps with these. Make "
                "sure that no other job does"
            )
            _log.warning("%s", message)
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        _held.add(self._handle)
        with suppress(OSError):  # on a full disk the text is missing, but not the lock
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, text.encode(), 0)

    @staticmethod
    def said(path: str, name: str) -> str | None:
        """The text of a lock's holder; None if no process on this machine holds it.

        Does not try to take the lock, which could make another process fail to get it.
        """
        try:
            facts, text = _text_of(os.path.join(path, name))
            with open("/proc/locks", encoding="ascii") as locks:
                held = any(_is_lock_of(line, facts) for line in locks)
        except OSError:
            return None
        return text if held else None

    def is_valid(self) -> bool:
        """Whether the locked file is still the one in the folder."""
        with asking_system():
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
        _check_regular(facts, name)
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
        StorageError: it is a link, which may lead to any file, or not a regular file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        handle = os.open(name, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise StorageError(f"{name} is not a regular file; remove it") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise StorageError(f"{name} is not a regular file; remove it")
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
                raise StorageError(f"{name}: another process holds this lock") from None
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
        StorageError: another process has held it for too long; names that process.
    """
    with asking_system():
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
                raise StorageError(_why_held(name)) from None
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


def sync(path: str, top: str) -> None:
    """Syncs the entries of a folder and of each parent up to the one that contains `top`;
    TensorStore does so only for the folder of a file."""
    end = os.path.dirname(top.rstrip("/"))
    at = path.rstrip("/")
    while len(at) >= len(end):
        if os.path.isdir(at):
            with asking_system():
                handle = os.open(at, os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
        if at == end:
            break
        at = os.path.dirname(at)
