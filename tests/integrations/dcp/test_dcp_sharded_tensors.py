"""ShardedTensors with the drop-in of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

import unickpt
from unickpt.integrations import dcp

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(value: float, dtype: torch.dtype) -> Any:
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
    tensor = sharded_tensor.full(spec, (5, 3), value, dtype=dtype)
    for number, shard in enumerate(tensor.local_shards()):
        shard.tensor.view(-1).add_(torch.arange(shard.tensor.numel(), dtype=dtype) * value + number)
    return tensor


def elements(tensor: Any) -> torch.Tensor:
    return torch.cat([shard.tensor for shard in tensor.local_shards()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("saves", "loads"), [(dcp, dcp), (torch_dcp, dcp)])
def test_sharded_tensors_are_saved_and_loaded_bit_for_bit(
    saves: Any, loads: Any, dtype: torch.dtype, one_rank: None, tmp_path: Path
) -> None:
    saved = sharded(1.5, dtype)
    saves.save({"w": saved, "step": 3}, checkpoint_id=tmp_path / "c")
    state = {"w": sharded(0.0, dtype), "step": 0}
    loads.load(state, checkpoint_id=tmp_path / "c")
    assert torch.equal(elements(state["w"]), elements(saved))
    assert state["step"] == 3
    stored = unickpt.load(tmp_path / "c", framework="torch")
    assert torch.equal(stored["w"], elements(saved))
