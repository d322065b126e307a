"""Tiny models of mlx-lm that transformers has not, or makes otherwise than mlx-lm wants.

What lies on the Hub is told from the parameters of mlx-lm's own model: which of them are stacked,
joined or turned there, and what else is there that mlx-lm leaves away.
"""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.mlx_experts import MIXTURES
from benchmarks.zoo.mlx_steps import (
    EXPERTS,
    GATE_UP,
    HEAD,
    PAIRS,
    ROPE,
    TURNS,
    VISION,
    Model,
    also,
    joined,
    renamed,
    reshaped,
    swapped,
    text,
    without,
)

GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": PAIRS, "top_k_experts": 2,
    "enable_moe_block": True, "use_double_wide_mlp": False,
}  # fmt: skip
GEMMA4_EXPERTS = (
    joined(("switch_glu.gate_proj.weight", "switch_glu.up_proj.weight"), "gate_up_proj", axis=-2),
    renamed(r"switch_glu\.down_proj\.weight", "down_proj"),
)

MODELS: dict[str, Model] = {
    **MIXTURES,
    "baichuan_m1": ({"sliding_window_layers": [1], "conv_window": 2}, ()),
    "gear": (
        {"layer_types": ["conv_mixer", "full_attention", "sliding_attention"]},
        (swapped("_conv.weight"), also(model__embed_tokens__embed_scale=(1,)), HEAD),
    ),
    "gemma3n": (
        text(
            model_type="gemma3n_text", num_hidden_layers=4, num_kv_shared_layers=2,
            sliding_window=8, rope_local_base_freq=1e4, final_logit_softcapping=30.0,
            layer_types=PAIRS, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
            altup_num_inputs=3, altup_coef_clip=1.0, altup_correct_scale=True, altup_active_idx=0,
        ),
        (
            also(
                model__vision_tower__patch__weight=(24, 13), model__audio_tower__norm=(14,),
                model__embed_audio__norm__weight=(14,), model__embed_vision__norm__weight=(14,),
            ),
        ),
    ),
    "gemma4": (
        {**text(**GEMMA4), "vocab_size": 101},
        (
            *GEMMA4_EXPERTS,
            renamed(r"^language_model\.model\.", "model.language_model."),
            also(
                model__vision_tower__patch__weight=(24, 13),
                model__language_model__layers__3__self_attn__k_proj__weight=(12, 24),
                model__language_model__layers__3__self_attn__v_proj__weight=(12, 24),
            ),
        ),
    ),
    "gemma4_text": (
        GEMMA4,
        (*GEMMA4_EXPERTS, also(model__layers__3__self_attn__k_proj__weight=(12, 24))),
    ),
    "gpt2": (
        {"layer_norm_epsilon": 1e-5},
        (
            renamed(r"^model\.", ""),
            swapped(r"\.(c_attn|c_proj|c_fc)\.weight"),
            also(h__0__attn__bias=(1, 1, 37, 37)),
        ),
    ),
    "granitemoehybrid": (
        {
            "layer_types": ["mamba", "attention", "mamba"], "mamba_d_conv": 4,
            "mamba_conv_bias": True, "mamba_proj_bias": False,
        },
        (
            swapped("conv1d.weight"),
            joined(
                tuple(f"block_sparse_moe.switch_mlp.{each}" for each in GATE_UP),
                "block_sparse_moe.input_linear.weight", axis=-2,
            ),
            renamed(r"switch_mlp\.down_proj", "output_linear"),
            HEAD,
        ),
    ),
    "hunyuan": (
        {
            "use_mixed_mlp_moe": True, "num_shared_expert": 1, "use_qk_norm": True,
            "use_cla": False, "cla_share_factor": 2, "moe_intermediate_size": 10,
            "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        },
        (EXPERTS,),
    ),
    "hunyuan-dense": (
        {
            "use_mixed_mlp_moe": False, "num_shared_expert": 1, "use_qk_norm": True,
            "use_cla": False, "cla_share_factor": 2, "num_experts": 1,
            "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        },
        (
            joined(
                ("mlp.up_proj.weight", "mlp.gate_proj.weight"), "mlp.gate_and_up_proj.weight", 0
            ),
            joined(
                tuple(f"self_attn.{each}_proj.weight" for each in "qkv"),
                "self_attn.qkv_proj.weight", 0,
            ),
        ),
    ),
    "internlm2": ({"bias": False}, (also(model__layers__0__attention__rope__inv_freq=(3,)),)),
    "jamba": (
        {
            "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
            "expert_layer_period": 2, "mamba_d_conv": 4,
        },
        (swapped("conv1d.weight"), EXPERTS, HEAD),
    ),
    "lfm2-vl": (
        text(
            model_type="lfm2", block_dim=24, conv_L_cache=3, conv_bias=False, norm_eps=1e-5,
            block_ff_dim=40, block_multiple_of=1, block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False, full_attn_idxs=[1],
        ),
        (VISION,),
    ),
    "lille-130m": ({"n_embd": 96, "n_kv_heads": 2}, (also(transformer__rotary_emb__freqs=(3,)),)),
    "llama4": (
        text(
            model_type="llama4_text", attention_bias=False, attention_chunk_size=8,
            interleave_moe_layer_step=2, intermediate_size_mlp=44, rope_scaling=None,
            use_qk_norm=True, num_hidden_layers=4, num_experts_per_tok=1,
        ),
        (
            swapped(r"\.experts\."),
            joined(tuple(f"experts.{each}" for each in GATE_UP), "experts.gate_up_proj", -1),
            renamed(r"experts\.down_proj\.weight", "experts.down_proj"),
            also(vision_model__patch__weight=(24, 13)),
        ),
    ),
    "mimo": ({}, (ROPE, also(model__mtp_layers__0__input_proj__weight=(24, 48)))),
    "minicpm": ({"dim_model_base": 8}, (without("lm_head"),)),
    "muse_glimmer": (
        {}, (renamed(r"^model\.", "model.language_model."), also(vision_adapter__fc__weight=(24, 13)))
    ),
    "nanbeige": ({}, (ROPE,)),
    "nemotron-nas": (
        {
            "block_configs": [
                {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}},
                {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
                {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}},
            ],
        },
        (),
    ),
    "phi3small": ({"ff_intermediate_size": 40}, (ROPE,)),
    "pixtral": (text(model_type="llama"), (VISION,)),
    "plamo2": (
        {"hidden_size_per_head": 6, "mamba_d_conv": 4}, (swapped("conv1d.weight"),)
    ),
    "plamo3": ({"sliding_window_pattern": 2}, (HEAD,)),
    "qwen3_vl": (
        text(model_type="qwen3_vl_text", tie_word_embeddings=False, attention_bias=False),
        (
            renamed(r"^language_model\.model\.", "model.language_model."),
            renamed(r"^language_model\.lm_head\.", "lm_head."),
            also(model__visual__patch__weight=(24, 13)),
        ),
    ),
    "qwen3_vl_moe": (
        text(
            model_type="qwen3_vl_moe_text", tie_word_embeddings=False, attention_bias=False,
            norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        ),
        (
            swapped(r"\.switch_mlp\."),
            joined(tuple(f"switch_mlp.{each}" for each in GATE_UP), "experts.gate_up_proj", -1),
            renamed(r"switch_mlp\.down_proj\.weight", "experts.down_proj"),
            renamed(r"^language_model\.model\.", "model.language_model."),
            renamed(r"^language_model\.lm_head\.", "lm_head."),
            also(model__visual__patch__weight=(24, 13)),
        ),
    ),
    "rwkv7": (
        {
            "head_dim": 6, "a_low_rank_dim": 5, "v_low_rank_dim": 7, "gate_low_rank_dim": 9,
            "decay_low_rank_dim": 8,
        },
        (
            reshaped(r"\.k_[ka]$", lambda shape: (1, 1, shape[0] * shape[1])),
            reshaped("g_norm", lambda shape: (shape[0] * shape[1],)),
        ),
    ),
    "spark2_5": (
        {
            "layer_types": TURNS,
            "rope_parameters": {
                kind: {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0}
                for kind in TURNS
            },
        },
        (ROPE, HEAD),
    ),
    "talkie": ({}, (also(rotary__cos=(37, 3), rotary__sin=(37, 3)),)),
    "youtu_llm": ({}, (HEAD,)),
}  # fmt: skip
