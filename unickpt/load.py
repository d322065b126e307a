"""The verb load: what is asked, what is stored, and one out of the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unickpt import backends, blob, checkpoint, tree
from unickpt.adapt import Adapter, ArrayTarget, adapters, current_group
from unickpt.checkpoint import Checkpoint
from unickpt.compare import compare, is_number
from unickpt.errors import LoadMismatch
from unickpt.exchange import ReadArrays, reading
from unickpt.index import Index
from unickpt.marks import PerProcess, PerProcessValues
from unickpt.options import LoadOptions
from unickpt.read import NewTarget, NumberTarget
from unickpt.rules import Rules
from unickpt.view import AsStored, Ruled, View, jobs_of, through, wanted_through
from unickpt.wanted import Wanted


def load(
    path: backends.Path,
    like: Any = None,
    *,
    rules: Rules | None = None,
    strict: bool = True,
    cast: bool = False,
    options: LoadOptions | None = None,
) -> Any:
    """Loads a checkpoint onto any mesh, in any framework.

    Every process reads the chunks that its own part of `like` needs, and nothing else. No process
    waits for another one, but with `LoadOptions(exchange=True)`. Where a save replaces the
    checkpoint meanwhile, loading starts again with the new one; of several processes, each opens
    what is there when it does, and only those that exchange make sure that it is the same.

    Arguments:
        path: a local path or a URL (file, memory, s3, gs) of a committed checkpoint.
        like: a tree that says what is wanted: JAX arrays or `jax.ShapeDtypeStruct`s with
            shardings (new arrays are made), torch tensors, DTensors and NumPy arrays (filled in
            place; meta tensors are materialised), plain values, `PerProcess`, `LocalFragments`,
            objects with `load_state_dict`. Without `like`, the stored tree with NumPy arrays.
        rules: how names and axes of `like` (the right side of the rules) follow from those that
            are stored (the left side); `Rules.inverse` is the other direction.
        strict: whether the names must be the same; if not, leaves that are not stored keep what
            `like` holds, and stored ones that `like` lacks are skipped.
        cast: whether a stored dtype may become another of the same kind: floats to floats,
            integers to integers that hold all values. Never from one kind to another.
        options: see `LoadOptions`.

    Returns:
        A tree of `like`'s containers, or of the stored ones.

    Raises:
        CheckpointNotFound: no committed checkpoint is there.
        CheckpointReplaced: saves replaced it again and again, faster than it could be read.
        LoadMismatch: `like` and the checkpoint differ; a table tells all differences at once.
        RuleError: the rules fit neither what is stored nor what is asked for; names all arrays.
        CheckpointCorrupt: stored bytes do not match their digest, or are no checkpoint.
        ProcessFailed: with `LoadOptions(exchange=True)`, another process failed.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://run/load", {"w": np.arange(3), "step": 7})
        >>> unickpt.load("memory://run/load")
        {'w': array([0, 1, 2]), 'step': 7}
    """
    options = options or LoadOptions()
    among = adapters()

    def attempt() -> Any:
        with reading(options, among) as read:
            stored = checkpoint.open(path)
            if like is None:
                view = AsStored(stored) if rules is None else through(stored, rules, strict=strict)
                return _load_all(view, options, among, read)
            return _load_like(stored, like, rules, strict, cast, options, among, read)

    return checkpoint.again(attempt)  # all is filled anew; processes that exchange all do so


def _load_like(
    stored: Checkpoint,
    like: Any,
    rules: Rules | None,
    strict: bool,
    cast: bool,
    options: LoadOptions,
    among: Sequence[Adapter],
    read: ReadArrays,
) -> Any:
    view: View
    if rules is None:
        asked, view = Wanted.of(like, among, _facts(stored.index)), AsStored(stored)
    else:
        asked = wanted_through(like, stored, rules, among)
        view = through(stored, rules, asked.facts, strict=strict)
    wanted, targets = asked.leaves, dict(asked.targets)
    compare(view, wanted, targets, strict=strict, cast=cast)
    if isinstance(view, Ruled):
        view.check(options)
    index = view.index
    facts = _facts(index)
    group = options.group or (current_group(among) if index.per_process else None)
    done: dict[str, Any] = {}
    for name, value in wanted.items():
        if isinstance(value, PerProcess) and name in index.per_process:
            done[name] = _own_value(view, name, value, group, among)
        elif name in index.values:
            done[name] = index.values[name]
        elif name not in facts:
            done[name] = value  # not strict, or on purpose: keep it
    targets |= {
        name: NumberTarget(facts[name])
        for name, value in wanted.items()
        if name not in index.values and name in facts and is_number(value, facts[name])
    }
    by_array: dict[str, dict[str, ArrayTarget]] = {}
    first: dict[tuple[str, int], str] = {}
    same: dict[str, str] = {}  # names of one leaf and one array: what is made for one serves both
    for name, target in targets.items():
        if name in facts:
            array = facts[name].name
            same[name] = first.setdefault((array, id(wanted[name])), name)
            if same[name] == name:
                by_array.setdefault(array, {})[name] = target
    found = read(stored, jobs_of(view, by_array))
    done |= {name: found[maker] for name, maker in same.items()}
    return tree.rebuild(asked.node, done.__getitem__)


def _facts(index: Index) -> dict[str, Any]:
    """The arrays under each of their names, and the values."""
    arrays = {**index.arrays, **{a: index.arrays[t] for a, t in index.aliases.items()}}
    return {**arrays, **index.values}


def _load_all(
    view: AsStored | Ruled, options: LoadOptions, among: Sequence[Adapter], read: ReadArrays
) -> Any:
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
    return tree.rebuild(node, done.__getitem__)


def _decode(view: View, name: str, data: bytes, like: Any, among: Sequence[Adapter]) -> Any:
    try:
        return blob.decode(data, like, among)
    except ValueError as error:
        raise LoadMismatch(
            f"{view.checkpoint.location}: per-process leaf {name!r}: {error}"
        ) from None


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
            f"processes and is loaded by {group.count}. Say who gets which: "
            "PerProcess(redistribute=function), or load it on its own without `like` (a "
            "PerProcessValues of all values)."
        )
    return PerProcess(own, like.redistribute)
