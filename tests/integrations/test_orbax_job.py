"""JAX jobs with unickpt.integrations.orbax: killed and gone on with; what several processes do."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import TESTS
from support.processes import Processes

import unickpt

pytest.importorskip("jax")
pytest.importorskip("optax")

EXAMPLE = Path(TESTS).parent.joinpath("examples", "orbax_run.py").read_text()


@pytest.mark.trainers
def test_a_job_that_is_killed_goes_on_with_other_processes(
    processes: Processes, tmp_path: Path
) -> None:
    assert len(EXAMPLE.splitlines()) <= 40
    run = tmp_path / "run"
    kill(processes.jax(2, 2, EXAMPLE, run, 10**6), run)
    last = unickpt.Checkpointer(run).latest()
    assert last is not None
    found = losses(processes.finish(processes.jax(1, 4, EXAMPLE, run, last + 3))[0])
    assert list(found) == [last + 1, last + 2, last + 3]
    alone = tmp_path / "alone"
    wanted = losses(processes.finish(processes.jax(1, 4, EXAMPLE, alone, last + 3))[0])
    assert found == pytest.approx({step: wanted[step] for step in found}, rel=1e-5)
    kept = unickpt.Checkpointer(run).steps()
    assert kept == [last + 1, last + 2, last + 3]
    for step in kept:
        unickpt.verify(run / f"step_{step}")


@pytest.mark.trainers
def test_a_job_goes_on_from_the_last_step_of_orbax(processes: Processes, tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    run = tmp_path / "run"
    orbax = EXAMPLE.replace("import unickpt.integrations.orbax as", "import orbax.checkpoint as")
    first = losses(processes.finish(processes.jax(1, 2, orbax, run, 4))[0])
    assert list(first) == [1, 2, 3, 4]
    found = losses(processes.finish(processes.jax(2, 2, EXAMPLE, run, 6))[0])
    wanted = losses(processes.finish(processes.jax(1, 4, EXAMPLE, tmp_path / "alone", 6))[0])
    assert found == pytest.approx({step: wanted[step] for step in (5, 6)}, rel=1e-5)
    assert sorted(path.name for path in run.iterdir() if not path.name.startswith(".")) == [
        "2", "3", "4", "step_5", "step_6",
    ]  # fmt: skip


def kill(job: list[subprocess.Popen[str]], run: Path) -> None:
    """Ends a job as the power does, some steps after its beginning."""
    while (unickpt.Checkpointer(run).latest() or 0) < 5:
        assert all(process.poll() is None for process in job)
        time.sleep(0.05)
    for process in job:
        process.send_signal(signal.SIGKILL)
    for process in job:
        process.wait()


def losses(output: str) -> dict[int, float]:
    return {int(s): float(x) for s, x in re.findall(r"^step (\d+) loss (\S+)$", output, re.M)}


SEVERAL = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
import grain.python as grain
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import unickpt.integrations.orbax as ocp
from unickpt.integrations.orbax import v1

root, count = sys.argv[1], jax.process_count()
index = jax.process_index()
mesh = jax.make_mesh((jax.device_count(),), ("a",), axis_types=(AxisType.Auto,))
w = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("a")))
args, state = ocp.args, ocp.args.StandardSave({"w": w})

def loader():
    shard = grain.ShardOptions(shard_index=index, shard_count=count)
    sampler = grain.IndexSampler(40, shard, shuffle=True, seed=1, num_epochs=1)
    return iter(grain.DataLoader(data_source=range(40), sampler=sampler, worker_count=0))

# Each process's part of the data goes on.
data = loader()
for _ in range(index + 3):
    next(data)
with ocp.CheckpointManager(f"{root}/data") as run:
    run.save(3, args=args.Composite(state=state, data=grain.PyGrainCheckpointSave(data)))
    run.wait_until_finished()
    rest, again = next(data), loader()
    run.restore(3, args=args.Composite(data=grain.PyGrainCheckpointRestore(again)))
    assert next(again) == rest

# Processes agree on what depends on time, and see the same steps.
keep = v1.training.preservation_policies.LatestN(2)
with v1.training.Checkpointer(f"{root}/free", preservation_policy=keep) as run:
    saved = []
    for step in range(1, 30):
        if run.save_async(step, {"w": w}) is not None:
            saved.append(step)
        time.sleep(0.01 * index)
    run.wait()
    print("saved", saved, [each.step for each in run.checkpoints])

# Processes must have the same JSON.
with ocp.CheckpointManager(f"{root}/json") as run:
    try:
        run.save(1, args=args.Composite(state=state, who=args.JsonSave({"host": index})))
        run.wait_until_finished()
    except Exception as error:
        print("json", index, type(error).__name__, str(error)[:400].replace("\\n", " "))
    print("then", run.all_steps())

# A save that fails on one process fails on all, and does not count.
class Bad:
    def state_dict(self):
        raise OSError("the disk is full")
    def load_state_dict(self, state):
        pass

with ocp.CheckpointManager(f"{root}/bad") as run:
    run.save(1, args=state)
    try:
        run.save(2, args=args.Composite(state=state, who=args.JsonSave({"host": index})))
        raise SystemExit("one item became several")
    except ValueError:
        pass
    try:
        run.save(2, args=args.StandardSave({"w": w, "x": Bad() if index else 3}))
        run.wait_until_finished()
    except Exception as error:
        print("failed", type(error).__name__, run.all_steps())
    run.save(2, args=state)
    run.wait_until_finished()
    run.delete(1)
    print("then", run.all_steps(), run.reached_preemption(9))
"""


@pytest.mark.trainers
def test_several_processes(processes: Processes, tmp_path: Path) -> None:
    pytest.importorskip("grain")
    pytest.importorskip("orbax.checkpoint")
    outputs = processes.finish(processes.jax(2, 2, SEVERAL, tmp_path))
    lines = [
        [line for line in output.splitlines() if line.split()[:1] in (["saved"], ["then"])]
        for output in outputs
    ]
    assert lines[0] == lines[1], outputs
    saved, steps = re.findall(r"\[(.*?)\]", lines[0][0])
    assert saved.startswith("1")
    assert saved.endswith(steps)
    assert lines[0][1:] == ["then []", "then [2] False"]
    assert "'who/host'" in outputs[0] or "who/host" in outputs[1], outputs
    assert all("failed" in output and "[1]" in output for output in outputs), outputs
    assert sorted(unickpt.load(tmp_path / "data" / "step_3")["data"]) == [
        "process_0-of-2.json", "process_1-of-2.json",
    ]  # fmt: skip


PREEMPTED = """
import os, signal, sys, time
import jax, jax.numpy as jnp
import unickpt.integrations.orbax as ocp

options = ocp.CheckpointManagerOptions(save_interval_steps=10**6)
with ocp.CheckpointManager(sys.argv[1], options=options) as run:
    run.save(1, args=ocp.args.StandardSave({"step": 1}))
    for step in range(2, 3000):
        if step == 20 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if run.save(step, args=ocp.args.StandardSave({"step": step})):
            print("saved", step, run.reached_preemption(step), flush=True)
            break
        time.sleep(0.01)
"""


@pytest.mark.trainers
def test_a_job_that_is_told_to_stop_saves_once_more(processes: Processes, tmp_path: Path) -> None:
    outputs = processes.finish(processes.jax(2, 1, PREEMPTED, tmp_path / "run"))
    found = [re.findall(r"^saved (\d+) True$", output, re.M) for output in outputs]
    assert found[0] == found[1], outputs
    (last,) = found[0]
    assert unickpt.Checkpointer(tmp_path / "run").steps() == [1, int(last)]


def test_orbax_is_not_imported(processes: Processes) -> None:
    source = """
import sys
sys.modules["orbax"] = None  # as if it was not installed
import numpy as np
import unickpt.integrations.orbax as ocp
from unickpt.integrations.orbax import v1

with ocp.CheckpointManager("memory://without/orbax") as run:
    run.save(1, args=ocp.args.Composite(a=ocp.args.StandardSave({"w": np.ones(2)})))
    print(run.restore(1).a["w"].tolist(), run.directory)
"""
    (output,) = processes.finish([processes.start(source)])
    assert output == "[1.0, 1.0] memory://without/orbax\n"


PART = """
import sys
import jax, jax.numpy as jnp, numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from unickpt.integrations.orbax.v1 import UnickptCheckpointable

mesh = jax.make_mesh((jax.device_count(),), ("a",), axis_types=(AxisType.Auto,))
split = NamedSharding(mesh, P("a"))
w = jax.jit(lambda: jnp.arange(16.0), out_shardings=split)()
with ocp.training.Checkpointer(sys.argv[1]) as run:
    if run.latest is None:
        for step in (1, 2):
            run.save_checkpointables(step, {"ours": UnickptCheckpointable({"w": w * step})})
    like = UnickptCheckpointable({"w": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=split)})
    run.load_checkpointables(run.latest, {"ours": like})
    assert (like.state["w"] == 2 * w).all() and like.state["w"].sharding == split
    print("loaded", run.latest.step)
"""


def test_a_part_of_orbaxs_own_step_by_several_processes(
    processes: Processes, tmp_path: Path
) -> None:
    pytest.importorskip("orbax.checkpoint")
    for count, devices in ((2, 2), (1, 4)):  # saved by two, loaded by them and by one
        outputs = processes.finish(processes.jax(count, devices, PART, tmp_path / "run"))
        assert all(output.endswith("loaded 2\n") for output in outputs), outputs
