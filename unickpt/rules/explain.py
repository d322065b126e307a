"""Error messages for rules that do not fit: they show the rule at fault and the likely cause."""

from __future__ import annotations

import difflib
import itertools
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from unickpt.errors import RuleWarning
from unickpt.quoting import printable
from unickpt.rules.ast import Nothing, SourcePosition
from unickpt.rules.matching import Family, Lacks, LeafNames, Misshapen, OtherSizes, families
from unickpt.rules.name_patterns import Pattern
from unickpt.rules.optimizer_slots import SharedState
from unickpt.rules.plan import Fact, LeafFacts, Made
from unickpt.rules.rule import Rule, exprs_of
from unickpt.trees.name_ranges import skeleton

_MOST_LINES = 22
_LIKE = " like it)"  # ends a text for several leaves
_MOST_IDLE = 3
_NUMBERED = re.compile(r"(^|/)state/\d+/")
_OPTIONAL = "if that is intended, begin it with `optional`"
_LIKELY, _POSSIBLE = 0.8, 0.5  # how similar a name must be, alone and where the shape agrees


@dataclass(frozen=True)
class Problem:
    """One problem of rules.

    Arguments:
        text: its description, in one or more lines.
        rule: the rule at fault, if it is one.
    """

    text: str
    rule: Rule | None = None


def fault(rule: Rule, why: object, caret: str = "") -> Problem:
    """A problem of one rule, as text: the rule, a line with a caret below it, and the problem."""
    return Problem(f"{rule}{caret}\n    {why}", rule)


def warn_of_assumed(candidates: Sequence[Family]) -> None:
    """Warns of sizes that a rule calls usual and nothing else determines; once for each rule."""
    assumed = {family.rule: family.assumed for family in candidates if family.assumed}
    for rule, sizes in assumed.items():
        usual = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        first_axis = next(iter(sizes))
        warnings.warn(
            f"{rule}\n    {usual} is assumed, the rule's usual size: no shape determines it. If "
            f"this model has another size, pass sizes={{{first_axis!r}: ...}} or "
            f"--size {first_axis}=..., or the other side's shapes, by like; if it is right, write "
            f"`{usual}` without a `?`",
            RuleWarning,
            stacklevel=2,
        )


def message(where: str, problems: Sequence[Problem]) -> str:
    """All problems as one text, which shows the first ones."""
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    lines = [f"{where}: the rules do not fit: {count}"]
    for shown, problem in enumerate(problems):
        text = f"  {problem.text}".split("\n")
        if shown and len(lines) + len(text) > _MOST_LINES:
            return "\n".join([*lines, f"  ... and {len(problems) - shown} more"])
        lines += text
    return "\n".join(lines)


def left_over(
    unused: LeafFacts,
    unmade: LeafFacts,
    made: Mapping[str, Made],
    requested: LeafFacts,
    candidates: Sequence[Family],
    shared: Sequence[SharedState],
) -> list[Problem]:
    """All leaves that are neither used nor made, and why; the likeliest cause first.

    Arguments:
        unused: the stored leaves that are not used.
        unmade: the requested leaves that are not made.
        made: the arrays that the rules make.
        requested: all requested leaves.
        candidates: all families that a rule matches.
        shared: the values that all parameters share.
    """
    ties = dict(_ties(unmade, made, requested))
    misfits, explained = _misfits({**unused, **unmade}, ties.keys(), candidates, shared)
    explained |= ties.keys()
    texts = [
        *_without_use(unused, unmade, explained),
        *_without_maker(unmade, unused, explained),
        *_odd_names(unused, unmade),
    ]
    return [*map(Problem, ties.values()), *misfits, *map(Problem, texts)]


def _without_use(unused: LeafFacts, unmade: LeafFacts, explained: Set[str]) -> Iterator[str]:
    """Unused stored leaves; the first one without a counterpart shows how to drop it."""
    said = False
    for name, text, near in _unexplained(unused, unmade, explained):
        hint = "" if near is None else _missing_rule(name, near)
        if near is None and not said:
            which = "them" if text.endswith(_LIKE) else "it"
            pattern = _numbered(name) if which == "them" else name
            hint, said = f"\n    to leave {which} out: {printable(pattern)} <-> drop", True
        yield f"{text} is stored, and no rule takes it{hint}"


def _without_maker(unmade: LeafFacts, unused: LeafFacts, explained: Set[str]) -> Iterator[str]:
    """Requested leaves that no rule makes."""
    for name, text, near in _unexplained(unmade, unused, explained):
        hint = "" if near is None else _missing_rule(near, name)
        yield f"{text} is requested, and no rule makes it{hint}"


def _unexplained(
    facts: LeafFacts, counterparts: LeafFacts, explained: Set[str]
) -> Iterator[tuple[str, str, str | None]]:
    """Leaves of one side only: the name, a text for it and its like, its likely counterpart."""
    for number, (name, like, fact) in enumerate(_alike(facts, explained)):
        near = _nearest(name, fact, counterparts) if number < _MOST_LINES else None
        yield name, f"{name!r} ({fact}){like}", near


def _odd_names(unused: LeafFacts, unmade: LeafFacts) -> Iterator[str]:
    """Names that rules cannot map as they are."""
    if any("%2F" in name for name in unused):
        yield (
            "%2F in a name is a `/` within a key, as in a flat tree; save a nested tree, or write "
            "%2F in the rules"
        )
    if any(_NUMBERED.search(name) for name in unmade):
        yield (
            "a torch optimizer stores its state under numbers, which rules cannot map: pass it "
            "as unickpt.adapters.torch.NamedOptimizer(optimizer, module)"
        )


def _missing_rule(stored: str, requested: str) -> str:
    return f"\n    perhaps a rule is missing: from {stored!r} to {requested!r}"


def _ties(
    unmade: LeafFacts, made: Mapping[str, Made], requested: LeafFacts
) -> Iterator[tuple[str, str]]:
    """Requested arrays that are probably tied to a made one: no other has the shape."""
    like: dict[Fact, list[str]] = {}
    for name, fact in requested.items():
        like.setdefault(fact, []).append(name)
    for name, fact in unmade.items():
        if not fact.is_array or not fact.shape or len(like[fact]) != 2:
            continue
        (tied,) = (other for other in like[fact] if other != name)
        if tied in made and skeleton(tied) != skeleton(name):
            yield name, _tie(name, fact, tied, made[tied].rule)


def _tie(name: str, fact: Fact, tied: str, rule: str) -> str:
    lines = [
        f"{name!r} ({fact}) is requested, but no stored array is left for it",
        f"{tied!r} has the same shape. If they are tied, or both are made from one stored array,",
        f"join them by `=`, as in `{tied} [...] = {name} [...]`, in",
        rule,
    ]
    if rule.startswith("preset "):
        lines.append("or in a rule of your own, together with `default include ...` of that preset")
    return "\n    ".join(lines)


def misfits(
    unused: LeafFacts,
    unmade: LeafFacts,
    candidates: Sequence[Family],
    shared: Sequence[SharedState],
) -> list[Problem]:
    """The rules that do not fit leaves of both sides; leaves of only one side are no problem.

    Arguments: as for `left_over`.
    """
    both = [i for i in candidates if not i.lacks_names and _is_left_over(i, unused, unmade)]
    return _misfits({**unused, **unmade}, set(), both, shared)[0]


def misshapen(candidates: Sequence[Family], unused: LeafFacts, unmade: LeafFacts) -> list[Family]:
    """The families whose requested shape differs from that of the stored arrays."""
    return [
        i
        for i in candidates
        if isinstance(i.reason, Misshapen) and _is_left_over(i, unused, unmade)
    ]


def _is_left_over(family: Family, unused: LeafFacts, unmade: LeafFacts) -> bool:
    """Whether neither this rule nor another one applies on either side."""
    return (
        family.reason is not None
        and any(name in unused for name in family.names_there())
        and any(name in unmade for name in family.names_asked())
    )


def _nearest(name: str, fact: Fact, among: LeafFacts) -> str | None:
    """The likeliest counterpart of a name: of its kind, and if possible with as many elements."""
    of_kind = {n: f for n, f in among.items() if f.kind is fact.kind}
    same = [n for n, f in of_kind.items() if sorted(f.shape) == sorted(fact.shape)]
    if same and fact.shape:
        return _similar(name, same, _POSSIBLE)
    return _similar(name, of_kind, _LIKELY)


def _similar(name: str, among: Iterable[str], least: float) -> str | None:
    near = difflib.get_close_matches(name, list(among)[:2000], n=1, cutoff=least)
    return near[0] if near else None


def _respelled(name: str, among: LeafFacts) -> tuple[str | None, str]:
    """The probably intended name for one that does not exist, and a text about it."""
    dotted = name.replace("/", ".")
    for other in among:
        if other.replace("/", ".") == dotted:
            return other, f"; there is {other!r}: check where the name has `/` and where `.`"
    near = _similar(name, among, _LIKELY)
    return near, f"; did you mean {near!r}?" if near else ""


def _misfits(
    leftovers: LeafFacts,
    tied: Set[str],
    candidates: Sequence[Family],
    shared: Sequence[SharedState],
) -> tuple[list[Problem], set[str]]:
    """The rules that match left-over names but do not fit, and those names.

    Arguments:
        leftovers: the left-over names.
        tied: those of them that are already explained.
        candidates, shared: as for `left_over`.
    """
    by_statement: dict[tuple[SourcePosition, str], tuple[Family, list[str]]] = {}
    for family, names in _likeliest(candidates):
        unexplained = [name for name in names if name in leftovers and name not in tied]
        if unexplained:
            by_statement.setdefault(family.rule.statement, (family, []))[1].extend(unexplained)
    matched = [name for _, names in by_statement.values() for name in names]
    explained = set(matched)
    for lift in shared:
        for slot in (lift.left, lift.right):
            explained.update(slot_name for name in matched for slot_name in slot.names_for(name))
    problems = []
    for family, names in _once_for_each_lift(by_statement.values()):
        meant, hint = _instead(family, {n: f for n, f in leftovers.items() if n not in names})
        if meant is not None:
            explained.update(n for n in leftovers if skeleton(n) == skeleton(meant))
        why = f"{_reason(family)}{hint} (it matches {counted(names)})"
        problems.append(fault(family.rule, why, _caret(family)))
    return problems, explained


def _likeliest(candidates: Sequence[Family]) -> Iterator[tuple[Family, list[str]]]:
    """The families that do not fit, each with the names for which it is the likeliest of them."""
    misfits = [family for family in candidates if family.reason is not None]
    best: dict[str, int] = {}
    for family in misfits:
        for name in family.matched_names():
            best[name] = max(best.get(name, 0), _likelihood(family))
    for family in misfits:
        score = _likelihood(family)
        yield family, [name for name in family.matched_names() if best[name] == score]


def _once_for_each_lift(
    misfits: Collection[tuple[Family, list[str]]],
) -> Iterator[tuple[Family, list[str]]]:
    """Leaves out slots of optimizers whose parameter has the same reason, or a lift's second."""
    reasons = {str(family.reason) for family, _ in misfits if not family.rule.lifted}
    lifts: set[SourcePosition] = set()
    for family, names in misfits:
        if family.rule.lifted:
            if str(family.reason) in reasons or family.rule.position in lifts:
                continue
            lifts.add(family.rule.position)
        yield family, names


def _instead(family: Family, leftovers: LeafFacts) -> tuple[str | None, str]:
    """The probably intended name for a missing one, and a text about it."""
    reason = family.reason
    return _respelled(reason.name, leftovers) if isinstance(reason, Lacks) else (None, "")


def _caret(family: Family) -> str:
    """A line with a caret below the name that does not fit, in the rule's text."""
    expr = None if family.reason is None else family.reason.expr
    if expr is None or family.rule.lifted:
        return ""
    rule, name = str(family.rule), str(expr.pattern.name)
    is_right = any(other.tag == expr.tag for other in exprs_of(family.rule.right))
    column = rule.rfind(name) if is_right else rule.find(name)
    return "" if column < 0 else f"\n  {' ' * column}^"


def _reason(family: Family) -> str:
    rule, why = family.rule, family.reason
    choices = {choice.axis for expr in rule.exprs for choice in expr.pattern.choices}
    if isinstance(why, Lacks | OtherSizes) and choices - family.paired.keys():
        return f"{why}; note that an enumeration such as {{a|b}} means all of its names together"
    return str(why)


def counted(names: Sequence[str]) -> str:
    """The first of some names, and how many there are."""
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _likelihood(family: Family) -> int:
    """A score of how likely a rule is meant for the names it matches: a match on both sides counts
    most, then a rule for which only a name is missing."""
    both = bool(family.have and family.want)
    return 4 * both + 2 * family.lacks_names + (not family.rule.optional)


def _alike(facts: LeafFacts, without: Set[str]) -> Iterator[tuple[str, str, Fact]]:
    """One name for all names that differ only in numbers, and a text with their count."""
    groups: dict[tuple[str, Fact], list[str]] = {}
    for name, fact in facts.items():
        if name not in without:
            groups.setdefault((skeleton(name), fact), []).append(name)
    for (_, fact), names in groups.items():
        yield names[0], f" (and {len(names) - 1}{_LIKE}" if len(names) > 1 else "", fact


def _numbered(name: str) -> str:
    """A name with a variable for each of its numbers."""
    count = itertools.count()
    return re.sub(r"\d+", lambda _: f"{{n{next(count)}}}", name)


def idle(
    rules: Sequence[Rule],
    candidates: Sequence[Family],
    problems: Sequence[Problem],
    have: LeafNames,
) -> list[Problem]:
    """The rules that apply to nothing although they must; those in `problems` are left out."""
    explained = {problem.rule.statement for problem in problems if problem.rule is not None}
    busy = {family.rule for family in candidates if family.reason is None}
    misfits: dict[Rule, Family] = {}
    for family in candidates:
        if family.reason is not None:
            misfits.setdefault(family.rule, family)
    must = [r for r in rules if not r.optional and r not in busy and _relates(r)]
    idle_rules = []
    for rule in must:
        if rule in misfits and rule.statement not in explained:
            misfit = misfits[rule]
            names = counted(list(misfit.matched_names()))
            why = f"applies to nothing: {_reason(misfit)} (it matches {names}); {_OPTIONAL}"
            idle_rules.append(fault(rule, why, _caret(misfit)))
    unmatched = [rule for rule in must if rule not in misfits]
    for rule in unmatched[:_MOST_IDLE]:
        hint = _other_spelling(rule, have) or _OPTIONAL
        idle_rules.append(fault(rule, f"matches nothing; {hint}"))
    more = len(unmatched) - _MOST_IDLE
    if more > 0:
        text = f"{more} more rule{'s' * (more > 1)} match{'es' * (more == 1)} nothing"
        idle_rules.append(Problem(text))
    return idle_rules


def _other_spelling(rule: Rule, have: LeafNames) -> str | None:
    """The error in a rule's name of a stored array, if it is visible."""
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
    rules: Sequence[Rule], valid: Sequence[Family], candidates: Sequence[Family], have: LeafNames
) -> list[Problem]:
    """Whether these are rules for another model: none matches a stored leaf."""
    matching = any(family.have for family in candidates)
    relating = [rule for rule in rules if _relates(rule) and not rule.lifted]
    if valid or matching or len(relating) < _MOST_IDLE or not have.facts:
        return []
    ours, theirs = next(iter(have.facts)), exprs_of(relating[0].left)[0].pattern.name
    text = (
        f"none of the {len(relating)} rules applies; is it the right preset, or the right file?\n"
        f"    stored names are such as {ours!r}, but the rules take names such as '{theirs}';\n"
        "    if all stored names begin with a prefix, add it to the names of the preset: "
        "include NAME under PREFIX/ <->"
    )
    return [Problem(text)]


def matching_nothing(
    rules: Sequence[Rule], candidates: Sequence[Family], have: LeafNames
) -> list[Problem]:
    """The rules that match nothing stored although they must; slots of optimizers may be absent."""
    matching = {family.rule for family in candidates if family.have}
    return [
        fault(rule, f"matches nothing that is stored; {_other_spelling(rule, have) or _OPTIONAL}")
        for rule in rules
        if not (rule.optional or rule.lifted or rule in matching) and _relates(rule)
    ]


def _relates(rule: Rule) -> bool:
    """Whether there are arrays on both sides."""
    return not isinstance(rule.left, Nothing) and not isinstance(rule.right, Nothing)


def backwards(
    rules: Sequence[Rule], candidates: Sequence[Family], have: LeafNames
) -> list[Problem]:
    """Whether the rules are reversed: all rules that match nothing would match if inverted."""
    matching = {family.rule for family in candidates}
    idle = [rule for rule in rules if rule not in matching and _relates(rule)]
    if not idle or not all(families(rule.inverse, have, None) for rule in idle):
        return []
    if 2 * len(idle) < sum(map(_relates, rules)):
        swapped = "has its sides swapped: stored names belong on the left"
        return [fault(rule, swapped) for rule in idle]
    text = (
        "the rules are the wrong way round: the stored names match their right side; use "
        "`rules.inverse`\n    (on the command line --inverse, or without it if it is given)"
    )
    return [Problem(text)]
