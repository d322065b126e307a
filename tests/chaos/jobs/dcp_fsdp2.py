"""The drop-in for torch.distributed.checkpoint with FSDP2; each save replaces the last."""

from contextlib import suppress

import target
import torch
from torch.distributed.fsdp import fully_shard

import unickpt.integrations.dcp as dcp

target.join()
torch.manual_seed(0)
layers = torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
model = torch.nn.Sequential(*layers)
fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (target.WORLD,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = {"model": model, "optimizer": optimizer, "step": 0}
with suppress(FileNotFoundError):
    dcp.load(state, checkpoint_id=target.FOLDER)
target.resumed(state["step"])
while state["step"] < target.STEPS:
    data = torch.randn(8, 8, generator=torch.Generator().manual_seed(state["step"]))
    optimizer.zero_grad()
    model(data.chunk(target.WORLD)[target.RANK]).square().mean().backward()
    optimizer.step()
    state["step"] += 1
    saving = dcp.async_save(state, checkpoint_id=target.FOLDER)
    saving.result()
    target.committed(state["step"])
target.ended(target.whole(model))
target.leave()
