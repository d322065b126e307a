"""A checkpoint manager for torchtitan, over unickpt's Checkpointer.

    from unickpt.integrations.torchtitan import CheckpointManager  # in the function of the config

or, without touching a config, `--override.imports unickpt.integrations.torchtitan.manager`.
docs/integrations/torchtitan.md lists the differences.
"""

from __future__ import annotations

from typing import Any

from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.config.override import derive, override

from unickpt.integrations.torchtitan.checkpoint_manager import (
    TorchtitanCheckpointManager as CheckpointManager,
)

__all__ = ["CheckpointManager", "manager"]


def manager(config: BaseCheckpointManager.Config, **settings: Any) -> CheckpointManager.Config:
    """Puts this manager in place of the one that a configuration has, with the same settings.

    Arguments:
        config: of any of torchtitan's managers.
        settings: others than in `config`.

    Example, on the command line:
        --override.imports 'unickpt.integrations.torchtitan.manager={"local": "/dev/shm/run"}'
    """
    result: CheckpointManager.Config = derive(config, CheckpointManager.Config, **settings)
    return result


override(target=BaseCheckpointManager.Config, description="checkpoints by unickpt")(manager)
