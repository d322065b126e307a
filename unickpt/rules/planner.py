"""Planner: rules + what is stored (+ what is asked for) -> a `Plan`, or an error.

A plan is an error unless every stored array is used once or dropped, and every array that is
asked for is made once. Within an array, every element has exactly one counterpart: that was
checked when the rule was read (`unickpt.rules.rule`).
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
from unickpt.rules.ast import Item, Nothing
from unickpt.rules.conflicts import Claims, choose_variants, keep_ties, leave_to_others
from unickpt.rules.functions import Function
from unickpt.rules.matching import Instance, Names, Unfit, instances, names_of, resolve
from unickpt.rules.optimizer_slots import Shared, shared_names
from unickpt.rules.plan import Constant, Fact, Made, Plan, Same, Stored
from unickpt.rules.rule import Rule, Seen, views_of


def make_plan(
    rules: Sequence[Rule],
    shared: Sequence[Shared],
    functions: Mapping[str, Function],
    stored: Stored,
    want: Mapping[str, Fact] | None,
    *,
    strict: bool = True,
    keep_misfits: bool = False,
    where: str = "",
) -> Plan:
    """Works out what every array is made of.

    Arguments:
        rules: turned so that their left side is what is stored.
        shared: likewise.
        functions: those that rules name.
        stored: what is stored.
        want: what is asked for; None where rules alone decide.
        strict: whether all that is stored must be used, all that rules make must be asked for,
            and every rule must match both sides; if not, only what is stored.
        keep_misfits: whether what is asked for in another shape than its rule finds is left alone,
            and listed in `Plan.misfits`, instead of refused.
        where: the checkpoint, for messages.

    Raises:
        RuleError: lists all reasons at once.
    """
    planner = _Planner(functions, stored, want, strict, keep_misfits=keep_misfits)
    return planner.plan(rules, shared, where)


def offers(
    rules: Sequence[Rule],
    shared: Sequence[Shared],
    functions: Mapping[str, Function],
    stored: Stored,
    want: Mapping[str, Fact],
) -> dict[str, Made]:
    """All that rules could make of what is stored, whether or not several rules could make it.

    Arguments:
        want: what else is asked for; gives sizes.
    """
    knowing = _Planner(functions, stored, want, False)
    knowing.resolved([rule for rule in rules if not rule.lifted])
    planner = _Planner(functions, stored, None, False, knowing.sizes)
    found = planner.resolved(rules)
    plan = Plan()
    for instance in found:
        if instance.why_not is None:
            planner.try_to_make(instance, plan)
    planner.share(shared, found, plan)
    return plan.made


class _Planner:
    """The state that the steps of one plan share."""

    def __init__(
        self,
        functions: Mapping[str, Function],
        stored: Stored,
        want: Mapping[str, Fact] | None,
        strict: bool,
        sizes: Mapping[tuple[str, str], Mapping[str, int]] | None = None,
        *,
        keep_misfits: bool = False,
    ) -> None:
        self._keep_misfits = keep_misfits
        self.sizes = dict(sizes or {})  # of families of parameters, which their slots have too
        self._functions, self._stored, self._strict = functions, stored, strict
        self._have = Names(stored.facts)
        self._want = None if want is None else Names(want)
        self._problems: list[str] = []
        self._claims = Claims()

    def plan(self, rules: Sequence[Rule], shared: Sequence[Shared], where: str) -> Plan:
        found = self.resolved(rules)
        choose_variants(found)
        if self._want is None:
            keep_ties(found, self._stored.entries)
        valid = [instance for instance in found if instance.why_not is None]
        of_all = (shared_names(lift, valid, self._have, self._want) for lift in shared)
        leave_to_others(found, of_all, self._want is not None)
        valid = [instance for instance in valid if instance.why_not is None]
        self._claims.settle(valid, self._have, self._want)
        plan = Plan()
        for instance in valid:
            self.try_to_make(instance, plan)
        self.share(shared, valid, plan)
        problems = [*self._claims.problems(self._want is not None), *self._problems]
        used = _used(plan, valid)
        unused = {name: f for name, f in self._stored.facts.items() if name not in used}
        there = {*plan.made, *plan.aliases, *plan.kept}
        asked = {} if self._want is None else self._want.facts
        unmade = {name: fact for name, fact in asked.items() if name not in there}
        kept = explain.misshapen(found, unused, unmade) if self._keep_misfits else []
        for instance in kept:
            source = next(name for name in instance.names_there() if name in unused)
            plan.misfits |= {n: source for n in instance.names_asked() if n in unmade}
            unused = {n: f for n, f in unused.items() if n not in set(instance.names_there())}
            unmade = {n: f for n, f in unmade.items() if n not in plan.misfits}
        plan.unused = list(unused)
        others = [rule for rule in rules if not any(rule is instance.rule for instance in kept)]
        if self._strict:
            problems += explain.left_over(unused, unmade, plan.made, asked, found, shared)
            problems += explain.idle(others, found, problems, self._have)
        else:
            problems += explain.misfits(unused, unmade, found, shared)
            problems += explain.matching_nothing(others, found, self._have)
        if problems:
            turned = explain.backwards(rules, found, self._have)
            first = turned or explain.unfamiliar(rules, valid, found, self._have)
            told = {problem.partition("\n")[0] for problem in first}
            rest = [p for p in problems if p.partition("\n")[0] not in told]
            problems = [*first, *(rest if valid or not turned else ())]
            raise RuleError(explain.message(where, problems))
        if self._want is None:
            plan.nameless = _nameless(rules)
        return plan

    def resolved(self, rules: Sequence[Rule]) -> list[Instance]:
        """Every family of arrays that a rule may be about."""
        found = []
        for rule in rules:  # those of parameters come before those of their slots
            for instance in instances(rule, self._have, self._want):
                family = rule.parameter or str(rule), str(sorted(instance.texts.items()))
                instance.sizes = {**self._recorded(instance), **self.sizes.get(family, {})}
                resolve(instance, self._have, self._want, partly=not self._strict)
                if instance.why_not is None and not rule.lifted:
                    self.sizes[family] = instance.sizes
                found.append(instance)
        return found

    def _recorded(self, instance: Instance) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name in instance.matched_names() if self._stored.sizes else ():
            sizes |= self._stored.sizes.get(name, {})
        return sizes

    # --- what is made of what -----------------------------------------------------------------

    def try_to_make(self, instance: Instance, plan: Plan) -> None:
        """Adds what a rule makes of one family."""
        rule = instance.rule
        try:
            if isinstance(rule.right, Nothing):
                self._drop(instance, rule.right, plan)
            elif isinstance(rule.left, Nothing):
                self._make_constants(instance, rule.left, plan)
            elif rule.function is not None:
                self._apply_function(instance, plan)
            else:
                self._make(instance, plan)
        except (Unfit, RuleError) as error:
            self._problems.append(f"{rule}\n    {error}")

    def _drop(self, instance: Instance, nothing: Nothing, plan: Plan) -> None:
        for view in views_of(instance.rule.left):
            for _, name in instance.grid(view):
                if name not in self._stored.facts:
                    continue
                plan.dropped[name] = str(instance.rule)
                if not nothing.unchecked:
                    assert nothing.value is not None, "only `drop` has no value"
                    _check_constant(nothing.value, name, self._stored.facts[name])
                    plan.checks.append(Constant(name, nothing.value, str(instance.rule)))

    def _make_constants(self, instance: Instance, nothing: Nothing, plan: Plan) -> None:
        for view in views_of(instance.rule.right):
            items = instance.items(view)
            for _, name in instance.grid(view):
                if not self._is_wanted(name):
                    continue
                if nothing.value is None:
                    plan.kept.add(name)
                    continue
                shape = tuple(axes.size_of(item, instance.sizes) or 0 for item in items)
                asked = None if self._want is None else self._want.facts[name].dtype
                fact = Fact("array", shape, view.dtype or asked or "float32")
                fill = Fill(shape, whole_dims(shape), nothing.value)
                self._add(plan, Made(name, fact, str(instance.rule), fills=(fill,)))
                _check_constant(nothing.value, name, fact)

    def _apply_function(self, instance: Instance, plan: Plan) -> None:
        rule = instance.rule
        function = self._functions[rule.function or ""]
        (view,) = views_of(rule.right)
        for at, name in instance.grid(view):
            if not self._is_wanted(name):
                continue
            if rule.moves:
                blocks = [dict(_blocks_by_axes(instance, [v])) for v in views_of(rule.left)]
                raw = replace(view, dtype=None)
                inputs = [self._make_one(instance, raw, at, name, b) for b in blocks]
                shape = inputs[0].fact.shape
            else:
                inputs = [self._as_it_is(n) for n in names_of(instance, rule.left)]
                shape = tuple(function.shape(*(made.fact.shape for made in inputs)))
                if rule.says_shapes:
                    _check_shape(instance, view, name, shape)
            if any(made.source is not None for made in inputs):
                raise Unfit(
                    f"{name!r} would be made of something else than an array; functions need arrays"
                )
            fact = Fact("array", shape, view.dtype or inputs[0].fact.dtype)
            made = Made(name, fact, str(rule), function=function, inputs=tuple(inputs), exact=False)
            self._add(plan, made)

    def _as_it_is(self, name: str) -> Made:
        """A stored array."""
        fact = self._stored.facts[name]
        dims = whole_dims(fact.shape)
        return Made(name, fact, "", (MappedSource(self._entry(name), fact.shape, dims, dims),))

    def _make(self, instance: Instance, plan: Plan) -> None:
        rule = instance.rule
        assert not isinstance(rule.left, Nothing)
        assert not isinstance(rule.right, Nothing)
        blocks = dict(_blocks_by_axes(instance, [term[0] for term in rule.left]))
        for term in rule.left:
            for view in term[1:]:
                self._check_same(instance, term[0], view, plan)
        for term in rule.right:
            for at, _ in instance.grid(term[0]):
                self._make_term(instance, term, at, blocks, plan)

    def _make_term(
        self,
        instance: Instance,
        term: Sequence[Seen],
        at: dict[str, int],
        blocks: Mapping[frozenset[str], tuple[Seen, axes.Choice]],
        plan: Plan,
    ) -> None:
        """Adds an array under all of its names; those with the same view are one array."""
        first: dict[tuple[Any, ...], str] = {}
        if instance.rule.lifted and self._want is None:
            term = term[:1]  # an optimizer has one state of a tied parameter
        for view in term:
            name = view.pattern.format(instance.texts, at)
            if not self._is_wanted(name) or self._claims.is_left(name, instance):
                continue
            other = first.setdefault(view.form, name)
            if other == name:
                self._add(plan, self._make_one(instance, view, at, name, blocks))
            else:
                plan.aliases[name] = other

    def _is_wanted(self, name: str) -> bool:
        return self._want is None or name in self._want.facts

    def _check_same(self, instance: Instance, first: Seen, other: Seen, plan: Plan) -> None:
        for at, name in instance.grid(first):
            twin = other.pattern.format(instance.texts, at)
            if twin not in self._stored.facts or self._claims.is_left(twin, instance):
                continue
            made = None
            if other.form != first.form:
                blocks = dict(_blocks_by_axes(instance, [first]))
                made = self._make_one(instance, other, at, twin, blocks)
            plan.checks.append(Same(name, twin, str(instance.rule), made))

    def _make_one(
        self,
        instance: Instance,
        view: Seen,
        at: dict[str, int],
        name: str,
        blocks: Mapping[frozenset[str], tuple[Seen, axes.Choice]],
    ) -> Made:
        rule, items = instance.rule, instance.items(view)
        shape = tuple(axes.size_of(item, instance.sizes) or 0 for item in items)
        feeds: list[MappedSource] = []
        fills: list[Fill] = []
        whole: str | None = None
        facts: list[Fact] = []
        for choice in axes.choices(items):
            own = [axis.name for axis in axes.block_axes(items, choice)]
            if any(map(axes.is_pad, own)):
                fills.append(self._pad(instance, items, choice, own))
                continue
            source, source_choice = blocks[frozenset(own) | view.pattern.axes]
            for origin, there in self._origins(instance, source, at):
                fact = self._stored.facts[origin]
                facts.append(fact)
                if fact.kind != "array":
                    whole = origin
                    continue
                feeds.append(
                    _feed(
                        instance,
                        self._entry(origin),
                        (source, source_choice, there),
                        (view, choice, at),
                    )
                )
        if whole is not None:
            return self._carry(rule, view, name, whole, facts)
        have = sorted({fact.dtype for fact in facts})
        if len(have) > 1 and view.dtype is None:
            raise Unfit(
                f"{name!r} is made of arrays of {' and '.join(have)}; add `as` with the dtype"
            )
        fact = Fact("array", shape, view.dtype or have[0])
        for feed in feeds:
            if not feed.is_exact and dtypes.kind(dtypes.from_name(feed.entry.dtype)) != "float":
                raise Unfit(f"{feed.entry.name!r} is {feed.entry.dtype}: arithmetic is for floats")
        exact = all(feed.is_exact and _holds(fact.dtype, feed.entry.dtype) for feed in feeds)
        cropped = any(axes.has_pad(seen.items) for seen in views_of(rule.left))
        return Made(
            name,
            fact,
            str(rule),
            tuple(feeds),
            tuple(fills),
            exact=exact,
            cropped=cropped,
            sizes=_padded_sizes(instance) if fills or cropped else {},
        )

    def _origins(
        self, instance: Instance, source: Seen, at: Mapping[str, int]
    ) -> Iterator[tuple[str, dict[str, int]]]:
        """The stored arrays of a view that agree with the indices in the name of what is made."""
        names = sorted(source.pattern.axes)
        ranges = [
            range(at[axis], at[axis] + 1) if axis in at else range(instance.sizes[axis])
            for axis in names
        ]
        for indices in itertools.product(*ranges):
            there = dict(zip(names, indices, strict=True))
            yield source.pattern.format(instance.texts, there), there

    def _pad(
        self, instance: Instance, items: Sequence[Item], choice: axes.Choice, own: list[str]
    ) -> Fill:
        numbers = {axis: number for number, axis in enumerate(own)}
        extents = tuple(instance.sizes[axis] for axis in own)
        return Fill(extents, axes.dims_of(items, choice, instance.sizes, numbers, {}), 0)

    def _carry(self, rule: Rule, view: Seen, name: str, source: str, facts: Sequence[Fact]) -> Made:
        if len(facts) > 1 or view.arithmetic or any(v.arithmetic for v in rule.views):
            raise Unfit(f"{source!r} is {facts[0]}, which can only be copied as it is")
        dtype = view.dtype or facts[0].dtype
        return Made(name, Fact(facts[0].kind, (), dtype), str(rule), source=source)

    def _entry(self, name: str) -> ArrayEntry:
        entry = self._stored.entries.get(name)
        if entry is None:
            raise Unfit(f"{name!r} is {self._stored.facts[name]}, not an array")
        return entry

    def _add(self, plan: Plan, made: Made) -> None:
        plan.made.setdefault(
            made.name, made
        )  # a second rule that makes it was reported by `Claims`

    # --- values shared by all parameters ------------------------------------------------------

    def share(self, shared: Sequence[Shared], found: Sequence[Instance], plan: Plan) -> None:
        """Adds values that one side has once and the other once per parameter."""
        valid = [instance for instance in found if instance.why_not is None]
        for lift in shared:
            have, want = shared_names(lift, valid, self._have, self._want)
            if not have:
                continue
            self._claims.add(have, want, str(lift))
            first = have[0]
            plan.checks += [Same(first, other, str(lift)) for other in have[1:]]
            for name in want:
                self._add(plan, self._copy_of(first, name, lift))

    def _copy_of(self, source: str, name: str, lift: Shared) -> Made:
        fact = self._stored.facts[source]
        dtype = lift.right.dtype or fact.dtype
        if fact.kind != "array":
            return Made(name, Fact(fact.kind, (), dtype), str(lift), source=source)
        feeds = self._as_it_is(source).feeds
        return Made(name, Fact("array", fact.shape, dtype), str(lift), feeds)


def _check_shape(instance: Instance, view: Seen, name: str, shape: tuple[int, ...]) -> None:
    """Compares the shape that a function makes with the axes of its rule."""
    items, sizes = instance.items(view), dict(instance.sizes)
    made = f"the function makes {name!r} of shape {list(shape)}"
    if len(items) != len(shape):
        raise Unfit(f"{made}, but the rule gives it the axes [{' '.join(map(str, items))}]")
    for item, extent in zip(items, shape, strict=True):
        try:
            axes.solve(item, extent, sizes)
        except axes.DoesNotFit as error:
            raise Unfit(f"{made}: {error}") from None


def _check_constant(value: float, name: str, fact: Fact) -> None:
    if fact.kind == "process":
        raise Unfit(f"{name!r} is {fact}, which a constant cannot make or replace")
    try:
        if fact.dtype:
            dtypes.constant(value, dtypes.from_name(fact.dtype))
    except ValueError as error:
        raise Unfit(f"{name!r} is {fact}, and {error}") from None


def _nameless(rules: Sequence[Rule]) -> dict[str, str]:
    return {
        str(view.pattern.name): str(rule)
        for rule in rules
        if isinstance(rule.left, Nothing) and rule.left.value is not None and not rule.lifted
        for view in views_of(rule.right)
        if view.pattern.texts
    }


def _used(plan: Plan, valid: Sequence[Instance]) -> set[str]:
    """The stored names that are used."""
    used = {name for instance in valid for name in names_of(instance, instance.rule.left)}
    used |= {feed.entry.name for made in plan.made.values() for feed in made.feeds}
    used |= {made.source for made in plan.made.values() if made.source is not None}
    return used | {check.other for check in plan.checks if isinstance(check, Same)}


def _blocks_by_axes(
    instance: Instance, views: Iterable[Seen]
) -> Iterator[tuple[frozenset[str], tuple[Seen, axes.Choice]]]:
    """Each block of some views under its axes."""
    for view in views:
        items = instance.items(view)
        for choice in axes.choices(items):
            own = frozenset(axis.name for axis in axes.block_axes(items, choice))
            yield own | view.pattern.axes, (view, choice)


def _feed(
    instance: Instance,
    entry: ArrayEntry,
    source: tuple[Seen, axes.Choice, Mapping[str, int]],
    out: tuple[Seen, axes.Choice, Mapping[str, int]],
) -> MappedSource:
    fixed = {**source[2], **out[2]}
    items = instance.items(source[0])
    own = [axis.name for axis in axes.block_axes(items, source[1]) if axis.name not in fixed]
    numbers = {axis: number for number, axis in enumerate(own)}
    dims = [
        axes.dims_of(instance.items(view), choice, instance.sizes, numbers, fixed)
        for view, choice, _ in (source, out)
    ]
    (a, b), (c, d) = (view.affine(instance.sizes) for view, _, _ in (source, out))
    extents = tuple(instance.sizes[axis] for axis in own)
    return MappedSource(entry, extents, dims[0], dims[1], scale=a / c, offset=(b - d) / c)


def _padded_sizes(instance: Instance) -> dict[str, int]:
    pads = {axis: size for axis, size in instance.sizes.items() if axes.is_pad(axis)}
    sizes = {axis: size for axis, size in instance.sizes.items() if axis not in pads}
    if len(pads) == 1:
        sizes[axes.PAD] = next(iter(pads.values()))
    return sizes


def _holds(target: str, source: str) -> bool:
    """Whether a dtype holds all values of another."""
    try:
        return bool(np.can_cast(dtypes.from_name(source), dtypes.from_name(target), "safe"))
    except TypeError:
        return target == source
