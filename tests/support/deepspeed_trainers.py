"""What the ranks of trainers with DeepSpeed do in tests: `python -m support.deepspeed_trainers`,
as `support.deepspeed_engines`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import DistributedType, PartialState
from support.deepspeed_engines import QUICK, Net, main, scenario
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import unickpt
from unickpt.integrations.deepspeed import checkpoints_of
from unickpt.integrations.transformers import UnickptCallback, UnickptMixin

SAMPLES = 12  # of an update, on all ranks


def _gloo(self: Any, *_: Any) -> tuple[str, DistributedType]:
    """accelerate has DeepSpeed on several ranks with accelerators only; DeepSpeed has it without."""
    return "gloo", DistributedType.MULTI_CPU


PartialState._prepare_backend = _gloo


def _die() -> None:
    """All ranks, at once."""
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


# --- the Trainer of Hugging Face ------------------------------------------------------------------


class Watched(Trainer):
    """Keeps the losses of its steps, exactly."""

    seen: dict[int, float]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        if not hasattr(self, "seen"):
            self.seen = {}
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.seen[self.state.global_step + 1] = float(mean / dist.get_world_size())
        return loss


class MyTrainer(UnickptMixin, Watched):
    pass


class At(TrainerCallback):
    """Does something before the first step that this process makes, and dies before another."""

    trainer: Any

    def __init__(self, again: str | None, dies: int | None, folder: str) -> None:
        self.again, self.dies, self.folder = again, dies, folder

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.again is not None:  # what was loaded
            engine = checkpoints_of(self.trainer.deepspeed)
            engine.save_checkpoint(self.again, tag="again")
            engine.wait()
            self.again = None
        if state.global_step == self.dies:
            _wait_for(Path(self.folder, "step_2"))
            _die()


def config(stage: int, **more: Any) -> dict[str, Any]:
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    zero = {"stage": stage, "overlap_comm": False}
    return {**dict.fromkeys(auto, "auto"), "zero_optimization": zero, **more}


def hf_trainer(
    folder: str, stage: int, *, dropout: float = 0.1, kind: Any = MyTrainer, **settings: Any
) -> Any:
    """A Trainer of 6 updates."""
    own = {name: settings.pop(name) for name in ("model", "callbacks") if name in settings}
    more = settings.pop("config", {})
    arguments = {
        "deepspeed": config(stage, **more),
        "per_device_train_batch_size": SAMPLES // dist.get_world_size(),
        "max_steps": 6,
        "learning_rate": 0.01,
        "warmup_steps": 2,
        "save_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **settings,
    }
    args = TrainingArguments(folder, **arguments)
    torch.manual_seed(0)
    model = own.pop("model", gpt2)(dropout)
    texts = torch.randint(0, 16, (4 * SAMPLES, 6), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": text, "labels": text} for text in texts]
    return kind(model, args, train_dataset=data, **own)


def gpt2(dropout: float, width: int = 8, layers: int = 2, words: int = 16) -> Any:
    off = {f"{name}_pdrop": dropout for name in ("resid", "embd", "attn")}
    sizes = {"n_layer": layers, "n_head": 2, "n_embd": width, "vocab_size": words}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, n_positions=8, loss_type="ForCausalLM", **off)
    )


@scenario
def hf(
    folder: str, stage: int, dies: int | None, resume: bool, again: str | None, dropout: float
) -> Any:
    """A training that dies, or resumes; returns its losses by step."""
    at = At(again, dies, folder)
    trainer = at.trainer = hf_trainer(folder, stage, dropout=dropout, callbacks=[at])
    trainer.train(resume_from_checkpoint=resume or None)
    return {str(step): loss.hex() for step, loss in trainer.seen.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
