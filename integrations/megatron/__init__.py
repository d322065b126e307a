"""Strategies for Megatron-Core's `dist_checkpointing`: its jobs save into checkpoints of unickpt.

    from unickpt.integrations.megatron import LoadStrategy, SaveStrategy

    dist_checkpointing.save(state, folder, SaveStrategy(optimizer))
    dist_checkpointing.load(state, folder, LoadStrategy(optimizer))

`latest(run)` is the folder of the newest checkpoint of a run that is complete.

docs/integrations/megatron.md describes the stored state and the differences.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from unickpt.integrations.megatron.common import latest
from unickpt.integrations.megatron.loading import LoadStrategy
from unickpt.integrations.megatron.saving import BACKEND, VERSION, SaveStrategy
from unickpt.integrations.megatron.waiting import AsyncCallsQueue

__all__ = ["AsyncCallsQueue", "LoadStrategy", "SaveStrategy", "latest"]

_BASE = "megatron.core.dist_checkpointing.strategies.base"


def _register() -> None:
    """Registers our strategies with Megatron, until 0.16, so that `dist_checkpointing.load(state,
    folder)` finds them by `metadata.json`."""
    if find_spec(_BASE) is None:
        return
    base = import_module(_BASE)
    action = base.StrategyAction
    base.register_default_strategy(action.LOAD_SHARDED, BACKEND, VERSION, LoadStrategy())
    base.register_default_strategy(action.SAVE_SHARDED, BACKEND, VERSION, SaveStrategy())


_register()
