"""Which checkpoint is saved next, and which is the newest, with automatic naming."""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from unickpt.errors import CheckpointExists, CheckpointNotFound, InvalidPath
from unickpt.extend import (
    MANIFEST,
    LocalLocation,
    PathLike,
    absolute_path,
    checkpoints_below,
    remove_checkpoint,
    resolve_path,
    storage_context,
)

_PREFIX = "checkpoint_"
_NAME = re.compile(f"{_PREFIX}(0|[1-9][0-9]{{0,17}})")


def _folder(accelerator: Accelerator) -> str:
    if accelerator.project_dir is None:
        raise ValueError("automatic_checkpoint_naming=True needs project_dir=")
    return os.path.join(accelerator.project_dir, "checkpoints")


def next_path(accelerator: Accelerator, output_dir: PathLike | None) -> PathLike:
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
    if broadcast(iteration in names):
        raise CheckpointExists(
            f"{path} exists: resume from it with load_state(accelerator), or set "
            "accelerator.project_configuration.iteration"
        )
    return path


def find_checkpoint(
    accelerator: Accelerator, input_dir: PathLike | None
) -> tuple[PathLike, int | None]:
    """The path to load, and its number if it was named automatically."""
    if input_dir is not None:
        return input_dir, None
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError("input_dir= is missing: say what to load")
    folder = _folder(accelerator)
    is_main = accelerator.is_main_process
    newest = broadcast(max(_names(accelerator, folder), default=None) if is_main else None)
    if newest is None:
        raise CheckpointNotFound(f"{folder} has no checkpoint")
    return os.path.join(folder, f"{_PREFIX}{newest}"), newest


def _names(accelerator: Accelerator, folder: str) -> list[int]:
    """The numbers of the complete checkpoints in a folder, ascending; also of accelerate's own."""
    if not Path(folder).is_dir():
        return []
    registered = len(accelerator._custom_objects)
    our_names = {listed.name for listed in checkpoints_below(folder)}
    matches = (match for name in os.listdir(folder) if (match := _NAME.fullmatch(name)))
    return sorted(
        int(match[1])
        for match in matches
        if match[0] in our_names or is_complete(os.path.join(folder, match[0]), registered)
    )


class Excess:
    """Removes the oldest checkpoints beyond `total_limit`, once another one is committed."""

    def __init__(self, accelerator: Accelerator, path: PathLike) -> None:
        configuration = accelerator.project_configuration
        self._accelerator = accelerator
        self._limit = configuration.total_limit
        self._path = absolute_path(path, or_file=True)  # the program may go elsewhere meanwhile
        self._works = (
            configuration.automatic_checkpoint_naming
            and self._limit is not None
            and accelerator.is_main_process
        )

    def __call__(self) -> None:
        if not self._works:
            return
        folder, name = os.path.split(self._path)
        numbers = _names(self._accelerator, folder)
        if int(name.removeprefix(_PREFIX)) not in numbers:
            return  # the save failed; the others are all there is
        for number in numbers[: -max(1, self._limit)]:
            path = os.path.join(folder, f"{_PREFIX}{number}")
            if is_theirs(path) is not None:
                shutil.rmtree(path, ignore_errors=True)
            else:
                remove_checkpoint(resolve_path(path), storage_context())


def broadcast(value: Any) -> Any:
    """The value of process 0."""
    values = [value]
    broadcast_object_list(values, from_process=0)
    return values[0]


# --- folders of accelerate's own ------------------------------------------------------------------


_WEIGHTS = (
    r"model(_\d+)?(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
    r"|pytorch_model(_fsdp)?(_\d+)?(-\d{5}-of-\d{5})?\.bin(\.index\.json)?"
)
_STATES = r"(optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin|scaler\.pt"
_LAST = r"random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl"  # in this order
_FOLDERS = r"pytorch_model_fsdp_\d+|optimizer_\d+"  # of FSDP's sharded states
_DEEPSPEED = r"pytorch_model(_\d+)?|latest|zero_to_(fp32|torch)\.py"
_OF_ALL = re.compile("|".join((_WEIGHTS, _STATES, _LAST, _FOLDERS, _DEEPSPEED)))
_RANDOM = "random_states_{}.pkl"
_REGISTERED = "custom_checkpoint_{}.pkl"


def theirs_of(names: Sequence[str]) -> Sequence[str]:
    """The files of a folder that `Accelerator.save_state` wrote, also one that was killed."""
    return [name for name in names if _OF_ALL.fullmatch(name)]


def is_theirs(path: PathLike) -> str | None:
    """The path of a local folder that `Accelerator.save_state` has written; None for any other."""
    try:
        location = resolve_path(path)
    except InvalidPath:
        return None
    if not isinstance(location, LocalLocation):
        return None
    names = location.files(storage_context())
    return str(location) if _RANDOM.format(0) in names and MANIFEST not in names else None


def is_complete(folder: str, registered: int) -> bool:
    """Whether a folder has all that `Accelerator.save_state` writes, of a job that may have been
    killed meanwhile.

    Arguments:
        folder: a local one.
        registered: how many objects are registered, which are written last.
    """
    if is_theirs(folder) is None:
        return False
    last = [_RANDOM.format(0), *map(_REGISTERED.format, range(registered))]
    # A zip file that is not complete lacks its end.
    return all(zipfile.is_zipfile(os.path.join(folder, name)) for name in last)
