"""Observe: a converter's function -> the rules that do the same, checked against it both ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unickpt import Rules
from unickpt.errors import LoadMismatch, RuleError
from unickpt.extend import Array, DType, ObservedReport, dtype_kind, dtype_name
from unickpt.plugins.observe.agreement import names_of, same, step, taken_apart, through, wrong_with
from unickpt.plugins.observe.components import ComponentMisfit, Input, drafts
from unickpt.plugins.observe.converters import Converter, Example
from unickpt.plugins.observe.element_codes import NamesDiffer, Traced, Tracer, bits_of, check_names
from unickpt.plugins.observe.fitting import Draft, Term
from unickpt.plugins.observe.notation import Written, WrittenTerm, tokens, written
from unickpt.plugins.observe.regular_blocks import Irregular
from unickpt.plugins.observe.rule_merging import merged

_MISSING = object()
_SCALES = (1.0, 1e-3, 300.0)
"""Of the fresh numbers: a converter that depends on the size of values shall return another
result."""

_MERGING = (True, True, True), (False, True, True), (False, False, True), (False, False, False)
"""Whether rules that differ in phrases, words and numbers are merged; those in phrases only if all
merged rules are right, since splitting them makes more rules than not merging."""


def observe(
    function: Callable[[Any], Any],
    example: Any,
    *,
    strict: bool = True,
    framework: str | None = None,
    name: str | None = None,
) -> Rules:
    """See `Rules.observe`."""
    parsed_example = Example.of(example, framework)
    title = name or f"{function.__module__}:{getattr(function, '__qualname__', function)}"
    return rules_of(
        observed(Converter(function, parsed_example), parsed_example, title), title, strict=strict
    )


def rules_of(seen: Seen, title: str, *, strict: bool) -> Rules:
    """The rules of an observation, with their report.

    Arguments:
        seen: of one converter, or of a loader on all ranks.
        title: of the rules, for messages.
        strict: whether to refuse arrays that no rule can express.

    Raises:
        RuleError: names the first array that no rule makes.
    """
    rules = _RuleWriter(seen, title).rules()
    if strict and seen.refused:
        first, why = next(iter(seen.refused.items()))
        more = f" (and {len(seen.refused) - 1} more arrays)" if len(seen.refused) > 1 else ""
        raise RuleError(
            f"{title}: {first!r} {why}{more}. strict=False writes rules for the other arrays, and "
            "lists these in Rules.report"
        )
    return rules


@dataclass(frozen=True)
class ProbeValues:
    """The leaves of a converter's argument and result that are no arrays, by name."""

    taken: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@dataclass
class Seen:
    """The observation of a converter.

    Arguments:
        inputs: of the converter.
        traced: where the elements of all arrays come from that it returns.
        own: fresh numbers that it was given.
        made: its result from them.
        refused: arrays that no rule can make, and why.
        runs: how often it was called.
        together: see `components.drafts`.
        values: which leaves that are no arrays it takes, and which it returns; of these, those that
            come back as they were under their own name.
    """

    inputs: list[Input]
    traced: list[Traced]
    own: dict[str, Array]
    made: dict[str, Array]
    refused: dict[str, str]
    runs: int
    together: Callable[[str], str] | None = None
    values: ProbeValues = ProbeValues()


def observed(converter: Callable[..., dict[str, Array]], example: Example, title: str) -> Seen:
    """Runs a converter until its effect is determined.

    Arguments:
        converter: takes and returns arrays by name.
        example: of its argument.
        title: for messages.

    Raises:
        RuleError: which arrays there are depends on values.
    """
    inputs = [
        Input(name, shape, dtype_name(dtype)) for name, (shape, dtype) in example.arrays.items()
    ]
    try:
        seen = _traced(converter, example, inputs)
        _test(converter, example, seen)
    except NamesDiffer as error:
        raise RuleError(f"{title}: {error}") from None
    plain, returned = example.plain, getattr(converter, "plain", {})
    unchanged = (name for name, value in plain.items() if returned.get(name, _MISSING) == value)
    seen.values = ProbeValues(tuple(plain), tuple(returned), tuple(unchanged))
    return seen


def _traced(
    converter: Callable[..., dict[str, Array]], example: Example, inputs: list[Input]
) -> Seen:
    """Where all elements come from; in float32 where the converter takes that."""
    native_arrays = [np.zeros(shape, dtype) for shape, dtype in example.arrays.values()]
    wide = [np.zeros(x.shape, np.float32) if _is_narrow(x) else x for x in native_arrays]
    names = list(example.arrays)
    for arrays in [wide, native_arrays] if any(map(_is_narrow, native_arrays)) else [native_arrays]:
        tracer = Tracer(converter, arrays, names)
        try:
            traced = tracer.trace()
            break
        except Exception as error:
            if arrays is native_arrays or isinstance(error, NamesDiffer):
                raise
    refused = {output.name: _of_several(output) for output in traced if output.fault}
    return Seen(inputs, traced, {}, {}, refused, tracer.runs)


def _test(converter: Callable[..., dict[str, Array]], example: Example, seen: Seen) -> None:
    """Runs the converter on fresh numbers, and refuses arrays that differ from the trace."""
    random = np.random.default_rng(1)
    for scale in _SCALES:
        arrays = {
            name: _fresh(random, shape, dtype, scale)
            for name, (shape, dtype) in example.arrays.items()
        }
        made = converter(arrays)
        seen.runs += 1
        check_names([made], seen.traced)
        if not seen.own:
            seen.own, seen.made = arrays, made
        for output in seen.traced:
            why = "" if output.name in seen.refused else _differs(output, arrays, seen.inputs, made)
            if why:
                seen.refused[output.name] = why


class _RuleWriter:
    """Writes the rules of an observation.

    Arguments:
        seen: the observation.
        title: of the rules.
    """

    def __init__(self, seen: Seen, title: str) -> None:
        self._seen, self._title = seen, title
        self._casts: dict[str, DType] = {}
        self._used: dict[str, Array] = {}

    def rules(self) -> Rules:
        """The rules, with their report.

        Raises:
            RuleError: there are none, though each array is clear.
        """
        traced = [output for output in self._seen.traced if output.name not in self._seen.refused]
        inputs = self._seen.inputs
        of_inputs = [array for array in traced if (array.source >= 0).any()]
        numbers = {array.name: number for number, array in enumerate(inputs)}
        rules: list[Written] = []
        used: set[str] = set()
        all_drafts = list(drafts(inputs, of_inputs, self._seen.together))
        _tell_apart([draft for draft in all_drafts if isinstance(draft, Draft)])
        for draft in all_drafts:
            if isinstance(draft, ComponentMisfit):
                self._refuse(draft.right, draft.why)
                continue
            names = draft.names(is_left=True)
            try:
                rules.append(
                    written(draft, min(map(numbers.__getitem__, names)), self._dtype_of(draft))
                )
            except Irregular as error:
                self._refuse(draft.names(is_left=False), str(error))
                continue
            used.update(names)
        constant: list[str] = []
        not_made: list[str] = []
        for array in traced:
            if (array.source >= 0).any() or array.name in self._seen.refused:
                continue
            rules.append(self._constant(array, len(inputs) + len(rules)))
            (constant if rules[-1].nothing != "drop" else not_made).append(array.name)
        unused = [array.name for array in inputs if array.name not in used]
        # The inputs of refused arrays are not known, so then nothing counts as lost.
        dropped = [] if self._seen.refused else unused
        rules += [
            Written((WrittenTerm(tokens(name)),), (), order=numbers[name]) for name in dropped
        ]
        rules += self._of_values(len(inputs) + len(rules))
        values = self._seen.values
        dropped += [name for name in values.taken if name not in values.kept]
        not_made += [name for name in values.returned if name not in values.kept]
        self._used = self._used_elements(inputs, of_inputs)
        refused = self._seen.refused
        scaled = [x.name for x in of_inputs if _is_scaled(x) and x.name not in refused]
        reported_names = {*scaled, *constant, *not_made, *refused}
        report = ObservedReport(
            tuple(array.name for array in traced if array.name not in reported_names),
            tuple(scaled), tuple(constant), tuple(not_made), tuple(dropped),
            tuple(name for name, is_used in self._used.items() if not is_used.all()),
            refused, self._seen.runs,
        )  # fmt: skip
        return self._checked(rules, report, used | {*dropped})

    def _of_values(self, order: int) -> list[Written]:
        """Rules for values that are not arrays."""
        values, rules = self._seen.values, list[Written]()
        for name in dict.fromkeys([*values.taken, *values.returned]):
            term = WrittenTerm(tokens(name))
            left = (term,) if name in values.taken else ()
            right = ((term,),) if name in values.kept or not left else ()
            rules.append(Written(left, right, order=order + len(rules)))
            if left and not right and name in values.returned:
                rules.append(Written((), ((term,),), order=order + len(rules)))
        return rules

    def _used_elements(self, inputs: Sequence[Input], traced: Sequence[Traced]) -> dict[str, Array]:
        """For each input in use, which of its elements are used."""
        used: dict[int, Array] = {}
        for output in traced:
            for source in output.sources:
                if output.name not in self._seen.refused:
                    size = math.prod(inputs[source].shape)
                    is_used = used.setdefault(source, np.zeros(size, bool))
                    is_used[output.index[output.source == source]] = True
        return {inputs[source].name: used[source] for source in sorted(used)}

    def _refuse(self, names: Sequence[str], why: str) -> None:
        self._seen.refused |= dict.fromkeys(names, f"cannot be made by a rule: {why}")

    def _dtype_of(self, draft: Draft) -> Callable[[Term, bool], str | None]:
        """Which dtype terms have when they are made, where the converter changes it."""
        names = draft.names(is_left=True)
        left = {self._seen.own[name].dtype for name in names}
        right = {self._seen.made[name].dtype for name in draft.names(is_left=False)}
        if left != right and len(right) == 1:
            self._casts |= dict.fromkeys(names, *right)

        def dtype_of(term: Term, is_left: bool) -> str | None:
            if left == right and len(left) == 1:
                return None
            arrays = self._seen.own if is_left else self._seen.made
            kinds = {arrays[name].dtype for name in term.names}
            if len(kinds) > 1:
                raise Irregular("arrays of several dtypes become one")
            return dtype_name(kinds.pop())

        return dtype_of

    def _constant(self, output: Traced, order: int) -> Written:
        """A rule for an array that the converter makes of nothing."""
        values = np.unique(output.offset)
        if len(values) != 1 or not np.isfinite(values[0]):
            return Written((), ((WrittenTerm(tokens(output.name)),),), order=order)
        axes = [f"a{n}" for n in range(len(output.shape))]
        tail = f" [{' '.join(axes)}]"
        dtype = self._seen.made[output.name].dtype
        if dtype != np.float32:
            tail += f" as {dtype_name(dtype)}"
        sizes = tuple(zip(axes, output.shape, strict=True))
        number = f"{values[0]:.17g}"
        return Written((), ((WrittenTerm(tokens(output.name), tail),),), sizes, number, order)

    # --- checking -----------------------------------------------------------------------------

    def _checked(self, rules: Sequence[Written], report: ObservedReport, ruled: set[str]) -> Rules:
        """The shortest rules that do as the converter does, in both directions.

        Wrongly merged rules are split again, and a rule that is wrong by itself refuses its arrays,
        not those of others.
        """
        problem = ""
        for phrases, words, numbers in _MERGING:
            lines = merged(rules, words=words, phrases=phrases) if numbers else list(rules)
            while True:
                text = _text(self._title, lines, report)
                try:
                    parsed_rules = Rules.parse(text, name=self._title)
                    self._compare(parsed_rules, report, ruled)
                except (RuleError, LoadMismatch) as error:
                    problem = str(error)
                    apart = taken_apart(lines, text, error)
                    if apart == lines or phrases:
                        break
                    lines = apart
                    continue
                return replace(parsed_rules, report=replace(report, lines=len(lines), text=text))
        inputs, made, scaled = self._seen.own, self._seen.made, {*report.scaled}
        both = [rule for rule in rules if rule.left and rule.right]
        faults = [(rule, wrong_with(rule, inputs, made, scaled)) for rule in both]
        wrong = [rule for rule, why in faults if why]
        if not wrong or len(wrong) == len(rules):
            raise RuleError(
                f"{self._title}: no rules say what it does, though each array is clear: {problem}"
            )
        good = [rule for rule in rules if rule not in wrong]
        lost = {name for rule in wrong for name in names_of(rule, True, inputs)}
        for rule, why in faults:
            if why:
                self._refuse(sorted(names_of(rule, False, made)), why)
        refused = self._seen.refused
        report = replace(
            report,
            moved=tuple(name for name in report.moved if name not in refused),
            scaled=tuple(name for name in report.scaled if name not in refused),
            refused=refused,
        )
        return self._checked(good, report, ruled - lost)

    def _compare(self, rules: Rules, report: ObservedReport, ruled: set[str]) -> None:
        """Compares the result of rules with the converter's input and output.

        Raises:
            RuleError: it is not the same, or the rules do not fit.
        """
        have = {name: x for name, x in self._seen.own.items() if name in ruled}
        want = {name: x for name, x in self._seen.made.items() if name not in report.refused}
        values = self._seen.values
        forward = through(rules, have, want, values.taken, values.returned)
        made = {name: x for name, x in want.items() if name not in report.not_made}
        same(forward, made, {*report.scaled})
        backward = through(rules.inverse, want, have, values.returned, values.taken)
        expected = {name: self._left_of(name) for name in have if name not in report.dropped}
        same(backward, expected, {*have} if report.scaled else set())

    def _left_of(self, name: str) -> Array:
        """The elements of an input that the other direction can restore: not those that were cut
        off, or rounded."""
        x = self._seen.own[name]
        left = x.astype(self._casts.get(name, x.dtype)).astype(x.dtype)
        return np.where(self._used[name].reshape(x.shape), left, np.zeros((), x.dtype))


def _tell_apart(all_drafts: Sequence[Draft]) -> None:
    """Marks names with numbers that several rules have, so that sizes tell whose they are."""
    seen: dict[object, list[Term]] = {}
    for draft in all_drafts:
        terms_of_draft: dict[object, Term] = {}
        for is_left in (True, False):
            for term in draft.side(is_left):
                if any(not isinstance(item, str) for item in term.name):
                    texts = tuple(item if isinstance(item, str) else None for item in term.name)
                    terms_of_draft[is_left, texts] = term
        for key, term in terms_of_draft.items():
            seen.setdefault(key, []).append(term)
    for alike in seen.values():
        for term in alike:
            term.is_one_of_several |= len(alike) > 1


def _is_narrow(x: Array) -> bool:
    return dtype_kind(x.dtype) == "float" and x.dtype.itemsize < 4


def _fresh(
    random: np.random.Generator, shape: tuple[int, ...], dtype: DType, scale: float
) -> Array:
    """Numbers that a converter has not seen."""
    if dtype_kind(dtype) in ("float", "complex"):
        return (random.standard_normal(shape) * scale).astype(dtype)
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    return random.integers(0, 3 << bits_of(dtype) - 1, shape).astype(dtype)


def _is_scaled(output: Traced) -> bool:
    is_element = output.source >= 0
    return bool((output.scale[is_element] != 1).any() or (output.offset[is_element] != 0).any())


def _place(output: Traced, flat: int) -> str:
    where = np.unravel_index(flat, output.shape or (1,))
    return str([int(i) for i in where][: len(output.shape)])


def _of_several(output: Traced) -> str:
    return (
        f"depends on values: element {_place(output, int(output.fault))} is not one element of an "
        "input, multiplied by a number or with one added"
    )


def _differs(
    output: Traced, arrays: Mapping[str, Array], inputs: Sequence[Input], made: Mapping[str, Array]
) -> str:
    """Why an output differs from the trace; "" if it does not."""
    result = made[output.name]
    expected = np.array(output.offset, np.float64)
    for source in output.sources:
        mine = output.source == source
        x = arrays[inputs[source].name].reshape(-1)[output.index[mine]]
        wide = x.real if x.dtype.kind == "c" else x
        expected[mine] += output.scale[mine] * wide.astype(np.float64)
    flat = np.asarray(result.real if result.dtype.kind == "c" else result).reshape(-1)
    with np.errstate(all="ignore"):
        cast = expected.astype(flat.dtype)
        good = (cast == flat) | (np.isnan(cast.astype(np.float64)) & np.isnan(flat.astype(float)))
        if _is_scaled(output) and dtype_kind(flat.dtype) == "float":
            size = np.maximum(np.abs(expected), np.abs(output.offset))
            size += np.abs(expected - output.offset)
            last = max(step(flat.dtype), 2e-6)
            good |= np.abs(flat.astype(np.float64) - expected) <= 4 * last * size
    bad = np.flatnonzero(~good)
    if not len(bad):
        return ""
    position = int(bad[0])
    return (
        f"depends on values: element {_place(output, position)} would be "
        f"{expected[position]:.9g} by what other numbers showed, and is {float(flat[position]):.9g}"
    )


def _text(title: str, rules: Sequence[Written], report: ObservedReport) -> str:
    head = [f"# Observed from {title}: {report.covered:,} arrays."]
    if report.refused:
        head.append(f"# {len(report.refused):,} more cannot be made by rules.")
    sides = [str(rule).partition(" <-> ") for rule in rules]
    width = min(60, max((len(left) for left, *_ in sides), default=0))
    lines = [f"{left.ljust(width)}{arrow}{right}" for left, arrow, right in sides]
    return "\n".join([*head, "", *lines, ""])
