"""Trainings with torchtitan's trainer and unickpt.integrations.torchtitan; support/titan_cases.py
holds what the ranks do.
"""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import TESTS, s3_server
from support.processes import Processes

import unickpt

if importlib.util.find_spec("torchtitan") is None:  # which takes a minute to import
    pytest.skip("needs torchtitan", allow_module_level=True)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
EXAMPLE = Path(TESTS).parent.joinpath("examples", "titan.py").read_text()
LOCAL_RANK = "import os, sys\nos.environ['LOCAL_RANK'] = os.environ['RANK']\n"
CASES = f"""
{LOCAL_RANK}
sys.path[:0] = [sys.argv[1], sys.argv[2]]
del sys.argv[:2]
import runpy
runpy.run_module("support.titan_cases", run_name="__main__")
"""
# The same program on CPUs.
ON_CPUS = f"""
{LOCAL_RANK}
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from pathlib import Path
from support import titan_job
from torchtitan.models.llama3 import config_registry
assets = Path(sys.argv[3])
config_registry.llama3_debugmodel = lambda: titan_job.small_config(assets, "own")
del sys.argv[1:4]
"""


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("titan") / "assets"
    source = "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path;"
    source += "from support.titan_job import make_assets; make_assets(Path(sys.argv[2]))"
    subprocess.run([sys.executable, "-W", "ignore", "-c", source, TESTS, folder], check=True)
    return folder


def test_cases(
    assets: Path,
    processes: Processes,
    tmp_path: Path,
    moto: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "titan")
    arguments = (TESTS, Path(TESTS).parent, assets, tmp_path, "s3://titan/cases")
    outputs = finish(processes.torch(2, CASES, *arguments))
    assert all(" cases" in output for output in outputs)


def test_a_job_that_is_killed_goes_on_with_other_ranks(
    assets: Path, processes: Processes, tmp_path: Path
) -> None:
    assert len(EXAMPLE.splitlines()) <= 40
    run = tmp_path / "run" / "checkpoint"
    given = (TESTS, Path(TESTS).parent, assets)
    job = processes.torch(4, ON_CPUS + EXAMPLE, *given, tmp_path / "run", 1000)
    while latest(run) < 4:
        assert all(process.poll() is None for process in job), job[0].communicate()
        time.sleep(0.05)
    for process in job:
        process.send_signal(signal.SIGKILL)
    killed = losses(job[0].communicate()[0])
    for process in job[1:]:
        process.wait()
    last = latest(run)
    again = processes.torch(2, ON_CPUS + EXAMPLE, *given, tmp_path / "run", last + 3)
    found = losses(finish(again)[0])
    assert list(found) == [last + 1, last + 2, last + 3]
    whole = tmp_path / "whole"  # on four again: the weights at the start depend on their number
    job = processes.torch(4, ON_CPUS + EXAMPLE, *given, whole, last + 3)
    wanted = losses(finish(job)[0])
    assert wanted.items() >= {step: killed[step] for step in range(1, last + 1)}.items()
    for step, loss in found.items():  # two ranks add the gradients in another order
        assert loss == pytest.approx(wanted[step], rel=1e-4)
    for step in (last, last + 3):
        unickpt.verify(run / f"step_{step}")
    stored = unickpt.load(run / f"step_{last + 3}")
    assert stored["train_state"]["step"] == last + 3
    assert stored["dataloader"]["samples"] == 8 * (last + 3)
    assert set(stored) == {"model", "optimizer", "lr_scheduler", "dataloader", "train_state"}


def finish(job: list[subprocess.Popen[str]]) -> list[str]:
    """As `Processes.finish`; importing torchtitan alone can take a minute on a busy machine."""
    outputs = []
    for process in job:
        out, err = process.communicate(timeout=500)
        assert process.returncode == 0, f"{out}\n{err}"
        outputs.append(out)
    return outputs


def latest(run: Path) -> int:
    if not run.exists():
        return 0
    with unickpt.Checkpointer(run) as found:
        return found.latest() or 0


def losses(output: str) -> dict[int, float]:
    lines = [line.split() for line in output.splitlines() if line.startswith("step ")]
    return {int(step): float(loss) for _, step, loss in lines}
