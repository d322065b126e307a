"""Which checkpoint is saved next, and which is the newest, with automatic naming."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from unickpt.errors import CheckpointExists, CheckpointNotFound
from unickpt.integrations.accelerate import own_folders
from unickpt.reading.listing import checkpoints_below
from unickpt.runs import attempt_folders
from unickpt.storage import paths

_PREFIX = "checkpoint_"
_NAME = re.compile(f"{_PREFIX}(0|[1-9][0-9]{{0,17}})")


def _folder(accelerator: Accelerator) -> str:
    if accelerator.project_dir is None:
        raise ValueError("automatic_checkpoint_naming=True needs project_dir=")
    return os.path.join(accelerator.project_dir, "checkpoints")


def next_path(accelerator: Accelerator, output_dir: paths.PathLike | None) -> paths.PathLike:
    automatic = accelerator.project_configuration.automatic_checkpoint_naming
    if not automatic and output_dir is None:
        raise ValueError("output_dir= is missing: say where to save")
    if not automatic:
        assert output_dir is not None
        return output_dir
    if output_dir is not None:
        raise ValueError(
            "output_dir= is given, and automatic_checkpoint_naming=True names checkpoints itself: "
            "leave one of them out"
        )
    folder, iteration = _folder(accelerator), accelerator.save_iteration
    path = os.path.join(folder, f"{_PREFIX}{iteration}")
    names = _names(accelerator, folder) if accelerator.is_main_process else ()
    there = broadcast(iteration in names)
    if there:
        raise CheckpointExists(
            f"{path} exists: go on from it with load_state(accelerator), or set "
            "accelerator.project_configuration.iteration"
        )
    return path


def found(
    accelerator: Accelerator, input_dir: paths.PathLike | None
) -> tuple[paths.PathLike, int | None]:
    """What to load, and its number if it was named automatically."""
    if input_dir is not None:
        return input_dir, None
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError("input_dir= is missing: say what to load")
    folder = _folder(accelerator)
    is_main = accelerator.is_main_process
    newest = max(_names(accelerator, folder), default=None) if is_main else None
    newest = broadcast(newest)
    if newest is None:
        raise CheckpointNotFound(f"{folder} has no checkpoint")
    return os.path.join(folder, f"{_PREFIX}{newest}"), newest


def _names(accelerator: Accelerator, folder: str) -> list[int]:
    """The numbers of the complete checkpoints in a folder, ascending; also of accelerate's own."""
    if not Path(folder).is_dir():
        return []
    registered = len(accelerator._custom_objects)
    own = {listed.name for listed in checkpoints_below(folder)}
    matches = (match for name in os.listdir(folder) if (match := _NAME.fullmatch(name)))
    return sorted(
        int(match[1])
        for match in matches
        if match[0] in own or own_folders.is_complete(os.path.join(folder, match[0]), registered)
    )


class Excess:
    """Removes the oldest checkpoints beyond `total_limit`, once another one is committed."""

    def __init__(self, accelerator: Accelerator, path: paths.PathLike) -> None:
        configuration = accelerator.project_configuration
        self._accelerator = accelerator
        self._limit = configuration.total_limit
        self._path = paths.absolute(path, or_file=True)  # the program may go elsewhere meanwhile
        self._works = (
            configuration.automatic_checkpoint_naming
            and self._limit is not None
            and accelerator.is_main_process
        )

    def __call__(self) -> None:
        if not self._works:
            return
        folder, name = os.path.split(self._path)
        there = _names(self._accelerator, folder)
        if int(name.removeprefix(_PREFIX)) not in there:
            return  # the save failed; the others are all there is
        for number in there[: -max(1, self._limit)]:
            path = os.path.join(folder, f"{_PREFIX}{number}")
            if own_folders.is_theirs(path) is not None:
                shutil.rmtree(path, ignore_errors=True)
            else:
                attempt_folders.remove_checkpoint(paths.resolve(path), paths.context())


def broadcast(value: Any) -> Any:
    """The value of process 0."""
    values = [value]
    broadcast_object_list(values, from_process=0)
    return values[0]
