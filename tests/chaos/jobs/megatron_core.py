"""Megatron-Core's `dist_checkpointing` with unickpt's strategies; columns of a layer are on the
ranks."""

import glob
import os
import shutil

import target
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

from unickpt.integrations.megatron import LoadStrategy, SaveStrategy, latest

target.join()
torch.cuda.current_device = lambda: "cpu"  # Megatron asks for no other
weight = torch.nn.Parameter(torch.zeros(8, 16 // target.WORLD))
optimizer = torch.optim.AdamW([weight], lr=0.1)
(weight - 1).square().mean().backward()
optimizer.step()  # so that it has moments
saves, loads = SaveStrategy(), LoadStrategy()


def state(step):
    moments = {f"optimizer.{k}": optimizer.state[weight][k] for k in ("exp_avg", "exp_avg_sq")}
    sharded = {"weight": weight.data, **moments}
    at = (1, target.RANK, target.WORLD)
    made = {k: ShardedTensor.from_rank_offsets(k, x, at) for k, x in sharded.items()}
    return {**made, "step": step}


step = 0
reported = target.reported()
if (newest := latest(target.FOLDER)) is not None:
    found = dist_checkpointing.load(state(0), newest, loads)
    step = found["step"]
    weight.data.copy_(found["weight"])
    for slot in ("exp_avg", "exp_avg_sq"):
        optimizer.state[weight][slot].copy_(found[f"optimizer.{slot}"])
    optimizer.state[weight]["step"].fill_(step + 1)
target.resumed(step, reported)
while step < target.STEPS:
    step += 1
    optimizer.zero_grad()
    (weight - step).square().mean().backward()
    optimizer.step()
    folder = f"{target.FOLDER}/iter_{step:07}"
    os.makedirs(folder, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state(step), folder, saves)
    target.committed(step)
    dist.barrier()
    if target.RANK == 0:
        for older in glob.glob(f"{target.FOLDER}/iter_*"):
            if older < folder:
                shutil.rmtree(older)
columns = [torch.empty_like(weight.data) for _ in range(target.WORLD)]
dist.all_gather(columns, weight.data)
target.ended({"weight": torch.cat(columns, 1).numpy()})
target.leave()
