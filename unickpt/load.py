"""The verb load: what is asked, what is stored, and one out of the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unickpt import backends, blob, checkpoint, tree
from unickpt.adapt import Adapter, ArrayTarget, adapters, current_group
from unickpt.checkpoint import Checkpoint
from unickpt.compare import compare, is_number, targets_of
from unickpt.describe import expand, is_leaf
from unickpt.errors import CheckpointCorrupt, LoadMismatch
from unickpt.marks import PerProcess, PerProcessValues
from unickpt.options import LoadOptions
from unickpt.read import Job, NewTarget, NumberTarget, read_arrays


def load(
    path: backends.Path,
    like: Any = None,
    *,
    strict: bool = True,
    cast: bool = False,
    options: LoadOptions | None = None,
) -> Any:
    """Loads a checkpoint onto any mesh, in any framework.

    Every process reads the chunks that its own part of `like` needs, and nothing else.

    Arguments:
        path: a local path or a URL (file, memory, s3, gs) of a committed checkpoint.
        like: a tree that says what is wanted: JAX arrays or `jax.ShapeDtypeStruct`s with
            shardings (new arrays are made), torch tensors, DTensors and NumPy arrays (filled in
            place; meta tensors are materialised), plain values, `PerProcess`, `LocalFragments`,
            objects with `load_state_dict`. Without `like`, the stored tree with NumPy arrays.
        strict: whether the names must be the same; if not, leaves that are not stored keep what
            `like` holds, and stored ones that `like` lacks are skipped.
        cast: whether a stored dtype may become another of the same kind: floats to floats,
            integers to integers that hold all values. Never from one kind to another.
        options: see `LoadOptions`.

    Returns:
        A tree of `like`'s containers, or of the stored ones.

    Raises:
        CheckpointNotFound: no committed checkpoint is there.
        LoadMismatch: `like` and the checkpoint differ; a table tells all differences at once.
        CheckpointCorrupt: stored bytes do not match their digest, or are no checkpoint.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://run/load", {"w": np.arange(3), "step": 7})
        >>> unickpt.load("memory://run/load")
        {'w': array([0, 1, 2]), 'step': 7}
    """
    options = options or LoadOptions()
    among = adapters()
    stored = checkpoint.open(path)
    if like is None:
        return _load_all(stored, options, among)
    index = stored.index
    facts = {**index.arrays, **{a: index.arrays[t] for a, t in index.aliases.items()}}
    known = {**facts, **index.values}
    node = tree.flatten(
        like, lambda x: is_leaf(x, among), lambda obj, name: expand(obj, name, among, known)
    )
    wanted = {leaf.name: leaf.value for leaf in tree.leaves(node)}
    targets = targets_of(wanted, among)
    compare(stored, wanted, targets, strict=strict, cast=cast)
    group = options.group or (current_group(among) if index.per_process else None)
    done: dict[str, Any] = {}
    for name, value in wanted.items():
        if isinstance(value, PerProcess) and name in index.per_process:
            done[name] = _own_value(stored, name, value, group, among)
        elif name in index.values:
            done[name] = index.values[name]
        elif name not in facts:
            done[name] = value  # not strict: keep it
    targets |= {
        name: NumberTarget(facts[name])
        for name, value in wanted.items()
        if name in facts and is_number(value, facts[name])
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
    jobs = [Job(index.arrays[name], asked) for name, asked in by_array.items()]
    read = read_arrays(stored, jobs, options)
    done |= {name: read[maker] for name, maker in same.items()}
    return tree.rebuild(node, done.__getitem__)


def _load_all(stored: Checkpoint, options: LoadOptions, among: Sequence[Adapter]) -> Any:
    index = stored.index
    try:
        node = tree.from_json(index.tree)
    except ValueError as error:
        raise CheckpointCorrupt(f"{stored.location}: {error}") from None
    in_tree = {leaf.name for leaf in tree.leaves(node)}
    in_index = {*index.arrays, *index.aliases, *index.values, *index.per_process}
    if in_tree != in_index:
        name = min(in_tree ^ in_index)
        raise CheckpointCorrupt(
            f"{stored.location}: leaf {name!r} is in the tree of the index or in its lists, "
            "but not in both"
        )
    jobs = [Job(entry, {name: NewTarget(entry)}) for name, entry in index.arrays.items()]
    done: dict[str, Any] = {
        name: PerProcessValues(tuple(_decode(stored, name, b, None, among)
                                     for b in stored.per_process(name)))
        for name in index.per_process
    }  # fmt: skip
    done |= {**read_arrays(stored, jobs, options), **index.values}
    done |= {alias: done[name] for alias, name in index.aliases.items()}
    return tree.rebuild(node, done.__getitem__)


def _decode(stored: Checkpoint, name: str, data: bytes, like: Any, among: Sequence[Adapter]) -> Any:
    try:
        return blob.decode(data, like, among)
    except ValueError as error:
        raise LoadMismatch(f"{stored.location}: per-process leaf {name!r}: {error}") from None


def _own_value(
    stored: Checkpoint, name: str, like: PerProcess, group: Any, among: Sequence[Adapter]
) -> PerProcess:
    count = len(stored.index.per_process[name].blobs)
    if count == group.count:
        (data,) = stored.per_process(name, [group.index])
        own = _decode(stored, name, data, like.value, among)
    elif like.redistribute is not None:
        saved = [_decode(stored, name, data, None, among) for data in stored.per_process(name)]
        own = like.redistribute(saved, group.index, group.count)
    else:
        raise LoadMismatch(
            f"{stored.location}: per-process leaf {name!r} was saved by {count} processes and "
            f"is loaded by {group.count}. Say who gets which: PerProcess(redistribute=function), "
            "or load it on its own without `like` (a PerProcessValues of all values)."
        )
    return PerProcess(own, like.redistribute)
