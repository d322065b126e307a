"""torchrun --nproc-per-node 4 examples/megatron_job.py run 20

The columns of a layer are on the ranks. Started again, on 1, 2 or 4 of them, it goes on."""

import os
import sys

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

from unickpt.integrations.megatron import LoadStrategy, SaveStrategy, latest

run, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
weight = torch.nn.Parameter(torch.zeros(8, 16 // ranks))
optimizer = torch.optim.SGD([weight], lr=0.1)
save, load = SaveStrategy(), LoadStrategy()


def state(step: int) -> dict[str, object]:
    at = (1, rank, ranks)  # along axis 1, part `rank` of `ranks`
    return {"weight": ShardedTensor.from_rank_offsets("weight", weight.data, at), "step": step}


step = 0
if (folder := latest(run)) is not None:
    step = dist_checkpointing.load(state(0), folder, load)["step"]
while step < steps:
    step += 1
    optimizer.zero_grad()
    (weight - step).square().mean().backward()
    optimizer.step()
    os.makedirs(f"{run}/{step:07}", exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state(step), f"{run}/{step:07}", save)
    print(f"step {step}", flush=True)
dist.destroy_process_group()
