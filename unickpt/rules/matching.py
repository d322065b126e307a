"""Matches rules with arrays: names, the indices in them, and sizes of axes."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase
from typing import NamedTuple

from unickpt.format.index import ArrayEntry
from unickpt.reading.recipes import MappedSource
from unickpt.rules import ast, axes
from unickpt.rules.ast import ELLIPSIS, AxisItem, Nothing
from unickpt.rules.name_patterns import Components, Match, is_ambiguous, solve_linear
from unickpt.rules.plan import Fact
from unickpt.rules.rule import CompiledExpr, Rule, Terms, exprs_of

_MOST_ARRAYS = 1 << 16  # of a family, however few there are


class LeafNames:
    """Leaves by name, found by the prefix of their names."""

    def __init__(self, facts: Mapping[str, Fact]) -> None:
        self.facts = facts
        self._sorted = sorted(facts)

    def matching(self, expr: CompiledExpr) -> Iterator[tuple[str, Match]]:
        """All names that an expression's pattern matches."""
        prefix = expr.pattern.prefix
        names: Iterable[str]
        if expr.pattern.literal:
            names = [prefix] if prefix in self.facts else []
        else:
            low = bisect_left(self._sorted, prefix)
            high = bisect_right(self._sorted, prefix + "\U0010ffff")
            names = itertools.islice(self._sorted, low, high)
        for name in names:
            match = expr.pattern.match(name)
            if match is not None:
                yield name, match


class Unfit(ValueError):
    """Why a rule does not apply to the arrays it matches, and which of its names shows it."""

    def __init__(self, why: str, expr: CompiledExpr | None = None) -> None:
        super().__init__(why)
        self.expr = expr


class Misshapen(Unfit):
    """Why a rule does not apply: arrays have other shapes than it states."""


class OtherSizes(Misshapen):
    """Why a rule does not apply: its axes have other sizes in one array than in another."""


class Lacks(Unfit):
    """Why a rule does not apply: an array of the family, such as `name`, does not exist."""

    def __init__(self, why: str, expr: CompiledExpr, name: str) -> None:
        super().__init__(why, expr)
        self.name = name


@dataclass(eq=False)
class Family:
    """A rule with the texts of its captures: the arrays of one family.

    Arguments:
        rule: the rule, oriented so that its left side is the stored one.
        texts: the texts of its text captures.
        paired: the indices of the axes that pair arrays.
        have, want: the arrays of each expression that match, with the captures of their names.
        sizes: of all axes.
        assumed: those that shapes do not determine, so that the usual ones are used.
        rank: how many axes `...` matches.
        reason: why it does not apply; None if it does.
    """

    rule: Rule
    texts: dict[str, Components]
    paired: dict[str, int] = field(default_factory=dict)
    have: dict[str, list[tuple[str, Match]]] = field(default_factory=dict)
    want: dict[str, list[tuple[str, Match]]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    assumed: dict[str, int] = field(default_factory=dict)
    rank: int = 0
    reason: Unfit | None = None
    _items: dict[str, tuple[AxisItem, ...]] = field(default_factory=dict)
    _grids: dict[str, list[tuple[dict[str, int], str]]] = field(default_factory=dict)

    @property
    def lacks_names(self) -> bool:
        """Whether it does not apply because arrays of the family do not exist."""
        return isinstance(self.reason, Lacks)

    def items(self, expr: CompiledExpr) -> tuple[AxisItem, ...]:
        """An expression's axes with `...` expanded; not before `rank` is known."""
        if expr.tag not in self._items:
            self._items[expr.tag] = axes.expand(expr.items, self.rank)
        return self._items[expr.tag]

    def grid(self, expr: CompiledExpr) -> list[tuple[dict[str, int], str]]:
        """Every array of an expression: the indices in its name, and its name; not before all
        sizes are known."""
        if expr.tag not in self._grids:
            names = sorted(expr.pattern.axes)
            every = itertools.product(
                *([self.paired[a]] if a in self.paired else range(self.sizes[a]) for a in names)
            )
            indices = [dict(zip(names, index, strict=True)) for index in every]
            self._grids[expr.tag] = [
                (index, expr.pattern.format(self.texts, index)) for index in indices
            ]
        return self._grids[expr.tag]

    def names_there(self) -> Iterator[str]:
        """The names of stored arrays that match."""
        return (name for matches in self.have.values() for name, _ in matches)

    def names_asked(self) -> Iterator[str]:
        """The names of requested arrays that match."""
        return (name for matches in self.want.values() for name, _ in matches)

    def matched_names(self) -> Iterator[str]:
        """All names that match."""
        return itertools.chain(self.names_there(), self.names_asked())

    def blocks(
        self, exprs: Iterable[CompiledExpr]
    ) -> Iterator[tuple[frozenset[str], tuple[CompiledExpr, axes.SegmentChoice]]]:
        """Each block of some expressions under its axes."""
        for expr in exprs:
            items = self.items(expr)
            for choice in axes.choices(items):
                axis_names = frozenset(axis.name for axis in axes.block_axes(items, choice))
                yield axis_names | expr.pattern.axes, (expr, choice)

    def mapped(
        self,
        entry: ArrayEntry,
        source: tuple[CompiledExpr, axes.SegmentChoice, Mapping[str, int]],
        out: tuple[CompiledExpr, axes.SegmentChoice, Mapping[str, int]],
    ) -> MappedSource:
        """A block of a made array, and the stored one that is its source: for each its expression,
        the choice of segments, and the indices in its name."""
        fixed = {**source[2], **out[2]}
        items = self.items(source[0])
        free_axes = [
            axis.name for axis in axes.block_axes(items, source[1]) if axis.name not in fixed
        ]
        numbers = {axis: number for number, axis in enumerate(free_axes)}
        dims = [
            axes.dims_of(self.items(expr), choice, self.sizes, numbers, fixed)
            for expr, choice, _ in (source, out)
        ]
        (a, b), (c, d) = (expr.affine(self.sizes) for expr, _, _ in (source, out))
        extents = tuple(self.sizes[axis] for axis in free_axes)
        return MappedSource(entry, extents, dims[0], dims[1], scale=a / c, offset=(b - d) / c)

    def padded_sizes(self) -> dict[str, int]:
        """The sizes of the axes, those of a pad under `_`."""
        pads = {axis: size for axis, size in self.sizes.items() if axes.is_pad(axis)}
        sizes = {axis: size for axis, size in self.sizes.items() if axis not in pads}
        if len(pads) == 1:
            sizes[axes.PAD] = next(iter(pads.values()))
        return sizes

    def check_shape(self, expr: CompiledExpr, name: str, shape: tuple[int, ...]) -> None:
        """Compares the shape that a function makes with the axes of its rule."""
        items, sizes = self.items(expr), dict(self.sizes)
        made = f"the function makes {name!r} of shape {list(shape)}"
        if len(items) != len(shape):
            raise Unfit(f"{made}, but the rule gives it the axes [{' '.join(map(str, items))}]")
        for item, extent in zip(items, shape, strict=True):
            try:
                axes.solve(item, extent, sizes)
            except axes.DoesNotFit as error:
                raise Unfit(f"{made}: {error}") from None


def families(rule: Rule, have: LeafNames, want: LeafNames | None) -> list[Family]:
    """The families of arrays that a rule matches, not resolved yet."""
    by_captures: dict[tuple[object, ...], Family] = {}
    for side, names, attribute in ((rule.left, have, "have"), (rule.right, want, "want")):
        for expr in exprs_of(side) if names is not None else []:
            assert names is not None
            for name, match in names.matching(expr):
                paired = _paired(rule, expr, match) if rule.pairing else {}
                if paired is None:
                    continue
                key = match.texts, *sorted(paired.items())
                family = by_captures.setdefault(key, Family(rule, dict(match.texts), paired))
                getattr(family, attribute).setdefault(expr.tag, []).append((name, match))
    free = any(expr.pattern.texts for expr in exprs_of(rule.right))
    if not by_captures and want is None and isinstance(rule.left, Nothing) and not free:
        by_captures[()] = Family(rule, {})  # it makes arrays without stored ones
    return list(by_captures.values())


def _paired(rule: Rule, expr: CompiledExpr, match: Match) -> dict[str, int] | None:
    """The indices of the axes that pair arrays; None if no index gives the numbers."""
    indices = _indices(expr, match, rule.sizes)
    if indices is None:
        return None
    return {axis: index for axis, index in indices.items() if axis in rule.pairing}


def _indices(expr: CompiledExpr, match: Match, sizes: Mapping[str, int]) -> dict[str, int] | None:
    """The indices of all axes in a name; None where none in the sizes make its numbers."""
    indices = dict(match.chosen)
    for linear, number in zip(expr.pattern.linears, match.numbers, strict=True):
        solved = solve_linear(linear, number, sizes)
        if solved is None:
            return None
        indices |= solved
    return indices


def resolve(family: Family, have: LeafNames, want: LeafNames | None, *, partly: bool) -> None:
    """Finds the sizes of all axes, and whether all arrays of the family are there.

    Arguments:
        family: `sizes` (which may hold some already), `rank` and `reason` are set.
        have: the stored leaves.
        want: the requested leaves, if known.
        partly: whether some of the arrays that the rule makes need not be requested.
    """
    try:
        _resolve(family, have, want, partly)
    except Unfit as error:
        error.__context__ = None  # the frames of both would live as long as the family
        family.reason = error.with_traceback(None)


class _Matched(NamedTuple):
    """The arrays that an expression of a rule matches.

    Arguments:
        expr: the expression.
        arrays: their names, and the captures of these.
        names: all names of that side.
    """

    expr: CompiledExpr
    arrays: Sequence[tuple[str, Match]]
    names: LeafNames

    @property
    def first(self) -> tuple[str, Fact]:
        """The first of them."""
        name = self.arrays[0][0]
        return name, self.names.facts[name]


def _resolve(family: Family, have: LeafNames, want: LeafNames | None, partly: bool) -> None:
    rule = family.rule
    sides = [(rule.left, have, family.have)]
    if want is not None:
        sides.append((rule.right, want, family.want))
    matched = [
        _Matched(expr, matches_by_tag[expr.tag], names)
        for side, names, matches_by_tag in sides
        for expr in exprs_of(side)
        if expr.tag in matches_by_tag
    ]
    sizes = {**family.sizes, **rule.sizes}
    for expr in rule.exprs:
        sizes |= {choice.axis: len(choice.options) for choice in expr.pattern.choices}
    family.sizes = {k: v for k, v in sizes.items() if k != axes.PAD}
    if rule.says_shapes:
        family.rank = _rank(matched)
        if axes.PAD in sizes:
            _size_pads(family, sizes[axes.PAD])
        _find_sizes(family, matched)
    _check_all_there(family, have, want, partly)


def _size_pads(family: Family, size: int) -> None:
    """Gives each pad the size of `_`."""
    for expr in family.rule.exprs:
        for pad in axes.axes_of(family.items(expr)):
            if axes.is_pad(pad.name):
                family.sizes[pad.name] = size


def _find_sizes(family: Family, matched: Sequence[_Matched]) -> None:
    """Finds the sizes of all axes from the shapes of arrays, and the numbers in their names."""
    sizes = family.sizes
    # First from arrays without an index in their names: these certainly belong to the family.
    _solve(family, [expr_matches for expr_matches in matched if not expr_matches.expr.pattern.axes])
    inside_sizes: list[_Matched] = []
    indices: list[list[dict[str, int]]] = []
    for expr_matches in matched:
        inside = _within(expr_matches, sizes)
        if not inside:
            raise Unfit(
                f"the numbers in the names that match {expr_matches.expr.pattern.name} are out of "
                "range",
                expr_matches.expr,
            )
        inside_sizes.append(
            expr_matches._replace(arrays=[(name, match) for name, match, _ in inside])
        )
        indices.append([index for _, _, index in inside])
    _solve(family, inside_sizes)
    for expr_matches, expr_indices in zip(inside_sizes, indices, strict=True):
        for axis in expr_matches.expr.pattern.axes:
            if axis not in sizes:
                sizes[axis] = 1 + max(index[axis] for index in expr_indices)
    _solve(family, inside_sizes)
    if family.rule.moves:  # else the function knows the shape of its result
        _fuse(family, inside_sizes)


def _rank(matched: Sequence[_Matched]) -> int:
    """How many axes `...` matches."""
    ranks: dict[int, None] = {}
    for expr_matches in matched:
        (name, fact), items = expr_matches.first, expr_matches.expr.items
        dots = sum(1 for axis in axes.axes_of(items) if axis.name == ELLIPSIS)
        rank = len(fact.shape) - (len(items) - dots)
        if rank < 0 or (rank and not dots):
            raise Misshapen(_rank_text(expr_matches.expr, fact, name), expr_matches.expr)
        if dots:
            ranks[rank] = None
    if len(ranks) > 1:
        raise Unfit(f"`...` matches {' and '.join(map(str, ranks))} axes")
    return next(iter(ranks), 0)


def _rank_text(expr: CompiledExpr, fact: Fact, name: str) -> str:
    if not fact.is_array:
        return (
            f"{name!r} is {fact}, which has no axes: a rule for it has no brackets on either side"
        )
    return f"{name!r} is {fact}, but the rule gives it the axes [{' '.join(map(str, expr.items))}]"


def _within(matched: _Matched, sizes: Mapping[str, int]) -> list[tuple[str, Match, dict[str, int]]]:
    """The arrays whose indices lie within the sizes, with these."""
    indexed = (
        (name, match, _indices(matched.expr, match, sizes)) for name, match in matched.arrays
    )
    return [(name, match, index) for name, match, index in indexed if index is not None]


def _solve(family: Family, matched: Sequence[_Matched]) -> None:
    """Finds sizes from shapes until nothing new follows, then compares all shapes with them."""
    equations: dict[tuple[str, tuple[int, ...]], tuple[CompiledExpr, str, Fact]] = {}
    for expr_matches in matched:
        for name, _ in expr_matches.arrays:
            fact = expr_matches.names.facts[name]
            expr = expr_matches.expr
            equations.setdefault((expr.tag, fact.shape), (expr, name, fact))
    for expr, name, fact in equations.values():
        if len(family.items(expr)) != len(fact.shape):
            raise Misshapen(_rank_text(expr, fact, name), expr)
    origins: dict[str, str] = {}
    again = True
    while again:
        again = False
        for expr, name, fact in equations.values():
            for item, extent in zip(family.items(expr), fact.shape, strict=True):
                try:
                    again |= axes.solve(item, extent, family.sizes)
                except axes.DoesNotFit as error:
                    details = _details(family, expr, item, fact, origins)
                    raise OtherSizes(f"{name!r} is {fact}: {error}{details}", expr) from None
                for axis in axes.axes_of([item]):
                    origins.setdefault(axis.name, name)


def _details(
    family: Family, expr: CompiledExpr, item: AxisItem, fact: Fact, origins: Mapping[str, str]
) -> str:
    """The source of the sizes that do not fit, and an order of axes that would fit."""
    item_axes = {axis.name for axis in axes.axes_of([item])}
    fixed = [f"{a}={n}" for a, n in family.rule.sizes.items() if a in item_axes]
    elsewhere = dict.fromkeys(repr(name) for axis, name in origins.items() if axis in item_axes)
    text = f", where {', '.join(fixed)} is given" if fixed else ""
    text += f" (in {', '.join(elsewhere)})" if elsewhere and not fixed else ""
    items = family.items(expr)
    by_size = {axes.size_of(i, family.sizes): str(i) for i in items}
    if len(by_size) == len(items) and set(by_size) == set(fact.shape):
        order = [by_size[n] for n in fact.shape]
        if not all(axis.startswith(ELLIPSIS) for axis in order):
            return f"{text}; the order [{' '.join(order)}] would fit"
        if len(order) > len(ascii_lowercase):
            return text
        letters = "io" if len(order) == 2 else ascii_lowercase
        ours = " ".join(letters[int(axis.removeprefix(ELLIPSIS))] for axis in order)
        theirs = " ".join(letters[: len(order)])
        text += f"; if the axes are in another order, name them: [{theirs}] there and [{ours}] here"
    return text


def _fuse(family: Family, matched: Sequence[_Matched]) -> None:
    """Treats axes that always appear together as one, if nothing determines their single sizes;
    uses the usual sizes of the others."""
    exprs, usual = family.rule.exprs, family.rule.usual
    all_items = [family.items(expr) for expr in exprs]
    apart = {axis for expr in exprs for axis in (*expr.pattern.axes, *expr.arithmetic_axes)}
    while unknown := _unknown_axes(family):
        for axis in unknown:
            if axis not in apart and axes.always_followed(axis, all_items):
                family.sizes[axis] = 1
                break
        else:
            spellings = [(a, axes.PAD if axes.is_pad(a) else a) for a in unknown]
            default = next(((axis, usual[name]) for axis, name in spellings if name in usual), None)
            if default is None:
                names = ", ".join(name for _, name in spellings)
                example = next((a for a in unknown if not axes.is_pad(a)), axes.PAD)
                raise Unfit(f"the size of {names} is unknown: give it, as in `{example}=8`")
            family.sizes[default[0]] = default[1]
            family.assumed[axes.PAD if axes.is_pad(default[0]) else default[0]] = default[1]
        _solve(family, matched)


def _unknown_axes(family: Family) -> list[str]:
    """The axes of a rule whose sizes are unknown, sorted."""
    all_axes: set[str] = set()
    for expr in family.rule.exprs:
        all_axes |= expr.pattern.axes | {axis.name for axis in axes.axes_of(family.items(expr))}
    return sorted(all_axes - family.sizes.keys())


def _check_all_there(family: Family, have: LeafNames, want: LeafNames | None, partly: bool) -> None:
    rule = family.rule
    last = {axis: size - 1 for axis, size in family.sizes.items()} | family.paired
    for expr in rule.exprs:
        if any(is_ambiguous(linear, family.sizes) for linear in expr.pattern.linears):
            raise Unfit(f"two sets of indices make one number in {expr.pattern.name}")
        for linear in expr.pattern.linears:
            for axis, factor in linear.terms:
                if factor < 0 and linear.constant + factor * last[axis] < 0:
                    why = f"{axis} is {last[axis]}, and a number in {expr.pattern.name} below 0"
                    raise Unfit(why, expr)
        numbering = expr.pattern.axes - family.paired.keys()
        count = math.prod(family.sizes.get(axis, 1) for axis in numbering)
        existing = len(have.facts) + (len(want.facts) if want else 0)
        if count > max(_MOST_ARRAYS, 2 * existing):
            why = (
                f"{expr.pattern.name} would be {count:,} arrays, far more than there are: is a "
                "size wrong, or a number in a name no index?"
            )
            if isinstance(rule.left, Nothing):  # no stored name shows it
                raise ast.syntax_error(why, expr.position)
            raise Unfit(why, expr)
    for side, names, verb in ((rule.left, have, "stored"), (rule.right, want, "requested")):
        if names is None or isinstance(side, Nothing):
            continue
        for term in side:
            _check_term(family, term, names, verb, partly and names is want)
        makes = list(names_of(family, side)) if partly and names is want else []
        if makes and not any(name in names.facts for name in makes):
            raise Lacks("nothing that it makes is requested", exprs_of(side)[0], makes[0])


def names_of(family: Family, side: Terms | Nothing) -> Iterator[str]:
    """All names of a side of a family."""
    for expr in exprs_of(side):
        for _, name in family.grid(expr):
            yield name


def _check_term(
    family: Family, term: Sequence[CompiledExpr], names: LeafNames, verb: str, partly: bool
) -> None:
    for number, expr in enumerate(term):
        needed = [name for _, name in family.grid(expr)]
        missing = [name for name in needed if name not in names.facts]
        if not missing or partly or (number and len(missing) == len(needed)):
            continue  # of arrays that are one, the first must be there
        more, be = (f" and {len(missing) - 1} more", "are") if len(missing) > 1 else ("", "is")
        need = "it needs" if verb == "stored" else "it would make"
        raise Lacks(f"{need} {missing[0]!r}{more}, which {be} not {verb}", expr, missing[0])
