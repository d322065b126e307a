"""Tiny models of transformers for KerasHub's converters, where `tiny_model` alone is not enough."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.zoo.transformers_mapping import tiny_model

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Tiny:
    """A tiny model, and what its checkpoint has otherwise than transformers 5 saves it.

    Arguments:
        change: of its configuration.
        model: makes the model; else it is one of the class's name.
        config: what is in the file config.json besides, or instead.
        within: the type of the model that has this one as a part, and the part's name.
        names: patterns of names, and how they are on the Hub.
        arrays: changes the arrays of the checkpoint.
        shards: whether the checkpoint has an index.
    """

    change: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    within: tuple[str, str] | None = None
    names: tuple[tuple[str, str], ...] = ()
    arrays: Callable[[Arrays], Arrays] | None = None
    shards: bool = False

    def made(self, name: str) -> Any:
        """The model.

        Arguments:
            name: of the class.
        """
        import transformers

        if self.model is not None:
            return self.model()
        return tiny_model(getattr(transformers, name), {"type_vocab_size": 2, **self.change})

    def hub(self, arrays: Arrays) -> Arrays:
        """A checkpoint as it is on the Hub.

        Arguments:
            arrays: as transformers saves it.
        """
        for pattern, to in self.names:
            arrays = {re.sub(pattern, to, key): value for key, value in arrays.items()}
        return arrays if self.arrays is None else self.arrays(arrays)


TURNS = ["sliding_attention", "full_attention"] * 2
GEMMA_TEXT: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "layer_types": TURNS,
    "pad_token_id": 0,
}  # fmt: skip
GEMMA_4_TEXT: dict[str, Any] = {
    **GEMMA_TEXT, "global_head_dim": 8, "hidden_size_per_layer_input": 7,
    "vocab_size_per_layer_input": 101, "num_kv_shared_layers": 2,
}  # fmt: skip
GEMMA_4_MIXTURE: dict[str, Any] = {
    **GEMMA_TEXT, "global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_experts": 6,
    "enable_moe_block": True, "moe_intermediate_size": 10, "top_k_experts": 2,
    "num_global_key_value_heads": 2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
TOWER = (r"\bvision_tower\.(?!vision_model)", "vision_tower.vision_model.")


def gemma3() -> Any:
    """With a tower for pictures, of which KerasHub pools 4 by 4 patches."""
    import transformers

    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config=GEMMA_TEXT, vision_config=VISION, mm_tokens_per_image=1
        )
    )


def gemma4(text: dict[str, Any], whole: bool) -> Any:
    """Its text model, or it as a whole."""
    import transformers

    if not whole:
        return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**text))
    config = transformers.Gemma4Config(
        text_config=text,
        vision_config={
            **VISION, "head_dim": 8, "num_key_value_heads": 4, "position_embedding_size": 13,
        },
        audio_config={
            "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2,
            "output_proj_dims": 26, "subsampling_conv_channels": [128, 6],
        },
    )  # fmt: skip
    return transformers.Gemma4ForConditionalGeneration(config)


def gemma4_assistant() -> Any:
    """All of its layers share keys and values of another model."""
    import transformers

    text = {**GEMMA_TEXT, "global_head_dim": 8, "hidden_size_per_layer_input": 0}
    config = transformers.Gemma4AssistantConfig(
        text_config={**text, "num_kv_shared_layers": 4, "vocab_size_per_layer_input": 0},
        backbone_hidden_size=28, num_centroids=5, centroid_intermediate_top_k=2,
    )  # fmt: skip
    return transformers.Gemma4AssistantForCausalLM(config)


MOBILE_NET = [
    ["er_r1_k3_s2_e4_c8"],
    ["uir_r1_a3_k5_s2_e6_c16", "uir_r1_a5_k0_s1_e4_c16"],
    ["uir_r1_a5_k5_s2_e6_c24", "mqa_r1_k3_h3_v2_s1_d4_c24", "uir_r1_a0_k0_s1_e2_c24"],
    ["uir_r1_a5_k5_s2_e6_c32", "mqa_r1_k3_h2_s1_d6_c32", "uir_r1_a0_k0_s1_e2_c32"],
]
"""Blocks of each kind that the network of Gemma 3n for pictures has."""


def gemma3n() -> Any:
    """Its network for pictures is fixed in KerasHub and in timm: a small one takes its place."""
    import transformers
    from keras_hub.src.utils.transformers import convert_gemma3n
    from timm.models import mobilenetv5
    from timm.models._efficientnet_builder import decode_arch_def

    convert_gemma3n.MODEL_CONFIGS["mobilenetv5_300m_enc"].update(
        convert_gemma3n.convert_arch_def_to_stackwise(MOBILE_NET), stem_size=12, num_features=2048
    )
    text = {key: x for key, x in GEMMA_TEXT.items() if key != "pad_token_id"}
    config = transformers.Gemma3nConfig(
        text_config={
            **text, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 101,
            "hidden_size_per_layer_input": 8, "laurel_rank": 5, "altup_num_inputs": 3,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "pad_token_id": 0,
        },
        audio_config={
            "hidden_size": 32, "conf_num_attention_heads": 4, "conf_num_hidden_layers": 2,
            "sscp_conv_channel_size": [8, 6], "vocab_size": 13, "input_feat_size": 16,
        },
        vision_config={"vocab_size": 11, "hidden_size": 2048},
    )  # fmt: skip
    model = transformers.Gemma3nForConditionalGeneration(config)
    model.model.vision_tower.timm_model = mobilenetv5.MobileNetV5Encoder(
        decode_arch_def(MOBILE_NET, group_size=None), stem_size=12, layer_scale_init_value=1e-5
    )
    return model


def pali_gemma() -> Any:
    """KerasHub takes `num_image_tokens` for the size of heads, and the token of a picture for the
    number of tokens.
    """
    import transformers

    text = {key: x for key, x in GEMMA_TEXT.items() if key not in ("layer_types", "pad_token_id")}
    return transformers.PaliGemmaForConditionalGeneration(
        transformers.PaliGemmaConfig(
            text_config={**text, "model_type": "gemma"},
            vision_config={**VISION, "model_type": "siglip_vision_model", "projection_dim": 24},
            image_token_index=101, projection_dim=24,
        )
    )  # fmt: skip


def t5gemma2() -> Any:
    """With a tower for pictures."""
    import transformers

    return transformers.T5Gemma2ForConditionalGeneration(
        transformers.T5Gemma2Config(
            encoder={
                "text_config": {**GEMMA_TEXT, "intermediate_size": 44},
                "vision_config": VISION, "mm_tokens_per_image": 4,
            },
            decoder=GEMMA_TEXT,
        )
    )  # fmt: skip


def sam3() -> Any:
    """The part that finds what a text says."""
    import transformers

    part = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "num_layers": 2}
    config = transformers.Sam3Config(
        vision_config={
            "fpn_hidden_size": 24,
            "backbone_config": {
                **VISION, "model_type": "sam3_vit_model", "pretrain_image_size": 16, "window_size": 2, "global_attn_indexes": [1],
            },
            "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        },
        text_config={
            "vocab_size": 101, "hidden_size": 20, "intermediate_size": 44, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 9, "projection_dim": 14,
            "hidden_act": "gelu",
        },
        geometry_encoder_config={**part, "roi_size": 3},
        detr_encoder_config=part,
        detr_decoder_config={**part, "num_queries": 11},
        mask_decoder_config={"hidden_size": 24, "num_attention_heads": 4},
    )  # fmt: skip
    return transformers.Sam3Model(config)


def swin() -> Any:
    """Windows that fit into the picture of each stage."""
    import transformers

    return transformers.SwinModel(
        transformers.SwinConfig(
            image_size=24, patch_size=2, embed_dim=24, depths=[2, 3], num_heads=[3, 4],
            window_size=3, mlp_ratio=2.0,
        )
    )  # fmt: skip


def esm() -> Any:
    """With positions that are learned, and a norm of embeddings."""
    import transformers

    return transformers.EsmModel(
        transformers.EsmConfig(
            vocab_size=101, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
            intermediate_size=40, max_position_embeddings=37, pad_token_id=1, mask_token_id=4,
            position_embedding_type="absolute", emb_layer_norm_before=True,
        )
    )  # fmt: skip


def packed(arrays: Arrays) -> Arrays:
    """Weights of experts in MXFP4: 32 of a row are 16 bytes of a block, with a scale."""
    found: Arrays = {}
    for key, value in arrays.items():
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inside, outside = value.shape
            shape = (experts, outside, inside // 32)
            found[f"{key}_blocks"] = np.zeros((*shape, 16), np.uint8)
            found[f"{key}_scales"] = np.zeros(shape, np.uint8)
        else:
            found[key] = value
    return found


MODELS: dict[str, Tiny] = {
    "AlbertForPreTraining": Tiny(),
    "BartModel": Tiny({"decoder_ffn_dim": 40, "decoder_attention_heads": 4, "encoder_layers": 3}),
    "BertModel": Tiny(),
    "EsmModel": Tiny(
        model=esm,
        names=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
    ),
    "Gemma3ForConditionalGeneration": Tiny(model=gemma3, names=(TOWER,)),
    "Gemma3nForConditionalGeneration": Tiny(
        model=gemma3n, shards=True, config={"text_config": {"rope_theta": 1e6}}
    ),
    "Gemma4ForCausalLM": Tiny(
        model=lambda: gemma4(GEMMA_4_TEXT, False), config={"global_head_dim": 8}
    ),
    "Gemma4ForConditionalGeneration": Tiny(
        model=lambda: gemma4(GEMMA_4_MIXTURE, True), config={"text_config": {"global_head_dim": 8}}
    ),
    "Gemma4AssistantForCausalLM": Tiny(
        model=gemma4_assistant, config={"text_config": {"global_head_dim": 8}}
    ),
    "GptOssForCausalLM": Tiny({"hidden_size": 64, "intermediate_size": 32}, arrays=packed),
    "PaliGemmaForConditionalGeneration": Tiny(
        model=pali_gemma, names=(TOWER,), config={"text_config": {"num_image_tokens": 6}}
    ),
    "Qwen3MoeForCausalLM": Tiny(config={"num_experts": 6}),
    "Sam3VideoModel": Tiny(
        model=sam3, names=(("^", "detector_model."),), within=("sam3_video", "detector_config")
    ),
    "SwinModel": Tiny(model=swin),
    "T5Gemma2ForConditionalGeneration": Tiny(model=t5gemma2, names=(TOWER,)),
    "XLMRobertaModel": Tiny(),
}
"""By class; of those that are not here, `tiny_model` of transformers' class will do."""
