"""Jobs whose data comes from Grain or torchdata, killed in the middle."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest
from support import TESTS
from support.processes import Processes

import unickpt

pytestmark = [pytest.mark.integration, pytest.mark.trainers]
EXAMPLES = Path(TESTS).parent / "examples"


def test_grain_goes_on_with_other_numbers_of_processes(
    processes: Processes, tmp_path: Path
) -> None:
    """The losses are those of one process, bit for bit."""
    pytest.importorskip("grain")
    pytest.importorskip("jax")
    source = (EXAMPLES / "grain_train.py").read_text()
    assert len(source.splitlines()) <= 40
    whole = processes.start(source, tmp_path / "whole", 30)
    seen = killed(processes.jax(2, 1, source, tmp_path / "run", 10**6), 8)
    last = newest(tmp_path / "run")
    unickpt.copy(tmp_path / "run" / f"step_{last}", tmp_path / "one" / f"step_{last}")
    outputs = processes.finish(
        [
            whole,
            processes.start(source, tmp_path / "one", 30),
            *processes.jax(2, 1, source, tmp_path / "run", 30),
        ]
    )
    wanted, one, two, _ = map(losses, outputs)
    assert sorted(one) == sorted(two) == list(range(last + 1, 31))
    for found in (seen, one, two):
        known = {i: x for i, x in found.items() if i in wanted}
        assert known == {i: wanted[i] for i in known}


def test_torchdata_goes_on_with_other_numbers_of_ranks(
    processes: Processes, tmp_path: Path
) -> None:
    """On as many ranks, the losses are the same; on others, every sample is seen once."""
    pytest.importorskip("torchdata")
    source = (EXAMPLES / "torchdata_train.py").read_text()
    assert len(source.splitlines()) <= 40
    whole = processes.torch(2, source, tmp_path / "whole", 30)
    job = processes.torch(2, source, tmp_path / "run", 10**6)
    killed(job, 8)
    last = newest(tmp_path / "run")
    unickpt.copy(tmp_path / "run" / f"step_{last}", tmp_path / "one" / f"step_{last}")
    outputs = processes.finish(
        [
            *whole,
            *processes.torch(2, source, tmp_path / "run", 30),
            *processes.torch(1, source, tmp_path / "one", last + 20),
        ]
    )
    wanted = [lines(output) for output in outputs[:2]]
    two = [lines(output) for output in outputs[2:4]]
    for rank in range(2):
        assert sorted(two[rank]) == list(range(last + 1, 31))
        assert two[rank] == {i: wanted[rank][i] for i in two[rank]}
    one = samples(outputs[4])
    before = [x for output in outputs[:2] for i, x in samples(output) if i <= last]
    after = [x for _, x in one]
    everything = before + after
    assert len(before) == last * 16
    assert len(after) == 20 * 8
    assert len(set(everything)) == len(everything)
    again = [x for output in outputs[:2] for i, x in samples(output) if last < i <= last + 10]
    assert sorted(again) == sorted(after)  # ten steps of two ranks are twenty of one


def losses(output: str) -> dict[int, str]:
    return {int(i): x for i, x in re.findall(r"iteration (\d+) loss (\S+)", output)}


def lines(output: str) -> dict[int, str]:
    """What is said of each iteration."""
    return {int(i): text for i, text in re.findall(r"iteration (\d+) (.*)", output)}


def samples(output: str) -> list[tuple[int, int]]:
    """The samples that a rank saw, each with the iteration."""
    found = re.findall(r"iteration (\d+) .* of \[(.*)\]", output)
    return [(int(i), int(x)) for i, seen in found for x in seen.split(",")]


def killed(job: list[subprocess.Popen[str]], iteration: int) -> dict[int, str]:
    """Kills all processes as soon as the first has printed an iteration."""
    first = job[0]
    assert first.stdout is not None
    printed = []
    for line in first.stdout:
        printed.append(line)
        if f"iteration {iteration} " in line:
            break
    else:
        raise AssertionError(first.communicate())
    for process in job:
        process.send_signal(signal.SIGKILL)
    for process in job:
        process.wait()
    return losses("".join(printed))


def newest(run: Path) -> int:
    with unickpt.Checkpointer(run) as checkpointer:
        found = checkpointer.latest()
    assert found
    return found
