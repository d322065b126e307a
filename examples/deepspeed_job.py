"""DS_ACCELERATOR=cpu torchrun --nproc-per-node 4 examples/deepspeed_job.py run 20 --stage 3

Started again, with any stage of ZeRO and on any number of ranks, it goes on."""

import argparse

import deepspeed
import torch

from unickpt.integrations.deepspeed import use_unickpt

parser = argparse.ArgumentParser()
parser.add_argument("run")
parser.add_argument("steps", type=int)
parser.add_argument("--stage", type=int, default=1)
arguments = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
config = {
    "train_batch_size": 12,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": arguments.stage},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
use_unickpt(engine)  # all else is DeepSpeed's own
engine.load_checkpoint(arguments.run)
while engine.global_steps < arguments.steps:
    data = torch.randn(12, 8, generator=torch.Generator().manual_seed(engine.global_steps))
    share = data[torch.distributed.get_rank() :: torch.distributed.get_world_size()]
    engine.backward(engine(share).square().mean())
    engine.step()
    engine.save_checkpoint(arguments.run)  # in the background
    print(f"step {engine.global_steps}", flush=True)
