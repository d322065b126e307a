"""torch jobs of several ranks; torch_ranks.py holds what the ranks do, and what must come out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import TESTS
from support.processes import Processes

pytest.importorskip("torch")

SCRIPT = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
sys.argv = sys.argv[1:]
runpy.run_module("support.torch_ranks", run_name="__main__")
"""


def check(processes: Processes, world: int, root: Path, *cases: str) -> None:
    """Starting ranks takes seconds, so all cases of a world run in one launch."""
    tests = Path(TESTS)
    outputs = processes.finish(processes.torch(world, SCRIPT, tests, root, *cases))
    outcomes = json.loads(outputs[0].splitlines()[-1])
    assert outcomes
    failed = {name: text for name, text in outcomes.items() if text != "ok"}
    assert not failed, "\n\n".join(f"{name}\n{text}" for name, text in failed.items())


def test_six_and_four_ranks(processes: Processes, tmp_path: Path) -> None:
    check(processes, 6, tmp_path)
    check(processes, 4, tmp_path)  # reads what six ranks wrote


@pytest.mark.slow
def test_eight_ranks(processes: Processes, tmp_path: Path) -> None:
    check(processes, 8, tmp_path)
