"""MaxText's own train loop with unickpt.integrations.maxtext; `test_maxtext_calls.py` makes the
same calls where MaxText is not installed.

MaxText is large: MAXTEXT_PYTHON may name a Python that has it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import TESTS
from support.trainer_jobs import losses, python_with

import unickpt

pytestmark = [pytest.mark.integration, pytest.mark.trainers, pytest.mark.timeout(3600)]
REPLICATED = ("ici_fsdp_parallelism=1", "ici_data_parallelism=4")


@pytest.fixture(scope="module")
def python() -> str:
    return python_with("maxtext", "MAXTEXT_PYTHON")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compiled programs, for all jobs."""
    return f"jax_cache_dir={tmp_path_factory.mktemp('compiled')}"


@pytest.fixture(scope="module")
def whole(python: str, cache: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a run of MaxText with Orbax that nobody kills."""
    folder = tmp_path_factory.mktemp("whole")
    return losses(python, "maxtext_job", "theirs", folder, 9, -1, cache)


def steps(folder: Path) -> list[int]:
    with unickpt.Checkpointer(folder / "run" / "checkpoints") as found:
        return found.steps()


def test_a_run_that_is_killed_goes_on_on_another_mesh(
    python: str, cache: str, whole: dict[int, str], tmp_path: Path
) -> None:
    losses(python, "maxtext_job", "ours", tmp_path, 9, 4, cache, killed=True)
    last = steps(tmp_path)[-1]
    assert last in (2, 4)
    again = losses(python, "maxtext_job", "ours", tmp_path, 9, -1, cache, *REPLICATED)
    assert again == {step: whole[step] for step in range(last + 1, 9)}
    assert steps(tmp_path) == [0, 2, 4, 6, 8]
    stored = tmp_path / "run" / "checkpoints" / "step_8"
    unickpt.verify(stored)
    found: Any = unickpt.load(stored)["items"]
    assert found["step"] == 9
    assert {"params", "opt_state", "step"} <= found.keys()


def test_a_run_of_orbax_goes_on_here_and_with_orbax_again(
    python: str, cache: str, whole: dict[int, str], tmp_path: Path
) -> None:
    losses(python, "maxtext_job", "theirs", tmp_path, 9, 3, cache, killed=True)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} >= {"0"}
    losses(python, "maxtext_job", "ours", tmp_path, 9, 5, cache, killed=True)
    last = steps(tmp_path)[-1]
    assert last in (2, 4)
    there = tmp_path / "back" / "run" / "checkpoints" / str(last)
    command = [python, "-m", "unickpt", "export", checkpoints / f"step_{last}", there]
    subprocess.run([*command, "--to", "orbax"], check=True, cwd=Path(TESTS).parent)
    again = losses(python, "maxtext_job", "theirs", tmp_path / "back", 9, -1, cache)
    assert again == {step: whole[step] for step in range(last + 1, 9)}


def test_the_example_is_short_and_calls_what_the_job_calls() -> None:
    text = Path(TESTS).parent.joinpath("examples", "maxtext_train.py").read_text()
    assert len(text.splitlines()) <= 40
    assert re.search(r"install\(\)\s+app.run\(main\)", text)
