"""`delete` of `orbax.checkpoint.v1`."""

from __future__ import annotations

import importlib
from typing import Any

from unickpt.commit import borrowers
from unickpt.errors import CheckpointExists, UnsupportedFormat
from unickpt.frameworks.leaves import adapters
from unickpt.frameworks.process_group import current_group
from unickpt.integrations.orbax.run import ORBAX
from unickpt.integrations.orbax.v1_errors import InvalidLayoutError
from unickpt.reading.checkpoint import Checkpoint
from unickpt.runs import attempt_folders
from unickpt.storage import paths


def check_whole(checkpointable_name: Any) -> None:
    """Raises a ValueError if only a part of a checkpoint of ours is to be removed."""
    if checkpointable_name is not None:
        raise ValueError(
            f"checkpointable_name={checkpointable_name!r} is not supported: parts of a checkpoint "
            "cannot be removed; save it again without"
        )


def remove(path: paths.PathLike, found: Checkpoint, checkpointable_name: str | None) -> None:
    """Removes a checkpoint; all processes of a job call this, and process 0 removes.

    Raises:
        CheckpointExists: others have chunks in it.
        UnsupportedFormat: it is neither ours nor Orbax's, or Orbax's version 1 is not installed.
    """
    if found.reader.format == ORBAX:
        _by_orbax(path, checkpointable_name)
        return
    check_whole(checkpointable_name)
    if found.reader.format != "unickpt":
        raise UnsupportedFormat(
            f"{path} is a checkpoint of {found.reader.format}; remove the folder yourself"
        )
    location = paths.resolve(path)
    group = current_group(adapters())
    if group.index == 0:
        needing = borrowers.of(location, paths.context())
        if needing:
            raise CheckpointExists(
                f"{location} is needed by {', '.join(needing)}, which borrow chunks of it; remove "
                "them first"
            )
        attempt_folders.remove_checkpoint(location, paths.context())
    if group.count > 1:
        group.agree(0)  # nobody returns before it is removed


def _by_orbax(path: paths.PathLike, checkpointable_name: str | None) -> None:
    try:
        orbax = importlib.import_module("orbax.checkpoint").v1
        delete = orbax.delete
    except (ImportError, AttributeError) as error:
        raise UnsupportedFormat(
            f"{path} was written by Orbax, whose version 1 with `delete` is not installed; remove "
            "the folder yourself"
        ) from error
    try:
        delete(path, checkpointable_name=checkpointable_name)
    except orbax.errors.InvalidLayoutError as error:
        raise InvalidLayoutError(f"{path}: Orbax does not remove it: {error}") from error
