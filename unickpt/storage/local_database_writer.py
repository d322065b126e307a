"""Writes a new database in a local folder: values on threads, piece by piece, then its B-tree.

TensorStore writes a value in one go, so that its bytes come from memory once more to be hashed.
Here each piece is hashed and written while it is in the processor's cache: saves are faster by a
quarter and more (docs/benchmarks.md). The result is a database that TensorStore reads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import tensorstore as ts

from unickpt.quoting import quoted
from unickpt.storage import contexts, local_folders
from unickpt.storage.btree import builder
from unickpt.storage.btree.builder import INLINE, MOST_INLINE, PLACE_DTYPE, Run
from unickpt.storage.btree.nodes import MOST_KEY_BYTES, DataReference
from unickpt.storage.errors import Failed, system_calls
from unickpt.storage.kvstore import KvStore
from unickpt.storage.ocdbt import MANIFEST

PIECE_BYTES = 512 << 10  # measured: 256 KiB to 1 MiB are as fast, 8 MiB fall out of the cache
_TOGETHER_BYTES = 64 << 10  # smaller values are copied, to be written together
_FOLDER = "d/"
Value = Sequence[memoryview]
"""A value in parts, each of them contiguous bytes."""


@dataclass(frozen=True)
class Written:
    """Values that were written to one file.

    Arguments:
        path: of the file, below the database's folder.
        keys: of the values.
        offsets: of the values in the file; -1 for those that the B-tree's nodes hold.
        lengths: in bytes.
        inline: what the nodes hold, in the order of the keys.
    """

    path: str
    keys: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    inline: list[bytes] = field(default_factory=list)


class DataFile:
    """A new file of a database, for one thread.

    Arguments:
        folder: the database's; ends with `/`.
        piece_bytes: how much is looked at and written at once.
    """

    def __init__(self, folder: str, piece_bytes: int) -> None:
        self.written = Written(f"{_FOLDER}{os.urandom(16).hex()}")
        self._most, self._end = piece_bytes, 0
        self._waiting: list[memoryview] = []  # small values, to be written together
        self._waiting_bytes = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with system_calls():
            self._handle = os.open(folder + self.written.path, flags, 0o666)

    def add(
        self, key: str, value: Value, look: Callable[[memoryview], object] | None = None
    ) -> None:
        """Adds a value, which must not change before the file is closed.

        Arguments:
            key: of the value.
            value: its bytes.
            look: called with each piece before it is written.

        Raises:
            Failed: it cannot be written.
        """
        nbytes = len(value[0]) if len(value) == 1 else sum(map(len, value))
        self.written.keys.append(key)
        self.written.lengths.append(nbytes)
        if nbytes <= MOST_INLINE:
            self.written.offsets.append(-1)
            self.written.inline.append(b"".join(value))
            if look is not None:
                for part in value:
                    look(part)
            return
        self.written.offsets.append(self._end)
        for part in value:
            self._append(part, look)

    def place(self, data: bytes) -> DataReference:
        """Adds bytes that have no key, and says where they are."""
        at = DataReference(self.written.path, self._end, len(data))
        self._append(memoryview(data), None)
        return at

    def close(self, *, fsync: bool) -> None:
        """Writes what still waits, and closes the file.

        Raises:
            Failed: it cannot be written.
        """
        try:
            self._flush()
            if fsync:
                with system_calls():
                    os.fsync(self._handle)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes the file after a failure."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def _append(self, part: memoryview, look: Callable[[memoryview], object] | None) -> None:
        self._end += len(part)
        if len(part) > _TOGETHER_BYTES:
            self._flush()
            pieces = [part[at : at + self._most] for at in range(0, len(part), self._most)]
            with system_calls():  # here, so that next to no Python runs between the pieces
                for piece in pieces:
                    if look is not None:
                        look(piece)
                    count = os.write(self._handle, piece)
                    if count != len(piece):
                        self._write(piece[count:])
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
            self._write(waiting[0] if len(waiting) == 1 else memoryview(b"".join(waiting)))

    def _write(self, data: memoryview) -> None:
        with system_calls():
            while data:
                data = data[os.write(self._handle, data) :]


class LocalDatabaseWriter:
    """A new database in a local folder; `finish` makes it readable.

    Several threads may write at once, each to a `DataFile` of its own.

    Arguments:
        folder: the folder; ends with `/`.
        store: the key-value store of the folder.
        context: says whether files are flushed to the disk.
    """

    def __init__(self, folder: str, store: KvStore, context: ts.Context) -> None:
        self._folder, self._store = folder, store
        self.is_durable = contexts.is_durable(context)
        self._written: list[Written] = []
        self._last: DataFile | None = None
        self._lock = threading.Lock()
        self._made = False

    def new_file(self, piece_bytes: int = PIECE_BYTES) -> DataFile:
        """A file for values, to be given to `add` or `abandon`.

        Raises:
            Failed: it cannot be created.
        """
        with self._lock:
            if not self._made:
                local_folders.make(self._folder + _FOLDER)
                self._made = True
        return DataFile(self._folder, piece_bytes)

    def add(self, file: DataFile, *, last: bool = False) -> None:
        """Adds the values of a file.

        Arguments:
            file: from `new_file`.
            last: whether the B-tree goes into it, too; `finish` comes next.

        Raises:
            Failed: it cannot be written.
        """
        if not last:
            file.close(fsync=self.is_durable)
        with self._lock:
            self._written.append(file.written)
            if last:
                self._last = file

    def finish(self) -> None:
        """Writes the B-tree of all values that were added; may be called again after more were.

        Raises:
            Failed: it cannot be written.
        """
        file, self._last = self._last or self.new_file(), None
        try:
            manifest = self._build(file)
            file.close(fsync=self.is_durable)
        except BaseException:
            file.abandon()
            raise
        if self.is_durable:
            local_folders.sync_folder(self._folder + _FOLDER)
        self._store.write(MANIFEST, manifest).result()

    def abandon(self) -> None:
        """After a failure: closes the file that `finish` would have."""
        if self._last is not None:
            self._last.abandon()

    def _build(self, file: DataFile) -> bytes:
        """Writes the nodes to a file; returns the manifest."""
        paths = sorted({written.path for written in self._written})
        number = {path: n for n, path in enumerate(paths)}
        count = sum(len(written.keys) for written in self._written)
        keys, rows, inline, first = list[bytes](), np.zeros(count, PLACE_DTYPE), list[bytes](), 0
        inline_bytes = 0
        for written in self._written:
            own = rows[first : first + len(written.keys)]
            offsets = np.array(written.offsets, np.int64)
            own["file"] = np.where(offsets < 0, INLINE, number[written.path])
            own["length"] = written.lengths
            lengths = np.array([len(value) for value in written.inline], np.int64)
            offsets[offsets < 0] = inline_bytes + np.cumsum(lengths) - lengths
            own["offset"] = offsets
            inline += written.inline
            inline_bytes += int(lengths.sum())
            keys += [key.encode() for key in written.keys]
            first += len(own)
        longest = max(keys, key=len, default=b"")
        if len(longest) > MOST_KEY_BYTES:
            raise Failed(
                f"the key {quoted(longest.decode())} has {len(longest)} bytes; a database takes "
                f"at most {MOST_KEY_BYTES}; give what it stores a shorter name"
            )
        order = sorted(range(count), key=keys.__getitem__)
        ordered: list[bytes] = list(itemgetter(*order)(keys)) if count > 1 else keys
        run = Run(ordered, rows[np.array(order, np.int64)])
        manifest, _ = builder.encode([run], paths, b"".join(inline), file.place)
        return manifest
