"""Headers of files: read from the front in windows, and checks of the sizes that they tell.

Skipped bytes are not read. The files are untrusted.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

from unickpt.errors import CheckpointCorrupt
from unickpt.extend import Damaged, Files, Location, quoted, reading

_WINDOW = 64 << 10
_MOST_SIZE = 1 << 62
MOST_RANK = 32
"""Dimensions of an array, in formats that have no limit of their own."""


class Cursor:
    """A place in a file.

    Arguments:
        files: of the checkpoint.
        name: of the file.
    """

    def __init__(self, files: Files, name: str) -> None:
        self.files, self.name = files, name
        self.at = 0
        """The next byte."""
        self.taken = 0
        """How many bytes were taken."""
        self.size = files.size(name)
        """Of the file; None if the storage does not tell it."""
        self._begin, self._data = 0, b""

    def take(self, count: int) -> bytes:
        """The next bytes.

        Raises:
            CheckpointCorrupt: the file ends before.
            Failed: the storage failed.
        """
        first = self.at - self._begin
        if not 0 <= first <= first + count <= len(self._data):
            self._begin, self._data = self.at, self._window(count)
            first = 0
        self.at += count
        self.taken += count
        return self._data[first : first + count]

    def line(self, most: int) -> bytes:
        """The next bytes up to a newline, and it; about so many at most. Raises as `take`."""
        line = b""
        while not line.endswith(b"\n"):
            line += self.take(1)
            first = self.at - self._begin
            end = self._data.find(b"\n", first - 1) + 1 or len(self._data)
            line += self.take(max(0, end - first))
            if len(line) > most:
                raise self.damaged(f"has a line of more than {most} bytes")
        return line

    def unpack(self, format: str) -> Any:
        """The next number, by its format for `struct`. Raises as `take`."""
        return struct.unpack(format, self.take(struct.calcsize(format)))[0]

    def skip(self, count: int) -> int:
        """Skips bytes, and returns where they begin.

        Raises:
            CheckpointCorrupt: the file certainly ends before.
        """
        begin = self.at
        self.at += count
        if self.size is not None and self.at > self.size:
            raise self.damaged(f"ends at byte {self.size}, {self.at} expected")
        return begin

    def at_end(self) -> bool:
        """Whether the file ends here.

        Raises:
            CheckpointCorrupt: it ends before.
            Failed: the storage failed.
        """
        if self.size is not None:
            return self.at == self.size
        if self.at:
            self._checked(self.at - 1, 1)
        return not _has(self.files, self.name, self.at)

    def damaged(self, reason: str) -> CheckpointCorrupt:
        """The error for a damaged file."""
        return self.files.damaged(f"{self.name} {reason}")

    def _window(self, count: int) -> bytes:
        """Bytes from here on: so many, and more if the file has them."""
        if self.size is not None:
            if self.at + count > self.size:
                raise self.damaged(f"ends at byte {self.size}, {self.at + count} expected")
            return self._checked(self.at, min(max(count, _WINDOW), self.size - self.at))
        more = _WINDOW
        while more > count:  # the window shrinks towards the end, which the storage does not tell
            try:
                return self.files.read(self.name, self.at, more)
            except Damaged:
                more //= 2
        return self._checked(self.at, count)

    def _checked(self, offset: int, count: int) -> bytes:
        try:
            return self.files.read(self.name, offset, count)
        except Damaged as error:
            raise self.damaged(f"ends before byte {offset + count}") from error


def size_of(files: Files, name: str) -> int:
    """The size of a file, also where the storage does not tell it: then single bytes are probed.

    Raises:
        Failed: the storage failed.
    """
    size = files.size(name)
    if size is not None:
        return size

    high = 1
    while _has(files, name, high - 1):
        high *= 2
    return bisect_left(range(high), True, high // 2, key=lambda at: not _has(files, name, at))


def _has(files: Files, name: str, offset: int) -> bool:
    """Whether a file has a byte at an offset."""
    try:
        files.read(name, offset, 1)
    except Damaged:
        return False
    return True


def is_size(value: Any) -> TypeGuard[int]:
    """Whether a value is an extent, an offset or a number of elements or bytes."""
    return type(value) is int and 0 <= value < _MOST_SIZE


def sizes(value: Any, most: int = MOST_RANK) -> tuple[int, ...]:
    """A value that must be a list or tuple of sizes, such as a shape.

    Arguments:
        value: the value.
        most: how many there may be.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, list | tuple) or len(value) > most or not all(map(is_size, value)):
        raise ValueError(f"{quoted(value)} is not a list of sizes")
    return tuple(value)


@contextmanager
def naming(location: Location, what: str) -> Iterator[None]:
    """Within the block, errors name the thing that is being read.

    Arguments:
        location: of the checkpoint.
        what: such as "array 'w'".
    """
    with reading(f"{location}: {what}"):
        try:
            yield
        except CheckpointCorrupt as error:
            reason = str(error).removeprefix(f"{location}: ")
            raise CheckpointCorrupt(f"{location}: {what}: {reason}") from error
