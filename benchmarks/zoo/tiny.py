"""Tiny configurations of transformers' models, of sizes that tell axes apart."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    # sizes of vectors
    "hidden_size": 24, "d_model": 24, "n_embd": 24, "dim": 24, "embedding_size": 14,
    "intermediate_size": 40, "d_ff": 40, "ffn_dim": 40, "hidden_dim": 40, "n_inner": 40,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 44, "d_kv": 7, "head_dim": 6,
    "word_embed_proj_dim": 24,
    "projection_dim": 14, "mlp_ratio": 2, "pooler_hidden_size": 24, "embed_dim": 24,
    # numbers of things
    "vocab_size": 101, "num_labels": 5, "type_vocab_size": 3, "max_position_embeddings": 37,
    "n_positions": 37, "n_ctx": 37, "num_hidden_layers": 3, "num_layers": 2,
    "num_decoder_layers": 3,
    "n_layer": 3, "n_layers": 3, "encoder_layers": 2, "decoder_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_heads": 4, "n_head": 4, "n_heads": 4, "attention_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 3, "rotary_dim": 4,
    "relative_attention_num_buckets": 9, "block_size": 4, "num_random_blocks": 1,
    # pictures and sounds
    "image_size": 24, "patch_size": 8, "num_mel_bins": 10, "max_source_positions": 30,
    "max_target_positions": 33, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    # tokens within the vocabulary
    "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2,
    "sep_token_id": 3, "forced_eos_token_id": 3,
}  # fmt: skip

OF_FAMILY: dict[str, dict[str, Any]] = {
    "albert": {"num_hidden_groups": 1},
    "beit": {"use_relative_position_bias": True, "use_absolute_position_embeddings": True},
    "big_bird": {"attention_type": "original_full"},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "roformer": {"embedding_size": 24},
    "regnet": {"embedding_size": 10, "hidden_sizes": [12, 24], "depths": [2, 3], "groups_width": 4},
    "resnet": {"embedding_size": 10, "hidden_sizes": [12, 24], "depths": [2, 3]},
    "wav2vec2": {
        "conv_dim": [9, 11], "conv_kernel": [10, 3], "conv_stride": [5, 2],
        "feat_extract_norm": "layer", "do_stable_layer_norm": True, "num_feat_extract_layers": 2,
        "codevector_dim": 14, "num_codevectors_per_group": 7, "proj_codevector_dim": 13,
        "output_hidden_size": 24,
    },
    "whisper": {"classifier_proj_size": 13, "decoder_attention_heads": 4},
}  # fmt: skip


def tiny_config(model_class: Any, change: dict[str, Any] | None = None) -> Any:
    """The configuration of a model class, tiny.

    Arguments:
        model_class: of transformers.
        change: values that take precedence.
    """
    kind = model_class.config_class
    return kind(**_values(kind, change or {}))


def _values(kind: Any, change: dict[str, Any]) -> dict[str, Any]:
    default = kind()
    names = {*default.to_dict(), *getattr(kind, "attribute_map", {})}
    back = {own: alias for alias, own in getattr(kind, "attribute_map", {}).items()}
    values = {
        k: v for k, v in SIZES.items() if k in names and k not in getattr(kind, "attribute_map", {})
    }
    if "n_inner" in values and "intermediate_size" in back.values():
        values.pop("intermediate_size", None)
    for name in ("text_config", "vision_config"):
        part = getattr(default, name, None)
        if part is not None:
            values[name] = _values(type(part), {})
    if values.get("decoder_attention_heads") == 3 and "d_model" not in names:
        values.pop("decoder_attention_heads")
    return {**values, **OF_FAMILY.get(kind.model_type.replace("-", "_"), {}), **change}


MORE_SIZES: dict[str, Any] = {
    # mixtures of experts
    "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "moe_num_experts": 6,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2,
    "n_group": 1, "topk_group": 1, "num_expert_group": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 10, "shared_expert_intermediate_size": 14, "ffn_hidden_size": 40,
    "expert_ffn_hidden_size": 10, "shared_intermediate_size": 14, "zero_expert_num": 2,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_shared_expert_intermediate_size": 14,
    # attention
    "q_lora_rank": 15, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 5, "index_n_heads": 2, "index_head_dim": 8,
    "index_topk": 4, "global_head_dim": 8, "num_global_key_value_heads": 2,
    # state spaces
    "mamba_d_state": 5, "mamba_num_heads": 4, "mamba_head_dim": 12, "ssm_state_size": 5,
    "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_n_groups": 1, "n_groups": 2,
    "mamba_expand": 2, "mamba_dt_rank": 7, "conv_dim": 24,
    # pictures and sounds
    "depth": 2, "out_hidden_size": 24, "num_position_embeddings": 9, "max_window_layers": 3,
    "num_channels": 3, "in_channels": 3, "in_chans": 3, "vision_feature_layer": -1,
    "encoder_hidden_dim": 24, "decoder_hidden_dim": 24, "num_queries": 11, "layers": 2,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 101, "laurel_rank": 4,
}  # fmt: skip

OF_FAMILY_5: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "falcon_h1": {"mamba_d_ssm": 48, "mamba_d_head": 12, "mamba_n_heads": 4},
    "mamba2": {"num_heads": 4, "head_dim": 12, "state_size": 5, "n_groups": 1},
    "olmo": {},
}
