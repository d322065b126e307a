"""Output that is cut, as by `| head`: no command fails, and verdicts stay what they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import unickpt

MANY = {f"w{n}_{'x' * (n % 50)}": np.ones(n % 7 + 1) for n in range(700)} | {"w": np.ones(90_000)}
COMMANDS = {
    "inspect a": 0, "inspect a --json": 0, "inspect a --all": 0, "ls .": 0,
    "presets litgpt-llama": 0, "verify a": 0, "verify bad": 1, "verify bad --json": 1,
    "diff a a": 0, "diff a b": 1, "inspect nothing": 2, "--help": 0,
}  # fmt: skip
# Other commands print as these do.
ALIKE = {"inspect a --json", "inspect a --all", "verify bad --json", "diff a a"}


def _size(path: Path) -> int:
    return path.stat().st_size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("pipes")
    unickpt.save(found / "a", MANY)
    unickpt.save(found / "b", {name: array + 1 for name, array in MANY.items()})
    unickpt.save(found / "bad", MANY)
    data = max((path for path in (found / "bad").rglob("*") if path.is_file()), key=_size)
    os.truncate(data, 100_000)
    return found


@pytest.mark.integration
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] if command in ALIKE else [])
        for command in COMMANDS
    ],
)
def test_a_closed_pipe_changes_no_exit_code(command: str, folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # nothing is read at all: every write fails
    found = subprocess.run(
        [sys.executable, "-m", "unickpt.cli", *command.split()],
        cwd=folder, stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writer)
    assert found.returncode == COMMANDS[command], found.stderr
    assert "Traceback" not in found.stderr
    assert "BrokenPipe" not in found.stderr
