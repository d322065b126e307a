"""A process is stopped, and others write its part: nobody needs the files of its node."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

from support.processes import Processes

import unickpt

JOB = """
import logging, os, signal, sys, time
import numpy as np
import torch.distributed as dist
import unickpt
from unickpt.commit import attempt, awaited_processes

root, nodes, order = sys.argv[1:]
logging.basicConfig(stream=sys.stdout, format="%(message)s")
awaited_processes._STOPPED_S = 0.3
dist.init_process_group("gloo")
rank = dist.get_rank()
publish = attempt.Attempt.publish

def stops(self, record, kind=".ok"):
    attempt.Attempt.publish = publish
    time.sleep(0.5)  # its report is there
    print("writing", flush=True)
    time.sleep(0.5)
    publish(self, record, kind)

if rank == 1 and order != "load":
    attempt.Attempt.publish = stops
state = {"w": np.arange(60_000.0), "step": 0}
options = unickpt.SaveOptions(fsync=False, timeout_s=30, chunk_bytes=4096)
node, every = nodes.split()[rank], 1 if order == "upload" else 9
run = unickpt.Checkpointer(root, node_local=node, options=options, upload_every=every)
if order != "load":
    run.save(0, state).result()
    if order == "upload":
        run.wait()
    print("saved", flush=True)
    time.sleep(60)
loaded = run.load({"w": np.zeros(60_000), "step": -1})
assert (loaded["w"] == state["w"]).all()
print("resumed", loaded["step"], flush=True)
run.close()
"""


def read_until(process: Any, text: str) -> None:
    while text not in process.stdout.readline():
        assert process.poll() is None


def stopped(processes: Processes, root: Path, order: str) -> list[Any]:
    """The ranks of a job on three nodes, of which one is stopped during a save of all."""
    nodes = [str(root.parent / name) for name in "abc"]
    ranks = processes.torch(3, JOB, root, " ".join(nodes), order)
    read_until(ranks[1], "writing")
    os.kill(ranks[1].pid, signal.SIGSTOP)
    for rank in ranks[::2]:
        read_until(rank, "saved")
    return ranks


def resume(processes: Processes, root: Path, names: str) -> None:
    nodes = [str(root.parent / name) for name in names]
    for said in processes.finish(processes.torch(len(names), JOB, root, " ".join(nodes), "load")):
        assert "resumed 0" in said


def test_its_node_removes_its_files(processes: Processes, tmp_path: Path) -> None:
    root = tmp_path / "root"
    ranks = stopped(processes, root, "save")
    os.kill(ranks[1].pid, signal.SIGCONT)
    read_until(ranks[1], "saved")
    assert not list((tmp_path / "b").glob("*/step_0/processes/*/00001"))
    processes.close()
    resume(processes, root, "abc")


def test_its_node_may_be_lost(processes: Processes, tmp_path: Path) -> None:
    root = tmp_path / "root"
    stopped(processes, root, "save")
    processes.close()
    shutil.rmtree(tmp_path / "b")
    resume(processes, root, "ac")


def test_the_upload_does_not_wait_for_it(processes: Processes, tmp_path: Path) -> None:
    root = tmp_path / "root"
    ranks = stopped(processes, root, "upload")
    assert unickpt.verify(root / "step_0").ok
    os.kill(ranks[1].pid, signal.SIGCONT)
    read_until(ranks[1], "saved")
    assert not list(root.glob("step_0/processes/*/00001"))
