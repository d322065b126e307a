"""CRC-32 of bytes that come in parts, and the ranges of files that have one."""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from threading import Lock

_POLYNOMIAL = 0xEDB88320
_MOST_GAPS = 4096


@dataclass(frozen=True, order=True)
class Range:
    """Bytes of a file with their CRC-32.

    Arguments:
        file: its name.
        begin, end: their place.
        crc: of all; includes the bytes before `begin`, if those were already read.
        before: the CRC-32 of the bytes before.
        name: their name in messages.
    """

    file: str
    begin: int
    end: int
    crc: int
    before: int = 0
    name: str = ""


class ChecksummedRanges:
    """The ranges of a checkpoint's files that have a CRC-32; some are found when they are read."""

    def __init__(self) -> None:
        self._lock, self._by_file = Lock(), dict[str, list[Range]]()

    def add(self, range_: Range) -> None:
        """Adds a range, once; ranges of a file must not overlap."""
        with self._lock:
            ranges = self._by_file.setdefault(range_.file, [])
            position = bisect.bisect_left(ranges, range_)
            if ranges[position : position + 1] != [range_]:
                ranges.insert(position, range_)

    def within(self, file: str, begin: int, end: int) -> list[Range]:
        """Those that have some of these bytes, in order."""
        if file not in self._by_file:
            return []
        with self._lock:
            ranges = self._by_file[file]
            first = bisect.bisect_right(ranges, begin, key=attrgetter("end"))
            return ranges[first : bisect.bisect_left(ranges, end, first, key=attrgetter("begin"))]

    def __iter__(self) -> Iterator[Range]:
        with self._lock:
            by_file = sorted(self._by_file.items())
            return iter([range_ for _, ranges in by_file for range_ in ranges])


class Parts:
    """The CRC-32 of a range that several threads read in parts, in any order, some of them twice.

    Arguments:
        whole: the range.
    """

    def __init__(self, whole: Range) -> None:
        self._whole, self._lock = whole, Lock()
        self.gaps = [(whole.begin, whole.end)]
        """The unread ranges, in order."""
        self._starts: dict[int, tuple[int, int]] = {}  # of what has been: its end, its CRC-32
        self._ends: dict[int, int] = {}

    def differs(self, offset: int, data: memoryview) -> bool:
        """Takes bytes of the file that may belong to the range; returns whether this completes the
        range and its CRC-32 is wrong."""
        with self._lock:
            claimed = self._claim(offset, offset + len(data))
        return any(
            self._put(start, crc, begin, data[begin - offset : end - offset])
            for begin, end, start, crc in claimed
        )

    def _claim(self, low: int, high: int) -> list[tuple[int, int, int, int]]:
        """Takes the gaps within some bytes, which count as read from now on; each with the start
        and the CRC-32 of the bytes read before it."""
        first = bisect.bisect_right(self.gaps, low, key=lambda gap: gap[1])
        splits = any(a < low and high < b for a, b in self.gaps[first : first + 1])
        if splits and len(self.gaps) >= _MOST_GAPS:
            return []  # read in too many parts: not worth the memory
        claimed, left, stop = [], list[tuple[int, int]](), first
        while stop < len(self.gaps) and self.gaps[stop][0] < high:
            begin, end = self.gaps[stop]
            inner, outer = max(begin, low), min(end, high)
            left += [gap for gap in ((begin, inner), (outer, end)) if gap[0] < gap[1]]
            start = self._ends.pop(inner, None)
            crc = self._whole.before if inner == self._whole.begin else 0
            if start is not None:
                _, crc = self._starts.pop(start)
            claimed.append((inner, outer, inner if start is None else start, crc))
            stop += 1
        self.gaps[first:stop] = left
        return claimed

    def _put(self, start: int, crc: int, begin: int, data: memoryview) -> bool:
        crc, end = zlib.crc32(data, crc), begin + len(data)
        with self._lock:
            if (before := self._ends.pop(start, None)) is not None:
                _, other = self._starts.pop(before)
                start, crc = before, combined(other, crc, end - start)
            if (after := self._starts.pop(end, None)) is not None:
                crc, end = combined(crc, after[1], after[0] - end), after[0]
            self._starts[start], self._ends[end] = (end, crc), start
            return (start, end) == (self._whole.begin, self._whole.end) and crc != self._whole.crc


def combined(first: int, second: int, second_length: int) -> int:
    """The CRC-32 of bytes, from those of their two parts (as zlib's crc32_combine).

    Arguments:
        first: the CRC-32 of the first part.
        second: of the second part.
        second_length: bytes of the second part.

    Example:
        >>> import zlib
        >>> combined(zlib.crc32(b"one"), zlib.crc32(b"two"), 3) == zlib.crc32(b"onetwo")
        True
    """
    length, power = second_length, 3  # 8 bits in a byte
    while length:
        if length & 1:
            first = _times(_zeros(power), first)
        length >>= 1
        power += 1
    return first ^ second


@cache
def _zeros(power: int) -> tuple[int, ...]:
    """The matrix over GF(2) that appends 2 to the `power` zero bits."""
    if power == 0:
        return (_POLYNOMIAL, *(1 << n for n in range(31)))
    half = _zeros(power - 1)
    return tuple(_times(half, column) for column in half)


def _times(matrix: tuple[int, ...], vector: int) -> int:
    product, row = 0, 0
    while vector:
        if vector & 1:
            product ^= matrix[row]
        vector >>= 1
        row += 1
    return product
