"""Names of `orbax.checkpoint` that MaxText, T5X and Flax use: each is there, ours or Orbax's."""

from __future__ import annotations

import importlib
import inspect
from functools import reduce

import pytest

pytest.importorskip("jax")
import unickpt.integrations.orbax as ours

pytestmark = pytest.mark.integration

# Of MaxText at 2026, T5X at 2024, Flax 0.12, by `grep`.
SAVING = """
ArrayCheckpointHandler ArrayRestoreArgs AsyncCheckpointer AsyncOptions CheckpointManager
CheckpointManagerOptions Checkpointer CompositeCheckpointHandler JsonCheckpointHandler PLACEHOLDER
PyTreeCheckpointHandler PyTreeCheckpointer RestoreArgs SaveArgs StandardCheckpointHandler
StandardCheckpointer args.CheckpointArgs args.Composite args.JsonRestore args.JsonSave
args.PyTreeRestore args.PyTreeSave args.StandardRestore args.StandardSave
args.register_with_handler checkpoint_manager.CheckpointManagerOptions
checkpoint_managers.CheckpointManager checkpoint_utils.checkpoints_iterator
checkpoint_utils.construct_restore_args checkpoint_utils.wait_for_new_checkpoint
checkpointers.PyTreeCheckpointer handlers.PyTreeCheckpointHandler
options.MultiprocessingOptions utils.checkpoint_steps
utils.is_checkpoint_finalized
"""
OTHERS = """
checkpointers.AbstractCheckpointer options.MemoryLimitOptions
CheckpointHandler Future RestoreTransform Transform apply_transformations logging.AbstractLogger
metadata.ArrayMetadata metadata.tree.ValueMetadataEntry
multihost.initialize_distributed_to_device_ids multihost.initialize_runtime_to_distributed_ids
multihost.sync_global_processes pathways step.standard_name_format
tree.from_flat_dict tree.get_param_names tree.to_flat_dict type_handlers.ArrayRestoreArgs
type_handlers.NumpyHandler type_handlers.ParamInfo type_handlers.SingleReplicaArrayHandler
type_handlers.SingleReplicaArrayRestoreArgs type_handlers.get_ts_context
type_handlers.is_ocdbt_checkpoint type_handlers.is_supported_empty_value
type_handlers.register_type_handler utils.TMP_DIR_SUFFIX utils.get_save_directory
utils.leaf_is_placeholder utils.name_from_leaf_placeholder utils.record_saved_duration
utils.to_flat_dict
"""


def found(module: object, name: str) -> object:
    return reduce(getattr, name.split("."), module)


def test_every_name_that_saves_or_restores_is_ours() -> None:
    for name in SAVING.split():
        here = found(ours, name)
        home = here.__module__ if hasattr(here, "__module__") else type(here).__module__
        assert home.startswith("unickpt.") or here is ..., name


def test_every_other_name_is_that_of_orbax() -> None:
    theirs = pytest.importorskip("orbax.checkpoint")
    for name in OTHERS.split():
        assert found(ours, name) is found(theirs, name), name


def test_all_that_orbax_offers_is_there_or_says_what_to_use() -> None:
    theirs = pytest.importorskip("orbax.checkpoint")
    missing = {}
    for name in sorted(set(dir(theirs)) - set(dir(object))):
        if name.startswith("_") or name in ("contextlib", "functools"):
            continue
        try:
            getattr(ours, name)
        except AttributeError as error:
            missing[name] = str(error)
    assert sorted(missing) == [
        "BasePyTreeCheckpointHandler", "ProtoCheckpointHandler", "experimental",
    ]  # fmt: skip
    assert all("; use " in message for message in missing.values())
    # No class of Orbax's that saves comes through.
    for name in dir(theirs):
        here = getattr(ours, name, None)
        if inspect.isclass(here) and not inspect.isabstract(here):
            assert not (hasattr(here, "save") and here.__module__.startswith("orbax")), name


def test_names_that_nobody_has() -> None:
    for module in ("", ".args", ".utils", ".handlers", ".checkpoint_utils"):
        here = importlib.import_module(f"unickpt.integrations.orbax{module}")
        with pytest.raises(AttributeError, match=r"neither .* nor orbax\.checkpoint.* 'Nonsense'"):
            _ = here.Nonsense
    with pytest.raises(AttributeError, match="PyTreeCheckpointHandler"):
        _ = ours.handlers.BasePyTreeCheckpointHandler
