"""The files of one folder of a checkpoint, on a disk or in object storage. Untrusted."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import cached_property

import tensorstore as ts
import xxhash

from unickpt.extend import (
    Damaged,
    DataReference,
    KvStore,
    Location,
    sync_folder,
    system_calls,
)

_PIECE_BYTES, _OBJECT_PIECE_BYTES = 1 << 20, 16 << 20
_UNFINISHED = ".repair"
"""The end of the name of a file that is being rewritten."""


class FolderFiles:
    """The files below a folder.

    Arguments:
        location: of the folder.
        context: for object storage.
    """

    def __init__(self, location: Location, context: ts.Context) -> None:
        self.location = location
        self._regular, self._context = location.regular_files(), context

    @cached_property
    def _store(self) -> KvStore:  # a forked process cannot use it, and local files do not need it
        return self.location.store(self._context)

    def read(self, path: str, offset: int, length: int) -> bytes:
        """Some bytes of a file.

        Raises:
            Damaged: some are missing.
            Failed: the storage failed.
        """
        if length == 0:
            return b""
        if self._regular is not None:
            return self._regular.read(DataReference(path, offset, length), may_be_sparse=True)
        read = self._store.read(path, byte_range=slice(offset, offset + length)).result()
        if read.state != "value":
            raise Damaged(f"no file {path}")
        return bytes(read.value)

    def read_end(self, path: str, length: int) -> bytes:
        """The last bytes of a file. Raises as `read`."""
        if self._regular is not None:
            size = self._regular.size(path)
            return self.read(path, max(0, size - length), min(size, length))
        read = self._store.read(path, byte_range=slice(-length, None)).result()
        return bytes(read.value) if read.state == "value" else b""

    def pieces(self, path: str, size: int) -> Iterator[memoryview]:
        """The first bytes of a file, piece by piece. Raises as `read`."""
        most = _OBJECT_PIECE_BYTES if self._regular is None else _PIECE_BYTES
        for offset in range(0, size, most):
            yield memoryview(self.read(path, offset, min(most, size - offset)))

    def size(self, path: str) -> int:
        """The bytes of a file. Raises as `read`."""
        if self._regular is not None:
            return self._regular.size(path)
        return len(self._store.read(path).result().value)

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Writes a new file; the operating system flushes it to disk later.

        Raises:
            Failed: the storage failed.
        """
        if self._regular is None:
            self._store.write(path, b"".join(pieces)).result()
            return
        self.location.child(os.path.dirname(path)).make()
        _write(f"{self.location.path}{path}", pieces, os.O_EXCL, fsync=False)

    def replace(
        self, path: str, pieces: Iterable[bytes | memoryview], *, fsync: bool = True
    ) -> None:
        """Writes a file, or replaces it: completely or not at all. Raises as `write`."""
        if self._regular is None:
            self.write(path, pieces)
            return
        self._regular.check_inside(path)
        full_path = f"{self.location.path}{path}"
        folder = os.path.dirname(full_path)
        with system_calls():
            os.makedirs(folder, exist_ok=True)
        flags = os.O_TRUNC | os.O_NOFOLLOW
        _write(full_path + _UNFINISHED, pieces, flags, fsync=fsync)
        with system_calls():
            os.replace(full_path + _UNFINISHED, full_path)
        if fsync:
            sync_folder(folder)


def checked(path: str, pieces: Iterable[bytes], expected: str) -> Iterator[bytes]:
    """The bytes of a file.

    Raises:
        Damaged: after the last one, if they have another digest.
    """
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
        yield piece
    if hasher.hexdigest() != expected:
        raise Damaged(f"{path}: the restored bytes do not match their digest: a file changed")


def _write(path: str, pieces: Iterable[bytes | memoryview], flags: int, *, fsync: bool) -> None:
    with system_calls("write", path):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o666)
        with open(handle, "wb", buffering=0) as file:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                while view:
                    view = view[file.write(view) :]
            if fsync:
                os.fsync(handle)


def digest(pieces: Iterable[memoryview | bytes]) -> str:
    """The digest of a file: xxh3 with 128 bits, as hex."""
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()
