"""unickpt inside Orbax's own managers: `registry`, `Handler`, and `v1_registry`."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.processes import PROCESS_TIMEOUT_S, Processes

import unickpt

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402
from orbax.checkpoint import v1  # noqa: E402
from orbax.checkpoint._src.metadata.pytree_metadata_options import (  # noqa: E402
    PyTreeMetadataOptions,
)
from orbax.checkpoint._src.path import atomicity  # noqa: E402

from unickpt.integrations.orbax import Handler, registry, v1_registry  # noqa: E402

pytestmark = [
    pytest.mark.integration,  # imports Orbax
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Orbax logs each step."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    yield
    logger.disabled = before


def sharding(*axes: str | None) -> Any:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec(*axes))


def state(number: int) -> dict[str, Any]:
    w = jax.device_put(jnp.full((8, 6), number, jnp.bfloat16), sharding("a", "b"))
    return {"w": w, "n": number, "x": [np.arange(3.0) + number]}


def abstract() -> dict[str, Any]:
    """As `jax.eval_shape` makes it: without shardings."""
    return {"w": jax.ShapeDtypeStruct((8, 6), jnp.bfloat16), "n": 0, "x": [np.zeros(3)]}


def assert_same(restored: Any, expected: dict[str, Any]) -> None:
    assert restored["n"] == expected["n"]
    assert np.array_equal(restored["x"][0], expected["x"][0])
    assert restored["w"].dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(restored["w"]), np.asarray(expected["w"]))


def test_orbaxs_manager_saves_and_restores_through_us(tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(tmp_path, options=options, handler_registry=registry()) as manager:
        for step in range(4):
            manager.save(step, args=ocp.args.StandardSave(state(step)))
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]
    path = tmp_path / "3" / "default"
    assert unickpt.verify(path).ok
    assert unickpt.load(path)["n"] == 3
    assert "unickpt.integrations.orbax" in (path / "UNICKPT.txt").read_text()
    with ocp.CheckpointManager(tmp_path, handler_registry=registry()) as manager:
        metadata = manager.item_metadata(3)
        assert metadata["w"].shape == (8, 6)
        assert metadata["w"].dtype == jnp.bfloat16
        assert_same(manager.restore(3), state(3))
        assert_same(manager.restore(2, args=ocp.args.StandardRestore(abstract())), state(2))


def test_arrays_without_a_sharding_get_the_stored_one(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path, handler_registry=registry()) as manager:
        manager.save(1, args=ocp.args.StandardSave(state(1)))
        manager.wait_until_finished()
        restored = manager.restore(1, args=ocp.args.StandardRestore(abstract()))
        assert restored["w"].sharding == sharding("a", "b")
        other = jax.ShapeDtypeStruct((8, 6), jnp.bfloat16, sharding=sharding(None, "b"))
        target = {**abstract(), "w": other}
        restored = manager.restore(1, args=ocp.args.StandardRestore(target))
        assert restored["w"].sharding == sharding(None, "b")
        assert_same(restored, state(1))


def test_a_run_of_orbaxs_own_steps_continues_by_one_argument(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(state(1)))
    with ocp.CheckpointManager(tmp_path, handler_registry=registry()) as manager:
        assert manager.latest_step() == 1
        target = ocp.args.StandardRestore(abstract())
        assert_same(manager.restore(1, args=target), state(1))
        manager.save(2, args=ocp.args.StandardSave(state(2)))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2]
        assert_same(manager.restore(2, args=target), state(2))
    unickpt.convert(tmp_path / "2" / "default", tmp_path / "back" / "2" / "default", to="orbax")
    with ocp.CheckpointManager(tmp_path / "back") as manager:
        restored = manager.restore(2, args=ocp.args.StandardRestore(state(0)))
        assert_same(restored, state(2))


def test_other_items_stay_orbaxs(tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(tmp_path, options=options, handler_registry=registry()) as manager:
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state(1)), data=ocp.args.JsonSave({"seen": [1, 2]})
        )
        manager.save(1, args=items, metrics={"loss": 0.5})
        manager.wait_until_finished()
        asked = ocp.args.Composite(
            state=ocp.args.PyTreeRestore(abstract()), data=ocp.args.JsonRestore()
        )
        restored = manager.restore(1, args=asked)
        assert restored.data == {"seen": [1, 2]}
        assert_same(restored.state, state(1))
        assert manager.metrics(1) == {"loss": 0.5}


def test_a_partial_restore_and_a_placeholder(tmp_path: Path) -> None:
    with ocp.Checkpointer(Handler()) as checkpointer:
        checkpointer.save(tmp_path / "c", args=ocp.args.PyTreeSave(state(7)))
        partial = ocp.args.PyTreeRestore({"n": 0}, partial_restore=True)
        assert checkpointer.restore(tmp_path / "c", args=partial) == {"n": 7}
        target = {**abstract(), "w": ocp.PLACEHOLDER}
        restored = checkpointer.restore(tmp_path / "c", args=ocp.args.StandardRestore(target))
        assert restored["w"] is ocp.PLACEHOLDER
        assert restored["n"] == 7
        # Programs look for these words of Orbax's.
        with pytest.raises(unickpt.LoadMismatch, match=r"User-provided restore item(.|\n)*w "):
            checkpointer.restore(tmp_path / "c", args=ocp.args.StandardRestore({"n": 0}))
        with pytest.raises(ValueError, match="strict=False is not supported"):
            checkpointer.restore(
                tmp_path / "c", args=ocp.args.StandardRestore(abstract(), strict=False)
            )


class Moments(NamedTuple):
    mean: Any
    count: Any


class Nothing(NamedTuple):
    pass


def test_without_an_abstract_tree_containers_are_those_of_orbax(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "m": Moments(np.ones(2), 3),
        "e": Nothing(),
        "t": (1, (2.5, Nothing())),
        "u": (),
        "l": [],
    }
    tree |= {"d": {}, "i": {3: np.int64(4)}, "none": None, "s": "text", "b": True}
    results = []
    for handler in (ocp.PyTreeCheckpointHandler(), Handler()):
        path = tmp_path / type(handler).__name__
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(tree, custom_metadata={"k": 1}))
            metadata = checkpointer.metadata(path).item_metadata
            kinds = jax.tree.map(lambda leaf: (type(leaf).__name__, leaf.name), metadata.tree)
            results.append((checkpointer.restore(path), kinds, metadata.custom_metadata))
    (expected, *orbax), (restored, *ours) = results
    expected["i"] = {"3": np.int64(4)}  # Orbax makes a number of Python of it
    orbax[0]["i"] = {"3": ("ArrayMetadata", "i.3")}
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    assert jax.tree.all(jax.tree.map(np.array_equal, restored, expected))
    assert ours == orbax
    with ocp.Checkpointer(Handler()) as checkpointer, pytest.raises(ValueError, match="sorting"):
        checkpointer.save(tmp_path / "mixed", args=ocp.args.PyTreeSave({1: 2, "a": 3}))
    rich = PyTreeMetadataOptions(support_rich_types=True)
    with ocp.Checkpointer(Handler(pytree_metadata_options=rich)) as checkpointer:
        restored = checkpointer.restore(path)
    assert restored["m"]._fields == ("mean", "count")
    assert restored["t"][0] == 1
    assert isinstance(restored["t"], tuple)


def test_numpy_arrays_stay_numpy_under_an_abstract_array(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"x": np.arange(3.0), "lr": 0.5}
    with ocp.CheckpointManager(tmp_path, handler_registry=registry()) as manager:
        manager.save(1, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
        like = jax.eval_shape(lambda: tree)
        restored = manager.restore(1, args=ocp.args.StandardRestore(like))
    for name, dtype in (("x", "float32"), ("lr", "float32")):  # as `like`
        assert isinstance(restored[name], np.ndarray)
        assert restored[name].dtype == dtype
        assert np.array_equal(restored[name], tree[name])


def test_devices_that_a_job_lacks_are_an_error_as_in_orbax(
    processes: Processes, tmp_path: Path
) -> None:
    with ocp.CheckpointManager(tmp_path, handler_registry=registry()) as manager:
        manager.save(1, args=ocp.args.StandardSave(state(1)))
    program = """
import logging, sys
logging.disable(logging.ERROR)
import jax, jax.numpy as jnp, numpy as np
import orbax.checkpoint as ocp
from unickpt.integrations.orbax import registry
def attempt(like=None, **options):
    try:
        restored = manager.restore(1, args=ocp.args.StandardRestore(like, **options))
        print(len(restored["w"].sharding.device_set))
    except ValueError as error:
        print(str(error).split(": ")[1])
like = {"w": jax.ShapeDtypeStruct((8, 6), jnp.bfloat16), "n": 0, "x": [np.zeros(3)]}
mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
with ocp.CheckpointManager(sys.argv[1], handler_registry=registry()) as manager:
    print(manager.item_metadata(1)["w"].shape)
    attempt()
    attempt(like)
    attempt(like, fallback_sharding=sharding)
    attempt({**like, "w": jax.ShapeDtypeStruct((8, 6), jnp.bfloat16, sharding=sharding)})
"""
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    (said,) = processes.finish([processes.forked(program, tmp_path, of=["orbax"], env=env)])
    error = (
        "array 'w' was on 8 devices of another job, and this one has 4 in 1 processes; pass an "
        "abstract tree with shardings"
    )
    assert said.splitlines() == ["(8, 6)", error, error, "4", "4"]


def test_a_save_of_many_trees_does_not_wait_until_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, returned = [f"tree{number}" for number in range(4)], threading.Event()
    create = atomicity._create_tmp_directory

    async def create_later(*arguments: Any, **options: Any) -> Any:
        assert await asyncio.to_thread(returned.wait, 60)
        return await create(*arguments, **options)

    monkeypatch.setattr(atomicity, "_create_tmp_directory", create_later)
    with ocp.CheckpointManager(tmp_path, handler_registry=registry(*names)) as manager:
        for step in range(2):
            returned.clear()
            saves = {name: ocp.args.StandardSave({"x": jnp.full(3, step)}) for name in names}
            manager.save(step, args=ocp.args.Composite(**saves))
            returned.set()
            manager.wait_until_finished()
        restored = manager.restore(1)
    assert {name: restored[name]["x"].tolist() for name in names} == dict.fromkeys(names, [1] * 3)


@pytest.mark.parametrize("writer", ["orbax", "unickpt"])
def test_what_a_killed_save_left_does_not_stop_the_next(writer: str, tmp_path: Path) -> None:
    chosen = {"handler_registry": registry()} if writer == "unickpt" else {}
    with ocp.CheckpointManager(tmp_path, **chosen) as manager:
        manager.save(4, args=ocp.args.StandardSave(state(1)))
    left = tmp_path / "4.orbax-checkpoint-tmp"
    (tmp_path / "4").rename(left)
    (left / "default").rename(left / "default.orbax-checkpoint-tmp")
    with ocp.CheckpointManager(tmp_path, handler_registry=registry()) as manager:
        assert manager.latest_step() is None
        manager.save(4, args=ocp.args.StandardSave(state(2)))
        manager.wait_until_finished()
        assert_same(manager.restore(4), state(2))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's own
def test_a_directory_that_orbax_cannot_create_fails_one_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    with ocp.CheckpointManager(tmp_path, handler_registry=registry()) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(atomicity, "_create_tmp_directory", fail)
            patch.setattr(ocp.multihost, "coordination_timeout", lambda: 1)
            manager.save(1, args=ocp.args.StandardSave(state(1)))
            with pytest.raises(OSError, match="no space left"):
                manager.wait_until_finished()
        for step in (2, 3):  # the error is not raised again
            manager.save(step, args=ocp.args.StandardSave(state(step)))
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]
    gc.collect()  # warns of coroutines that Orbax never awaits


def test_the_state_may_change_and_be_donated_when_the_call_returns(tmp_path: Path) -> None:
    step = jax.jit(lambda w: w + 1, donate_argnums=0)
    with ocp.CheckpointManager(tmp_path, handler_registry=registry()) as manager:
        w, x = jax.device_put(jnp.zeros((8, 6)), sharding("a", "b")), np.zeros(5)
        for number in range(3):
            manager.save(number, args=ocp.args.StandardSave({"w": w, "x": x}))
            w = step(w)
            x += 1
        manager.wait_until_finished()
    for number in manager.all_steps():
        stored = unickpt.load(tmp_path / str(number) / "default")
        assert (stored["w"] == number).all()
        assert (stored["x"] == number).all()


def test_version_1_saves_and_loads_through_us(tmp_path: Path) -> None:
    v1.save(tmp_path / "orbax", state(1))
    context = v1.Context()
    context.checkpointables.registry = v1_registry()
    with context:
        v1.save(tmp_path / "ours", state(2))
        for name, number in (("orbax", 1), ("ours", 2)):
            restored = v1.load(tmp_path / name, abstract())
            assert_same(restored, state(number))
            assert restored["w"].sharding == sharding("a", "b")
        assert v1.metadata(tmp_path / "ours").metadata["w"].shape == (8, 6)
        keep = v1.training.preservation_policies.LatestN(2)
        run = v1.training.Checkpointer(tmp_path / "run", preservation_policy=keep, context=context)
        with run:
            for step in range(4):
                run.save(step, state(step))
        with v1.training.Checkpointer(tmp_path / "run", context=context) as run:
            assert [checkpoint.step for checkpoint in run.checkpoints] == [2, 3]
            assert_same(run.load(run.latest, abstract()), state(3))
    assert unickpt.load(tmp_path / "run" / "3" / "state")["n"] == 3


def test_version_1_takes_its_options_from_the_context(tmp_path: Path) -> None:
    tree = {"w": jnp.ones(3), "x": np.ones(2, "float32"), "key": jax.random.key(0), "n": 3}
    context = v1.Context()
    context.checkpointables.registry = v1_registry()
    context.array.saving.storage_options = v1.options.ArrayOptions.Saving.StorageOptions(
        dtype=jnp.bfloat16
    )
    context.pytree.loading.partial_load = True
    with context:
        v1.save(tmp_path / "c", tree)
        metadata = v1.metadata(tmp_path / "c").metadata
        assert (metadata["w"].dtype, metadata["x"].dtype) == (jnp.bfloat16, jnp.bfloat16)
        assert (type(metadata["w"]).__name__, metadata["n"]) == ("ArrayMetadata", 0)
        assert type(metadata["x"]).__name__ == "NumpyMetadata"
        loaded = v1.load(tmp_path / "c", {"w": metadata["w"]})
    assert list(loaded) == ["w"]
    assert loaded["w"].dtype == jnp.bfloat16


JOB = """
import logging, os, signal, sys, warnings
logging.disable(logging.ERROR)
warnings.simplefilter("ignore")
import jax, jax.numpy as jnp, numpy as np, optax
import orbax.checkpoint as ocp
folder, way, die, out = sys.argv[1:]
chosen = {}
if way == "unickpt":
    from unickpt.integrations.orbax import registry
    chosen = {"handler_registry": registry()}
tx = optax.adamw(0.1)
params = {"w": jnp.ones((4, 2)) / 3, "b": jnp.zeros(2)}
state = (params, tx.init(params))

@jax.jit
def train(state, x):
    loss = lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2)
    updates, opt = tx.update(jax.grad(loss)(state[0]), state[1], state[0])
    return optax.apply_updates(state[0], updates), opt

with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=3), **chosen) as run:
    begin = run.latest_step()
    if begin is not None:
        state = run.restore(begin, args=ocp.args.StandardRestore(state))
    print("from", begin, flush=True)
    for step in range(0 if begin is None else begin + 1, 11):
        state = train(state, jax.random.normal(jax.random.key(step), (16, 4)))
        run.save(step, args=ocp.args.StandardSave(state))
        if str(step) == die:
            run.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)
np.savez(out, *map(np.asarray, jax.tree.leaves(state)))
"""  # noqa: E501


def test_a_job_that_changes_over_and_is_killed_ends_as_one_that_nobody_killed(
    processes: Processes, tmp_path: Path
) -> None:
    def run(folder: str, way: str, die: int | None = None) -> str:
        out = tmp_path / f"{folder}.npz"
        job = processes.forked(JOB, tmp_path / folder, way, str(die), out, of=["orbax"])
        said, errors = job.communicate()
        assert job.returncode == (0 if die is None else -signal.SIGKILL), said + errors
        return str(said)

    run("run", "orbax", 3)
    assert run("run", "unickpt", 6) == "from 3\n"
    assert run("run", "unickpt", 8) == "from 6\n"
    unickpt.convert(
        tmp_path / "run" / "8" / "default", tmp_path / "back" / "8" / "default", to="orbax"
    )
    assert run("back", "orbax") == "from 8\n"
    run("whole", "orbax")
    with np.load(tmp_path / "whole.npz") as whole, np.load(tmp_path / "back.npz") as back:
        assert all(np.array_equal(whole[name], back[name]) for name in whole.files)


TOGETHER = """
import logging, os, signal, sys, warnings
logging.disable(logging.ERROR)
warnings.simplefilter("ignore")
import jax, numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from unickpt.integrations.orbax import handler
folder, die = sys.argv[1:]
begin_save = handler.begin_save

def dying(path, tree, options, wait_created, *more):
    def wait_and_die():
        wait_created()
        assert os.path.isdir(path), path
        os.kill(os.getpid(), signal.SIGKILL)
    return begin_save(path, tree, options, wait_and_die, *more)

mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
rows = NamedSharding(mesh, PartitionSpec("d"))
w = jax.make_array_from_callback((8, 3), rows, lambda at: np.arange(24.0).reshape(8, 3)[at])
with ocp.CheckpointManager(folder, handler_registry=handler.registry()) as manager:
    begin = 0 if manager.latest_step() is None else manager.latest_step() + 1
    for step in range(begin, 3):
        if str(step) == die:
            handler.begin_save = dying
        manager.save(step, args=ocp.args.StandardSave({"w": w + step, "step": step}))
    manager.wait_until_finished()
    restored = manager.restore(2)
    assert restored["step"] == 2 and restored["w"].sharding == rows, restored
    for shard in restored["w"].addressable_shards:
        assert np.array_equal(shard.data, np.arange(24.0).reshape(8, 3)[shard.index] + 2)
print("from", begin)
"""


def test_processes_that_are_killed_before_our_commit_leave_no_such_step(
    processes: Processes, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    codes = {job.wait(PROCESS_TIMEOUT_S) for job in processes.jax(2, 2, TOGETHER, run, 1)}
    # JAX may abort the process whose peer is gone, before it kills itself.
    assert -signal.SIGKILL in codes, codes
    assert codes <= {-signal.SIGKILL, -signal.SIGABRT}, codes
    assert sorted(path.name for path in run.iterdir()) == ["0", "1.orbax-checkpoint-tmp"]
    for chosen in ({"handler_registry": registry()}, {}):
        with ocp.CheckpointManager(run, **chosen) as manager:
            assert manager.all_steps() == [0]
    said = processes.finish(processes.jax(2, 2, TOGETHER, run, None))
    assert all("from 1" in lines for lines in said)
    for step in range(3):
        assert unickpt.open(run / str(step) / "default").index.processes == 2
        stored = unickpt.load(run / str(step) / "default")
        assert np.array_equal(stored["w"], np.arange(24.0).reshape(8, 3) + step)
