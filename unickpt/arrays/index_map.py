"""Index maps: a dimension's index as a mixed-radix number whose digits are indices of axes.

This maps the elements of one array to another whose dimensions are split, merged, permuted, or
concatenated. A box of an array covers at most `2k - 1` boxes of axes for each dimension of `k`
digits, as for flat ranges (`unickpt.arrays.box`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Digit:
    """One digit of a dimension's mixed-radix index.

    Arguments:
        radix: the number of values of the digit.
        offset: its value where the segment begins.
        extent: the number of values of the segment.
        inner: the number of its axis, the digits of which it consists, or None if it is always
            `offset`.
        reverse: whether the axis runs backwards.
    """

    radix: int
    offset: int
    extent: int
    inner: int | tuple[Digit, ...] | None
    reverse: bool = False


Dim = tuple[Digit, ...]
AxisRanges = tuple[tuple[int, int], ...]
"""A half-open range of each axis."""


def pull(
    dims: Sequence[Dim], start: Sequence[int], stop: Sequence[int], whole: AxisRanges
) -> list[AxisRanges]:
    """The boxes of axes whose elements lie within a box of the array.

    Arguments:
        dims: of the block.
        start, stop: the box of the array.
        whole: the full range of each axis.
    """
    boxes = [whole]
    for dim, low, high in zip(dims, start, stop, strict=True):
        boxes = [r for ranges in boxes for r in _pull_dim(dim, low, high, ranges)]
    return boxes


def _pull_dim(dim: Dim, low: int, high: int, ranges: AxisRanges) -> Iterator[AxisRanges]:
    """`ranges` narrowed to where a mixed-radix number lies within [low, high)."""
    if low >= high:
        return
    if len(dim) == 1:
        yield from _pull_digit(dim[0], low, high, ranges)
        return
    first, lower_digits = dim[0], dim[1:]
    row = math.prod(d.radix for d in lower_digits)
    if row == 0:
        return
    begin, end = -(-low // row), high // row  # of the whole rows
    if begin > end:  # a part of one row
        pieces = [(end, begin, low - end * row, high - end * row)]
    else:  # of these, some may be empty
        before = (begin - 1, begin, low - (begin - 1) * row, row)
        pieces = [before, (end, end + 1, 0, high - end * row), (begin, end, 0, row)]
    for a, b, inner_low, inner_high in pieces:
        for narrowed in _pull_digit(first, a, b, ranges):
            yield from _pull_dim(lower_digits, inner_low, inner_high, narrowed)


def _pull_digit(digit: Digit, low: int, high: int, ranges: AxisRanges) -> Iterator[AxisRanges]:
    low, high = max(low - digit.offset, 0), min(high - digit.offset, digit.extent)
    if low >= high:
        return
    if digit.inner is None:
        yield ranges
    elif isinstance(digit.inner, tuple):
        yield from _pull_dim(digit.inner, low, high, ranges)
    else:
        if digit.reverse:
            low, high = digit.extent - high, digit.extent - low
        axis = digit.inner
        a, b = ranges[axis]
        if max(a, low) < min(b, high):
            narrowed = (max(a, low), min(b, high))
            yield (*ranges[:axis], narrowed, *ranges[axis + 1 :])


@dataclass(frozen=True, slots=True)
class LinearIndex:
    """A dimension's index as a linear function of the axes' indices."""

    constant: int
    steps: tuple[tuple[int, int], ...]

    def value(self, indices: Sequence[int]) -> int:
        return self.constant + sum(step * indices[axis] for axis, step in self.steps)

    def bounds(self, ranges: AxisRanges) -> tuple[int, int]:
        """The first index and one past the last index for these ranges of the axes."""
        low = high = self.constant
        for axis, step in self.steps:
            a, b = ranges[axis]
            ends = (step * a, step * (b - 1))
            low, high = low + min(ends), high + max(ends)
        return low, high + 1


@lru_cache(maxsize=4096)
def linear_index(dim: Dim) -> LinearIndex:
    """A dimension as a linear function."""
    constant, steps = 0, []
    factor = 1
    for digit in reversed(dim):
        constant += factor * digit.offset
        if isinstance(digit.inner, tuple):
            inner = linear_index(digit.inner)
            constant += factor * inner.constant
            steps += [(axis, factor * step) for axis, step in inner.steps]
        elif digit.inner is not None:
            step = -factor if digit.reverse else factor
            constant += factor * (digit.extent - 1) if digit.reverse else 0
            steps.append((digit.inner, step))
        factor *= digit.radix
    return LinearIndex(constant, tuple(steps))
