"""Jobs of trainers that need a Python of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import TESTS


def python_with(package: str, variable: str) -> str:
    """A Python that has a package: this one, or the one that an environment variable names; skips
    the test if there is none."""
    if variable in os.environ:
        return os.environ[variable]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; {variable} may name a Python that has it")
    return sys.executable


def losses(python: str, job: str, *arguments: object, killed: bool = False) -> dict[int, str]:
    """The losses of a job, by step, as hexadecimal numbers.

    Arguments:
        python: with which it runs.
        job: the name of its module in tests/support.
        arguments: of the program.
        killed: whether it kills itself.
    """
    above = Path(TESTS).parent
    where = os.pathsep.join(filter(None, (str(above), os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        "PYTHONPATH": where,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    command = [python, "-W", "ignore", str(Path(TESTS, "support", f"{job}.py"))]
    ended = subprocess.run(
        [*command, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == (-9 if killed else 0), ended.stdout + ended.stderr
    lines = [line.split() for line in ended.stdout.splitlines() if line.startswith("loss ")]
    return {int(step): loss for _, step, loss in lines}
