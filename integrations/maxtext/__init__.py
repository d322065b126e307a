"""MaxText's checkpoints in unickpt's format: one call before its train loop.

    from unickpt.integrations import maxtext
    maxtext.install()

docs/integrations/maxtext.md lists the differences.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from unickpt import LoadOptions, SaveOptions
from unickpt.errors import MissingPackage

__all__ = ["install"]

_USE_VERSION_0 = (
    "common.checkpointing",
    "trainers.diloco.utils.spmd_diloco_checkpointing",
    "utils.layerwise_quantization",
    "utils.lora_utils",
    "utils.model_creation_utils",
)
"""MaxText's modules that save or load by Orbax's version 0."""


def install(
    save_options: SaveOptions | None = None, load_options: LoadOptions | None = None
) -> None:
    """From here on, Orbax stores MaxText's states in unickpt's format.

    MaxText's functions and Orbax's managers stay unchanged; only the handler of the item `items`
    is ours. Steps that Orbax's own handler saved are loaded as before. Call it before the loop
    begins; a second call replaces the options.

    Arguments:
        save_options: how to save; see `unickpt.SaveOptions`.
        load_options: how to load; see `unickpt.LoadOptions`.

    Raises:
        MissingPackage: MaxText is not installed, or is older than 0.2.4.

    Example:
        from unickpt.integrations import maxtext
        maxtext.install()
        from maxtext.trainers.pre_train import train
        train.main(["train", "base.yml", "run_name=one"])
    """
    modules = [_module(name) for name in _USE_VERSION_0]
    from unickpt.integrations.maxtext import handlers

    handlers.register(save_options, load_options)
    for module in modules:
        _replace(module, handlers.replacements())


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"maxtext.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or not f"maxtext.{name}".startswith(error.name):
            raise
        raise MissingPackage(
            f"there is no module maxtext.{name}: MaxText 0.2.4 or later must be installed"
        ) from error


def _replace(module: ModuleType, replacements: Mapping[int, Any]) -> None:
    """Replaces objects that a module has imported, under any name."""
    for name, value in list(vars(module).items()):
        if id(value) in replacements:
            setattr(module, name, replacements[id(value)])
