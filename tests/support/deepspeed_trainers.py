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
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import unickpt
from support.deepspeed_engines import QUICK, Net, main, scenario
from unickpt.integrations.accelerate import load_state, save_state, save_state_async
from unickpt.integrations.deepspeed import checkpoints_of
from unickpt.integrations.lightning import (
    ShardedCheckpoints,
    UnickptCheckpointIO,
    last_checkpoint,
)
from unickpt.integrations.transformers import UnickptCallback, UnickptMixin

SAMPLES = 12  # of an update, on all ranks


def _gloo(self: Any, *_: Any) -> tuple[str, DistributedType]:
    """accelerate has DeepSpeed on several ranks with accelerators only; DeepSpeed does without."""
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

    def __init__(
        self, again: str | None, dies: int | None, folder: str, saved: str = "step_2"
    ) -> None:
        self.again, self.dies, self.saved = again, dies, Path(folder, saved)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.again is not None:  # what was loaded
            engine = checkpoints_of(self.trainer.deepspeed)
            engine.save_checkpoint(self.again, tag="again")
            engine.wait()
            self.again = None
        if state.global_step == self.dies:
            _wait_for(self.saved)
            _die()


def config(stage: int, **more: Any) -> dict[str, Any]:
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    zero = {"stage": stage, "overlap_comm": False}
    return {**dict.fromkeys(auto, "auto"), "zero_optimization": zero, **more}


def gpt2(dropout: float = 0.0, width: int = 8, layers: int = 2, words: int = 16) -> Any:
    off = {f"{name}_pdrop": dropout for name in ("resid", "embd", "attn")}
    sizes = {"n_layer": layers, "n_head": 2, "n_embd": width, "vocab_size": words}
    return GPT2LMHeadModel(GPT2Config(**sizes, n_positions=8, loss_type="ForCausalLM", **off))


def adapters(seed: int) -> Any:
    """A base model, the same with every seed, and adapters."""
    base = gpt2(width=256, layers=4, words=2048)
    torch.manual_seed(seed)
    found = get_peft_model(base, LoraConfig(r=1, target_modules=["c_attn"], fan_in_fan_out=True))
    for name, param in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.01)
    return found


def hf_trainer(
    kind: Any, folder: str, stage: int, model: Any, callbacks: Any = (), **settings: Any
) -> Any:
    """A Trainer of 6 updates."""
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
    texts = torch.randint(0, 16, (4 * SAMPLES, 6), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": text, "labels": text} for text in texts]
    data_of = {"train_dataset": data, "eval_dataset": data[:SAMPLES]}
    return kind(model(), args, callbacks=[*callbacks], **data_of)


def _losses(trainer: Any) -> dict[str, str]:
    return {str(step): loss.hex() for step, loss in trainer.seen.items()}


@scenario
def hf(
    folder: str,
    stage: int,
    dies: int | None,
    resume: bool,
    again: str | None,
    dropout: float = 0.0,
    own: bool = False,
) -> Any:
    """A training that dies, or resumes; returns its losses by step.

    Arguments:
        again: where to save what was resumed from.
        own: whether the Trainer itself saves.
    """
    at = At(again, dies, folder, "checkpoint-2" if own else "step_2")
    kind = Watched if own else MyTrainer
    at.trainer = hf_trainer(kind, folder, stage, lambda: gpt2(dropout), [at])
    at.trainer.train(resume_from_checkpoint=resume or None)
    return _losses(at.trainer)


@scenario
def hf_callback(folder: str, stage: int, dies: int | None) -> Any:
    """As `hf`, of a Trainer as it is, which saves every second step."""
    with unickpt.Checkpointer(folder, save_every=2, options=QUICK) as run:
        callback, at = UnickptCallback(run), At(None, dies, folder)
        every = [callback, at]
        trainer = hf_trainer(Watched, f"{folder}-of", stage, gpt2, every, save_strategy="no")
        callback.train(trainer)
    return _losses(trainer)


@scenario
def hf_best(folder: str, stage: int, again: str) -> Any:
    """Step 2 is the best, and loaded at the end."""

    class Best(MyTrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            return {"eval_loss": abs(self.state.global_step - 2.0)}

    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    trainer = hf_trainer(Best, folder, stage, gpt2, **best, save_total_limit=2)
    trainer.train()
    checkpoints = checkpoints_of(trainer.deepspeed)
    checkpoints.save_checkpoint(again, tag="again")
    checkpoints.wait()
    return trainer.state.best_model_checkpoint


@scenario
def lora(folder: str, stage: int, dies: int | None, resume: bool, full: str | None) -> Any:
    """As `hf`, of adapters.

    Arguments:
        full: where to save all that there is, at the end.
    """
    # With an optimizer of the Trainer's own, torch 2.13 refuses the group that is empty, whose
    # parameters would not decay: DeepSpeed has removed it.
    params = {**dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"), "torch_adam": True}
    optimizer = {"optimizer": {"type": "AdamW", "params": params}}
    at = At(None, dies, folder)
    trainer = at.trainer = hf_trainer(
        MyTrainer, folder, stage, lambda: adapters(9 if resume else 0), [at], config=optimizer
    )
    trainer.train(resume_from_checkpoint=resume or None)
    if full is not None:
        checkpoints = checkpoints_of(trainer.deepspeed)
        checkpoints.save_checkpoint(full, tag="all")
        checkpoints.wait()
    return _losses(trainer)


@scenario
def hf_refused(folder: str, what: str) -> str:
    """Returns the error."""
    try:
        if what == "hf_files":
            kind = type("Files", (MyTrainer,), {})
            kind._hf_files = property(lambda self: True, lambda self, value: None)
            hf_trainer(kind, folder, 3, gpt2)
        elif what == "with":  # steps with DeepSpeed, and none here
            trainer = hf_trainer(MyTrainer, folder, 1, gpt2, deepspeed=None, use_cpu=True)
            trainer.train(resume_from_checkpoint=True)
        elif what == "without":
            hf_trainer(MyTrainer, folder, 1, gpt2).train(resume_from_checkpoint=True)
        else:
            hf_trainer(
                MyTrainer, folder, 1, gpt2, deepspeed=None, use_cpu=True, max_steps=1
            ).train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# --- accelerate -----------------------------------------------------------------------------------


def _texts() -> torch.Tensor:
    return torch.randint(0, 13, (8 * SAMPLES, 8), generator=torch.Generator().manual_seed(5))


def _batches() -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(list(_texts()), SAMPLES // dist.get_world_size())


@scenario
def in_accelerate(
    folder: str, stage: int, dies: int | None, resume: bool, again: str | None, own: bool = False
) -> Any:
    """A loop that saves every step, and dies, or resumes; returns its losses by step. See `hf`."""
    plugin = DeepSpeedPlugin(hf_ds_config=config(stage))
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(
        deepspeed_plugin=plugin,
        project_config=project,
        step_scheduler_with_optimizer=False,  # else the schedule depends on the number of ranks
    )
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
        if own:
            accelerator.save_state()
        else:
            pending = save_state_async(accelerator, options=QUICK)
    if pending is not None:
        pending.result()
    return losses


@scenario
def in_place_of_accelerates(folder: str) -> Any:
    """Saves over what accelerate saved; then what is refused. Returns the names and the errors."""
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(2)))
    errors = []

    def refused(function: Any, *arguments: Any, **more: Any) -> None:
        try:
            function(accelerator, *arguments, **more)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    refused(save_state, folder)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer, batches = accelerator.prepare(model, torch.optim.AdamW(trained), _batches())
    accelerator.backward(model(next(iter(batches))))
    optimizer.step()
    accelerator.save_state(folder)
    theirs = sorted(os.listdir(folder))
    dist.barrier()
    save_state(accelerator, folder, options=QUICK)
    dist.barrier()
    left = sorted({*os.listdir(folder)} & {*theirs})
    save_state(accelerator, f"{folder}-part", exclude_frozen_parameters=True, options=QUICK)
    refused(load_state, f"{folder}-part")
    load_state(accelerator, f"{folder}-part", load_module_strict=False)
    refused(save_state, folder, max_shard_size=1)
    return [theirs, left, errors]


class Counter:
    steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


# --- Lightning ------------------------------------------------------------------------------------


class OnTheCpu(DeepSpeedStrategy):
    """Lightning refuses that; DeepSpeed does not."""

    root_device = torch.device("cpu", 0)

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        self.set_world_ranks()


class Strategy(ShardedCheckpoints, OnTheCpu):
    pass


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

    def validation_step(self, batch: Any, number: int) -> None:
        self.net(batch)

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


def lightning_trainer(stage: int, kind: Any, *callbacks: Any) -> Any:
    zero = {"stage": stage, "overlap_comm": False}
    settings = {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
    return lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=kind(config=settings, process_group_backend="gloo"),
        plugins=[UnickptCheckpointIO(QUICK)] if kind is Strategy else [],
        callbacks=[*callbacks],
        max_steps=6,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@scenario
def lightning_validates(path: str) -> Any:
    """Loads the weights alone, without an optimizer; returns them."""
    module = Lit(None, None, "")
    lightning_trainer(1, Strategy).validate(module, _batches(), ckpt_path=path, verbose=False)
    return {name: param.tolist() for name, param in module.named_parameters()}


@scenario
def in_lightning(
    folder: str, stage: int, dies: int | None, resume: bool, again: str | None, own: bool = False
) -> Any:
    """As `hf`."""
    torch.manual_seed(0 if not resume else 9)
    saving = ModelCheckpoint(
        folder, "{step}", save_top_k=-1, every_n_train_steps=1, enable_version_counter=False
    )
    module = Lit(again, dies, folder)
    trainer = lightning_trainer(stage, OnTheCpu if own else Strategy, saving)
    path = last_checkpoint(folder) or f"{folder}/step=4.ckpt"  # the latter of Lightning itself
    trainer.fit(module, _batches(), ckpt_path=path if resume else None)
    return module.losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
