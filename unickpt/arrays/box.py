"""Boxes: half-open n-d intervals, flat row-major ranges as boxes, checks of exact coverage."""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter, eq, ge, gt, le, sub
from types import EllipsisType
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open n-d interval.

    Arguments:
        start: first index in each dimension.
        stop: one past the last index in each dimension; at least `start`.

    Example:
        >>> Box((0, 2), (4, 6)).shape
        (4, 4)
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"box start {self.start} and stop {self.stop} differ in rank")
        if any(map(gt, self.start, self.stop)) or min(self.start, default=0) < 0:
            raise ValueError(f"box [{self.start}, {self.stop}) has a negative start or extent")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole array of `shape`."""
        return _whole(tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(map(sub, self.stop, self.start))

    @property
    def empty(self) -> bool:
        return any(map(eq, self.start, self.stop))

    @property
    def slices(self) -> tuple[slice | EllipsisType, ...]:
        """Indices that select the box from an array, as a view."""
        if not self.start:
            return (Ellipsis,)  # of a 0-d array, NumPy's [()] would be a copy
        return tuple(map(slice, self.start, self.stop))

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None if no element is common."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return None if any(map(ge, start, stop)) else Box(start, stop)

    def contains(self, other: Box) -> bool:
        return all(map(le, self.start, other.start)) and all(map(ge, self.stop, other.stop))

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same box, relative to `origin`."""
        return Box(
            tuple(a - o for a, o in zip(self.start, origin, strict=True)),
            tuple(b - o for b, o in zip(self.stop, origin, strict=True)),
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


@lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def flat_range_to_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cuts elements `[start, stop)` of a row-major array into boxes.

    Arguments:
        shape: shape of the array.
        start: first flat (row-major) element.
        stop: one past the last flat element.

    Returns:
        At most `2 * rank - 1` boxes in row-major order, so that their concatenated row-major
        contents are the flat range.

    Example:
        >>> [str(b) for b in flat_range_to_boxes((4, 3), 2, 10)]
        ['[0:1, 2:3]', '[1:3, 0:3]', '[3:4, 0:1]']
    """
    from unickpt.arrays.index_map import Digit, pull  # here, so that importing unickpt stays fast

    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"flat range [{start}, {stop}) does not lie within shape {tuple(shape)}")
    if not shape:
        return [Box((), ())] * (stop - start)
    digits = tuple(Digit(n, 0, n, axis) for axis, n in enumerate(shape))
    ranges = pull([digits], [start], [stop], tuple((0, n) for n in shape))
    return sorted((Box(*zip(*axes, strict=True)) for axes in ranges), key=attrgetter("start"))


def cut(box: Box, most: int) -> Iterator[Box]:
    """Pieces of a box in row-major order, each a contiguous range of at most `most` elements.

    Example:
        >>> [str(b) for b in cut(Box((0, 0), (3, 4)), 6)]
        ['[0:1, 0:4]', '[1:2, 0:4]', '[2:3, 0:4]']
    """
    wide = [dim for dim, n in enumerate(box.shape) if n > 1]
    if box.empty:
        return
    if not wide or box.size <= most:
        yield box
        return
    dim = wide[0]
    rows = max(1, most // (box.size // box.shape[dim]))
    for start in range(box.start[dim], box.stop[dim], rows):
        stop = min(start + rows, box.stop[dim])
        yield from cut(Box(_replaced(box.start, dim, start), _replaced(box.stop, dim, stop)), most)


def overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Positions of two boxes that share an element, or None if all are disjoint.

    Takes O(n log n) for boxes that straight cuts separate, as in all grids, and for boxes that
    differ in at most two dimensions.
    """
    order = [i for i, b in enumerate(boxes) if not b.empty]
    if len(order) < 2:
        return None
    if not boxes[order[0]].start:
        return (order[0], order[1])
    starts = np.array([boxes[i].start for i in order], dtype=np.int64)
    stops = np.array([boxes[i].stop for i in order], dtype=np.int64)
    groups = [np.arange(len(order))]
    while groups:
        group = groups.pop()
        apart = _cut_apart(starts[group], stops[group])
        if apart is not None:
            groups += [group[part] for part in apart if len(part) > 1]
            continue
        pair = _sweep(starts[group], stops[group])
        if pair is not None:
            first, second = sorted(order[int(group[k])] for k in pair)
            return (first, second)
    return None


_Positions = np.ndarray[Any, np.dtype[np.int64]]


def _cut_apart(starts: _Positions, stops: _Positions) -> list[_Positions] | None:
    """Groups of boxes between straight cuts that cross no box; None without such a cut."""
    for dim in range(starts.shape[1]):
        sweep = np.argsort(starts[:, dim], kind="stable")
        reach = np.maximum.accumulate(stops[sweep, dim])
        cuts = np.flatnonzero(reach[:-1] <= starts[sweep[1:], dim]) + 1
        if len(cuts):
            return np.split(sweep, cuts)
    return None


def _sweep(starts: _Positions, stops: _Positions) -> tuple[int, int] | None:
    """Positions of two boxes that share an element, of boxes that no straight cut separates; sweeps
    along one dimension."""
    differ = [
        d
        for d in range(starts.shape[1])
        if (starts[:, d] != starts[0, d]).any() or (stops[:, d] != stops[0, d]).any()
    ]
    # Dimensions in which all boxes are equal separate none of them.
    starts, stops = starts[:, differ], stops[:, differ]
    if len(differ) < 2:  # there is no cut between the first two
        order = np.argsort(starts[:, 0], kind="stable") if differ else range(2)
        return int(order[0]), int(order[1])
    # Sweep the dimension with the most different starts, so that few boxes are open at once.
    dim = max(range(len(differ)), key=lambda d: len({*starts[:, d].tolist()}))
    if len(differ) == 2:
        return _sweep_plane(starts[:, [dim, 1 - dim]].tolist(), stops[:, [dim, 1 - dim]].tolist())
    sweep = np.argsort(starts[:, dim], kind="stable")
    starts, stops = starts[sweep], stops[sweep]
    opened = np.empty(0, np.int64)
    for k in range(len(sweep)):
        opened = opened[stops[opened, dim] > starts[k, dim]]
        meets = (starts[opened] < stops[k]) & (stops[opened] > starts[k])
        hit = np.flatnonzero(meets.all(axis=1))
        if hit.size:
            return int(sweep[opened[hit[0]]]), int(sweep[k])
        opened = np.append(opened, k)
    return None


def _sweep_plane(starts: list[list[int]], stops: list[list[int]]) -> tuple[int, int] | None:
    """Sweeps the first dimension; open boxes must be disjoint in the second."""
    events = sorted(
        [(start[0], 1, k) for k, start in enumerate(starts)]
        + [(stop[0], 0, k) for k, stop in enumerate(stops)]
    )
    opened: list[tuple[int, int]] = []  # where each open box starts in the second dimension
    for _, begins, k in events:
        low, high = starts[k][1], stops[k][1]
        position = bisect_left(opened, (low, k))
        if not begins:
            del opened[position]
            continue
        if position < len(opened) and opened[position][0] < high:
            return opened[position][1], k
        if position > 0 and stops[opened[position - 1][1]][1] > low:
            return opened[position - 1][1], k
        opened.insert(position, (low, k))
    return None


_PRIME = (1 << 61) - 1


def fill_exactly(whole: Box, boxes: Sequence[Box]) -> bool:
    """Whether every element of `whole` lies in exactly one of `boxes`; all must lie within it.

    Each index of each dimension gets a random weight, each element the product of its indices'
    weights. If the weights of the boxes add up to that of the whole, they fill it: by the
    Schwartz-Zippel lemma the probability of an error is below 2**-56, even for hostile boxes.
    Unlike a sweep, it takes linear time in any number of dimensions.
    """
    sums: list[dict[int, int]] = [{} for _ in whole.start]

    def weight(box: Box) -> int:
        out = 1
        for weights, start, stop in zip(sums, box.start, box.stop, strict=True):
            for boundary in (start, stop):
                if boundary not in weights:
                    weights[boundary] = int.from_bytes(os.urandom(16)) % _PRIME
            out = out * (weights[stop] - weights[start]) % _PRIME
        return out

    return sum(map(weight, boxes)) % _PRIME == weight(whole)


def uncovered(whole: Box, boxes: Iterable[Box]) -> Box | None:
    """A part of `whole` that no box covers, or None if all of it is covered.

    Halves it repeatedly, and continues with a half that has more elements than its boxes.

    Arguments:
        whole: to be covered.
        boxes: disjoint.
    """
    inside = _within(whole, boxes)
    if sum(box.size for box in inside) == whole.size:
        return None
    while inside:
        dim, middle = _halfway(whole, inside)
        for half in (
            Box(whole.start, _replaced(whole.stop, dim, middle)),
            Box(_replaced(whole.start, dim, middle), whole.stop),
        ):
            within = _within(half, inside)
            if sum(box.size for box in within) < half.size:
                whole, inside = half, within
                break
    return whole


def _within(whole: Box, boxes: Iterable[Box]) -> list[Box]:
    """The intersections of boxes with another one, without empty ones."""
    return [common for box in boxes if (common := whole.intersect(box)) is not None]


def _halfway(whole: Box, boxes: Sequence[Box]) -> tuple[int, int]:
    """A dimension, and the median of all box sides within `whole` along it."""
    sides = [
        sorted(s for box in boxes for s in (box.start[d], box.stop[d]) if a < s < b)
        for d, (a, b) in enumerate(zip(whole.start, whole.stop, strict=True))
    ]
    dim = max(range(len(sides)), key=lambda d: len(sides[d]))
    return dim, sides[dim][len(sides[dim]) // 2]


def _replaced(position: Sequence[int], dim: int, coordinate: int) -> tuple[int, ...]:
    return (*position[:dim], coordinate, *position[dim + 1 :])
