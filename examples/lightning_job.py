"""torchrun --nproc-per-node 4 examples/lightning_job.py runs/lightning 20

FSDP2; every rank saves its part. Started again, on any number of ranks, it goes on."""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from unickpt.integrations.lightning import ShardedCheckpoints


class Strategy(ShardedCheckpoints, ModelParallelStrategy): ...  # the only change


class Model(lightning.LightningModule):
    def configure_model(self):
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1)
        self.net = fully_shard(torch.nn.Sequential(*layers), mesh=self.device_mesh["data_parallel"])

    def training_step(self, number):
        data = torch.randn(8, 8, generator=torch.Generator().manual_seed(self.global_step))
        loss = self.net(data.chunk(ranks)[self.global_rank]).square().mean()
        print(f"step {self.global_step + 1} loss {loss.item()}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


ranks = int(os.environ["WORLD_SIZE"])
saving = ModelCheckpoint(sys.argv[1], save_last=True, every_n_train_steps=1)
options = {"devices": ranks, "accelerator": "cpu", "max_steps": int(sys.argv[2]), "logger": False}
trainer = lightning.Trainer(strategy=Strategy(ranks, 1), callbacks=[saving], **options)
trainer.fit(Model(), torch.utils.data.DataLoader(range(10**6)), ckpt_path="last")
