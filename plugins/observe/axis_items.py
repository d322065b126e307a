"""Axes: the dimensions of arrays as products and sums, from blocks of elements.

The places of a block along a dimension are an offset and digits with strides. A digit that all
blocks of an array share, outermost or innermost, is an axis of all of them. Consecutive blocks are
the pieces of a sum. Gaps are padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from unickpt.plugins.observe.regular_blocks import Irregular


class ItemAxis:
    """An axis; it may turn out to be the same as another one, or the product of several."""

    def __init__(self, extent: int) -> None:
        self.extent = extent
        self._same: ItemAxis | None = None
        self._parts: tuple[ItemAxis, ItemAxis] | None = None

    @property
    def representative(self) -> ItemAxis:
        return self if self._same is None else self._same.representative

    def leaves(self) -> Iterator[ItemAxis]:
        """The axes that it is the product of, outermost first."""
        representative = self.representative
        if representative._parts is None:
            yield representative
            return
        for part in representative._parts:
            yield from part.leaves()

    def split(self, outer: int) -> None:
        """Makes it the product of two; only of one that is not."""
        representative = self.representative
        representative._parts = ItemAxis(outer), ItemAxis(representative.extent // outer)

    def unify(self, other: ItemAxis) -> None:
        """Makes it the same as another of the same extent, both without parts."""
        representative, other = self.representative, other.representative
        if representative is not other:
            representative._same = other


@dataclass(frozen=True)
class ItemPlace:
    """A digit along a dimension.

    Arguments:
        axis: whose index it is.
        stride: how far apart two neighbours are.
        reverse: whether the axis runs backwards.
    """

    axis: ItemAxis
    stride: int
    reverse: bool = False

    def leaves(self) -> Iterator[ItemPlace]:
        stride = self.stride * self.axis.representative.extent
        for leaf in self.axis.leaves():
            stride //= leaf.extent
            yield ItemPlace(leaf, stride, self.reverse)


@dataclass(frozen=True)
class ItemPart:
    """The part of a dimension that a block occupies.

    Arguments:
        block: its number.
        offset: of its first element.
        places: its digits, outermost first.
    """

    block: int
    offset: int
    places: tuple[ItemPlace, ...]

    def opened(self) -> ItemPart:
        return replace(self, places=tuple(leaf for p in self.places for leaf in p.leaves()))

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.offset + 1 + sum((p.axis.extent - 1) * p.stride for p in self.places)


@dataclass
class Single:
    """An axis of a dimension."""

    axis: ItemAxis
    reverse: bool = False


@dataclass
class Padding:
    """Elements without a counterpart."""

    extent: int


@dataclass
class Segment:
    """A piece of a sum.

    Arguments:
        blocks: that lie in it.
        items: its factors, outermost first.
    """

    blocks: frozenset[int]
    items: list[Item]


@dataclass
class Sum:
    """Pieces, one after the other."""

    segments: list[Segment | Padding] = field(default_factory=list)


Item = Single | Sum
"""A factor of a dimension."""


@dataclass
class Dimensions:
    """Works out the dimensions of arrays.

    Arguments:
        units: axes of extent 1 that were made because a piece needs an axis, with its blocks.
    """

    units: list[tuple[ItemAxis, frozenset[int]]] = field(default_factory=list)

    def factors(self, extent: int, parts: Sequence[ItemPart]) -> list[Item]:
        """The items that a dimension consists of.

        Arguments:
            extent: of the dimension, or of its rest.
            parts: that each block occupies.

        Raises:
            Irregular: no axes give this.
        """
        parts = [part.opened() for part in parts]
        if any(part.stop > extent for part in parts):
            raise Irregular("its pieces overlap in a way that axes cannot describe")
        if extent == 1 and not any(part.places for part in parts):
            return []
        outer = self._outer(extent, parts)
        if outer is not None:
            return outer
        groups = _groups(parts)
        if len(groups) > 1 or groups[0][0] > 0 or groups[0][1] < extent:
            return [self._sum(extent, groups)]
        inner = self._inner(extent, parts)
        if inner is None:
            raise Irregular("its pieces overlap in a way that axes cannot describe")
        return inner

    def _outer(self, extent: int, parts: Sequence[ItemPart]) -> list[Item] | None:
        """With an outermost axis of all parts, if there is one."""
        if any(
            not part.places
            or part.places[0].stride * part.places[0].axis.extent != extent
            or part.offset >= part.places[0].stride
            for part in parts
        ):
            return None
        places = [part.places[0] for part in parts]
        common = math.gcd(*(p.axis.extent for p in places))
        if common == 1 or len({p.reverse for p in places}) > 1:
            return None
        return self._peeled(parts, 0, common, extent // common)

    def _inner(self, extent: int, parts: Sequence[ItemPart]) -> list[Item] | None:
        """With an innermost axis of all parts, if there is one."""
        places = [part.places[-1] for part in parts if part.places]
        if len(places) < len(parts) or any(p.stride != 1 for p in places):
            return None
        common = math.gcd(*(p.axis.extent for p in places))
        strides = [p.stride for part in parts for p in part.places[:-1]]
        common = math.gcd(common, extent, *strides, *(part.offset for part in parts))
        if common == 1 or len({p.reverse for p in places}) > 1:
            return None
        return self._peeled(parts, -1, common, extent // common)

    def _peeled(
        self, parts: Sequence[ItemPart], position: int, common: int, remaining_extent: int
    ) -> list[Item]:
        """The items that a dimension consists of: one axis of all parts, and the rest."""
        for part in parts:
            leaves = list(part.places[position].axis.leaves())
            if len(leaves) == 1 and leaves[0].extent != common:
                leaves[0].split(common if position == 0 else leaves[0].extent // common)
        opened = [part.opened() for part in parts]
        axis = opened[0].places[position].axis
        for part in opened[1:]:
            part.places[position].axis.unify(axis)
        single = Single(axis, opened[0].places[position].reverse)
        if position == 0:
            inner = [replace(part, places=part.places[1:]) for part in opened]
            return [single, *self.factors(remaining_extent, inner)]
        outer = [
            ItemPart(
                part.block,
                part.offset // common,
                tuple(replace(p, stride=p.stride // common) for p in part.places[:-1]),
            )
            for part in opened
        ]
        return [*self.factors(remaining_extent, outer), single]

    def _sum(self, extent: int, groups: Sequence[tuple[int, int, list[ItemPart]]]) -> Sum:
        result, end = Sum(), 0
        for start, stop, parts in groups:
            if start > end:
                result.segments.append(Padding(start - end))
            inner = [replace(part, offset=part.offset - start) for part in parts]
            items = self.factors(stop - start, inner)
            blocks = frozenset(part.block for part in parts)
            if not items:
                axis = ItemAxis(1)
                self.units.append((axis, blocks))
                items = [Single(axis)]
            result.segments.append(Segment(blocks, items))
            end = stop
        if end < extent:
            result.segments.append(Padding(extent - end))
        return result


def _groups(parts: Sequence[ItemPart]) -> list[tuple[int, int, list[ItemPart]]]:
    """Parts by the intervals that they occupy: those that overlap are in one."""
    groups: list[tuple[int, int, list[ItemPart]]] = []
    for part in sorted(parts, key=lambda part: part.offset):
        if groups and part.offset < groups[-1][1]:
            start, stop, members = groups[-1]
            groups[-1] = start, max(stop, part.stop), [*members, part]
        else:
            groups.append((part.offset, part.stop, [part]))
    return groups


def insert(items: list[Item], unit: ItemAxis, blocks: frozenset[int]) -> None:
    """Adds an axis of extent 1 to the part of a dimension that some blocks occupy."""
    for item in items:
        for segment in item.segments if isinstance(item, Sum) else ():
            if isinstance(segment, Segment) and blocks <= segment.blocks:
                insert(segment.items, unit, blocks)
                return
    items.append(Single(unit))


def axes_in(items: Sequence[Item]) -> Iterator[ItemAxis]:
    """All axes of a dimension, in order."""
    for item in items:
        if isinstance(item, Single):
            yield from item.axis.leaves()
            continue
        for segment in item.segments:
            if isinstance(segment, Segment):
                yield from axes_in(segment.items)
