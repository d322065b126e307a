"""Orbax' tests of its version 1, at commit 3ff7b24a of google/orbax, of August 2026.

The checkout is the folder `checkpoint` of the repository, whose own code the tests import: later
releases have no tag. They need chex and portpicker beside what our own tests need. What is
redirected: the functions that save, load, describe and delete, and `training.Checkpointer`. What
only describes, as `Context`, `options` and handlers, is Orbax' own with ours as well; so tests of
these are not here, nor those of private functions, and of `partial`, which is refused.
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

_CLASSES = "asks for Orbax' private classes of metadata"
_FOLDER = "looks into Orbax' folder"
_INSIDE = "replaces Orbax' own insides, or asks for them"
_LENIENT = "is saved here, which Orbax refuses"
_OTHER = "Orbax refuses it; ours loads it, or has an error of its own"
_WORDS = "asks for the class or the words of Orbax' error"
REASONS: dict[str, str] = {
    # Metadata.
    "*CheckpointablesMetadataTest::test_checkpointables_metadata": _CLASSES,
    "*::test_checkpointables_metadata_safetensors": "is described here, which Orbax refuses",
    "*::CheckpointablesMetadataTest::*_incompatible_item": "items that Orbax leaves out are shown",
    "*MetadataTest::test_metadata_*_checkpointable_name": _CLASSES,
    "*MetadataTest::test_metadata_safetensors": _CLASSES,
    "*MetadataTest::test_metadata_with_incompatible_item": _CLASSES,
    "*MetadataTest::test_load_with_metadata": _CLASSES,
    "*::test_metadata_missing_sharding_corruption*": _CLASSES,
    "*::test_checkpointables_metadata_missing_sharding_corruption*": _CLASSES,
    "*metadata_non_critical_corruptions*": _CLASSES,
    "*V1CheckpointerCompatibilityTest::test_*metadata*": _CLASSES,
    # Folders that are damaged, old, or something else.
    "*_critical_corruptions*": _WORDS,
    "*CompatibilityTest::test_*_compatibility*": _OTHER,
    "*::test_load_incorrect_path*": "an item's own folder is loaded as a tree here",
    # Saving.
    "*::test_empty_array": _LENIENT,
    "*::test_empty_tree*": _LENIENT,
    "*::test_none_tree": _LENIENT,
    "*::test_save_unregistered_type": _LENIENT,
    "*::test_checkpointable_missing_load": _LENIENT,
    "*::test_invalid_leaf_types*": _WORDS,
    "*::test_save_checkpointables_invalid*": _WORDS,
    "*::SaveLoadTest::test_overwrites": "asks for the words of Orbax' log",
    "*::test_background_error": "both phases of a handler end within the call here",
    # Loading.
    "*::test_casting*": "integers are not loaded as floats, nor floats as integers",
    "*::test_flax_model": "tuples stay tuples; Orbax makes lists of them",
    "*::test_leaf_change_type": "an array to load into has the shape that is stored",
    "*Test::test_custom_checkpointables": _FOLDER,
    "*::test_load_and_broadcast": _WORDS,
    "*::test_mismatched_abstract_tree": _WORDS,
    "*::test_missing_keys": _WORDS,
    "*::test_partial_restore_with_placeholder*": _WORDS,
    # Insides and folders.
    "*SynchronizationTest*": _INSIDE,
    "*::test_async_save_overall_timeout*": _INSIDE,
    "*::test_primary_host_background_error*": _INSIDE,
    "*::test_save_async_raises_on_background_failure": _INSIDE,
    "*::test_cleanup_tmp_directories*": _INSIDE,
    "*::test_lightweight_initialize*": _INSIDE,
    "*::test_gcs_deletion_options": _INSIDE,
    "*DeprecationsTest*": _INSIDE,
    "*::test_checkpointable_with_stateful_checkpointable": _FOLDER,
    "*::test_async_directory_creation": _FOLDER,
    "*::test_save_async": _FOLDER,
    "*::test_save_checkpointables_ambiguous_resolution": _FOLDER,
    "*::test_save_checkpointables_deleted": _FOLDER,
    "*::test_subchunking": _FOLDER,
    "*CheckpointerTestBase*::test_close": _FOLDER,
    "*CheckpointerTestBase*::test_context_*": _FOLDER,
    "*CheckpointerTestBase*::test_reload": _FOLDER,
    "*CheckpointerTestBase*::test_step_name_format": _FOLDER,
    # Which steps are kept.
    "*::test_preservation_metrics*": "the newest step is always kept here",
    "*::test_preservation*": "replaces the clock of the module datetime, which ours has imported",
}


def prepare() -> None:
    """As Orbax' own runner does: eight devices, a job (of one process), and flags. Each of their
    files is a program of its own, which registers handlers."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from absl import flags

    importlib.import_module("orbax.checkpoint._src.testing.multiprocess_test")  # defines flags
    folder = tempfile.mkdtemp()  # absl' own stays, and its tests want none of an earlier run
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
