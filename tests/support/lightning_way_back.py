"""A job of Lightning that is killed with unickpt's plugin, and goes on without unickpt."""

from __future__ import annotations

import collections
import datetime
import os
import pathlib
import signal
import sys
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from support.lightning_values import assert_same

DATA = torch.arange(30.0).reshape(10, 3).sin()


class History(Callback):
    """Has a state of which much needs pickle."""

    def __init__(self) -> None:
        self.losses: Any = collections.deque(maxlen=3)
        self.array = np.zeros(4, np.int16)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        self.losses.append(outputs["loss"].detach().clone())
        self.array[trainer.global_step % 4] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "array": self.array, "last": np.float32(self.losses[-1])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.array = state["losses"], state["array"].copy()
        assert type(self.losses) is collections.deque
        assert self.losses.maxlen == 3
        assert type(state["last"]) is np.float32


class Model(lightning.LightningModule):
    def __init__(self, root: Any, sizes: Any, since: Any, die: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["die"])
        self.die = die
        self.net = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
        )

    def training_step(self, batch: Any, number: int) -> Any:
        if self.global_step == 6 and self.die:
            self.trainer.strategy.checkpoint_io._saves.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        loss = self.net(batch * (self.global_step + 1)).square().mean()
        self.log("loss", loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


HPARAMS = {"root": pathlib.Path("/data"), "sizes": {3, 5}, "since": datetime.datetime(2026, 1, 2)}


def fit(
    folder: str, steps: int, path: str | None = None, plugins: Any = (), die: bool = False
) -> None:
    """Trains until a step; saves after every second one, and keeps the best two."""
    torch.manual_seed(0)
    saving = ModelCheckpoint(
        folder, monitor="loss", save_top_k=2, save_last=True, every_n_train_steps=2
    )
    trainer = lightning.Trainer(
        max_steps=steps,
        plugins=list(plugins),
        callbacks=[saving, History()],
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(DATA, batch_size=5)  # two steps are an epoch
    trainer.fit(Model(**HPARAMS, die=die), loader, ckpt_path=path, weights_only=False)


def is_killed(folder: str) -> None:
    """Dies within step 7 of 12."""
    from unickpt.integrations.lightning import UnickptCheckpointIO

    fit(folder, 12, plugins=[UnickptCheckpointIO()], die=True)


def goes_on(exported: str, other: str, whole: str) -> None:
    """Goes on with what was exported, and compares it with jobs that never knew unickpt.

    Arguments:
        exported: the folder of the killed job, with files that were exported.
        other, whole: folders of a job of Lightning's that was interrupted, and one that was not.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] == "unickpt"]:
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it fails
    at_step_6 = _read(exported)
    model = Model.load_from_checkpoint(f"{exported}/last.ckpt", weights_only=False)
    assert dict(model.hparams) == HPARAMS
    assert_same(dict(model.state_dict()), dict(at_step_6["state_dict"]))
    fit(exported, 12, path="last")
    fit(other, 6)
    fit(other, 12, path="last")
    fit(whole, 12)
    found = _read(exported)
    assert_same(_moved(found, exported, other), _read(other))
    uninterrupted = _read(whole)
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "callbacks", "epoch"):
        assert_same(_moved(found[key], exported, whole), uninterrupted[key], key)
    assert (at_step_6["global_step"], found["global_step"], len(found["callbacks"])) == (6, 12, 2)
    assert sorted(os.listdir(exported)) == sorted(os.listdir(whole))


def _read(folder: str) -> Any:
    return torch.load(f"{folder}/last.ckpt", weights_only=False)


def _moved(found: Any, old: str, new: str) -> Any:
    """A state with the paths of another folder."""
    if isinstance(found, dict):
        pairs = [(_moved(key, old, new), _moved(x, old, new)) for key, x in found.items()]
        return type(found)(pairs)
    return found.replace(old, new) if isinstance(found, str) else found
