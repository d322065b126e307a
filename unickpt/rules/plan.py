"""Plan: rules + what is stored (+ what is asked for) -> what each array is made of, or a refusal.

A plan is refused unless every array that is stored is used once or dropped, and every array that
is asked for is made once. Within an array, every element has exactly one counterpart: that was
checked when the rule was read (`unickpt.rules.rule`).
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unickpt import dtypes
from unickpt.errors import RuleError
from unickpt.feed import Feed, Fill, whole_dims
from unickpt.folding import skeleton
from unickpt.index import ArrayEntry
from unickpt.rules import axes
from unickpt.rules.functions import Function
from unickpt.rules.matching import Fact, Instance, Names, Unfit, instances, names_of, resolve
from unickpt.rules.rule import Rule, Seen, Shared, Slot, views_of
from unickpt.rules.syntax import Item, Nothing

_MOST_SHOWN = 20


@dataclass(frozen=True)
class Made:
    """An array, or a value, that rules make.

    Arguments:
        name: its name.
        fact: what it is.
        rule: what makes it, as text.
        feeds: where its elements come from.
        fills: its elements that come from nowhere.
        source: of what is carried over whole (a plain value, a PerProcess), its name.
        function: makes it, out of the arrays that `inputs` names.
        exact: whether the other direction brings every bit back.
        cropped: whether the stored arrays have padding that is left out.
        sizes: of the axes, where there is padding on either side; those of a pad under "_".
    """

    name: str
    fact: Fact
    rule: str
    feeds: tuple[Feed, ...] = ()
    fills: tuple[Fill, ...] = ()
    source: str | None = None
    function: Function | None = None
    inputs: tuple[str, ...] = ()
    exact: bool = True
    cropped: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Same:
    """Stored arrays that must hold the same, because only the first of them is read.

    `made` is the other one made of the first, where its axes or its arithmetic are not the same.
    """

    first: str
    other: str
    rule: str
    made: Made | None = None


@dataclass(frozen=True)
class Constant:
    """A stored array that must hold a constant, because the other side has no array for it."""

    name: str
    value: float
    rule: str


@dataclass
class Plan:
    """What rules make of a checkpoint.

    Arguments:
        made: by name.
        aliases: further names of arrays that are made.
        kept: names that are asked for, and that no rule makes on purpose.
        dropped: what is stored and not carried over, with the rule that says so.
        checks: what must be so for nothing to get lost.
    """

    made: dict[str, Made] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    dropped: dict[str, str] = field(default_factory=dict)
    checks: list[Same | Constant] = field(default_factory=list)


@dataclass(frozen=True)
class Stored:
    """What is stored: the facts, and the arrays' entries by each of their names.

    `sizes` are those of axes that padding hides, as recorded when such an array was made.
    """

    facts: Mapping[str, Fact]
    entries: Mapping[str, ArrayEntry]
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def make_plan(
    rules: Sequence[Rule],
    shared: Sequence[Shared],
    functions: Mapping[str, Function],
    stored: Stored,
    want: Mapping[str, Fact] | None,
    *,
    strict: bool = True,
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
            and every rule must match.
        where: the checkpoint, for messages.

    Raises:
        RuleError: all reasons against it at once.
    """
    planner = _Planner(functions, stored, want, strict)
    return planner.plan(rules, shared, where)


def offers(
    rules: Sequence[Rule],
    shared: Sequence[Shared],
    functions: Mapping[str, Function],
    stored: Stored,
) -> dict[str, Made]:
    """All that rules could make of what is stored, whether or not several rules could make it."""
    planner = _Planner(functions, stored, None, False)
    found = planner.resolved(rules)
    plan = Plan()
    for instance in found:
        if instance.why_not is None:
            planner.try_to_make(instance, plan)
    planner.share(shared, found, plan)
    return plan.made


class _Planner:
    """What is common to the steps of one plan."""

    def __init__(
        self,
        functions: Mapping[str, Function],
        stored: Stored,
        want: Mapping[str, Fact] | None,
        strict: bool,
    ) -> None:
        self._functions, self._stored, self._strict = functions, stored, strict
        self._have = Names(stored.facts)
        self._want = None if want is None else Names(want)
        self._problems: list[str] = []
        self._claimed: dict[bool, dict[str, str]] = {False: {}, True: {}}
        self._left: set[tuple[str, bool, int]] = set()  # what an instance leaves to others

    def plan(self, rules: Sequence[Rule], shared: Sequence[Shared], where: str) -> Plan:
        found = self.resolved(rules)
        if self._want is None:
            self._keep_ties(found)
        valid = [instance for instance in found if instance.why_not is None]
        self._claims(valid)
        plan = Plan()
        for instance in valid:
            self.try_to_make(instance, plan)
        self.share(shared, valid, plan)
        if self._strict:
            self._report_rest(plan, found, shared)
            self._report_idle(rules, found)
        if self._problems:
            if self._is_backwards(self._idle(rules, found)):
                self._problems.insert(
                    0,
                    "what is stored has the names of the other side: use `Rules.inverse` "
                    "(--inverse on the command line)",
                )
            raise RuleError(_refusal(where, self._problems))
        return plan

    def _is_backwards(self, idle: Sequence[Rule]) -> bool:
        """Whether all rules that match nothing would match in the other direction."""
        return bool(idle) and all(instances(rule.inverse, self._have, None) for rule in idle)

    def _problem(self, name: str, problem: str, rules: Iterable[str] = ()) -> None:
        self._problems.append("\n    ".join([f"{name!r} {problem}", *rules]))

    def resolved(self, rules: Sequence[Rule]) -> list[Instance]:
        """Every family of arrays that a rule may be about."""
        found = []
        for rule in rules:
            for instance in instances(rule, self._have, self._want):
                instance.sizes = self._recorded(instance)
                resolve(instance, self._have, self._want, partly=not self._strict)
                found.append(instance)
        return found

    def _recorded(self, instance: Instance) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name in instance.matched_names() if self._stored.sizes else ():
            sizes |= self._stored.sizes.get(name, {})
        return sizes

    def _keep_ties(self, found: Sequence[Instance]) -> None:
        """Leaves stored arrays that are tied to the rule that says so, where nothing asks for both.

        Else a rule for models that do not tie would make an array of what is one here.
        """
        tied: dict[str, Instance] = {}
        for instance in found:
            side = instance.rule.left
            if instance.why_not is not None or isinstance(side, Nothing):
                continue
            for term in side:
                for at, first in instance.grid(term[0]):
                    for view in term[1:]:
                        name = view.pattern.format(instance.texts, at)
                        one, other = (self._stored.entries.get(n) for n in (first, name))
                        if one is not None and one is other:
                            tied[name] = instance
        for instance in found:
            if instance.why_not is None and not isinstance(instance.rule.left, Nothing):
                own = {tied.get(name) for name in names_of(instance, instance.rule.left)}
                if own and None not in own and instance not in own:
                    instance.why_not = "another rule has it, tied to what it is stored as"

    # --- who takes what ---------------------------------------------------------------------

    def _claims(self, valid: Sequence[Instance]) -> None:
        """Makes sure that every array is used by one rule, and made by one.

        Of several names of one array, all but the first are left to a rule that is about them.
        """
        for right, names, verb in ((False, self._have, "taken"), (True, self._want, "made")):
            claimed: dict[str, list[tuple[Instance, int]]] = {}
            for instance in valid:
                side = instance.rule.right if right else instance.rule.left
                for term in () if isinstance(side, Nothing) else side:
                    for rank, view in enumerate(term):
                        for _, name in instance.grid(view):
                            if names is None or name in names.facts:
                                claimed.setdefault(name, []).append((instance, min(rank, 1)))
            self._claimed[right] = {name: str(c[0][0].rule) for name, c in claimed.items()}
            for name, claims in claimed.items():
                best = min(rank for _, rank in claims)
                kept = [instance for instance, rank in claims if rank == best]
                self._left.update((name, right, id(i)) for i, rank in claims if rank > best)
                if len(kept) > 1 and not _same_constant(kept):
                    self._problem(
                        name, f"is {verb} twice", dict.fromkeys(str(i.rule) for i in kept)
                    )

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

    def _apply_function(self, instance: Instance, plan: Plan) -> None:
        rule = instance.rule
        function = self._functions[rule.function or ""]
        inputs = tuple(name for v in views_of(rule.left) for _, name in instance.grid(v))
        entries = [self._entry(name) for name in inputs]
        shapes = [entry.shape for entry in entries]
        (view,) = views_of(rule.right)
        ((_, name),) = instance.grid(view)
        fact = Fact("array", tuple(function.shape(*shapes)), view.dtype or entries[0].dtype)
        made = Made(name, fact, str(rule), function=function, inputs=inputs, exact=False)
        self._add(plan, made)

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
        for view in term:
            name = view.pattern.format(instance.texts, at)
            if not self._is_wanted(name) or (name, True, id(instance)) in self._left:
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
            if twin not in self._stored.facts or (twin, False, id(instance)) in self._left:
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
        feeds: list[Feed] = []
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
            raise Unfit(f"{name!r} is made of arrays of {' and '.join(have)}; say `as`")
        fact = Fact("array", shape, view.dtype or have[0])
        exact = all(feed.is_exact and _holds(fact.dtype, feed.entry.dtype) for feed in feeds)
        cropped = any(axes.has_pad(term[0].items) for term in rule.left)  # type: ignore[union-attr]
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
            raise Unfit(f"{source!r} is {facts[0]}, which can only be carried over as it is")
        dtype = view.dtype or facts[0].dtype
        return Made(name, Fact(facts[0].kind, (), dtype), str(rule), source=source)

    def _entry(self, name: str) -> ArrayEntry:
        entry = self._stored.entries.get(name)
        if entry is None:
            raise Unfit(f"{name!r} is {self._stored.facts[name]}, not an array")
        return entry

    def _add(self, plan: Plan, made: Made) -> None:
        plan.made.setdefault(made.name, made)  # two that make it were reported as claims

    # --- what all parameters share ------------------------------------------------------------

    def share(self, shared: Sequence[Shared], found: Sequence[Instance], plan: Plan) -> None:
        """Adds what stands once on one side, and once for each parameter on the other."""
        for lift in shared:
            have = self._slots(lift.left, found, left=True, names=self._have.facts)
            if not have:
                continue
            asked = None if self._want is None else self._want.facts
            want = self._slots(lift.right, found, left=False, names=asked)
            if asked is None and lift.right.single is None:
                want = _with_other_slots(lift.right, want, plan)
            for right, names, verb in ((False, have, "taken"), (True, want, "made")):
                for name in names:
                    other = self._claimed[right].setdefault(name, str(lift))
                    if other != str(lift):
                        self._problem(name, f"is {verb} twice", [other, str(lift)])
            first = have[0]
            plan.checks += [Same(first, other, str(lift)) for other in have[1:]]
            for name in want:
                self._add(plan, self._copy_of(first, name, lift))

    def _slots(
        self,
        slot: Slot,
        found: Sequence[Instance],
        *,
        left: bool,
        names: Mapping[str, Fact] | None,
    ) -> list[str]:
        """The names of a slot, for all parameters that have it."""
        if slot.single is not None:
            candidates = [slot.single]
        else:
            parameters = (
                name
                for instance in found
                if instance.why_not is None and not instance.rule.lifted
                for view in views_of(instance.rule.left if left else instance.rule.right)
                for _, name in instance.grid(view)
            )
            candidates = [n for n in map(slot.of, parameters) if n is not None]
        return [n for n in dict.fromkeys(candidates) if names is None or n in names]

    def _copy_of(self, source: str, name: str, lift: Shared) -> Made:
        fact = self._stored.facts[source]
        dtype = lift.right.dtype or fact.dtype
        if fact.kind != "array":
            return Made(name, Fact(fact.kind, (), dtype), str(lift), source=source)
        entry = self._stored.entries[source]
        dims = whole_dims(fact.shape)
        feed = Feed(entry, fact.shape, dims, dims)
        return Made(name, Fact("array", fact.shape, dtype), str(lift), (feed,))

    # --- what is left over --------------------------------------------------------------------

    def _report_rest(self, plan: Plan, found: Sequence[Instance], shared: Sequence[Shared]) -> None:
        """Reports all that is neither used nor made, and why."""
        unused = self._unused(plan, found)
        unmade: dict[str, Fact] = {}
        if self._want is not None:
            there = {*plan.made, *plan.aliases, *plan.kept}
            unmade = {n: f for n, f in self._want.facts.items() if n not in there}
        explained = self._report_misfits({**unused, **unmade}, found, shared)
        for name, count, fact in _alike(unused, explained):
            like = f" (and {count - 1} like it)" if count > 1 else ""
            self._problem(
                name,
                f"({fact}){like} is stored, and no rule takes it",
                [f"drop it: {name} <-> drop"],
            )
        for name, count, fact in _alike(unmade, explained):
            like = f" (and {count - 1} like it)" if count > 1 else ""
            near = difflib.get_close_matches(name, list(unused)[:2000], n=1, cutoff=0.6)
            why = [f"nearest of what no rule takes: {near[0]!r}"] if near else []
            self._problem(name, f"({fact}){like} is asked for, and no rule makes it", why)

    def _unused(self, plan: Plan, found: Sequence[Instance]) -> dict[str, Fact]:
        used = {
            name
            for instance in found
            if instance.why_not is None
            for view in views_of(instance.rule.left)
            for _, name in instance.grid(view)
        }
        used |= {feed.entry.name for made in plan.made.values() for feed in made.feeds}
        used |= {made.source for made in plan.made.values() if made.source is not None}
        used |= {check.other for check in plan.checks if isinstance(check, Same)}
        return {n: fact for n, fact in self._stored.facts.items() if n not in used}

    def _report_misfits(
        self, rest: Mapping[str, Fact], found: Sequence[Instance], shared: Sequence[Shared]
    ) -> set[str]:
        """Reports rules that are about what is left over, but do not fit; returns those names."""
        explained: set[str] = set()
        reasons: dict[tuple[str, str], list[str]] = {}
        firsts: dict[str, tuple[str, str]] = {}
        misfits = [instance for instance in found if instance.why_not is not None]
        best: dict[str, int] = {}  # how much speaks for the likeliest rule about a name
        for instance in misfits:
            for name in instance.matched_names():
                best[name] = max(best.get(name, 0), _likelihood(instance))
        for instance in misfits:
            names = [
                name
                for name in instance.matched_names()
                if name in rest and best[name] == _likelihood(instance)
            ]
            if instance.why_not is None or not names:
                continue
            explained.update(names)
            for lift in shared:
                slots = (slot.of(name) for slot in (lift.left, lift.right) for name in names)
                explained.update(slot for slot in slots if slot is not None)
            lifted = instance.rule.lifted
            if lifted and any(why == instance.why_not for _, why in reasons):
                continue  # the parameter's own rule has told it
            # The slots of all parameters are told once, with the first one's reason.
            line = str(instance.rule.place) if lifted else str(instance.rule)
            if lifted and line in firsts:
                reasons[firsts[line]].extend(names)
                continue
            firsts[line] = (str(instance.rule), instance.why_not)
            reasons.setdefault(firsts[line], []).extend(names)
        for (rule, why), names in reasons.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self._problems.append(f"{rule}\n    {why} (about {names[0]!r}{more})")
        return explained

    def _idle(self, rules: Sequence[Rule], found: Sequence[Instance]) -> list[Rule]:
        """The rules with arrays on both sides that match nothing."""
        busy = {id(instance.rule) for instance in found}
        one_sided = (
            r for r in rules if isinstance(r.left, Nothing) or isinstance(r.right, Nothing)
        )
        busy.update(map(id, one_sided))
        return [rule for rule in rules if id(rule) not in busy]

    def _report_idle(self, rules: Sequence[Rule], found: Sequence[Instance]) -> None:
        for rule in self._idle(rules, found):
            if not rule.optional:
                self._problems.append(
                    f"{rule}\n    matches nothing; if that may be, begin it with `optional`"
                )


def _same_constant(claims: Sequence[Instance]) -> bool:
    """Whether all of some rules have nothing on the same side, and the same of it."""
    sides = [(i.rule.left, i.rule.right) for i in claims]
    return any(
        all(isinstance(pair[side], Nothing) and pair[side] == sides[0][side] for pair in sides)
        for side in (0, 1)
    )


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
) -> Feed:
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
    return Feed(entry, extents, dims[0], dims[1], scale=a / c, offset=(b - d) / c)


def _padded_sizes(instance: Instance) -> dict[str, int]:
    pads = {axis: size for axis, size in instance.sizes.items() if axes.is_pad(axis)}
    sizes = {axis: size for axis, size in instance.sizes.items() if axis not in pads}
    return sizes | (dict.fromkeys([axes.PAD], *pads.values()) if len(pads) == 1 else {})


def _holds(target: str, source: str) -> bool:
    """Whether a dtype holds all values of another."""
    try:
        return bool(np.can_cast(dtypes.from_name(source), dtypes.from_name(target), "safe"))
    except TypeError:
        return target == source


def _with_other_slots(slot: Slot, names: Sequence[str], plan: Plan) -> list[str]:
    """Of a slot's names, those whose parameter has another slot; all where none has."""
    neighbours = {name.rpartition("/")[0] for name in plan.made}
    having = [name for name in names if name.rpartition("/")[0] in neighbours]
    return having or list(names)


def _likelihood(instance: Instance) -> int:
    """How likely a rule was meant for what its names match: those of both sides say most."""
    return 2 * bool(instance.have and instance.want) + (not instance.rule.optional)


def _alike(facts: Mapping[str, Fact], without: Set[str]) -> Iterator[tuple[str, int, Fact]]:
    """The first of all names that differ in numbers alone, and how many they are."""
    groups: dict[tuple[str, Fact], list[str]] = {}
    for name, fact in facts.items():
        if name not in without:
            groups.setdefault((skeleton(name), fact), []).append(name)
    for (_, fact), names in groups.items():
        yield names[0], len(names), fact


def _refusal(where: str, problems: Sequence[str]) -> str:
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    lines = [f"{where}: the rules do not fit: {count}", *(f"  {p}" for p in problems[:_MOST_SHOWN])]
    if len(problems) > _MOST_SHOWN:
        lines.append(f"  ... and {len(problems) - _MOST_SHOWN} more")
    return "\n".join(lines)
