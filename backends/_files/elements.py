"""Sequences of elements in files that are more than a range of one: one after the other, packed,
converted, in memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from unickpt.errors import UnsupportedFormat
from unickpt.extend import Array, ByteRange, Elements, Files, dtype_from_name


@dataclass(frozen=True)
class Nibbles:
    """Elements of four bits, two in a byte: the first one in its lower half, as torch packs them.

    Arguments:
        file: below the checkpoint's location.
        offset: of the elements 0 and 1, in bytes.
    """

    file: str
    offset: int

    def read(self, files: Files, first: int, out: Array) -> None:
        [where] = self.ranges(first, out.size, 1)
        data = np.empty(where.end - where.begin, np.uint8)
        files.read_into(self.file, where.begin, data.data)
        nibbles = np.stack((data & 15, data >> 4), axis=1).reshape(-1)
        out.view(np.uint8)[...] = nibbles[first % 2 :][: out.size]

    def ranges(self, first: int, count: int, itemsize: int) -> Iterator[ByteRange]:
        begin, end = first // 2, -(-(first + count) // 2)
        yield ByteRange(self.file, self.offset + begin, self.offset + end)


@dataclass(frozen=True)
class Unreadable:
    """Elements of a kind that is not read; the rest of the file is.

    Arguments:
        reason: for the error: the array, its kind, and what to do.
    """

    reason: str

    def read(self, files: Files, first: int, out: Array) -> None:
        raise UnsupportedFormat(self.reason)

    def ranges(self, first: int, count: int, itemsize: int) -> Iterator[ByteRange]:
        raise UnsupportedFormat(self.reason)


@dataclass(frozen=True)
class ElementRun:
    """Consecutive elements of a sequence.

    Arguments:
        elements: the sequence.
        first: the number of the first in it.
        count: how many; at least one.
    """

    elements: Elements
    first: int
    count: int


@dataclass(frozen=True)
class JoinedElements:
    """Runs of other sequences, one after the other.

    Arguments:
        runs: in order.
    """

    runs: Sequence[ElementRun]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(run.count for run in self.runs))

    @property
    def count(self) -> int:
        """How many elements there are."""
        return self._ends[-1] if self.runs else 0

    def read(self, files: Files, first: int, out: Array) -> None:
        done = 0
        for run in self._parts(first, out.size):
            run.elements.read(files, run.first, out[done : done + run.count])
            done += run.count

    def ranges(self, first: int, count: int, itemsize: int) -> Iterator[ByteRange]:
        for run in self._parts(first, count):
            yield from run.elements.ranges(run.first, run.count, itemsize)

    def _parts(self, first: int, count: int) -> Iterator[ElementRun]:
        """The parts of the runs that contain consecutive elements."""
        number = bisect.bisect_right(self._ends, first)
        while count > 0:
            run = self.runs[number]
            skipped = first - (self._ends[number] - run.count)
            length = min(run.count - skipped, count)
            yield ElementRun(run.elements, run.first + skipped, length)
            number, first, count = number + 1, first + length, count - length


@dataclass(frozen=True)
class ConvertedElements:
    """Elements that are stored in another dtype than the array's; NumPy converts them.

    Arguments:
        elements: as they are stored.
        dtype: the name of their dtype.
    """

    elements: Elements
    dtype: str

    def read(self, files: Files, first: int, out: Array) -> None:
        stored = np.empty(out.size, dtype_from_name(self.dtype))
        self.elements.read(files, first, stored)
        out[...] = stored.astype(out.dtype)

    def ranges(self, first: int, count: int, itemsize: int) -> Iterator[ByteRange]:
        yield from self.elements.ranges(first, count, dtype_from_name(self.dtype).itemsize)


@dataclass(frozen=True)
class LazyElements:
    """Elements whose signs are not applied yet: views that torch conjugates when it reads.

    Arguments:
        elements: as they are stored.
        conjugated: whether the imaginary parts have the other sign.
        negated: whether all has the other sign.
    """

    elements: Elements
    conjugated: bool
    negated: bool

    def read(self, files: Files, first: int, out: Array) -> None:
        self.elements.read(files, first, out)
        if self.conjugated:
            np.conjugate(out, out=out)
        if self.negated:
            np.negative(out, out=out)

    def ranges(self, first: int, count: int, itemsize: int) -> Iterator[ByteRange]:
        yield from self.elements.ranges(first, count, itemsize)


@dataclass(frozen=True)
class InMemoryElements:
    """Elements that were read already, because they are no range of a file.

    Arguments:
        data: their bytes.
        big_endian: the byte order of the elements.
    """

    data: bytes
    big_endian: bool = False

    def read(self, files: Files, first: int, out: Array) -> None:
        begin = first * out.itemsize
        out.view(np.uint8)[...] = np.frombuffer(self.data, np.uint8, out.nbytes, begin)
        if self.big_endian and out.itemsize > 1:
            out.byteswap(inplace=True)

    def ranges(self, first: int, count: int, itemsize: int) -> Iterator[ByteRange]:
        yield from ()


@dataclass(frozen=True)
class MeanElements:
    """The mean of several sequences, computed in float32.

    Arguments:
        runs: of the sequences; all of the same length.
        dtype: the name of the dtype in which their elements are stored.
    """

    runs: Sequence[ElementRun]
    dtype: str

    def read(self, files: Files, first: int, out: Array) -> None:
        total = np.zeros(out.size, np.float32)
        stored = np.empty(out.size, dtype_from_name(self.dtype))
        for run in self.runs:
            run.elements.read(files, run.first + first, stored)
            total += stored.astype(np.float32)
        out[...] = (total / np.float32(len(self.runs))).astype(out.dtype)

    def ranges(self, first: int, count: int, itemsize: int) -> Iterator[ByteRange]:
        size = dtype_from_name(self.dtype).itemsize
        for run in self.runs:
            yield from run.elements.ranges(run.first + first, count, size)
