"""Planner: rules + stored leaves (+ requested leaves) -> a `RulePlan`, or an error.

A plan is an error unless every stored array is used once or dropped, and every requested array is
made once. Within an array, every element has exactly one counterpart: that was checked when the
rule was read (`unickpt.rules.rule`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from unickpt.arrays import dtypes
from unickpt.errors import RuleError
from unickpt.format.index import ArrayEntry
from unickpt.reading.recipes import Fill, MappedSource, whole_dims
from unickpt.rules import axes, explain
from unickpt.rules.ast import AxisItem, Nothing
from unickpt.rules.compiling import CompiledRules
from unickpt.rules.conflicts import Conflicts, choose_variants, keep_ties, leave_to_others
from unickpt.rules.explain import Problem
from unickpt.rules.matching import Family, LeafNames, Unfit, families, names_of, resolve
from unickpt.rules.misplaced_lifts import misplaced_lifts
from unickpt.rules.optimizer_slots import SharedState, shared_names
from unickpt.rules.plan import (
    Constant,
    Fact,
    LeafFacts,
    LeafKind,
    Made,
    RulePlan,
    Same,
    StoredLeaves,
)
from unickpt.rules.rule import CompiledExpr, Rule, exprs_of


def make_plan(
    rules: CompiledRules,
    stored: StoredLeaves,
    want: Mapping[str, Fact] | None,
    *,
    strict: bool = True,
    keep_misfits: bool = False,
    where: str = "",
) -> RulePlan:
    """Computes the sources of every array.

    Arguments:
        rules: oriented so that their left side is the stored one.
        stored: the stored checkpoint.
        want: the requested leaves; None if rules alone decide.
        strict: whether all stored leaves must be used, all leaves that rules make must be
            requested, and every rule must match both sides; if not, rules must only match the
            stored side.
        keep_misfits: whether an array that is requested in another shape than its rule finds is
            skipped, and listed in `RulePlan.misfits`, instead of refused.
        where: the checkpoint, for messages.

    Raises:
        RuleError: lists all reasons at once.
    """
    planner = _RulePlanner(rules, stored, want, strict, keep_misfits=keep_misfits)
    return planner.make_plan(where)


def offers(rules: CompiledRules, stored: StoredLeaves, want: Mapping[str, Fact]) -> dict[str, Made]:
    """All leaves that rules could make from a checkpoint, even if several rules could make them.

    Arguments:
        want: other requested leaves, which give sizes.
    """
    sized = _RulePlanner(rules, stored, want, False)
    sized.resolved([rule for rule in rules.rules if not rule.lifted])
    candidates = _RulePlanner(rules, stored, None, False, sized.sizes).resolved(rules.rules)
    maker = _ArrayMaker(rules, stored, LeafNames(stored.facts), None, Conflicts())
    maker.make([family for family in candidates if family.reason is None])
    return maker.plan.made


StoredBlocks = Mapping[frozenset[str], tuple[CompiledExpr, axes.SegmentChoice]]
"""The blocks of stored arrays, by their axes."""


class _RulePlanner:
    """The state that the steps of one plan share."""

    def __init__(
        self,
        rules: CompiledRules,
        stored: StoredLeaves,
        want: Mapping[str, Fact] | None,
        strict: bool,
        sizes: Mapping[tuple[str, str], Mapping[str, int]] | None = None,
        *,
        keep_misfits: bool = False,
    ) -> None:
        self._rules, self._stored = rules, stored
        self._strict, self._keep_misfits = strict, keep_misfits
        self.sizes = dict(sizes or {})  # of families of parameters; their slots have the same
        self._have = LeafNames(stored.facts)
        self._want = None if want is None else LeafNames(want)

    def make_plan(self, where: str) -> RulePlan:
        """See `make_plan`."""
        candidates = self.resolved(self._rules.rules)
        valid = self._applicable(candidates)
        conflicts = Conflicts()
        conflicts.settle(valid, self._have, self._want)
        maker = _ArrayMaker(self._rules, self._stored, self._have, self._want, conflicts)
        maker.make(valid)
        plan, clashes = maker.plan, conflicts.problems(self._want is not None)
        problems = [*map(Problem, clashes), *maker.problems]
        unused, unmade = self._left_over(plan, valid)
        mismatched = explain.misshapen(candidates, unused, unmade) if self._keep_misfits else []
        for family in mismatched:
            unused, unmade = _leave_alone(family, plan, unused, unmade)
        plan.unused = list(unused)
        if self._strict:
            misplaced, names = self._misplaced_lifts(plan, candidates, unused, unmade)
            problems += misplaced
            unused = {name: fact for name, fact in unused.items() if name not in names}
            unmade = {name: fact for name, fact in unmade.items() if name not in names}
        problems += self._problems_left_over(
            plan, candidates, mismatched, problems, (unused, unmade)
        )
        if problems:
            raise RuleError(explain.message(where, self._likeliest(problems, candidates, valid)))
        if self._want is None:
            plan.nameless = self._rules.nameless
        if any(family.assumed for family in valid):
            explain.warn_of_assumed(valid)
        return plan

    def _applicable(self, candidates: Sequence[Family]) -> list[Family]:
        """The families to which a rule applies, without those that yield to others."""
        choose_variants(candidates)
        if self._want is None:
            keep_ties(candidates, self._stored.entries)
        valid = [family for family in candidates if family.reason is None]
        of_all = (shared_names(lift, valid, self._have, self._want) for lift in self._rules.shared)
        leave_to_others(candidates, of_all, self._want is not None)
        return [family for family in valid if family.reason is None]

    def _left_over(self, plan: RulePlan, valid: Sequence[Family]) -> tuple[LeafFacts, LeafFacts]:
        """The stored leaves that are not used, and the requested ones that are not made."""
        used, made = _used(plan, valid), {*plan.made, *plan.aliases, *plan.kept_names}
        requested = {} if self._want is None else self._want.facts
        unused = {name: fact for name, fact in self._stored.facts.items() if name not in used}
        return unused, {name: fact for name, fact in requested.items() if name not in made}

    def _misplaced_lifts(
        self, plan: RulePlan, candidates: Sequence[Family], unused: LeafFacts, unmade: LeafFacts
    ) -> tuple[list[Problem], set[str]]:
        requested_facts = {} if self._want is None else self._want.facts
        stored = {name: self._stored.facts[name] for name in (*unused, *plan.dropped)}
        requested = {
            name: requested_facts[name]
            for name in (*unmade, *plan.kept_names)
            if name in requested_facts
        }
        return misplaced_lifts(self._rules.rules, self._rules.shared, candidates, stored, requested)

    def _problems_left_over(
        self,
        plan: RulePlan,
        candidates: Sequence[Family],
        mismatched: Sequence[Family],
        before: Sequence[Problem],
        left: tuple[LeafFacts, LeafFacts],
    ) -> list[Problem]:
        """Why leaves are left over, and which rules apply to nothing.

        Arguments:
            candidates: all families that a rule matches.
            mismatched: those that are skipped.
            before: the problems that were already found.
            left: the leaves that are not used, and those that are not made.
        """
        unused, unmade = (
            {name: fact for name, fact in facts.items() if not fact.dispensable} for facts in left
        )
        left = unused, unmade
        shared = self._rules.shared
        of_kept = {family.rule for family in mismatched}
        rules = [rule for rule in self._rules.rules if rule not in of_kept]
        applied = {family.rule for family in candidates if family.reason is None}
        if not any(left) and all(rule.optional or rule in applied for rule in rules):
            return []
        if not self._strict:
            problems = explain.misfits(*left, candidates, shared)
            return problems + explain.matching_nothing(rules, candidates, self._have)
        requested = {} if self._want is None else self._want.facts
        problems = explain.left_over(*left, plan.made, requested, candidates, shared)
        return problems + explain.idle(rules, candidates, [*before, *problems], self._have)

    def _likeliest(
        self, problems: Sequence[Problem], candidates: Sequence[Family], valid: Sequence[Family]
    ) -> list[Problem]:
        """The problems after one that probably causes them all, if there is one."""
        turned = explain.backwards(self._rules.rules, candidates, self._have)
        first = turned or explain.unfamiliar(self._rules.rules, valid, candidates, self._have)
        said = {problem.rule.statement for problem in first if problem.rule is not None}
        further = [p for p in problems if p.rule is None or p.rule.statement not in said]
        return [*first, *(further if valid or not turned else ())]

    def resolved(self, rules: Sequence[Rule]) -> list[Family]:
        """Every family of arrays that a rule may match."""
        candidates = []
        for rule in rules:  # those of parameters come before those of their slots
            for family in families(rule, self._have, self._want):
                which = sorted(family.texts.items()), sorted(family.paired.items())
                key = rule.parameter or str(rule), str(which)
                family.sizes = {**self._recorded(family), **self.sizes.get(key, {})}
                resolve(family, self._have, self._want, partly=not self._strict)
                if family.reason is None and not rule.lifted:
                    self.sizes[key] = family.sizes
                candidates.append(family)
        return candidates

    def _recorded(self, family: Family) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name in family.matched_names() if self._stored.sizes else ():
            sizes |= self._stored.sizes.get(name, {})
        return sizes


class _ArrayMaker:
    """Computes the sources of arrays, and adds them to a plan.

    Arguments:
        rules: oriented so that their left side is the stored one.
        stored: the stored checkpoint.
        have: its names.
        want: the requested leaves; None if rules alone decide.
        conflicts: the names that several rules claim.
    """

    def __init__(
        self,
        rules: CompiledRules,
        stored: StoredLeaves,
        have: LeafNames,
        want: LeafNames | None,
        conflicts: Conflicts,
    ) -> None:
        self._rules, self._stored, self._conflicts = rules, stored, conflicts
        self._have, self._want = have, want
        self.plan = RulePlan()
        self.problems: list[Problem] = []

    def make(self, valid: Sequence[Family]) -> None:
        """Adds the arrays that rules make from families to which they apply, and the values that
        one side has once and the other once per parameter."""
        for family in valid:
            self._make_of(family)
        for lift in self._rules.shared:
            have, want = shared_names(lift, valid, self._have, self._want)
            if not have:
                continue
            self._conflicts.add(have, want, str(lift))
            first = have[0]
            self.plan.checks += [Same(first, other, str(lift)) for other in have[1:]]
            for name in want:
                self.plan.made.setdefault(name, self._copy_of(first, name, lift))

    def _make_of(self, family: Family) -> None:
        """Adds the arrays that a rule makes from one family."""
        rule = family.rule
        try:
            if isinstance(rule.right, Nothing):
                self._drop(family, rule.right)
            elif isinstance(rule.left, Nothing):
                self._make_constants(family, rule.left)
            elif rule.function is not None:
                self._apply_function(family)
            else:
                self._make(family)
        except (Unfit, RuleError) as error:
            self.problems.append(explain.fault(rule, error))

    def _drop(self, family: Family, nothing: Nothing) -> None:
        for expr in exprs_of(family.rule.left):
            for _, name in family.grid(expr):
                if name not in self._stored.facts:
                    continue
                self.plan.dropped[name] = str(family.rule)
                if not nothing.unchecked:
                    assert nothing.value is not None, "only `drop` has no value"
                    _check_constant(nothing.value, name, self._stored.facts[name])
                    self.plan.checks.append(Constant(name, nothing.value, str(family.rule)))

    def _make_constants(self, family: Family, nothing: Nothing) -> None:
        for expr in exprs_of(family.rule.right):
            items = family.items(expr)
            for _, name in family.grid(expr):
                if not self._is_wanted(name):
                    continue
                if nothing.value is None:
                    self.plan.kept_names.add(name)
                    continue
                shape = tuple(axes.size_of(item, family.sizes) or 0 for item in items)
                requested_dtype = None if self._want is None else self._want.facts[name].dtype
                fact = Fact(shape, expr.dtype or requested_dtype or "float32")
                fill = Fill(shape, whole_dims(shape), nothing.value)
                # A second rule that makes it is a conflict, which is reported.
                self.plan.made.setdefault(name, Made(name, fact, str(family.rule), fills=(fill,)))
                _check_constant(nothing.value, name, fact)

    def _apply_function(self, family: Family) -> None:
        rule = family.rule
        function = self._rules.functions[rule.function or ""]
        (expr,) = exprs_of(rule.right)
        for indices, name in family.grid(expr):
            if not self._is_wanted(name):
                continue
            if rule.moves:
                blocks = [dict(family.blocks([v])) for v in exprs_of(rule.left)]
                raw = replace(expr, dtype=None)
                inputs = [self._make_one(family, raw, indices, name, b) for b in blocks]
                shape = inputs[0].fact.shape
            else:
                inputs = [self._as_it_is(n) for n in names_of(family, rule.left)]
                shape = tuple(function.shape(*(made.fact.shape for made in inputs)))
                if rule.says_shapes:
                    family.check_shape(expr, name, shape)
            if any(made.carried is not None for made in inputs):
                raise Unfit(
                    f"{name!r} would be made from something other than an array; functions need "
                    "arrays"
                )
            fact = Fact(shape, expr.dtype or inputs[0].fact.dtype)
            made = Made(name, fact, str(rule), function=function, inputs=tuple(inputs), exact=False)
            self.plan.made.setdefault(name, made)

    def _as_it_is(self, name: str) -> Made:
        """A stored array."""
        fact = self._stored.facts[name]
        dims = whole_dims(fact.shape)
        return Made(name, fact, "", (MappedSource(self._entry(name), fact.shape, dims, dims),))

    def _make(self, family: Family) -> None:
        rule = family.rule
        assert not isinstance(rule.left, Nothing)
        assert not isinstance(rule.right, Nothing)
        blocks = dict(family.blocks([term[0] for term in rule.left]))
        for term in rule.left:
            for expr in term[1:]:
                self._check_same(family, term[0], expr)
        for term in rule.right:
            for indices, _ in family.grid(term[0]):
                self._make_term(family, term, indices, blocks)

    def _make_term(
        self,
        family: Family,
        term: Sequence[CompiledExpr],
        indices: dict[str, int],
        blocks: StoredBlocks,
    ) -> None:
        """Adds an array under all of its names; those of the same form are one array."""
        first: dict[tuple[Any, ...], str] = {}
        if family.rule.lifted and self._want is None:
            term = term[:1]  # an optimizer has one state of a tied parameter
        for expr in term:
            name = expr.pattern.format(family.texts, indices)
            if not self._is_wanted(name) or self._conflicts.is_left(name, family):
                continue
            other = first.setdefault(expr.form, name)
            if other == name:
                self.plan.made.setdefault(name, self._make_one(family, expr, indices, name, blocks))
            else:
                self.plan.aliases[name] = other

    def _is_wanted(self, name: str) -> bool:
        return self._want is None or name in self._want.facts

    def _check_same(self, family: Family, first: CompiledExpr, other: CompiledExpr) -> None:
        for indices, name in family.grid(first):
            copy = other.pattern.format(family.texts, indices)
            if copy not in self._stored.facts or self._conflicts.is_left(copy, family):
                continue
            made = None
            if other.form != first.form:
                blocks = dict(family.blocks([first]))
                made = self._make_one(family, other, indices, copy, blocks)
            self.plan.checks.append(Same(name, copy, str(family.rule), made))

    def _make_one(
        self,
        family: Family,
        expr: CompiledExpr,
        indices: dict[str, int],
        name: str,
        blocks: StoredBlocks,
    ) -> Made:
        """The sources of an array, block by block.

        Arguments:
            family: the arrays.
            expr: of the array.
            indices: the indices in its name.
            name: of the array.
            blocks: of the stored arrays.
        """
        rule = family.rule
        origins, sources, fills = self._pieces(family, expr, indices, blocks)
        facts = [self._stored.facts[origin] for origin in origins]
        plain = [origin for origin in origins if origin not in self._stored.entries]
        if plain:
            return _carry(rule, expr, name, plain[-1], facts)
        have = sorted({fact.dtype for fact in facts})
        if len(have) > 1 and expr.dtype is None:
            raise Unfit(
                f"{name!r} is made from arrays of {' and '.join(have)}; add `as` with the dtype"
            )
        shape = tuple(axes.size_of(i, family.sizes) or 0 for i in family.items(expr))
        fact = Fact(shape, expr.dtype or have[0])
        _check_arithmetic(sources)
        cropped = any(axes.has_pad(source.items) for source in exprs_of(rule.left))
        return Made(
            name,
            fact,
            str(rule),
            tuple(sources),
            tuple(fills),
            exact=all(x.is_exact and _holds(fact.dtype, x.entry.dtype) for x in sources),
            cropped=cropped,
            sizes=family.padded_sizes() if fills or cropped else {},
        )

    def _pieces(
        self, family: Family, expr: CompiledExpr, indices: Mapping[str, int], blocks: StoredBlocks
    ) -> tuple[list[str], list[MappedSource], list[Fill]]:
        """The names of all sources of an array, the arrays among these, and its padding."""
        items = family.items(expr)
        origins: list[str] = []
        sources: list[MappedSource] = []
        fills: list[Fill] = []
        for choice in axes.choices(items):
            axis_names = [axis.name for axis in axes.block_axes(items, choice)]
            if any(map(axes.is_pad, axis_names)):
                fills.append(_pad(family, items, choice, axis_names))
                continue
            block, block_choice = blocks[frozenset(axis_names) | expr.pattern.axes]
            for origin, origin_indices in _origins(family, block, indices):
                origins.append(origin)
                if origin in self._stored.entries:
                    entry, stored = self._entry(origin), (block, block_choice, origin_indices)
                    sources.append(family.mapped(entry, stored, (expr, choice, indices)))
        return origins, sources, fills

    def _entry(self, name: str) -> ArrayEntry:
        entry = self._stored.entries.get(name)
        if entry is None:
            raise Unfit(f"{name!r} is {self._stored.facts[name]}, not an array")
        return entry

    def _copy_of(self, source: str, name: str, lift: SharedState) -> Made:
        fact = self._stored.facts[source]
        dtype = lift.right.dtype or fact.dtype
        if source not in self._stored.entries:
            return Made(name, Fact((), dtype, fact.kind), str(lift), carried=source)
        sources = self._as_it_is(source).sources
        return Made(name, Fact(fact.shape, dtype), str(lift), sources)


def _origins(
    family: Family, source: CompiledExpr, made_indices: Mapping[str, int]
) -> Iterator[tuple[str, dict[str, int]]]:
    """The stored arrays of an expression that agree with the indices in the made name."""
    names = sorted(source.pattern.axes)
    ranges = [
        range(made_indices[axis], made_indices[axis] + 1)
        if axis in made_indices
        else range(family.sizes[axis])
        for axis in names
    ]
    for indices in itertools.product(*ranges):
        origin_indices = dict(zip(names, indices, strict=True))
        yield source.pattern.format(family.texts, origin_indices), origin_indices


def _pad(
    family: Family, items: Sequence[AxisItem], choice: axes.SegmentChoice, axis_names: list[str]
) -> Fill:
    numbers = {axis: number for number, axis in enumerate(axis_names)}
    extents = tuple(family.sizes[axis] for axis in axis_names)
    return Fill(extents, axes.dims_of(items, choice, family.sizes, numbers, {}), 0)


def _carry(rule: Rule, expr: CompiledExpr, name: str, source: str, facts: Sequence[Fact]) -> Made:
    if len(facts) > 1 or expr.arithmetic or any(v.arithmetic for v in rule.exprs):
        raise Unfit(f"{source!r} is {facts[0]}, which can only be copied as it is")
    dtype = expr.dtype or facts[0].dtype
    return Made(name, Fact((), dtype, facts[0].kind), str(rule), carried=source)


def _leave_alone(
    family: Family, plan: RulePlan, unused: LeafFacts, unmade: LeafFacts
) -> tuple[LeafFacts, LeafFacts]:
    """Adds a family of the wrong shape to the skipped ones; returns the other left-over leaves."""
    source = next(name for name in family.names_there() if name in unused)
    plan.misfits |= {name: source for name in family.names_asked() if name in unmade}
    matched_names = set(family.names_there())
    unused = {name: fact for name, fact in unused.items() if name not in matched_names}
    return unused, {name: fact for name, fact in unmade.items() if name not in plan.misfits}


def _check_arithmetic(sources: Iterable[MappedSource]) -> None:
    for source in sources:
        entry = source.entry
        if not source.is_exact and dtypes.kind(dtypes.from_name(entry.dtype)) != "float":
            raise Unfit(f"{entry.name!r} is {entry.dtype}: arithmetic is for floats")


def _check_constant(value: float, name: str, fact: Fact) -> None:
    if fact.kind is LeafKind.PROCESS:
        raise Unfit(f"{name!r} is {fact}, which a constant cannot make or replace")
    try:
        if fact.dtype:
            dtypes.constant(value, dtypes.from_name(fact.dtype))
    except ValueError as error:
        raise Unfit(f"{name!r} is {fact}, and {error}") from None


def _used(plan: RulePlan, valid: Sequence[Family]) -> set[str]:
    """The stored names that are used."""
    used = {name for family in valid for name in names_of(family, family.rule.left)}
    used |= {x.entry.name for made in plan.made.values() for x in made.sources}
    used |= {made.carried for made in plan.made.values() if made.carried is not None}
    return used | {check.other for check in plan.checks if isinstance(check, Same)}


def _holds(target: str, source: str) -> bool:
    """Whether a dtype holds all values of another."""
    try:
        return bool(np.can_cast(dtypes.from_name(source), dtypes.from_name(target), "safe"))
    except TypeError:
        return target == source
