"""What the ranks of trainers with DeepSpeed do in tests: `python -m support.deepspeed_trainers`,
as `support.deepspeed_engines`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, DistributedType, PartialState
from accelerate.utils import ProjectConfiguration
from deepspeed.runtime.engine import DeepSpeedEngine
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from peft import LoraConfig, get_peft_model
from support.deepspeed_engines import QUICK, Net, main, scenario
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from unickpt.integrations.accelerate import load_state, save_state_async
from unickpt.integrations.deepspeed import checkpoints_of
from unickpt.integrations.lightning import (
    ShardedCheckpoints,
    UnickptCheckpointIO,
    last_checkpoint,
)
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


@scenario
def lora(folder: str, stage: int, full: str | None) -> Any:
    """A training of adapters, which resumes if `full` is None; else also saves all there is."""

    def model(dropout: float) -> Any:
        base = gpt2(dropout, width=256, layers=4, words=2048)
        torch.manual_seed(0 if full else 9)  # only the adapters differ
        adapters = LoraConfig(r=1, target_modules=["c_attn"], fan_in_fan_out=True)
        found = get_peft_model(base, adapters)
        for name, param in found.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(param, std=0.01)
        return found

    # With an optimizer of the Trainer's own, torch 2.13 refuses the group that is empty, whose
    # parameters would not decay: DeepSpeed has removed it.
    params = {**dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"), "torch_adam": True}
    trainer = hf_trainer(
        folder,
        stage,
        dropout=0.0,
        model=model,
        max_steps=6 if full is None else 3,
        config={"optimizer": {"type": "AdamW", "params": params}},
    )
    trainer.train(resume_from_checkpoint=full is None or None)
    if full is not None:
        checkpoints = checkpoints_of(trainer.deepspeed)
        checkpoints.save_checkpoint(full)
        checkpoints.wait()
        DeepSpeedEngine.save_checkpoint(trainer.deepspeed, f"{full}-deepspeed")
    return {str(step): loss.hex() for step, loss in trainer.seen.items()}


# --- accelerate -----------------------------------------------------------------------------------


def _texts() -> torch.Tensor:
    return torch.randint(0, 13, (8 * SAMPLES, 8), generator=torch.Generator().manual_seed(5))


def _batches() -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(list(_texts()), SAMPLES // dist.get_world_size())


@scenario
def with_accelerate(folder: str, stage: int, dies: int | None, resume: bool, again: str | None) -> Any:
    """A loop that saves every step, and dies, or resumes; returns its losses by step."""
    plugin = DeepSpeedPlugin(hf_ds_config=config(stage))
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(deepspeed_plugin=plugin, project_config=project)
    torch.manual_seed(0 if not resume else 9)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, schedule, batches = accelerator.prepare(
        model, optimizer, schedule, _batches()
    )
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if resume:
        load_state(accelerator)
    if again is not None:
        engine = checkpoints_of(model)
        engine.save_checkpoint(again, tag="again")
        engine.wait()
    losses, pending = {}, None
    for batch in accelerator.skip_first_batches(batches, counter.steps):
        if counter.steps == dies:
            _wait_for(Path(folder, "checkpoints", "checkpoint_1"))
            _die()
        if counter.steps == 6:
            break
        loss = model(batch)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        counter.steps += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses[str(counter.steps)] = float(mean / dist.get_world_size()).hex()
        pending = save_state_async(accelerator, options=QUICK)
    if pending is not None:
        pending.result()
    return losses


class Counter:
    steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


# --- Lightning ------------------------------------------------------------------------------------


class Strategy(ShardedCheckpoints, DeepSpeedStrategy):
    """On the CPU, which Lightning refuses and DeepSpeed does not."""

    root_device = torch.device("cpu", 0)

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        self.set_world_ranks()


class Lit(lightning.LightningModule):
    """`Net`, with the losses of its steps."""

    def __init__(self, again: str | None, dies: int | None, folder: str) -> None:
        super().__init__()
        self.net, self.losses = Net(), dict[str, str]()
        self.again, self.dies, self.folder = again, dies, folder

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def training_step(self, batch: Any, number: int) -> Any:
        if self.again is not None:
            engine = checkpoints_of(self.trainer.strategy.deepspeed_engine)
            engine.save_checkpoint(self.again, tag="again")
            engine.wait()
            self.again = None
        if self.global_step == self.dies:
            _wait_for(Path(self.folder, "step=2.ckpt"))
            _die()
        texts = _texts()[self.global_step * SAMPLES :][:SAMPLES]  # Lightning skips none
        loss = self.net(texts[dist.get_rank() :: dist.get_world_size()])
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.losses[str(self.global_step + 1)] = float(mean / dist.get_world_size()).hex()
        return loss


@scenario
def with_lightning(folder: str, stage: int, dies: int | None, resume: bool, again: str | None) -> Any:
    torch.manual_seed(0 if not resume else 9)
    saving = ModelCheckpoint(
        folder, "{step}", save_top_k=-1, every_n_train_steps=1, enable_version_counter=False
    )
    zero = {"stage": stage, "overlap_comm": False}
    settings = {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
    module = Lit(again, dies, folder)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=Strategy(config=settings, process_group_backend="gloo"),
        plugins=[UnickptCheckpointIO(QUICK)],
        callbacks=[saving],
        max_steps=6,
        logger=False,
        use_distributed_sampler=True,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, _batches(), ckpt_path=last_checkpoint(folder) if resume else None)
    return module.losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
