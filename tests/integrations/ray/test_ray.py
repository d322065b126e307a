"""A job of Ray Train with unickpt.integrations.ray: workers and the driver are killed.

`python tests/environments.py ray` runs it, in an environment that has ray.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS
from support.processes import Processes
from support.ray_cluster import ENVIRONMENT, START_TIMEOUT_S

import unickpt

pytest.importorskip("ray")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integration

EXAMPLE = Path(TESTS).parent.joinpath("examples", "ray_job.py").read_text()


def descendants(pid: int) -> dict[int, str]:
    """The processes below a process, with what they call themselves."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = entry.joinpath("stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, above in parents.items() if above in found} - found:
        found |= more
    return {child: title(child) for child in found - {pid}}


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def wait_for_step(job: Any, run: Path, step: int) -> int:
    deadline = time.monotonic() + START_TIMEOUT_S
    while (last := newest(run)) < step:
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline, (last, step)
        time.sleep(0.05)
    return last


def newest(run: Path) -> int:
    steps = [int(path.name.partition("_")[2]) for path in run.glob("step_*")]
    return max((n for n in steps if is_committed(run / f"step_{n}")), default=0)


def is_committed(path: Path) -> bool:
    try:
        unickpt.open(path)
    except unickpt.CheckpointNotFound:
        return False
    return True


def trained_alone(steps: int) -> Any:
    """The model of the example after some steps in one process."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        data = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def test_a_job_whose_worker_and_driver_are_killed_goes_on(
    processes: Processes, tmp_path: Path
) -> None:
    assert len(EXAMPLE.splitlines()) <= 40
    run = tmp_path / "example"
    job = processes.start(EXAMPLE, tmp_path, 2, 10**6, env=ENVIRONMENT)
    wait_for_step(job, run, 4)
    workers = [pid for pid, name in descendants(job.pid).items() if "RayTrainWorker" in name]
    assert workers
    os.kill(workers[0], signal.SIGKILL)
    killed_at = newest(run)
    wait_for_step(job, run, killed_at + 4)  # Ray has started other workers, which went on
    for pid in (job.pid, *descendants(job.pid)):  # as when the machine dies
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.communicate()
    last = newest(run)
    job = processes.start(EXAMPLE, tmp_path, 1, last + 3, env=ENVIRONMENT)
    processes.finish([job], START_TIMEOUT_S)
    stored = unickpt.open(run / f"step_{last + 3}")
    assert stored.values["step"] == last + 3
    assert stored.index.processes == 1
    unickpt.verify(run / f"step_{last + 3}")
    found = unickpt.load(run / f"step_{last + 3}")["model"]
    for name, wanted in trained_alone(last + 3).items():
        np.testing.assert_allclose(found[name], wanted.numpy(), rtol=0.05, atol=0.02)
    assert len(list(run.glob("step_*"))) <= 3  # num_to_keep, and one that was not reported


def test_names_and_file_systems_that_cannot_be_used_are_refused() -> None:
    import pyarrow.fs
    from ray.train import Checkpoint

    from unickpt.integrations import ray as ours

    assert ours.url_of(Checkpoint("b/run/step_1", pyarrow.fs.S3FileSystem(region="x"))) == (
        "s3://b/run/step_1"
    )
    with pytest.raises(unickpt.errors.InvalidPath, match="'mock'"):
        ours.url_of(Checkpoint("a", pyarrow.fs._MockFileSystem()))
    for name in ("", "..", "a/b"):
        with pytest.raises(ValueError, match="checkpoint_dir_name"):
            ours.report({}, {}, name)
