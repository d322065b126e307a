"""ckpt-chaos kills a job of each integration at every event of its saves that it sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.run import JOBS, run, served

CASES = [
    pytest.param(name, ranks, killed, id=f"{job.environment}-{name}-{ranks}-{killed}")
    for name, job in JOBS.items()
    for ranks, killed in job.cases()
]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "ranks", "killed"), CASES)
def test_every_point_passes(name: str, ranks: int, killed: int, tmp_path: Path) -> None:
    pytest.importorskip("ckpt_chaos")
    with served(name, tmp_path) as command:
        outcome = run(command, name, ranks, killed, tmp_path / "runs")
    assert not outcome.failed
    assert len(outcome.points) > (20 if ranks == 1 else 8)
    # Which rank makes a folder is a race: in one run a rank has more events than in another.
    died = sum(point.died for point in outcome.points)
    assert died > (0.9 if ranks == 1 else 0.4) * len(outcome.points)
