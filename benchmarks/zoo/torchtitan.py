"""torchtitan 0.3.0: its eight adapters of state dicts, `to_hf` and `from_hf`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torchtitan.models import (
    deepseek_v3,
    flux,
    gpt_oss,
    kimi_k2_7,
    llama3,
    muse_glimmer,
    qwen3,
    qwen3_5,
)  # fmt: skip
from torchtitan.models.common import ComplexRoPE, CosSinRoPE

from benchmarks.zoo.conversion import Conversion

_VOCABULARY = 53
_FLEX = {"attn_backend": "flex"}
_MOE = {**_FLEX, "moe_comm_backend": "standard", "non_blocking_capacity_factor": None}
_MLA = {
    "n_dense_layers": 1, "n_heads": 6, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "mscale": 0.7, "dense_hidden_dim": 44,
    "moe_hidden_dim": 14, "num_experts": 5, "num_shared_experts": 2, "router_top_k": 2,
    "router_score_func": "softmax", "rope": ComplexRoPE.Config(dim=4, max_seq_len=64, theta=1e4),
    **_MOE,
}  # fmt: skip
_ROPE = CosSinRoPE.Config(dim=8, max_seq_len=64, theta=1e4)
_GQA = {"dim": 20, "n_heads": 6, "n_kv_heads": 2, "head_dim": 8, "rope": _ROPE, **_FLEX}


def conversions() -> Iterator[Conversion]:
    """All of them, in both directions."""
    for name, (module, config) in _models().items():
        adapter_class = module.model_registry("debugmodel" if module is not flux else "flux-debug")
        adapter = adapter_class.state_dict_adapter(config, None)
        with torch.device("meta"):
            state = config.build().state_dict()
        example = {key: _meta(x) for key, x in state.items()}
        zeros = {key: torch.zeros(x.shape, dtype=x.dtype) for key, x in state.items()}
        there = adapter.to_hf(zeros)
        hf = {key: _meta(x) for key, x in there.items()}
        yield Conversion(f"{name}/to-hf", adapter.to_hf, example, adapter.from_hf)
        yield Conversion(f"{name}/from-hf", adapter.from_hf, hf, adapter.to_hf)


def _models() -> Mapping[str, tuple[Any, Any]]:
    """Small models, with sizes that differ from each other."""
    llama_layers = llama3._build_llama3_layers(
        n_layers=3, dim=24, n_heads=6, n_kv_heads=2, hidden_dim=44,
        rope=ComplexRoPE.Config(dim=4, max_seq_len=64, theta=1e4), **_FLEX,
    )  # fmt: skip
    qwen_layers = {
        fused: qwen3._build_qwen3_layers(n_layers=3, hidden_dim=44, fuse_qkv=fused, **_GQA)
        for fused in (True, False)
    }
    qwen_moe = qwen3._build_qwen3_moe_layers(
        n_layers=3, moe_hidden_dim=14, num_experts=5, top_k=2, moe_comm_backend="standard", **_GQA
    )
    oss_layers = gpt_oss._build_gptoss_layers(
        dim=12, n_layers=3, hidden_dim=14, num_experts=5, top_k=2, load_balance_coeff=1e-3,
        moe_comm_backend="standard", rope=CosSinRoPE.Config(dim=64, max_seq_len=64, theta=1e4),
    )  # fmt: skip
    deep = {
        rank: deepseek_v3._build_dsv3_layers(n_layers=3, dim=20, q_lora_rank=rank, **_MLA)
        for rank in (0, 9)
    }
    llama = _small(llama3._debugmodel(**_FLEX), llama_layers, 24)
    qwen = qwen3._debugmodel(**_FLEX)
    deepseek = _small(deepseek_v3._debugmodel(**_MOE), deep[0], 20)
    predicting = _small(deepseek_v3._debugmodel(**_MOE), deep[9], 20)
    return {
        "llama3": (llama3, llama),
        "qwen3": (qwen3, _small(replace(qwen, enable_weight_tying=False), qwen_layers[True], 20)),
        "qwen3-tied": (qwen3, _small(qwen, qwen_layers[False], 20)),
        "qwen3-moe": (qwen3, _small(qwen3._debugmodel_moe(**_FLEX), qwen_moe, 20)),
        "gpt-oss": (gpt_oss, _small(gpt_oss._debugmodel("standard"), oss_layers, 12)),
        "deepseek-v2-lite": (deepseek_v3, deepseek),
        "deepseek-v3": (deepseek_v3, predicting),
        "deepseek-v3-mtp": (deepseek_v3, _with_mtp(predicting)),
        "kimi-k2-text": (kimi_k2_7, replace(_kimi(), vision_encoder=None)),
        "kimi-k2": (kimi_k2_7, _kimi()),
        "qwen3.5": (qwen3_5, _qwen35(moe=False)),
        "qwen3.5-moe": (qwen3_5, _qwen35(moe=True)),
        "muse-glimmer": (muse_glimmer, _muse(vision=False)),
        "muse-glimmer-vision": (muse_glimmer, _muse(vision=True)),
        "flux": (flux, _flux()),
    }


def _small(config: Any, layers: Any, dim: int) -> Any:
    """A configuration with other layers, and its vocabulary and size to match."""
    return replace(
        config,
        dim=dim,
        vocab_size=_VOCABULARY,
        tok_embeddings=replace(
            config.tok_embeddings, num_embeddings=_VOCABULARY, embedding_dim=dim
        ),
        norm=_resized(config.norm, dim),
        lm_head=replace(config.lm_head, in_features=dim, out_features=_VOCABULARY),
        layers=layers,
    )


def _resized(norm: Any, dim: int) -> Any:
    return replace(norm, **{"dim" if hasattr(norm, "dim") else "normalized_shape": dim})


def _with_mtp(config: Any) -> Any:
    """With layers that predict further tokens."""
    layers = deepseek_v3._build_mtp_layers(config.layers[-1], dim=20, num_mtp_layers=2)
    return replace(config, mtp_layers=layers)


def _kimi() -> Any:
    layers = kimi_k2_7._build_kimi_layers(n_layers=3, dim=20, q_lora_rank=9, **_MLA)
    config = _small(kimi_k2_7._debugmodel(**_MOE), layers, 20)
    vision = kimi_k2_7._vision_encoder_config(
        dim=12, ffn_dim=28, num_layers=2, num_heads=3, patch_size=4, init_pos_emb_height=5,
        init_pos_emb_width=7, text_hidden_size=20,
    )  # fmt: skip
    return replace(config, vision_encoder=vision)


def _qwen35(moe: bool) -> Any:
    common: dict[str, Any] = {
        "n_layers": 4, "rotary_dim": 8, "n_key_heads": 2, "n_value_heads": 6, "key_head_dim": 5,
        "value_head_dim": 7, "full_attention_interval": 2, **_GQA,
    }  # fmt: skip
    common["rope"] = qwen3_5.MRoPE.Config(dim=8, max_seq_len=64, theta=1e4, mrope_section=[2, 1, 1])
    if moe:
        layers = qwen3_5._build_qwen35_moe_layers(
            moe_hidden_dim=14, num_experts=5, top_k=2, shared_expert_hidden_dim=18, **common
        )
    else:
        layers = qwen3_5._build_qwen35_layers(hidden_dim=44, **common)
    vision = qwen3_5._qwen35_vision_encoder_config(
        dim=12, ffn_dim=28, num_layers=2, num_heads=3, patch_size=4, temporal_patch_size=2,
        spatial_merge_size=2, out_hidden_size=20, num_position_embeddings=25,
    )  # fmt: skip
    full = qwen3_5._debugmodel_moe(**_FLEX) if moe else qwen3_5._debugmodel(**_FLEX)
    return replace(_small(full, layers, 20), vision_encoder=vision)


def _muse(vision: bool) -> Any:
    parts: dict[str, Any] = {}
    if vision:
        encoder = muse_glimmer.muse_glimmer_vision_encoder_config(
            latent_dim=12, num_layers=3, num_heads=3, mlp_ratio=2.5, patch_size=4,
            downsample_factor=2, sparse_attention_factor=2, pos_emb_grid_h=2, pos_emb_grid_w=3,
        )  # fmt: skip
        adapter = muse_glimmer.muse_glimmer_vision_adapter_config(
            input_dim=encoder.output_dim, output_dim=26
        )
        parts = {
            "vision_adapter_dim": 26, "vision_encoder": encoder, "vision_adapter": adapter
        }  # fmt: skip
    return muse_glimmer._muse_glimmer_config(
        dim=20, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=8, vocab_size=_VOCABULARY,
        max_seq_len=64, window_pattern=[8, 0], output_multiplier=1.0, **_FLEX, **parts,
    )  # fmt: skip


def _flux() -> Any:
    hidden, heads = 24, 3
    config = flux._flux_debug()
    double = flux._make_double_block_config(
        hidden_size=hidden, num_heads=heads, mlp_ratio=2.5, qkv_bias=True
    )
    single = flux._make_single_block_config(hidden_size=hidden, num_heads=heads, mlp_ratio=2.5)

    def resized(layer: Any, into: int | None, out: int | None) -> Any:
        return replace(
            layer, in_features=into or layer.in_features, out_features=out or layer.out_features
        )

    def embedder(old: Any, into: int) -> Any:
        return replace(
            old, in_dim=into, hidden_dim=hidden, in_layer=resized(old.in_layer, into, hidden),
            out_layer=resized(old.out_layer, hidden, hidden),
        )  # fmt: skip

    last = config.final_layer_config
    return replace(
        config, in_channels=10, out_channels=10, vec_in_dim=14, context_in_dim=22,
        hidden_size=hidden, mlp_ratio=2.5, num_heads=heads, axes_dim=(2, 2, 4),
        img_in=resized(config.img_in, 10, hidden), txt_in=resized(config.txt_in, 22, hidden),
        pe_config=replace(config.pe_config, dim=8, axes_dim=(2, 2, 4)),
        time_in_config=embedder(config.time_in_config, 256),
        vector_in_config=embedder(config.vector_in_config, 14),
        double_blocks=[double, double, double], single_blocks=[single, single], depth=3,
        depth_single_blocks=2,
        final_layer_config=replace(
            last, hidden_size=hidden, out_channels=10, linear=resized(last.linear, hidden, 10),
            adaln_linear=resized(last.adaln_linear, hidden, 2 * hidden),
        ),
    )  # fmt: skip


def _meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")
