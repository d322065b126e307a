"""Orbax's tests of version 0's managers and checkpointers, with our handler for trees.

A checkout of google/orbax of August 2026 (commit 3ff7b24a), its folder `checkpoint`, whose own code
the tests import. They need chex, toolz and portpicker beside what our own tests need. All is
Orbax's but its handlers of trees: `StandardCheckpointHandler`, `PyTreeCheckpointHandler`, and what
their arguments stand for.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import socket
import tempfile
from typing import Any

FILES = (
    "orbax/checkpoint/checkpoint_manager_test.py",
    "orbax/checkpoint/checkpoint_utils_test.py",
    "orbax/checkpoint/_src/checkpointers/checkpointer_test.py",
    "orbax/checkpoint/_src/checkpointers/async_checkpointer_test.py",
)
REASONS: dict[str, str] = {
    "*::test_memory_limiting*": "replaces how Orbax limits its own reads and writes",
    "*::test_save_metrics": "asks for events of phases that only Orbax's handler has",
}


def prepare() -> None:
    """As Orbax's own runner does: eight devices, a job (of one process), and flags."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from absl import flags

    importlib.import_module("orbax.checkpoint._src.testing.multiprocess_test")  # defines flags
    folder = tempfile.mkdtemp()  # absl's own stays, and its tests want none of an earlier run
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    flags.FLAGS(["suite", f"--test_tmpdir={folder}"], known_only=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    jax.distributed.initialize(f"localhost:{port}", 1, 0)


def redirect() -> None:
    """Puts our handler in the place of Orbax's two."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint import checkpoint_args, test_utils

    from unickpt.integrations.orbax import Handler

    for kind in ("Standard", "PyTree"):

        class Default(Handler):  # type: ignore[misc]
            """Takes the options of Orbax's handler, which tune its files."""

            def __init__(self, *_: Any, pytree_metadata_options: Any = None, **__: Any) -> None:
                super().__init__(pytree_metadata_options=pytree_metadata_options)

        Default.__name__ = Default.__qualname__ = f"{kind}CheckpointHandler"
        module = f"orbax.checkpoint._src.handlers.{kind.lower()}_checkpoint_handler"
        for place in (ocp, ocp.handlers, importlib.import_module(module)):
            setattr(place, Default.__name__, Default)
        save, restore = (getattr(ocp.args, f"{kind}{verb}") for verb in ("Save", "Restore"))
        checkpoint_args.register_with_handler(Default, for_save=True)(save)
        checkpoint_args.register_with_handler(Default, for_restore=True)(restore)
    test_utils.PyTreeCheckpointHandler.__bases__ = (Default,)  # imported by `prepare`
