"""Values: which array, or part of one, holds the same numbers as an array of the other side.

The sum of the elements' hashes does not depend on their order, and that of a part is the difference
of two sums. So arrays that were transposed, stacked or concatenated are found without trying
orders; then the few orders that fit the shapes are tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from unickpt.extend import Array, LeafFact, dtype_kind
from unickpt.plugins.observe.checking import Side

_MOST_ORDERS = 720


@dataclass(frozen=True)
class Order:
    """How the axes of one shape make up another: `large.transpose(order).reshape(small)`.

    Arguments:
        many: whether it is the first shape that has the axes one by one; else the second one.
        order: of its axes in the other shape.
        groups: how many of them each dimension of the other shape has.
    """

    many: bool
    order: tuple[int, ...]
    groups: tuple[int, ...]

    def apply(self, x: Array, shape: tuple[int, ...]) -> Array:
        """An array of the first shape as one of the second."""
        if self.many:
            result: Array = x.transpose(self.order).reshape(shape)
            return result
        inner = [shape[axis] for axis in self.order]
        back = np.argsort(self.order)
        split: Array = x.reshape(inner).transpose(back).reshape(shape)
        return split


def orders(first: tuple[int, ...], second: tuple[int, ...]) -> list[Order]:
    """All orders that turn the axes of one shape into the other, those that keep them first."""
    result = []
    for many, (large, small) in ((True, (first, second)), (False, (second, first))):
        if len(large) < len(small) or (not many and len(large) == len(small)):
            continue
        axes = [axis for axis, n in enumerate(large) if n != 1]
        ones = [axis for axis, n in enumerate(large) if n == 1]
        for order in itertools.islice(itertools.permutations(axes), _MOST_ORDERS):
            groups = _groups([large[axis] for axis in order], small)
            if groups is not None:
                result.append(Order(many, (*order, *ones), groups))
    return result


def _groups(sizes: Sequence[int], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """How many of the sizes, in order, make up each dimension; None if they do not."""
    counts, position = [], 0
    for extent in shape:
        product, begin = 1, position
        while product < extent and position < len(sizes):
            product *= sizes[position]
            position += 1
        if product != extent:
            return None
        counts.append(position - begin)
    return tuple(counts) if position == len(sizes) else None


@dataclass(frozen=True)
class Region:
    """A part of an array.

    Arguments:
        name: of the array.
        stacked: its axes where the part has one index each.
        index: these.
        along: the axis where the part has a range; None if there is none.
        start, stop: of the range.
    """

    name: str
    stacked: tuple[int, ...] = ()
    index: tuple[int, ...] = ()
    along: int | None = None
    start: int = 0
    stop: int = 0

    def of(self, x: Array) -> Array:
        where: list[int | slice] = [slice(None)] * x.ndim
        if self.along is not None:
            where[self.along] = slice(self.start, self.stop)
        for axis, position in zip(self.stacked, self.index, strict=True):
            where[axis] = position
        part: Array = x[tuple(where)]
        return part


class Values:
    """The arrays of one side, with hashes of their elements.

    Arguments:
        side: reads them.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self._arrays: dict[str, Array] = {}

    @property
    def facts(self) -> Mapping[str, LeafFact]:
        return self._side.arrays

    def array(self, name: str) -> Array:
        if name not in self._arrays:
            self._arrays = {name: self._side.whole(name)}  # one at a time
        return self._arrays[name]

    @cached_property
    def sums(self) -> dict[str, int]:
        """The sum of the hashes of each array's elements."""
        return {
            name: int(hashes(self.array(name)).sum(dtype=np.uint64))
            for name in self.facts
            if math.prod(self.facts[name].shape)
        }

    @cached_property
    def is_constant(self) -> dict[str, bool]:
        """Whether all elements of an array are the same, so that values tell nothing."""
        result = {}
        for name in self.sums:
            flat = self.array(name).reshape(-1)
            result[name] = bool((flat == flat[0]).all())
        return result


def hashes(x: Array) -> Array:
    """A hash of each element's value, the same for all floats that hold it."""
    if dtype_kind(x.dtype) == "float":
        bits = x.astype(np.float64).view(np.uint64)
    elif x.dtype.kind == "c":
        bits = x.astype(np.complex128).view(np.uint64)[..., ::2]
    else:
        bits = x.astype(np.int64).view(np.uint64)
    mixed = (bits ^ (bits >> np.uint64(32))) * np.uint64(0x9FB21C651E98DF25)
    result: Array = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xD6E8FEB86659FD93)
    return result


def regions(
    name: str, values: Values, sums: Mapping[str, int], facts: Mapping[str, LeafFact]
) -> Iterator[tuple[str, Region]]:
    """Which arrays of the other side are parts of an array: slices, or pieces along an axis.

    Arguments:
        name: of the large array.
        values: its side.
        sums: the sums of the arrays that are looked for, by name.
        facts: of these.
    """
    x = values.array(name)
    mixed = hashes(x)
    left = dict(sums)
    sizes = {other: math.prod(facts[other].shape) for other in left}
    for stacked in _stacks(x.ndim):
        count = math.prod(x.shape[axis] for axis in stacked)
        if count == 1:
            continue
        sliced = _sums(mixed, stacked)
        by_sum = {int(v): np.unravel_index(i, sliced.shape) for i, v in enumerate(sliced.flat)}
        for other in [n for n in left if sizes[n] * count == x.size and left[n] in by_sum]:
            index = tuple(int(i) for i in by_sum[left.pop(other)])
            yield other, Region(name, stacked, index)
    for stacked in _stacks(x.ndim):
        for along in range(x.ndim):
            if along not in stacked:
                yield from _pieces(name, mixed, stacked, along, left, sizes)


def _stacks(rank: int) -> Iterator[tuple[int, ...]]:
    for count in range(min(3, rank)):
        yield from itertools.combinations(range(rank), count)


def _sums(mixed: Array, axes: tuple[int, ...]) -> Array:
    summed_axes = tuple(axis for axis in range(mixed.ndim) if axis not in axes)
    sums: Array = mixed.sum(axis=summed_axes, dtype=np.uint64)
    return sums


def _pieces(
    name: str,
    mixed: Array,
    stacked: tuple[int, ...],
    along: int,
    left: dict[str, int],
    sizes: Mapping[str, int],
) -> Iterator[tuple[str, Region]]:
    extent = mixed.shape[along]
    count = math.prod(mixed.shape[axis] for axis in stacked)
    unit = mixed.size // (count * extent)
    lengths = {
        n: sizes[n] // unit for n in left if sizes[n] % unit == 0 and sizes[n] < unit * extent
    }
    if not lengths:
        return
    axes = tuple(sorted((*stacked, along)))
    table = np.moveaxis(_sums(mixed, axes), axes.index(along), -1)
    rows = table.reshape(-1, extent)
    sums = np.concatenate([np.zeros((len(rows), 1), np.uint64), np.cumsum(rows, 1, np.uint64)], 1)
    by_length: dict[int, list[str]] = {}
    for other, length in lengths.items():
        by_length.setdefault(length, []).append(other)
    for length, names in by_length.items():
        differences = sums[:, length:] - sums[:, :-length]
        flat = differences.reshape(-1)
        order = np.argsort(flat, kind="stable")
        for other in names:
            position = np.searchsorted(flat[order], np.uint64(left[other]))
            if position == len(flat) or int(flat[order[position]]) != left[other]:
                continue
            row, start = divmod(int(order[position]), differences.shape[1])
            index = np.unravel_index(row, table.shape[:-1]) if stacked else ()
            del left[other]
            yield (
                other,
                Region(name, stacked, tuple(int(i) for i in index), along, start, start + length),
            )


def equal_orders(array: Array, other: Array) -> list[Order]:
    """The orders of axes that turn an array into another."""
    wide = array.dtype != other.dtype
    a, b = (array.astype(np.float64), other.astype(np.float64)) if wide else (array, other)
    return [
        order for order in orders(array.shape, other.shape)
        if np.array_equal(order.apply(a, other.shape), b)
    ]  # fmt: skip
