"""Real ranks with real loaders: 8, then 6, then 8 of them draw every sample exactly once.

There are 4 and 3 where loaders have worker processes, which take long to start. The second job is
killed (kill -9, all ranks) while it saves: what it drew after the last commit is drawn again.
`test_loaders.py` has the loaders that .venv lacks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.data_runs import check, job, there_and_back
from support.processes import Processes

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["torchdata_map", "torchdata_stream"])
def test_stateful_dataloaders(
    kind: str, workers: int, tmp_path: Path, processes: Processes
) -> None:
    ranks, until = ((4, 3), 56) if workers else ((8, 6), 28)
    there_and_back(processes, tmp_path, kind, until, workers=workers, ranks=ranks)


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_that_take_turns(workers: int, tmp_path: Path, processes: Processes) -> None:
    ranks, until = ((4, 3), 56) if workers else ((8, 6), 28)
    there_and_back(processes, tmp_path, "torch_turns", until, workers=workers, ranks=ranks)


@pytest.mark.parametrize("kind", ["grain_dataset", "grain_loader"])
def test_grain(kind: str, tmp_path: Path, processes: Processes) -> None:
    there_and_back(processes, tmp_path, kind, 28)


@pytest.mark.parametrize(
    "kind", ["grain_dataset", pytest.param("grain_loader", marks=pytest.mark.trainers)]
)
def test_grain_with_worker_processes(kind: str, tmp_path: Path, processes: Processes) -> None:
    # A worker imports Grain anew, which takes a second, and each shard has one.
    begun = [job(processes, tmp_path, kind, 0, 2, 5, shards=2, workers=1)]
    begun.append(job(processes, tmp_path, kind, 1, 1, 4, shards=2, workers=1))
    begun.append(job(processes, tmp_path, kind, 2, 2, 122, shards=2, workers=1, saves=False))
    assert begun == [0, 5, 9]
    check(tmp_path, begun, 2)


def test_token_buffers(tmp_path: Path, processes: Processes) -> None:
    there_and_back(processes, tmp_path, "packed", 130, times=6)


def test_ranks_of_several_processes_save_one_copy(tmp_path: Path, processes: Processes) -> None:
    begun = [job(processes, tmp_path, "torch_turns", 0, 2, 3, replicas=2)]
    begun.append(job(processes, tmp_path, "torch_turns", 1, 3, 2))
    begun.append(job(processes, tmp_path, "torch_turns", 2, 2, 200, saves=False))
    assert begun == [0, 3, 5]
    for run in (0,):  # both processes of a rank drew the same
        for rank in (0, 1):
            one, other = ((tmp_path / f"seen-{run}-{2 * rank + i}").read_text() for i in (0, 1))
            assert one == other
            (tmp_path / f"seen-{run}-{2 * rank + 1}").unlink()
    check(tmp_path, begun, 2)
