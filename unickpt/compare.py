"""What `like` asks for, held against what a checkpoint stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from unickpt import dtypes, mismatch, values
from unickpt.adapt import ArrayTarget
from unickpt.errors import LoadMismatch
from unickpt.index import ArrayEntry
from unickpt.marks import PerProcess
from unickpt.mismatch import Difference
from unickpt.view import View, same_digests


def compare(
    view: View,
    wanted: Mapping[str, Any],
    targets: Mapping[str, ArrayTarget],
    *,
    strict: bool,
    cast: bool,
) -> None:
    """Holds all leaves of `like` against the checkpoint, before anything is read.

    Raises:
        LoadMismatch: one table of all differences.
    """
    index = view.index
    have = {*index.arrays, *index.aliases, *index.values, *index.per_process}
    rows: list[Difference] = []
    for name, value in wanted.items():
        found = _stored_fact(view, name)
        if name not in have:
            if (strict and name not in view.kept) or _abstract(value, targets.get(name)):
                rows.append(Difference(name, "missing", "-", _asked(value, targets.get(name))))
        elif name in targets and isinstance(found, ArrayEntry):
            rows += _compare_array(name, found, targets[name], cast)
        elif not _same_kind(value, found, name in index.per_process):
            rows.append(Difference(name, "kind", _shown(found), _asked(value, targets.get(name))))
    if strict:
        rows += [
            Difference(name, "unexpected", _shown(_stored_fact(view, name)), "-")
            for name in have
            if name not in wanted
        ]
    rows += _shared_memory(view, targets)
    if rows:
        raise LoadMismatch(mismatch.message(str(view.checkpoint.location), rows))


def _stored_fact(view: View, name: str) -> Any:
    index = view.index
    target = index.aliases.get(name, name)
    if target in index.arrays:
        return index.arrays[target]
    return PerProcess() if name in index.per_process else index.values.get(name)


def _abstract(value: Any, target: ArrayTarget | None) -> bool:
    """Whether a leaf of `like` holds no data that it could keep."""
    if isinstance(value, PerProcess):
        return value.value is None
    return target is not None and target.abstract


def _same_kind(value: Any, found: Any, per_process: bool) -> bool:
    if per_process or isinstance(value, PerProcess):
        return per_process and isinstance(value, PerProcess)
    if isinstance(found, ArrayEntry):
        return is_number(value, found)
    return values.is_plain(value) and values.is_plain(found)


def is_number(value: Any, entry: ArrayEntry) -> bool:
    """Whether a stored 0-d array holds the kind of number that a plain leaf of `like` is.

    A step counter is an int in a fresh training state, and an array after the first step.
    """
    if entry.shape != () or entry.prng is not None:
        return False
    dtype = dtypes.from_name(entry.dtype)
    kinds = {int: "integer", float: "float", bool: "other"}
    return kinds.get(type(value)) == dtypes.kind(dtype) and (
        type(value) is not bool or dtype == np.bool_
    )


def _compare_array(
    name: str, entry: ArrayEntry, target: ArrayTarget, cast: bool
) -> list[Difference]:
    rows = []
    have, want = dtypes.from_name(entry.dtype), target.dtype
    if tuple(entry.shape) != tuple(target.shape):
        rows.append(Difference(name, "shape", str(list(entry.shape)), str(list(target.shape))))
    if have != want and not (cast and dtypes.castable(have, want)):
        rows.append(Difference(name, "dtype", entry.dtype, dtypes.name_of(want)))
    if target.prng is not None and target.prng != entry.prng:
        rows.append(Difference(name, "PRNG key", str(entry.prng), target.prng))
    return rows


def _shared_memory(view: View, targets: Mapping[str, ArrayTarget]) -> list[Difference]:
    """Leaves of `like` that are one array, but were stored as different ones."""
    first: dict[Any, str] = {}
    rows = []
    for name, target in targets.items():
        other = first.setdefault(target.identity, name) if target.identity is not None else name
        entry, one = _stored_fact(view, name), _stored_fact(view, other)
        if other == name or not (isinstance(entry, ArrayEntry) and isinstance(one, ArrayEntry)):
            continue
        if entry.name != one.name and not _same_data(view, entry, one):
            rows.append(
                Difference(name, "tied", "an array of its own", f"the same memory as {other}")
            )
    return rows


def _same_data(view: View, a: ArrayEntry, b: ArrayEntry) -> bool:
    ours, other = view.twin(a.name), view.twin(b.name)
    stored = view.checkpoint
    return ours is not None and other is not None and same_digests(stored, ours, stored, other)


def _asked(value: Any, target: ArrayTarget | None) -> str:
    if target is not None:
        return f"{dtypes.name_of(target.dtype)}{list(target.shape)}"
    return "a PerProcess" if isinstance(value, PerProcess) else f"plain {type(value).__name__}"


def _shown(found: Any) -> str:
    if isinstance(found, ArrayEntry):
        return f"{found.dtype}{list(found.shape)}"
    return "a PerProcess" if isinstance(found, PerProcess) else f"plain {type(found).__name__}"
