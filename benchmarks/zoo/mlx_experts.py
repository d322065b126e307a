"""Tiny mixtures of experts of mlx-lm: see `benchmarks.zoo.mlx_models`."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.mlx_steps import (
    DELTA,
    EXPERTS,
    EXPERTS_IN_PLACE,
    GATE_UP,
    ROPE,
    TURNS,
    VISION,
    W_EXPERTS,
    YARN,
    Model,
    Step,
    also,
    dbrx_experts,
    in_three,
    joined,
    latent,
    packed,
    renamed,
    reshaped,
    swapped,
    text,
    unstacked,
)

BAILING: dict[str, Any] = {"num_shared_experts": 1, "moe_router_enable_expert_bias": True}
BAILING_STEPS = (EXPERTS, renamed(r"\.gate\.gate_proj\.", ".gate."))
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
GPT_OSS: tuple[Step, ...] = (
    joined(
        ("experts.gate_proj.weight", "experts.up_proj.weight"), "experts.gate_up_proj.weight", -2
    ),
    joined(("experts.gate_proj.bias", "experts.up_proj.bias"), "experts.gate_up_proj_bias", -1),
    renamed(r"experts\.down_proj\.bias", "experts.down_proj_bias"),
)

MIXTURES: dict[str, Model] = {
    "Klear": ({"mlp_only_layers": [0], "decoder_sparse_step": 1}, (EXPERTS_IN_PLACE,)),
    "afmoe": ({"layer_types": TURNS, "num_dense_layers": 1}, (EXPERTS_IN_PLACE, ROPE)),
    "bailing_hybrid": (
        BAILING | {"layer_group_size": 2, "group_norm_size": 2, "q_lora_rank": None, "head_dim": 8},
        (*BAILING_STEPS, latent, also(model__layers__3__norm__weight=(24,))),
    ),
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
    "glm_moe_dsa": (
        {
            "topk_method": "noaux_tc", "scoring_func": "sigmoid",
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        },
        (EXPERTS, latent, also(model__layers__3__norm__weight=(24,))),
    ),
    "gpt_oss": ({"layer_types": TURNS}, GPT_OSS),
    "gpt_oss-mxfp4": (
        {"layer_types": TURNS, "hidden_size": 64, "intermediate_size": 32},
        (*GPT_OSS, packed),
    ),
    "kimi_k25": (
        text(),
        (EXPERTS, latent, VISION, also(language_model__model__layers__61__norm__weight=(24,))),
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
    "longcat_flash": (
        {"num_layers": 2, "attention_method": "MLA"},
        (EXPERTS, latent, also(model__mtp__norm__weight=(24,))),
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
    "minimax": ({}, W_EXPERTS),
    "phimoe": (
        {
            "rope_scaling": {
                "short_factor": [1.0] * 3, "long_factor": [1.0] * 3, "short_mscale": 1.0,
                "long_mscale": 1.0, "type": "longrope",
            },
            "original_max_position_embeddings": 8,
        },
        W_EXPERTS,
    ),
    "phixtral": (
        {"num_vocab": 101, "model_dim": 24},
        (unstacked(r"\.switch_mlp\.(fc\d)\.", r".mlp.{e}.\1."),),
    ),
    "qwen3_5_moe": (
        text(num_hidden_layers=4, linear_conv_kernel_dim=4, tie_word_embeddings=False),
        (
            joined(tuple(f"switch_mlp.{each}" for each in GATE_UP), "experts.gate_up_proj", -2),
            renamed(r"switch_mlp\.down_proj\.weight", "experts.down_proj"),
            swapped("conv1d.weight"),
            renamed(r"^language_model\.model\.", "model.language_model."),
            renamed(r"^language_model\.lm_head\.", "lm_head."),
            also(model__visual__patch__weight=(24, 13)),
        ),
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
}  # fmt: skip
