"""Jobs of real processes that train and save asynchronously, in PyTorch and in JAX."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from support.processes import Processes

import unickpt
from unickpt import Checkpointer

TORCH = """
import json, os, sys, time
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import unickpt

root, mode = sys.argv[1:]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
model = torch.nn.Sequential(torch.nn.Linear(301, 517), torch.nn.BatchNorm1d(517),
                            torch.nn.Linear(517, 11))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

def train(step):
    torch.manual_seed(step)
    model(torch.randn(8, 301)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def full():
    state = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        state[name + ".avg"] = optimizer.state[parameter]["exp_avg"]
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).numpy().copy()
            for k, v in state.items()}

expected = {}
options = unickpt.SaveOptions(staging=mode, timeout_s=60, budget_bytes=1 << 20, fsync=False)
with unickpt.Checkpointer(root, optimizers=[optimizer], options=options) as checkpointer:
    for step in range(4):
        train(step)
        expected[step] = full()
        pending = checkpointer.save(step, {"model": model, "optimizer": optimizer,
                                           "mine": unickpt.PerProcess(rank)})
        if mode != "auto":  # then what does not fit into the budget is copied lazily
            assert pending._snapshot.is_fenced == (mode == "lazy"), "lazily or not"
if rank == 0:
    np.savez(root + "/expected.npz", **{f"{s}/{k}": v for s, t in expected.items()
                                         for k, v in t.items()})
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("mode", ["auto", "lazy", "copy"])
def test_torch_ranks_save_what_was_there_at_the_call(
    mode: str, processes: Processes, tmp_path: Path
) -> None:
    processes.finish(processes.torch(4, TORCH, tmp_path, mode))
    expected = np.load(tmp_path / "expected.npz")
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [0, 1, 2, 3]
        for step in checkpointer.steps():
            assert unickpt.verify(checkpointer.path(step)).ok
            found = checkpointer.load(step=step)
            assert found["mine"].values == (0, 1, 2, 3)
            names = [n for n in expected.files if n.startswith(f"{step}/")]
            weights = [n for n in found["model"] if n.endswith(("weight", "bias"))]
            for name in names:
                _, _, key = name.partition("/")
                if key.endswith(".avg"):
                    at = weights.index(key.removesuffix(".avg"))
                    stored = found["optimizer"]["state"][at]["exp_avg"]
                else:
                    stored = found["model"][key]
                assert np.array_equal(stored, expected[name]), name


JAX = """
import sys, time
import numpy as np
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import unickpt

root, = sys.argv[1:]
mesh = jax.make_mesh((2, 2), ("x", "y"))
spec = NamedSharding(mesh, P("x", "y"))
state = jax.jit(lambda: {"w": jnp.arange(300 * 400.0).reshape(300, 400)}, out_shardings=spec)()
train = jax.jit(lambda s: {"w": s["w"] * 2 + 1}, donate_argnums=0)
options = unickpt.SaveOptions(timeout_s=60, fsync=False)
every = unickpt.SaveEvery(3, preemption=True)
with unickpt.Checkpointer(root, save_every=every, options=options) as checkpointer:
    for step in range(40):
        if step == 7 and jax.process_index() == 1:
            checkpointer.preempt()
        if checkpointer.should_save(step):
            checkpointer.save(step, {**state, "step": step})
        state = train(state)
        if checkpointer.preempted:
            break
    print(step, flush=True)
    like = {"w": jax.ShapeDtypeStruct((300, 400), jnp.float32, sharding=spec), "step": 0}
    checkpointer.wait()
    assert checkpointer.load(like, fallback=True)["step"] == 7
"""


def test_jax_processes_save_what_was_there_at_the_call(
    processes: Processes, tmp_path: Path
) -> None:
    out = processes.finish(processes.jax(2, 2, JAX, tmp_path))
    assert [text.splitlines()[-1] for text in out] == ["7", "7"], "all stop at one step"
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [0, 3, 6, 7]
        w = np.arange(300 * 400, dtype=np.float32).reshape(300, 400)
        for step in range(8):
            if step in checkpointer.steps():
                assert (checkpointer.load(step=step)["w"] == w).all()
            w = w * 2 + 1


SIGTERM = """
import json, os, sys, time
import torch
import torch.distributed as dist
import unickpt

root, = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
pid_file = f"{root}/pid_{rank}"
options = unickpt.SaveOptions(timeout_s=60, fsync=False)
root += "/run"
every = unickpt.SaveEvery(seconds=1e6, preemption=True)
with unickpt.Checkpointer(root, save_every=every, options=options) as checkpointer:
    state = {"w": torch.zeros(5000), "step": -1}
    if checkpointer.latest() is not None:
        state = checkpointer.load(state)
    with open(pid_file, "w") as file:
        file.write(str(os.getpid()))
    for step in range(state["step"] + 1, 10**6):
        time.sleep(0.01)
        state["w"] += 1
        if checkpointer.should_save(step):
            checkpointer.save(step, {**state, "step": step})
        if checkpointer.preempted:
            break
print(json.dumps(step))
dist.destroy_process_group()
"""


def test_sigterm_at_one_rank_saves_on_all_and_the_next_run_goes_on(
    processes: Processes, tmp_path: Path
) -> None:
    last = -1
    for told in (1, 0):
        for name in tmp_path.glob("pid_*"):
            name.unlink()
        ranks = processes.torch(2, SIGTERM, tmp_path)
        pid = tmp_path / f"pid_{told}"
        deadline = time.monotonic() + 60
        while not pid.exists() or not pid.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(int(pid.read_text()), signal.SIGTERM)
        steps = [json.loads(out) for out in processes.finish(ranks)]
        assert steps[0] == steps[1] > last
        last = steps[0]
        with Checkpointer(tmp_path / "run") as checkpointer:
            assert checkpointer.latest() == last
            assert (checkpointer.load()["w"] == last + 1).all()
