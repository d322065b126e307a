"""What accelerate's own `Accelerator.save_state` has written.

Sources: accelerate 1.15, checkpointing.py and utils/fsdp_utils.py; DeepSpeed 0.19,
runtime/engine.py.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Sequence

from unickpt.errors import InvalidPath
from unickpt.storage import paths
from unickpt.storage.ocdbt import MANIFEST
from unickpt.storage.paths import LocalLocation

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


def theirs(names: Sequence[str]) -> Sequence[str]:
    """What of a folder `Accelerator.save_state` has written, also one that was killed."""
    return [name for name in names if _OF_ALL.fullmatch(name)]


def is_theirs(path: paths.PathLike) -> str | None:
    """The path of a local folder that `Accelerator.save_state` has written; None for any other."""
    try:
        found = paths.resolve(path)
    except InvalidPath:
        return None
    if not isinstance(found, LocalLocation):
        return None
    names = found.files(paths.context())
    return str(found) if _RANDOM.format(0) in names and MANIFEST not in names else None


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
