"""Tiny models of mlx-lm that transformers has not, or makes otherwise than mlx-lm wants.

What lies on the Hub is told from the parameters of mlx-lm's own model: which of them are stacked,
joined or turned there, and what else is there that mlx-lm leaves away.
"""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.mlx_steps import (
    Step,
    also,
    dbrx_experts,
    in_three,
    joined,
    latent,
    renamed,
    reshaped,
    swapped,
    unstacked,
    without,
)
from benchmarks.zoo.tiny import MORE_SIZES, SIZES

BASE: dict[str, Any] = {**SIZES, **MORE_SIZES, "rms_norm_eps": 1e-5, "rope_theta": 1e4}


def text(**change: Any) -> dict[str, Any]:
    """The configuration of a model that has its text model's inside it."""
    return {"text_config": {**BASE, **change}}


EXPERTS = unstacked(r"\.switch_mlp\.(\w+_proj)\.", r".experts.{e}.\1.")
EXPERTS_IN_PLACE = unstacked(r"\.mlp\.experts\.(\w+_proj)\.", r".mlp.experts.{e}.\1.")
ROPE = also(model__layers__0__self_attn__rotary_emb__inv_freq=(3,))
HEAD = also(lm_head__weight=(101, 24))
VISION = also(
    vision_tower__patch__weight=(24, 13), multi_modal_projector__linear_1__weight=(24, 14)
)
TURNS = ["sliding_attention", "full_attention", "sliding_attention"]
PAIRS = ["sliding_attention", "full_attention"] * 2
DELTA = {
    "num_heads": 3,
    "head_dim": 6,
    "short_conv_kernel_size": 4,
    "kda_layers": [1, 3],
    "full_attn_layers": [2],
}
YARN = {
    "type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32,
    "beta_slow": 1, "original_max_position_embeddings": 8,
}  # fmt: skip
BAILING: dict[str, Any] = {"num_shared_experts": 1, "moe_router_enable_expert_bias": True}
BAILING_STEPS = (EXPERTS, renamed(r"\.gate\.gate_proj\.", ".gate."))
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": PAIRS, "top_k_experts": 2,
    "enable_moe_block": True, "use_double_wide_mlp": False,
}  # fmt: skip
GEMMA4_EXPERTS = (
    joined(("switch_glu.gate_proj.weight", "switch_glu.up_proj.weight"), "gate_up_proj", axis=-2),
    renamed(r"switch_glu\.down_proj\.weight", "down_proj"),
)
GATE_UP = ("gate_proj.weight", "up_proj.weight")
KIMI_MOE = (
    unstacked(r"\.mlp\.switch_mlp\.gate_proj", ".block_sparse_moe.experts.{e}.w1"),
    unstacked(r"\.mlp\.switch_mlp\.down_proj", ".block_sparse_moe.experts.{e}.w2"),
    unstacked(r"\.mlp\.switch_mlp\.up_proj", ".block_sparse_moe.experts.{e}.w3"),
    renamed(r"\.mlp\.(shared_experts|routed_expert|gate\.)", r".block_sparse_moe.\1"),
    renamed(r"\.mlp\.e_score", ".block_sparse_moe.gate.e_score"),
)
DEEPSEEK_41 = (
    unstacked(r"\.mlp\.experts\.switch_mlp\.gate_proj", ".ffn.experts.{e}.w1"),
    unstacked(r"\.mlp\.experts\.switch_mlp\.down_proj", ".ffn.experts.{e}.w2"),
    unstacked(r"\.mlp\.experts\.switch_mlp\.up_proj", ".ffn.experts.{e}.w3"),
    reshaped(r"o_a_proj", lambda shape: (shape[0] * shape[1], shape[2])),
    *(
        renamed(mine, theirs)
        for mine, theirs in (
            (r"^lm_head\.", "head."), (r"^model\.embed_tokens\.", "embed."), (r"^model\.", ""),
            (r"shared_experts\.gate_proj", "shared_experts.w1"),
            (r"shared_experts\.down_proj", "shared_experts.w2"),
            (r"shared_experts\.up_proj", "shared_experts.w3"),
            (r"\.self_attn\.", ".attn."), (r"\.mlp\.", ".ffn."),
            ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"),
            (r"\.(attn|ffn)_hc\.", r".hc_\1_"), (r"\.sinks", ".attn_sink"),
            (r"\.(q|o)_(a|b)_proj\.", r".w\1_\2."), (r"\.kv_proj\.", ".wkv."),
            (r"\.gate_proj\.", ".wgate."), (r"\.q_a_norm\.", ".q_norm."),
            (r"\.compressor\.kv_norm\.", ".compressor.norm."),
            (r"\.indexer\.k_proj\.", ".indexer.wk."), ("e_score_correction_bias", "bias"),
        )
    ),
    also(mtp__0__norm__weight=(24,), layers__1__ffn__gate__bias_vl=(6,)),
)  # fmt: skip

MODELS: dict[str, tuple[dict[str, Any], tuple[Step, ...]]] = {
    "Klear": ({"mlp_only_layers": [0], "decoder_sparse_step": 1}, (EXPERTS_IN_PLACE,)),
    "afmoe": ({"layer_types": TURNS, "num_dense_layers": 1}, (EXPERTS_IN_PLACE, ROPE)),
    "baichuan_m1": ({"sliding_window_layers": [1], "conv_window": 2}, ()),
    "bailing_moe": (BAILING, BAILING_STEPS),
    "bailing_moe-norm_head": (BAILING | {"norm_head": True}, BAILING_STEPS),
    "bailing_moe_linear": (BAILING | {"layer_group_size": 2, "group_norm_size": 2}, BAILING_STEPS),
    "bailing_moe_v3": (
        {"layer_group_size": 3, "head_dim": 6},
        (EXPERTS, latent, swapped("conv1d"), also(model__layers__3__norm__weight=(24,))),
    ),
    "dbrx": (
        {
            "n_layers": 2,
            "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 6, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        },
        (dbrx_experts,),
    ),
    "deepseek": ({}, (EXPERTS,)),
    "deepseek_v2": ({"rope_scaling": YARN, "topk_method": "greedy"}, (EXPERTS,)),
    "deepseek_v41": (
        {
            "o_groups": 2, "o_lora_rank": 7, "hc_mult": 2, "head_dim": 8,
            "compress_ratios": (0, 4, 4), "kv_source_layer_ids": (1,),
            "index_source_layer_ids": (1,),
        },
        DEEPSEEK_41,
    ),
    "dots1": ({"scoring_func": "noaux_tc"}, (EXPERTS_IN_PLACE, ROPE)),
    "exaone_moe": (
        {"layer_types": TURNS, "is_moe_layer": [False, True, True]},
        (EXPERTS, renamed(r"\.gate\.e_score", ".e_score"), also(mtp__norm__weight=(24,))),
    ),
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
    "glm_moe_dsa": (
        {
            "topk_method": "noaux_tc", "scoring_func": "sigmoid",
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        },
        (EXPERTS, latent, also(model__layers__3__norm__weight=(24,))),
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
    "kimi_k3": (
        text(
            linear_attn_config=DELTA, hidden_act="situ", attn_res_block_size=2,
            mla_use_output_gate=True, num_shared_experts=1, routed_expert_hidden_size=14,
            latent_moe_use_norm=True,
        ),
        (
            *KIMI_MOE,
            latent,
            renamed(r"(self_attention|mlp|output_attn)_res_(proj|norm)\.weight", r"\1_res.\2_weight"),
            swapped("conv.weight"),
            in_three("qkv_proj", "{}_proj"), in_three("qkv_conv.conv", "{}_conv1d"),
            reshaped("A_log", lambda shape: (1, 1, *shape, 1)),
            VISION,
        ),
    ),
    "kimi_linear": (
        {"linear_attn_config": DELTA, "num_shared_experts": 1, "model_max_length": 37},
        (
            *KIMI_MOE,
            latent,
            swapped("conv.weight"),
            renamed(r"(q|k|v)_conv\.conv\.", r"\1_conv1d."),
            reshaped("dt_bias", lambda shape: (3, shape[0] // 3)),
            also(model__mtp__norm__weight=(24,)),
        ),
    ),
    "kimi_vl": (text(moe_layer_freq=1), (EXPERTS, VISION)),
    "lfm2-vl": (
        text(
            model_type="lfm2", block_dim=24, conv_L_cache=3, conv_bias=False, norm_eps=1e-5,
            block_ff_dim=40, block_multiple_of=1, block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False, full_attn_idxs=[1],
        ),
        (VISION,),
    ),
    "lfm2_moe": (
        {"use_expert_bias": True, "conv_bias": False, "conv_L_cache": 3, "full_attn_idxs": [1]},
        (
            EXPERTS,
            swapped("conv.weight"),
            renamed("gate_proj.weight", "w1.weight"),
            renamed("down_proj.weight", "w2.weight"),
            renamed("up_proj.weight", "w3.weight"),
        ),
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
    "longcat_flash_ngram": (
        {
            "num_layers": 2, "ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3,
            "emb_split_num": 2, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
        },
        (
            EXPERTS,
            latent,
            renamed(r"ngram_embeddings\.word_embeddings", "embed_tokens"),
            also(model__mtp__norm__weight=(24,)),
        ),
    ),
    "mimo": ({}, (ROPE, also(model__mtp_layers__0__input_proj__weight=(24, 48)))),
    "mimo_v2_flash": (
        {
            "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1],
            "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
            "topk_method": "noaux_tc", "scoring_func": "sigmoid", "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2, "swa_head_dim": 8, "swa_v_head_dim": 5,
            "partial_rotary_factor": 1,
        },
        (EXPERTS, also(model__mtp__layers__0__norm__weight=(24,))),
    ),
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
    "phimoe": (
        {
            "rope_scaling": {
                "short_factor": [1.0] * 3, "long_factor": [1.0] * 3, "short_mscale": 1.0,
                "long_mscale": 1.0, "type": "longrope",
            },
            "original_max_position_embeddings": 8,
        },
        (
            EXPERTS,
            renamed(r"(experts\.\d+)\.gate_proj", r"\1.w1"),
            renamed(r"(experts\.\d+)\.down_proj", r"\1.w2"),
            renamed(r"(experts\.\d+)\.up_proj", r"\1.w3"),
        ),
    ),
    "phixtral": (
        {"num_vocab": 101, "model_dim": 24},
        (unstacked(r"\.switch_mlp\.(fc\d)\.", r".mlp.{e}.\1."),),
    ),
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
    "step3p5": (
        {
            "num_attention_groups": 2, "moe_layers_enum": "1,2", "moe_top_k": 2,
            "share_expert_dim": 14, "layer_types": TURNS,
            "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 3},
        },
        (
            renamed(r"\.mlp\.switch_mlp\.", ".moe."),
            renamed(r"\.mlp\.gate\.(gate\.|router)", r".moe.\1"),
            renamed(r"\.mlp\.share_expert\.", ".share_expert."),
            also(model__layers__3__norm__weight=(24,)),
        ),
    ),
    "talkie": ({}, (also(rotary__cos=(37, 3), rotary__sin=(37, 3)),)),
    "youtu_llm": ({}, (HEAD,)),
}  # fmt: skip
"""Of each model what its configuration has beyond `BASE`, and what is otherwise on the Hub."""
