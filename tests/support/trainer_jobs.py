"""Jobs of trainers that need a Python of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from support import TESTS
from support.processes import free_port

JOB_TIMEOUT_S = 900


def python_with(package: str, variable: str) -> str:
    """A Python that has a package: this one, or the one that an environment variable names; skips
    the test if there is none."""
    if variable in os.environ:
        return os.environ[variable]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; {variable} may name a Python that has it")
    return sys.executable


def losses(
    python: str,
    job: str,
    *arguments: object,
    killed: bool = False,
    processes: int = 1,
    devices: int = 4,
    variables: Mapping[str, str] | None = None,
) -> dict[int, str]:
    """The losses of a job, by step, as hexadecimal numbers.

    Arguments:
        python: with which it runs.
        job: the name of its module in tests/support.
        arguments: of the program.
        killed: whether it kills itself; of several processes the last one does, and the others
            are killed then.
        processes: how many it has.
        devices: how many each of them has.
        variables: of the environment; a PYTHONPATH is searched first.
    """
    at = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for i in range(processes):
            more = dict(variables or {})
            if processes > 1:
                more |= {"JAX_AT": at, "JAX_WORLD": str(processes), "JAX_ID": str(i)}
            output = Path(folder, str(i))
            started.append(_started(python, job, arguments, devices, output, more))
        try:
            code = started[-1].wait(JOB_TIMEOUT_S)
            codes = [code] if killed else [each.wait(JOB_TIMEOUT_S) for each in started]
        finally:
            for each in started:
                each.kill()
                each.wait()
        printed = [Path(folder, str(i)).read_text() for i in range(processes)]
    assert {*codes} == {-9 if killed else 0}, "\n".join(printed)
    lines = [line.split() for line in printed[0].splitlines() if line.startswith("loss ")]
    return {int(step): loss for _, step, loss in lines}


def _started(
    python: str,
    job: str,
    arguments: Sequence[object],
    devices: int,
    output: Path,
    more: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """One process of a job, whose output goes into a file; `more` are environment variables."""
    folders = more.get("PYTHONPATH"), str(Path(TESTS).parent), os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "NPROC": "32",  # XLA's threads; gloo's collectives can block all of a few
        **more,
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
    }
    command = [python, "-W", "ignore", str(Path(TESTS, "support", f"{job}.py"))]
    with output.open("wb") as file:
        return subprocess.Popen(
            [*command, *map(str, arguments)], env=environment, stdout=file, stderr=subprocess.STDOUT
        )
