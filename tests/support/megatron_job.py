"""A job of Megatron-Core on CPUs: a small GPT that is trained, saved and loaded.

    megatron_job.py SETTINGS

SETTINGS is JSON; `Settings` says what is in it. Every rank is a process of gloo. Prints a line of
JSON for each step, on the ranks that know its loss, and for each save how long the loop waited.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import zlib
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

LENGTH, VOCABULARY, SAMPLES = 8, 64, 4  # of a sequence; of words; sequences in each step


@dataclass
class Settings:
    """What a job does.

    Arguments:
        tp, pp: parallel sizes; the rest of the ranks is data-parallel.
        steps: after which it ends.
        folder: of the run; what is there is loaded.
        form: of the optimizer's state: "plain", "dp_reshardable", "fully_reshardable" or
            "fully_sharded_model_space".
        bf16: the dtype of the parameters.
        swiglu: whether fc1 is a factory of two halves.
        save, load: with whose strategy: "ours", "theirs" or "" (not at all).
        wrapped: whether Megatron's fully parallel strategies are around ours.
        every: how many steps lie between saves.
        background: whether saves are asynchronous.
        lazy: whether they copy in the background.
        kill: the step after whose save began the job kills itself; None for never.
        strict: as of `dist_checkpointing.load`.
        experts: of a layer; 0 for none.
        hidden, layers: the size of the model.
    """

    tp: int = 1
    pp: int = 1
    steps: int = 6
    folder: str = ""
    form: str = "plain"
    bf16: bool = False
    swiglu: bool = True
    save: str = "ours"
    load: str = "ours"
    wrapped: bool = False
    every: int = 2
    background: bool = False
    lazy: bool = False
    kill: int | None = None
    strict: str = "assume_ok_unexpected"
    experts: int = 0
    hidden: int = 16
    layers: int = 4
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parsed(cls, text: str) -> Settings:
        given = json.loads(text)
        assert set(given) <= {f.name for f in fields(cls)}, given
        return cls(**given)


# --- Megatron without an accelerator --------------------------------------------------------------


class OnCpu(TorchFunctionMode):
    """What is made on "cuda" is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            args = (args[0], "cpu", *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # optimizers look at it
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def start() -> None:
    """Joins the ranks."""
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"
    for name in ("set_device", "synchronize", "empty_cache", "manual_seed"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: SimpleNamespace(
        wait_stream=lambda *_: None
    )
    torch.cuda.stream = lambda *_: nullcontext()
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    import numpy

    if not hasattr(numpy, "product"):
        numpy.product = numpy.prod  # which Megatron 0.13 wants
    dist.init_process_group("gloo")
    OnCpu().__enter__()
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()
    fill = DistributedOptimizer._set_main_param_and_optimizer_states

    def fill_but_step(self: Any, parameter: Any, tensors: Any) -> None:
        # torch's AdamW has a step for each parameter, Transformer Engine's has none.
        group, number = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][number]]
        fill(self, parameter, {"step": state["step"], **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = fill_but_step


def build(settings: Settings) -> tuple[Any, Any, Any]:
    """The configuration, the model of this rank within its wrapper, and the optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(settings.tp, settings.pp)
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=settings.layers,
        hidden_size=settings.hidden,
        ffn_hidden_size=settings.hidden * 3 // 2,
        num_attention_heads=4,
        num_query_groups=4,
        use_cpu_initialization=True,
        gated_linear_unit=settings.swiglu,
        add_bias_linear=False,
        num_moe_experts=settings.experts or None,
        tensor_model_parallel_size=settings.tp,
        pipeline_model_parallel_size=settings.pp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=settings.bf16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        deterministic_mode=False,
        gradient_accumulation_fusion=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=settings.experts or None),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).to(dtype)
    fill(model)
    distributed = settings.form != "plain"
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, overlap_grad_reduce=False
        ),
        model,
    )
    about = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        bf16=settings.bf16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
        clip_grad=1.0,
    )
    return config, wrapped, get_megatron_optimizer(about, [wrapped])


def fill(model: Any) -> None:
    """Gives each logical tensor values that depend on its key alone."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = model.sharded_state_dict()
    apply_factories(state)
    for value in nested_values(state):
        if not isinstance(value, ShardedTensor) or value.data is None:
            continue
        whole = initial(value.key, tuple(value.global_shape))
        n = value.prepend_axis_num
        index = tuple(value.global_offset[:n]) + tuple(
            slice(o, o + s) for o, s in zip(value.global_offset[n:], value.local_shape, strict=True)
        )
        with torch.no_grad():
            value.data.copy_(whole[index].view(value.data.shape))


def initial(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    drawn = torch.randn(shape, generator=generator) * 0.1
    return drawn + 1 if "norm" in key and key.endswith("weight") else drawn


# --- a step ---------------------------------------------------------------------------------------


def batches(step: int) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's sequences of a step, one after the other."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_data_parallel_world_size()
    for sample in range(parallel_state.get_data_parallel_rank(), SAMPLES, ranks):
        generator = torch.Generator().manual_seed(step * SAMPLES + sample)
        words = torch.randint(0, VOCABULARY, (1, LENGTH + 1), generator=generator)
        yield {"tokens": words[:, :-1].contiguous(), "labels": words[:, 1:].contiguous()}


def train_step(settings: Settings, config: Any, model: Any, optimizer: Any, step: int) -> Any:
    """Makes a step; returns the loss, on the last stage of the pipeline."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward(data: Iterator[Any], model: Any) -> tuple[Any, Any]:
        batch = next(data)
        positions = torch.arange(LENGTH).unsqueeze(0)
        mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH), 1) > 0
        output = model(batch["tokens"], positions, mask, labels=batch["labels"])

        def loss(output: torch.Tensor) -> tuple[Any, Any]:
            mean = output.float().mean()
            return mean, {"loss": mean.detach().clone()}

        return output, loss

    count = SAMPLES // parallel_state.get_data_parallel_world_size()
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches(step),
        model=[model],
        num_microbatches=count,
        seq_length=LENGTH,
        micro_batch_size=1,
        decoder_seq_length=LENGTH,
        forward_only=False,
    )
    optimizer.step()
    if not losses:
        return None
    total = torch.stack([one["loss"] for one in losses]).mean()
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return float(total) / parallel_state.get_data_parallel_world_size()


# --- checkpoints ----------------------------------------------------------------------------------


class Checkpoints:
    """Saves and loads as Megatron-LM's training does: a folder for each iteration, and a file that
    names the latest."""

    def __init__(self, settings: Settings, model: Any, optimizer: Any) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self.settings, self.model, self.optimizer = settings, model.module, optimizer
        self.folder, self.queue = Path(settings.folder), AsyncCallsQueue()
        self.metadata = {"distrib_optim_sharding_type": settings.form}
        if settings.form == "plain":
            self.metadata = {}
        self._save: Any = None
        self.waits: list[float] = []

    @property
    def latest(self) -> int | None:
        path = self.folder / "latest_checkpointed_iteration.txt"
        return int(path.read_text()) if path.exists() else None

    def path(self, step: int) -> str:
        return str(self.folder / f"iter_{step:07}")

    def state(self, step: int, loading: bool, with_rng: bool = True) -> dict[str, Any]:
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        model = self.model.sharded_state_dict(metadata=dict(self.metadata) or None)
        more = {"metadata": dict(self.metadata)} if self.metadata else {}
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading, **more)
        tp = parallel_state.get_tensor_model_parallel_rank()
        pp = parallel_state.get_pipeline_model_parallel_rank()
        sizes = self.settings.pp, self.settings.tp
        rng = [{"torch_rng_state": torch.get_rng_state(), "at": (pp, tp), "step": step}]
        dp = parallel_state.get_data_parallel_rank()
        given = {"rng_state": ShardedObject("rng_state", rng, sizes, (pp, tp), replica_id=dp)}
        return {
            "model": model,
            "optimizer": optimizer,
            **(given if with_rng else {}),
            "iteration": step,
            "args": Namespace(sizes=sizes, hidden_size=self.settings.hidden, names=["a", None]),
            "checkpoint_version": 3.0,
        }

    def save(self, step: int) -> None:
        from megatron.core import dist_checkpointing

        settings, path = self.settings, self.path(step)
        if dist.get_rank() == 0:
            os.makedirs(path, exist_ok=True)
        dist.barrier()
        more: dict[str, Any] = {}
        if has_async_strategies():
            more["async_strategy"] = "mcore"
        begin = time.perf_counter()
        state = self.state(step, loading=False)
        request = dist_checkpointing.save(
            state,
            path,
            self.save_strategy(),
            async_sharded_save=settings.background,
            validate_access_integrity=step == settings.every,
            content_metadata={"form": settings.form, **self.metadata},
            **more,
        )
        if settings.background:
            request.add_finalize_fn(partial(self._track, step))
            self.queue.schedule_async_request(request)
        self.waits.append(time.perf_counter() - begin)
        if not settings.background:
            self._track(step)

    def save_strategy(self) -> Any:
        if self._save is None:
            self._save = self._new_save_strategy()
        return self._save

    def _new_save_strategy(self) -> Any:
        from megatron.core import parallel_state

        if self.settings.save == "theirs":
            from megatron.core.dist_checkpointing.strategies.torch import (
                TorchDistSaveShardedStrategy,
            )

            made: Any = TorchDistSaveShardedStrategy("torch_dist", 1)
        else:
            import unickpt
            from unickpt.integrations.megatron import SaveStrategy

            staging = "lazy" if self.settings.lazy else "auto"
            given: dict[str, Any] = {"timeout_s": 60, "staging": staging, **self.settings.options}
            made = SaveStrategy(self.optimizer, options=unickpt.SaveOptions(**given))
        if self.settings.wrapped:
            from megatron.core.dist_checkpointing.strategies.fully_parallel import (
                FullyParallelSaveStrategyWrapper,
            )

            made = FullyParallelSaveStrategyWrapper(
                made, parallel_state.get_data_parallel_group(with_context_parallel=True)
            )
        return made

    def _track(self, step: int) -> None:
        if dist.get_rank() == 0:
            path = self.folder / "latest_checkpointed_iteration.txt"
            path.with_suffix(".new").write_text(str(step))
            os.replace(path.with_suffix(".new"), path)
        dist.barrier()

    def finalize(self, blocking: bool = False) -> None:
        self.queue.maybe_finalize_async_calls(blocking)

    def load(self) -> int:
        """Loads the latest iteration; returns its number, 0 without one."""
        step = self.latest
        if step is None or not self.settings.load:
            return 0
        from megatron.core import dist_checkpointing

        # As Megatron-LM, which leaves the generators alone if the sizes have changed.
        saved = dist_checkpointing.load_common_state_dict(self.path(step))["args"].sizes
        with_rng = tuple(saved) == (self.settings.pp, self.settings.tp)
        found = dist_checkpointing.load(
            self.state(0, loading=True, with_rng=with_rng),
            self.path(step),
            self.load_strategy(),
            strict=self.settings.strict,
        )
        self.model.load_state_dict(found["model"], strict=False)
        self.optimizer.load_state_dict(found["optimizer"])
        assert found["iteration"] == step, (found["iteration"], step)
        assert found["args"].names == ["a", None], found["args"]
        if with_rng:
            (rng,) = found["rng_state"]
            assert rng["step"] == step, rng
            torch.set_rng_state(rng["torch_rng_state"])
        return step

    def load_strategy(self) -> Any:
        from megatron.core import parallel_state

        if self.settings.load == "theirs":
            return None
        from unickpt.integrations.megatron import LoadStrategy

        made: Any = LoadStrategy(self.optimizer)
        if self.settings.wrapped:
            from megatron.core.dist_checkpointing.strategies.fully_parallel import (
                FullyParallelLoadStrategyWrapper,
            )

            made = FullyParallelLoadStrategyWrapper(
                made, parallel_state.get_data_parallel_group(with_context_parallel=True)
            )
        return made


def has_async_strategies() -> bool:
    """Whether this Megatron asks which implementation of asynchronous saves to use."""
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    return hasattr(strategies, "get_async_strategy")


def make_states(settings: Settings, model: Any, optimizer: Any) -> None:
    """Makes the optimizer's states, which Megatron without Transformer Engine cannot load into
    before."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                inner.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def main(text: str) -> None:
    settings = Settings.parsed(text)
    start()
    if "ours" in (settings.save, settings.load):
        importlib.import_module("unickpt.integrations.megatron")  # which registers our strategies
    config, model, optimizer = build(settings)
    checkpoints = Checkpoints(settings, model, optimizer)
    if checkpoints.latest is not None:
        make_states(settings, model, optimizer)
    first = checkpoints.load() + 1
    for step in range(first, settings.steps + 1):
        loss = train_step(settings, config, model, optimizer, step)
        checkpoints.finalize()
        if loss is not None:
            print(json.dumps({"step": step, "loss": loss}), flush=True)
        if settings.save and step % settings.every == 0:
            checkpoints.save(step)
        if step == settings.kill:
            os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.finalize(blocking=True)
    print(json.dumps({"waits": checkpoints.waits, "first": first}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
