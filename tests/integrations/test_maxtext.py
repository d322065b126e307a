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
    with unickpt.Checkpointer(folder) as found:
        return found.steps()


def after(step: int, whole: dict[int, str]) -> dict[int, str]:
    return {each: loss for each, loss in whole.items() if each > step}


def test_a_run_that_is_killed_goes_on_on_another_mesh(
    theirs: tuple[Path, dict[int, str]], ours: tuple[Path, int, dict[int, str]]
) -> None:
    folder, last, again = ours
    assert last in (2, 4)
    assert again == after(last, theirs[1])
    assert steps(folder) == [0, 2, 4, 6, 8]
    stored = folder / "step_8"
    unickpt.verify(stored)
    found: Any = unickpt.load(stored)["items"]
    assert found["step"] == 9
    assert {"params", "opt_state", "step"} <= found.keys()


@pytest.mark.parametrize("older", ["installed", "0.2.4"], indirect=True)
def test_a_run_of_orbax_goes_on_here_and_with_orbax_again(
    job: Job, tmp_path: Path, older: dict[str, Any]
) -> None:
    """With Grain, whose place in the data is a part of each step."""
    whole = job("theirs", tmp_path / "whole", 9, -1, GRAIN, **older)
    job("theirs", tmp_path, 9, 3, GRAIN, killed=True, **older)
    assert {path.name for path in checkpoints(tmp_path).iterdir()} >= {"0"}
    job("ours", tmp_path, 9, 5, GRAIN, killed=True, **older)
    last = steps(checkpoints(tmp_path))[-1]
    assert last in (2, 4)
    there = checkpoints(tmp_path / "back") / str(last)
    python = python_with("maxtext", "MAXTEXT_PYTHON")
    command = [python, "-m", "unickpt", "export", checkpoints(tmp_path) / f"step_{last}", there]
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
    names = {f"process_{process}-of-2.json" for process in (0, 1)}
    assert unickpt.load(folder / "step_11")["iter"].keys() == names


EMERGENCY = ("enable_emergency_checkpoint=True", "checkpoint_period=4"), [0, 4, 8]
MULTI_TIER = (
    ("enable_multi_tier_checkpointing=True", "multi_tier_checkpointing_backup_interval_steps=3"),
    [0, 3, 6, 8],
)


@pytest.mark.parametrize(
    ("kind", "kept", "older"),
    [
        pytest.param(*EMERGENCY, "installed", id="emergency"),
        pytest.param(*MULTI_TIER, "installed", id="multi-tier"),
        pytest.param(*EMERGENCY, "0.2.4", id="emergency-0.2.4"),
    ],
    indirect=["older"],
)
def test_a_local_tier_goes_on_after_a_kill_and_after_its_loss(
    job: Job,
    theirs: tuple[Path, dict[int, str]],
    tmp_path: Path,
    kind: tuple[str, ...],
    kept: list[int],
    older: dict[str, Any],
) -> None:
    local, persistent = tmp_path / "local", checkpoints(tmp_path)
    given = (*kind, "local_checkpoint_period=1", f"local_checkpoint_directory={local}")
    job("ours", tmp_path, 9, 5, *given, killed=True, **older)
    last = steps(local)[-1]
    assert last in (3, 4, 5)
    copy = tmp_path / "copy"
    shutil.copytree(persistent, checkpoints(copy))  # as if the node were lost, with its memory
    assert job("ours", tmp_path, 9, -1, *given, **older) == after(last, theirs[1])
    assert steps(local)[-1] == 8
    assert steps(persistent) == kept
    lost = (*kind, "local_checkpoint_period=1", f"local_checkpoint_directory={copy / 'local'}")
    last = steps(checkpoints(copy))[-1]
    assert job("ours", copy, 9, -1, *lost, **older) == after(last, theirs[1])
    assert steps(checkpoints(copy)) == kept


@pytest.mark.parametrize("setting", ["load_parameters_path", "load_full_state_path"])
def test_another_run_begins_with_a_step_of_orbax_or_of_ours(
    job: Job,
    theirs: tuple[Path, dict[int, str]],
    ours: tuple[Path, int, dict[int, str]],
    tmp_path: Path,
    setting: str,
) -> None:
    orbax, here = theirs[0] / "8" / "items", ours[0] / "step_8" / "items"
    wanted = job("theirs", tmp_path / "1", 12, -1, f"{setting}={orbax}")
    assert not wanted.items() & theirs[1].items()  # it began elsewhere
    assert job("ours", tmp_path / "2", 12, -1, f"{setting}={orbax}") == wanted
    assert job("ours", tmp_path / "3", 12, -1, f"{setting}={here}") == wanted


def test_the_example_is_short_and_calls_what_the_job_calls() -> None:
    text = Path(TESTS).parent.joinpath("examples", "maxtext_train.py").read_text()
    assert len(text.splitlines()) <= 40
    assert re.search(r"install\(\)\s+app.run\(main\)", text)
