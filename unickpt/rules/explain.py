"""Error messages for rules that do not fit: they show the rule at fault and the likely cause."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from unickpt.rules.ast import Nothing
from unickpt.rules.matching import Instance, Names, instances
from unickpt.rules.name_patterns import Pattern
from unickpt.rules.optimizer_slots import Shared
from unickpt.rules.plan import Fact, Made
from unickpt.rules.rule import Rule, Terms, exprs_of
from unickpt.trees.name_ranges import skeleton

_MOST_LINES = 22
_MOST_IDLE = 3
_NUMBERED = re.compile(r"(^|/)state/\d+/")
_OPTIONAL = "if that is intended, begin it with `optional`"
_LIKELY, _POSSIBLE = 0.8, 0.5  # how similar a name must be, alone and where the shape agrees


def message(where: str, problems: Sequence[str]) -> str:
    """All problems as one text, of which the first ones are shown."""
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    lines = [f"{where}: the rules do not fit: {count}"]
    for shown, problem in enumerate(problems):
        text = f"  {problem}".split("\n")
        if shown and len(lines) + len(text) > _MOST_LINES:
            return "\n".join([*lines, f"  ... and {len(problems) - shown} more"])
        lines += text
    return "\n".join(lines)


def left_over(
    unused: Mapping[str, Fact],
    unmade: Mapping[str, Fact],
    made: Mapping[str, Made],
    asked: Mapping[str, Fact],
    found: Sequence[Instance],
    shared: Sequence[Shared],
) -> list[str]:
    """All that is neither used nor made, and why; the likeliest cause first.

    Arguments:
        unused: of what is stored.
        unmade: of what is asked for.
        made: what the rules make.
        asked: all that is asked for.
        found: all families that a rule matches.
        shared: what all parameters share.
    """
    ties = dict(_ties(unmade, made, asked))
    misfits, explained = _misfits({**unused, **unmade}, ties.keys(), found, shared)
    problems = [*ties.values(), *misfits]
    explained |= ties.keys()
    dropped = False
    for facts, others, state in (
        (unused, unmade, "is stored, and no rule takes it"),
        (unmade, unused, "is asked for, and no rule makes it"),
    ):
        for at, (name, like, fact) in enumerate(_alike(facts, explained)):
            near = _nearest(name, fact, others) if at < _MOST_LINES else None
            hint = ""
            if near is not None:
                hint = _missing_rule(*((name, near) if facts is unused else (near, name)))
            if facts is unused and not near and not dropped:
                hint, dropped = f"\n    if it is to be left out: {name} <-> drop", True
            problems.append(f"{name!r} ({fact}){like} {state}{hint}")
    if any("%2F" in name for name in unused):
        problems.append(
            "%2F in a name is a `/` within a key, as in a flat tree; save a nested tree, or write "
            "%2F in the rules"
        )
    if any(_NUMBERED.search(name) for name in unmade):
        problems.append(
            "a torch optimizer stores its state under numbers, which rules cannot map: pass it "
            "as unickpt.adapters.torch.NamedOptimizer(optimizer, module)"
        )
    return problems


def _missing_rule(stored: str, asked: str) -> str:
    return f"\n    perhaps a rule is missing: from {stored!r} to {asked!r}"


def _ties(
    unmade: Mapping[str, Fact], made: Mapping[str, Made], asked: Mapping[str, Fact]
) -> Iterator[tuple[str, str]]:
    """What is asked for and probably tied to what is made: no other array has this shape."""
    like: dict[Fact, list[str]] = {}
    for name, fact in asked.items():
        like.setdefault(fact, []).append(name)
    for name, fact in unmade.items():
        if fact.kind != "array" or not fact.shape or len(like[fact]) != 2:
            continue
        (tied,) = (other for other in like[fact] if other != name)
        if tied in made and skeleton(tied) != skeleton(name):
            yield name, _tie(name, fact, tied, made[tied].rule)


def _tie(name: str, fact: Fact, tied: str, rule: str) -> str:
    lines = [
        f"{name!r} ({fact}) is asked for, but no stored array is left for it",
        f"{tied!r} has the same shape. If the two are tied, or both are made of one stored array,",
        f"join them by `=`, as in `{tied} [...] = {name} [...]`, in",
        rule,
    ]
    if rule.startswith("preset "):
        lines.append("or in a rule of your own, together with `default include ...` of that preset")
    return "\n    ".join(lines)


def misfits(
    unused: Mapping[str, Fact],
    unmade: Mapping[str, Fact],
    found: Sequence[Instance],
    shared: Sequence[Shared],
) -> list[str]:
    """The rules that do not fit what is on both sides; what only one side has is no problem.

    Arguments: as for `left_over`.
    """
    both = [i for i in found if not i.lacks_names and _is_left_over(i, unused, unmade)]
    return _misfits({**unused, **unmade}, set(), both, shared)[0]


def misshapen(
    found: Sequence[Instance], unused: Mapping[str, Fact], unmade: Mapping[str, Fact]
) -> list[Instance]:
    """The families that are asked for in another shape than what is stored gives."""
    return [i for i in found if i.misshapen and _is_left_over(i, unused, unmade)]


def _is_left_over(
    instance: Instance, unused: Mapping[str, Fact], unmade: Mapping[str, Fact]
) -> bool:
    """Whether a rule does not apply here, and no other one does on either side."""
    return (
        instance.why_not is not None
        and any(name in unused for name in instance.names_there())
        and any(name in unmade for name in instance.names_asked())
    )


def _nearest(name: str, fact: Fact, among: Mapping[str, Fact]) -> str | None:
    """The likeliest counterpart of a name: one of its kind, with as many elements if there is."""
    of_kind = {n: f for n, f in among.items() if f.kind == fact.kind}
    same = [n for n, f in of_kind.items() if sorted(f.shape) == sorted(fact.shape)]
    if same and fact.shape:
        return _similar(name, same, _POSSIBLE)
    return _similar(name, of_kind, _LIKELY)


def _similar(name: str, among: Iterable[str], least: float) -> str | None:
    near = difflib.get_close_matches(name, list(among)[:2000], n=1, cutoff=least)
    return near[0] if near else None


def _respelled(name: str, among: Mapping[str, Fact]) -> tuple[str | None, str]:
    """The name that was probably meant by one that does not exist, and what to say of it."""
    dotted = name.replace("/", ".")
    for other in among:
        if other.replace("/", ".") == dotted:
            return other, f"; there is {other!r}: check where the name has `/` and where `.`"
    near = _similar(name, among, _LIKELY)
    return near, f"; did you mean {near!r}?" if near else ""


def _misfits(
    rest: Mapping[str, Fact],
    tied: Set[str],
    found: Sequence[Instance],
    shared: Sequence[Shared],
) -> tuple[list[str], set[str]]:
    """The rules that match what is left over, but do not fit; and those names.

    Arguments:
        rest: what is left over.
        tied: of these, what is explained already.
        found, shared: as for `left_over`.
    """
    misfits = [i for i in found if i.why_not is not None]
    best: dict[str, int] = {}  # the score of the likeliest rule for a name
    for instance in misfits:
        for name in instance.matched_names():
            best[name] = max(best.get(name, 0), _likelihood(instance))
    explained: set[str] = set()
    by_rule: dict[str, tuple[Instance, list[str]]] = {}
    for instance in misfits:
        here = [n for n in instance.matched_names() if best[n] == _likelihood(instance)]
        names = [name for name in here if name in rest and name not in tied]
        if not names:
            continue
        explained.update(names)
        for lift in shared:
            for slot in (lift.left, lift.right):
                explained.update(own for name in names for own in slot.of(name))
        by_rule.setdefault(str(instance.rule), (instance, []))[1].extend(names)
    reasons = {instance.why_not for instance, _ in by_rule.values() if not instance.rule.lifted}
    lifts: set[str] = set()
    problems = []
    for instance, names in by_rule.values():
        rule = instance.rule
        if rule.lifted:  # reported for the parameter's own rule, or once for all slots of the lift
            if instance.why_not in reasons or str(rule.position) in lifts:
                continue
            lifts.add(str(rule.position))
        meant, hint = None, ""
        if instance.lacks is not None:
            meant, hint = _respelled(
                instance.lacks, {n: f for n, f in rest.items() if n not in names}
            )
            if meant is not None:
                explained.update(n for n in rest if skeleton(n) == skeleton(meant))
        matched = f"(it matches {counted(names)})"
        problems.append(f"{rule}{_caret(instance)}\n    {_reason(instance)}{hint} {matched}")
    return problems, explained


def _caret(instance: Instance) -> str:
    """A line with a caret below the name that does not fit, in the rule's text."""
    if instance.fault is None or instance.rule.lifted:
        return ""
    rule, name = str(instance.rule), str(instance.fault.pattern.name)
    at = rule.rfind(name) if instance.fault.tag in _tags(instance.rule.right) else rule.find(name)
    return "" if at < 0 else f"\n  {' ' * at}^"


def _tags(side: Terms | Nothing) -> set[str]:
    return {expr.tag for expr in exprs_of(side)}


def _reason(instance: Instance) -> str:
    rule, why = instance.rule, instance.why_not
    about_sizes = instance.lacks_names or " elements here, but " in str(why)
    if about_sizes and any(expr.pattern.choices for expr in rule.exprs):
        return f"{why}; note that an enumeration such as {{a|b}} means all of its names together"
    return str(why)


def counted(names: Sequence[str]) -> str:
    """The first of some names, and how many there are."""
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _likelihood(instance: Instance) -> int:
    """A score of how likely a rule was meant for the names it matches: a match on both sides counts
    most, then that only a name is missing."""
    both = bool(instance.have and instance.want)
    return 4 * both + 2 * instance.lacks_names + (not instance.rule.optional)


def _alike(facts: Mapping[str, Fact], without: Set[str]) -> Iterator[tuple[str, str, Fact]]:
    """One name for all that differ in numbers alone, and a text that says how many they are."""
    groups: dict[tuple[str, Fact], list[str]] = {}
    for name, fact in facts.items():
        if name not in without:
            groups.setdefault((skeleton(name), fact), []).append(name)
    for (_, fact), names in groups.items():
        yield names[0], f" (and {len(names) - 1} like it)" if len(names) > 1 else "", fact


def idle(
    rules: Sequence[Rule], found: Sequence[Instance], problems: Sequence[str], have: Names
) -> list[str]:
    """The rules that apply to nothing although they must; those in `problems` are left out."""
    misfits: dict[int, Instance] = {}
    busy: set[int] = set()
    for instance in found:
        if instance.why_not is None:
            busy.add(id(instance.rule))
        else:
            misfits.setdefault(id(instance.rule), instance)
    idle_rules, unmatched = [], []
    for rule in rules:
        if rule.optional or id(rule) in busy or not _relates(rule):
            continue
        misfit = misfits.get(id(rule))
        if misfit is None:
            unmatched.append(rule)
        elif not any(problem.startswith(f"{rule}\n") for problem in problems):
            names = counted(list(misfit.matched_names()))
            idle_rules.append(
                f"{rule}{_caret(misfit)}\n    applies to nothing: {_reason(misfit)} "
                f"(it matches {names}); {_OPTIONAL}"
            )
    for rule in unmatched[:_MOST_IDLE]:
        hint = _other_spelling(rule, have) or _OPTIONAL
        idle_rules.append(f"{rule}\n    matches nothing; {hint}")
    more = len(unmatched) - _MOST_IDLE
    if more > 0:
        idle_rules.append(f"{more} more rule{'s' * (more > 1)} match{'es' * (more == 1)} nothing")
    return idle_rules


def _other_spelling(rule: Rule, have: Names) -> str | None:
    """What is wrong with a rule's name of what is stored, where that can be seen."""
    for expr in exprs_of(rule.left):
        name = expr.pattern.name
        if any(isinstance(item, str) and "{" in item for item in name.items):
            return "`{{` means a brace in the name itself; a capture has single braces"
        items = tuple(i.replace("/", ".") if isinstance(i, str) else i for i in name.items)
        dotted = Pattern(replace(name, items=items))
        for stored in itertools.islice(have.facts, 2000):
            if dotted.match(stored.replace("/", ".")):
                return f"there is {stored!r}: check where the name has `/` and where `.`"
        if expr.pattern.literal and (near := _similar(str(name), have.facts, _LIKELY)):
            return f"did you mean {near!r}?"
    return None


def unfamiliar(
    rules: Sequence[Rule], valid: Sequence[Instance], found: Sequence[Instance], have: Names
) -> list[str]:
    """Whether these are rules for another model altogether: none matches what is stored."""
    matching = any(instance.have for instance in found)
    relating = [rule for rule in rules if _relates(rule) and not rule.lifted]
    if valid or matching or len(relating) < _MOST_IDLE or not have.facts:
        return []
    ours, theirs = next(iter(have.facts)), exprs_of(relating[0].left)[0].pattern.name
    return [
        f"none of the {len(relating)} rules applies; is it the right preset, or the right file?\n"
        f"    stored are names such as {ours!r}, and the rules take names such as '{theirs}';\n"
        "    a part that all names begin with can be put before those of a preset: "
        "include NAME under PREFIX/ <->"
    ]


def matching_nothing(rules: Sequence[Rule], found: Sequence[Instance], have: Names) -> list[str]:
    """The rules that match nothing stored although they must; slots of optimizers may be absent."""
    there = {id(instance.rule) for instance in found if instance.have}
    return [
        f"{rule}\n    matches nothing that is stored; {_other_spelling(rule, have) or _OPTIONAL}"
        for rule in rules
        if not (rule.optional or rule.lifted or id(rule) in there) and _relates(rule)
    ]


def _relates(rule: Rule) -> bool:
    """Whether there are arrays on both sides."""
    return not isinstance(rule.left, Nothing) and not isinstance(rule.right, Nothing)


def backwards(rules: Sequence[Rule], found: Sequence[Instance], have: Names) -> list[str]:
    """Whether the rules are the wrong way round: all that match nothing would match if turned."""
    matching = {id(instance.rule) for instance in found}
    idle = [rule for rule in rules if id(rule) not in matching and _relates(rule)]
    if not idle or not all(instances(rule.inverse, have, None) for rule in idle):
        return []
    if 2 * len(idle) < sum(map(_relates, rules)):
        return [
            f"{rule}\n    has its sides swapped: what is stored belongs on the left"
            for rule in idle
        ]
    return [
        "the rules are the wrong way round: what is stored has the names of their right side; use "
        "`rules.inverse`\n    (on the command line --inverse, or without it if it is given)"
    ]
