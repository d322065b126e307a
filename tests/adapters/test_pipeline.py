"""Pipeline stages: processes whose trees hold different plain arrays, without communication."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.processes import Processes

import unickpt

STAGE = """
import sys, numpy as np, unickpt
me, count, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
layers = {n: {"w": np.arange(40.0) + n, "step": np.float32(n)}
          for n in range(10) if n % 3 == me % 3}
tree = {"layers": layers, "shared": np.arange(7), "step": 3}
if len(sys.argv) > 4:
    exec(sys.argv[4])
options = unickpt.SaveOptions(
    group=unickpt.ProcessGroup(me, count, "run"), timeout_s=20, chunk_bytes=64
)
report = unickpt.save(path, tree, options=options)
print(report.arrays, report.bytes, report.processes)
"""


def run(processes: Processes, path: Path, count: int, extra: str = "") -> list[tuple[str, str]]:
    arguments = [extra] if extra else []
    started = [processes.forked(STAGE, me, count, path, *arguments) for me in range(count)]
    return [p.communicate(timeout=60) for p in started]


@pytest.mark.parametrize("count", [3, 5])  # with 5, two stages have two replicas
def test_the_stages_unite(count: int, processes: Processes, tmp_path: Path) -> None:
    outcomes = run(processes, tmp_path / "c", count)
    nbytes = 10 * (320 + 4) + 56
    assert outcomes == [(f"21 {nbytes} {count}\n", "")] * count
    got = unickpt.load(tmp_path / "c")
    assert sorted(got["layers"]) == list(range(10))
    for n, layer in got["layers"].items():
        assert np.array_equal(layer["w"], np.arange(40.0) + n)
        assert layer["step"] == n
    assert unickpt.verify(tmp_path / "c").ok
    folders = {p.name for p in (tmp_path / "c" / "processes").iterdir()}
    assert folders == {"run-000000"}


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("tree['step'] = me", "disagree about value 'step'"),
        ("tree['shared'] = np.arange(7 + me)", "disagree about array 'shared'"),
        ("tree['layers'] = [1] if me else {}", "differ at 'layers'"),
    ],
)
def test_stages_that_contradict_each_other_all_say_so(
    extra: str, reason: str, processes: Processes, tmp_path: Path
) -> None:
    for out, err in run(processes, tmp_path / "c", 3, extra):
        assert out == ""
        assert reason in err
    with pytest.raises(unickpt.CheckpointNotFound):
        unickpt.open(tmp_path / "c")


def test_a_session_is_never_used_twice(processes: Processes, tmp_path: Path) -> None:
    run(processes, tmp_path / "c", 3)
    for _, err in run(processes, tmp_path / "c", 3):
        assert "attempt 'run-000000' was used before" in err
