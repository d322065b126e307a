"""Processes that a launcher started, and that no framework joined into a job."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.processes import Processes

COUNT = 3
# Each process saves at the same time to one path, and prints what it heard.
PROGRAM = """
import json, os, sys, time, traceback, warnings
import numpy as np
import unickpt
{imported}
folder, own, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
warned, errors = [], []

def save(name, save_at):
    open(f"{{folder}}/{{name}}_ready_{{own}}", "w").close()
    while sum(each.startswith(f"{{name}}_ready") for each in os.listdir(folder)) < count:
        time.sleep(0.001)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            save_at(f"{{folder}}/{{name}}")
        except unickpt.UnickptError as error:
            text = "".join(traceback.format_exception(error))
            errors.append([type(error).__name__, str(error), text])
    warned.extend(str(warning.message) for warning in seen)

def run(path):
    with unickpt.Checkpointer(path) as checkpointer:
        checkpointer.save(1, state, wait=True)

state = {{"w": np.full(100_000, int(own))}}
for turn in range(3):
    save(f"new{{turn}}", lambda path: unickpt.save(path, state))
    save("same", lambda path: unickpt.save(path, state, overwrite=True))
save("run", run)
print(json.dumps([warned, errors]))
"""
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpich": ("PMI_RANK", "PMI_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}


def launch(
    processes: Processes, folder: Path, launcher: tuple[str, str], imported: str = ""
) -> list[tuple[list[str], list[list[str]]]]:
    """What each process of a launcher heard: warnings, and errors."""
    index, count = launcher
    source = PROGRAM.format(imported=imported)
    of = [name for name in ("jax",) if name in imported]
    started = [
        processes.forked(source, folder, k, COUNT, of=of, env={index: str(k), count: str(COUNT)})
        for k in range(COUNT)
    ]
    return [tuple(json.loads(out)) for out in processes.finish(started)]


@pytest.mark.parametrize("name", ["torchrun", "slurm"])
def test_processes_that_save_apart_are_warned_and_the_conflict_says_why(
    name: str, processes: Processes, tmp_path: Path
) -> None:
    index, count = LAUNCHERS[name]
    heard = launch(processes, tmp_path, (index, count))
    for own, (warned, errors) in enumerate(heard):
        text = f"{count} is {COUNT}, but torch.distributed and jax.distributed are not initialised"
        assert len(warned) == 1, warned
        assert warned[0].startswith(text)
        assert f"this one with {index}={own}" in warned[0]
        assert f'group=unickpt.ProcessGroup(int(os.environ["{index}"])' in warned[0]
        for kind, message, shown in errors:
            assert kind in ("SaveConflict", "CheckpointExists"), message
            assert message.endswith(warned[0]), message
            assert "NOT_FOUND" not in shown, "the storage's error is a consequence"
    assert any(errors for _, errors in heard)


def test_the_call_of_the_imported_framework_is_named(processes: Processes, tmp_path: Path) -> None:
    for warned, _ in launch(processes, tmp_path, LAUNCHERS["slurm"], "import jax"):
        (text,) = warned
        assert "but jax.distributed is not initialised" in text
        assert "Call jax.distributed.initialize() before, on all processes" in text


ONE = """
import sys, warnings
import numpy as np
import unickpt
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    unickpt.save(sys.argv[1], {"w": np.ones(3)})
print(*(warning.message for warning in seen))
"""


def test_one_process_is_warned_only_if_others_were_started_with_it(
    processes: Processes, tmp_path: Path
) -> None:
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    assert not {"RANK", "SLURM_PROCID"} & os.environ.keys()
    openmpi = dict(zip(LAUNCHERS["openmpi"], ("1", "2"), strict=True))
    started = [
        processes.forked(ONE, tmp_path / str(number), env=env)
        for number, env in enumerate((openmpi, script, alone, {"WORLD_SIZE": "4"}))
    ]
    warned, *silent = processes.finish(started)
    assert warned.startswith("OMPI_COMM_WORLD_SIZE is 2, but")
    assert silent == ["\n"] * 3
