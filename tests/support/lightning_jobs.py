"""Training jobs of Lightning for test_lightning.py, run by forked processes."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import lightning_utilities.core.imports as lightning_imports

# torchmetrics would import transformers, which takes half a minute on a busy machine, and SciPy's
# signals, which take a second.
_is_there = lightning_imports.RequirementCache.__bool__
_is_installed = lightning_imports.package_available
lightning_imports.package_available = lambda name: name != "scipy" and _is_installed(name)
lightning_imports.RequirementCache.__bool__ = lambda self: (
    not {"transformers", "scipy"} & {*re.findall(r"\w+", str(getattr(self, "requirement", "")))}
    and _is_there(self)
)
warnings.simplefilter("ignore")

import lightning  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from unickpt.integrations.lightning import (  # noqa: E402
    ShardedCheckpoints,
    UnickptCheckpointIO,
    last_checkpoint,
)

__all__ = ["ModelCheckpoint", "UnickptCheckpointIO", "fit", "last_checkpoint", "torch"]

CPU = torch.device("cpu")


class Sharded(ShardedCheckpoints, ModelParallelStrategy):
    pass


class Sharded1(ShardedCheckpoints, FSDPStrategy):
    def _setup_model(self, model: Any) -> Any:  # Lightning's asks for an accelerator
        return FullyShardedDataParallel(model, device_id=CPU, **self.kwargs)


class Model(lightning.LightningModule):
    """Its batches depend on the step alone, so that a run that goes on has the same losses."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kind = kind
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )

    def configure_model(self) -> None:
        mesh = getattr(self, "_device_mesh", None)
        if self.kind != "sharded" or isinstance(self.net, torch.distributed.fsdp.FSDPModule):
            return
        if mesh["tensor_parallel"].size() > 1:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, mesh["tensor_parallel"], plan)
        fully_shard(self.net, mesh=mesh["data_parallel"])

    def training_step(self, number: Any) -> Any:
        data = torch.randn(8, 8, generator=torch.Generator().manual_seed(self.global_step))
        sampler = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None)
        parts, part = (sampler["num_replicas"], sampler["rank"]) if sampler else (1, 0)
        loss = self.net(data.chunk(parts)[part]).square().mean()
        self.log("loss", loss.detach(), sync_dist=True)
        print(f"step {self.global_step + 1} {loss.item().hex()}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 400])
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(
    kind: str,
    folder: str,
    steps: int,
    *,
    ckpt_path: str | None = "last",
    **given: Any,
) -> Any:
    """Trains until a step; returns the trainer.

    Arguments:
        kind, folder, steps: as for `trainer_of`.
        ckpt_path: as Lightning's.
        given: further arguments of `trainer_of`.
    """
    trainer = trainer_of(kind, folder, steps, **given)
    data = torch.utils.data.DataLoader(range(10**6))
    trainer.fit(Model(kind), data, ckpt_path=ckpt_path)
    return trainer


def trainer_of(
    kind: str,
    folder: str,
    steps: int,
    *,
    tensor_parallel: int = 1,
    saving: Callable[[], Any] | None = None,
    io: Any = None,
) -> Any:
    """A trainer with unickpt's plugin.

    Arguments:
        kind: "single", "ddp", "sharded" (FSDP2 and TP) or "sharded1" (FSDP1).
        folder: of the checkpoints.
        steps: until which to train.
        tensor_parallel: ranks that have parts of a matrix.
        saving: makes the `ModelCheckpoint`.
        io: the plugin.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    strategies: dict[str, Callable[[], Any]] = {
        "single": lambda: "auto",
        "ddp": lambda: "ddp",
        "sharded": lambda: Sharded(ranks // tensor_parallel, tensor_parallel),
        "sharded1": Sharded1,
    }
    make = saving or (lambda: ModelCheckpoint(folder, save_last=True, every_n_train_steps=1))
    return lightning.Trainer(
        strategy=strategies[kind](),
        devices=ranks,
        accelerator="cpu",
        max_steps=steps,
        callbacks=[make()],
        plugins=[io or UnickptCheckpointIO()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
