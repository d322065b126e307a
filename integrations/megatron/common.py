"""`common.pt`, Megatron's file of the state that all ranks share: the arguments, the iteration, the
schedules. Megatron reads it itself. The checkpoint stores its content as well, under the names of
Megatron's own folders, and its digest, so that a later file is noticed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from unickpt import Checkpoint
from unickpt.errors import CheckpointCorrupt, LoadMismatch
from unickpt.integrations.megatron.objects import stored_form

COMMON = "common.pt"
COMMON_KEY = "common_state"
"""The key of the `ShardedObject` with its content in later versions of Megatron."""
_DIGEST = "unickpt_common"
"""The key of its digest."""


def write(folder: str, state: Mapping[str, Any]) -> None:
    """Writes it as Megatron up to 0.16 does, for versions that hand it over instead."""
    path = _path(folder)
    partial = f"{path}.partial"
    torch.save(dict(state), partial)
    os.replace(partial, path)


def tree(folder: str) -> dict[str, Any]:
    """Its content, to store.

    Raises:
        UnsupportedLeaf: part of it cannot be stored.
    """
    if not os.path.exists(_path(folder)):
        return {}
    # This process has written it a moment ago, so that it may unpickle it.
    state = torch.load(_path(folder), map_location="cpu", weights_only=False)
    tree = {key: stored_form(value, key) for key, value in state.items()}
    return {**tree, _DIGEST: _digest(folder)}


def belongs(folder: str, stored: Checkpoint) -> bool:
    """Whether the folder's `common.pt` was saved with its checkpoint."""
    expected = stored.index.values.get(_DIGEST)
    return expected is None or _digest(folder) == expected


def check(folder: str, stored: Checkpoint) -> None:
    """Checks that it was.

    Raises:
        LoadMismatch: it was not.
        CheckpointCorrupt: it is missing.
    """
    if not os.path.exists(_path(folder)):
        raise CheckpointCorrupt(
            f"{folder}: {COMMON} is missing, which Megatron loads; was the folder copied whole?"
        )
    if not belongs(folder, stored):
        raise LoadMismatch(
            f"{folder}: {COMMON} is not the one that was saved with this checkpoint, but of a "
            "later save into this folder that was interrupted, or it was changed. Load an earlier "
            "iteration; or with unickpt.load what belongs together, which has the values of the "
            "right one"
        )


def _path(folder: str) -> str:
    return os.path.join(folder, COMMON)


def _digest(folder: str) -> str:
    try:
        with open(_path(folder), "rb") as file:
            return xxhash.xxh3_128_hexdigest(file.read())
    except FileNotFoundError:
        return ""


# --- the newest iteration of a run ----------------------------------------------------------------


def latest(run: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint of a run.

    Megatron writes `metadata.json` last, directly into its place: a job that dies just then leaves
    half of it, and `dist_checkpointing.load` fails. Such a checkpoint is not complete.

    Arguments:
        run: a folder with one checkpoint in each of its folders, of unickpt or of Megatron itself.
            The last number in the name of such a folder is its step: "iter_0001000", "1000".

    Returns:
        Its folder; None if there is none.

    Raises:
        ValueError: `run` is a URL; Megatron's own files are on a file system.

    Example:
        folder = latest("run")
        if folder is not None:
            found = dist_checkpointing.load(state(), folder, LoadStrategy(optimizer))
    """
    if "://" in os.fspath(run):
        raise ValueError(
            f"{run}: `latest` looks into a folder of a file system, as Megatron's own files are, "
            "not into a URL; pass its path"
        )
    try:
        inside = list(Path(run).iterdir())
    except FileNotFoundError:
        return None
    matches = ((_LAST_NUMBER.search(folder.name), folder) for folder in inside)
    steps = sorted(((int(m[0]), folder) for m, folder in matches if m), reverse=True)
    return next((str(folder) for _, folder in steps if _is_complete(folder)), None)


_LAST_NUMBER = re.compile(r"\d+(?=\D*$)")


def _is_complete(folder: Path) -> bool:
    try:
        json.loads((folder / "metadata.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return True
