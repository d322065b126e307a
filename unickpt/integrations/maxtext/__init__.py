"""MaxText's checkpoints over unickpt: one call before its train loop.

    from unickpt.integrations import maxtext
    maxtext.install()

docs/integrations/maxtext.md says what differs.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from unickpt.errors import MissingPackage
from unickpt.integrations.maxtext import names, tiers

__all__ = ["install"]

_SAVING = (
    "common.checkpointing",
    "trainers.diloco.utils.spmd_diloco_checkpointing",
    "utils.layerwise_quantization",
    "utils.lora_utils",
    "utils.model_creation_utils",
)
"""MaxText's modules that save or load by Orbax."""


def install(unickpt: Mapping[str, Any] | None = None) -> None:
    """From here on, MaxText saves into and loads from checkpoints of unickpt.

    Its functions stay as they are; what they call of Orbax is replaced by
    `unickpt.integrations.orbax`, and the emergency and multi-tier managers by the same manager with
    a local tier. Steps that Orbax saved are listed and loaded as before. Call it before the loop
    begins; a second call replaces the arguments.

    Arguments:
        unickpt: further arguments of `unickpt.Checkpointer`, such as {"reuse": True} or
            {"options": unickpt.SaveOptions(...)}.

    Raises:
        MissingPackage: MaxText is not installed, or is older than 0.2.4.

    Example:
        from unickpt.integrations import maxtext
        maxtext.install()
        from maxtext.trainers.pre_train import train
        train.main(["train", "base.yml", "run_name=one"])
    """
    more = dict(unickpt or {})
    orbax = importlib.import_module("orbax.checkpoint")
    replaced = {id(orbax): names.version_0(more), id(orbax.v1): names.version_1(more)}
    for name in _SAVING:
        _replace(_module(name), replaced)
    tiers.install(
        _module("common.checkpointing"),
        _module("common.emergency_checkpointing"),
        _module("utils.train_utils"),
        _module("utils.max_utils"),
    )


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"maxtext.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or not f"maxtext.{name}".startswith(error.name):
            raise
        raise MissingPackage(
            f"there is no module maxtext.{name}: MaxText 0.2.4 or later must be installed"
        ) from error


def _replace(module: ModuleType, replaced: Mapping[int, names.Names]) -> None:
    """Replaces the modules that a module has imported, under whatever names."""
    for name, value in list(vars(module).items()):
        key = value.replaces if isinstance(value, names.Names) else id(value)
        if key in replaced:
            setattr(module, name, replaced[key])
