"""load(): compares what `like` requests with what is stored, and reads it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal, overload

from unickpt.errors import LoadMismatch
from unickpt.format.index import Index
from unickpt.format.reader import Reader
from unickpt.frameworks import per_process
from unickpt.frameworks.leaves import PerProcess, PerProcessValues
from unickpt.frameworks.protocol import Adapter, ArrayTarget
from unickpt.frameworks.registry import adapters, current_group
from unickpt.loading.compare import compare, is_number
from unickpt.loading.report import LoadReport
from unickpt.loading.request import Request
from unickpt.loading.ruled_view import Ruled, through, wanted_through
from unickpt.loading.views import AsStored, View, jobs_of
from unickpt.reading import checkpoint
from unickpt.reading.collective_read import ReadArrays, reading
from unickpt.reading.options import LoadOptions
from unickpt.reading.targets import NewTarget, NumberTarget
from unickpt.rules import Rules
from unickpt.storage import paths
from unickpt.trees import plain_values, tree

_log = logging.getLogger("unickpt")


@overload
def load(
    path: paths.Path,
    like: Any = None,
    *,
    rules: Rules | None = None,
    strict: bool = True,
    mismatched: Literal["error", "keep"] = "error",
    cast: bool = False,
    return_report: Literal[False] = False,
    options: LoadOptions | None = None,
) -> Any: ...


@overload
def load(
    path: paths.Path,
    like: Any = None,
    *,
    rules: Rules | None = None,
    strict: bool = True,
    mismatched: Literal["error", "keep"] = "error",
    cast: bool = False,
    return_report: Literal[True],
    options: LoadOptions | None = None,
) -> tuple[Any, LoadReport]: ...


def load(
    path: paths.Path,
    like: Any = None,
    *,
    rules: Rules | None = None,
    strict: bool = True,
    mismatched: Literal["error", "keep"] = "error",
    cast: bool = False,
    return_report: bool = False,
    options: LoadOptions | None = None,
) -> Any:
    """Loads a checkpoint onto any mesh, in any framework.

    Every process reads only the chunks that its own part of `like` needs. No process waits for
    another, except with `LoadOptions(exchange=True)`. If a save replaces the checkpoint during the
    load, loading starts again with the new one. Each process opens the checkpoint on its own; only
    with `exchange=True` do they check that they opened the same one.

    Arguments:
        path: a local path or a URL (file, memory, s3, gs) of a committed checkpoint.
        like: a tree of what to load: JAX arrays or `jax.ShapeDtypeStruct`s with shardings (new
            arrays are created), torch tensors, DTensors and NumPy arrays (filled in place; meta
            tensors are materialised), plain values, `PerProcess`, `LocalFragments`, objects with
            `load_state_dict`. Without `like`, the stored tree with NumPy arrays. A plain int, float
            or bool loads into a 0-d array of its kind that holds it exactly, and vice versa.
        rules: map stored names and axes (the left side of the rules) to those of `like` (the right
            side); `Rules.inverse` is the other direction.
        strict: whether the names must be the same; if not, leaves that are not stored keep what
            `like` holds, and stored leaves that `like` lacks are skipped. It is still an error if
            no leaf of `like` is stored, or none of its arrays.
        mismatched: what to do if an array's shape differs from the stored one: "error", or "keep"
            what `like` holds.
        cast: whether to convert between dtypes of the same kind: floats to floats, integers to
            integers that hold all values. Never from one kind to another.
        return_report: whether to also return a `LoadReport`. Its text is always logged to the
            logger "unickpt" at level INFO.
        options: see `LoadOptions`.

    Returns:
        A tree with the containers of `like`, or the stored ones; with `return_report`, a pair of
        the tree and the report.

    Raises:
        CheckpointNotFound: no committed checkpoint exists there.
        CheckpointReplaced: saves replaced it repeatedly, faster than it could be read.
        LoadMismatch: `like` and the checkpoint differ; the message lists all differences.
        RuleError: the rules do not fit what is stored or requested; names all arrays.
        CheckpointCorrupt: stored bytes do not match their digest, or are not a valid checkpoint.
        ProcessFailed: with `LoadOptions(exchange=True)`, another process failed.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://run/load", {"w": np.arange(3), "step": 7})
        >>> unickpt.load("memory://run/load")
        {'w': array([0, 1, 2]), 'step': 7}
    """
    if mismatched not in ("error", "keep"):
        raise ValueError(f'mismatched={mismatched!r} is neither "error" nor "keep"')
    options = LoadOptions.or_default(options)
    among = adapters()

    def attempt() -> tuple[Any, LoadReport]:
        with reading(options, among) as read:
            stored = checkpoint.open(path).reader
            if like is None:
                view = AsStored(stored) if rules is None else through(stored, rules, strict=strict)
                return _load_all(view, options, among, read)
            keep = mismatched == "keep"
            return _load_like(stored, like, rules, strict, keep, cast, options, among, read)

    # Fills everything again; processes that exchange all start again together.
    found, report = checkpoint.again(attempt)
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s", report)
    return (found, report) if return_report else found


def _load_like(
    stored: Reader,
    like: Any,
    rules: Rules | None,
    strict: bool,
    keep: bool,
    cast: bool,
    options: LoadOptions,
    among: Sequence[Adapter],
    read: ReadArrays,
) -> tuple[Any, LoadReport]:
    view: View
    if rules is None:
        asked = Request.of(like, among, _facts(stored.index))
        view = AsStored(stored, asked.facts)
    else:
        asked = wanted_through(like, stored, rules, among)
        view = through(stored, rules, asked.facts, strict=strict, keep_misfits=keep)
    report = compare(
        view, asked.leaves, asked.targets, strict=strict, cast=cast, keep_mismatched=keep
    )
    if isinstance(view, Ruled):
        view.check(options)
    return _read_like(view, asked, report, options, among, read), report


def _read_like(
    view: View,
    asked: Request,
    report: LoadReport,
    options: LoadOptions,
    among: Sequence[Adapter],
    read: ReadArrays,
) -> Any:
    left = {*report.kept, *(name for name, _, _ in report.mismatched)}
    wanted = {name: value for name, value in asked.leaves.items() if name not in left}
    targets = {name: target for name, target in asked.targets.items() if name not in left}
    index = view.index
    facts = _facts(index)
    group = options.group or (current_group(among) if index.per_process else None)
    done: dict[str, Any] = {name: asked.leaves[name] for name in left}
    for name, value in wanted.items():
        if isinstance(value, PerProcess) and name in index.per_process:
            done[name] = _own_value(view, name, value, group, among)
        elif name in index.values:
            done[name] = plain_values.as_asked(index.values[name], value)
    targets |= {
        name: NumberTarget(facts[name])
        for name, value in wanted.items()
        if name not in index.values and name in facts and is_number(value, facts[name])
    }
    by_array: dict[str, dict[str, ArrayTarget]] = {}
    same: dict[str, str] = {}  # names of one leaf and one array share the result
    for name, target in targets.items():
        if name in facts:
            makers = by_array.setdefault(facts[name].name, {})
            same[name] = next((n for n in makers if wanted[n] is wanted[name]), name)
            if same[name] == name:
                makers[name] = target
    found = read(view.checkpoint, jobs_of(view, by_array))
    done |= {name: found[maker] for name, maker in same.items()}
    return tree.rebuild(asked.node, done.__getitem__)


def _facts(index: Index) -> dict[str, Any]:
    """The arrays under each of their names, and the values."""
    arrays = {**index.arrays, **{a: index.arrays[t] for a, t in index.aliases.items()}}
    return {**arrays, **index.values}


def _load_all(
    view: AsStored | Ruled, options: LoadOptions, among: Sequence[Adapter], read: ReadArrays
) -> tuple[Any, LoadReport]:
    index, node = view.index, view.node()
    if isinstance(view, Ruled):
        view.check(options)
    done: dict[str, Any] = {
        name: PerProcessValues(tuple(_decode(view, name, b, None, among)
                                     for b in view.per_process(name)))
        for name in index.per_process
    }  # fmt: skip
    wanted = {name: {name: NewTarget(entry)} for name, entry in index.arrays.items()}
    done |= {**read(view.checkpoint, jobs_of(view, wanted)), **index.values}
    done |= {alias: done[name] for alias, name in index.aliases.items()}
    skipped = view.unused if isinstance(view, Ruled) else ()
    report = LoadReport(str(view.checkpoint.location), tuple(done), skipped=tuple(skipped))
    return tree.rebuild(node, done.__getitem__), report


def _decode(view: View, name: str, data: bytes, like: Any, among: Sequence[Adapter]) -> Any:
    return per_process.decode(
        data, f"{view.checkpoint.location}: per-process leaf {name!r}", like, among
    )


def _own_value(
    view: View, name: str, like: PerProcess, group: Any, among: Sequence[Adapter]
) -> PerProcess:
    count = len(view.index.per_process[name].blobs)
    if count == group.count:
        (data,) = view.per_process(name, [group.index])
        own = _decode(view, name, data, like.value, among)
    elif like.redistribute is not None:
        saved = [_decode(view, name, data, None, among) for data in view.per_process(name)]
        own = like.redistribute(saved, group.index, group.count)
    else:
        raise LoadMismatch(
            f"{view.checkpoint.location}: per-process leaf {name!r} was saved by {count} "
            f"processes and is loaded by {group.count}. Give PerProcess(redistribute=function), "
            "which decides who gets which value, or load it alone without `like` (a "
            "PerProcessValues of all values)."
        )
    return PerProcess(own, like.redistribute)
