"""Fitting: the terms of rules, whose dimensions are axes, from the blocks that arrays share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from unickpt.extend import Array
from unickpt.plugins.observe.axis_items import (
    Dimensions,
    Item,
    ItemAxis,
    ItemPart,
    ItemPlace,
    axes_in,
    insert,
)
from unickpt.plugins.observe.regular_blocks import Block, Irregular


@dataclass(frozen=True)
class NumberExpr:
    """A number in a name: a constant and multiples of axes."""

    constant: int
    terms: tuple[tuple[ItemAxis, int], ...] = ()

    def leaves(self) -> list[ItemAxis]:
        return [leaf for axis, _ in self.terms for leaf in axis.leaves()]


Name = tuple[str | NumberExpr, ...]
"""A name: texts, and numbers as formulas of axes."""


@dataclass
class Term:
    """An array, or several whose numbers are axes, on one side of a rule.

    Arguments:
        name: of it.
        dims: the items of each dimension.
        blocks: its blocks.
        scale, offset: its elements are multiplied by the one, then the other is added.
        names: of all its arrays.
        is_one_of_several: whether other terms have names like its own with other numbers.
    """

    name: Name
    dims: list[list[Item]]
    blocks: frozenset[int]
    names: frozenset[str]
    scale: float = 1.0
    offset: float = 0.0
    is_one_of_several: bool = False


@dataclass
class Draft:
    """A rule: terms of both sides, and on the right those that are ties of one term.

    Arguments:
        left: terms.
        right: for each array all of its names.
        is_whole: whether each is one array that stays unchanged.
        shape: of that array.
    """

    left: list[Term]
    right: list[list[Term]]
    is_whole: bool = False
    shape: tuple[int, ...] = ()

    def side(self, is_left: bool) -> list[Term]:
        """The terms of one side."""
        return self.left if is_left else [term for terms in self.right for term in terms]

    def names(self, is_left: bool) -> list[str]:
        """The names of the arrays of one side."""
        return [name for term in self.side(is_left) for name in term.names]


@dataclass(frozen=True)
class Pieced:
    """A block: the elements that two groups of arrays share in one regular order."""

    left: int
    right: int
    block: Block
    scale: float
    offset: float


@dataclass
class ArrayGroup:
    """Arrays of one side whose names differ only in numbers.

    Arguments:
        texts: the name without the numbers that vary, with None for each of these.
        members: the numbers of each array, and its position among all of the side.
        shape: of each.
        names: of all.
    """

    texts: tuple[str | None, ...]
    members: dict[int, tuple[int, ...]]
    shape: tuple[int, ...]
    names: list[str]

    @property
    def numbers(self) -> int:
        return sum(text is None for text in self.texts)

    @property
    def width(self) -> int:
        """How many coordinates an element has: the numbers in the name, and its index."""
        return self.numbers + len(self.shape)

    def coordinates(self, member: int, flat: Array) -> list[Array]:
        """The coordinates of elements of one of the arrays."""
        numbers = (np.full(len(flat), number, np.int64) for number in self.members[member])
        return [*numbers, *np.unravel_index(flat, self.shape or (1,))[: len(self.shape)]]

    def name(self, numbers: Sequence[NumberExpr]) -> Name:
        picked = iter(numbers)
        return tuple(next(picked) if text is None else text for text in self.texts)


@dataclass
class Fit:
    """The terms of a component."""

    left: Sequence[ArrayGroup]
    right: Sequence[ArrayGroup]
    pieces: Sequence[Pieced]
    axes: list[list[ItemAxis]] = field(default_factory=list)

    def drafts(self) -> Iterator[Draft]:
        self.axes = [[ItemAxis(radix) for radix, _ in piece.block.digits] for piece in self.pieces]
        dims = Dimensions()
        lefts = [t for group in range(len(self.left)) for t in self._terms(True, group, dims)]
        done = len(dims.units)
        rights = [t for group in range(len(self.right)) for t in self._terms(False, group, dims)]
        for number, (unit, blocks) in enumerate(dims.units):
            for term in rights if number < done else lefts:
                mine = blocks & term.blocks
                if mine:
                    if not term.dims:
                        raise Irregular("numbers without dimensions become elements of an array")
                    insert(term.dims[0], unit, mine)
        for lefts_of, rights_of in _connected_terms(lefts, rights):
            yield self._draft(lefts_of, rights_of)

    def _terms(self, is_left: bool, group_number: int, dims: Dimensions) -> Iterator[Term]:
        """The terms of a group: its blocks by the numbers that they have in the names."""
        group = (self.left if is_left else self.right)[group_number]
        by_numbers: dict[object, list[int]] = {}
        for number, piece in enumerate(self.pieces):
            if (piece.left if is_left else piece.right) != group_number:
                continue
            before = 0 if is_left else self.left[piece.left].width
            key = tuple(
                (piece.block.first[before + k], tuple((radix, step[before + k])
                 for radix, step in piece.block.digits if step[before + k]))
                for k in range(group.numbers)
            )  # fmt: skip
            by_numbers.setdefault(key, []).append(number)
        for members in by_numbers.values():
            term = self._term(is_left, group, members, dims)
            term.is_one_of_several = len(by_numbers) > 1
            yield term

    def _term(
        self, is_left: bool, group: ArrayGroup, members: Sequence[int], dims: Dimensions
    ) -> Term:
        columns = [[self._part(is_left, m, k) for m in members] for k in range(group.width)]
        numbers = [_number(parts) for parts in columns[: group.numbers]]
        pairs = zip(group.shape, columns[group.numbers :], strict=True)
        shape = [dims.factors(extent, parts) for extent, parts in pairs]
        return Term(group.name(numbers), shape, frozenset(members), frozenset(group.names))

    def _part(self, is_left: bool, member: int, coordinate: int) -> ItemPart:
        """The part of one side's coordinate that a block occupies."""
        piece = self.pieces[member]
        width = self.left[piece.left].width
        column = coordinate if is_left else width + coordinate
        offset = piece.block.first[column]
        places = []
        for (radix, steps), axis in zip(piece.block.digits, self.axes[member], strict=True):
            side_steps = steps[:width] if is_left else steps[width:]
            moved = sum(step != 0 for step in side_steps)
            if moved != 1:
                raise Irregular(
                    "one of its axes runs along two dimensions at once"
                    if moved
                    else "an element is copied to several places"
                )
            step = steps[column]
            if step < 0:
                offset += step * (radix - 1)
            if step:
                places.append(ItemPlace(axis, abs(step), step < 0))
        places.sort(key=lambda place: -place.stride)
        return ItemPart(member, offset, tuple(places))

    def _draft(self, lefts: list[Term], rights: list[Term]) -> Draft:
        ties: dict[object, list[Term]] = {}
        for term in rights:
            ties.setdefault(self._left_elements(term), []).append(term)
        for terms in ties.values():
            if len(terms) > 1 and len({len(t.names) for t in terms}) > 1:
                raise Irregular("an element is copied to several arrays")
        draft = Draft(lefts, list(ties.values()))
        self._add_arithmetic(draft)
        return draft

    def _left_elements(self, term: Term) -> object:
        """The part of the left side that a term takes; equal for ties."""
        blocks = []
        for member in sorted(term.blocks):
            piece = self.pieces[member]
            width = self.left[piece.left].width
            extent = np.prod([radix for radix, _ in piece.block.digits], dtype=np.int64)
            blocks.append((piece.left, piece.block.first[:width], int(extent)))
        return tuple(sorted(blocks))

    def _add_arithmetic(self, draft: Draft) -> None:
        """Puts arithmetic on a term of the left side whose blocks all have it, or of the right."""
        for term in draft.left:
            kinds = {(self.pieces[m].scale, self.pieces[m].offset) for m in term.blocks}
            if len(kinds) == 1:
                ((term.scale, term.offset),) = kinds
        for terms in draft.right:
            for term in terms:
                self._add_rest(term, draft.left)

    def _add_rest(self, term: Term, lefts: Sequence[Term]) -> None:
        """The remaining arithmetic of a right term: `left = (right - offset) / scale`."""
        kinds = set()
        for member in term.blocks:
            piece = self.pieces[member]
            source = next(left for left in lefts if member in left.blocks)
            if (source.scale, source.offset) == (piece.scale, piece.offset):
                kinds.add((1.0, 0.0))
            elif (source.scale, source.offset) == (1.0, 0.0):
                kinds.add((1 / piece.scale, -piece.offset / piece.scale))
            else:
                raise Irregular("its parts are scaled by different numbers on both sides")
        if len(kinds) > 1:
            raise Irregular("its parts are scaled by different numbers")
        ((term.scale, term.offset),) = kinds


def _number(parts: Sequence[ItemPart]) -> NumberExpr:
    """A number in names; equal for all parts, whose axes become the same."""
    parts = [part.opened() for part in parts]
    first = parts[0]
    for part in parts[1:]:
        for mine, other in zip(first.places, part.places, strict=True):
            if (mine.axis.extent, mine.stride) != (other.axis.extent, other.stride):
                raise Irregular("its names are numbered in several ways")
            other.axis.unify(mine.axis)
    if any(place.reverse for place in first.places):
        raise Irregular("its names are numbered backwards")
    return NumberExpr(first.offset, tuple((place.axis, place.stride) for place in first.places))


def _connected_terms(
    lefts: Sequence[Term], rights: Sequence[Term]
) -> Iterator[tuple[list[Term], list[Term]]]:
    """Terms that share blocks."""
    remaining_terms = [*((True, term) for term in lefts), *((False, term) for term in rights)]
    while remaining_terms:
        blocks, component = set(remaining_terms[0][1].blocks), [remaining_terms.pop(0)]
        while near := [member for member in remaining_terms if member[1].blocks & blocks]:
            remaining_terms = [m for m in remaining_terms if not m[1].blocks & blocks]
            component += near
            blocks = blocks.union(*(term.blocks for _, term in near))
        yield (
            [term for is_left, term in component if is_left],
            [term for is_left, term in component if not is_left],
        )


def all_axes(term: Term) -> Iterator[ItemAxis]:
    """The axes of a term, those of its name first."""
    for item in term.name:
        if isinstance(item, NumberExpr):
            yield from item.leaves()
    for items in term.dims:
        yield from axes_in(items)
