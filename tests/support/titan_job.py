"""A job of torchtitan: its trainer and its debug model, on CPUs.

    titan_job.py ASSETS FOLDER SETTINGS

Without this file, torchtitan 0.3.0 needs an accelerator, and a torch that is newer than 2.13.
SETTINGS is JSON: "checkpoint" are settings of its checkpoint manager, "manager" says whose ("ours",
"theirs", or "override"), "training", "parallelism" and
"dataloader" are settings of the trainer's, "dim" is the
model's width, and "loader" is "hf" (torchtitan's, which is bound to the number of data-parallel
ranks) or "own" (which is not). Prints each step with its loss, and the seconds for which the loop
waited for the manager.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"
for name, value in {
    "current_device": 0,
    "get_device_name": "cpu",
    "get_device_properties": SimpleNamespace(total_memory=1 << 34),
    "memory_stats": {},
    "reset_peak_memory_stats": None,
    "empty_cache": None,
}.items():
    setattr(torch.cpu, name, lambda *_, value=value: value)
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = lambda *_: None  # type: ignore[attr-defined]

from torchtitan.components.checkpointer import CheckpointManager as TheirManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class Batches(BaseDataLoader):
    """Deals out the same samples in the same order to any number of ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        self.world, self.rank = dp_world_size, dp_rank
        self.seq_len, self.size = seq_len, local_batch_size
        self.samples = 0
        self.history: list[int] = []

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            first = self.samples + self.rank * self.size
            self.samples += self.world * self.size
            self.history.append(self.samples)
            rows = [
                torch.randint(
                    3, 99, (self.seq_len + 1,), generator=torch.Generator().manual_seed(n)
                )
                for n in range(first, first + self.size)
            ]
            tokens = torch.stack(rows)
            positions = torch.arange(self.seq_len).expand(self.size, -1)
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        # A list that grows, as buffers of tokens do.
        return {"samples": self.samples, "history": self.history[:: self.size]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]
        assert isinstance(state["history"], list)


def make_assets(folder: Path) -> None:
    """A tokenizer and texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.joinpath("data").mkdir(parents=True)
    names = ["<s>", "</s>", "?", *(chr(n) for n in range(32, 127))]
    words = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"bos_token": "<s>", "eos_token": "</s>"}
    folder.joinpath("tokenizer_config.json").write_text(json.dumps(told))
    texts = [{"text": f"Document {n} about {n * n % 7}. " * (3 + n % 5)} for n in range(400)]
    lines = "".join(json.dumps(text) + "\n" for text in texts)
    folder.joinpath("data", "train.jsonl").write_text(lines)


def small_config(assets: Path, loader: str, layers: int = 2) -> Any:
    """The configuration of torchtitan's debug model, smaller, and for CPUs."""
    config = llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[:layers]
    for _, _, parent, name in list(model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    config.hf_assets_path = str(assets)
    config.dataloader.dataset_path = str(assets / "data")
    if loader == "own":
        config.dataloader = Batches.Config()
    config.debug.seed, config.debug.enable_structured_logging = 1, False
    config.validator.enable = config.compile.enable = False
    config.activation_checkpoint = None
    config.lr_scheduler.total_steps = 20  # whenever a training ends
    training = config.training
    training.seq_len, training.local_batch_size, training.global_batch_size = 32, 2, 8
    training.disable_cuda_graphs, training.mixed_precision_param = True, "float32"
    # Of the other backends, parts work on accelerators only.
    config.parallelism.spmd_backend = "partial_dtensor"
    return config


def made_config(assets: Path, folder: str, settings: dict[str, Any]) -> Any:
    config = small_config(assets, settings.get("loader", "hf"))
    config.dump_folder = folder
    set_all(config.training, settings.get("training", {}))
    set_all(config.parallelism, settings.get("parallelism", {}))
    set_all(config.dataloader, settings.get("dataloader", {}))
    given = {"enable": True, "interval": 2, "last_save_model_only": False}
    given |= settings.get("checkpoint", {})
    if settings.get("manager", "ours") == "ours":
        from unickpt.integrations.torchtitan import CheckpointManager

        config.checkpoint = CheckpointManager.Config(**given)
    else:
        config.checkpoint = TheirManager.Config(**given)
        if settings["manager"] == "override":
            config.override.imports = ["unickpt.integrations.torchtitan.manager"]
    return config


def set_all(config: Any, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        assert hasattr(config, name), name
        setattr(config, name, value)


def watch(trainer: Any) -> None:
    """Keeps each step's loss in `losses`, and in `waited_s` what the loop waits for its manager."""
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale
    trainer.losses, trainer.waited_s = {}, []

    def log(step: int, loss: float, *_: Any, **__: Any) -> None:
        trainer.losses[step] = loss
        print(f"step {step} {loss!r}", flush=True)

    trainer.metrics_processor.log = log
    for name in ("save", "maybe_wait_for_staging"):
        call = getattr(trainer.checkpointer, name)
        setattr(trainer.checkpointer, name, timed(call, trainer.waited_s))


def timed(call: Any, waited: list[float]) -> Any:
    def timed_call(*arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            waited.append(time.perf_counter() - begin)

    return timed_call


_made = Trainer.__init__


def _init(self: Any, config: Any) -> None:
    _made(self, config)
    watch(self)


Trainer.__init__ = _init


def main() -> None:
    init_logger()
    config = made_config(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
    trainer = config.build()
    try:
        trainer.train()
    finally:
        trainer.close()
    print(f"waited {sum(trainer.waited_s)!r}", flush=True)


if __name__ == "__main__":
    main()
    gc.collect()  # frees the model first: see "terminate called" in docs/troubleshooting.md
    dist.destroy_process_group()
