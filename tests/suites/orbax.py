"""Orbax's tests of version 0's manager and checkpointers.

A checkout of google/orbax of August 2026, its folder `checkpoint`, whose own code the tests import.
Redirected: the manager, the checkpointers, and the functions that look for steps; the
options, arguments, handlers and metadata of the tests stay Orbax's own.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile

FILES = (
    "orbax/checkpoint/checkpoint_manager_test.py",
    "orbax/checkpoint/checkpoint_utils_test.py",
    "orbax/checkpoint/_src/checkpointers/checkpointer_test.py",
    "orbax/checkpoint/_src/checkpointers/async_checkpointer_test.py",
)
REASONS: dict[str, str] = {}


def prepare() -> None:
    """As Orbax's own runner does: eight devices, a job (of one process), and flags."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from absl import flags
    from orbax.checkpoint._src.testing import multiprocess_test  # defines flags

    del multiprocess_test
    folder = tempfile.mkdtemp()  # absl's own stays, and its tests want none of an earlier run
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    flags.FLAGS(["suite", f"--test_tmpdir={folder}"], known_only=True)
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    jax.distributed.initialize(f"localhost:{port}", 1, 0)


def redirect() -> None:
    import importlib

    import orbax.checkpoint as theirs

    import unickpt.integrations.orbax as ours

    modules = {
        "checkpoint_manager": ["CheckpointManager", "StepAlreadyExistsError"],
        "checkpoint_managers": ["CheckpointManager"],
        "_src.checkpointers.checkpointer": ["Checkpointer"],
        "_src.checkpointers.async_checkpointer": ["AsyncCheckpointer"],
        "_src.checkpointers.standard_checkpointer": ["StandardCheckpointer"],
        "_src.checkpointers.pytree_checkpointer": ["PyTreeCheckpointer"],
    }
    for module, names in modules.items():
        for name in names:
            setattr(
                importlib.import_module(f"orbax.checkpoint.{module}"), name, getattr(ours, name)
            )
            setattr(theirs, name, getattr(ours, name))
    for name in ("checkpoint_steps", "checkpoint_steps_paths", "any_checkpoint_step"):
        setattr(theirs.utils, name, getattr(ours.utils, name))
    for name in ("checkpoints_iterator", "wait_for_new_checkpoint"):
        setattr(theirs.checkpoint_utils, name, getattr(ours.checkpoint_utils, name))
