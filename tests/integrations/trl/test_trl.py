"""TRL's GRPOTrainer publishes weights, and an engine in a second process serves them meanwhile."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

from support import TESTS

import unickpt

pytestmark = [pytest.mark.integration, pytest.mark.plugins, pytest.mark.timeout(300)]
EXAMPLE = Path(TESTS).parent / "examples" / "grpo_live.py"


def test_an_engine_serves_the_versions_of_a_grpo_trainer_bit_for_bit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE, tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    line = r"engine: version (\d+), bit for bit, says yes (\d+)%"
    served = [(int(v), int(yes)) for v, yes in re.findall(line, done.stdout)]
    assert done.stdout.count("engine:") == len(served)
    versions = [version for version, _ in served]
    assert versions == sorted(set(versions))
    assert versions[-1] == 20
    training = done.stdout[: done.stdout.index("train_runtime")]
    assert training.count("engine:") > 3
    assert served[-1][1] > 80
    assert unickpt.Checkpointer(tmp_path / "weights").steps() == [18, 19, 20]
    assert unickpt.open(tmp_path / "weights" / "step_20").metadata["step"] == 20
