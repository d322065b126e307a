"""merge(): makes one checkpoint from many, within a memory budget, split over processes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from unickpt import Checkpoint, LoadOptions, SaveOptions, open
from unickpt.errors import CheckpointExists, CheckpointNotFound, MergeError
from unickpt.extend import (
    CONVERSION_METADATA,
    OWN_FORMAT,
    RESERVED_METADATA,
    Array,
    ArrayEntry,
    Buffered,
    HostBuffers,
    MemoryBudget,
    PathLike,
    Progress,
    RuledView,
    SaveTask,
    Source,
    WriteItem,
    adapters,
    all_gather_bytes,
    check_rest,
    check_written,
    chosen_format,
    conversion_budgets,
    current_group,
    cut_box,
    dtype_name,
    flat_range_to_boxes,
    in_batches,
    leaves_of_view,
    new_session,
    read_boxes,
    resolve_path,
    storage_context,
    tree_with_values,
    within,
    write_streamed,
)
from unickpt.plugins.merge import arithmetic, method_parameters
from unickpt.plugins.merge.arithmetic import BLOCK, ElementPieces, Formula, NotFinite
from unickpt.plugins.merge.method_parameters import Method, MethodName, Search, Slerp, Ties
from unickpt.plugins.merge.sources import (
    ManyRules,
    MergePlan,
    MergeRequest,
    MergeSource,
    Sources,
    plan_merge,
)
from unickpt.plugins.merge.weight_search import on_all, search
from unickpt.types import Box, Group, MergeReport

RECORD = "merge"
"""The key of the record of the merge, in the metadata's `unickpt`."""


def merge(
    sources: Sources,
    destination: PathLike,
    *,
    how: MethodName | Method = "mean",
    weights: Sequence[float] | None = None,
    base: Source | None = None,
    last: int | None = None,
    rules: ManyRules = None,
    integers: Literal["equal", "last"] = "equal",
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    verify: bool = True,
    options: SaveOptions | None = None,
    progress: Progress = None,
) -> MergeReport:
    """Makes one checkpoint from several, without holding a whole one in memory; see docs/merge.md.

    Names, structure, dtypes, plain values and all that is not merged come from the last source. In
    a job of several processes (`torch.distributed`, `jax.distributed`), all of them call this with
    the same arguments, and each merges its own part.

    Arguments:
        sources: paths or URLs of checkpoints of any format, or results of `unickpt.open`; with
            `last`, the folder of a run.
        destination: the path or URL of the new checkpoint, in unickpt's own format.
        how: a method of `unickpt.merge_methods`, or its name if its parameters have defaults:
            "mean", "weighted", "metric", "step", "ema", "slerp", "task_arithmetic", "ties",
            "dare".
        weights: a number for each source, for "weighted", "task_arithmetic" and "dare". They are
            used as they are.
        base: the checkpoint from which the sources were trained, for "task_arithmetic", "ties" and
            "dare".
        last: how many of the newest steps of a run to merge, from the oldest to the newest.
        rules: map the names and axes of the sources and the base to those of the destination:
            `Rules` for all of them, or a list with `Rules` or None for each.
        integers: how to treat integers, bools, PRNG keys and counts (scalars that are whole numbers
            in all sources), which are not merged. "equal" takes them if they are the same in all
            sources, and refuses the merge otherwise; "last" takes those of the last source.
        allow_nonfinite: whether sources may have NaN and infinite elements. Methods that need facts
            about whole arrays or drop elements never allow them.
        overwrite: as for `save`.
        verify: whether to read the destination back and check it against its digests.
        options: as for `save`; `budget_bytes` bounds the memory of the whole merge.
        progress: as `SaveOptions.progress`, which it replaces.

    Raises:
        MergeError: the sources differ in names, shapes or kinds; they lack a step or a metric, or
            have elements that cannot be merged.
        CheckpointExists: the destination is in use, or is one of the sources.
        CheckpointNotFound, CheckpointCorrupt: of a source.
        RuleError, LoadMismatch: as `convert`.
        ValueError, TypeError: the arguments do not fit the method; the destination has the suffix
            of another format's files.
        UnickptError: all that `save` raises.

    Example:
        >>> import numpy as np, unickpt
        >>> for step in (1, 2):
        ...     _ = unickpt.save(f"memory://run/m/{step}", {"w": np.full(2, step, np.float32)})
        >>> report = unickpt.merge(["memory://run/m/1", "memory://run/m/2"], "memory://run/mean")
        >>> unickpt.load(report.url)["w"]
        array([1.5, 1.5], dtype=float32)
    """
    options = SaveOptions.or_default(options)
    if progress is not None:
        options = replace(options, progress=progress)
    method = method_parameters.method_of(how)
    if allow_nonfinite and not method.is_linear:
        raise ValueError(f"how={method.name!r} cannot merge NaN and infinite elements")
    chosen_format(OWN_FORMAT, destination)  # refuses names of files
    budget, _ = conversion_budgets(options)
    request = MergeRequest(sources, method, weights, base, last, rules, integers, budget)
    plan = plan_merge(request)
    url = resolve_path(destination).url
    if any(source.view.checkpoint.location.url == url for source in plan.inputs):
        raise CheckpointExists(f"{url} is one of the sources; choose another path")
    if isinstance(method, Search):
        plan = _searched(plan, method, options, allow_nonfinite, url, overwrite)
    report = _write(plan, destination, overwrite, options, allow_nonfinite)
    if verify and report.saved.process == 0:
        check_written(destination)
    return report


def _write(
    plan: MergePlan, destination: PathLike, overwrite: bool, options: SaveOptions, nonfinite: bool
) -> MergeReport:
    """Writes the result of a plan."""
    view = plan.last.view
    budget, held_bytes = conversion_budgets(options)
    merger = Merger(plan, budget, held_bytes, nonfinite)
    writing = replace(options, budget_bytes=MemoryBudget(held_bytes, "process"))
    job = SaveTask(destination, overwrite, writing)
    leaves = leaves_of_view(view, job.group, "merge")
    job.describe(tree_with_values(view.node(), leaves.__getitem__), _metadata(plan))
    with job.failing():
        job.check_destination()  # before anything is read for long
        merger.measure(job.group)

    def check() -> None:
        for source in plan.inputs:
            check_rest(source.view.checkpoint, job.group)

    saved = write_streamed(job, merger.read, merger.buffers, budget, merger.cost, check)
    return MergeReport(
        saved,
        plan.method.name,
        tuple(source.url for source in plan.sources),
        plan.weights,
        plan.from_last,
        plan.values_differ,
        plan.dtypes_differ,
        tuple(sorted(merger.nonfinite)),
        plan.score,
        plan.trials,
    )


def _searched(
    plan: MergePlan,
    method: Search,
    options: SaveOptions,
    allow_nonfinite: bool,
    url: str,
    overwrite: bool,
) -> MergePlan:
    """A plan with the weights that a search finds.

    Raises:
        CheckpointExists: the destination is in use.
    """
    if not overwrite and _exists(url):
        raise CheckpointExists(f"{url} already holds a checkpoint; pass overwrite=True")
    group = within(options.group or current_group(adapters()), options.timeout_s)
    name = all_gather_bytes(group, f"trial-{new_session()}".encode())[0].decode()
    parent, _, last = url.rstrip("/").rpartition("/")
    trials = f"{parent}/{last}.{name}" if method.scratch is None else f"{method.scratch}/{name}"
    quiet = replace(options, fsync=False, metrics=None, base=None, progress=None)

    def merged(weights: Sequence[float]) -> Checkpoint:
        _write(replace(plan, weights=tuple(weights)), trials, True, quiet, allow_nonfinite)
        return open(trials)

    try:
        sources = plan.record["sources"]
        about = [{k: v for k, v in facts.items() if k != "weight"} for facts in sources]
        best = search(method, group, plan.weights, merged, about)
    finally:
        if group.index == 0:
            resolve_path(trials).remove(storage_context())
    return replace(plan, weights=best.weights, score=best.score, trials=best.trials)


def _exists(url: str) -> bool:
    try:
        open(url)
    except CheckpointNotFound:
        return False
    return True


def _metadata(plan: MergePlan) -> dict[str, Any]:
    """The last source's metadata, with the record of the merge instead of its step and metrics."""
    view = plan.last.view
    metadata = view.checkpoint.index.metadata
    if isinstance(view, RuledView):
        metadata = view.provenance.merged_into(metadata)
    reserved = metadata.get(RESERVED_METADATA)
    items = reserved.items() if isinstance(reserved, dict) else ()
    conversion = {key: value for key, value in items if key == CONVERSION_METADATA}
    return {**metadata, RESERVED_METADATA: {**conversion, RECORD: plan.record}}


class Merger:
    """Makes the elements of a merge.

    Arguments:
        plan: of the merge.
        budget_bytes: of memory for the chunks that are made at once, and their inputs.
        held_bytes: of memory for chunks that are being written.
        allow_nonfinite: see `merge`.
    """

    def __init__(
        self, plan: MergePlan, budget_bytes: int, held_bytes: int, allow_nonfinite: bool
    ) -> None:
        self.plan, self.budget_bytes = plan, budget_bytes
        self.buffers = HostBuffers(held_bytes)
        self.nonfinite: set[tuple[str, str]] = set()
        """The sources and arrays with NaN or infinite elements, where they are allowed."""
        self._inputs = HostBuffers(budget_bytes)
        self._reading = LoadOptions(budget_bytes=MemoryBudget(budget_bytes, "process"))
        self._allowed = allow_nonfinite
        self._from_last = frozenset(plan.from_last)
        self._statistics_by_name: dict[str, list[float]] = {}

    # --- facts about whole arrays --------------------------------------------------------------

    def measure(self, group: Group) -> None:
        """Computes the facts that the method needs about whole arrays: each process of some, for
        all.

        Raises:
            MergeError: an array cannot be merged.
            ProcessFailed: another process failed.
            SaveTimeout: the other processes did not take part in time.
        """
        if not isinstance(self.plan.method, Slerp | Ties):
            return
        arrays = self.plan.last.view.index.arrays
        names = sorted(self.plan.merged, key=lambda name: (-arrays[name].nbytes, name))
        mine = names[group.index :: group.count]
        work = on_all(group, lambda: {name: self._statistics(arrays[name]) for name in mine})
        for statistics in work:
            self._statistics_by_name |= statistics
        self._inputs = HostBuffers(self.budget_bytes)  # chunks are of other sizes

    def _statistics(self, entry: ArrayEntry) -> list[float]:
        method, size = self.plan.method, math.prod(entry.shape)
        if not size:
            return []
        pieces = self._pieces(entry, size)
        try:
            if isinstance(method, Ties):
                return arithmetic.ties_statistics(method, pieces, size, self._is_wide(entry.name))
            assert isinstance(method, Slerp), "other methods look at no whole arrays"
            weights = arithmetic.slerp_statistics(method, pieces)
        except NotFinite as error:
            raise self._refused(self.plan.inputs[error.args[0]], entry.name) from None
        if not all(map(math.isfinite, weights)):
            raise MergeError(f"array {entry.name!r}: its elements are too large for SLERP")
        return weights

    def _is_wide(self, name: str) -> bool:
        return any(source.entry(name).dtype == "float64" for source in self.plan.inputs)

    def _pieces(self, entry: ArrayEntry, size: int) -> ElementPieces:
        """Reads an array from beginning to end in all inputs; only once if it fits into memory."""
        element_bytes = 2 * sum(source.entry(entry.name).itemsize for source in self.plan.inputs)
        count = max(BLOCK, self.budget_bytes // element_bytes // BLOCK * BLOCK)
        cache: list[Sequence[Array]] = []

        def pieces() -> Iterator[Sequence[Array]]:
            if cache:
                yield from cache
                return
            for first in range(0, size, count):
                boxes = flat_range_to_boxes(entry.shape, first, min(first + count, size))
                piece = [self._flat(source, entry.name, boxes) for source in self.plan.inputs]
                if count >= size:
                    cache.append(piece)
                yield piece

        return pieces

    def _flat(self, source: MergeSource, name: str, boxes: Sequence[Box]) -> Array:
        entry_boxes = [(source.entry(name), box) for box in boxes]
        parts = read_boxes(source.view, entry_boxes, self._reading, self._inputs)
        flat = np.concatenate([data.reshape(-1) for data, _ in parts])
        self._give_back(parts)
        return flat

    def _formula(self, name: str) -> Formula:
        method, weights = self.plan.method, self.plan.weights
        match method:
            case method_parameters.Mean():
                return arithmetic.average
            case Slerp():
                return partial(arithmetic.weighted_sum, self._statistics_by_name[name])
            case Ties():
                thresholds, wide = self._statistics_by_name[name], self._is_wide(name)
                return partial(arithmetic.add_elected, thresholds, method.scale, wide)
            case method_parameters.Dare():
                return partial(arithmetic.add_random_differences, weights, method, name)
            case method_parameters.TaskArithmetic():
                return partial(arithmetic.add_differences, weights)
        return partial(arithmetic.weighted_sum, weights)

    # --- chunks --------------------------------------------------------------------------------

    def cost(self, item: WriteItem) -> int:
        """Bytes of memory that it takes to make a chunk."""
        return item.nbytes + item.box.size * self._input_bytes(item.entry.name)

    def _input_bytes(self, name: str) -> int:
        """Bytes of an element in all inputs."""
        return sum(source.entry(name).itemsize for source in self._inputs_of(name))

    def _inputs_of(self, name: str) -> tuple[MergeSource, ...]:
        return (self.plan.last,) if name in self._from_last else self.plan.inputs

    def read(self, items: Sequence[WriteItem]) -> list[Buffered]:
        """Makes chunks."""
        made: dict[WriteItem, Buffered] = {}
        pieces: list[tuple[WriteItem, Box]] = []
        for item in items:
            memory = self.buffers.take(item.nbytes)
            made[item] = memory[: item.nbytes].view(item.dtype).reshape(item.box.shape), memory
            # A chunk that is larger than the budget is made piece by piece.
            most = max(1, self.budget_bytes // max(1, self._input_bytes(item.entry.name)))
            pieces += [(item, box) for box in cut_box(item.box, most)]

        def nbytes(piece: tuple[WriteItem, Box]) -> int:
            return piece[1].size * self._input_bytes(piece[0].entry.name)

        for batch in in_batches(pieces, None, self.budget_bytes, nbytes):
            self._make(batch, made)
        return [made[item] for item in items]

    def _make(
        self, batch: Sequence[tuple[WriteItem, Box]], out: Mapping[WriteItem, Buffered]
    ) -> None:
        """Makes boxes of chunks."""
        inputs: list[list[Buffered]] = [[] for _ in batch]
        for source in self.plan.inputs:
            names = [item.entry.name for item, _ in batch]
            numbers = [n for n, name in enumerate(names) if source in self._inputs_of(name)]
            boxes = [(source.entry(names[n]), batch[n][1]) for n in numbers]
            buffers = read_boxes(source.view, boxes, self._reading, self._inputs)
            for number, read in zip(numbers, buffers, strict=True):
                inputs[number].append(read)
        for (item, box), read_of in zip(batch, inputs, strict=True):
            target = out[item][0][box.relative_to(item.box.start).slices]
            if item.entry.name in self._from_last:
                np.copyto(target, read_of[0][0], casting="no")
            else:
                self._merge(item, box, [data for data, _ in read_of], target)
            self._give_back(read_of)

    def _merge(self, item: WriteItem, box: Box, inputs: Sequence[Array], target: Array) -> None:
        name, shape = item.entry.name, item.entry.shape
        made = target if target.flags.c_contiguous else np.empty(target.shape, target.dtype)
        outcome = arithmetic.merge_box(self._formula(name), inputs, shape, box, made)
        if made is not target:
            np.copyto(target, made)
        for number in sorted(outcome.nonfinite):
            source = self.plan.inputs[number]
            if not self._allowed:
                raise self._refused(source, name)
            self.nonfinite.add((source.url, name))
        if outcome.overflows:
            raise MergeError(
                f"array {name!r} {box}: its merge has elements that {dtype_name(target.dtype)}, "
                f"its dtype in {self.plan.last.url}, cannot hold"
            )

    def _refused(self, source: MergeSource, name: str) -> MergeError:
        advice = "; allow_nonfinite=True merges them" if self.plan.method.is_linear else ""
        return MergeError(f"array {name!r} has NaN or infinite elements in {source.url}{advice}")

    def _give_back(self, read: Sequence[Buffered]) -> None:
        for _, memory in read:
            self._inputs.give(memory)
