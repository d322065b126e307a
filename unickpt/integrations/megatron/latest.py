"""Which checkpoint a job of Megatron-Core goes on from."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path


def latest(run: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint of a run.

    Megatron writes `metadata.json` last, into its place: a job that dies just then leaves half of
    it, with which `dist_checkpointing.load` fails. Such a checkpoint is not complete.

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
    steps = [(int(match[0]), each) for each in inside if (match := _LAST_NUMBER.search(each.name))]
    return next((str(each) for _, each in sorted(steps, reverse=True) if _is_complete(each)), None)


_LAST_NUMBER = re.compile(r"\d+(?=\D*$)")


def _is_complete(folder: Path) -> bool:
    try:
        json.loads((folder / "metadata.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return True
