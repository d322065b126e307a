"""Orbax's tests of version 1, with our handler for trees.

A checkout of google/orbax of August 2026 (commit 3ff7b24a), its folder `checkpoint`, whose own code
the tests import. They need chex and portpicker beside what our own tests need. All is Orbax's but
its handler of trees, `PyTreeHandler`. Tests of what has no trees in files, as `Context`, are not
here, nor those of private functions and of `partial`.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import socket
import tempfile
from typing import Any

_V1 = "orbax/checkpoint/experimental/v1"
FILES: tuple[str, ...] = (
    "-opython_classes=Test* *TestBase",  # which has its test class within
    f"{_V1}/_src/metadata/loading_test.py",
    f"{_V1}/_src/testing/compatibility/checkpointables_metadata_compatibility_test.py",
    f"{_V1}/_src/testing/compatibility/load_checkpointables_compatibility_test.py",
    f"{_V1}/_src/testing/compatibility/load_compatibility_test.py",
    f"{_V1}/_src/testing/compatibility/metadata_compatibility_test.py",
    f"{_V1}/_src/testing/v1_checkpointer_compatibility_test.py",
    f"{_V1}/_src/training/checkpointer_test_base.py",
    f"{_V1}/deprecations_test.py",
    f"{_V1}/_src/testing/save_load_test.py",  # the last, for it sets a mesh for all
)

_FOLDER = "looks for Orbax's files in the folder of a tree"
_KIND = "numbers are not cast from integers to floats, nor from floats to integers"
_LENIENT = "is saved here, which Orbax refuses"
REASONS: dict[str, str] = {
    "*test_save_async": _FOLDER,
    "*CheckpointerTestBase*::test_context_constructor_override": _FOLDER,
    "*::test_subchunking": "asks for sizes of chunks; SaveOptions has ours",
    "*::test_casting*": _KIND,
    "*::test_leaf_change_type": "an array to load into has the shape that is stored",
    "*::test_empty_array": _LENIENT,
    "*::test_empty_tree*": _LENIENT,
    "*::test_load_and_broadcast": "asks for an error of an option that tunes how Orbax reads",
    "*::test_async_save_overall_timeout_host_long_finalize": "replaces a private function",
    "*_missing_sharding_corruption*": "a file of Orbax's that is missing leaves one device",
    "*::test_load_critical_corruptions*": "asks for the words of TensorStore's error",
    "*::test_load_compatibility361": "registers the handler without the name of Orbax's",
}


def prepare() -> None:
    """As Orbax's own runner does: eight devices, a job (of one process), and flags. Each of their
    files is a program of its own, which registers handlers."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from absl import flags

    importlib.import_module("orbax.checkpoint._src.testing.multiprocess_test")  # defines flags
    folder = tempfile.mkdtemp()  # absl's own stays, and its tests want none of an earlier run
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    flags.FLAGS(["suite", f"--test_tmpdir={folder}"], known_only=True)
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    jax.distributed.initialize(f"localhost:{port}", 1, 0)
    handlers = importlib.import_module("orbax.checkpoint.experimental.v1.handlers")
    register = handlers.register_handler

    def once(handler: Any, *more: Any, **options: Any) -> Any:
        registered = [each for each, _ in handlers.global_registry().get_all_entries()]
        return handler if handler in registered else register(handler, *more, **options)

    handlers.register_handler = once


def redirect() -> None:
    """Puts our handler in the place of Orbax's handler of trees."""
    ours = importlib.import_module("unickpt.integrations.orbax").v1_registry()
    handlers = importlib.import_module("orbax.checkpoint.experimental.v1.handlers")
    default = handlers.global_registry()
    default._registry[:] = ours.get_all_entries()
    default._secondary_typestrs.clear()
    default._secondary_typestrs.update(ours._secondary_typestrs)
    module = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler"
    for place in (handlers, importlib.import_module(module)):
        place.PyTreeHandler = ours.get("state")
