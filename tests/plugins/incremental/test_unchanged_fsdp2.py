"""`changed=` for DTensors: real jobs of LoRA with FSDP2, sharded and replicated."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.lora_job import COLUMNS, MISTAKE_AT, ROWS
from support.processes import Processes

import unickpt

JOB = "import sys\nfrom support.lora_job import main\nmain(*sys.argv[1:])"
FROZEN_BYTES = 4 * (2 * ROWS * COLUMNS)
"""Of the weights, which are large enough to be skipped."""


def finish(processes: Processes, world: int, *arguments: object) -> list[list[dict[str, Any]]]:
    """Runs a job; for each step, what each rank says of its save."""
    outputs = processes.finish(processes.torch(world, JOB, *arguments))
    rows = [list(map(json.loads, output.splitlines())) for output in outputs]
    return [list(of_step) for of_step in zip(*rows, strict=True)]


def total(of_step: list[dict[str, Any]], figure: str) -> int:
    assert not any(row["error"] for row in of_step), of_step
    return sum(row[figure] for row in of_step)


def is_stored(run: Path) -> None:
    """The newest step has the weights of the job, bit for bit; and no step is damaged."""
    folders = sorted(run.glob("step_*"), key=lambda folder: int(folder.name.split("_")[1]))
    assert all(unickpt.verify(folder).ok for folder in folders)
    stored = unickpt.load(folders[-1])["model"]
    full = torch.load(run.parent / "full.pt")
    assert set(full) == {name for name in stored if name in full}
    for name, tensor in full.items():
        assert np.asarray(stored[name]).tobytes() == tensor.numpy().tobytes(), name


@pytest.mark.parametrize(
    ("world", "layout", "said"),
    [(2, "sharded", "False"), (3, "sharded", "tracked"), (2, "replicated", "False")],
)
def test_frozen_weights_are_skipped_and_loaded_on_another_mesh(
    world: int, layout: str, said: str, processes: Processes, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    steps = finish(processes, world, run, layout, 4, said)
    assert total(steps[0], "written") > FROZEN_BYTES
    holders = world if layout == "replicated" else 1
    for of_step in steps[1:]:
        assert total(of_step, "reused") >= FROZEN_BYTES
        assert total(of_step, "written") < FROZEN_BYTES / 4
        # Nor is it copied, but for the chunks that are hashed in turn.
        assert total(of_step, "staged") < FROZEN_BYTES * holders / 2
    is_stored(run)
    # On another mesh: no step is left to train, so the weights are as they were loaded.
    finish(processes, 5 - world, run, "sharded", 4, said)
    is_stored(run)


def test_after_a_restart_everything_is_hashed(processes: Processes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finish(processes, 2, run, "sharded", 2, "False")
    first, second = finish(processes, 2, run, "sharded", 4, "False")
    assert total(first, "staged") > FROZEN_BYTES
    assert total(first, "written") < FROZEN_BYTES / 4
    assert total(second, "staged") < FROZEN_BYTES / 2
    is_stored(run)
    # Another mesh cuts arrays in other chunks.
    first, second = finish(processes, 3, run, "sharded", 6, "False")
    assert total(first, "written") > FROZEN_BYTES
    assert total(second, "written") < FROZEN_BYTES / 4
    is_stored(run)


def test_a_fused_optimizer_that_changes_frozen_weights_is_noticed(
    processes: Processes, tmp_path: Path
) -> None:
    """No version counter of a local tensor moves."""
    for said in ("False", "tracked"):
        run = tmp_path / said / "run"
        steps = finish(processes, 2, run, "sharded", MISTAKE_AT + 2, said, "fused")
        errors = [row["error"] for row in steps[MISTAKE_AT]]
        if said == "False":
            assert "StateChanged" in errors
            assert "'model/0.base.weight'" in steps[MISTAKE_AT][0]["text"]
        else:
            assert total(steps[MISTAKE_AT], "written") > FROZEN_BYTES / 2
        assert not any(row["error"] for row in steps[MISTAKE_AT + 1])
        is_stored(run)


def test_one_element_of_one_rank_is_noticed_in_its_turn(
    processes: Processes, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    steps = finish(processes, 2, run, "sharded", MISTAKE_AT + 18, "False", "element")
    failed = [number for number, of_step in enumerate(steps) if of_step[0]["error"]]
    assert len(failed) == 1
    errors = [row["error"] for row in steps[failed[0]]]
    assert errors == ["ProcessFailed", "StateChanged"]
    assert MISTAKE_AT <= failed[0] < MISTAKE_AT + 17
    assert "'model/2.base.weight'" in steps[failed[0]][0]["text"]
    is_stored(run)


def test_after_kill_9_of_a_rank_the_job_ends_as_if_it_had_not_been(
    processes: Processes, tmp_path: Path
) -> None:
    run, whole = tmp_path / "killed" / "run", tmp_path / "whole" / "run"
    ranks: Any = processes.torch(2, JOB, run, "sharded", 400, "False")
    for _ in range(3):
        assert ranks[1].stdout.readline()
    os.kill(ranks[1].pid, signal.SIGKILL)
    ranks[0].communicate(timeout=60)
    assert ranks[0].returncode
    with unickpt.Checkpointer(run) as left:
        last = left.latest()
    assert last is not None
    assert last >= 1
    for root in (run, whole):
        finish(processes, 2, root, "sharded", last + 3, "False")
        is_stored(root)
    one, other = (torch.load(root.parent / "full.pt") for root in (run, whole))
    assert all(torch.equal(one[name], other[name]) for name in other)
