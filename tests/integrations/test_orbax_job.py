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
