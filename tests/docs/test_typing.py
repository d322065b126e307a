"""What type checkers of users' programs see: mypy, without unickpt's own settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from unickpt.plugins.merge.method_parameters import METHODS, MethodName

PROGRAM = """
from dataclasses import dataclass
from typing import Any, assert_type

import unickpt
from unickpt.adapters.torch_optimizer import NamedOptimizer

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

assert_type(NamedOptimizer, type[NamedOptimizer])
unickpt.SaveOptions(compression="zstd", staging="copy", reuse="patch")
unickpt.SaveOptions(compression="zip")  # wrong
unickpt.SaveOptions(staging="later")  # wrong
unickpt.Checkpointer("run", reuse="patches")  # wrong
unickpt.merge(["a", "b"], "c", how="median")  # wrong
unickpt.merge(["a", "b"], "c", integers="first")  # wrong
"""


# Their types do not matter here, and checking them takes ten times as long as all of unickpt.
CONFIG = """
[mypy]
[mypy-jax.*,numpy.*,tensorstore.*,torch.*]
follow_imports = skip
"""


@pytest.mark.integration  # type checks all of unickpt: seconds
def test_a_load_has_the_type_of_like_and_a_misspelled_word_is_an_error(tmp_path: Path) -> None:
    """The Makefile installs a path, which mypy follows; it follows no import hook."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command += ["--config-file=mypy.ini", f"--cache-dir={tmp_path / 'cache'}", "program.py"]
    found = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PATH": ""},
        capture_output=True,
        text=True,
    )
    wrong = [n for n, line in enumerate(PROGRAM.splitlines(), 1) if "# wrong" in line]
    errors = [line for line in found.stdout.splitlines() if ": error: " in line]
    assert {int(line.split(":")[1]) for line in errors} == set(wrong), found.stdout + found.stderr


def test_the_names_of_merge_methods_are_those_of_its_type() -> None:
    assert get_args(MethodName) == tuple(method.name for method in METHODS)
