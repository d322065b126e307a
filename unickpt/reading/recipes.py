"""Recipes: where the elements of a requested array come from in stored arrays, box by box.

Without rules every array has one source, itself. Rules permute, merge, split, stack and cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import sub
from typing import TYPE_CHECKING, NamedTuple, Protocol

from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.arrays.strided_copy import unit_steps
from unickpt.format.index import ArrayEntry

if TYPE_CHECKING:  # only rules need it
    from unickpt.arrays.index_map import AxisRanges, Dim


class Copy(NamedTuple):
    """Elements of a chunk and their destination: two strided views of the same shape.

    Arguments:
        shape: extents of both.
        source: index of the first element in the chunk.
        source_steps: per axis of `shape`, the step along each dimension of the chunk.
        out, out_steps: the same for the destination.
    """

    shape: tuple[int, ...]
    source: tuple[int, ...]
    source_steps: tuple[tuple[int, ...], ...]
    out: tuple[int, ...]
    out_steps: tuple[tuple[int, ...], ...]

    @property
    def bounds(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The smallest box of the chunk that contains the elements: its start and its stop."""
        low, high = list(self.source), [first + 1 for first in self.source]
        for n, steps in zip(self.shape, self.source_steps, strict=True):
            for dim, step in enumerate(steps):
                low[dim] += min(0, (n - 1) * step)
                high[dim] += max(0, (n - 1) * step)
        return tuple(low), tuple(high)


@dataclass(frozen=True)
class MappedSource:
    """A block of a requested array, and the stored array that is its source.

    Arguments:
        entry: the stored array.
        extents: of the axes that both arrays share.
        source: the stored array's dimensions in terms of these axes.
        out: those of the requested array.
        scale, offset: arithmetic on the elements, in float32 (float64 for float64 elements).
    """

    entry: ArrayEntry
    extents: tuple[int, ...]
    source: tuple[Dim, ...]
    out: tuple[Dim, ...]
    scale: float = 1.0
    offset: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether elements are copied without arithmetic."""
        return self.scale == 1 and self.offset == 0

    @property
    def is_identity(self) -> bool:
        """Whether it is the whole stored array, unchanged."""
        whole = whole_dims(self.entry.shape)
        return self.is_exact and self.source == self.out == whole

    def within(self, box: Box) -> Needed | None:
        """The stored elements that a box of the requested array needs; None if it needs none."""
        from unickpt.arrays.index_map import pull

        ranges = pull(self.out, box.start, box.stop, tuple((0, n) for n in self.extents))
        return _Pulled(self, box, ranges) if ranges else None

    def bounds(self, ranges: AxisRanges) -> Box:
        """A box of the stored array that contains everything that the ranges of the axes need."""
        from unickpt.arrays.index_map import linear_index

        intervals = [linear_index(dim).bounds(ranges) for dim in self.source]
        return Box(tuple(a for a, _ in intervals), tuple(b for _, b in intervals))

    def ranges_within(self, chunk: Box) -> list[AxisRanges]:
        """The axes' ranges that lie within a box of the stored array."""
        from unickpt.arrays.index_map import pull

        whole = tuple((0, n) for n in self.extents)
        return pull(self.source, chunk.start, chunk.stop, whole)

    def copy(self, common: AxisRanges, box: Box, chunk: Box) -> Copy:
        """The places of ranges in a chunk, and in a box of the requested array."""
        extents = tuple(b - a for a, b in common)
        source = _strided(self.source, common, chunk.start)
        return Copy(extents, *source, *_strided(self.out, common, box.start))


class _Pulled:
    """The elements that a box needs from a source."""

    def __init__(self, source: MappedSource, box: Box, ranges: Sequence[AxisRanges]) -> None:
        self._source, self._box, self._ranges = source, box, ranges
        self.boxes: Sequence[Box] = [source.bounds(r) for r in ranges]

    def copies(self, chunk: Box) -> Iterator[Copy]:
        for ours in self._source.ranges_within(chunk):
            for theirs in self._ranges:
                common = tuple(
                    (max(a, c), min(b, d)) for (a, b), (c, d) in zip(ours, theirs, strict=True)
                )
                if all(a < b for a, b in common):
                    yield self._source.copy(common, self._box, chunk)


class Unchanged:
    """An array as it is stored: a faster source for loads without rules."""

    __slots__ = ("entry",)
    is_exact, is_identity, scale, offset = True, True, 1.0, 0.0

    def __init__(self, entry: ArrayEntry) -> None:
        self.entry = entry

    def within(self, box: Box) -> Needed | None:
        return None if box.empty else _StoredBox(box)


@dataclass(frozen=True, slots=True)
class _StoredBox:
    """A box of an array as it is stored; equal boxes are planned once."""

    box: Box

    @property
    def boxes(self) -> Sequence[Box]:
        return (self.box,)

    def copies(self, chunk: Box) -> Iterator[Copy]:
        box = self.box
        common = chunk.intersect(box)
        if common is not None:
            chunk_start = tuple(map(sub, common.start, chunk.start))
            steps = unit_steps(len(chunk_start))
            yield Copy(
                common.shape, chunk_start, steps, tuple(map(sub, common.start, box.start)), steps
            )


ElementSource = MappedSource | Unchanged
"""A source of elements of a requested array."""
Needed = _Pulled | _StoredBox
"""The needs of a box of a requested array from a stored one: boxes that contain it, and the copies.

Equal values mean equal needs for arrays of the same shape.
"""


def whole_dims(shape: Sequence[int]) -> tuple[Dim, ...]:
    """Dimensions each of which is an axis."""
    from unickpt.arrays.index_map import Digit

    return tuple((Digit(n, 0, n, axis),) for axis, n in enumerate(shape))


@dataclass(frozen=True)
class Fill:
    """A block of a requested array that holds a constant.

    Arguments:
        extents: of the block's axes.
        out: the array's dimensions, made of these.
        value: of all elements.
    """

    extents: tuple[int, ...]
    out: tuple[Dim, ...]
    value: float | int | bool | complex

    def copies(self, box: Box) -> Iterator[Copy]:
        """The places of the constant in a box of the array; reads nothing."""
        from unickpt.arrays.index_map import pull

        whole = tuple((0, n) for n in self.extents)
        for ranges in pull(self.out, box.start, box.stop, whole):
            extents = tuple(b - a for a, b in ranges)
            yield Copy(extents, (), (), *_strided(self.out, ranges, box.start))


class Applied(Protocol):
    """A function that makes an array."""

    @property
    def name(self) -> str:
        """The array's name."""

    def __call__(self, box: Box, verify: bool) -> Array:
        """The elements of a box; `verify`: whether to check the chunks that are read for them."""


@dataclass(slots=True)
class Recipe:
    """The sources of a requested array.

    Arguments:
        sources: the stored ones; with `fills`, they give each element exactly once.
        fills: the constant blocks.
        function: makes the array instead of these.
    """

    sources: Sequence[ElementSource] = ()
    fills: Sequence[Fill] = ()
    function: Applied | None = None


def _strided(
    dims: Sequence[Dim], ranges: AxisRanges, start: Sequence[int]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The start of ranges of axes in a box of an array, and each axis's steps along its dimensions.

    Arguments:
        dims: of the array, in terms of the axes.
        ranges: of the axes.
        start: of the box.
    """
    from unickpt.arrays.index_map import linear_index

    lines, first = list(map(linear_index, dims)), [a for a, _ in ranges]
    steps = [dict(line.steps) for line in lines]
    index = tuple(line.value(first) - low for line, low in zip(lines, start, strict=True))
    return index, tuple(tuple(s.get(axis, 0) for s in steps) for axis in range(len(ranges)))
