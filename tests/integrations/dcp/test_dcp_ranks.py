"""torch jobs with unickpt.integrations.dcp; support/dcp_ranks.py holds what the ranks do."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS
from support.processes import Processes

import unickpt

pytest.importorskip("torch")

SCRIPT = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
sys.argv = sys.argv[1:]
runpy.run_module("support.dcp_ranks", run_name="__main__")
"""
EXAMPLE = Path(TESTS).parent.joinpath("examples", "dcp.py").read_text()


def test_the_scenarios_of_torchs_own_tests(processes: Processes, tmp_path: Path) -> None:
    outputs = processes.finish(processes.torch(4, SCRIPT, TESTS, tmp_path))
    assert all(" cases" in output for output in outputs)
    # They are checkpoints like all others.
    whole = np.arange(1, 71, dtype=np.float32).reshape(7, 10)
    for number in range(6):
        stored = unickpt.load(tmp_path / f"layout_{number}")
        assert np.array_equal(stored["w"], whole)
        unickpt.verify(tmp_path / f"layout_{number}")
    like = {"app": {"model": {"head.bias": np.zeros(3, np.float32)}}}
    unickpt.load(tmp_path / "fsdp", like, only="app/model/head.bias")
    assert like["app"]["model"]["head.bias"].any()
    unickpt.load(tmp_path / "planned", like, only="app/model/head.bias")


@pytest.mark.trainers
def test_a_job_that_is_killed_goes_on_with_other_ranks(
    processes: Processes, tmp_path: Path
) -> None:
    assert len(EXAMPLE.splitlines()) <= 45
    path = tmp_path / "latest"
    job = processes.torch(4, EXAMPLE, path, 10**6)
    while step_of(path) < 5:
        assert all(process.poll() is None for process in job)
        time.sleep(0.05)
    for process in job:
        process.send_signal(signal.SIGKILL)
    for process in job:
        process.wait()
    last = step_of(path)
    outputs = processes.finish(processes.torch(2, EXAMPLE, path, last + 3))
    steps = [line for line in outputs[0].splitlines() if line.startswith("step ")]
    assert steps == [f"step {last + n}" for n in (1, 2, 3)]
    found = unickpt.load(path)
    assert found["step"] == last + 3
    slots = found["app"]["optim"]["state"]["0.weight"]
    assert slots["step"] == last + 3
    unickpt.verify(path)

    reference = tmp_path / "reference"
    processes.finish(processes.torch(1, EXAMPLE, reference, last + 3))
    alone = unickpt.load(reference)
    assert_close(found["app"]["model"], alone["app"]["model"])


def step_of(path: Path) -> int:
    try:
        return int(unickpt.open(path).values["step"])  # type: ignore[arg-type]
    except FileNotFoundError:
        return 0


def assert_close(found: Any, wanted: Any) -> None:
    """Ranks add the gradients in another order, and AdamW divides by their size."""
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=0.05, atol=0.02)
