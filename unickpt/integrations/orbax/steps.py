"""The committed steps below a folder, saved by Orbax or by us."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from unickpt.errors import CheckpointNotFound
from unickpt.reading.checkpoint import open
from unickpt.reading.listing import checkpoints_below, other_folders
from unickpt.storage import paths

ORBAX = "orbax"
"""Orbax's format; and the key of our metadata that says how a step was saved."""
_FOREIGN = re.compile(r"(?:.*_)?0*([0-9]{1,18})")
_OURS = re.compile(r"step_([0-9]{1,18})")


def orbax_steps(
    directory: paths.PathLike,
    opening: Mapping[str, Any] | None = None,
    named: Callable[[str, int], bool] = lambda name, step: True,
) -> dict[int, str]:
    """The paths of the steps that Orbax committed, by their numbers.

    Arguments:
        directory: a local path or a URL.
        opening: arguments of `unickpt.open`.
        named: which folders count, by their names and numbers.
    """
    found: dict[int, str] = {}
    if not paths.resolve(directory).exists():
        return found
    for listed in other_folders(directory):
        number = _FOREIGN.fullmatch(listed.name)
        if number is None or not named(listed.name, int(number[1])):
            continue
        try:
            reader = open(listed.path, **(opening or {})).reader
        except CheckpointNotFound:
            continue  # it was not committed
        if reader.format == ORBAX:
            found[int(number[1])] = listed.path
    return found


def steps_below(directory: paths.PathLike) -> dict[int, str]:
    """The paths of all committed steps, by their numbers."""
    found = orbax_steps(directory)
    if paths.resolve(directory).exists():
        for listed in checkpoints_below(directory):
            number = _OURS.fullmatch(listed.name)
            if number is not None:
                found[int(number[1])] = listed.path
    return found
