"""Data files: consecutive values that the database of a checkpoint references.

In a local folder, each piece of a value is hashed and written while it is in the processor's cache:
saves are faster by a quarter or more (docs/benchmarks.md) than those of TensorStore, which writes a
whole value at once, so that its bytes are read from memory again. Elsewhere, a file is one object.

Behind a training loop, files bypass the page cache, as in FastPersist (arXiv 2406.13768): to copy
bytes there takes most of the processor time of a save, which the loop may need.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol, Self

import numpy as np
import tensorstore as ts

from unickpt.storage import paths
from unickpt.storage.btree.builder import MOST_INLINE
from unickpt.storage.locations import Location
from unickpt.storage.regular_files import begin_flush, close_quietly, closing, system_calls
from unickpt.storage.tensorstore_calls import KvStore

FOLDER = "d"
"""In the folder of a process: its data files."""
LINKED_FOLDER = "reused"
"""In the folder of a process: files of an earlier checkpoint, by hard links."""
PIECE_BYTES = 512 << 10  # measured: 256 KiB to 1 MiB are as fast, 8 MiB fall out of the cache
_SEND_BYTES = 8 << 20  # measured: saves are faster by a quarter than without
_MOST_UNFLUSHED, _MOST_UNFLUSHED_BYTES = 64, 1 << 30  # open files, and bytes of the page cache
_TOGETHER_BYTES = 64 << 10  # smaller values are copied, to be written together
_BLOCK = 4096  # bytes that suit every disk, as the unit of direct writes
_DIRECT_BYTES = 2 << 20  # of memory for what cannot be written from where it is
ADDED_FOLDER = "p"
"""In the folder of a process, or of the B-tree: files that features add, such as copies."""
Value = Sequence[memoryview]
"""A value in parts, each of them contiguous bytes."""


class FileView(Protocol):
    """Sees one data file, on the thread that writes it."""

    def add(self, piece: memoryview) -> None:
        """Called with each piece of the file, in order, just before it is written or buffered.

        Arguments:
            piece: valid during the call.
        """

    def complete(self, path: str, parts: Value) -> None:
        """Called when the system has all pieces of a local file, before it is flushed to the disk;
        and before an object is written. Not called for a file without bytes.

        Arguments:
            path: of the file, below the folder.
            parts: its bytes, one part after the other; valid during the call.
        """


class DataFile(ABC):
    """A new file of values, for one thread; it exists once it has a value.

    Small values are not written, because the nodes of a database hold these themselves.
    """

    path: str
    """The path of the file, below the process's folder; known once it is closed."""
    is_streamed: bool
    """Whether values are written when they are added; else all of them when it is closed."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        """The offset of each value in the file, -1 for those in `inline`."""
        self.lengths: list[int] = []
        """The length of each value in bytes."""
        self.inline: list[bytes] = []
        """The small values."""
        self.views: Sequence[FileView] = ()
        """See the file, if they are put here before the first value."""
        self._parts: list[memoryview] = []  # if there are views, all of the file
        self._end = 0

    def add(self, value: Value, look: Callable[[memoryview], object] | None = None) -> None:
        """Adds a value, which must not change before the file is closed.

        Arguments:
            value: its bytes.
            look: called with each piece of it before the piece is written.

        Raises:
            Failed: it cannot be written.
        """
        nbytes = len(value[0]) if len(value) == 1 else sum(map(len, value))
        self.lengths.append(nbytes)
        if nbytes <= MOST_INLINE:
            self.offsets.append(-1)
            self.inline.append(b"".join(value))
            if look is not None:
                for part in value:
                    look(part)
            return
        self.offsets.append(self._end)
        self._end += nbytes
        if self.views:
            self._parts += value
        for part in value:
            self._append(part, look)

    @abstractmethod
    def _append(self, part: memoryview, look: Callable[[memoryview], object] | None) -> None:
        """Writes a part of a value."""

    @abstractmethod
    def close(self) -> None:
        """Writes buffered data; the file is then complete. A local one may still be in `flushes`.

        Raises:
            Failed: it cannot be written.
        """

    def _complete(self) -> None:
        for view in self.views if self._parts else ():
            view.complete(self.path, self._parts)

    @abstractmethod
    def abandon(self) -> None:
        """Closes the file after a failure."""


class Flushes:
    """Files of a save that are written, but not flushed to the disk yet.

    A flush waits for the file system's journal, which the next file then needs again. Flushes after
    many files are written share it: they take half as long (measured on ext4). Used as a context,
    it closes at its end the files that a failed save leaves here.
    """

    def __init__(self) -> None:
        self._lock, self._files, self._nbytes = threading.Lock(), deque[tuple[int, str, int]](), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            close_quietly(self._files.popleft()[0])

    def add(self, handle: int, path: str, nbytes: int) -> None:
        """Adds an open file, and flushes the oldest ones if too many wait.

        Raises:
            Failed: one cannot be flushed.
        """
        with self._lock:
            self._files.append((handle, path, nbytes))
            self._nbytes += nbytes
        while (flush := self._next(_MOST_UNFLUSHED, _MOST_UNFLUSHED_BYTES)) is not None:
            flush()

    def take(self) -> Iterator[Callable[[], None]]:
        """Removes the files, one by one; each function flushes and closes one."""
        while (flush := self._next(0, 0)) is not None:
            yield flush

    def _next(self, most: int, most_bytes: int) -> Callable[[], None] | None:
        with self._lock:
            if not self._files or (len(self._files) <= most and self._nbytes <= most_bytes):
                return None
            handle, path, nbytes = self._files.popleft()
            self._nbytes -= nbytes
        return partial(_flush, handle, path)


def _flush(handle: int, path: str) -> None:
    with closing(handle, path), system_calls("flush", path):
        os.fsync(handle)


def new_file(
    folder: Location,
    context: ts.Context,
    piece_bytes: int = PIECE_BYTES,
    flushes: Flushes | None = None,
    *,
    direct: bool = False,
) -> DataFile:
    """A new data file.

    Arguments:
        folder: of the process; the folder for data files in it exists.
        context: of the save; determines whether local files are flushed to the disk.
        piece_bytes: how much of a local file is hashed and written at once.
        flushes: where a closed local file is put to be flushed; without, it is flushed at once.
        direct: whether a file that is flushed to a disk of this machine bypasses the page cache.
    """
    files = folder.regular_files()
    if files is None:
        return _Object(folder.store(context))
    fsync = paths.is_durable(context)
    return _LocalFile(files.folder, piece_bytes, flushes, fsync=fsync, direct=direct and fsync)


class _DirectWrites:
    """Writes an open file past the page cache, in whole blocks from memory at whole blocks.

    All else is copied to such memory first. Where the system refuses, through the page cache.
    """

    def __init__(self, path: str, handle: int) -> None:
        self._path, self._handle, self._is_direct = path, handle, True
        self._memory: mmap.mmap | None = None
        self._filled = 0

    def write(self, data: memoryview) -> None:
        """Writes bytes, some of them later."""
        while data:
            blocks = len(data) // _BLOCK * _BLOCK
            if blocks and not self._filled and _address(data) % _BLOCK == 0:
                self._write(data[:blocks])
                data = data[blocks:]
                continue
            if self._memory is None:
                self._memory = mmap.mmap(-1, _DIRECT_BYTES)
            piece = data[: _DIRECT_BYTES - self._filled]
            # NumPy copies without Python's lock.
            target = np.frombuffer(self._memory, np.uint8, len(piece), self._filled)
            np.copyto(target, np.frombuffer(piece, np.uint8))
            self._filled, data = self._filled + len(piece), data[len(piece) :]
            if self._filled == _DIRECT_BYTES:
                self._write(memoryview(self._memory))
                self._filled = 0

    def finish(self) -> None:
        """Writes the rest, less than a block of it through the page cache."""
        if self._memory is not None and self._filled:
            blocks = self._filled // _BLOCK * _BLOCK
            self._write(memoryview(self._memory)[:blocks])
            self._write(memoryview(self._memory)[blocks : self._filled])
            self._filled = 0

    def _write(self, data: memoryview) -> None:
        while data:
            if self._is_direct and len(data) % _BLOCK:
                self._leave()
            try:
                data = data[os.write(self._handle, data) :]
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EFAULT) or not self._is_direct:
                    raise
                self._leave()  # this file system, or a driver's memory, has other rules

    def _leave(self) -> None:
        """Opens the file anew: user-space file systems do not see that a flag is cleared."""
        self._is_direct = False
        handle = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.lseek(handle, os.lseek(self._handle, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(handle, self._handle, inheritable=False)
        finally:
            os.close(handle)


def _is_on_disk(folder: str) -> bool:
    """Whether a folder is on a disk of this machine.

    The copy in the page cache is all there is in memory file systems; network and user-space file
    systems each have their own rules. None of them has a device.
    """
    return os.major(os.stat(folder).st_dev) != 0


def _address(data: memoryview) -> int:
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


class _LocalFile(DataFile):
    is_streamed = True

    def __init__(
        self, folder: str, piece_bytes: int, flushes: Flushes | None, *, fsync: bool, direct: bool
    ) -> None:
        super().__init__()
        self.path = f"{FOLDER}/{os.urandom(16).hex()}"
        self._at, self._most, self._flushes = folder + self.path, piece_bytes, flushes
        self._fsync, self._handle = fsync, -1
        self._bypasses = direct
        self._direct: _DirectWrites | None = None
        self._waiting: list[memoryview] = []  # small values, to be written together
        self._waiting_bytes = 0
        self._written = self._sent = 0  # bytes that the system has, and that it sends to the disk

    def close(self) -> None:
        try:
            self._flush()
            if self._direct is None:
                self._send()
            else:
                with system_calls("write", self._at):
                    self._direct.finish()
            self._complete()
            if self._handle >= 0:
                handle, self._handle = self._handle, -1
                if self._fsync and self._flushes is not None:
                    self._flushes.add(handle, self._at, self._written)
                elif self._fsync:
                    _flush(handle, self._at)
                else:
                    with system_calls("close", self._at):
                        os.close(handle)
        finally:
            self.abandon()

    def abandon(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            close_quietly(handle)

    def _append(self, part: memoryview, look: Callable[[memoryview], object] | None) -> None:
        if len(part) > _TOGETHER_BYTES:
            self._flush()
            pieces = [part[start : start + self._most] for start in range(0, len(part), self._most)]
            # Here, so that hardly any Python runs between the pieces.
            with system_calls("write", self._at):
                self._open()
                for piece in pieces:
                    if look is not None:
                        look(piece)
                    for view in self.views:
                        view.add(piece)
                    if self._direct is not None:
                        self._write(piece)
                        continue
                    count = os.write(self._handle, piece)
                    self._written += count
                    if count != len(piece):
                        self._write(piece[count:])
                    if self._written - self._sent >= _SEND_BYTES:
                        self._send()
            return
        if look is not None:
            look(part)
        self._waiting.append(part)
        self._waiting_bytes += len(part)
        if self._waiting_bytes >= self._most:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if waiting:
            together = waiting[0] if len(waiting) == 1 else memoryview(b"".join(waiting))
            for view in self.views:
                view.add(together)
            with system_calls("write", self._at):
                self._open()
                self._write(together)

    def _open(self) -> None:
        if self._handle >= 0:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        if self._bypasses and hasattr(os, "O_DIRECT") and _is_on_disk(os.path.dirname(self._at)):
            try:
                self._handle = os.open(self._at, flags | os.O_DIRECT, 0o666)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                flags &= ~os.O_EXCL  # some file systems refuse it only after they made the file
            else:
                self._direct = _DirectWrites(self._at, self._handle)
                return
        self._handle = os.open(self._at, flags, 0o666)

    def _write(self, data: memoryview) -> None:
        self._written += len(data)
        if self._direct is not None:
            self._direct.write(data)
            return
        while data:
            data = data[os.write(self._handle, data) :]

    def _send(self) -> None:
        """Lets the disk begin with what the system has; else it would be idle until the flush."""
        start, self._sent = self._sent, self._written
        if self._fsync:
            begin_flush(self._handle, start, self._sent - start)


class _Object(DataFile):
    is_streamed = False

    def __init__(self, store: KvStore) -> None:
        super().__init__()
        self._store, self._values = store, list[memoryview]()

    def _append(self, part: memoryview, look: Callable[[memoryview], object] | None) -> None:
        if look is not None:
            look(part)
        for view in self.views:
            view.add(part)
        self._values.append(part)

    def close(self) -> None:
        milliseconds = time.time_ns() // 1_000_000
        self.path = f"{FOLDER}/{os.urandom(16).hex()}-{milliseconds:x}-{self._end:x}"
        self._complete()
        values, self._values = self._values, []
        if values:
            self._store.write(self.path, b"".join(values)).result()

    def abandon(self) -> None:
        self._values = []


def written_in(name: str) -> tuple[float, int] | None:
    """When an object with values was written, in seconds since 1970, and its size in bytes, which
    TensorStore's listings do not report; None if it is no such object.

    Arguments:
        name: of the object, without its folder.
    """
    number, *fields = name.split("-")
    if len(number) != 32 or len(fields) != 2:
        return None
    try:
        milliseconds, nbytes = (int(text, 16) for text in fields)
    except ValueError:
        return None
    return milliseconds / 1000, nbytes
