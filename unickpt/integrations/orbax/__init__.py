"""`orbax.checkpoint` over unickpt: change one import.

    import unickpt.integrations.orbax as ocp  # instead of: import orbax.checkpoint as ocp

`CheckpointManager` has the surface of Orbax's version 0; `unickpt.integrations.orbax.v1` is for
`orbax.checkpoint.v1`. Orbax need not be installed; its own `args`, options and policies are taken
as well. docs/integrations/orbax.md says what differs, and what is refused.
"""

from unickpt.integrations.orbax import args, checkpoint_utils
from unickpt.integrations.orbax.args import ArrayRestoreArgs, RestoreArgs, SaveArgs
from unickpt.integrations.orbax.handlers import (
    ArrayCheckpointHandler,
    JsonCheckpointHandler,
    PyTreeCheckpointHandler,
    StandardCheckpointHandler,
)
from unickpt.integrations.orbax.items import PLACEHOLDER
from unickpt.integrations.orbax.manager import CheckpointManager
from unickpt.integrations.orbax.options import (
    AsyncOptions,
    CheckpointManagerOptions,
    FileOptions,
)
from unickpt.integrations.orbax.policies import MultiprocessingOptions
from unickpt.integrations.orbax.run import StepAlreadyExistsError, StepNotFoundError

__all__ = [
    "PLACEHOLDER",
    "ArrayCheckpointHandler",
    "ArrayRestoreArgs",
    "AsyncOptions",
    "CheckpointManager",
    "CheckpointManagerOptions",
    "FileOptions",
    "JsonCheckpointHandler",
    "MultiprocessingOptions",
    "PyTreeCheckpointHandler",
    "RestoreArgs",
    "SaveArgs",
    "StandardCheckpointHandler",
    "StepAlreadyExistsError",
    "StepNotFoundError",
    "args",
    "checkpoint_utils",
]
