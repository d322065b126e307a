"""`orbax.checkpoint` over unickpt: change one import.

    import unickpt.integrations.orbax as ocp  # instead of: import orbax.checkpoint as ocp

`CheckpointManager` has the surface of Orbax's version 0; `unickpt.integrations.orbax.v1` is for
`orbax.checkpoint.v1`. Orbax need not be installed; its own `args`, options and policies are taken
as well. What else Orbax's module has and neither saves nor restores, such as `type_handlers` and
`multihost`, is Orbax's own here, where it is installed. docs/integrations/orbax.md says what
differs, and what is refused.
"""

from typing import Any

from unickpt.integrations.orbax import (
    args,
    checkpoint_managers,
    checkpoint_utils,
    checkpointers,
    handlers,
    names,
    utils,
)
from unickpt.integrations.orbax.args import ArrayRestoreArgs, RestoreArgs, SaveArgs
from unickpt.integrations.orbax.checkpointers import (
    AsyncCheckpointer,
    Checkpointer,
    PyTreeCheckpointer,
    StandardCheckpointer,
)
from unickpt.integrations.orbax.handlers import (
    ArrayCheckpointHandler,
    CompositeCheckpointHandler,
    JaxRandomKeyCheckpointHandler,
    JsonCheckpointHandler,
    NumpyRandomKeyCheckpointHandler,
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
    "AsyncCheckpointer",
    "Checkpointer",
    "PyTreeCheckpointer",
    "StandardCheckpointer",
    "CompositeCheckpointHandler",
    "JaxRandomKeyCheckpointHandler",
    "NumpyRandomKeyCheckpointHandler",
    "checkpoint_managers",
    "checkpointers",
    "handlers",
    "utils",
    "args",
    "checkpoint_utils",
]

# Where Orbax's own modules have these names.
checkpoint_args, checkpoint_manager = args, checkpoint_managers

_INSTEAD = {
    **handlers._INSTEAD,
    "experimental": "unickpt.integrations.orbax.v1; for the emergency managers "
    'CheckpointManager(..., unickpt={"local": ...})',
}


def __getattr__(name: str) -> Any:
    if name == "v1":  # which is imported when it is asked for
        import unickpt.integrations.orbax.v1 as v1

        return v1
    if name in ("Handler", "registry"):  # which need Orbax
        from unickpt.integrations.orbax import handler

        return getattr(handler, name)
    if name == "v1_registry":
        from unickpt.integrations.orbax.v1_handler import v1_registry

        return v1_registry
    return names.of_orbax("", name, _INSTEAD)
