"""What MaxText's functions call of Orbax, call by call, as in its sources of 0.2.4 (version 0) and
0.2.5 (version 1); `test_maxtext.py` runs MaxText itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import unickpt
from unickpt.errors import LoadMismatch
from unickpt.integrations.maxtext import names, tiers

ocp = pytest.importorskip("orbax.checkpoint")
grain = pytest.importorskip("grain.python")
P: Any = PartitionSpec


def mesh(count: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:count]), ("fsdp",))


def state(count: int = 4, aux: bool = True) -> dict[str, Any]:
    """As MaxText stores a state of Flax NNX."""

    def put(x: Any, *spec: Any) -> Any:
        return jax.device_put(x, NamedSharding(mesh(count), P(*spec)))

    kernel = put(jnp.arange(56.0).reshape(8, 7), "fsdp")
    found: dict[str, Any] = {
        "params": {"params": {"decoder": {"kernel": kernel, "scale": put(jnp.arange(7.0) / 3)}}},
        "opt_state": [{"count": put(jnp.int32(3)), "mu": {"params": {"k": kernel * 2}}}, None],
        "step": put(jnp.int32(3)),
    }
    if aux:
        found["nnx_aux"] = {"model": {"layers": {0: {"rngs": put(jnp.uint32([5, 6]))}}}}
    return found


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def check(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


class Iterators:
    """MaxText's GrainCheckpointHandler: files by the number of the process and of processes."""

    def save(self, directory: Any, item: Any = None, args: Any = None) -> None:
        for iterator, index, count in args.item:
            path = directory / f"process_{index}-of-{count}.json"
            path.write_text(json.dumps(iterator.get_state()))

    def restore(self, directory: Any, item: Any = None, args: Any = None) -> Any:
        for iterator, index in zip(args.item, args.process_index, strict=True):
            path = directory / f"process_{index}-of-{args.process_count}.json"
            iterator.set_state(json.loads(path.read_text()))
        return args.item


def iterators() -> list[Any]:
    return [iter(grain.MapDataset.range(i, 100, 2).to_iter_dataset()) for i in (0, 1)]


def version_0_manager(v0: Any, path: Path, keep: int = 10, period: int = 2) -> Any:
    """`create_orbax_checkpoint_manager` of 0.2.4."""
    handler = ocp.PyTreeCheckpointHandler(
        restore_concurrent_gb=96, save_concurrent_gb=96, use_ocdbt=True, use_zarr3=True
    )
    save = ocp.checkpoint_managers.FixedIntervalPolicy(interval=period)
    return v0.CheckpointManager(
        path,
        item_names=("items", "iter"),
        item_handlers={"items": handler, "iter": Iterators()},
        options=ocp.CheckpointManagerOptions(
            create=True,
            enable_async_checkpointing=True,
            save_decision_policy=save,
            preservation_policy=ocp.checkpoint_managers.LatestN(keep),
            async_options=None,
            todelete_subdir=None,
            todelete_full_path=None,
        ),
        logger=None,
    )


def version_0_args(tree: Any, data: list[Any]) -> Any:
    """As `save_checkpoint` builds them."""
    size = 2 << 30
    items = ocp.args.PyTreeSave(
        item=tree,
        save_args=jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=size), tree),
        ocdbt_target_data_file_size=size,
    )
    iterators = [(each, i, len(data)) for i, each in enumerate(data)]
    return ocp.args.Composite(items=items, iter=SimpleNamespace(item=iterators))


def restore_args(tree: Any, single_replica: bool) -> Any:
    """`map_to_pspec` of `load_state_if_possible`."""

    def of(leaf: Any) -> Any:
        if not single_replica:
            return ocp.type_handlers.ArrayRestoreArgs(sharding=leaf.sharding)
        return ocp.type_handlers.SingleReplicaArrayRestoreArgs(
            sharding=leaf.sharding,
            single_replica_sharding=leaf.sharding,
            global_shape=leaf.shape,
            dtype=leaf.dtype,
        )

    return jax.tree.map(of, tree)


@pytest.mark.parametrize("single_replica", [False, True])
def test_version_0_saves_a_step_and_restores_it_onto_another_mesh(
    tmp_path: Path, single_replica: bool
) -> None:
    data = iterators()
    assert [next(data[0]), next(data[0]), next(data[1])] == [0, 2, 1]
    manager = version_0_manager(names.version_0({}), tmp_path)
    assert manager.latest_step() is None
    for step in range(4):
        saved = manager.save(step, args=version_0_args(state(), data), force=False)
        assert saved == (step % 2 == 0)
    assert manager.all_steps() == [0, 2]
    assert not manager.reached_preemption(3)
    manager.wait_until_finished()
    manager.close()

    manager = version_0_manager(names.version_0({}), tmp_path)
    step = manager.latest_step()
    directory = manager.directory / str(step) / "iter"
    assert directory.exists()
    assert not (manager.directory / str(step) / "other").exists()
    assert not (manager.directory / "7" / "iter").exists()
    assert len(list(directory.glob("process_*-of-*.json"))) == 2
    like = abstract(state(2))
    items = ocp.args.PyTreeRestore(
        item=like, restore_args=restore_args(like, single_replica), partial_restore=True
    )
    again = iterators()
    which = SimpleNamespace(item=again, process_index=[0, 1], process_count=2)
    restored = manager.restore(step, args=ocp.args.Composite(items=items, iter=which))
    check(restored["items"], state(2))
    assert [next(again[0]), next(again[1])] == [4, 3]
    manager.close()


def version_1_context() -> Any:
    """`checkpoint_context.build_context`."""
    context = ocp.v1.Context()
    context.array.saving.use_ocdbt = context.array.saving.use_zarr3 = True
    context.array.saving.ocdbt_target_data_file_size = 2 << 30
    context.array.saving.storage_options.chunk_byte_size = 2 << 30
    context.memory.write_concurrent_bytes = context.memory.read_concurrent_bytes = 96 * 10**9
    context.pytree.loading.partial_load = True
    return context


def version_1_checkpointer(v1: Any, path: Path) -> Any:
    """`create_orbax_checkpoint_manager` of 0.2.5."""
    manager = v1.training.Checkpointer(
        path,
        context=version_1_context(),
        save_decision_policy=ocp.v1.training.save_decision_policies.FixedIntervalPolicy(interval=2),
        preservation_policy=ocp.v1.training.preservation_policies.LatestN(10),
    )
    manager.use_async = True
    return manager


class Stateful:
    """MaxText's GrainCheckpointable_v1, of lists of iterators."""

    def __init__(self, items: list[Any], count: int | None = None) -> None:
        self.items, self.count = items, count

    async def save(self, directory: Any) -> Any:
        found = {f"process_{i}-of-2.json": each.get_state() for i, each in enumerate(self.items)}

        async def write() -> None:
            path = await directory.await_creation()
            for name, each in found.items():
                (path / name).write_text(json.dumps(each))

        return write()

    async def load(self, directory: Any) -> Any:
        async def read() -> None:
            for i, each in enumerate(self.items):
                text = (directory / f"process_{i}-of-{self.count}.json").read_text()
                each.set_state(json.loads(text))

        return read()


def test_version_1_saves_a_step_and_restores_it_onto_another_mesh(tmp_path: Path) -> None:
    data = iterators()
    next(data[0])
    manager = version_1_checkpointer(names.version_1({}), tmp_path)
    assert manager.latest is None
    for step in range(4):
        saved = manager.save_checkpointables_async(
            step,
            {"items": state(), "iter": Stateful(data)},
            force=False,
            custom_metadata={"scan_layers": True},
        )
        assert (saved is not None) == (step % 2 == 0)
    assert [each.step for each in manager.checkpoints] == [0, 2]
    manager.wait()
    manager.close()

    v1 = names.version_1({})
    manager = version_1_checkpointer(v1, tmp_path)
    assert isinstance(manager, v1.training.Checkpointer)
    step = manager.latest.step
    directory = manager.directory / str(step) / "iter"
    assert directory.exists()
    count = len(list(directory.glob("process_*-of-*.json")))
    again = iterators()
    like = {"items": abstract(state(2)), "iter": Stateful(again, count)}
    restored = manager.load_checkpointables(step, like)
    check(restored["items"], state(2))
    assert [next(again[0]), next(again[1])] == [2, 1]
    with pytest.raises(FileExistsError):  # which MaxText catches
        manager.save_checkpointables_async(2, {"items": state()}, force=True)
    manager.close()
    assert v1.checkpointables_metadata(tmp_path / "step_2").custom_metadata == {"scan_layers": True}


@pytest.mark.parametrize("version", [0, 1])
def test_what_older_versions_did_not_save_stays_abstract_and_a_missing_weight_is_an_error(
    tmp_path: Path, version: int
) -> None:
    like, short = abstract(state()), state(aux=False)

    def load(like: Any) -> Any:
        if version == 1:
            with version_1_checkpointer(names.version_1({}), tmp_path) as manager:
                return manager.load_checkpointables(0, {"items": like})["items"]
        how = restore_args(like, False)
        items = ocp.args.PyTreeRestore(item=like, restore_args=how, partial_restore=True)
        with version_0_manager(names.version_0({}), tmp_path) as manager:
            return manager.restore(0, args=ocp.args.Composite(items=items))["items"]

    if version == 1:
        with version_1_checkpointer(names.version_1({}), tmp_path) as manager:
            manager.save_checkpointables(0, {"items": short})
    else:
        with version_0_manager(names.version_0({}), tmp_path) as manager:
            manager.save(0, args=version_0_args(short, []))
    found = load(like)
    assert found["nnx_aux"] == like["nnx_aux"]
    check({**found, "nnx_aux": None}, {**short, "nnx_aux": None})
    like["params"]["params"]["more"] = like["params"]["params"]["decoder"]["kernel"]
    with pytest.raises(LoadMismatch, match="params/params/more"):
        load(like)


@pytest.mark.parametrize("version", [0, 1])
def test_parameters_are_loaded_from_the_path_of_a_step(tmp_path: Path, version: int) -> None:
    """`load_params_from_path`."""
    with version_0_manager(names.version_0({}), tmp_path) as manager:
        manager.save(0, args=version_0_args(state(), iterators()))
    like = {"params": abstract(state(2)["params"])}
    if version == 0:
        v0 = names.version_0({})
        checkpointer = v0.Checkpointer(v0.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
        path = tmp_path / "step_0" / "items"
        assert "params" in checkpointer.metadata(path).item_metadata.tree
        how = v0.checkpoint_utils.construct_restore_args(like)
        found = checkpointer.restore(path, item=like, transforms={}, restore_args=how)
    else:
        v1 = names.version_1({})
        stored = v1.metadata(tmp_path / "step_0", checkpointable_name=None).metadata
        kernel = stored["params"]["params"]["decoder"]["kernel"]
        assert kernel.shape == (8, 7)
        with version_1_context():
            found = v1.load(tmp_path / "step_0", like, checkpointable_name=None)
    check(found, {"params": state(2)["params"]})


def test_parameters_that_were_saved_alone_are_replaced_and_loaded(tmp_path: Path) -> None:
    """`save_params_to_path` of both versions."""
    params = state()["params"]
    v0, v1 = names.version_0({}), names.version_1({})
    for _ in range(2):
        v0.PyTreeCheckpointer(use_ocdbt=True, use_zarr3=True).save(
            tmp_path / "zero", {"params": params}, force=True
        )
        with version_1_context():
            v1.save(
                tmp_path / "one", {"params": params}, checkpointable_name="items", overwrite=True
            )
    for name in ("zero", "one"):
        with version_1_context():
            found = v1.load(tmp_path / name, {"params": abstract(params)}, checkpointable_name=None)
        check(found, {"params": params})


# --- two tiers -----------------------------------------------------------------------------------


def config(tmp_path: Path, **given: Any) -> SimpleNamespace:
    settings: dict[str, Any] = {
        "enable_checkpointing": True,
        "enable_emergency_checkpoint": False,
        "enable_multi_tier_checkpointing": False,
        "colocated_python_checkpointing": False,
        "enable_autocheckpoint": False,
        "async_checkpointing": True,
        "local_checkpoint_directory": str(tmp_path / "local"),
        "local_checkpoint_period": 2,
        "checkpoint_dir": str(tmp_path / "persistent"),
        "checkpoint_period": 6,
        "multi_tier_checkpointing_backup_interval_minutes": None,
        "multi_tier_checkpointing_backup_interval_steps": 4,
    }
    return SimpleNamespace(**{**settings, **given})


def creation(version: int) -> tuple[Any, ModuleType]:
    """MaxText's `create_checkpoint_manager`, after `install`."""
    checkpointing, emergency, train_utils, max_utils = map(ModuleType, ("c", "e", "t", "m"))
    made = names.version_0({}) if version == 0 else names.version_1({})
    vars(checkpointing).update(
        ocp=made, grain_utility=SimpleNamespace(GrainCheckpointHandler=Iterators)
    )
    vars(train_utils)["create_checkpoint_manager"] = lambda *_: "the usual one"
    for _ in range(2):  # again, with other arguments
        tiers.install(checkpointing, emergency, train_utils, max_utils)
    return vars(train_utils)["create_checkpoint_manager"], checkpointing


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize(
    ("kind", "kept"),
    [("enable_emergency_checkpoint", [0, 6, 8]), ("enable_multi_tier_checkpointing", [0, 4, 8])],
)
def test_a_local_tier_takes_each_step_and_the_persistent_folder_those_that_are_due(
    tmp_path: Path, version: int, kind: str, kept: list[int]
) -> None:
    create, _ = creation(version)
    manager = create(config(tmp_path, **{kind: True}), None, None)
    saved = []
    for step in range(10):
        tree = {**state(), "step": jnp.int32(step)}
        if version == 0:
            args = ocp.args.Composite(items=ocp.args.PyTreeSave(item=tree))
            is_saved = manager.save(step, args=args, force=False)
        else:
            response = manager.save_checkpointables_async(step, {"items": tree}, force=False)
            is_saved = response is not None
        saved += [step] if is_saved else []
        manager.wait_until_finished() if version == 0 else manager.wait()
    manager.close()
    assert saved == [0, 2, 4, 6, 8]
    with unickpt.Checkpointer(tmp_path / "persistent") as found:
        assert found.steps() == kept
    shutil.rmtree(tmp_path / "local")  # the node is lost, with its memory
    manager = create(config(tmp_path, **{kind: True}), None, None)
    like = {**abstract(state(2)), "step": jax.ShapeDtypeStruct((), jnp.int32)}
    if version == 0:
        args = ocp.args.Composite(items=ocp.args.PyTreeRestore(item=like, partial_restore=True))
        restored = manager.restore(manager.latest_step(), args=args)["items"]
    else:
        restored = manager.load_checkpointables(manager.latest.step, {"items": like})["items"]
    manager.close()
    assert int(restored["step"]) == 8
    check({**restored, "step": None}, {**state(2), "step": None})


def test_the_usual_manager_and_what_is_refused(tmp_path: Path) -> None:
    create, checkpointing = creation(1)
    assert create(config(tmp_path), None, None) == "the usual one"
    with pytest.raises(ValueError, match="colocated_python_checkpointing=True is not supported"):
        create(config(tmp_path, colocated_python_checkpointing=True), None, None)
    with pytest.raises(ValueError, match="knows no persistent folder"):
        vars(checkpointing)["create_orbax_emergency_replicator_checkpoint_manager"]("local", 2)
