"""What MaxText's functions call of Orbax, call by call, as in its sources of 0.2.4 (version 0) and
0.2.5 (version 1); `test_maxtext.py` runs MaxText itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import unickpt
from unickpt.errors import LoadMismatch

ocp = pytest.importorskip("orbax.checkpoint")
grain = pytest.importorskip("grain.python")
from orbax.checkpoint import v1  # noqa: E402

from unickpt.integrations.maxtext import handlers  # noqa: E402

pytestmark = [
    pytest.mark.integration,  # imports Orbax and Grain
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
]
P: Any = PartitionSpec
v0: Any = handlers.replacements()[id(ocp)]


@pytest.fixture(autouse=True)
def installed() -> None:
    """What `install` does, without MaxText's modules."""
    for _ in range(2):  # again, with other options
        handlers.register(unickpt.SaveOptions(chunk_bytes=64), None)


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


class Iterators(ocp.CheckpointHandler):  # type: ignore[misc]
    """MaxText's GrainCheckpointHandler: files by the number of the process and of processes."""

    def save(self, directory: Any, args: Any) -> None:
        for iterator, index, count in args.item:
            path = directory / f"process_{index}-of-{count}.json"
            path.write_text(json.dumps(iterator.get_state()))

    def restore(self, directory: Any, args: Any) -> Any:
        for iterator, index in zip(args.item, args.process_index, strict=True):
            path = directory / f"process_{index}-of-{args.process_count}.json"
            iterator.set_state(json.loads(path.read_text()))
        return args.item


@ocp.args.register_with_handler(Iterators, for_save=True)
@dataclass
class IteratorsSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """MaxText's GrainCheckpointSave."""

    item: Any


@ocp.args.register_with_handler(Iterators, for_restore=True)
@dataclass
class IteratorsRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """MaxText's GrainCheckpointRestore."""

    item: Any = None
    process_index: Any = None
    process_count: Any = None


def iterators() -> list[Any]:
    return [iter(grain.MapDataset.range(i, 100, 2).to_iter_dataset()) for i in (0, 1)]


def version_0_manager(path: Path, keep: int = 10, period: int = 2) -> Any:
    """`create_orbax_checkpoint_manager` of 0.2.4."""
    handler = v0.PyTreeCheckpointHandler(
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
    return ocp.args.Composite(items=items, iter=IteratorsSave(iterators))


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
    manager = version_0_manager(tmp_path)
    assert manager.latest_step() is None
    for step in range(4):
        saved = manager.save(step, args=version_0_args(state(), data), force=False)
        assert saved == (step % 2 == 0)
    assert manager.all_steps() == [0, 2]
    assert not manager.reached_preemption(3)
    manager.wait_until_finished()
    manager.close()

    manager = version_0_manager(tmp_path)
    step = manager.latest_step()
    assert (tmp_path / "2" / "items" / "UNICKPT.txt").exists()
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
    which = IteratorsRestore(again, [0, 1], 2)
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


def version_1_checkpointer(path: Path) -> Any:
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
    manager = version_1_checkpointer(tmp_path)
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

    manager = version_1_checkpointer(tmp_path)
    assert isinstance(manager, v1.training.Checkpointer)
    step = manager.latest.step
    assert (tmp_path / "2" / "items" / "UNICKPT.txt").exists()
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
    assert v1.checkpointables_metadata(tmp_path / "2").custom_metadata == {"scan_layers": True}


@pytest.mark.parametrize("version", [0, 1])
def test_what_older_versions_did_not_save_stays_abstract_and_a_missing_weight_is_an_error(
    tmp_path: Path, version: int
) -> None:
    like, short = abstract(state()), state(aux=False)

    def load(like: Any) -> Any:
        if version == 1:
            with version_1_checkpointer(tmp_path) as manager:
                return manager.load_checkpointables(0, {"items": like})["items"]
        how = restore_args(like, False)
        items = ocp.args.PyTreeRestore(item=like, restore_args=how, partial_restore=True)
        with version_0_manager(tmp_path) as manager:
            return manager.restore(0, args=ocp.args.Composite(items=items))["items"]

    if version == 1:
        with version_1_checkpointer(tmp_path) as manager:
            manager.save_checkpointables(0, {"items": short})
    else:
        with version_0_manager(tmp_path) as manager:
            manager.save(0, args=version_0_args(short, []))
    found = load(like)
    assert found["nnx_aux"] == like["nnx_aux"]
    check({**found, "nnx_aux": None}, {**short, "nnx_aux": None})
    like["params"]["params"]["more"] = like["params"]["params"]["decoder"]["kernel"]
    with pytest.raises((LoadMismatch, KeyError)) as caught:
        load(like)
    error = caught.value if version == 0 else caught.value.__cause__  # Orbax wraps it
    assert isinstance(error, LoadMismatch)
    assert "params/params/more" in str(error)


@pytest.mark.parametrize("version", [0, 1])
def test_parameters_are_loaded_from_the_path_of_a_step(tmp_path: Path, version: int) -> None:
    """`load_params_from_path`."""
    with version_0_manager(tmp_path) as manager:
        manager.save(0, args=version_0_args(state(), iterators()))
    like = {"params": abstract(state(2)["params"])}
    if version == 0:
        checkpointer = v0.Checkpointer(v0.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
        path = tmp_path / "0" / "items"
        assert "params" in checkpointer.metadata(path).item_metadata.tree
        how = v0.checkpoint_utils.construct_restore_args(like)
        found = checkpointer.restore(path, item=like, transforms={}, restore_args=how)
    else:
        stored = v1.metadata(tmp_path / "0", checkpointable_name="items").metadata
        kernel = stored["params"]["params"]["decoder"]["kernel"]
        assert kernel.shape == (8, 7)
        with version_1_context():
            found = v1.load(tmp_path / "0", like, checkpointable_name="items")
    check(found, {"params": state(2)["params"]})


def test_parameters_that_were_saved_alone_are_replaced_and_loaded(tmp_path: Path) -> None:
    """`save_params_to_path` of both versions."""
    params = state()["params"]
    for _ in range(2):
        v0.PyTreeCheckpointer(use_ocdbt=True, use_zarr3=True).save(
            tmp_path / "zero", {"params": params}, force=True
        )
        with version_1_context():
            v1.save(
                tmp_path / "one", {"params": params}, checkpointable_name="items", overwrite=True
            )
    for folder, name in (("zero", None), ("one", "items")):
        like = {"params": abstract(params)}
        with version_1_context():
            found = v1.load(tmp_path / folder, like, checkpointable_name=name)
        check(found, {"params": params})
