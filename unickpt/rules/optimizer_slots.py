"""Lifts: the rules of optimizer slots that follow from the rules of parameters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from unickpt.rules.ast import (
    ArrayExpr,
    LiftLine,
    Linear,
    Name,
    NameCapture,
    Nothing,
    SourcePosition,
    Text,
    syntax_error,
)
from unickpt.rules.matching import Family, LeafNames, names_of
from unickpt.rules.name_patterns import Pattern
from unickpt.rules.rule import Rule, Terms, exprs_of

Domain = tuple[Name | None, Name | None]


@dataclass(frozen=True)
class StateName:
    """The names of one slot of all parameters, or the one name of a value that all share.

    Arguments:
        name: with one capture for a parameter's name, or with none.
        domain: the pattern of a parameter's own name, if that capture is only a part of it.
        dtype: of the elements when this side is made.
    """

    name: Name
    domain: Name | None
    dtype: str | None

    @property
    def single(self) -> str | None:
        """The name, if it has no capture."""
        alone = all(isinstance(item, str) for item in self.name.items)
        return "".join(map(str, self.name.items)) if alone else None

    def names_for(self, parameter: str) -> list[str]:
        """The names that the slot of a parameter may have; none if it is not in the domain."""
        inner = _without((parameter,), self.domain)
        whole = [] if inner is None else [inner]
        if self.domain is None and "/" in parameter:  # see `_domains`
            whole.append((parameter.partition("/")[2],))
        return ["".join(map(str, _nested(self.name, items))) for items in whole]


@dataclass(frozen=True)
class SharedState:
    """`lift count <-> state/{p}/step`: one value on one side, on the other one per parameter."""

    position: SourcePosition = field(compare=False)
    left: StateName
    right: StateName

    @property
    def inverse(self) -> SharedState:
        return SharedState(self.position, self.right, self.left)

    def __str__(self) -> str:
        return f"{self.position}: lift {self.left.name} <-> {self.right.name}"


def lift(line: LiftLine, rules: Sequence[Rule]) -> list[Rule] | SharedState:
    """The rules of optimizer slots that follow from the rules of parameters.

    Raises:
        RuleSyntaxError: the names do not show where the parameter's name is.
    """
    captures = [_capture_of(expr.name) for expr in (line.left, line.right)]
    keys = {key for key in captures if key is not None}
    if len(keys) != 1:
        raise syntax_error(
            "a lift has one capture for the parameter's name, such as {p}, on one or both sides",
            line.position,
        )
    for name in line.domain or ():
        if _capture_of(name) not in keys:
            raise syntax_error(f"this name needs the capture {{{min(keys)}}}", name.position)
    if None in captures:
        left, right = line.domain or (None, None)
        return SharedState(
            line.position,
            StateName(line.left.name, left, line.left.dtype),
            StateName(line.right.name, right, line.right.dtype),
        )
    lifted: list[Rule] = []
    for rule in rules:
        for variant, domain in enumerate(_domains(line, rule) if rule.function is None else ()):
            slot_rule = _lift_one(line, rule, domain)
            lifted += [] if slot_rule is None else [replace(slot_rule, variant=variant)]
    return lifted


def _domains(line: LiftLine, rule: Rule) -> list[Domain]:
    """The possible patterns of a parameter's name: if not stated, the whole name, or all but its
    first component, which optimizers often omit."""
    if line.domain is not None:
        return [line.domain]
    capture = next(
        i for v in (line.left, line.right) for i in v.name.items if not isinstance(i, str)
    )
    left, right = (_readings(side, capture, line) for side in (rule.left, rule.right))
    return list(itertools.product(left, right))


def _readings(side: Terms | Nothing, capture: NameCapture, line: LiftLine) -> list[Name | None]:
    heads = {_head(expr.pattern.name) for expr in exprs_of(side)}
    head = heads.pop() if len(heads) == 1 else ""
    return [None, *([Name((head, capture), line.position)] if head else [])]


def _head(name: Name) -> str:
    """A name's first component with its slash, if there is one; see `_domains`."""
    first = name.items[0] if name.items else ""
    return first[: first.index("/") + 1] if isinstance(first, str) and "/" in first else ""


def _capture_of(name: Name) -> str | None:
    """The key of the only capture of a name; None if there is none."""
    captures = [item for item in name.items if not isinstance(item, str)]
    match captures:
        case []:
            return None
        case [Text(key, _)]:
            return key
        case [Linear() as linear] if linear.lone is not None:
            return linear.lone
    raise syntax_error(
        "a name has one capture for the parameter's name, such as {p}", name.position
    )


def _lift_one(line: LiftLine, rule: Rule, domains: Domain) -> Rule | None:
    sides: list[Terms | Nothing] = []
    for expr, domain, side in zip(
        (line.left, line.right), domains, (rule.left, rule.right), strict=True
    ):
        lifted = _lift_side(expr, domain, side, line.law)
        if lifted is None:
            return None
        sides.append(lifted)
    left, right = sides
    text = f"lift {line.left} <-> {line.right}, of line {rule.position.line}: {rule.text}"
    return replace(
        rule,
        position=line.position,
        text=text,
        left=left,
        right=right,
        optional=True,
        parameter=str(rule),
    )


def _lift_side(
    expr: ArrayExpr, domain: Name | None, side: Terms | Nothing, law: str | None
) -> Terms | Nothing | None:
    if isinstance(side, Nothing):
        return side if side.value is None else Nothing(0.0, side.unchecked)
    terms = []
    for term in side:
        exprs = []
        for compiled in term:
            inner = _without(compiled.pattern.name.items, domain)
            if inner is None:
                return None
            name = Name(_nested(expr.name, inner), expr.name.position)
            exprs.append(replace(compiled, pattern=Pattern(name), law=law, dtype=expr.dtype))
        terms.append(tuple(exprs))
    return tuple(terms)


def _without(
    items: Sequence[str | NameCapture], domain: Name | None
) -> tuple[str | NameCapture, ...] | None:
    """A parameter's name without the rest of `domain`; None if `domain` does not match."""
    remaining = list(items)
    if domain is None:
        return tuple(remaining)
    position = next(i for i, item in enumerate(domain.items) if not isinstance(item, str))
    before = "".join(map(str, domain.items[:position]))
    after = "".join(map(str, domain.items[position + 1 :]))
    if before:
        if (
            not remaining
            or not isinstance(remaining[0], str)
            or not remaining[0].startswith(before)
        ):
            return None
        remaining[0] = remaining[0][len(before) :]
    if after:
        if not remaining or not isinstance(remaining[-1], str) or not remaining[-1].endswith(after):
            return None
        remaining[-1] = remaining[-1][: -len(after)]
    return tuple(item for item in remaining if item != "")


def _nested(outer: Name, inner: Sequence[str | NameCapture]) -> tuple[str | NameCapture, ...]:
    out: list[str | NameCapture] = []
    for item in outer.items:
        for piece in [item] if isinstance(item, str) else inner:
            if isinstance(piece, str) and out and isinstance(out[-1], str):
                out[-1] += piece
            else:
                out.append(piece)
    return tuple(out)


def shared_names(
    lift: SharedState, candidates: Sequence[Family], have: LeafNames, want: LeafNames | None
) -> tuple[list[str], list[str]]:
    """The names that a lift covers, on both sides.

    Arguments:
        lift: the lift of the shared value.
        candidates: the families of arrays that rules apply to.
        have: the stored leaves.
        want: the requested leaves, if known.
    """
    left = _names(lift.left, candidates, True, lift.right)
    right = _names(lift.right, candidates, False, lift.left)
    return [n for n in left if n in have.facts], [
        n for n in right if want is None or n in want.facts
    ]


def _names(
    slot: StateName, candidates: Sequence[Family], left: bool, other: StateName
) -> list[str]:
    if slot.single is not None:
        return [slot.single]
    parameters = [
        name
        for family in candidates
        if not family.rule.lifted
        for name in names_of(family, family.rule.left if left else family.rule.right)
    ]
    names = list(dict.fromkeys(n for parameter in parameters for n in slot.names_for(parameter)))
    assert other.single is not None, "one side has one name"
    neighbours = _neighbours(other.single, candidates, left)
    if not neighbours:
        return names
    return [name for name in names if not neighbours.isdisjoint(_but_one(name))]


def _neighbours(single: str, candidates: Sequence[Family], left: bool) -> set[tuple[str, ...]]:
    """The parts that the slots next to the one name on the other side share with other slots of the
    same parameters.

    A job may have several optimizers, or groups of parameters, each with a count of its own.
    """
    folder = single.rpartition("/")[0]
    common: set[tuple[str, ...]] = set()
    for family in candidates:
        if not family.rule.lifted:
            continue
        ours, theirs = family.rule.left, family.rule.right
        if not left:
            ours, theirs = theirs, ours
        if any(f"{name}/".startswith(f"{folder}/") for name in names_of(family, theirs)):
            for name in names_of(family, ours):
                common.update(_but_one(name))
    return common


def _but_one(name: str) -> set[tuple[str, ...]]:
    """A name without one of its components, which may be the slot: `state/w/step`, `step/w`."""
    parts = name.split("/")
    return {(*parts[:index], "", *parts[index + 1 :]) for index in range(len(parts))}
