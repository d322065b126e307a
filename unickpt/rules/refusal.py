"""Refusals: what speaks against a plan, told so that a person finds the rule to mend."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence, Set

from unickpt.folding import skeleton
from unickpt.rules.lift import Shared
from unickpt.rules.matching import Fact, Instance, Names, instances
from unickpt.rules.rule import Rule
from unickpt.rules.syntax import Nothing

_MOST_SHOWN = 20
_NUMBERED = re.compile(r"(^|/)state/\d+/")
_OPTIONAL = "if that may be, begin it with `optional`"


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
    for facts, others, told in (
        (unused, unmade, "is stored, and no rule takes it"),
        (unmade, unused, "is asked for, and no rule makes it"),
    ):
        for at, (name, like, fact) in enumerate(_alike(facts, explained)):
            near = _nearest(name, fact, others) if at < _MOST_SHOWN else None
            hint = f"\n    perhaps it belongs to {near!r} ({others[near]})" if near else ""
            if facts is unused and not near:
                hint = f"\n    if it is to be left out: {name} <-> drop"
            problems.append(f"{name!r} ({fact}){like} {told}{hint}")
    if any("%2F" in name for name in unused):
        problems.append(
            "names with %2F are keys that hold a `/` themselves, as those of a flat tree; save it "
            "nested, or write %2F in the rules"
        )
    if any(_NUMBERED.search(name) for name in unmade):
        problems.append(
            "a torch optimizer has its state under numbers, to which rules relate nothing: pass it "
            "as unickpt.adapters.torch.NamedOptimizer(optimizer, module)"
        )
    return problems


def _nearest(name: str, fact: Fact, among: Mapping[str, Fact]) -> str | None:
    """The likeliest counterpart of a name: one with as many elements, if there is any."""
    same = [n for n, f in among.items() if sorted(f.shape) == sorted(fact.shape)]
    near = difflib.get_close_matches(name, (same or list(among))[:2000], n=1, cutoff=0.5)
    return near[0] if near else None


def _misfits(
    rest: Set[str], found: Sequence[Instance], shared: Sequence[Shared]
) -> tuple[list[str], set[str]]:
    """The rules that are about what is left over, but do not fit; and those names."""
    misfits = [i for i in found if i.why_not is not None]
    best: dict[str, int] = {}  # how much speaks for the likeliest rule about a name
    for instance in misfits:
        for name in instance.matched_names():
            best[name] = max(best.get(name, 0), _likelihood(instance))
    explained: set[str] = set()
    told: dict[str, tuple[Instance, list[str]]] = {}
    for instance in misfits:
        here = [n for n in instance.matched_names() if best[n] == _likelihood(instance)]
        names = [name for name in here if name in rest]
        if not names:
            continue
        explained.update(names)
        for lift in shared:
            for slot in (lift.left, lift.right):
                explained.update(own for name in names for own in slot.of(name))
        told.setdefault(str(instance.rule), (instance, []))[1].extend(names)
    reasons = {instance.why_not for instance, _ in told.values() if not instance.rule.lifted}
    lifts: set[str] = set()
    problems = []
    for instance, names in told.values():
        rule = instance.rule
        if rule.lifted:  # told by the parameter's own rule, or once for all slots of the lift
            if instance.why_not in reasons or str(rule.place) in lifts:
                continue
            lifts.add(str(rule.place))
        problems.append(f"{rule}\n    {_reason(instance)} (about {counted(names)})")
    return problems, explained


def _reason(instance: Instance) -> str:
    rule, why = instance.rule, instance.why_not
    about_sizes = instance.lacks_names or " elements, and here " in str(why)
    if about_sizes and any(view.pattern.choices for view in rule.views):
        return f"{why}; note that an enumeration such as {{a|b}} means all of its names at once"
    return str(why)


def counted(names: Sequence[str]) -> str:
    """The first of some names, and how many there are."""
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _likelihood(instance: Instance) -> int:
    """How likely a rule was meant for what its names match: those of both sides say most, then
    that nothing but a name is missing."""
    both = bool(instance.have and instance.want)
    return 4 * both + 2 * instance.lacks_names + (not instance.rule.optional)


def _alike(facts: Mapping[str, Fact], without: Set[str]) -> Iterator[tuple[str, str, Fact]]:
    """The first of all names that differ in numbers alone, and a text of how many they are."""
    groups: dict[tuple[str, Fact], list[str]] = {}
    for name, fact in facts.items():
        if name not in without:
            groups.setdefault((skeleton(name), fact), []).append(name)
    for (_, fact), names in groups.items():
        yield names[0], f" (and {len(names) - 1} like it)" if len(names) > 1 else "", fact


def idle(rules: Sequence[Rule], found: Sequence[Instance], problems: Sequence[str]) -> list[str]:
    """The rules that are about nothing although they must; those of `problems` are told already."""
    misfits: dict[int, Instance] = {}
    busy: set[int] = set()
    for instance in found:
        if instance.why_not is None:
            busy.add(id(instance.rule))
        else:
            misfits.setdefault(id(instance.rule), instance)
    told = []
    for rule in rules:
        if rule.optional or id(rule) in busy or not _relates(rule):
            continue
        misfit = misfits.get(id(rule))
        if misfit is None:
            told.append(f"{rule}\n    matches nothing; {_OPTIONAL}")
        elif not any(problem.startswith(f"{rule}\n") for problem in problems):
            names = counted(list(misfit.matched_names()))
            told.append(
                f"{rule}\n    is about nothing: {_reason(misfit)} (about {names}); {_OPTIONAL}"
            )
    return told


def _relates(rule: Rule) -> bool:
    """Whether there are arrays on both sides."""
    return not isinstance(rule.left, Nothing) and not isinstance(rule.right, Nothing)


def backwards(rules: Sequence[Rule], found: Sequence[Instance], have: Names) -> list[str]:
    """Whether the rules were meant the other way round: all that match nothing would match so."""
    matching = {id(instance.rule) for instance in found}
    idle = [rule for rule in rules if id(rule) not in matching and _relates(rule)]
    if not idle or not all(instances(rule.inverse, have, None) for rule in idle):
        return []
    return [
        "what is stored has the names of the other side: turn the rules by `Rules.inverse` (on the "
        "command line by --inverse, or without it where it is given)"
    ]
