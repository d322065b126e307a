"""diffusers: transformers, with names as their authors wrote them, tiny."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.zoo.diffusers_shapes import Shapes, both, each, layers, prefixed


def named() -> Iterator[tuple[str, Callable[[Any], Any], Shapes]]:
    """The converters, each with the arrays that it takes."""
    from diffusers.loaders import single_file_utils as utils

    for name, (function, shapes) in MODELS.items():
        yield name, getattr(utils, function), shapes
    convert = utils.convert_minimax_h3_transformer_checkpoint_to_diffusers
    heads = {"num_attention_heads": 3, "attention_head_dim": 4}
    for layout in ("stacked", "interleaved"):
        yield f"minimax-h3-{layout}", _with(convert, heads, qkv_layout=layout), _MINIMAX
    yield (
        "z-image-controlnet",
        _with(
            utils.convert_z_image_controlnet_checkpoint_to_diffusers,
            {"add_control_noise_refiner": "control_layers"},
        ),
        layers(2, prefixed("control_layers.{n}.", both("after_proj", 9, 7)))
        | layers(2, prefixed("control_noise_refiner.{n}.", both("after_proj", 9, 7)))
        | both("control_all_x_embedder.2-1", 9, 5),
    )


def _with(convert: Callable[..., Any], config: dict[str, Any], **options: Any) -> Any:
    def converted(arrays: Any) -> Any:
        return convert(arrays, config, **options)

    return converted


_LINEAR_ATTENTION = {f"{part}.weight": (8, 7) for part in ("to_q", "to_k", "to_v")} | both(
    "to_out.0", 8, 7
)


def _ltx_block() -> Shapes:
    norms = {f"{norm}.weight": (8,) for norm in ("q_norm", "k_norm")}
    return (
        each("{x}.", "attn1 attn2", _LINEAR_ATTENTION | norms)
        | both("ff.net.0.proj", 11, 8)
        | both("ff.net.2", 8, 11)
        | {"scale_shift_table": (6, 8)}
    )


_LTX = prefixed(
    "model.diffusion_model.",
    layers(3, prefixed("transformer_blocks.{n}.", _ltx_block()))
    | both("patchify_proj", 8, 5)
    | both("adaln_single.linear", 48, 8)
    | both("adaln_single.emb.timestep_embedder.linear_1", 8, 6)
    | both("caption_projection.linear_1", 8, 9)
    | both("proj_out", 5, 8)
    | {"scale_shift_table": (2, 8)},
)


def _cosmos_1() -> Shapes:
    found: Shapes = {}
    for n in range(3):
        block = f"net.blocks.block{n}.blocks."
        for k in range(3):
            found |= {f"{block}{k}.adaLN_modulation.{m}.weight": (8 + m, 7) for m in (1, 2)}
        for k, part in itertools.product(range(2), "qkv"):
            found[f"{block}{k}.block.attn.to_{part}.0.weight"] = (8, 9 - 2 * k)
            found[f"{block}{k}.block.attn.to_{part}.1.weight"] = (4,)
            found[f"{block}{k}.block.attn.to_out.0.weight"] = (8, 6)
        found |= {f"{block}2.block.layer{m}.weight": (8, 10 + m) for m in (1, 2)}
    return found | {
        "net.x_embedder.proj.1.weight": (8, 5), "net.t_embedder.1.linear_1.weight": (8, 8),
        "net.affline_norm.weight": (8,), "net.final_layer.linear.weight": (5, 8),
        "net.final_layer.adaLN_modulation.1.weight": (6, 8), "net.logvar.0.freqs": (8,),
        "net.logvar.0.phases": (8,), "net.pos_embedder.seq": (11,),
        "net.extra_pos_embedder.pos_emb_h": (5, 8),
    }  # fmt: skip


_COSMOS_2 = layers(3, prefixed("net.blocks.{n}.", {
    **{f"adaln_modulation_{part}.{k}.weight": (7 + k, 8) for k in (1, 2)
       for part in ("self_attn", "cross_attn", "mlp")},
    **{f"{attention}.{part}.weight": (8, columns) for part in
       ("q_proj", "k_proj", "v_proj", "output_proj")
       for attention, columns in (("self_attn", 9), ("cross_attn", 7))},
    **{f"{attention}.{part}_norm.weight": (4,) for part in "qk"
       for attention in ("self_attn", "cross_attn")},
    "mlp.layer1.weight": (12, 8), "mlp.layer2.weight": (8, 12),
})) | {
    "net.x_embedder.proj.1.weight": (8, 5), "net.t_embedder.1.linear_1.weight": (8, 8),
    "net.t_embedding_norm.weight": (8,), "net.final_layer.linear.weight": (5, 8),
    "net.final_layer.adaln_modulation.1.weight": (6, 8), "net.pos_embedder.seq": (11,),
    "net.accum_iteration": (2,), "net.blocks.0.self_attn.q_norm._extra_state": (3,),
}  # fmt: skip

_FLUX_2 = (
    layers(3, {
        **{f"double_blocks.{{n}}.{part}{name}.weight": shape for part in ("img", "txt")
           for name, shape in (("_attn.qkv", (24, 8)), ("_attn.proj", (8, 7)),
                               ("_mlp.0", (22, 8)), ("_mlp.2", (8, 11)))},
        **{f"double_blocks.{{n}}.{part}_attn.norm.{norm}_norm.scale": (4,)
           for part in ("img", "txt") for norm in ("query", "key")},
    })
    | layers(2, {
        "single_blocks.{n}.linear1.weight": (46, 8), "single_blocks.{n}.linear2.weight": (8, 19),
        "single_blocks.{n}.norm.query_norm.scale": (4,),
        "single_blocks.{n}.norm.key_norm.scale": (4,),
    })
    | {
        "img_in.weight": (8, 5), "txt_in.weight": (8, 9), "final_layer.linear.weight": (5, 8),
        "final_layer.adaLN_modulation.1.weight": (16, 8),
        **{f"{name}_in.{layer}_layer.weight": (8, 6 if layer == "in" else 8)
           for name in ("time", "guidance") for layer in ("in", "out")},
        **{f"{name}.lin.weight": (24, 8) for name in
           ("double_stream_modulation_img", "double_stream_modulation_txt",
            "single_stream_modulation")},
    }
)  # fmt: skip

_FLUX_3_BLOCK = {
    **{f"{part}_proj.weight": (8, 7) for part in "qkv"}, "attn_out.weight": (8, 9),
    "norm.query_norm.scale": (4,), "norm.key_norm.scale": (4,), "mlp_in.weight": (22, 8),
    "mlp_out.weight": (8, 11), "modulation.lin.weight": (24, 8),
}  # fmt: skip
_FLUX_3 = (
    layers(2, each("content_mode_blocks.{{n}}.{x}.", "image text", _FLUX_3_BLOCK))
    | layers(3, prefixed("single_blocks.{n}.", _FLUX_3_BLOCK))
    | {
        "emb_in.image.weight": (8, 5), "txt_in.weight": (8, 6),
        **{f"{name}.{layer}_layer.weight": (8, 10 if layer == "in" else 8)
           for name in ("time_in", "ref_time_in") for layer in ("in", "out")},
        "final_layer.image.linear.weight": (5, 8), "repa_projectors.0.weight": (3, 8),
        "final_layer.image.adaLN_modulation.1.weight": (16, 8),
    }
)  # fmt: skip

_Z_BLOCK = {
    "attention.qkv.weight": (24, 7), "attention.out.weight": (8, 9),
    "attention.q_norm.weight": (4,), "attention.k_norm.weight": (4,),
    "feed_forward.w1.weight": (11, 8), "feed_forward.w2.weight": (8, 11),
    "feed_forward.w3.weight": (11, 8), "attention_norm1.weight": (8,),
}  # fmt: skip
_Z_IMAGE = prefixed(
    "model.diffusion_model.",
    layers(3, prefixed("layers.{n}.", _Z_BLOCK | both("adaLN_modulation.0", 32, 8)))
    | layers(2, each("{x}.{{n}}.", "noise_refiner context_refiner", _Z_BLOCK))
    | both("x_embedder", 8, 5)
    | both("final_layer.linear", 5, 8)
    | both("cap_embedder.1", 8, 6)
    | {"norm_final.weight": (8,), "x_pad_token": (1, 8)},
)

_LTX_2_BLOCK = (
    each("{x}.", "attn1 attn2 audio_attn1 audio_to_video_attn", _LINEAR_ATTENTION)
    | {f"attn1.{norm}.weight": (8,) for norm in ("q_norm", "k_norm")}
    | each("{x}", "ff audio_ff", both(".net.0.proj", 11, 8) | both(".net.2", 8, 11))
    | {"scale_shift_table": (6, 8), "audio_scale_shift_table": (6, 5)}
    | {f"scale_shift_table_a2v_ca_{part}": (5, 8) for part in ("video", "audio")}
)
_ADALN = (
    "adaln_single audio_adaln_single av_ca_video_scale_shift_adaln_single "
    "av_ca_a2v_gate_adaln_single av_ca_audio_scale_shift_adaln_single av_ca_v2a_gate_adaln_single"
)
_LTX_2 = prefixed(
    "model.diffusion_model.",
    layers(3, prefixed("transformer_blocks.{n}.", _LTX_2_BLOCK))
    | each("{x}", "patchify_proj audio_patchify_proj", both("", 8, 5))
    | each("{x}", _ADALN, both(".linear", 24, 8) | both(".emb.timestep_embedder.linear_1", 8, 6))
    | each("{x}_embeddings_connector", "video audio", both(".transformer_1d_blocks.0", 8, 7))
    | each("{x}", "proj_out audio_proj_out", both("", 5, 8)),
)

_MINIMAX_BLOCK = {
    "attn.qkv_proj.weight": (36, 8), "attn.out_proj.weight": (8, 12), "attn.q_norm.weight": (4,),
    "attn.k_norm.weight": (4,), "mlp.fc1.weight": (22, 8), "mlp.fc2.weight": (8, 11),
    "norm1.weight": (8,), "norm2.weight": (8,),
}  # fmt: skip
_MINIMAX = (
    layers(3, prefixed("blocks.{n}.", _MINIMAX_BLOCK | both("adaln_proj.linear", 48, 8)))
    | layers(2, prefixed("token_refiner.blocks.{n}.", _MINIMAX_BLOCK))
    | both("time_embedder.proj_in", 8, 6)
    | both("time_embedder.proj_out", 8, 8)
    | both("video_patch_proj", 8, 5)
    | both("audio_patch_proj", 8, 7)
    | both("condition_proj", 8, 9)
    | both("final_layer.adaln_proj.linear", 16, 8)
    | both("final_layer.video_out", 5, 8)
    | both("final_layer.audio_out", 7, 8)
    | {"final_layer.norm.weight": (8,), "rope.inv_freq": (3,)}
)

_QWEN_21 = prefixed("model.diffusion_model.", layers(3, {
    "transformer_blocks.{n}.img_mlp.gate_up.weight": (22, 8),
    "transformer_blocks.{n}.img_mlp.out.weight": (8, 11),
    "transformer_blocks.{n}.txt_mlp.net.2.weight": (8, 11),
    **{f"transformer_blocks.{{n}}.attn.{part}.weight": (8, 7) for part in
       ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0")},
}) | both("img_in", 8, 5) | both("proj_out", 5, 8))  # fmt: skip

_KREA_BLOCK = {
    **{f"attn.{part}.weight": (8, columns) for part, columns in
       (("wq", 7), ("wk", 7), ("wv", 7), ("wo", 9), ("gate", 6))},
    "attn.qknorm.qnorm.scale": (4,), "attn.qknorm.knorm.scale": (4,),
    "mlp.gate.weight": (11, 8), "mlp.up.weight": (11, 8), "mlp.down.weight": (8, 11),
    "prenorm.scale": (8,), "postnorm.scale": (8,),
}  # fmt: skip
_KREA = prefixed(
    "model.diffusion_model.",
    layers(3, prefixed("blocks.{n}.", _KREA_BLOCK | {"mod.lin": (48,)}))
    | layers(2, each("txtfusion.{x}.{{n}}.", "layerwise_blocks refiner_blocks", _KREA_BLOCK))
    | both("first", 8, 5)
    | both("tmlp.0", 8, 6)
    | both("tmlp.2", 8, 8)
    | both("tproj.1", 48, 8)
    | both("txtmlp.1", 8, 9)
    | both("txtmlp.3", 8, 8)
    | both("last.linear", 5, 8)
    | {"txtmlp.0.scale": (9,), "last.norm.scale": (8,), "last.modulation.lin": (2, 8)},
)

_AURA_LAYER = {f"attn.w1{part}.weight": (8, 7 if part != "o" else 9) for part in "qkvo"}
_AURA = (
    layers(3, prefixed("double_layers.{n}.", _AURA_LAYER | {
        **{f"attn.w2{part}.weight": (8, 7 if part != "o" else 9) for part in "qkvo"},
        **{f"mlp{side}.{part}.weight": (11, 8) for side in "XC" for part in ("c_fc1", "c_fc2")},
        **{f"mlp{side}.c_proj.weight": (8, 11) for side in "XC"},
        **{f"mod{side}.1.weight": (48, 8) for side in "XC"},
    }))
    | layers(2, prefixed("single_layers.{n}.", _AURA_LAYER | {
        "mlp.c_fc1.weight": (11, 8), "mlp.c_fc2.weight": (11, 8), "mlp.c_proj.weight": (8, 11),
        "modCX.1.weight": (48, 8),
    }))
    | both("t_embedder.mlp.0", 8, 6)
    | both("t_embedder.mlp.2", 8, 8)
    | both("init_x_linear", 8, 5)
    | {
        "register_tokens": (1, 3, 8), "cond_seq_linear.weight": (8, 10),
        "final_linear.weight": (5, 8), "modF.1.weight": (16, 8), "positional_encoding": (1, 12, 8),
    }
)  # fmt: skip

_WAN_BLOCK = (
    each("{x}.", "self_attn cross_attn", {
        **{name: shape for part in "qkvo" for name, shape in both(part, 8, 7).items()},
        "norm_q.weight": (8,), "norm_k.weight": (8,),
    })
    | both("ffn.0", 11, 8) | both("ffn.2", 8, 11) | both("norm3", 8) | {"modulation": (1, 6, 8)}
)  # fmt: skip
_WAN_IMAGE = prefixed("cross_attn.", both("k_img", 8, 7) | both("v_img", 8, 7)) | {
    "cross_attn.norm_k_img.weight": (8,)
}
_WAN_REST = (
    both("patch_embedding", 8, 3, 1, 2, 2) | both("text_embedding.0", 8, 9)
    | both("text_embedding.2", 8, 8) | both("time_embedding.0", 8, 6)
    | both("time_embedding.2", 8, 8) | both("time_projection.1", 48, 8) | both("head.head", 5, 8)
    | {"head.modulation": (1, 2, 8)} | both("img_emb.proj.0", 10) | both("img_emb.proj.1", 10, 10)
    | both("img_emb.proj.3", 8, 10) | both("img_emb.proj.4", 8)
)  # fmt: skip
_WAN_MOTION = {
    "motion_encoder.dec.direction.weight": (12, 5),
    "motion_encoder.enc.net_app.convs.0.0.weight": (4, 3, 1, 1),
    "motion_encoder.enc.net_app.convs.0.1.bias": (1, 4, 1, 1),
    "motion_encoder.enc.net_app.convs.8.weight": (7, 6, 4, 4),
    **{f"motion_encoder.enc.net_app.convs.{n}.{name}": shape for n in range(1, 8) for name, shape in
       (("conv1.0.weight", (4, 4, 3, 3)), ("conv1.1.bias", (1, 4, 1, 1)),
        ("conv2.1.weight", (5, 4, 3, 3)), ("conv2.2.bias", (1, 5, 1, 1)),
        ("skip.1.weight", (5, 4, 1, 1)))},
    **{name: shape for n in range(5) for name, shape in
       both(f"motion_encoder.enc.fc.{n}", 7, 7).items()},
}  # fmt: skip
_WAN_ANIMATE = (
    layers(3, prefixed("blocks.{n}.", _WAN_BLOCK | _WAN_IMAGE)) | _WAN_REST | _WAN_MOTION
    | layers(2, prefixed("face_adapter.fuser_blocks.{n}.", both("linear1_kv", 16, 8)
             | both("linear1_q", 8, 8) | both("linear2", 8, 8)
             | {"q_norm.weight": (4,), "k_norm.weight": (4,)}))
    | both("face_encoder.conv1_local.conv", 12, 8, 3) | both("face_encoder.conv2.conv", 9, 8, 3)
    | both("face_encoder.conv3.conv", 8, 9, 3)
)  # fmt: skip

_PREFIXED = prefixed(
    "model.diffusion_model.",
    layers(3, prefixed("layers.{n}.self_attention.", {f"to_{x}.weight": (8, 7) for x in "qkv"}))
    | both("x_embedder.proj", 8, 5)
    | both("final_linear", 5, 8),
)

MODELS: dict[str, tuple[str, Shapes]] = {
    "ltx": ("convert_ltx_transformer_checkpoint_to_diffusers", _LTX),
    "auraflow": ("convert_auraflow_transformer_checkpoint_to_diffusers", _AURA),
    "wan-animate": ("convert_wan_transformer_to_diffusers", _WAN_ANIMATE),
    "wan-animate-2": (
        "convert_wan_animate_2_transformer_to_diffusers",
        layers(3, prefixed("blocks.{n}.block.", _WAN_BLOCK | _WAN_IMAGE)) | _WAN_REST,
    ),
    "hidream": ("convert_hidream_transformer_to_diffusers", _PREFIXED),
    "ernie-image": ("convert_ernie_image_transformer_checkpoint_to_diffusers", _PREFIXED),
    "cosmos-1": ("convert_cosmos_transformer_checkpoint_to_diffusers", _cosmos_1()),
    "cosmos-2": ("convert_cosmos_transformer_checkpoint_to_diffusers", _COSMOS_2),
    "flux-2": ("convert_flux2_transformer_checkpoint_to_diffusers", _FLUX_2),
    "flux-3": ("convert_flux3_transformer_checkpoint_to_diffusers", _FLUX_3),
    "z-image": ("convert_z_image_transformer_checkpoint_to_diffusers", _Z_IMAGE),
    "ltx-2": ("convert_ltx2_transformer_to_diffusers", _LTX_2),
    "qwen-image-2.1": ("convert_qwen_image21_transformer_checkpoint_to_diffusers", _QWEN_21),
    "krea-2": ("convert_krea2_transformer_checkpoint_to_diffusers", _KREA),
}  # fmt: skip
"""By the name of the conversion: the converter, and the arrays that it takes."""
