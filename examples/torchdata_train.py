"""torchrun --nproc-per-node 4 examples/torchdata_train.py runs/data 40: sees each sample once."""

import sys

import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader

import unickpt

dist.init_process_group("gloo")
rank, world, data = dist.get_rank(), dist.get_world_size(), torch.arange(6400)
order = torch.randperm(len(data), generator=torch.manual_seed(1)).tolist()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def go_on(saved, index, count):  # on other ranks, which take turns on the rest
    return {"start": saved[0]["start"] + sum(one["seen"] for one in saved), "seen": 0, "loader": {}}


state = {"model": model, "optimizer": optimizer, "step": 0}
where = {"start": 0, "seen": 0, "loader": {}}
with unickpt.Checkpointer(sys.argv[1], keep_last=2) as run:
    if run.latest() is not None:
        state = run.load(state | {"data": unickpt.PerProcess(redistribute=go_on)})
        where = state["data"].value
    loader = StatefulDataLoader(data, batch_size=8, sampler=order[where["start"] :][rank::world])
    if where["loader"]:
        loader.load_state_dict(where["loader"])
    for step, batch in enumerate(loader, state["step"] + 1):
        loss = (model(torch.sin(batch[:, None] * torch.arange(1, 9))) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        where = where | {"seen": where["seen"] + len(batch), "loader": loader.state_dict()}
        run.save(step, state | {"step": step, "data": unickpt.PerProcess(where)})
        print(f"iteration {step} loss {loss.item().hex()} of {batch.tolist()}", flush=True)
        if step == int(sys.argv[2]):
            break
