"""Misplaced lifts: they match nothing under their prefix, but would under another one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from unickpt.rules.explain import Problem, counted, fault
from unickpt.rules.matching import Family
from unickpt.rules.name_patterns import Pattern
from unickpt.rules.optimizer_slots import SharedState
from unickpt.rules.plan import LeafFacts
from unickpt.rules.rule import Rule, Terms, exprs_of

_MOST_NAMES = 20_000  # that are compared with the patterns of lifts


@dataclass
class _LiftPlace:
    """Names that the lifts of one file would match under another prefix.

    Arguments:
        rule: the first of the rules that match nothing.
        prefix: the one that the lifts have.
        other: the one that the names have.
        names: the names.
    """

    rule: Rule
    prefix: str
    other: str
    names: dict[str, None] = field(default_factory=dict)


def misplaced_lifts(
    rules: Sequence[Rule],
    shared: Sequence[SharedState],
    candidates: Sequence[Family],
    stored: LeafFacts,
    requested: LeafFacts,
) -> tuple[list[Problem], set[str]]:
    """The lifts that match nothing on one side, but would under another prefix.

    Arguments:
        rules: all rules.
        shared: the values that all parameters share.
        candidates: the families of arrays that rules match.
        stored: the stored leaves that are not used, or dropped.
        requested: the requested leaves that are not made, or left unchanged.

    Returns:
        A problem for each file and prefix, and the names that they explain.
    """
    problems, explained = list[Problem](), set[str]()
    for is_left, facts in (True, stored), (False, requested):
        arrays = [name for name, fact in facts.items() if fact.is_array and fact.shape]
        for place in _places(rules, candidates, arrays[:_MOST_NAMES], is_left):
            place.names |= dict.fromkeys(_shared_names(place, shared, facts, is_left))
            explained.update(place.names)
            problems.append(fault(place.rule, _text(place, is_left)))
    return problems, explained


def _places(
    rules: Sequence[Rule], candidates: Sequence[Family], names: Sequence[str], is_left: bool
) -> list[_LiftPlace]:
    matched = {
        family.rule.position
        for family in candidates
        if family.rule.lifted and any(family.names_there() if is_left else family.names_asked())
    }
    places: dict[tuple[str, str, str], _LiftPlace] = {}
    for rule in rules if names else ():
        if not rule.lifted or rule.position in matched:
            continue
        side = rule.left if is_left else rule.right
        for name, prefix, other in _elsewhere(side, names) if isinstance(side, tuple) else ():
            key = rule.position.file, prefix, other
            places.setdefault(key, _LiftPlace(rule, prefix, other)).names[name] = None
    return list(places.values())


def _elsewhere(side: Terms, names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """The names that the patterns of a side match with another prefix; with both prefixes."""
    for expr in exprs_of(side):
        for name in names:
            prefixes = _other_prefix(expr.pattern, name)
            if prefixes is not None:
                yield name, *prefixes


def _other_prefix(pattern: Pattern, name: str) -> tuple[str, str] | None:
    """The shortest prefixes of a pattern and of a name that match except for these prefixes."""
    head = pattern.prefix.split("/")
    for count in range(len(head) - 1):  # components of the pattern's prefix that are replaced
        prefix, tail = ("".join(f"{part}/" for part in head[:count]), "/".join(head[count:]))
        start = f"/{name}".find(f"/{tail}")
        if (
            start >= 0
            and name[:start] != prefix
            and pattern.match(prefix + name[start:]) is not None
        ):
            return prefix, name[:start]
    return None


def _shared_names(
    place: _LiftPlace, shared: Sequence[SharedState], names: Collection[str], is_left: bool
) -> Iterator[str]:
    """The names of shared values, such as a step count, under the other prefix."""
    for lift in shared:
        single = (lift.left if is_left else lift.right).single
        if single is not None and single.startswith(place.prefix):
            name = place.other + single.removeprefix(place.prefix)
            if name in names:
                yield name


def _text(place: _LiftPlace, is_left: bool) -> str:
    expected = f"names under {place.prefix!r}" if place.prefix else "names without a prefix"
    verb = "are" if len(place.names) > 1 else "is"
    return (
        f"matches nothing: it takes {expected}, but {counted(list(place.names))} {verb} "
        f"{'stored' if is_left else 'requested'} under {place.other!r}. Correct the prefix: in "
        "`under` of the include, or in the lift"
    )
