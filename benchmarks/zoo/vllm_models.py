"""vLLM: its architectures of which transformers has a configuration, tiny."""

from __future__ import annotations

from typing import Any

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
_MAMBA = {"hidden_size": 48, "state_size": 6, "num_hidden_layers": 2, "vocab_size": 53,
          "intermediate_size": 96, "time_step_rank": 5}  # fmt: skip
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
    "CwmForCausalLM": ("CwmConfig", _HEADS),
    "DbrxForCausalLM": (
        "DbrxConfig", {"d_model": 64, "n_heads": 8, "n_layers": 2, "max_seq_len": 64,
                       "vocab_size": 53, "attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0,
                                                               "rope_theta": 10000.0},
                       "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 5,
                                      "moe_top_k": 2}},
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
    "FalconMambaForCausalLM": ("FalconMambaConfig", _MAMBA),
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
    "GraniteSWAForCausalLM": ("GraniteSWAConfig", _HEADS),
    "GraniteMoeSWAForCausalLM": (
        "GraniteMoeSWAConfig",
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
    "HunYuanMoEV1ForCausalLM": (
        "HunYuanMoEV1Config", {**_COMMON, **_EXPERTS, "num_experts": 5, "moe_topk": 2,
                               "intermediate_size": 128},
    ),
    "HyperCLOVAXForCausalLM": ("HyperCLOVAXConfig", _HEADS),
    "Jais2ForCausalLM": ("Jais2Config", _HEADS),
    "JambaForCausalLM": (
        "JambaConfig",
        {**_HEADS, **_EXPERTS, "num_experts": 5, "intermediate_size": 128, "head_dim": None,
         "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
         "expert_layer_offset": 1, "mamba_d_state": 6, "mamba_dt_rank": 5},
    ),
    "Lfm2ForCausalLM": (
        "Lfm2Config",
        {**_HEADS, "block_dim": 48, "conv_dim": 48, "block_ff_dim": 44, "block_multiple_of": 4,
         "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
         "layer_types": ["conv", "full_attention"], "tie_word_embeddings": True},
    ),
    "Lfm2MoeForCausalLM": (
        "Lfm2MoeConfig", {**_HEADS, **_EXPERTS, "head_dim": 8, "num_experts": 5,
                          "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    ),
    "LlamaForCausalLM": ("LlamaConfig", {**_COMMON, "attention_bias": True}),
    "Llama4ForCausalLM": (
        "Llama4TextConfig",
        {**_HEADS, **_EXPERTS, "head_dim": 8, "num_local_experts": 5, "intermediate_size": 128,
         "intermediate_size_mlp": 44, "interleave_moe_layer_step": 2,
         "attn_temperature_tuning": False},
    ),
    "MambaForCausalLM": ("MambaConfig", _MAMBA),
    "Mamba2ForCausalLM": (
        "Mamba2Config", {"hidden_size": 48, "state_size": 6, "num_hidden_layers": 2,
                         "vocab_size": 53, "num_heads": 8, "head_dim": 12, "n_groups": 4},
    ),
    "MellumForCausalLM": ("MellumConfig", {**_COMMON, **_EXPERTS, "num_experts": 5}),
    "MiniCPM3ForCausalLM": (
        "MiniCPM3Config", {**_FULL, "head_dim": None, "kv_lora_rank": 10, "q_lora_rank": 9,
                           "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8,
                           "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32},
    ),
    "MiniMaxM2ForCausalLM": (
        "MiniMaxM2Config",
        {**_HEADS, **_EXPERTS, "head_dim": 8, "num_local_experts": 5, "intermediate_size": 128,
         "use_qk_norm": True, "rotary_dim": 4, "scoring_func": "sigmoid",
         "use_routing_bias": True},
    ),
    "Ministral3ForCausalLM": ("Ministral3Config", _COMMON),
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
    "OlmoHybridForCausalLM": (
        "OlmoHybridConfig",
        {**_FULL, "linear_num_key_heads": 8, "linear_num_value_heads": 8, "linear_key_head_dim": 5,
         "linear_value_head_dim": 7, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "OlmoeForCausalLM": (
        "OlmoeConfig", {**_FULL, **_EXPERTS, "head_dim": 8, "num_experts": 5, "intermediate_size": 128},
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
    "VaultGemmaForCausalLM": (
        "VaultGemmaConfig", {**_COMMON, "tie_word_embeddings": True, "query_pre_attn_scalar": 6},
    ),
}  # fmt: skip
"""Architectures, each with its configuration of transformers."""
