"""The sources of a merge: opened, compared with each other, and planned; nothing is written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from unickpt import Checkpoint, LoadOptions, Rules
from unickpt.errors import CheckpointNotFound, MergeError
from unickpt.extend import (
    RESERVED_METADATA,
    ArrayEntry,
    ComparedViews,
    HostBuffers,
    MemoryBudget,
    PathLike,
    Provenance,
    RuledView,
    Source,
    View,
    checkpoints_below,
    convertible,
    dtype_from_name,
    dtype_kind,
    leaf_text,
    opened_checkpoint,
    read_boxes,
    resolve_path,
    stored_leaf,
)
from unickpt.plugins.merge.method_parameters import Method, SourceFacts, weights_of
from unickpt.plugins.merge.weight_search import Trials
from unickpt.types import Box

Sources = Sequence[Source] | PathLike
ManyRules: TypeAlias = "Rules | Sequence[Rules | None] | None"
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")  # the names of Checkpointer's steps
_MOST_ROWS = 50


@dataclass(frozen=True, eq=False)
class MergeSource:
    """A source of a merge, or its base.

    Arguments:
        view: of its content, through rules if there are any.
        facts: that weights depend on.
    """

    view: View
    facts: SourceFacts

    @property
    def url(self) -> str:
        return self.facts.url

    @property
    def provenance(self) -> Provenance:
        if isinstance(self.view, RuledView):
            return self.view.provenance
        return Provenance.from_metadata(self.view.checkpoint.index.metadata, self.url)

    def entry(self, name: str) -> ArrayEntry:
        """An array under any of its names."""
        return self.view.index.entry(name)


@dataclass(frozen=True)
class MergePlan:
    """The plan of a merge.

    Arguments:
        method: how.
        sources: in their order; the last one gives names, dtypes, and all that is not merged.
        base: if the method has one.
        weights: of the sources.
        from_last: arrays that are taken from the last source: integers, counts, keys.
        values_differ: names of plain and per-process values that differ, or that some sources lack;
            those of the last source are taken.
        dtypes_differ: arrays that have another dtype in some source.
        score, trials: of a search that found these weights.
    """

    method: Method
    sources: tuple[MergeSource, ...]
    base: MergeSource | None
    weights: tuple[float, ...]
    from_last: tuple[str, ...] = ()
    values_differ: tuple[str, ...] = ()
    dtypes_differ: tuple[str, ...] = ()
    score: float | None = None
    trials: Trials | None = None

    @property
    def inputs(self) -> tuple[MergeSource, ...]:
        """The sources, and then the base if there is one."""
        return self.sources if self.base is None else (*self.sources, self.base)

    @property
    def last(self) -> MergeSource:
        return self.sources[-1]

    @property
    def merged(self) -> tuple[str, ...]:
        """The arrays that are merged."""
        unmerged_names = set(self.from_last)
        return tuple(name for name in self.last.view.index.arrays if name not in unmerged_names)

    @property
    def record(self) -> dict[str, Any]:
        """The record of the merge in metadata."""
        sources = [
            {**_source_record(source), "weight": weight}
            for source, weight in zip(self.sources, self.weights, strict=True)
        ]
        return {
            "method": self.method.name,
            "parameters": self.method.parameters,
            "sources": sources,
            **({} if self.base is None else {"base": _source_record(self.base)}),
            **({} if self.score is None else {"score": self.score}),
            **({} if self.trials is None else {"front": self.trials.recorded}),
        }


def _source_record(source: MergeSource) -> dict[str, Any]:
    index, step = source.view.checkpoint.index, source.facts.step
    facts = {"url": source.url, "step": step, "created": index.created, "attempt": index.attempt}
    return {name: value for name, value in facts.items() if value not in (None, "")}


@dataclass(frozen=True)
class MergeRequest:
    """The arguments of a merge; see `merge`."""

    sources: Sources
    method: Method
    weights: Sequence[float] | None = None
    base: Source | None = None
    last: int | None = None
    rules: ManyRules = None
    integers: str = "equal"
    budget_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.integers not in ("equal", "last"):
            raise ValueError(f"integers={self.integers!r} must be 'equal' or 'last'")
        if self.method.needs_base and self.base is None:
            raise ValueError(f"how={self.method.name!r} needs base=, where the sources started")
        if self.base is not None and not self.method.needs_base:
            raise ValueError(f"how={self.method.name!r} has no base")


def preview(sources: Sources, method: Method, **asked: Any) -> MergePlan:
    """The plan of `merge`.

    Arguments:
        sources, method: as of `MergeRequest`.
        asked: its other fields.

    Raises: as `merge`, before anything is written.
    """
    return plan_merge(MergeRequest(sources, method, **asked))


def plan_merge(request: MergeRequest) -> MergePlan:
    """Opens and compares the sources; reads their indices, and arrays that are not merged.

    Raises: as `merge`, before anything is written.
    """
    inputs = _sources(request)
    least = 1 if request.method.needs_base else 2
    if len(inputs) < least or (request.method.name == "slerp" and len(inputs) != 2):
        needs = "two sources" if request.method.name == "slerp" else f"at least {least} sources"
        raise ValueError(
            f"how={request.method.name!r} takes {needs}, not {len(inputs)}. For the steps of a "
            "run, give its folder, and their number as last= (--last on the command line)"
        )
    has_base = request.base is not None
    rules = _rules(request.rules, len(inputs), has_base)
    sources = tuple(_source(source, r) for source, r in zip(inputs, rules, strict=False))
    base = None if request.base is None else _source(request.base, rules[-1])
    facts = [source.facts for source in sources]
    weights = weights_of(request.method, facts, request.weights)
    plan = MergePlan(request.method, sources, base, weights)
    _check(plan)
    options = LoadOptions(budget_bytes=MemoryBudget(request.budget_bytes, "process"))
    for source in plan.inputs:
        if isinstance(source.view, RuledView):
            source.view.check(options)
    from_last = _from_last(plan, request.integers, options)
    differ = tuple(
        name
        for name, entry in plan.last.view.index.arrays.items()
        if any(other.entry(name).dtype != entry.dtype for other in plan.inputs)
    )
    values_differ = tuple(_values_that_differ(sources))
    return replace(plan, from_last=from_last, values_differ=values_differ, dtypes_differ=differ)


# --- opening --------------------------------------------------------------------------------------


def _sources(request: MergeRequest) -> list[Source]:
    is_single = isinstance(request.sources, str | os.PathLike | Checkpoint)
    if request.last is None:
        if is_single:
            raise ValueError(
                "merge takes a sequence of checkpoints; give a run's folder with last=, the number "
                "of its steps to merge"
            )
        return list(request.sources)  # type: ignore[arg-type]
    if isinstance(request.last, bool) or not isinstance(request.last, int) or request.last < 1:
        raise ValueError(f"last={request.last!r} must be a number of steps, at least 1")
    if not isinstance(request.sources, str | os.PathLike):
        raise ValueError("last= takes the folder of one run as the source")
    steps = [step for step in checkpoints_below(request.sources) if _STEP.fullmatch(step.name)]
    if len(steps) < request.last:
        raise CheckpointNotFound(
            f"{resolve_path(request.sources)}: {len(steps)} steps are committed there, but "
            f"last={request.last} requests more"
        )
    return [step.path for step in steps[-request.last :]]


def _rules(rules: ManyRules, count: int, has_base: bool) -> list[Rules | None]:
    """The rules of each source, and then those of the base."""
    if rules is None or isinstance(rules, Rules):
        return [rules] * (count + 1)
    all_rules = list(rules)
    if len(all_rules) != count + has_base:
        base = " and one for the base" if has_base else ""
        raise ValueError(
            f"rules= has {len(all_rules)} items; give Rules for all, or a list with Rules or None "
            f"for each of the {count} sources{base}"
        )
    return all_rules if has_base else [*all_rules, None]


def _source(source: Source, rules: Rules | None) -> MergeSource:
    stored = opened_checkpoint(source).reader.checking()
    stored.check_total(stored.index.arrays.values())
    reserved = stored.index.metadata.get(RESERVED_METADATA)
    recorded = reserved if isinstance(reserved, Mapping) else {}
    step, metrics = recorded.get("step"), recorded.get("metrics")
    known_metrics = {
        name: float(value)
        for name, value in (metrics.items() if isinstance(metrics, Mapping) else ())
        if type(value) in (int, float) or value in ("nan", "inf", "-inf")  # which JSON lacks
    }
    facts = SourceFacts(stored.location.url, step if type(step) is int else None, known_metrics)
    return MergeSource(convertible(stored, rules, None), facts)


# --- comparing ------------------------------------------------------------------------------------


def _check(plan: MergePlan) -> None:
    """Refuses sources that do not fit together.

    Raises:
        MergeError: lists every difference.
    """
    rows = [row for other in plan.inputs if other is not plan.last for row in _rows(plan, other)]
    if plan.method.has_signs:
        rows += [
            f"  {name!r} is {entry.dtype}: how={plan.method.name!r} compares signs, which complex "
            "numbers lack"
            for name, entry in plan.last.view.index.arrays.items()
            if _kind(entry) == "complex"
        ]
    if rows:
        more = [f"  and {len(rows) - _MOST_ROWS} more"] if len(rows) > _MOST_ROWS else []
        head = f"the sources do not fit together (compared with the last, {plan.last.url}):"
        advice = "rules= map names and axes, and drop what should not be merged"
        raise MergeError("\n".join([head, *rows[:_MOST_ROWS], *more, advice]))


def _rows(plan: MergePlan, other: MergeSource) -> Iterator[str]:
    """How a source differs from the last one."""
    ours, theirs = plan.last.view.index, other.view.index
    mine, their_entries = ours.entries, theirs.entries
    for name in dict.fromkeys([*mine, *their_entries]):
        if name not in their_entries:
            instead = stored_leaf(theirs, name)
            has = "is missing" if instead is None else f"is {leaf_text(instead)}"
            yield f"  {name!r}: {mine[name].dtype_and_shape}; {has} in {other.url}"
        elif name not in mine:
            yield f"  {name!r}: only in {other.url}"
        elif _kind_and_shape(mine[name]) != _kind_and_shape(their_entries[name]):
            has = their_entries[name].dtype_and_shape
            yield f"  {name!r}: {mine[name].dtype_and_shape}; {has} in {other.url}"
    for alias, target in ours.aliases.items():
        pair = their_entries.get(alias), their_entries.get(target)
        if pair[0] is not None and pair[1] is not None and pair[0].name != pair[1].name:
            yield f"  {alias!r}: tied to {target!r}; another array in {other.url}"
    conventions, their_conventions = plan.last.provenance.conventions, other.provenance.conventions
    for name in conventions.keys() & their_conventions.keys():
        if conventions[name] != their_conventions[name]:
            yield (
                f"  convention {name!r}: {conventions[name]!r}; {their_conventions[name]!r} in "
                f"{other.url}"
            )
    arithmetic, done = plan.last.provenance.arithmetic, other.provenance.arithmetic
    for name in arithmetic.keys() & done.keys():
        if arithmetic[name] != done[name]:
            yield f"  {name!r}: converted with other arithmetic in {other.url}"


def _kind_and_shape(entry: ArrayEntry) -> tuple[str, tuple[int, ...]]:
    return _kind(entry), entry.shape


def _kind(entry: ArrayEntry) -> str:
    return "key" if entry.prng is not None else dtype_kind(dtype_from_name(entry.dtype))


def _values_that_differ(sources: Sequence[MergeSource]) -> Iterator[str]:
    """The names of plain and per-process values that are not the same in all sources."""
    values_by_source = [
        {
            **{name: (type(v), repr(v)) for name, v in source.view.index.values.items()},
            **{name: entry.blobs for name, entry in source.view.index.per_process.items()},
        }
        for source in sources
    ]
    for name in dict.fromkeys(name for values in reversed(values_by_source) for name in values):
        if any(values.get(name) != values_by_source[-1].get(name) for values in values_by_source):
            yield name


# --- leaves that are not merged -------------------------------------------------------------------


def _from_last(plan: MergePlan, integers: str, options: LoadOptions) -> tuple[str, ...]:
    """The arrays that are taken from the last source.

    Raises:
        MergeError: names those that differ, if they must be equal.
    """
    arrays = plan.last.view.index.arrays
    whole = [name for name, entry in arrays.items() if _kind(entry) not in ("float", "complex")]
    counts = _counts(plan, options)
    if integers == "equal":
        differ = [name for name, values in counts.items() if len(set(values)) > 1]
        for other in plan.sources[:-1] if whole else ():
            with ComparedViews(plan.last.view, other.view, options) as pair:
                equal = [n for n in whole if pair.same_bits(plan.last.entry(n), other.entry(n))]
            differ += set(whole) - set(equal) - set(differ)
        if differ:
            named = [name for name in (*whole, *counts) if name in differ]
            names = ", ".join(map(repr, named[:_MOST_ROWS]))
            raise MergeError(
                f"integers, bools, keys and counts cannot be merged, and these differ: {names}"
                f"{', ...' if len(named) > _MOST_ROWS else ''}; take those of the last source "
                "with integers='last', or drop them by rules"
            )
    from_last = {*whole, *counts}
    return tuple(name for name in arrays if name in from_last)


def _counts(plan: MergePlan, options: LoadOptions) -> dict[str, list[float]]:
    """Floating-point scalars that are whole numbers in all sources, as torch's Adam counts its
    steps, with their values."""
    arrays = plan.last.view.index.arrays
    names = [n for n, e in arrays.items() if e.shape == () and _kind(e) == "float"]
    buffers = HostBuffers(0)
    values: dict[str, list[float]] = {name: [] for name in names}
    for source in plan.sources:
        boxes = [(source.entry(name), Box((), ())) for name in names]
        elements = read_boxes(source.view, boxes, options, buffers)
        for name, (element, _) in zip(names, elements, strict=True):
            values[name].append(float(element.astype(np.float64)))
    return {n: elements for n, elements in values.items() if all(map(float.is_integer, elements))}
