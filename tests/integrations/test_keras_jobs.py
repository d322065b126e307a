"""Jobs of Keras that are killed and go on: examples/keras_fit.py, and variants of it."""

from __future__ import annotations

import re
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from support import TESTS
from support.processes import Processes

import unickpt

# Not imported here: it would look for TensorFlow.
pytestmark = pytest.mark.skipif(find_spec("keras") is None, reason="needs keras")

EXAMPLE = Path(TESTS).parent.joinpath("examples", "keras_fit.py").read_text()
# Slow enough that saves in the background are committed before the job is killed.
SLOW = EXAMPLE.replace("print(line, flush=True)", "print(line, flush=True), time.sleep(0.05)")
SLOW = SLOW.replace("import sys", "import sys, time")


def losses(output: str) -> dict[int, str]:
    """The loss after each iteration, in hexadecimal."""
    return {int(i): x for i, x in re.findall(r"iteration (\d+) loss (\S+)", output)}


def killed_after(process: subprocess.Popen[str], iteration: int) -> dict[int, str]:
    """Kills a job as soon as it has printed an iteration; what it printed until then."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if f"iteration {iteration} " in line:
            process.send_signal(signal.SIGKILL)
            break
    assert process.wait() == -signal.SIGKILL, process.communicate()
    return losses("".join(lines))


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("iteration", [8, 20, 25])  # in the middle, or at the end, of an epoch
def test_a_killed_fit_goes_on_with_the_same_losses(
    processes: Processes, tmp_path: Path, backend: str, iteration: int
) -> None:
    assert len(EXAMPLE.splitlines()) <= 40
    env = {"KERAS_BACKEND": backend}
    script = SLOW if iteration != 20 else SLOW.replace("save_freq=3", "save_freq=10")
    whole = processes.start(script, tmp_path / "whole", 4, env=env)
    first = killed_after(processes.start(script, tmp_path / "run", 4, env=env), iteration)
    last = newest(tmp_path / "run")
    assert 0 < last <= iteration
    [wanted, rest] = map(
        losses, processes.finish([whole, processes.start(script, tmp_path / "run", 4, env=env)])
    )
    rest = {i: x for i, x in rest.items() if i > last}
    assert sorted(rest) == list(range(last + 1, 41))
    assert first == {i: wanted[i] for i in first}
    assert rest == {i: wanted[i] for i in rest}
    found, same = (
        unickpt.load(tmp_path / name / f"step_{newest(tmp_path / name)}")
        for name in ("run", "whole")
    )
    for group in ("model", "optimizer", "metrics"):
        assert_same(found[group], same[group])


def newest(run: Path) -> int:
    with unickpt.Checkpointer(run) as checkpointer:
        return checkpointer.latest() or 0


def assert_same(a: object, b: object) -> None:
    if isinstance(a, dict) and isinstance(b, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    else:
        assert isinstance(a, np.ndarray)
        assert isinstance(b, np.ndarray)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
