"""A type checker sees the package as a user of an installation does, and knows its words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from unickpt.tools.merge_methods import METHODS, MethodName

pytestmark = pytest.mark.integration

PROGRAM = """
import unickpt
from unickpt.adapters.torch_optimizer import NamedOptimizer

report = unickpt.save("a", {}, options=unickpt.SaveOptions(compression="zstd"))
reveal_type(report.bytes)
reveal_type(unickpt.load("a", {"step": 1}))
reveal_type(NamedOptimizer)
unickpt.SaveOptions(compression="zip")
unickpt.SaveOptions(staging="later")
unickpt.Checkpointer("run", reuse="patches")
unickpt.merge(["a", "b"], "c", how="median")
unickpt.merge(["a", "b"], "c", integers="first")
"""


def test_mypy_finds_the_installed_package_and_refuses_a_misspelled_word(tmp_path: Path) -> None:
    """The editable install of the Makefile is a path, not an import hook: mypy follows no hooks."""
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--no-incremental", "--ignore-missing-imports"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "--no-error-summary", str(program)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    lines = re.findall(r"program\.py:(\d+): (\w+): (.*)", done.stdout)
    notes = [text for _, kind, text in lines if kind == "note" and "Revealed" in text]
    types = [note.split('"')[1] for note in notes]
    assert types[:2] == ["int", "dict[str, int]"], done.stdout
    assert types[2].endswith("-> unickpt.adapters.torch_optimizer.NamedOptimizer"), done.stdout
    errors = [int(line) for line, kind, _ in lines if kind == "error"]
    assert errors == [9, 10, 11, 12, 13], done.stdout


def test_the_names_of_merge_methods_are_those_of_its_type() -> None:
    assert get_args(MethodName) == tuple(method.name for method in METHODS)
