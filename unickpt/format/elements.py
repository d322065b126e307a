"""Sequences of elements in files, of which the boxes of arrays consist.

A format tells with them where its elements are. `FileRange` is one range of a file; formats have
others of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from unickpt.arrays.dtypes import Array
from unickpt.format.files import Files


class ByteRange(NamedTuple):
    """Bytes of a file, from `begin` up to `end`."""

    file: str
    begin: int
    end: int


class Elements(Protocol):
    """Elements of one dtype, numbered from 0."""

    def read(self, files: Files, first: int, out: Array) -> None:
        """Reads consecutive elements.

        Arguments:
            files: of the checkpoint.
            first: the number of the first element.
            out: one-dimensional and contiguous, of the array's dtype; receives them.

        Raises:
            Failed: the storage failed, or a file is too short.
        """

    def ranges(self, first: int, count: int, itemsize: int) -> Iterator[ByteRange]:
        """Where consecutive elements are.

        Arguments:
            first: the number of the first element.
            count: how many.
            itemsize: of the array's dtype, in bytes.
        """


@dataclass(frozen=True)
class FileRange:
    """Elements that follow each other in a file.

    Arguments:
        file: below the checkpoint's location.
        offset: of the element 0, in bytes.
        big_endian: the byte order of the elements.
    """

    file: str
    offset: int
    big_endian: bool = False

    def read(self, files: Files, first: int, out: Array) -> None:
        files.read_into(self.file, self.offset + first * out.itemsize, out.view(np.uint8).data)
        if self.big_endian and out.itemsize > 1:
            out.byteswap(inplace=True)

    def ranges(self, first: int, count: int, itemsize: int) -> Iterator[ByteRange]:
        begin = self.offset + first * itemsize
        yield ByteRange(self.file, begin, begin + count * itemsize)
