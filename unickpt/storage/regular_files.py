"""Reading untrusted files of a local folder: only regular ones, only inside it, without holes."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import tensorstore as ts

from unickpt.quoting import quoted
from unickpt.storage.btree.nodes import MOST_MANIFEST_BYTES, DataReference
from unickpt.storage.errors import Damaged, Failed
from unickpt.storage.ocdbt import MANIFEST
from unickpt.storage.tensorstore_calls import Future, KvStore

_HOLE_BYTES = 1 << 20


class RegularFiles:
    """The regular files of one folder; never blocks on other kinds of files.

    An untrusted checkpoint may contain a FIFO, which blocks forever, or a link to a device or to a
    file elsewhere on this machine, whose bytes must not get into arrays. So no link on the way to a
    file may lead out of the folder.

    The folder itself may be a link or lie below one. In a cache of Hugging Face, files of
    `<repository>/snapshots/<revision>` are links to `<repository>/blobs`, which belongs to it.

    Arguments:
        folder: ends with `/`.
        trusted: a file that may be a link to anywhere.
    """

    def __init__(self, folder: str, trusted: str | None = None) -> None:
        self.folder, self._trusted = folder, trusted
        self._known: dict[str, tuple[int, int]] = {}
        # Folders without a link on the way, as they were when checked: few folders hold many files.
        self._no_links: dict[str, tuple[int, int]] = {}

    @cached_property
    def _tops(self) -> tuple[str, ...]:
        top = os.path.realpath(self.folder).rstrip("/") + "/"
        repository, snapshots, _ = top.rpartition("/snapshots/")
        return (top, f"{repository}/blobs/") if snapshots else (top,)

    def check_inside(self, path: str) -> None:
        """Checks a file, which need not exist.

        Arguments:
            path: below the folder.

        Raises:
            Damaged: it lies elsewhere, or no file can have this path.
            Failed: the storage failed.
        """
        try:
            is_possible = b"\0" not in os.fsencode(path)
        except UnicodeEncodeError:
            is_possible = False
        if not is_possible:
            raise Damaged(f"no file can be called {quoted(path)}", errno.ENOENT)
        if path == self._trusted:
            return
        full_path = self.folder + path
        try:
            # Without a link on the way, the path cannot lead out of the folder.
            if not self._has_link(path):
                return
            real = os.path.realpath(full_path)
        except OSError as error:
            raise failure(error) from error
        if not real.startswith(self._tops):
            raise Damaged(
                f"{full_path} is {real}, outside of the checkpoint's folder: a link may not lead "
                "out of it. If you trust it, replace the link by the file (cp -L), or give the "
                "path of the file itself"
            )

    def _has_link(self, path: str) -> bool:
        """Whether a file below the folder, or a folder on the way to it, is a symbolic link."""
        is_link = path.rpartition("/")[2] == ".." or os.path.islink(self.folder + path)
        return is_link or self._has_link_above(path)

    def _has_link_above(self, path: str) -> bool:
        """Whether a folder on the way to a file is a symbolic link."""
        folder = path.rpartition("/")[0]
        try:
            identity = _identity(os.stat(self.folder + folder))
        except OSError:
            identity = None
        if identity is None or self._no_links.get(folder) != identity:
            ancestor = self.folder.rstrip("/")
            for component in folder.split("/"):
                ancestor = f"{ancestor}/{component}"
                if os.path.islink(ancestor) or component == "..":
                    return True
            if identity is not None:
                self._no_links[folder] = identity
        return False

    def check(self, path: str) -> None:
        """Checks that TensorStore may open a file.

        Arguments:
            path: below the folder.

        Raises:
            Damaged: it is missing, or no regular file, or not in the folder.
            Failed: the storage failed.
        """
        self._known[path] = _identity(self._look(path))

    def size(self, path: str) -> int:
        """The size of a file in bytes. Raises as `check`."""
        facts = self._look(path)
        self._known[path] = _identity(facts)
        return facts.st_size

    def link(self, path: str, destination: str, *, fsync: bool) -> bool:
        """Gives a file of the folder a second name as a hard link.

        Arguments:
            path: below the folder.
            destination: the path of the new name, in an existing folder.
            fsync: whether to flush the file's data to disk; the caller flushes the new name.

        Returns:
            Whether it succeeded; False if the file is gone, or the file system or its rules prevent
            it.
        """
        try:
            if path not in self._known:
                self.check(path)
            expected, source = self._known[path], self.folder + path
            os.link(os.path.realpath(source) if os.path.islink(source) else source, destination)
        except (OSError, Failed):
            return False
        with suppress(OSError, Failed):
            if _identity(os.lstat(destination)) == expected:  # else it was exchanged meanwhile
                if fsync:
                    _flush(destination)
                return True
        with suppress(OSError):
            os.unlink(destination)
        return False

    def _look(self, path: str) -> os.stat_result:
        full_path = self.folder + path
        self.check_inside(path)
        try:
            facts = os.stat(full_path)
        except (FileNotFoundError, NotADirectoryError):
            raise Damaged(f"no file {full_path}", errno.ENOENT) from None
        except OSError as error:
            raise failure(error) from error
        check_regular(facts, full_path)
        return facts

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """Opens a file of the folder for reading.

        Raises:
            Damaged: it is missing, or no regular file, or not in the folder.
            Failed: the storage failed.
        """
        if path not in self._known:
            self.check(path)
        opened = _kept.get(self._known[path], partial(self._open, path))  # open while this is here
        yield opened.handle

    def _open(self, path: str) -> _OpenFile:
        full_path = self.folder + path
        opened = _OpenFile(open_to_read(full_path))
        try:
            facts = os.fstat(opened.handle)
        except OSError as error:
            raise failure(error) from error
        check_regular(facts, full_path)
        if _identity(facts) != self._known[path]:
            self.check(path)
            if _identity(facts) != self._known[path]:
                raise Damaged(f"{full_path} changed while it was being opened")
        return opened

    def read(self, reference: DataReference, may_be_sparse: bool = False) -> bytes:
        """The bytes of a reference; for data that is read at once, such as nodes and the index.

        Arguments:
            reference: to the bytes.
            may_be_sparse: whether they may have a hole, as zeros have on some file systems.

        Raises:
            Damaged: some are missing.
            Failed: the storage failed.
        """
        full_path, offset = self.folder + reference.path, reference.offset
        end, parts = offset + reference.length, list[bytes]()
        with self.opened(reference.path) as handle, system_calls("read", full_path):
            size = os.fstat(handle).st_size
            # A hole takes no space and reads as zeros, and valid nodes never have thousands of
            # zeros in a row. So gigabytes of zeros are refused before they take memory.
            is_short = reference.length < _HOLE_BYTES
            if size < end or not (is_short or may_be_sparse or _has_no_hole(handle, offset, end)):
                raise Damaged(
                    f"{full_path} has no bytes {offset} to {end}: its size is {size}, or it has "
                    "a hole"
                )
            while offset < end:
                parts.append(os.pread(handle, end - offset, offset))
                if not parts[-1]:
                    raise Damaged(f"{full_path} ends at byte {offset}")
                offset += len(parts[-1])
        return b"".join(parts)

    def read_manifest(self) -> tuple[bytes, bytes] | None:
        """The manifest in the folder, and an identifier of its version; None if there is none.
        Raises as `check_if_present`.
        """
        self.check_if_present(MANIFEST)
        try:
            handle = open_to_read(self.folder + MANIFEST)
        except Damaged:
            return None
        with open(handle, "rb") as file, system_calls("read", self.folder + MANIFEST):
            facts = os.fstat(handle)
            version = f"{facts.st_dev} {facts.st_ino} {facts.st_mtime_ns}"
            return file.read(MOST_MANIFEST_BYTES + 1), version.encode()

    def check_if_present(self, path: str) -> None:
        """Checks that TensorStore may read a file, which may be missing.

        Raises:
            Damaged: it is no regular file, or not in the folder, or a manifest larger than any
                valid one.
            Failed: the storage failed.
        """
        full_path = self.folder + path
        try:
            facts = os.lstat(full_path)
        except (OSError, ValueError):
            return
        try:
            if not stat.S_ISREG(facts.st_mode) or self._has_link_above(path):
                facts = self._look(path)
        except Damaged:
            if os.path.lexists(full_path):
                raise
            return  # removed meanwhile
        if path == MANIFEST and facts.st_size > MOST_MANIFEST_BYTES:
            raise Damaged(f"{full_path} has {facts.st_size} bytes, too many for a manifest")


class _OpenFile:
    """A file descriptor, closed after its last use."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.handle)


_MOST_KEPT = 32  # of the file descriptors that a process may have, often 1,024


class _KeptFiles:
    """The most recently opened files, by identity: while a file is open, no other one gets its
    inode."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._files: OrderedDict[tuple[int, int], _OpenFile] = OrderedDict()
        self._opening: dict[tuple[int, int], threading.Lock] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._files.clear()

    def get(self, identity: tuple[int, int], open: Callable[[], _OpenFile]) -> _OpenFile:
        """The file, which one of the threads that need it opens if it is not open."""
        with self._lock:
            file = self._files.get(identity)
            if file is not None:
                self._files.move_to_end(identity)
                return file
            opening = self._opening.setdefault(identity, threading.Lock())
        with opening:
            with self._lock:
                file = self._files.get(identity)
            if file is not None:
                return file
            try:
                file = open()
                self._keep(identity, file)
            finally:
                with self._lock:
                    self._opening.pop(identity, None)
        return file

    def _keep(self, identity: tuple[int, int], opened: _OpenFile) -> None:
        with self._lock:
            if self._users:
                self._files[identity] = opened
                if len(self._files) > _MOST_KEPT:
                    self._files.popitem(last=False)


_kept = _KeptFiles()


def _forget_kept() -> None:
    """Resets the cache after a fork: the other threads, and what they held, are gone."""
    global _kept
    _kept = _KeptFiles()


os.register_at_fork(after_in_child=_forget_kept)


def files_kept_open() -> AbstractContextManager[None]:
    """Keeps files open that are read within the block, for reading many values of few files.

    Opening a file needs the GIL, for which threads wait, and on the file system of a cluster its
    metadata server, which all processes share.
    """
    return _kept.used()


class LocalKvStore(KvStore):
    """The key-value store of a local folder; reads only regular files.

    Arguments:
        raw: TensorStore's.
    """

    files: RegularFiles
    """The files of the folder."""

    def read(self, key: str, **options: Any) -> Future[ts.KvStore.ReadResult]:
        self.files.check_if_present(key)
        return super().read(key, **options)


_identity = attrgetter("st_dev", "st_ino")  # of a result of `os.stat`


# For data that are already on the disk, fsync would also write the new count of links, at once.
_flush_data = getattr(os, "fdatasync", os.fsync)


def _flush(path: str) -> None:
    handle = open_to_read(path)
    with closing(handle, path), system_calls("flush", path):
        _flush_data(handle)


def open_to_read(path: str) -> int:
    """Opens a file that must be there, of any kind: waits for no writer of a FIFO.

    Raises:
        Damaged: it is missing, as its `errno` shows.
        Failed: the storage failed.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(f"no file {path}", errno.ENOENT) from None
    except OSError as error:
        raise failure(error) from error


def check_regular(facts: os.stat_result, path: str) -> None:
    """Checks that a path leads to a regular file.

    Raises:
        Damaged: it does not; says what it is instead.
    """
    if not stat.S_ISREG(facts.st_mode):
        kinds = {
            "p": "a FIFO",
            "s": "a socket",
            "d": "a directory",
            "c": "a device",
            "b": "a device",
        }
        kind = kinds.get(stat.filemode(facts.st_mode)[0], "something else")
        raise Damaged(f"{path} is {kind}, not a file")


def _has_no_hole(handle: int, start: int, end: int) -> bool:
    try:
        return os.lseek(handle, start, os.SEEK_HOLE) >= end
    except (OSError, AttributeError):  # the system does not support it
        return True


# Advice for errors of incomplete file systems.
_ADVICE = {
    errno.ESPIPE: "this file system writes a file only from its beginning to its end. Mount it "
    "with a cache for writes (rclone: --vfs-cache-mode writes), or write to another one"
}


@contextmanager
def system_calls(operation: str = "", path: str = "") -> Iterator[None]:
    """Wraps file operations of the operating system only: their errors become `Failed`.

    Arguments:
        operation: the operation, for errors without a path, such as those of open files.
        path: of the file.
    """
    try:
        yield
    except Failed:
        raise
    except OSError as error:
        raise failure(error, operation, path) from error


def failure(error: OSError, operation: str = "", path: str = "") -> Failed:
    """An operating system's error as one of this package's; arguments as for `system_calls`."""
    reason = str(error)
    if operation and error.filename is None:
        reason = f"cannot {operation} {path}: {error.strerror}"
    if error.errno in _ADVICE:
        reason += f": {_ADVICE[error.errno]}"
    return Failed(reason, error.errno)


@contextmanager
def closing(handle: int, path: str) -> Iterator[None]:
    """Closes a written file; some file systems send its data only then.

    Raises:
        Failed: it cannot be closed, and the block had no error.
    """
    try:
        yield
    except BaseException:
        close_quietly(handle)
        raise
    with system_calls("close", path):
        os.close(handle)


def begin_flush(handle: int, start: int, nbytes: int) -> None:
    """Lets the disk begin to write some bytes of a file, and does not wait; a hint."""
    if nbytes > 0 and hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # the flush raises the errors of the disk
            os.posix_fadvise(handle, start, nbytes, os.POSIX_FADV_DONTNEED)


def close_quietly(handle: int) -> None:
    """Closes a file that was only read or locked, or whose data are discarded."""
    with suppress(OSError):
        os.close(handle)
