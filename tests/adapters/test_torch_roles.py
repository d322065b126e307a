"""torch jobs whose roles save by themselves; role_ranks.py holds what the ranks do."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support import TESTS
from support.processes import PROCESS_TIMEOUT_S, Processes

import unickpt

pytest.importorskip("torch")

SCRIPT = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
sys.argv = sys.argv[1:]
runpy.run_module("support.role_ranks", run_name="__main__")
"""


def test_roles_of_four_ranks(processes: Processes, tmp_path: Path) -> None:
    """Starting ranks takes seconds, so all cases run in one launch."""
    outputs = processes.finish(processes.torch(4, SCRIPT, Path(TESTS), tmp_path))
    outcomes = json.loads(outputs[0].splitlines()[-1])
    assert outcomes
    failed = {name: text for name, text in outcomes.items() if text != "ok"}
    assert not failed, "\n\n".join(f"{name}\n{text}" for name, text in failed.items())


ONE_ROLE_DIES = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
import unickpt
from support.dying import die_at
from unickpt.commit import liveness

run = sys.argv[2]
liveness.FIRST_S[False] = 60.0  # a rank that has given a sign of life is reported as dead instead
dist.init_process_group("gloo")
rank = dist.get_rank()
groups = {"actor": dist.new_group([0, 3]), "critic": dist.new_group([1, 2])}
role = "actor" if rank in (0, 3) else "critic"
options = unickpt.SaveOptions(group=groups[role], fsync=False, timeout_s=5)
roots = [f"{run}/{each}" for each in groups]
checkpointer = unickpt.Checkpointer(f"{run}/{role}", roles=roots, options=options, keep_last=1)
dist.barrier()  # the Checkpointers of all roles are there before any of them saves
tree = lambda step: {"w": torch.full((50, 40), float(step)), "role": role}
checkpointer.save(1, tree(1), wait=True)
dist.barrier()
if rank == 0:  # which also has the job's key-value store
    die_at("saving.writer.ChunkWriter:write_all", "before")
try:
    checkpointer.save(2, tree(2), wait=True)
    for step in (3, 4) if role == "critic" else ():
        assert checkpointer.should_save(step) is False
        checkpointer.save(step, tree(step))
    checkpointer.wait()
    said = "saved"
except unickpt.errors.SaveTimeout as error:
    said = str(error)
print(said, flush=True)
os._exit(0)  # torch waits for the rank that died
"""


def test_one_role_goes_on_when_another_dies(processes: Processes, tmp_path: Path) -> None:
    """Rank 0, which has the store of the job, is killed while its role saves."""
    ranks = processes.torch(4, ONE_ROLE_DIES, TESTS, tmp_path)
    outputs = [rank.communicate(timeout=PROCESS_TIMEOUT_S) for rank in ranks]
    said = [out.strip() for out, _ in outputs]
    assert ranks[0].returncode == -signal.SIGKILL
    assert said[1:3] == ["saved", "saved"], outputs
    assert "process 0 (" in said[3], outputs[3]
    assert "in order, ranks 0, 3 of torch.distributed" in said[3]
    for step in (1, 2, 3, 4):  # step 1 is the newest that both have
        assert unickpt.load(tmp_path / f"critic/step_{step}")["w"].min() == step
    roots = [tmp_path / "actor", tmp_path / "critic"]
    with unickpt.Checkpointer(roots[1], roles=roots) as run:
        assert run.steps() == [1]
