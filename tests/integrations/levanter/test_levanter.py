"""levanter's own trainer with unickpt.integrations.levanter.

levanter is large: LEVANTER_PYTHON may name a Python that has it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS
from support.trainer_jobs import losses, python_with

import unickpt
from unickpt.errors import UnsupportedLeaf
from unickpt.integrations.levanter import nested

trainers = [pytest.mark.integration, pytest.mark.trainers, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def python() -> str:
    return python_with("levanter", "LEVANTER_PYTHON")


@pytest.fixture(scope="module")
def whole(python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a run of levanter alone that nobody kills."""
    return losses(python, "levanter_job", "theirs", tmp_path_factory.mktemp("all"), 9, -1, 1)


def test_two_leaves_of_one_name_are_refused() -> None:
    assert nested({"a.b": 1, "a.0": 2, "c": 3}) == {"a": {"b": 1, "0": 2}, "c": 3}
    for names in (["a.b", "a.b.c"], ["a.b.c", "a.b"], ["a", "a.b"]):
        with pytest.raises(UnsupportedLeaf, match="have the name"):
            nested(dict.fromkeys(names, 1))


class TestTrainer:
    pytestmark = trainers

    def test_a_run_that_is_killed_goes_on_on_another_mesh(
        self, python: str, whole: dict[int, str], tmp_path: Path
    ) -> None:
        first = losses(python, "levanter_job", "ours", tmp_path, 9, 5, 1, killed=True)
        assert first == {step: whole[step] for step in range(6)}
        last = latest(tmp_path)
        assert last in (2, 4)
        again = losses(python, "levanter_job", "ours", tmp_path, 9, -1, 0)
        assert again == {step: whole[step] for step in range(last + 1, 9)}
        assert latest(tmp_path) == 8
        stored = tmp_path / "run" / "step-8" / "unickpt"
        unickpt.verify(stored)
        found: Any = unickpt.load(stored)
        assert found["step"] == 9
        assert found["model"]["layers"]["0"]["weight"].shape == (16, 16)
        assert np.asarray(found["model"]["scale"]).dtype == np.float32

    def test_a_run_of_levanter_goes_on_here_and_with_levanter_again(
        self, python: str, whole: dict[int, str], tmp_path: Path
    ) -> None:
        losses(python, "levanter_job", "theirs", tmp_path, 9, 3, 1, killed=True)
        losses(python, "levanter_job", "ours", tmp_path, 9, 7, 1, killed=True)
        last = latest(tmp_path)
        assert last in (4, 6)
        source, back = tmp_path / "run" / f"step-{last}", tmp_path / "back"
        code = "import sys; from unickpt.integrations.levanter import export; export(*sys.argv[1:])"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        where = [str(Path(TESTS).parent), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, where))
        command = [python, "-W", "ignore", "-c", code, source, back / "run" / f"step-{last}"]
        subprocess.run(command, check=True, env=environment)
        again = losses(python, "levanter_job", "theirs", back, 9, -1, 1)
        assert again == {step: whole[step] for step in range(last + 1, 9)}

    def test_parts_mismatches_and_what_levanter_saved(self, python: str, tmp_path: Path) -> None:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        where = [str(Path(TESTS).parent), TESTS, os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, where))
        command = [python, "-W", "ignore", "-m", "support.levanter_cases", str(tmp_path)]
        subprocess.run(command, check=True, env=environment)


def latest(folder: Path) -> int:
    """The newest step that has levanter's `metadata.json`, without which it does not count."""
    found = [p.parent.name for p in folder.glob("run/*/metadata.json")]
    return max(int(name.removeprefix("step-")) for name in found)
