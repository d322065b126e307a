"""Which arrays each rule matches: names, the indices in them, and sizes of axes."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from unickpt.rules import ast, axes
from unickpt.rules.ast import ELLIPSIS, Item, Nothing
from unickpt.rules.name_patterns import Match, Path, is_ambiguous, solve_linear
from unickpt.rules.plan import Fact
from unickpt.rules.rule import Rule, Seen, Terms, views_of


class Names:
    """Leaves by name, found by the text that their names begin with."""

    def __init__(self, facts: Mapping[str, Fact]) -> None:
        self.facts = facts
        self._sorted = sorted(facts)

    def matching(self, view: Seen) -> Iterator[tuple[str, Match]]:
        """All names that a view's pattern matches."""
        prefix = view.pattern.prefix
        names: Iterable[str]
        if view.pattern.literal:
            names = [prefix] if prefix in self.facts else []
        else:
            low = bisect_left(self._sorted, prefix)
            high = bisect_right(self._sorted, prefix + "\U0010ffff")
            names = itertools.islice(self._sorted, low, high)
        for name in names:
            match = view.pattern.match(name)
            if match is not None:
                yield name, match


class Unfit(ValueError):
    """Why a rule does not apply to the arrays it matches, and which of its names shows it."""

    def __init__(self, why: str, view: Seen | None = None) -> None:
        super().__init__(why)
        self.view = view


class Misshapen(Unfit):
    """Why a rule does not apply: arrays have other shapes than it says."""


class Lacks(Unfit):
    """Why a rule does not apply: an array of the family, such as `name`, does not exist."""

    def __init__(self, why: str, view: Seen, name: str) -> None:
        super().__init__(why, view)
        self.name = name


@dataclass(eq=False)
class Instance:
    """A rule together with the texts that its captures took: the arrays of one family.

    Arguments:
        rule: the rule, turned so that its left side is what is there.
        texts: what its text captures took.
        have, want: the arrays of each view that match, with what their names hold.
        sizes: of all axes.
        rank: how many axes `...` matches.
        why_not: why it does not apply; None where it does.
        fault: the view that does not fit, where it is one.
        lacks: the first array of the family that does not exist, where that is the reason.
        misshapen: whether the reason is that arrays have other shapes.
    """

    rule: Rule
    texts: dict[str, Path]
    have: dict[str, list[tuple[str, Match]]] = field(default_factory=dict)
    want: dict[str, list[tuple[str, Match]]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    rank: int = 0
    why_not: str | None = None
    fault: Seen | None = None
    lacks: str | None = None
    misshapen: bool = False
    _items: dict[str, tuple[Item, ...]] = field(default_factory=dict)

    @property
    def lacks_names(self) -> bool:
        """Whether it does not apply because arrays of the family do not exist."""
        return self.lacks is not None

    def items(self, view: Seen) -> tuple[Item, ...]:
        """A view's axes with `...` spelled out; not before `rank` is known."""
        if view.tag not in self._items:
            self._items[view.tag] = axes.expand(view.items, self.rank)
        return self._items[view.tag]

    def grid(self, view: Seen) -> Iterator[tuple[dict[str, int], str]]:
        """Every array of a view: the indices in its name, and its name."""
        names = sorted(view.pattern.axes)
        for indices in itertools.product(*(range(self.sizes[a]) for a in names)):
            at = dict(zip(names, indices, strict=True))
            yield at, view.pattern.format(self.texts, at)

    def names_there(self) -> Iterator[str]:
        """The names of stored arrays that match."""
        return (name for found in self.have.values() for name, _ in found)

    def names_asked(self) -> Iterator[str]:
        """The names that are asked for and match."""
        return (name for found in self.want.values() for name, _ in found)

    def matched_names(self) -> Iterator[str]:
        """All names that match."""
        return itertools.chain(self.names_there(), self.names_asked())


def instances(rule: Rule, have: Names, want: Names | None) -> list[Instance]:
    """The families of arrays that a rule matches, not resolved yet."""
    found: dict[tuple[tuple[str, Path], ...], Instance] = {}
    for side, names, attribute in ((rule.left, have, "have"), (rule.right, want, "want")):
        for view in views_of(side) if names is not None else []:
            assert names is not None
            for name, match in names.matching(view):
                texts = match.texts
                instance = found.setdefault(texts, Instance(rule, dict(texts)))
                getattr(instance, attribute).setdefault(view.tag, []).append((name, match))
    free = any(view.pattern.texts for view in views_of(rule.right))
    if not found and want is None and isinstance(rule.left, Nothing) and not free:
        found[()] = Instance(rule, {})  # it makes arrays out of nothing
    return list(found.values())


def resolve(instance: Instance, have: Names, want: Names | None, *, partly: bool) -> None:
    """Finds the sizes of all axes, and whether all arrays of the family are there.

    Arguments:
        instance: `sizes` (which may hold some already), `rank` and `why_not` are set.
        have: what is stored.
        want: what is asked for, where that is known.
        partly: whether some of the arrays that the rule makes need not be asked for.
    """
    try:
        _resolve(instance, have, want, partly)
    except Unfit as error:
        instance.why_not, instance.fault = str(error), error.view
        instance.lacks = error.name if isinstance(error, Lacks) else None
        instance.misshapen = isinstance(error, Misshapen)


def _resolve(instance: Instance, have: Names, want: Names | None, partly: bool) -> None:
    rule = instance.rule
    sides = [(rule.left, have, instance.have)]
    if want is not None:
        sides.append((rule.right, want, instance.want))
    given = {**instance.sizes, **rule.sizes}
    for view in rule.views:
        given |= {choice.axis: len(choice.options) for choice in view.pattern.choices}
    instance.sizes = sizes = {k: v for k, v in given.items() if k != axes.PAD}
    known = [
        (view, found[view.tag], names)
        for side, names, found in sides
        for view in views_of(side)
        if view.tag in found
    ]
    if not rule.says_shapes:
        _check_all_there(instance, have, want, partly)
        return
    instance.rank = _rank(rule, known)
    for view in rule.views:  # a size for `_` is that of each pad
        for pad in ast.axes_of(instance.items(view)):
            if axes.is_pad(pad.name) and axes.PAD in given:
                sizes[pad.name] = given[axes.PAD]
    # First from arrays without an index in their names: these certainly belong to the family.
    _solve(instance, [k for k in known if not k[0].pattern.axes])
    inside = [(view, _within(view, found, sizes), names) for view, found, names in known]
    for view, found, _ in inside:
        if not found:
            raise Unfit(
                f"the numbers in the names that match {view.pattern.name} are out of range", view
            )
    _solve(instance, [(v, [(n, m) for n, m, _ in f], names) for v, f, names in inside])
    for view, found, _ in inside:
        for axis in view.pattern.axes:
            if axis not in sizes:
                sizes[axis] = 1 + max(at[axis] for _, _, at in found)
    _solve(instance, [(v, [(n, m) for n, m, _ in f], names) for v, f, names in inside])
    if rule.moves:  # else the function knows the shape of what it makes
        _fuse(instance, [(v, [(n, m) for n, m, _ in f], names) for v, f, names in inside])
    _check_all_there(instance, have, want, partly)


def _rank(rule: Rule, known: Sequence[tuple[Seen, list[tuple[str, Match]], Names]]) -> int:
    """How many axes `...` matches."""
    ranks: dict[int, str] = {}
    for view, found, names in known:
        dots = sum(1 for a in ast.axes_of(view.items) if a.name == ELLIPSIS)
        rank = len(names.facts[found[0][0]].shape) - (len(view.items) - dots)
        if dots == 0 and rank:
            raise Misshapen(_rank_text(view, names.facts[found[0][0]], found[0][0]), view)
        if dots:
            if rank < 0:
                raise Misshapen(_rank_text(view, names.facts[found[0][0]], found[0][0]), view)
            ranks[rank] = found[0][0]
    if len(ranks) > 1:
        raise Unfit(f"`...` matches {' and '.join(map(str, ranks))} axes")
    return next(iter(ranks), 0)


def _rank_text(view: Seen, fact: Fact, name: str) -> str:
    if fact.kind != "array":
        return (
            f"{name!r} is {fact}, which has no axes: a rule for it has no brackets on either side"
        )
    return f"{name!r} is {fact}, but the rule gives it the axes [{' '.join(map(str, view.items))}]"


def _within(
    view: Seen, found: Sequence[tuple[str, Match]], sizes: Mapping[str, int]
) -> list[tuple[str, Match, dict[str, int]]]:
    """The arrays whose indices lie within the sizes, with these."""
    kept = []
    for name, match in found:
        at = dict(match.chosen)
        for linear, number in zip(view.pattern.linears, match.numbers, strict=True):
            solved = solve_linear(linear, number, sizes)
            if solved is None:
                break
            at |= solved
        else:
            kept.append((name, match, at))
    return kept


def _solve(
    instance: Instance, known: Sequence[tuple[Seen, Sequence[tuple[str, Match]], Names]]
) -> None:
    """Finds sizes from shapes until nothing new follows, then compares all shapes with them."""
    equations: dict[tuple[str, tuple[int, ...]], tuple[Seen, str, Fact]] = {}
    for view, found, names in known:
        for name, _ in found:
            fact = names.facts[name]
            equations.setdefault((view.tag, fact.shape), (view, name, fact))
    for view, name, fact in equations.values():
        if len(instance.items(view)) != len(fact.shape):
            raise Misshapen(_rank_text(view, fact, name), view)
    origins: dict[str, str] = {}
    again = True
    while again:
        again = False
        for view, name, fact in equations.values():
            for item, extent in zip(instance.items(view), fact.shape, strict=True):
                try:
                    again |= axes.solve(item, extent, instance.sizes)
                except axes.DoesNotFit as error:
                    details = _details(instance, view, item, fact, origins)
                    raise Misshapen(f"{name!r} is {fact}: {error}{details}", view) from None
                for axis in ast.axes_of([item]):
                    origins.setdefault(axis.name, name)


def _details(
    instance: Instance, view: Seen, item: Item, fact: Fact, origins: Mapping[str, str]
) -> str:
    """Where the sizes come from that do not fit, and the order of axes that would fit."""
    own = {axis.name for axis in ast.axes_of([item])}
    given = [f"{a}={n}" for a, n in instance.rule.sizes.items() if a in own]
    elsewhere = dict.fromkeys(repr(name) for axis, name in origins.items() if axis in own)
    text = f", where {', '.join(given)} is given" if given else ""
    text += f" (in {', '.join(elsewhere)})" if elsewhere and not given else ""
    items = instance.items(view)
    by_size = {axes.size_of(i, instance.sizes): str(i) for i in items}
    if len(by_size) == len(items) and set(by_size) == set(fact.shape):
        text += f"; the order [{' '.join(by_size[n] for n in fact.shape)}] would fit"
    return text


def _fuse(
    instance: Instance, known: Sequence[tuple[Seen, Sequence[tuple[str, Match]], Names]]
) -> None:
    """Treats axes that always appear together as one, where nothing gives their single sizes."""
    views = instance.rule.views
    while True:
        unknown = sorted(
            {
                axis
                for view in views
                for axis in (
                    *view.pattern.axes,
                    *(a.name for a in ast.axes_of(instance.items(view))),
                )
                if axis not in instance.sizes
            }
        )
        if not unknown:
            return
        for first in unknown:
            if axes.always_followed(first, [instance.items(view) for view in views]) and not any(
                first in view.pattern.axes or first in view.arithmetic_axes for view in views
            ):
                instance.sizes[first] = 1
                break
        else:
            names = ", ".join(a if not axes.is_pad(a) else axes.PAD for a in unknown)
            one = next((a for a in unknown if not axes.is_pad(a)), axes.PAD)
            raise Unfit(f"the size of {names} is unknown: give it, as in `{one}=8`")
        _solve(instance, known)


def _check_all_there(instance: Instance, have: Names, want: Names | None, partly: bool) -> None:
    rule = instance.rule
    for view in rule.views:
        if any(is_ambiguous(linear, instance.sizes) for linear in view.pattern.linears):
            raise Unfit(f"two sets of indices make one number in {view.pattern.name}")
    for side, names, verb in ((rule.left, have, "stored"), (rule.right, want, "asked for")):
        if names is None or isinstance(side, Nothing):
            continue
        for term in side:
            _check_term(instance, term, names, verb, partly and names is want)
        makes = list(names_of(instance, side)) if partly and names is want else []
        if makes and not any(name in names.facts for name in makes):
            raise Lacks("nothing that it makes is asked for", views_of(side)[0], makes[0])


def names_of(instance: Instance, side: Terms | Nothing) -> Iterator[str]:
    """All names of a side of a family."""
    for view in views_of(side):
        for _, name in instance.grid(view):
            yield name


def _check_term(
    instance: Instance, term: Sequence[Seen], names: Names, verb: str, partly: bool
) -> None:
    for number, view in enumerate(term):
        of_view = [name for _, name in instance.grid(view)]
        missing = [name for name in of_view if name not in names.facts]
        if not missing or partly or (number and len(missing) == len(of_view)):
            continue  # of arrays that are one, the first must be there
        more, be = (f" and {len(missing) - 1} more", "are") if len(missing) > 1 else ("", "is")
        need = "it needs" if verb == "stored" else "it would make"
        raise Lacks(f"{need} {missing[0]!r}{more}, which {be} not {verb}", view, missing[0])
