"""python examples/ray_job.py runs/ray 4 20

FSDP2 on 4 workers. Started again, on any number of workers, it goes on."""

import os
import sys

import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.distributed.fsdp import fully_shard

import unickpt
from unickpt.integrations.ray import report, url_of


def train(config):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (config["workers"],)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if found := ray.train.get_checkpoint():
        state = unickpt.load(url_of(found), state)
    for step in range(state["step"] + 1, config["steps"] + 1):
        data = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        part = data.chunk(config["workers"])[ray.train.get_context().get_world_rank()]
        loss = model(part).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report({"step": step, "loss": loss.item()}, state | {"step": step}, f"step_{step}")


config = {"workers": int(sys.argv[2]), "steps": int(sys.argv[3])}
options = {"failure_config": FailureConfig(3), "checkpoint_config": CheckpointConfig(num_to_keep=2)}
run = RunConfig("example", os.path.abspath(sys.argv[1]), **options)
scaling = ScalingConfig(num_workers=config["workers"])
print(TorchTrainer(train, train_loop_config=config, run_config=run, scaling_config=scaling).fit())
