"""The file object that pyfive reads from; it bounds all reads.

HDF5 files are untrusted. pyfive believes the sizes and addresses that a file declares: a structure
that leads back to itself, or refers to the same bytes many times, ends at these bounds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

from unickpt.errors import CheckpointCorrupt

_PAGE, _PAGES = 64 << 10, 256  # bytes, and how many are cached
# Nothing is read twice but small structures that several objects use.
_REREADS, _SPARE = 8, 1 << 20
_LEAST = 32  # as many bytes each read costs at least


@dataclass
class BoundedFile:
    """The bytes of an HDF5 file as a file object, for one thread at a time.

    Arguments:
        where: the file, for messages.
        size: its bytes.
        fetch: reads bytes, by offset and count.
    """

    where: str
    size: int
    fetch: Callable[[int, int], bytes]
    closed: bool = False
    _fetched_pages: set[int] = field(default_factory=set)
    _offset: int = 0
    _charged: int = 0
    _fetched: int = 0
    _room: float = float("inf")
    _copies: float = float("inf")
    _joined: int = 0

    def tell(self) -> int:
        """The offset of the next read."""
        return self._offset

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Sets the offset of the next read."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self.size}[whence]
        self._offset = base + offset
        return self._offset

    def read(self, count: int = -1) -> bytes:
        """Reads bytes, all that are requested.

        Raises:
            CheckpointCorrupt: the file is shorter, or too much is read again and again.
        """
        offset = self._offset
        count = self.size - offset if count < 0 else count
        if offset < 0 or count < 0 or offset + count > self.size:
            raise self.damaged(f"it needs bytes {offset} to {offset + count}, and has {self.size}")
        self._take_room(count)  # before memory is allocated
        first, last = offset // _PAGE, (offset + max(0, count - 1)) // _PAGE
        data = b"".join(self._page(number) for number in range(first, last + 1))
        self.charge(count)
        self._offset += count
        return data[offset - first * _PAGE :][:count]

    def charge(self, count: int) -> None:
        """Counts bytes that were read, or copied from read ones.

        Raises:
            CheckpointCorrupt: they are too many for the file.
        """
        self._charged += max(count, _LEAST)
        new = min(_PAGE * len(self._fetched_pages), self.size)
        if max(self._charged, self._fetched) > _SPARE + _REREADS * new:
            raise self.damaged("its structures lead back to themselves")

    @contextmanager
    def at_most(self, count: int, copies: float = float("inf")) -> Iterator[None]:
        """Limits the bytes that are read within the block.

        Arguments:
            count: the most bytes.
            copies: the most bytes that are copied, if each read is appended to all before it.
        """
        self._room, self._copies, self._joined = count, copies, 0
        try:
            yield
        finally:
            self._room = self._copies = float("inf")

    def _take_room(self, count: int) -> None:
        self._room -= count
        self._joined += count
        self._copies -= self._joined
        if min(self._room, self._copies) < 0:
            raise self.damaged(f"a structure before byte {self._offset} is too large")

    def __post_init__(self) -> None:
        self._page = lru_cache(_PAGES)(self._fetched_page)

    def _fetched_page(self, number: int) -> bytes:
        data = self.fetch(number * _PAGE, min(_PAGE, self.size - number * _PAGE))
        self._fetched += len(data)
        self._fetched_pages.add(number)
        return data

    def damaged(self, reason: str) -> CheckpointCorrupt:
        """The error for a damaged file."""
        return CheckpointCorrupt(f"{self.where} is damaged: {reason}")
