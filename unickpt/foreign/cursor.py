"""Reads a file from its front to its end, in windows; what is skipped is not read."""

from __future__ import annotations

import struct
from typing import Any

from unickpt.errors import CheckpointCorrupt
from unickpt.foreign.files import Files
from unickpt.storage.errors import Damaged

_WINDOW = 64 << 10


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

    def unpack(self, format: str) -> Any:
        """The next number, by its format for `struct`. Raises as `take`."""
        return struct.unpack(format, self.take(struct.calcsize(format)))[0]

    def skip(self, count: int) -> int:
        """Skips bytes, and tells where they begin.

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
        return not self._has(self.at, 1)

    def damaged(self, reason: str) -> CheckpointCorrupt:
        """The error for a damaged file."""
        return CheckpointCorrupt(f"{self.files.location}: {self.name} {reason}")

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

    def _has(self, at: int, count: int) -> bool:
        try:
            self.files.read(self.name, at, count)
        except Damaged:
            return False
        return True

    def _checked(self, at: int, count: int) -> bytes:
        try:
            return self.files.read(self.name, at, count)
        except Damaged as error:
            raise self.damaged(f"ends before byte {at + count}") from error
