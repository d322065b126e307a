"""load(): compares the request, `like`, with the stored checkpoint, and reads it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, Unpack, overload

from unickpt import doors
from unickpt.arrays.names import natural
from unickpt.errors import LoadMismatch
from unickpt.format.index import RESERVED, ArrayEntry
from unickpt.format.reader_protocol import Reader
from unickpt.frameworks.adapter_protocol import Adapter, ArrayTarget, StoredTree
from unickpt.frameworks.host_memory import check_flags
from unickpt.frameworks.leaves import (
    PerProcess,
    PerProcessValues,
    Sections,
    adapter_named,
    adapters,
)
from unickpt.frameworks.process_group import current_group, launched_together, within
from unickpt.loading.overlaps import HALF_FILLED, Overlaps, overlapping
from unickpt.loading.report import LoadReport, untyped
from unickpt.loading.request import (
    LeafSelection,
    LoadRequest,
    LoadRules,
    Patterns,
    Policy,
    check_rules,
    compare,
    is_number,
)
from unickpt.loading.views import StoredView, View
from unickpt.quoting import first_few
from unickpt.reading import checkpoint
from unickpt.reading.array_reader import Filled, Job, LoadCounts, ReadArrays, read_arrays
from unickpt.reading.load_options import LoadOptions
from unickpt.reading.targets import NewTarget, NumberTarget
from unickpt.threads import collection_paused
from unickpt.trees import tree, tree_json

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from unickpt.frameworks.sections import StoredValue
    from unickpt.reading.shared_reads import SharedReads
    from unickpt.references.unread import UnreadPolicy

    T = TypeVar("T", default=Any)  # without `like`

_log = logging.getLogger("unickpt")


class LoadArguments(TypedDict, total=False):
    """The keywords that `Checkpointer.load` shares with `load`, where they are described."""

    rules: LoadRules | None
    under: str
    strict: bool
    only: Patterns | None
    skip: Patterns
    missing: Literal["error", "keep"]
    unexpected: Literal["error", "skip"]
    mismatched: Literal["error", "keep"]
    cast: bool
    framework: Literal["numpy", "torch", "jax"]
    strict_experts: bool
    since: checkpoint.Source | None
    options: LoadOptions | None


@overload
def load(
    path: checkpoint.Source,
    like: T | None = None,
    *,
    return_report: Literal[False] = False,
    **arguments: Unpack[LoadArguments],
) -> T: ...


@overload
def load(
    path: checkpoint.Source,
    like: T | None = None,
    *,
    return_report: Literal[True],
    **arguments: Unpack[LoadArguments],
) -> tuple[T, LoadReport]: ...


def load(
    path: checkpoint.Source,
    like: Any = None,
    *,
    rules: LoadRules | None = None,
    under: str = "",
    strict: bool = True,
    only: Patterns | None = None,
    skip: Patterns = (),
    missing: Literal["error", "keep"] = "error",
    unexpected: Literal["error", "skip"] = "error",
    mismatched: Literal["error", "keep"] = "error",
    cast: bool = False,
    framework: Literal["numpy", "torch", "jax"] = "numpy",
    return_report: bool = False,
    strict_experts: bool = False,
    since: checkpoint.Source | None = None,
    options: LoadOptions | None = None,
) -> Any:
    """Loads a checkpoint onto any mesh, in any framework.

    Every process reads only the chunks that its own part of `like` needs. Processes load
    independently, except with `LoadOptions(exchange=True)`; those of a node read together from
    object storage, if all call `load` at about the same time. If a save replaces the checkpoint
    during the load, loading starts again with the new one. Each process opens the checkpoint on its
    own; only with `exchange=True` do they check that they opened the same one. Python's search for
    reference cycles is paused in the process until the load ends.

    Arguments:
        path: a local path or a URL (file, memory, s3, gs) of a committed checkpoint, or what
            `unickpt.open` returned.
        like: a tree of what to load: JAX arrays or `jax.ShapeDtypeStruct`s with shardings (new
            arrays are created), torch tensors, DTensors and NumPy arrays (filled in place; meta
            tensors are materialised), plain values, `PerProcess`, `LocalFragments`, objects with
            `load_state_dict`. Without `like`, the stored tree with NumPy arrays. A plain int, float
            or bool loads into a 0-d array of its kind that holds it exactly, and vice versa.
        rules: map stored names and axes (the left side of the rules) to those of `like` (the right
            side); `Rules.inverse` is the other direction.
        under: load from this part of the checkpoint, as if it were all: the name of a container,
            such as "model", or a prefix of names that ends with a dot. `like`, rules, `only` and
            `skip` name leaves without it.
        strict: False is short for `missing="keep", unexpected="skip"`.
        only: load only the leaves whose names match this pattern, or one of several: `*` is any
            text within a component, `**` any number of components. All other leaves of `like`
            stay unchanged, including abstract ones and objects with `load_state_dict`; their stored
            counterparts may differ in any way. So several checkpoints can each fill a part of one
            tree. Without `like`, all other stored leaves are left out; a partially loaded list
            becomes a dict by positions. With rules, these are the names after loading, not the
            stored ones: those of `like` and of the rules' right side (left, if they are an
            inverse). Stored leaves that no selected leaf needs are skipped.
        skip: as `only`, but these stay unchanged; it may exclude leaves that `only` selects.
        missing: what to do if a leaf of `like` is not stored: "error", or "keep" its value. It is
            still an error if no leaf of `like` is stored, or none of its arrays.
        unexpected: what to do if a stored leaf is not in `like`: "error", or "skip" it.
        mismatched: what to do if an array's shape differs from the stored one: "error", or "keep"
            the array of `like`.
        cast: whether to convert between dtypes of the same kind: floats to floats, integers to
            integers that hold all values. Never from one kind to another.
        framework: the array type that a load without `like` returns: "numpy", "torch" (tensors in
            host memory) or "jax" (arrays on the default device). An array of a dtype that torch
            does not have stays a NumPy array.
        return_report: whether to also return a `LoadReport`. Its text is always logged to the
            logger "unickpt" at level INFO.
        strict_experts: refuse a checkpoint that has the state of some experts as of an earlier step
            (`Checkpointer(experts=)`).
        since: an earlier checkpoint, whose arrays `like` holds: only chunks that changed since are
            read, by this process alone (docs/reuse.md).
        options: see `LoadOptions`.

    Returns:
        A tree with the containers of `like`, or the stored ones; with `return_report`, a pair of
        the tree and the report.

    Raises:
        CheckpointNotFound: no committed checkpoint exists there.
        CheckpointReplaced: saves replaced it repeatedly, faster than it could be read.
        LoadMismatch: `like` and the checkpoint differ; the message lists all differences.
        RuleError: the rules do not fit the stored or the requested arrays; names all of them.
        CheckpointCorrupt: stored bytes do not match their digest, or are not a valid checkpoint.
        ProcessFailed: with `LoadOptions(exchange=True)`, another process failed.
        OutOfMemory: there is no memory for an array; names it.
        StorageError: the storage failed, or `since` cannot be read.
        ValueError: `framework` or `since` does not go with the other arguments.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://run/load", {"w": np.arange(3), "step": 7})
        >>> unickpt.load("memory://run/load")
        {'w': array([0, 1, 2]), 'step': 7}
        >>> import torch
        >>> unickpt.load("memory://run/load", framework="torch")["w"]
        tensor([0, 1, 2])
    """
    if like is not None and framework != "numpy":
        raise ValueError(
            f"framework={framework!r} is for a load without `like`: the arrays of `like` "
            "already have a framework; leave out one of the two"
        )
    check_flags(
        strict=strict, cast=cast, return_report=return_report, strict_experts=strict_experts
    )
    policy = Policy(
        _chosen("missing", missing, "keep") or not strict,
        _chosen("unexpected", unexpected, "skip") or not strict,
        _chosen("mismatched", mismatched, "keep"),
        cast,
        LeafSelection.from_patterns(only, skip),
    )
    options, unread = LoadOptions.or_default(options), None
    if since is not None:
        unread = _unread_policy(since, under, like, options)
        options = replace(options, exchange=False)  # others may have to read other chunks
    loading = _Loading(
        rules,
        under,
        policy,
        strict_experts,
        options,
        adapters(),
        None if framework == "numpy" else adapter_named(framework),
        time.perf_counter(),
        unread,
    )
    with collection_paused():  # until what an attempt made is gone
        # Fills everything again; processes that exchange chunks restart together.
        loaded_tree, report = checkpoint.again(lambda: loading.load(path, like), path)
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s", report)
    return (loaded_tree, report) if return_report else loaded_tree


def plan_load(
    stored: checkpoint.Checkpoint, like: Any, rules: LoadRules | None = None
) -> tuple[View, LoadRequest]:
    """The view and the request of a load into `like`, compared with each other; reads no array.

    Arguments:
        stored: the checkpoint; leaves that `like` lacks are skipped.
        like, rules: as for `load`.

    Raises:
        LoadMismatch, RuleError, UnsupportedLeaf: as `load`; also if leaves of `like` share a part
            of their memory.
    """
    policy = Policy(skip_unexpected=True)
    loading = _Loading(rules, "", policy, False, LoadOptions(), adapters(), None)
    view, request = loading._view_of(stored.reader, like)
    assert request is not None, "there is one for each `like`"
    compare(view, request, policy)
    for name, other in overlapping(request.targets):
        raise LoadMismatch(
            f"{stored.url}: {name!r} and {other!r} of `like` share a part of their memory, for "
            "which different values may be stored; leave out one of them"
        )
    return view, request


def _unread_policy(
    since: checkpoint.Source, under: str, like: Any, options: LoadOptions
) -> UnreadPolicy:
    if like is None:
        raise ValueError("since= is for a load into `like`, which holds that checkpoint's arrays")
    if options.exchange:
        raise ValueError(
            "since= is for processes that read alone, because each may hold other chunks; leave "
            "out one of since= and LoadOptions(exchange=True)"
        )
    policy: UnreadPolicy = doors.need("references", "since")(since, under, options)
    return policy


def _chosen(argument: str, value: str, other: str) -> bool:
    """Whether an argument is anything but "error"."""
    if value not in ("error", other):
        raise ValueError(f'{argument}={value!r} is neither "error" nor "{other}"')
    return value == other


class _Loading(NamedTuple):
    """The arguments of a call of `load`, the frameworks' adapters, when it began, and what it need
    not read."""

    rules: LoadRules | None
    under: str
    policy: Policy
    strict_experts: bool
    options: LoadOptions
    among: Sequence[Adapter]
    framework: Adapter | None
    started: float = 0.0
    unread: UnreadPolicy | None = None

    def load(self, path: checkpoint.Source, like: Any) -> tuple[Any, LoadReport]:
        """One attempt to load; see `checkpoint.again`."""
        counts = LoadCounts()
        with _reading(self.options, self.among, counts) as read:
            stored = checkpoint.opened(path, self.under, once=True).reader
            older = self._older_experts(stored)
            view, request = self._view_of(stored, like)
            if request is None:
                loaded_tree, report = self._load_all(view, read)
            else:
                report = compare(view, request, self.policy)
                view.check(self.options)
                if self.unread is not None:
                    read = self.unread.reading(read, request.leaves, request.targets, counts)
                loaded_tree = self._read_like(view, request, report, read)
            return loaded_tree, replace(
                report,
                older_experts=older,
                seconds=time.perf_counter() - self.started,
                bytes=counts.filled_bytes,
                read_bytes=sum(counts.read_sizes),
                received_bytes=counts.received_bytes,
                unchanged_bytes=counts.unchanged_bytes,
                waited_s=counts.waited_s,
                waited_for=counts.waited_for,
            )

    def _view_of(self, stored: Reader, like: Any) -> tuple[View, LoadRequest | None]:
        """The checkpoint as the load sees it, and the request of `like`, if there is one."""
        if self.rules is not None:
            check_rules(self.rules)
            return self.rules._load_view(stored, like, self.among, self.policy)
        view = StoredView(stored)
        if like is None:
            return view, None
        index = stored.index
        request = LoadRequest.from_tree(
            like,
            self.among,
            lambda: StoredTree({**index.entries, **index.values}, view.node),
            self.policy.selection,
        )
        view.serve(request.leaves, request.targets)
        return view, request

    def _older_experts(self, stored: Reader) -> tuple[tuple[str, int, int], ...]:
        if RESERVED not in stored.index.metadata:
            return ()
        from unickpt.format import unit_steps

        older = unit_steps.older(stored.index.metadata, str(stored.location))
        if older and self.strict_experts:
            shown = first_few(
                [f"{number} of {key!r} of step {step}" for key, number, step in older]
            )
            raise LoadMismatch(
                f"{stored.location}: strict_experts=True, but these experts are as of an earlier "
                f"step: {shown}. Load without it, or a step at which all experts were saved"
            )
        return older

    def _load_all(self, view: View, read: ReadArrays) -> tuple[Any, LoadReport]:
        index, selection, stored = view.index, self.policy.selection, view.checkpoint
        where, left_out = str(stored.location), selection.left_out(index.names)
        selection.check(where, index.names, (), stored.index.names)
        view.check(self.options)
        done: dict[str, Any] = {}
        for name in (n for n in index.per_process if n not in left_out):
            values = (_decode(view, name, b, None, self.among) for b in view.per_process(name))
            done[name] = PerProcessValues(tuple(map(_read, values)))
        aliases = {n: original for n, original in index.aliases.items() if n not in left_out}
        unread = left_out - {*aliases.values()}
        arrays = {name: entry for name, entry in index.arrays.items() if name not in unread}
        stored.check_total(arrays.values())
        targets = {name: {name: self._new_target(entry)} for name, entry in arrays.items()}
        loaded_arrays = read(stored, view.jobs(targets))
        done |= {**{name: loaded_arrays[name] for name in targets}, **index.values}
        done |= {alias: done[name] for alias, name in aliases.items()}
        loaded = tuple(name for name in done if name not in left_out)
        skipped = (*view.unused, *sorted(left_out, key=natural))
        node = tree.without(view.node(), left_out)
        assert node is not None, "the selection has a leaf"
        report = LoadReport(where, loaded, skipped=skipped, untyped=tuple(untyped(node)))
        return tree.rebuild(node, done.__getitem__), report

    def _new_target(self, entry: ArrayEntry) -> ArrayTarget:
        array = None if self.framework is None else self.framework.empty(entry)
        if self.framework is None or array is None:
            return NewTarget(entry)
        return self.framework.target(array)

    def _read_like(
        self, view: View, request: LoadRequest, report: LoadReport, read: ReadArrays
    ) -> Any:
        kept_names = {*report.kept, *(name for name, _, _ in report.mismatched)}
        leaves = {name: value for name, value in request.leaves.items() if name not in kept_names}
        done: dict[str, Any] = {name: request.leaves[name] for name in kept_names}
        done |= {**request.left_out, **self._read_values(view, leaves)}
        stored: dict[str, Any] = {**view.index.entries, **view.index.values}
        for node, check in tree.checks(request.node):
            if any(leaf.name not in request.left_out for leaf in tree.leaves(node)):
                check(node, lambda name: done[name] if name in done else stored[name])
        targets = {name: target for name, target in request.targets.items() if name in leaves}
        targets |= {
            name: NumberTarget(stored[name])
            for name, value in leaves.items()
            if name not in targets and name in stored and name not in done
            if is_number(value, stored[name])
        }
        by_array, same = _by_array(targets, stored, leaves)
        overlaps = Overlaps(by_array) if len(targets) > 1 else None
        jobs = view.jobs(by_array if overlaps is None else overlaps.separate(by_array))
        loaded_arrays = read(view.checkpoint, jobs)
        if overlaps is not None:
            loaded_arrays = overlaps.finish(str(view.checkpoint.location), loaded_arrays)
        done |= {name: loaded_arrays[maker] for name, maker in same.items()}
        try:
            return tree.rebuild(request.node, done.__getitem__, request.left_out.keys())
        except Exception as error:
            error.add_note(HALF_FILLED)
            raise

    def _read_values(self, view: View, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """The leaves that are stored as plain values, or by process."""
        index, values = view.index, dict[str, Any]()
        group = self.options.group
        if group is None and index.per_process:
            group = current_group(self.among)
        for name, value in leaves.items():
            if isinstance(value, PerProcess) and name in index.per_process:
                values[name] = _own_value(view, name, value, group, self.among)
            elif name in index.values:
                values[name] = tree_json.as_asked(index.values[name], value)
        return values


def _by_array(
    targets: Mapping[str, ArrayTarget], stored: Mapping[str, Any], leaves: Mapping[str, Any]
) -> tuple[dict[str, dict[str, ArrayTarget]], dict[str, str]]:
    """The targets of each stored array; and for each name, the one whose result it takes: names of
    one leaf and one array share it."""
    by_array: dict[str, dict[str, ArrayTarget]] = {}
    same: dict[str, str] = {}
    for name, target in targets.items():
        if name in stored:
            makers = by_array.setdefault(stored[name].name, {})
            same[name] = next((n for n in makers if leaves[n] is leaves[name]), name)
            if same[name] == name:
                makers[name] = target
    return by_array, same


def _decode(view: View, name: str, stored: StoredValue, like: Any, among: Sequence[Adapter]) -> Any:
    from unickpt.frameworks import per_process

    return per_process.decode(stored, _leaf_at(view, name), like, among)


def _leaf_at(view: View, name: str) -> str:
    return f"{view.checkpoint.location}: per-process leaf {name!r}"


def _read(value: Any) -> Any:
    """A value, read completely."""
    return Sections(value.facts, dict(value.values)) if isinstance(value, Sections) else value


class _SavedValues(Sequence[Any]):
    """The values of all processes that saved, each read on access."""

    def __init__(self, view: View, name: str, among: Sequence[Adapter]) -> None:
        self._stored = view.per_process(name)
        self._decode = cache(lambda index: _decode(view, name, self._stored[index], None, among))

    def is_empty(self, index: int) -> bool:
        """Whether a process saved no value of its own; reads nothing."""
        return self._stored[index].is_empty

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, index: Any) -> Any:
        numbers = range(len(self))[index]
        return self._decode(numbers) if isinstance(numbers, int) else [*map(self._decode, numbers)]


def _own_value(
    view: View, name: str, like: PerProcess, group: Any, among: Sequence[Adapter]
) -> PerProcess:
    from unickpt.frameworks.sections import EncodedValue

    count = len(view.index.per_process[name].blobs)
    if like.redistribute is not None and (
        count != group.count or isinstance(like.value, Sections | EncodedValue)
    ):
        saved = _SavedValues(view, name, among)
        try:
            value = like.redistribute(saved, group.index, group.count)
        except LoadMismatch as error:
            raise LoadMismatch(f"{_leaf_at(view, name)}: {error}") from error
    elif count == group.count:
        (stored,) = view.per_process(name, [group.index])
        value = _decode(view, name, stored, like.value, among)
    else:
        raise LoadMismatch(
            f"{_leaf_at(view, name)} was saved by {count} processes and is loaded by "
            f"{group.count}. If only some processes of the job load it, give "
            "LoadOptions(group=); else give PerProcess(redistribute=function), which decides "
            "which process gets which value, or a class of `unickpt.data`, which redistributes a "
            "data loader's state; or load it alone without `like` (a PerProcessValues of all "
            "values)."
        )
    return PerProcess(value, like.redistribute)


@contextmanager
def _reading(
    options: LoadOptions, among: Sequence[Adapter], counts: LoadCounts
) -> Iterator[ReadArrays]:
    """The function that reads arrays: for the processes of a node where that reads less, or, as
    `exchange` says, for each process alone or for all together.

    If one process fails before it is called, the others learn of it.
    """
    if options.exchange:
        group = within(options.group or current_group(among), options.timeout_s)
        if group.count > 1:
            shared: SharedReads = doors.need("reads", "exchange")
            with shared.in_job(group, options, counts) as read:
                yield read
            return
    with ExitStack() as stack:
        progress = None
        if options.progress:
            from unickpt.progress import reporting

            is_bar = options.progress is True  # process 0 of a job shows it
            process = (options.group or current_group(among)).index if is_bar else 0
            progress = stack.enter_context(reporting(options.progress, "loading", process))
        yield lambda stored, jobs: _read_here(stored, jobs, options, Filled(jobs, progress, counts))


def _read_here(
    stored: Reader, jobs: Sequence[Job], options: LoadOptions, filled: Filled
) -> dict[str, Any]:
    """Reads alone; distributed arrays, together with the other processes of this node."""
    is_spread = options.exchange is None and any(job.processes > 1 for job in jobs)
    if is_spread and launched_together(options.group) > 1:
        door = doors.find("reads", "exchange")
        if door is not None:
            shared: SharedReads = door.open()
            return shared.on_node(stored, jobs, options, filled)
    return read_arrays(stored, jobs, options, filled=filled)
