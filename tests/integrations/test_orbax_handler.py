"""unickpt inside Orbax's own managers: `registry`, `Handler`, and `v1_registry`."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import Processes

import unickpt

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402
from orbax.checkpoint import v1  # noqa: E402

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
        with pytest.raises(unickpt.LoadMismatch, match="w"):
            checkpointer.restore(tmp_path / "c", args=ocp.args.StandardRestore({"n": 0}))
        with pytest.raises(ValueError, match="strict=False is not supported"):
            checkpointer.restore(
                tmp_path / "c", args=ocp.args.StandardRestore(abstract(), strict=False)
            )


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
    print("from", begin)
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
        job = processes.start(JOB, tmp_path / folder, way, str(die), out)
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


def test_processes_save_together(processes: Processes, tmp_path: Path) -> None:
    program = """
import logging, sys, warnings
logging.disable(logging.ERROR)
warnings.simplefilter("ignore")
import jax, jax.numpy as jnp, numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from unickpt.integrations.orbax import registry
mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
rows = NamedSharding(mesh, PartitionSpec("d"))
w = jax.make_array_from_callback((8, 3), rows, lambda at: np.arange(24.0).reshape(8, 3)[at])
with ocp.CheckpointManager(sys.argv[1], handler_registry=registry()) as manager:
    for step in range(2):
        manager.save(step, args=ocp.args.StandardSave({"w": w + step, "step": step}))
    manager.wait_until_finished()
    restored = manager.restore(1)
    assert restored["step"] == 1 and restored["w"].sharding == rows, restored
    for shard in restored["w"].addressable_shards:
        assert np.array_equal(shard.data, np.arange(24.0).reshape(8, 3)[shard.index] + 1)
print("same")
"""
    jobs = processes.jax(2, 2, program, tmp_path / "run")
    assert all("same" in said for said in processes.finish(jobs))
    stored = unickpt.load(tmp_path / "run" / "1" / "default")
    assert np.array_equal(stored["w"], np.arange(24.0).reshape(8, 3) + 1)
    assert unickpt.open(tmp_path / "run" / "1" / "default").index.processes == 2
