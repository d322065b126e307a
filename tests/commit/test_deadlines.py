"""A process that saves, asks or loads alone: told in time, with the name of whom it waited for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.processes import Processes

import unickpt

COMMON = """
root, alone, what, world = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
options = unickpt.SaveOptions(timeout_s=2, fsync=False)
done = lambda r: pathlib.Path(f"{root}/done_{r}")
if rank == alone:
    began = time.monotonic()
    error = None
    try:
        if what == "save":
            unickpt.save(f"{root}/c", {"w": np.ones(3)}, options=options)
        elif what == "load":
            together = unickpt.LoadOptions(exchange=True, timeout_s=2)
            unickpt.load(f"{root}/there", options=together)
        elif what == "save_async":
            unickpt.save_async(f"{root}/c", {"w": np.ones(3)}, options=options).result()
        else:
            every = unickpt.SaveEvery(seconds=9.0)
            with unickpt.Checkpointer(f"{root}/run", save_every=every, options=options) as c:
                c.should_save(1)
    except (unickpt.errors.SaveTimeout, unickpt.errors.ProcessFailed) as raised:
        error = str(raised)
    print(json.dumps([error, time.monotonic() - began]), flush=True)
done(rank).touch()
while not all(done(r).exists() for r in range(world)):
    time.sleep(0.02)
sys.stdout.flush()
os._exit(0)  # what the others never did still waits in the framework
"""
TORCH = """
import json, os, pathlib, sys, time
import numpy as np
import torch.distributed as dist
import unickpt
dist.init_process_group("gloo")
rank = dist.get_rank()
"""
JAX = """
import json, os, pathlib, sys, time
import numpy as np
import unickpt
rank = jax.process_index()
"""


def alone(processes: Processes, kind: str, root: Path, world: int, rank: int, what: str) -> str:
    if kind == "torch":
        started = processes.torch(world, TORCH + COMMON, root, rank, what, world)
    else:
        started = processes.jax(world, 1, JAX + COMMON, root, rank, what, world)
    error, seconds = json.loads(started[rank].communicate(timeout=60)[0].splitlines()[-1])
    assert error is not None
    assert 2 <= seconds < 30  # gloo and JAX would wait for half an hour
    assert "within 2 s" in error
    option = "LoadOptions.timeout_s" if what == "load" else "SaveOptions.timeout_s"
    assert option in error
    return str(error)


@pytest.mark.parametrize("what", ["save", "save_async"])
@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_process_0_saves_alone(kind: str, what: str, processes: Processes, tmp_path: Path) -> None:
    world = 4 if kind == "torch" else 2
    error = alone(processes, kind, tmp_path, world, 0, what)
    late = "processes 1, 2, 3" if world == 4 else "process 1"
    assert f"{late} (not begun) did not finish" in error
    with pytest.raises(unickpt.CheckpointNotFound):
        unickpt.open(tmp_path / "c")


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_another_process_saves_alone(kind: str, processes: Processes, tmp_path: Path) -> None:
    error = alone(processes, kind, tmp_path, 2, 1, "save")
    assert "process 1 of 2 waited for process 0, which did not start to save" in error
    assert str(tmp_path / "c") in error
    assert "Nothing was written" in error
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(("kind", "rank"), [("torch", 0), ("torch", 1), ("jax", 1)])
def test_a_process_asks_alone(kind: str, rank: int, processes: Processes, tmp_path: Path) -> None:
    error = alone(processes, kind, tmp_path, 2, rank, "should_save")
    who = f"process {1 - rank}" if kind == "torch" else "the others"
    assert f"process {rank} of 2 waited for {who}" in error


@pytest.mark.plugins
@pytest.mark.parametrize(("kind", "rank"), [("torch", 0), ("torch", 1), ("jax", 0), ("jax", 1)])
def test_a_process_loads_alone(kind: str, rank: int, processes: Processes, tmp_path: Path) -> None:
    unickpt.save(tmp_path / "there", {"w": 1})
    error = alone(processes, kind, tmp_path, 2, rank, "load")
    who = f"process {1 - rank}" if kind == "torch" else "the others"
    assert f"process {rank} of 2 waited for {who}" in error
    assert "must call load in the same way, and one may have ended" in error


AGAIN = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import unickpt

root, = sys.argv[1:]
options = unickpt.SaveOptions(timeout_s=20, fsync=False)
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2,
                      is_master=os.environ["RANK"] == "0")
who = {"rank": int(os.environ["RANK"]), "world_size": 2}

def meet(name):
    store.set(f"{name} {who['rank']}", "")
    store.wait([f"{name} {rank}" for rank in range(2)])

for n in range(3):  # one store for all, as torchrun's agent keeps it
    dist.init_process_group("gloo", store=dist.PrefixStore(f"{n // 2}", store), **who)
    if n == 1:  # a second group beside it changes nothing
        beside = dist.new_group([0])
    for k in range(2):
        unickpt.save(f"{root}/{n}{k}", {"w": torch.ones(3)}, options=options)
    dist.barrier()
    dist.destroy_process_group()
    meet(f"ended {n}")
    if who["rank"] == 0:  # else gloo may find the addresses of the last group, and wait for them
        for key in store.list_keys():
            if "//cpu//" in key:
                store.delete_key(key)
    meet(f"cleared {n}")
"""


def test_a_new_process_group_in_an_old_store_agrees_anew(
    processes: Processes, tmp_path: Path
) -> None:
    processes.finish(processes.torch(2, AGAIN, tmp_path))
    attempts = [
        unickpt.open(tmp_path / f"{n}{k}").index.attempt for n in range(3) for k in range(2)
    ]
    sessions = [attempt.rpartition("-")[0] for attempt in attempts]
    assert len(set(attempts)) == 6
    assert sessions[0] == sessions[1]
    assert sessions[2] == sessions[3]
    assert sessions[4] == sessions[5]
    assert len(set(sessions)) == 3


class Old:
    """A group as a user may have written it: it knows nothing of deadlines."""

    index, count = 0, 1

    def next_attempt(self) -> str:
        return "mine-000000"

    def agree(self, value: int) -> int:
        return value

    def exchange(self, data: Any, sent: Any, received: Any) -> Any:
        return data


def test_a_group_without_deadlines_serves_as_before(tmp_path: Path) -> None:
    options = unickpt.SaveOptions(group=Old(), fsync=False)
    unickpt.save(tmp_path / "c", {"w": 1}, options=options)
    assert unickpt.open(tmp_path / "c").index.attempt == "mine-000000"
