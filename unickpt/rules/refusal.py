"""Refusals: what speaks against a plan, told so that a person finds the rule to mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence, Set

from unickpt.folding import skeleton
from unickpt.rules.lift import Shared
from unickpt.rules.matching import Fact, Instance, Names, instances
from unickpt.rules.rule import Rule
from unickpt.rules.syntax import Nothing

_MOST_SHOWN = 20


def message(where: str, problems: Sequence[str]) -> str:
    """All problems as one text."""
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    lines = [f"{where}: the rules do not fit: {count}", *(f"  {p}" for p in problems[:_MOST_SHOWN])]
    if len(problems) > _MOST_SHOWN:
        lines.append(f"  ... and {len(problems) - _MOST_SHOWN} more")
    return "\n".join(lines)


def left_over(
    unused: Mapping[str, Fact],
    unmade: Mapping[str, Fact],
    found: Sequence[Instance],
    shared: Sequence[Shared],
) -> list[str]:
    """All that is neither used nor made, and why.

    Arguments:
        unused: of what is stored.
        unmade: of what is asked for.
        found: all families that a rule may be about.
        shared: what all parameters share.
    """
    problems, explained = _misfits({*unused, *unmade}, found, shared)
    for name, like, fact in _alike(unused, explained):
        problems.append(
            f"{name!r} ({fact}){like} is stored, and no rule takes it\n    drop it: {name} <-> drop"
        )
    for name, like, fact in _alike(unmade, explained):
        near = difflib.get_close_matches(name, list(unused)[:2000], n=1, cutoff=0.6)
        hint = f"\n    nearest of what no rule takes: {near[0]!r}" if near else ""
        problems.append(f"{name!r} ({fact}){like} is asked for, and no rule makes it{hint}")
    return problems


def _misfits(
    rest: Set[str], found: Sequence[Instance], shared: Sequence[Shared]
) -> tuple[list[str], set[str]]:
    """The rules that are about what is left over, but do not fit; and those names."""
    misfits = [(i, i.why_not) for i in found if i.why_not is not None]
    best: dict[str, int] = {}  # how much speaks for the likeliest rule about a name
    for instance, _ in misfits:
        for name in instance.matched_names():
            best[name] = max(best.get(name, 0), _likelihood(instance))
    explained: set[str] = set()
    told: dict[str, tuple[str, str, list[str]]] = {}
    for instance, why in misfits:
        here = [n for n in instance.matched_names() if best[n] == _likelihood(instance)]
        names = [name for name in here if name in rest]
        if not names:
            continue
        explained.update(names)
        for lift in shared:
            for slot in (lift.left, lift.right):
                explained.update(own for name in names for own in slot.of(name))
        lifted = instance.rule.lifted
        if lifted and any(why == other for _, other, _ in told.values()):
            continue  # the parameter's own rule has told it
        # The slots of all parameters are told once, with the first one's reason.
        line = str(instance.rule.place) if lifted else f"{instance.rule} {why}"
        told.setdefault(line, (str(instance.rule), why, []))[2].extend(names)
    problems = []
    for rule, why, names in told.values():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        problems.append(f"{rule}\n    {why} (about {names[0]!r}{more})")
    return problems, explained


def _likelihood(instance: Instance) -> int:
    """How likely a rule was meant for what its names match: those of both sides say most."""
    return 2 * bool(instance.have and instance.want) + (not instance.rule.optional)


def _alike(facts: Mapping[str, Fact], without: Set[str]) -> Iterator[tuple[str, str, Fact]]:
    """The first of all names that differ in numbers alone, and a text of how many they are."""
    groups: dict[tuple[str, Fact], list[str]] = {}
    for name, fact in facts.items():
        if name not in without:
            groups.setdefault((skeleton(name), fact), []).append(name)
    for (_, fact), names in groups.items():
        yield names[0], f" (and {len(names) - 1} like it)" if len(names) > 1 else "", fact


def idle(rules: Sequence[Rule], found: Sequence[Instance]) -> list[str]:
    """The rules that match nothing although they must."""
    return [
        f"{rule}\n    matches nothing; if that may be, begin it with `optional`"
        for rule in _idle(rules, found)
        if not rule.optional
    ]


def backwards(rules: Sequence[Rule], found: Sequence[Instance], have: Names) -> list[str]:
    """Whether the rules were meant the other way round: all that match nothing would match so."""
    turned = _idle(rules, found)
    if not turned or not all(instances(rule.inverse, have, None) for rule in turned):
        return []
    return [
        "what is stored has the names of the other side: use `Rules.inverse` "
        "(--inverse on the command line)"
    ]


def _idle(rules: Sequence[Rule], found: Sequence[Instance]) -> list[Rule]:
    """The rules with arrays on both sides that match nothing."""
    busy = {id(instance.rule) for instance in found}
    return [
        rule
        for rule in rules
        if id(rule) not in busy
        and not isinstance(rule.left, Nothing)
        and not isinstance(rule.right, Nothing)
    ]
