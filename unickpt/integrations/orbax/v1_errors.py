"""`orbax.checkpoint.v1.errors`: the errors that programs catch."""

from __future__ import annotations

from typing import Any

from unickpt.errors import CheckpointNotFound
from unickpt.integrations.orbax import v1_names

__all__ = ["DeletionInProgressError", "DeletionRecoveryError", "InvalidLayoutError"]


class InvalidLayoutError(CheckpointNotFound, ValueError):
    """There is no checkpoint at the path."""


class DeletionInProgressError(RuntimeError):
    """Never raised: who deletes waits until that is done."""


class DeletionRecoveryError(RuntimeError):
    """Never raised: what a deletion that was killed has left is not a checkpoint any more."""


def __getattr__(name: str) -> Any:
    return v1_names.resolve("errors", name, __all__)
