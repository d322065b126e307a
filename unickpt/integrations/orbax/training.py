"""`orbax.checkpoint.v1.training`: a `Checkpointer` over `unickpt.Checkpointer`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from unickpt.integrations.orbax import policies, v1_names
from unickpt.integrations.orbax.described import RootMetadata
from unickpt.integrations.orbax.run import StepAlreadyExistsError, StepNotFoundError
from unickpt.integrations.orbax.v1_checkpointer import OrbaxCheckpointer as Checkpointer
from unickpt.integrations.orbax.v1_responses import StepCheckpointMetadata as CheckpointMetadata

__all__ = [
    "CheckpointMetadata",
    "Checkpointer",
    "RootMetadata",
    "errors",
    "preservation_policies",
    "save_decision_policies",
]

errors = SimpleNamespace(
    StepAlreadyExistsError=StepAlreadyExistsError, StepNotFoundError=StepNotFoundError
)
save_decision_policies = preservation_policies = policies


def __getattr__(name: str) -> Any:
    return v1_names.resolve("training", name, __all__)
