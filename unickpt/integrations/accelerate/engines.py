"""An Accelerator with DeepSpeed: its engine saves and loads as with `use_unickpt`, beside what else
the Accelerator has prepared."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator, DistributedType

EXCLUDES, STRICT = "exclude_frozen_parameters", "load_module_strict"
"""Arguments of `DeepSpeedEngine.save_checkpoint` and `load_checkpoint`, which `save_state` and
`load_state` take, too."""


def engine_of(accelerator: Accelerator) -> Any:
    """The engine that an Accelerator has prepared; None without DeepSpeed."""
    if accelerator.distributed_type is not DistributedType.DEEPSPEED:
        return None
    return accelerator._models[0]


def schedulers(accelerator: Accelerator) -> list[Any]:
    """Those that the engine does not have itself."""
    from accelerate.utils import DeepSpeedSchedulerWrapper

    every = accelerator._schedulers
    return [each for each in every if not isinstance(each, DeepSpeedSchedulerWrapper)]
