"""`orbax.checkpoint.checkpoint_managers`: the manager, its options and policies."""

from __future__ import annotations

from typing import Any

from unickpt.integrations.orbax import names, policies
from unickpt.integrations.orbax.manager import CheckpointManager
from unickpt.integrations.orbax.options import AsyncOptions, CheckpointManagerOptions
from unickpt.integrations.orbax.run import StepAlreadyExistsError

__all__ = [
    "AsyncOptions",
    "CheckpointManager",
    "CheckpointManagerOptions",
    "StepAlreadyExistsError",
    "preservation_policy",
    "save_decision_policy",
]

preservation_policy = save_decision_policy = policies


def __getattr__(name: str) -> Any:
    if hasattr(policies, name):
        return getattr(policies, name)
    return names.of_orbax("checkpoint_managers", name)
