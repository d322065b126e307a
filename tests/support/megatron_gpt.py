"""A small GPT of Megatron-Core that is trained on CPUs, by ranks of gloo."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

if not hasattr(np, "product"):
    np.product = np.prod  # which Megatron 0.13 wants

from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

from support.small_gpt import LENGTH, SAMPLES, VOCABULARY, batch


@dataclass(frozen=True)
class Shape:
    """What is trained, and how it is parallel.

    Arguments:
        tp, pp, ep: parallel sizes; the rest of the ranks is data-parallel.
        form: of the optimizer's state: "plain", "dp_reshardable", "fully_reshardable" or
            "fully_sharded_model_space".
        bf16: the dtype of the parameters.
        experts: of a layer; 0 for none.
        hidden, layers: sizes.
        gated: whether fc1 is two halves, which a factory stores.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    form: str = "plain"
    bf16: bool = False
    experts: int = 0
    hidden: int = 16
    layers: int = 4
    gated: bool = True

    @property
    def metadata(self) -> dict[str, Any]:
        """As Megatron-LM gives it to `sharded_state_dict`."""
        form = {} if self.form == "plain" else {"distrib_optim_sharding_type": self.form}
        return {**form, "chained_optim_avoid_prefix": True}


# --- Megatron without an accelerator --------------------------------------------------------------


class _OnCpu(TorchFunctionMode):
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
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()
    vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16 wants Transformer Engine's
    dist.init_process_group("gloo")
    _OnCpu().__enter__()
    fill = DistributedOptimizer._set_main_param_and_optimizer_states

    def fill_but_step(self: Any, parameter: Any, tensors: Any) -> None:
        # torch's AdamW has a step for each parameter, Transformer Engine's has none. That of
        # `tensors` is from before the load.
        group, number = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][number]]
        with torch.no_grad():
            fill(self, parameter, {**tensors, "step": state["step"]})

    DistributedOptimizer._set_main_param_and_optimizer_states = fill_but_step


# --- the model and its steps ----------------------------------------------------------------------


class Trainer:
    """A model, its optimizer, and what makes a step."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            shape.tp, shape.pp, expert_model_parallel_size=shape.ep
        )
        dtype = torch.bfloat16 if shape.bf16 else torch.float32
        config = _config(shape, dtype)
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=shape.experts or None),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        ).to(dtype)
        _fill(model)
        distributed = shape.form != "plain"
        about = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, overlap_grad_reduce=False
        )
        self.wrapped = DistributedDataParallel(config, about, model)
        self.model = model
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=0.01,
                bf16=shape.bf16,
                params_dtype=dtype,
                use_distributed_optimizer=distributed,
                clip_grad=1.0,
            ),
            [self.wrapped],
        )

    def step(self, number: int) -> float | None:
        """Makes a step; returns the loss, on the last stage of the pipeline."""
        ranks = parallel_state.get_data_parallel_world_size()
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=_batches(number),
            model=[self.wrapped],
            num_microbatches=SAMPLES // ranks,
            seq_length=LENGTH,
            micro_batch_size=1,
            decoder_seq_length=LENGTH,
            forward_only=False,
        )
        self.optimizer.step()
        if not losses:
            return None
        total = torch.stack([one["loss"] for one in losses]).mean()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return float(total) / ranks

    def make_states(self) -> None:
        """Makes the optimizer's states, which Megatron without Transformer Engine cannot load into
        before."""
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            inner = part.optimizer
            for group in inner.param_groups:
                for parameter in group["params"]:
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }

    def unshare_steps(self) -> None:
        """Gives each parameter its own step again, which Megatron without Transformer Engine has
        them share when it loads, so that each parameter counts for all."""
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for state in part.optimizer.state.values():
                state["step"] = state["step"].clone()

    def sharded(self, loading: bool) -> dict[str, Any]:
        """The sharded state dicts of the model and of the optimizer."""
        model = self.model.sharded_state_dict(metadata=self.shape.metadata)
        optimizer = self.optimizer.sharded_state_dict(
            model, is_loading=loading, metadata=self.shape.metadata
        )
        return {"model": model, "optimizer": optimizer}


def _config(shape: Shape, dtype: torch.dtype) -> TransformerConfig:
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.hidden * 3 // 2,
        num_attention_heads=4,
        num_query_groups=4,
        use_cpu_initialization=True,
        gated_linear_unit=shape.gated,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=not shape.gated,
        num_moe_experts=shape.experts or None,
        tensor_model_parallel_size=shape.tp,
        pipeline_model_parallel_size=shape.pp,
        expert_model_parallel_size=shape.ep,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=shape.bf16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    return config


def _fill(model: Any) -> None:
    """Gives each logical tensor values that depend on its key alone."""
    state = model.sharded_state_dict()
    apply_factories(state)
    for value in nested_values(state):
        if not isinstance(value, ShardedTensor) or value.data is None:
            continue
        whole = _initial(value.key, tuple(value.global_shape))
        n = value.prepend_axis_num
        index = tuple(value.global_offset[:n]) + tuple(
            slice(o, o + s) for o, s in zip(value.global_offset[n:], value.local_shape, strict=True)
        )
        with torch.no_grad():
            value.data.copy_(whole[index].view(value.data.shape))


def _initial(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    drawn = torch.randn(shape, generator=generator) * 0.1
    return drawn + 1 if "norm" in key and key.endswith("weight") else drawn


def _batches(step: int) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's sequences of a step, one after the other."""
    ranks = parallel_state.get_data_parallel_world_size()
    for sample in range(parallel_state.get_data_parallel_rank(), SAMPLES, ranks):
        yield batch(step, sample)


def _forward(data: Iterator[Any], model: Any) -> tuple[Any, Any]:
    given = next(data)
    positions = torch.arange(LENGTH).unsqueeze(0)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH), 1) > 0
    output = model(given["tokens"], positions, mask, labels=given["labels"])

    def loss(output: torch.Tensor) -> tuple[Any, Any]:
        mean = output.float().mean()
        return mean, {"loss": mean.detach().clone()}

    return output, loss
