"""A process is stopped, and others write its part: the step is readable by the next job."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from support.processes import Processes

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

if rank == 1 and order == "save":
    attempt.Attempt.publish = stops
state = {"w": np.arange(60_000.0), "step": 0}
options = unickpt.SaveOptions(fsync=False, timeout_s=30, chunk_bytes=4096)
run = unickpt.Checkpointer(root, node_local=f"{nodes}/{rank}", options=options, upload_every=9)
if order == "save":
    run.save(0, state).result()
    print("saved", flush=True)
    dist.barrier()
    os._exit(0)
loaded = run.load({"w": np.zeros(60_000), "step": -1})
assert (loaded["w"] == state["w"]).all()
print("resumed", loaded["step"], flush=True)
run.close()
"""


def read_until(process: Any, text: str) -> None:
    while text not in process.stdout.readline():
        assert process.poll() is None


def test_a_step_is_readable_though_a_node_has_none_of_its_chunks(
    processes: Processes, tmp_path: Path
) -> None:
    arguments = tmp_path / "root", tmp_path / "nodes"
    ranks = processes.torch(3, JOB, *arguments, "save")
    read_until(ranks[1], "writing")
    os.kill(ranks[1].pid, signal.SIGSTOP)
    read_until(ranks[0], "saved")
    os.kill(ranks[1].pid, signal.SIGCONT)
    processes.finish(ranks)
    for said in processes.finish(processes.torch(3, JOB, *arguments, "load")):
        assert "resumed 0" in said
