"""Checks that each stored array is used by one rule, and each requested one made by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from unickpt.format.index import ArrayEntry
from unickpt.rules.ast import Nothing
from unickpt.rules.matching import Family, LeafNames, Unfit, names_of
from unickpt.rules.rule import terms_of

_HOW_TO_TELL = (
    "make the names of one of them narrower, or begin the more general one with `default`: it then "
    "applies only where no other rule does"
)
_JOIN = "; if two names are loaded from one stored array, join them in one rule by `=`"
_TO_DEFAULT = "; to let the default rule handle such arrays, begin this rule with `optional`"
_NAMES_TELL = "or give the names of the other side by `like` (--like)"


class Conflicts:
    """The rule that uses each stored array, and the rule that makes each requested array."""

    def __init__(self) -> None:
        self._clashes: dict[tuple[str, ...], list[tuple[str, str]]] = {}
        self._taken: dict[str, str] = {}
        self._made: dict[str, str] = {}
        self._left: set[tuple[str, Family]] = set()

    def settle(self, valid: Sequence[Family], have: LeafNames, want: LeafNames | None) -> None:
        """Finds arrays that two fitting rules use or make.

        If a rule gives an array several names (tied by `=`), another rule may take all but the
        first of them.
        """
        for verb, right, names, claimed in (
            ("taken", False, have, self._taken),
            ("made", True, want, self._made),
        ):
            for name, claims in _claims_of(valid, right, names).items():
                best = min(rank for _, rank in claims)
                winners = [family for family, rank in claims if rank == best]
                self._left.update((name, family) for family, rank in claims if rank > best)
                claimed[name] = str(winners[0].rule)
                if len(winners) > 1 and not _same_constant(winners):
                    self._twice(name, verb, [str(family.rule) for family in winners])

    def add(self, have: Iterable[str], want: Iterable[str], rule: str) -> None:
        """Adds the names that a lift uses and makes; it has no `Family`."""
        for names, claimed, verb in ((have, self._taken, "taken"), (want, self._made, "made")):
            for name in names:
                other = claimed.setdefault(name, rule)
                if other != rule:
                    self._twice(name, verb, [other, rule])

    def is_left(self, name: str, family: Family) -> bool:
        """Whether another rule takes this name, so that this one skips it."""
        return (name, family) in self._left

    def problems(self, both_known: bool) -> list[str]:
        """Arrays that two rules use or make, as one message for each set of rules.

        Arguments:
            both_known: whether the names of both sides are known.
        """
        advice = _HOW_TO_TELL if both_known else f"{_HOW_TO_TELL}; {_NAMES_TELL}"
        problems = []
        for rules, clashes in self._clashes.items():
            (name, verb), count = clashes[0], sum(verb == clashes[0][1] for _, verb in clashes)
            more = f" (and {count - 1} more)" if count > 1 else ""
            join = _JOIN if verb == "taken" else ""
            lines = [f"{name!r}{more} is {verb} twice", *rules, advice + join]
            problems.append("\n    ".join(lines))
        return problems

    def _twice(self, name: str, verb: str, rules: Iterable[str]) -> None:
        self._clashes.setdefault(tuple(dict.fromkeys(rules)), []).append((name, verb))


def _claims_of(
    valid: Iterable[Family], right: bool, names: LeafNames | None
) -> dict[str, list[tuple[Family, int]]]:
    """The rules that claim each array of a side; 0 if under its first name, 1 if under another."""
    claims: dict[str, list[tuple[Family, int]]] = {}
    for family in valid:
        for term in terms_of(family.rule.right if right else family.rule.left):
            for number, expr in enumerate(term):
                for _, name in family.grid(expr):
                    if names is None or name in names.facts:
                        claims.setdefault(name, []).append((family, min(number, 1)))
    return claims


def _same_constant(claims: Sequence[Family]) -> bool:
    """Whether all of some rules have the same `drop` or constant on the same side."""
    sides = [(i.rule.left, i.rule.right) for i in claims]
    return any(
        all(isinstance(pair[side], Nothing) and pair[side] == sides[0][side] for pair in sides)
        for side in (0, 1)
    )


def keep_ties(candidates: Sequence[Family], entries: Mapping[str, ArrayEntry]) -> None:
    """Leaves tied stored arrays to the rule that ties them, if `like` is not given.

    Else a rule for models without the tie would load a second array from the shared one.
    """
    tied = _tied(candidates, entries)
    for family in candidates:
        if family.reason is None and not isinstance(family.rule.left, Nothing):
            owners = {tied.get(name) for name in names_of(family, family.rule.left)}
            if owners and None not in owners and family not in owners:
                family.reason = Unfit("another rule takes it, because it is tied to another name")


def _tied(candidates: Iterable[Family], entries: Mapping[str, ArrayEntry]) -> dict[str, Family]:
    """The stored arrays that a rule ties to another name of the same array, with that rule."""
    tied: dict[str, Family] = {}
    for family in candidates:
        for term in terms_of(family.rule.left) if family.reason is None else ():
            for indices, first in family.grid(term[0]):
                for expr in term[1:]:
                    name = expr.pattern.format(family.texts, indices)
                    if name in entries and entries.get(first) is entries[name]:
                        tied[name] = family
    return tied


def leave_to_others(
    candidates: Sequence[Family],
    shared: Iterable[tuple[Sequence[str], Sequence[str]]],
    both_known: bool,
) -> None:
    """Lets a `default` rule apply only to arrays that no other rule matches.

    If the names of both sides are known, all but the first of several names of one array are free
    for another rule; see `Conflicts.settle`. A rule whose names all exist keeps them even if its
    axes do not fit: that is an error to report, which a default must not hide.

    Arguments:
        candidates: all families that a rule matches.
        shared: the names, on both sides, of values that all parameters share.
        both_known: whether the names of both sides are known.
    """
    if not any(family.rule.default for family in candidates):
        return
    valid = [family for family in candidates if family.reason is None]
    specific = [family for family in valid if not family.rule.default]
    used, made = _claimed(specific, both_known)
    for have, want in shared:
        if have:
            used.update(have)
            made.update(want)
    misfits, hiding = _misfits_by_name(candidates, both_known), set[Unfit]()
    for family in valid:
        rule = family.rule
        if not rule.default:
            continue
        left, right = set(names_of(family, rule.left)), set(names_of(family, rule.right))
        hidden = next((misfits[name] for name in left | right if name in misfits), None)
        if hidden is not None:
            hiding.add(hidden)
        if hidden is not None or left & used or right & made:
            family.reason = Unfit("another rule applies to it")
    for reason in hiding:
        reason.args = (f"{reason}{_TO_DEFAULT}",)


def _claimed(valid: Iterable[Family], first_only: bool) -> tuple[set[str], set[str]]:
    """The names that rules take and those that they make.

    Arguments:
        valid: families to which these rules apply.
        first_only: whether to leave out all but the first of several names of one array.
    """
    used: set[str] = set()
    made: set[str] = set()
    for family in valid:
        for side, names in ((family.rule.left, used), (family.rule.right, made)):
            for term in terms_of(side):
                for expr in term[:1] if first_only else term:
                    names.update(name for _, name in family.grid(expr))
    return used, made


def _misfits_by_name(candidates: Iterable[Family], both_known: bool) -> dict[str, Unfit]:
    """Why families whose names all exist have axes that do not fit, by these names."""
    misfits: dict[str, Unfit] = {}
    for family in candidates:
        names_exist = family.have and (family.want or not both_known)
        reason = None if family.lacks_names or family.rule.optional else family.reason
        if reason is not None and names_exist:
            misfits.update(dict.fromkeys(family.matched_names(), reason))
    return misfits


def choose_variants(candidates: Sequence[Family]) -> None:
    """Keeps the likeliest of the readings of one rule that fit the same arrays."""
    best: dict[tuple[str, str, str], int] = {}
    valid = [i for i in candidates if i.reason is None and i.rule.lifted]
    for family in valid:
        rule = family.rule
        for name in names_of(family, rule.left):
            key = (str(rule.position), rule.text, name)
            best[key] = min(best.get(key, rule.variant), rule.variant)
    for family in valid:
        rule = family.rule
        names = names_of(family, rule.left)
        if any(best[str(rule.position), rule.text, name] < rule.variant for name in names):
            family.reason = Unfit("another reading of the rule fits too")
