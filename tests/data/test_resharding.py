"""Real ranks with real loaders: 8, then 6, then 8 of them draw every sample exactly once.

The second job is killed (kill -9, all ranks) while it saves: what it drew after the last commit is
drawn again. `test_loaders.py` has the loaders that .venv lacks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.data_runs import check, job
from support.processes import Processes

pytestmark = pytest.mark.integration


def eight_six_eight(
    processes: Processes, folder: Path, kind: str, until: int, times: int = 1, workers: int = 0
) -> None:
    """As above, with `until` steps of the last job."""
    begun: list[int | None] = [job(processes, folder, kind, 0, 8, 3, workers=workers)]
    job(processes, folder, kind, 1, 6, 4, workers=workers, dies=True)
    begun += [3, job(processes, folder, kind, 2, 8, until, workers=workers, saves=False)]
    assert begun[2] in (6, 7)  # the last save of the job that was killed may have been committed
    check(folder, begun, 2, times)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["torchdata_map", "torchdata_stream"])
def test_stateful_dataloaders(
    kind: str, workers: int, tmp_path: Path, processes: Processes
) -> None:
    eight_six_eight(processes, tmp_path, kind, 28, workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_that_take_turns(workers: int, tmp_path: Path, processes: Processes) -> None:
    eight_six_eight(processes, tmp_path, "torch_turns", 28, workers=workers)


@pytest.mark.parametrize("kind", ["grain_dataset", "grain_loader"])
def test_grain(kind: str, tmp_path: Path, processes: Processes) -> None:
    eight_six_eight(processes, tmp_path, kind, 28)


@pytest.mark.parametrize("kind", ["grain_dataset", "grain_loader"])
def test_grain_with_worker_processes(kind: str, tmp_path: Path, processes: Processes) -> None:
    begun = [job(processes, tmp_path, kind, 0, 2, 5, shards=6, workers=1)]
    begun.append(job(processes, tmp_path, kind, 1, 3, 4, shards=6, workers=1))
    begun.append(job(processes, tmp_path, kind, 2, 2, 122, shards=6, workers=1, saves=False))
    assert begun == [0, 5, 9]
    check(tmp_path, begun, 2)


def test_token_buffers(tmp_path: Path, processes: Processes) -> None:
    eight_six_eight(processes, tmp_path, "packed", 130, times=6)


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
