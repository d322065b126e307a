"""Lightning with `UnickptCheckpointIO`, on one process or several with DDP."""

import os

import lightning
import target
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import unickpt
from unickpt.integrations.lightning import UnickptCheckpointIO, last_checkpoint

os.environ.setdefault("TORCHELASTIC_RUN_ID", "chaos")  # the ranks are there: start no others


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
        self.net = torch.nn.Sequential(*layers)

    def on_train_start(self):
        target.resumed(self.global_step)

    def training_step(self, _):
        torch.manual_seed(self.global_step)
        data = torch.randn(8, 8).chunk(target.WORLD)[target.RANK]
        return self.net(data).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Saving(ModelCheckpoint):
    def _save_topk_checkpoint(self, trainer, candidates):
        super()._save_topk_checkpoint(trainer, candidates)
        if target.OWN:
            target.committed(trainer.global_step)


saving = Saving(
    target.FOLDER, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_last=True
)
options = unickpt.SaveOptions(metrics=target.committed)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=target.WORLD,
    strategy="ddp" if target.WORLD > 1 else "auto",
    max_steps=target.STEPS,
    plugins=[] if target.OWN else [UnickptCheckpointIO(options)],
    callbacks=[saving],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    use_distributed_sampler=False,
)
model = Model()
data = torch.utils.data.DataLoader(range(10**6))
newest = "last" if target.OWN else last_checkpoint(target.FOLDER)
trainer.fit(model, data, ckpt_path=newest)
target.ended(target.whole(model))
