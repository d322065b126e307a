"""Ray Train with `report`, FSDP2: a worker is killed, and its driver ends.

ckpt-chaos runs the driver and watches nothing but it; so the worker with the rank to kill does what
ckpt-chaos had told the driver. `cluster` of run.py is there; each job has workers of its own.
"""

import os
import sys
from pathlib import Path

import ray.train
import target
import torch
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.distributed.fsdp import fully_shard

import unickpt
from unickpt.integrations.ray import report, url_of


def train(config):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == config["killed"] and config["told"]:
        from ckpt_chaos.targets.common import arm_from_env

        os.environ.update(config["told"])
        arm_from_env(0, lazy=True)  # as the only rank that ckpt-chaos knows of
    sys.argv = ["", config["folder"]]
    import target  # that of the worker

    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
    model = torch.nn.Sequential(*layers)
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if found := ray.train.get_checkpoint():
        state = unickpt.load(url_of(found), state)
    if rank == 0:
        Path(f"{target.FOLDER}.resumed").write_text(str(state["step"]))
    for step in range(state["step"] + 1, target.STEPS + 1):
        data = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(data.chunk(world)[rank]).square().mean().backward()
        optimizer.step()
        report({"step": step}, state | {"step": step}, f"step_{step}")
        ray.train.get_all_reported_checkpoints()  # waits until Ray has written that it knows it
        target.committed(step)
    target.ended(target.whole(model))


saved = target.reported()
ray.init(log_to_driver=False, logging_level="ERROR")
config = {
    "folder": target.FOLDER,
    "killed": int(os.environ.get("CHAOS_KILLED", "0")),
    "told": {key: told for key, told in os.environ.items() if key.startswith("CKPT_CHAOS_")},
}
trainer = TorchTrainer(
    train,
    train_loop_config=config,
    run_config=RunConfig(
        os.path.basename(target.FOLDER),
        os.path.dirname(target.FOLDER),
        checkpoint_config=CheckpointConfig(num_to_keep=target.KEPT),
    ),
    scaling_config=ScalingConfig(num_workers=int(os.environ.get("CHAOS_RANKS", "1"))),
)
trainer.fit()  # raises if a worker ends
target.resumed(int(Path(f"{target.FOLDER}.resumed").read_text()), saved)
target.warm()
target.leave()
