"""`SaveOptions(writers=)`: so many replicas write, and the others make no data file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.processes import Processes

import unickpt
from unickpt.frameworks.job_bytes import writers_of

RANKS = """
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
import unickpt

root, writers = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (6,))
told = []
for step in range(3):
    tree = {str(n): DTensor.from_local(torch.full((50, 64), step + n), mesh, [Replicate()])
            for n in range(12)}
    tree["plain"] = {str(n): torch.full((50, 640), step * 2 + n) for n in range(6)}
    if step == 2:  # rank 5 alone has a part
        box = unickpt.types.Box((0,), (5000,))
        held = [(box, torch.full((5000,), 7))] if rank == 5 else []
        tree["lone"] = unickpt.types.LocalFragments((5000,), held, dtype="int64")
    base = f"{root}/0" if step == 1 else None
    options = unickpt.SaveOptions(fsync=False, timeout_s=60, chunk_bytes=8 << 10, base=base,
                                  writers=int(writers) or None)
    told.append(unickpt.save(f"{root}/{step}", tree, options=options).written_bytes)
print(json.dumps(told))
dist.destroy_process_group()
"""


@pytest.mark.integration
@pytest.mark.plugins
@pytest.mark.parametrize("writers", [0, 1, 2])
def test_so_many_ranks_write_data_files(writers: int, processes: Processes, tmp_path: Path) -> None:
    outputs = processes.finish(processes.torch(6, RANKS, tmp_path, writers))
    told = [json.loads(text.splitlines()[-1]) for text in outputs]
    expected = {0: set(range(6)), 1: {0}, 2: {0, 3}}[writers]
    for step in range(3):
        path = tmp_path / str(step)
        with_files = {int(file.parent.parent.name) for file in path.glob("processes/*/0*/d/*")}
        wrote = {rank for rank in range(6) if told[rank][step]}
        assert wrote == with_files == expected | ({5} if step == 2 else set())
        assert unickpt.verify(path).ok
        loaded = unickpt.load(path)
        assert all((loaded[str(n)] == step + n).all() for n in range(12))
        assert all((loaded["plain"][str(n)] == step * 2 + n).all() for n in range(6))
    assert (loaded["lone"] == 7).all()


def test_writers_are_spread_evenly() -> None:
    assert writers_of(tuple(range(1024)), 4) == (0, 256, 512, 768)
    assert writers_of((3, 5, 9), 2) == (3, 5)
    assert writers_of((3, 5, 9), 8) == writers_of((3, 5, 9), None) == (3, 5, 9)


@pytest.mark.parametrize("writers", [0, -1, 1.5, "2"])
def test_writers_is_a_positive_integer(writers: object) -> None:
    with pytest.raises(ValueError, match="writers="):
        unickpt.SaveOptions(writers=writers)  # type: ignore[arg-type]
