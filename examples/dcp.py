"""torchrun --nproc-per-node 4 examples/dcp.py runs/latest 20

Only one import differs from torch's own. Started again, on any number of ranks, it goes on."""

import gc
import sys
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import unickpt.integrations.dcp as dcp  # instead of torch.distributed.checkpoint as dcp


def train(path, steps):
    class App:  # a Stateful
        def state_dict(self):
            return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))

        def load_state_dict(self, state):
            set_state_dict(model, optimizer, **{f"{k}_state_dict": v for k, v in state.items()})

    model = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"app": App(), "step": 0}
    with suppress(FileNotFoundError):
        dcp.load(state, checkpoint_id=path)
    while state["step"] < steps:
        data = torch.randn(8, 8, generator=torch.Generator().manual_seed(state["step"]))
        optimizer.zero_grad()
        model(data.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
        optimizer.step()
        state["step"] += 1
        dcp.async_save(state, checkpoint_id=path)  # replaces the last, atomically
        print(f"step {state['step']}", flush=True)


dist.init_process_group("gloo")
torch.manual_seed(0)
train(sys.argv[1], int(sys.argv[2]))  # Python exits when the last save is committed
gc.collect()  # frees the model first: see "terminate called" in docs/troubleshooting.md
dist.destroy_process_group()
