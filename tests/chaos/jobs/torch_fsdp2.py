"""Plain torch with FSDP2 and a `Checkpointer`."""

import target
import torch
from torch.distributed.fsdp import fully_shard

import unickpt

target.join()
torch.manual_seed(0)
layers = torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
model = torch.nn.Sequential(*layers)
fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (target.WORLD,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = {"model": model, "optimizer": optimizer, "step": 0}
options = unickpt.SaveOptions(metrics=target.committed)
with unickpt.Checkpointer(target.FOLDER, keep_last=target.KEPT, options=options) as run:
    if run.latest() is not None:
        state = run.load(state)
    target.resumed(state["step"])
    while state["step"] < target.STEPS:
        data = torch.randn(8, 8, generator=torch.Generator().manual_seed(state["step"]))
        optimizer.zero_grad()
        model(data.chunk(target.WORLD)[target.RANK]).square().mean().backward()
        optimizer.step()
        state["step"] += 1
        run.save(state["step"], state)
target.ended(target.whole(model))
target.leave()
