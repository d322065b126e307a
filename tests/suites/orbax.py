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
_INSIDES = "mocks or asks for Orbax's insides"
_FOLDER = "looks into the step's folder, or at files of Orbax's in it"
_SNAPSHOTS = "looks for Orbax's folder of snapshots, in which it keeps what is read from removal"
_CLASSES = "compares with Orbax's own classes of metadata"
_MOVED = "todelete_subdir=, which is refused by name"
_NEWEST = "the newest step is always kept; a step goes when the next save is committed"
_CLOCK = "replaces the clock, or sets private times of steps"
_LENIENT = "asks for an error where a save or a restore does what it says"
REASONS: dict[str, str] = {
    "*CheckpointManagerTest::test_async_error_*": _INSIDES,
    "*CheckpointManagerTest::test_async_finalize": _INSIDES,
    "*test_checkpoint_args_mismatch_item_handlers": _LENIENT,
    "*test_configure_atomicity": "temporary_path_class=, which is refused by name",
    "*test_custom_metadata_with_*": _FOLDER,
    "*test_default_init_*": _INSIDES,
    "*test_default_item_metadata_with_new_checkpoint_manager": _INSIDES,
    "*CheckpointManagerTest::test_delete": _FOLDER,
    "*test_delete_with_todelete_subdir": _MOVED,
    "*test_empty_metadata": _INSIDES,
    "*test_file_format*": _FOLDER,
    "*test_init_telemetry_*": _INSIDES,
    "*test_item_metadata_access_no_handlers_*": "asks that nothing is known without a handler",
    "*test_legacy_api*": _INSIDES,
    "*test_legacy_handler_default_item": _INSIDES,
    "*test_lightweight_intialize_*": _INSIDES,
    "*test_max_to_keep_zero*": "max_to_keep=0, which is refused by name",
    "*CheckpointManagerTest::test_metadata": _CLASSES,
    "*test_metadata_finalize_*": _INSIDES,
    "*test_metadata_save_*": _INSIDES,
    "*test_partial_restore_with_placeholder": "asks for the words of an error",
    "*test_removes_old_saves_time_interval*": _CLOCK,
    "*test_removes_old_saves*": _MOVED,
    "*test_root_metadata_*": "metadata of a run are stored with its first step, not before",
    "*test_save_and_restore_*_logger": "reads lines that Orbax logs",
    "*test_save_best_*rename": _MOVED,
    "*test_save_best_*metrics1": _MOVED,
    "*test_save_best_*": _NEWEST,
    "*test_save_default_item*": _INSIDES,
    "*test_save_gcs_with_unfinalized_checkpoints": _FOLDER,
    "*test_save_preempted*": _INSIDES,
    "*CheckpointManagerTest::test_save_restore2": _INSIDES,
    "*test_save_restore_default_item_legacy_init*": _INSIDES,
    "*test_save_restore_gcs*": _FOLDER,
    "*test_save_restore_local_fs*": "primary_host=None, which is refused by name",
    "*test_save_root_metadata*": _FOLDER,
    "*test_save_step_metadata": _CLASSES,
    "*test_slow_save_logs_warning": _INSIDES,
    "*test_timeout_fn": "counts the calls of timeout_fn",
    "*test_unlock_existing": _SNAPSHOTS,
    "*test_snapshotting_*": _SNAPSHOTS,
    "*test_wait_for_new_checkpoint*": _SNAPSHOTS,
    "*test_composite_handler_metadata": _CLASSES,
    "*test_gcs": _FOLDER,
    "*test_memory_limiting*": _INSIDES,
    "*test_save_metrics": _INSIDES,
    "*test_save_restore_named_tuple_*": "asks that the types of named tuples are lost",
    "*test_async_save": _FOLDER,
    "*test_async_save_overall_timeout_*": _INSIDES,
    "*test_async_save_with_async_directory_creation": _FOLDER,
    "*test_async_step_metadata_save": "checkpoint_metadata_store=, which is refused by name",
    "*test_primary_host_background_error*": _INSIDES,
}


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
