"""What type checkers of users' programs see: mypy, without unickpt's own settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
from dataclasses import dataclass
from typing import Any, assert_type

import unickpt

@dataclass
class State:
    step: int

state = State(3)
def load() -> None:
    assert_type(unickpt.load("c"), Any)
    assert_type(unickpt.load("c", state), State)
    assert_type(unickpt.load("c", like={"s": state}, strict=False), dict[str, State])
    assert_type(unickpt.load("c", state, return_report=True)[0], State)
    assert_type(unickpt.load("c", return_report=True)[1].loaded, tuple[str, ...])

def load_steps(run: unickpt.Checkpointer) -> None:
    assert_type(run.load(), Any)
    assert_type(run.load(state, step=3), State)
    assert_type(run.load(state, fallback=True, return_report=True)[0], State)
    run.load(state, stpe=3)  # wrong
    unickpt.load("c", state, missing="skip")  # wrong
"""


@pytest.mark.integration  # type checks all of unickpt: seconds
def test_a_load_has_the_type_of_like(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    command += ["--config-file=", f"--cache-dir={tmp_path / 'cache'}", "program.py"]
    found = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PATH": "", "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    wrong = [n for n, line in enumerate(PROGRAM.splitlines(), 1) if "# wrong" in line]
    errors = [line for line in found.stdout.splitlines() if ": error: " in line]
    assert {int(line.split(":")[1]) for line in errors} == set(wrong), found.stdout + found.stderr
