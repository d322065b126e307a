"""`orbax.checkpoint.v1.training`: a `Checkpointer` over `unickpt.Checkpointer`."""

from __future__ import annotations

from types import SimpleNamespace

from unickpt.integrations.orbax import policies
from unickpt.integrations.orbax.described import RootMetadata
from unickpt.integrations.orbax.run import StepAlreadyExistsError, StepNotFoundError
from unickpt.integrations.orbax.v1_checkpointer import CheckpointMetadata
from unickpt.integrations.orbax.v1_checkpointer import OrbaxCheckpointer as Checkpointer

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
