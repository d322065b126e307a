"""Agreement: whether rules do as a converter does, and which are at fault if they do not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import ml_dtypes
import numpy as np

from unickpt import Rules
from unickpt.errors import LoadMismatch, RuleError, RuleSyntaxError
from unickpt.extend import (
    Array,
    DType,
    LeafFact,
    LeafKind,
    apply_rules,
    dtype_kind,
    facts_of,
    plan_rules,
    rule_exprs_of,
    stored_leaves,
)
from unickpt.plugins.observe.notation import Written


def through(
    rules: Rules,
    have: Mapping[str, Array],
    want: Mapping[str, Array],
    values: Sequence[str] = (),
    wanted_values: Sequence[str] = (),
    *,
    strict: bool = True,
) -> dict[str, Array]:
    """The result of rules on arrays, with values that are not arrays; a partial one if not
    strict."""
    value = LeafFact(kind=LeafKind.VALUE)
    stored = stored_leaves(facts_of(have) | dict.fromkeys(values, value))
    requested = facts_of(want) | dict.fromkeys(wanted_values, value)
    plan = plan_rules(rules, stored, requested, where="the example", strict=strict)
    return apply_rules(plan, have)


def same(made: Mapping[str, Array], expected: Mapping[str, Array], scaled: set[str]) -> None:
    """Raises RuleError if arrays are not the same.

    Arguments:
        made: the rules' result.
        expected: the expected result.
        scaled: those that arithmetic may have changed in the last bits.
    """
    for name, array in expected.items():
        other = made.get(name)
        if other is None:
            raise RuleError(f"no rule makes {name!r}")
        if array.dtype == other.dtype and array.tobytes() == other.tobytes():
            continue
        if name not in scaled or not _is_near(array, other):
            raise RuleError(f"rules make other elements of {name!r}")


def _is_near(array: Array, other: Array) -> bool:
    if array.shape != other.shape or dtype_kind(array.dtype) != "float":
        return False
    a, b = array.astype(np.float64), other.astype(np.float64)
    size = float(np.abs(a).max(initial=1.0))
    return bool((np.abs(a - b) <= max(step(array.dtype), 2e-6) * 8 * size).all())


def step(dtype: DType) -> float:
    return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def taken_apart(lines: Sequence[Written], text: str, error: Exception) -> list[Written]:
    """Rules without merging those that an error is about; unchanged if none of these is merged.

    Arguments:
        lines: the rules.
        text: of their file, which ends with a line for each.
        error: why they do not do as the converter does.
    """
    if isinstance(error, RuleSyntaxError):
        at_fault = {number for number, line in enumerate(lines) if not _is_rule(line)}
    else:
        before = text.count("\n") - len(lines)
        at_fault = {int(n) - 1 - before for n in re.findall(r", line ([0-9]+):", str(error))}
        names = set(re.findall(r"'([^']+)'", str(error)))
        at_fault |= {
            number
            for number, line in enumerate(lines)
            if line.parts and names_of(line, True, names) | names_of(line, False, names)
        }
    return [
        part
        for number, line in enumerate(lines)
        for part in (line.parts if number in at_fault and line.parts else (line,))
    ]


def _is_rule(line: Written) -> bool:
    try:
        Rules.parse(str(line))
    except RuleSyntaxError:
        return False
    return True


def names_of(line: Written, is_left: bool, names: Iterable[str]) -> set[str]:
    """The names of arrays that a rule is about."""
    (rule,) = Rules.parse(str(line)).rules
    side = rule_exprs_of(rule.left if is_left else rule.right)
    return {name for name in names if any(expr.pattern.match(name) for expr in side)}


def wrong_with(
    line: Written, inputs: Mapping[str, Array], made: Mapping[str, Array], scaled: set[str]
) -> str:
    """Why a rule by itself does not do as a converter does; "" if it does.

    Arguments:
        line: the rule, of arrays on both sides.
        inputs: of the converter.
        made: its result.
        scaled: see `same`.
    """
    try:
        rules = Rules.parse(str(line))
        have = {name: inputs[name] for name in names_of(line, True, inputs)}
        want = {name: made[name] for name in names_of(line, False, made)}
        arrays = through(rules, have, want, strict=False)
        same(arrays, {name: want[name] for name in arrays}, scaled)
    except (RuleError, LoadMismatch) as error:
        return str(error).partition("\n")[0]
    return "" if arrays else "its names fit no rule"
