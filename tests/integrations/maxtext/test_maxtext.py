"""MaxText's own train loop with unickpt.integrations.maxtext; `test_maxtext_calls.py` makes the
same calls where MaxText is not installed.

MaxText is large: MAXTEXT_PYTHON may name a Python that has it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import TESTS
from support.trainer_jobs import losses, python_with

import unickpt

pytestmark = [pytest.mark.integration, pytest.mark.trainers, pytest.mark.timeout(3600)]
GRAIN = "dataset_type=grain"
REPLICATED = ("ici_fsdp_parallelism=1", "ici_data_parallelism=4")

Job = Callable[..., dict[int, str]]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Runs a job: WAY FOLDER STEPS DIE [NAME=VALUE ...], as `maxtext_job` and `losses` say."""
    python = python_with("maxtext", "MAXTEXT_PYTHON")
    cache = f"jax_cache_dir={tmp_path_factory.mktemp('compiled')}"

    def run(*arguments: object, **how: Any) -> dict[int, str]:
        return losses(python, "maxtext_job", *arguments, cache, **how)

    return run


@pytest.fixture(scope="module")
def theirs(job: Job, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """The steps and losses of a run of MaxText with Orbax that nobody kills."""
    folder = tmp_path_factory.mktemp("theirs")
    found = job("theirs", folder, 9, -1)
    return checkpoints(folder), found


@pytest.fixture(scope="module")
def ours(job: Job, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, dict[int, str]]:
    """The steps of a run that was killed and went on on another mesh; where it went on, and the
    losses from there."""
    folder = tmp_path_factory.mktemp("ours")
    job("ours", folder, 9, 4, killed=True)
    last = steps(checkpoints(folder))[-1]
    again = job("ours", folder, 9, -1, *REPLICATED)
    return checkpoints(folder), last, again


@pytest.fixture
def older(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How a job runs with a version of MaxText: with 0.2.4, which lies in a folder beside that of
    the Python's programs, or with the one that is installed."""
    if request.param == "installed":
        return {}
    folder = Path(python_with("maxtext", "MAXTEXT_PYTHON")).parents[1] / f"maxtext-{request.param}"
    if not folder.exists():
        pytest.skip(f"MaxText {request.param} is not in {folder}")
    # Without the second, 0.2.4 needs more of Google's packages.
    return {"variables": {"PYTHONPATH": str(folder), "DECOUPLE_GCLOUD": "TRUE"}}


def checkpoints(folder: Path) -> Path:
    return folder / "run" / "checkpoints"


def steps(folder: Path) -> list[int]:
    """Those that Orbax has committed, of which ours have our items."""
    found = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    return [step for step in found if (folder / str(step) / "_CHECKPOINT_METADATA").exists()]


def is_ours(folder: Path, step: int) -> bool:
    return (folder / str(step) / "items" / "UNICKPT.txt").exists()


def after(step: int, whole: dict[int, str]) -> dict[int, str]:
    return {each: loss for each, loss in whole.items() if each > step}


def test_a_run_that_is_killed_goes_on_on_another_mesh(
    theirs: tuple[Path, dict[int, str]], ours: tuple[Path, int, dict[int, str]]
) -> None:
    folder, last, again = ours
    assert last in (2, 4)
    assert again == after(last, theirs[1])
    assert steps(folder) == [0, 2, 4, 6, 8]
    assert all(is_ours(folder, step) for step in steps(folder))
    assert unickpt.verify(folder / "8" / "items").ok
    found: Any = unickpt.load(folder / "8" / "items")
    assert found["step"] == 9
    assert {"params", "opt_state", "step"} <= found.keys()


@pytest.mark.parametrize("older", ["installed", "0.2.4"], indirect=True)
def test_a_run_of_orbax_goes_on_here_and_with_orbax_again(
    job: Job, tmp_path: Path, older: dict[str, Any]
) -> None:
    """With Grain, whose place in the data is a part of each step."""
    whole = job("theirs", tmp_path / "whole", 9, -1, GRAIN, **older)
    job("theirs", tmp_path, 9, 3, GRAIN, killed=True, **older)
    assert not is_ours(checkpoints(tmp_path), 0)
    job("ours", tmp_path, 9, 6, GRAIN, killed=True, **older)
    last = steps(checkpoints(tmp_path))[-1]
    assert last in (4, 6)
    assert is_ours(checkpoints(tmp_path), last)
    step, back = checkpoints(tmp_path) / str(last), checkpoints(tmp_path / "back") / str(last)
    shutil.copytree(step, back, ignore=shutil.ignore_patterns("items"))
    python = python_with("maxtext", "MAXTEXT_PYTHON")
    command = [python, "-m", "unickpt", "export", step / "items", back / "items"]
    subprocess.run([*command, "--to", "orbax"], check=True, cwd=Path(TESTS).parent)
    assert job("theirs", tmp_path / "back", 9, -1, GRAIN, **older) == after(last, whole)
    assert job("ours", tmp_path, 9, -1, GRAIN, **older) == after(last, whole)


def test_two_processes_of_which_one_is_killed_and_then_a_single_one(
    job: Job, tmp_path: Path
) -> None:
    """Each process has a part of the arrays, and its own place in Grain's data; a single one goes
    on with both (`expansion_factor_real_data`)."""
    two: dict[str, Any] = {"processes": 2, "devices": 2}
    fewer = (GRAIN, "expansion_factor_real_data=0.5", "per_device_batch_size=2")
    whole = job("theirs", tmp_path / "theirs", 9, -1, GRAIN, **two)
    job("ours", tmp_path / "ours", 9, 5, GRAIN, killed=True, **two)
    folder = checkpoints(tmp_path / "ours")
    last = steps(folder)[-1]
    assert last in (2, 4)
    broadcast = "enable_single_replica_ckpt_restoring=True"
    assert job("ours", tmp_path / "ours", 9, -1, GRAIN, broadcast, **two) == after(last, whole)
    wanted = job("theirs", tmp_path / "theirs", 12, -1, *fewer, devices=2)
    assert job("ours", tmp_path / "ours", 12, -1, *fewer, devices=2) == wanted
    assert sorted(wanted) == [9, 10, 11]
    stored = {path.name for path in (folder / "11" / "iter").glob("process_*.json")}
    assert stored == {"process_0-of-2.json", "process_1-of-2.json"}


@pytest.mark.parametrize("setting", ["load_parameters_path", "load_full_state_path"])
def test_another_run_begins_with_a_step_of_orbax_or_of_ours(
    job: Job,
    theirs: tuple[Path, dict[int, str]],
    ours: tuple[Path, int, dict[int, str]],
    tmp_path: Path,
    setting: str,
) -> None:
    orbax, here = theirs[0] / "8" / "items", ours[0] / "8" / "items"
    wanted = job("theirs", tmp_path / "1", 12, -1, f"{setting}={orbax}")
    assert not wanted.items() & theirs[1].items()  # it began elsewhere
    assert job("ours", tmp_path / "2", 12, -1, f"{setting}={orbax}") == wanted
    assert job("ours", tmp_path / "3", 12, -1, f"{setting}={here}") == wanted


def test_the_example_is_short_and_calls_what_the_job_calls() -> None:
    text = Path(TESTS).parent.joinpath("examples", "maxtext_train.py").read_text()
    assert len(text.splitlines()) <= 40
    assert re.search(r"install\(\)\s+app.run\(main\)", text)
