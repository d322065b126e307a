"""Components: arrays of both sides that share elements, and the rule for them.

Arrays whose names differ only in numbers are taken together: the numbers are coordinates as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from unickpt.arrays.dtypes import Array
from unickpt.observing.axis_items import Axis, Dimensions, Item, Part, Place, axes_in, insert
from unickpt.observing.element_codes import Traced
from unickpt.observing.regular_blocks import Block, Irregular, blocks_of

_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]*)(?![0-9])")


@dataclass(frozen=True)
class Input:
    """An input of a converter: its name, shape and the name of its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class NumberExpr:
    """A number in a name: a constant and multiples of axes."""

    constant: int
    terms: tuple[tuple[Axis, int], ...] = ()


Name = tuple[str | NumberExpr, ...]
"""A name: texts, and numbers made of axes."""


@dataclass
class Term:
    """An array, or several whose numbers are axes, on one side of a rule.

    Arguments:
        name: of it.
        dims: what each dimension is made of.
        blocks: its blocks.
        scale, offset: what its elements are multiplied by, and what is added then.
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
        is_whole: whether each is one array that stays as it is.
        shape: of that array.
    """

    left: list[Term]
    right: list[list[Term]]
    is_whole: bool = False
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pieced:
    """A block: the elements that two groups of arrays share in one regular order."""

    left: int
    right: int
    block: Block
    scale: float
    offset: float


@dataclass
class Group:
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

    def name(self, numbers: Sequence[NumberExpr]) -> Name:
        picked = iter(numbers)
        return tuple(next(picked) if text is None else text for text in self.texts)


def drafts(
    inputs: Sequence[Input],
    outputs: Sequence[Traced],
    together: Callable[[str], str] | None = None,
) -> Iterator[Draft | Misfit]:
    """The rules for all outputs that are made of inputs, in the order of the inputs.

    Arguments:
        inputs: all inputs.
        outputs: those that are made of inputs.
        together: what names of outputs have in common that shall be in one rule, if axes allow it,
            also if they share no input.
    """
    for lefts, rights in _components(len(inputs), outputs, together):
        try:
            yield from list(_draft(inputs, lefts, [outputs[at] for at in rights]))
            continue
        except Irregular as error:
            why = str(error)
        if together is None:
            names = [inputs[at].name for at in lefts]
            yield Misfit(names, [outputs[at].name for at in rights], why)
        else:
            yield from drafts(inputs, [outputs[at] for at in rights])


@dataclass(frozen=True)
class Misfit:
    """Arrays for which no rule was found: the names of both sides, and why."""

    left: Sequence[str]
    right: Sequence[str]
    why: str


def _components(
    count: int, outputs: Sequence[Traced], together: Callable[[str], str] | None
) -> Iterator[tuple[list[int], list[int]]]:
    """Inputs and outputs that share elements, or belong together by their names."""
    parent = list(range(count + len(outputs)))

    def find(at: int) -> int:
        while parent[at] != at:
            parent[at] = parent[parent[at]]
            at = parent[at]
        return at

    first: dict[str, int] = {}
    for number, output in enumerate(outputs):
        for source in output.sources:
            parent[find(count + number)] = find(source)
        if together is not None:
            other = first.setdefault(together(output.name), count + number)
            parent[find(count + number)] = find(other)
    found: dict[int, tuple[list[int], list[int]]] = {}
    for at in range(count):
        found.setdefault(find(at), ([], []))[0].append(at)
    for number in range(len(outputs)):
        root = find(count + number)
        if root in found:
            found[root][1].append(number)
    yield from (pair for pair in found.values() if pair[1])


def _draft(
    every: Sequence[Input], lefts: Sequence[int], outputs: Sequence[Traced]
) -> Iterator[Draft]:
    inputs = [(at, every[at]) for at in lefts]
    if len(inputs) == len(outputs) == 1 and _is_whole(inputs[0][1], outputs[0]):
        yield _whole(inputs[0][1], outputs[0])
        return
    left = _grouped([(at, one.name, one.shape) for at, one in inputs])
    right = [
        group
        for together in _copies(outputs)
        for group in _grouped([(at, outputs[at].name, outputs[at].shape) for at in together])
    ]
    _check_shares(outputs)
    pieces = list(_pieces(left, right, outputs))
    yield from _Fit(left, right, pieces).drafts()


def _is_whole(one: Input, output: Traced) -> bool:
    return (
        one.shape == output.shape
        and bool((output.scale == 1).all() and (output.offset == 0).all())
        and np.array_equal(output.index, np.arange(output.index.size))
    )


def _whole(one: Input, output: Traced) -> Draft:
    return Draft(
        [Term((one.name,), [], frozenset({0}), frozenset({one.name}))],
        [[Term((output.name,), [], frozenset({0}), frozenset({output.name}))]],
        is_whole=True,
        shape=one.shape,
    )


def _check_shares(outputs: Sequence[Traced]) -> None:
    """Refuses outputs in which an element of an input is more than once."""
    for one in outputs:
        taken = one.source >= 0
        places = np.stack([one.source[taken], one.index[taken]])
        if places.shape[1] and np.unique(places, axis=1).shape[1] < places.shape[1]:
            raise Irregular("an element is copied to several places of one array")


def _copies(outputs: Sequence[Traced]) -> list[list[int]]:
    """Outputs in groups: the first ones of those with the same elements, the second ones, ..."""
    seen: dict[int, int] = {}
    found: list[list[int]] = []
    for at, one in enumerate(outputs):
        index, source = (one.index + 1).astype(np.uint64), (one.source + 1).astype(np.uint64)
        mixed = index * np.uint64(0x9E3779B97F4A7C15) + source * np.uint64(0x632BE59BD9B4E019)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xD6E8FEB86659FD93)
        key = int(mixed.sum(dtype=np.uint64))
        count = seen[key] = seen.get(key, -1) + 1
        if count == len(found):
            found.append([])
        found[count].append(at)
    return found


def _grouped(arrays: Sequence[tuple[int, str, tuple[int, ...]]]) -> list[Group]:
    """Arrays of equal shape whose names differ only in numbers, together."""
    by_text: dict[tuple[tuple[str, ...], tuple[int, ...]], list[tuple[int, list[str]]]] = {}
    for at, name, shape in arrays:
        pieces = _NUMBER.split(name)
        by_text.setdefault((tuple(pieces[::2]), shape), []).append((at, pieces))
    found = []
    for (_, shape), members in by_text.items():
        varying = {
            place
            for place in range(1, len(members[0][1]), 2)
            if len({pieces[place] for _, pieces in members}) > 1
        }
        texts: list[str | None] = [""]
        for place, text in enumerate(members[0][1]):
            if place in varying:
                texts += [None, ""]
            else:
                texts[-1] = f"{texts[-1]}{text}"
        numbers = {
            at: tuple(int(pieces[place]) for place in sorted(varying)) for at, pieces in members
        }
        names = ["".join(pieces) for _, pieces in members]
        found.append(Group(tuple(texts), numbers, shape, names))
    return found


def _pieces(
    left: Sequence[Group], right: Sequence[Group], outputs: Sequence[Traced]
) -> Iterator[Pieced]:
    """The blocks that each two groups share."""
    of_left = {at: number for number, group in enumerate(left) for at in group.members}
    for number, group in enumerate(right):
        rows: dict[tuple[int, float, float], list[Array]] = {}
        for at, numbers in group.members.items():
            _collect(outputs[at], numbers, group, of_left, left, rows)
        by_left: dict[int, int] = {}
        for key in rows:
            by_left[key[0]] = by_left.get(key[0], 0) + 1
        if any(count > 8 for count in by_left.values()):
            raise Irregular("its elements are scaled by many numbers")
        for (source, scale, offset), found in rows.items():
            together = np.concatenate(found)
            width = left[source].numbers + len(left[source].shape)
            order = np.lexsort(together[:, :width].T[::-1]) if width else slice(None)
            for block in blocks_of(together[order], width):
                yield Pieced(source, number, block, scale, offset)


def _collect(
    output: Traced,
    numbers: tuple[int, ...],
    group: Group,
    of_left: Mapping[int, int],
    left: Sequence[Group],
    rows: dict[tuple[int, float, float], list[Array]],
) -> None:
    """Adds the coordinates of an output's elements by where they come from."""
    scales, offsets = _rounded(output.scale), _rounded(output.offset)
    for source in output.sources:
        mine = output.source == source
        pairs = np.stack([scales[mine], offsets[mine]], 1)
        for scale, offset in np.unique(pairs, axis=0).tolist():
            at = np.flatnonzero(mine & (scales == scale) & (offsets == offset))
            there = left[of_left[source]]
            columns = [
                *_constants(there.members[source], len(at)),
                *np.unravel_index(output.index[at], there.shape or (1,))[: len(there.shape)],
                *_constants(numbers, len(at)),
                *np.unravel_index(at, group.shape or (1,))[: len(group.shape)],
            ]
            rows.setdefault((of_left[source], scale, offset), []).append(
                np.stack(columns, 1) if columns else np.zeros((len(at), 0), np.int64)
            )


def _constants(values: Sequence[int], count: int) -> Iterator[Array]:
    return (np.full(count, value, np.int64) for value in values)


def _rounded(values: Array) -> Array:
    """Scales that differ only by rounding, as one: their median, or the whole number close by."""
    if not values.size:
        return values
    distinct = np.unique(values)
    with np.errstate(all="ignore"):
        is_next = np.diff(distinct) > 2e-5 * np.maximum(np.abs(distinct[1:]), 1e-30)
    cluster = np.concatenate([[0], np.cumsum(is_next)])[np.searchsorted(distinct, values)]
    out = np.empty_like(values)
    for number in range(int(cluster.max()) + 1):
        mine = cluster == number
        middle = float(np.median(values[mine]))
        near = round(middle)
        out[mine] = near if abs(middle - near) < 1e-4 else middle
    return out


@dataclass
class _Fit:
    """The terms of a component."""

    left: Sequence[Group]
    right: Sequence[Group]
    pieces: Sequence[Pieced]
    axes: list[list[Axis]] = field(default_factory=list)

    def drafts(self) -> Iterator[Draft]:
        self.axes = [[Axis(radix) for radix, _ in piece.block.digits] for piece in self.pieces]
        dims = Dimensions()
        lefts = [t for at in range(len(self.left)) for t in self._terms(True, at, dims)]
        done = len(dims.units)
        rights = [t for at in range(len(self.right)) for t in self._terms(False, at, dims)]
        for number, (unit, blocks) in enumerate(dims.units):
            for term in rights if number < done else lefts:
                mine = blocks & term.blocks
                if mine:
                    if not term.dims:
                        raise Irregular("numbers without dimensions become elements of an array")
                    insert(term.dims[0], unit, mine)
        for lefts_of, rights_of in _joined(lefts, rights):
            yield self._draft(lefts_of, rights_of)

    def _terms(self, is_left: bool, at: int, dims: Dimensions) -> Iterator[Term]:
        """The terms of a group: its blocks by the numbers that they have in the names."""
        group = (self.left if is_left else self.right)[at]
        by_numbers: dict[object, list[int]] = {}
        for number, piece in enumerate(self.pieces):
            if (piece.left if is_left else piece.right) != at:
                continue
            before = 0 if is_left else self._width_of(self.left[piece.left])
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

    @staticmethod
    def _width_of(group: Group) -> int:
        return group.numbers + len(group.shape)

    def _term(self, is_left: bool, group: Group, members: Sequence[int], dims: Dimensions) -> Term:
        numbers = []
        for k in range(group.numbers):
            parts = [self._part(is_left, member, k) for member in members]
            numbers.append(_number(parts))
        shape = [
            dims.factors(
                extent,
                [self._part(is_left, member, group.numbers + k) for member in members],
            )
            for k, extent in enumerate(group.shape)
        ]
        return Term(group.name(numbers), shape, frozenset(members), frozenset(group.names))

    def _part(self, is_left: bool, member: int, coordinate: int) -> Part:
        """What a block occupies along a coordinate of one side."""
        piece = self.pieces[member]
        width = self._width_of(self.left[piece.left])
        column = coordinate if is_left else width + coordinate
        offset = piece.block.first[column]
        places = []
        for (radix, steps), axis in zip(piece.block.digits, self.axes[member], strict=True):
            own = steps[:width] if is_left else steps[width:]
            moved = sum(step != 0 for step in own)
            if moved != 1:
                raise Irregular(
                    "an axis of it runs along two dimensions at once"
                    if moved
                    else "an element is copied to several places"
                )
            step = steps[column]
            if step < 0:
                offset += step * (radix - 1)
            if step:
                places.append(Place(axis, abs(step), step < 0))
        places.sort(key=lambda place: -place.stride)
        return Part(member, offset, tuple(places))

    def _draft(self, lefts: list[Term], rights: list[Term]) -> Draft:
        ties: dict[object, list[Term]] = {}
        for term in rights:
            ties.setdefault(self._taken(term), []).append(term)
        for terms in ties.values():
            if len(terms) > 1 and len({len(t.names) for t in terms}) > 1:
                raise Irregular("an element is copied to several arrays")
        draft = Draft(lefts, list(ties.values()))
        self._add_arithmetic(draft)
        return draft

    def _taken(self, term: Term) -> object:
        """What of the left side a term takes; equal for ties."""
        found = []
        for member in sorted(term.blocks):
            piece = self.pieces[member]
            width = self._width_of(self.left[piece.left])
            extent = np.prod([radix for radix, _ in piece.block.digits], dtype=np.int64)
            found.append((piece.left, piece.block.first[:width], int(extent)))
        return tuple(sorted(found))

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
        """What is left of the arithmetic of a right term: `left = (right - offset) / scale`."""
        kinds = set()
        for member in term.blocks:
            piece = self.pieces[member]
            of = next(left for left in lefts if member in left.blocks)
            if (of.scale, of.offset) == (piece.scale, piece.offset):
                kinds.add((1.0, 0.0))
            elif (of.scale, of.offset) == (1.0, 0.0):
                kinds.add((1 / piece.scale, -piece.offset / piece.scale))
            else:
                raise Irregular("parts of it are scaled by several numbers on both sides")
        if len(kinds) > 1:
            raise Irregular("parts of it are scaled by several numbers")
        ((term.scale, term.offset),) = kinds


def _number(parts: Sequence[Part]) -> NumberExpr:
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


def _joined(
    lefts: Sequence[Term], rights: Sequence[Term]
) -> Iterator[tuple[list[Term], list[Term]]]:
    """Terms that share blocks."""
    rest = [*((True, term) for term in lefts), *((False, term) for term in rights)]
    while rest:
        blocks, found = set(rest[0][1].blocks), [rest.pop(0)]
        grown = True
        while grown:
            near = [one for one in rest if one[1].blocks & blocks]
            rest = [one for one in rest if not one[1].blocks & blocks]
            found += near
            grown = bool(near)
            for _, term in near:
                blocks |= term.blocks
        yield (
            [term for is_left, term in found if is_left],
            [term for is_left, term in found if not is_left],
        )


def all_axes(term: Term) -> Iterator[Axis]:
    """The axes of a term, those of its name first."""
    for item in term.name:
        if isinstance(item, NumberExpr):
            for axis, _ in item.terms:
                yield from axis.leaves()
    for items in term.dims:
        yield from axes_in(items)
