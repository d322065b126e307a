"""`common.pt`, in which Megatron keeps what all ranks have alike: the arguments, the iteration, the
schedules. Megatron reads it itself. What it holds is stored in the checkpoint as well, under the
names that it has in Megatron's own folders, and compared when the checkpoint is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from unickpt.errors import CheckpointCorrupt, LoadMismatch
from unickpt.frameworks.leaves import LocalFragments
from unickpt.loading import loader
from unickpt.quoting import quoted
from unickpt.reading import checkpoint
from unickpt.reading.checkpoint import Checkpoint
from unickpt.trees import tree_json

COMMON = "common.pt"
COMMON_KEY = "common_state"
"""The key of the `ShardedObject` in which Megatron from 0.17 on hands it over."""


def write(folder: str, state: Mapping[str, Any]) -> None:
    """Writes it as Megatron up to 0.16 does, for versions that hand it over instead."""
    path = os.path.join(folder, COMMON)
    partial = f"{path}.partial"
    torch.save(dict(state), partial)
    os.replace(partial, path)


def tree(folder: str) -> dict[str, Any]:
    """What it holds, as unickpt reads it from a folder of Megatron: never unpickled."""
    path = os.path.join(folder, COMMON)
    found = _held_here(loader.load(path)) if os.path.exists(path) else {}
    if not isinstance(found, dict):
        raise CheckpointCorrupt(f"{path}: it holds no dict")
    return found


def keys(folder: str) -> set[str]:
    """The keys of what it holds."""
    path = os.path.join(folder, COMMON)
    if not os.path.exists(path):
        return set()
    names = checkpoint.open(path).index
    return {name.split("/")[0] for name in (*names.values, *names.arrays)}


def _held_here(value: Any) -> Any:
    """What was read, with arrays that no other rank has."""
    if isinstance(value, np.ndarray):
        return LocalFragments.whole(value)
    if isinstance(value, dict):
        return {key: _held_here(x) for key, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_held_here, value))
    return value


def check(folder: str, stored: Checkpoint) -> None:
    """Checks that a folder's `common.pt` was saved with its checkpoint.

    Raises:
        LoadMismatch: it was not; names a value that differs.
        CheckpointCorrupt: it is missing or damaged.
    """
    path = os.path.join(folder, COMMON)
    if not os.path.exists(path):
        raise CheckpointCorrupt(
            f"{folder}: {COMMON} is missing, which Megatron loads; was the folder copied whole?"
        )
    found = checkpoint.open(path)
    for name, value in found.index.values.items():
        if name not in stored.index.values:
            raise _differs(folder, name, value, "nothing")
        have = stored.index.values[name]
        if tree_json.value_to_json(value) != tree_json.value_to_json(have):
            raise _differs(folder, name, value, have)
    for name, array in found.items():
        if name not in stored:
            raise _differs(folder, name, "an array", "none")
        theirs, ours = array[...], stored[name][...]
        same = theirs.dtype == ours.dtype and theirs.shape == ours.shape
        if not same or np.ascontiguousarray(theirs).tobytes() != ours.tobytes():
            raise _differs(folder, name, "one array", "another")


def _differs(folder: str, name: str, found: Any, stored: Any) -> LoadMismatch:
    return LoadMismatch(
        f"{folder}: {COMMON} and the checkpoint are of different saves: {name!r} is "
        f"{quoted(found)} there, and {quoted(stored)} in the checkpoint. A later save into this "
        "folder was interrupted; load an earlier iteration, or the arrays alone with unickpt.load"
    )
