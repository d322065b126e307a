"""Orbax' tests of its version 1, at commit 3ff7b24a of google/orbax, the last before 0.12.5.

The checkout is the folder `checkpoint` of the repository: its own sources are what is tested, for
later releases have no tag. It needs chex and portpicker beside what our own tests need. What is
redirected: the functions that save, load, describe and delete, and `training.Checkpointer`. What
only describes, as `Context` and `options`, is Orbax' own with ours as well.
"""

from __future__ import annotations

import importlib
from typing import Any

_V1 = "orbax/checkpoint/experimental/v1"
FILES: tuple[str, ...] = (
    "-opython_classes=Test* *Suite *TestBase",  # they keep test classes in classes
    f"{_V1}/_src/context/context_test.py",
    f"{_V1}/_src/handlers/registration_test.py",
    f"{_V1}/_src/layout/registry_test.py",
    f"{_V1}/_src/loading/layout_loading_test.py",
    f"{_V1}/_src/metadata/loading_test.py",
    f"{_V1}/_src/partial/saving_test.py",
    f"{_V1}/_src/testing/compatibility/checkpointables_metadata_compatibility_test.py",
    f"{_V1}/_src/testing/compatibility/load_checkpointables_compatibility_test.py",
    f"{_V1}/_src/testing/compatibility/load_compatibility_test.py",
    f"{_V1}/_src/testing/compatibility/metadata_compatibility_test.py",
    f"{_V1}/_src/testing/import_symbols_test.py",
    f"{_V1}/_src/testing/import_test.py",
    f"{_V1}/_src/testing/save_load_test.py",
    f"{_V1}/_src/testing/v1_checkpointer_compatibility_test.py",
    f"{_V1}/_src/training/checkpointer_test_base.py",
    f"{_V1}/deprecations_test.py",
)
REASONS: dict[str, str] = {}


def prepare() -> None:
    """Their tests are programs of their own, each of which parses flags and registers handlers."""
    from absl import flags

    flags.FLAGS.mark_as_parsed()
    handlers = importlib.import_module("orbax.checkpoint.experimental.v1.handlers")
    register = handlers.register_handler

    def once(handler: Any, *more: Any, **options: Any) -> Any:
        registered = [each for each, _ in handlers.global_registry().get_all_entries()]
        return handler if handler in registered else register(handler, *more, **options)

    handlers.register_handler = once


def redirect() -> None:
    """What their tests import as `ocp`."""
    theirs = importlib.import_module("orbax.checkpoint.experimental.v1")
    ours = importlib.import_module("unickpt.integrations.orbax.v1")
    for name in ours.__all__:
        if name != "training" and hasattr(theirs, name):
            setattr(theirs, name, getattr(ours, name))
    # Tests take it from the private module which defines it.
    layout = importlib.import_module(f"{theirs.__name__}._src.layout.checkpoint_layout")

    class InvalidLayoutError(ours.errors.InvalidLayoutError, layout.InvalidLayoutError):  # type: ignore[misc,name-defined]
        pass

    ours.errors.InvalidLayoutError = InvalidLayoutError
    for name in ours.training.__all__:
        setattr(theirs.training, name, getattr(ours.training, name))
