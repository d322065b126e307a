"""google-tunix 0.1.7: its two loaders of safetensors files, for each of its models."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import torch
import transformers
from flax import nnx
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM
from tunix.models.gemma import model as gemma
from tunix.models.gemma import params_safetensors as gemma_params
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma3 import params_safetensors as gemma3_params
from tunix.models.llama3 import model as llama3
from tunix.models.llama3 import params as llama3_params
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params

from benchmarks.zoo.conversion import Conversion

Arrays = dict[str, Any]

_SIZES: dict[str, Any] = {
    "num_layers": 3, "vocab_size": 53, "embed_dim": 20, "hidden_dim": 44, "num_heads": 6,
    "head_dim": 8, "num_kv_heads": 2, "rope_theta": 10_000, "norm_eps": 1e-6,
}  # fmt: skip
_GEMMA = {
    **{key: x for key, x in _SIZES.items() if key not in ("vocab_size", "rope_theta", "norm_eps")},
    "num_embed": 53,
}
_HF: dict[str, Any] = {
    "hidden_size": 20, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 44, "num_hidden_layers": 3, "vocab_size": 53, "pad_token_id": 0,
    "max_position_embeddings": 64,
}  # fmt: skip


def conversions() -> Iterator[Conversion]:
    """All of them; there is no way back but for adapters."""
    for name, (load, config, kind, extra) in _models().items():
        hf = getattr(transformers, kind)(**{**_HF, **extra})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf)
        tied = set(model._tied_weights_keys or ()) if hf.tie_word_embeddings else set()
        example = {key: tuple(x.shape) for key, x in model.state_dict().items() if key not in tied}
        for mode in ("optimized", "original"):
            yield Conversion(f"{name}/{mode}", _loader(load, config, mode), example)


def _models() -> dict[str, tuple[Callable[..., Any], Any, str, dict[str, Any]]]:
    """Loader, configuration, and what the checkpoint is of."""
    attention = [gemma.AttentionType.GLOBAL] * 3
    plain = {"final_logit_softcap": None, "attention_types": attention}
    qwen2_sizes = {**_SIZES, "embed_dim": 48}
    return {
        "llama3": (llama3_params.create_model_from_safe_tensors, llama3.ModelConfig(**_SIZES),
                   "LlamaConfig", {"tie_word_embeddings": False}),
        "llama3-tied": (llama3_params.create_model_from_safe_tensors,
                        llama3.ModelConfig(**_SIZES, weight_tying=True), "LlamaConfig",
                        {"tie_word_embeddings": True}),
        "qwen2": (qwen2_params.create_model_from_safe_tensors, qwen2.ModelConfig(**qwen2_sizes),
                  "Qwen2Config", {"hidden_size": 48, "tie_word_embeddings": False}),
        "qwen2-tied": (qwen2_params.create_model_from_safe_tensors,
                       qwen2.ModelConfig(**qwen2_sizes, use_tied_embedding=True), "Qwen2Config",
                       {"hidden_size": 48, "tie_word_embeddings": True}),
        "qwen3": (qwen3_params.create_model_from_safe_tensors, qwen3.ModelConfig(**_SIZES),
                  "Qwen3Config", {"tie_word_embeddings": False}),
        "qwen3-tied": (qwen3_params.create_model_from_safe_tensors,
                       qwen3.ModelConfig(**_SIZES, use_tied_embedding=True), "Qwen3Config",
                       {"tie_word_embeddings": True}),
        "qwen3-moe": (qwen3_params.create_model_from_safe_tensors,
                      qwen3.ModelConfig(**{**_SIZES, "hidden_dim": 14}, num_experts=5,
                                        num_experts_per_tok=2),
                      "Qwen3MoeConfig", {"num_experts": 5, "num_experts_per_tok": 2,
                                         "moe_intermediate_size": 14,
                                         "tie_word_embeddings": False}),
        "gemma": (gemma_params.create_model_from_safe_tensors,
                  gemma.ModelConfig(**_GEMMA, **plain, use_post_attn_norm=False,
                                    use_post_ffw_norm=False), "GemmaConfig",
                  {"tie_word_embeddings": True}),
        "gemma-mha": (gemma_params.create_model_from_safe_tensors,
                      gemma.ModelConfig(**{**_GEMMA, "num_kv_heads": 6}, **plain,
                                        use_post_attn_norm=False, use_post_ffw_norm=False),
                      "GemmaConfig", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
        "gemma2": (gemma_params.create_model_from_safe_tensors,
                   gemma.ModelConfig(**_GEMMA, **plain, use_post_attn_norm=True,
                                     use_post_ffw_norm=True), "Gemma2Config",
                   {"tie_word_embeddings": True}),
        "gemma3": (gemma3_params.create_model_from_safe_tensors,
                   gemma3.ModelConfig(**_GEMMA, sliding_window_size=8), "Gemma3TextConfig",
                   {"tie_word_embeddings": True}),
    }  # fmt: skip


def _loader(load: Callable[..., Any], config: Any, mode: str) -> Callable[[Arrays], Arrays]:
    def function(checkpoint: Arrays) -> Arrays:
        with tempfile.TemporaryDirectory() as folder:
            whole = {key: np.ascontiguousarray(x) for key, x in checkpoint.items()}
            save_file(whole, str(Path(folder) / "model.safetensors"))
            with contextlib.redirect_stdout(io.StringIO()):
                model = load(folder, config, mode=mode)
            state = nnx.state(model, nnx.Param).to_pure_dict()
            flat = jax.tree_util.tree_leaves_with_path(state)
            return {
                ".".join(str(getattr(key, "key", key)) for key in path): np.array(x)
                for path, x in flat
                if not isinstance(x, jax.ShapeDtypeStruct)
            }

    return function
