"""diffusers: LoRAs with names as their trainers wrote them, tiny."""

from __future__ import annotations

from benchmarks.zoo.diffusers_shapes import Shapes, layers, prefixed

RANK = 5
HIDDEN = 3072
"""Of Flux, Chroma and Hunyuan Video, which their converters split by."""


def pair(
    name: str, rows: int, columns: int, kind: str = "lora_A lora_B", rank: int = RANK
) -> Shapes:
    """The two factors of a LoRA."""
    down, up = kind.split()
    return {f"{name}.{down}.weight": (rank, columns), f"{name}.{up}.weight": (rows, rank)}


def pairs(names: str, rows: int, columns: int, kind: str = "lora_A lora_B") -> Shapes:
    """Those of several modules, separated by spaces."""
    found: Shapes = {}
    for name in names.split():
        found |= pair(name, rows, columns, kind)
    return found


_KOHYA = "lora_down lora_up"


def with_alpha(shapes: Shapes) -> Shapes:
    """With a scale for each pair."""
    ends = (".lora_down.weight", ".lora_A.weight")
    bases = (n.removesuffix(end) for end in ends for n in shapes if n.endswith(end))
    return shapes | {f"{base}.alpha": () for base in bases}


def with_dora(shapes: Shapes) -> Shapes:
    end = ".lora_down.weight"
    bases = [n.removesuffix(end) for n in shapes if n.endswith(end)]
    return shapes | {f"{base}.dora_scale": (8, 1) for base in bases}


_ATTENTION = "to_q to_k to_v to_out_0"
_TEXT = layers(3, pairs(
    " ".join(f"lora_te_text_model_encoder_layers_{{n}}_{part}" for part in (
        "self_attn_q_proj", "self_attn_k_proj", "self_attn_v_proj", "self_attn_out_proj", "mlp_fc1",
        "mlp_fc2")), 8, 7, _KOHYA))  # fmt: skip
SD = dict(_TEXT)
for _block in ("down_blocks_0", "down_blocks_1", "up_blocks_1"):
    _base = f"lora_unet_{_block}_attentions_{{n}}_"
    SD |= layers(2, pairs(f"{_base}proj_in {_base}proj_out", 8, 7, _KOHYA))
    _base += "transformer_blocks_0_"
    _names = [f"{_base}attn{k}_{part}" for k in (1, 2) for part in _ATTENTION.split()]
    SD |= layers(
        2, pairs(" ".join([*_names, f"{_base}ff_net_0_proj", f"{_base}ff_net_2"]), 8, 7, _KOHYA)
    )
SDXL: Shapes = {name.replace("lora_te_", "lora_te1_"): shape for name, shape in _TEXT.items()} | {
    name.replace("lora_te_", "lora_te2_"): shape for name, shape in _TEXT.items()
}
for _block in ("input_blocks_4_1", "input_blocks_5_1", "middle_block_1", "output_blocks_0_1"):
    _base = f"lora_unet_{_block}_transformer_blocks_{{n}}_"
    _names = [f"{_base}attn{k}_{part}" for k in (1, 2) for part in _ATTENTION.split()]
    SDXL |= layers(
        2, pairs(" ".join([*_names, f"{_base}ff_net_0_proj", f"{_base}ff_net_2"]), 8, 7, _KOHYA)
    )

_FLUX_BLOCK = ("img_attn{}proj img_mlp{}0 img_mlp{}2 img_mod{}lin txt_attn{}proj txt_mlp{}0 "
               "txt_mlp{}2 txt_mod{}lin")  # fmt: skip


def _flux(prefix: str, dot: str, kind: str) -> Shapes:
    start, d = prefix, dot
    block = f"{start}double_blocks{d}{{n}}{d}"
    names = _FLUX_BLOCK.replace("{}", d).split()
    found = layers(3, pairs(" ".join(block + name for name in names), 8, 7, kind))
    for part in ("img", "txt"):
        found |= layers(3, pair(f"{block}{part}_attn{d}qkv", 24, 7, kind))
    block = f"{start}single_blocks{d}{{n}}{d}"
    found |= layers(2, pair(f"{block}linear1", 7 * HIDDEN, 2, kind))
    return found | layers(2, pairs(f"{block}linear2 {block}modulation{d}lin", 8, 7, kind))


_FLUX = _flux("lora_unet_", "_", _KOHYA)
_FLUX_ENDS = pairs(
    " ".join(f"lora_unet_{name}" for name in (
        "guidance_in_in_layer", "guidance_in_out_layer", "img_in", "txt_in", "time_in_in_layer",
        "time_in_out_layer", "vector_in_in_layer", "vector_in_out_layer", "final_layer_linear",
        "final_layer_adaLN_modulation_1",
    )), 8, 7, _KOHYA,
)  # fmt: skip
_FLUX_MIXTURE = layers(2, pairs(
    " ".join(f"lora_transformer_{name}" for name in (
        "transformer_blocks_{n}_attn_to_q", "transformer_blocks_{n}_attn_add_k_proj",
        "transformer_blocks_{n}_attn_to_out_0", "single_transformer_blocks_{n}_attn_to_v",
    )), 8, 7, _KOHYA,
)) | pairs("lora_transformer_x_embedder lora_transformer_proj_out", 8, 7, _KOHYA)  # fmt: skip

_XLABS = layers(3, {
    name: shape for part in ("qkv_lora1", "qkv_lora2", "proj_lora1", "proj_lora2")
    for name, shape in pair(f"double_blocks.{{n}}.processor.{part}",
                            24 if "qkv" in part else 8, 7, "down up").items()
}) | layers(2, pair("single_blocks.{n}.processor.qkv_lora", 24, 7, "down up")
            | pair("single_blocks.{n}.processor.proj_lora", 8, 9, "down up"))  # fmt: skip

_HUNYUAN = (
    layers(3, {
        name: shape for side in ("img", "txt") for part, rows in
        (("attn_qkv", 24), ("attn_proj", 8), ("mlp.fc1", 11), ("mlp.fc2", 8), ("mod.linear", 48))
        for name, shape in pair(f"double_blocks.{{n}}.{side}_{part}", rows, 7).items()
    })
    | layers(2, pair("single_blocks.{n}.linear1", 3 * HIDDEN + 10, 2)
             | pairs("single_blocks.{n}.linear2 single_blocks.{n}.modulation.linear", 8, 7))
    | layers(2, pairs("txt_in.individual_token_refiner.blocks.{n}.self_attn_proj "
                      "txt_in.individual_token_refiner.blocks.{n}.mlp.fc1", 8, 7))
    | pairs("img_in.proj txt_in.t_embedder.mlp.0 txt_in.t_embedder.mlp.2 time_in.mlp.0 "
            "vector_in.in_layer guidance_in.mlp.2 final_layer.linear", 8, 7)
    | pair("final_layer.adaLN_modulation.1", 16, 7, rank=6)
)  # fmt: skip

_LUMINA_BLOCK = pair("attention.qkv", 2304 + 2 * 768, 3) | pairs(
    "attention.out feed_forward.w1 feed_forward.w2 feed_forward.w3", 8, 7
)
_LUMINA = prefixed("diffusion_model.", {
    **layers(2, prefixed("noise_refiner.{n}.", _LUMINA_BLOCK | pair("adaLN_modulation.1", 32, 8))),
    **layers(2, prefixed("context_refiner.{n}.", _LUMINA_BLOCK)),
    **layers(3, prefixed("layers.{n}.", _LUMINA_BLOCK | pair("adaLN_modulation.1", 32, 8))),
})  # fmt: skip

_WAN_NAMES = " ".join(
    [f"{attention}_attn.{part}" for attention in ("self", "cross") for part in "qkvo"]
    + ["cross_attn.k_img", "cross_attn.v_img", "ffn.0", "ffn.2"]
)


def _wan(kind: str) -> Shapes:
    block = pairs(_WAN_NAMES, 8, 7, kind)
    return prefixed("diffusion_model.", layers(3, prefixed("blocks.{n}.", block)))


_WAN = _wan("lora_A lora_B") | prefixed("diffusion_model.", {
    **layers(3, {f"blocks.{{n}}.{name}.diff_b": (8,) for name in _WAN_NAMES.split()}),
    **layers(3, {"blocks.{n}.norm3.diff": (8,)}),
    **pairs("time_projection.1 head.head text_embedding.0 text_embedding.2 time_embedding.0 "
            "time_embedding.2 img_emb.proj.1 img_emb.proj.3", 8, 7),
    "time_projection.1.diff_b": (8,), "head.head.diff_b": (8,), "text_embedding.0.diff_b": (8,),
})  # fmt: skip
_MUSUBI_WAN = with_alpha({
    name.replace("diffusion_model.", "lora_unet_").replace(".", "_", name.count(".") - 3): shape
    for name, shape in _wan(_KOHYA).items()
})  # fmt: skip

_QWEN_BLOCK = ("attn.to_q attn.to_k attn.to_v attn.to_out.0 attn.add_q_proj attn.add_k_proj "
               "attn.add_v_proj attn.to_add_out img_mlp.net.0.proj img_mlp.net.2 img_mod.1 "
               "txt_mlp.net.0.proj txt_mlp.net.2 txt_mod.1")  # fmt: skip


def _underscored(prefix: str, names: str, rows: int = 8) -> Shapes:
    """Of kohya's scripts: the names of modules with `_` in place of `.`."""
    return pairs(" ".join(prefix + n.replace(".", "_") for n in names.split()), rows, 7, _KOHYA)


_QWEN = layers(3, _underscored("lora_unet_transformer_blocks_{n}_", _QWEN_BLOCK)) | _underscored(
    "lora_unet_", "img_in txt_in proj_out norm_out.linear"
)

_ANIMA_BLOCK = " ".join(
    [f"{a}_attn.{p}_proj" for a in ("self", "cross") for p in ("q", "k", "v", "output")]
    + ["mlp.layer1", "mlp.layer2"]
    + [
        f"adaln_modulation_{part}.{k}"
        for part in ("self_attn", "cross_attn", "mlp")
        for k in (1, 2)
    ]
)
_ANIMA = prefixed("diffusion_model.", {
    **layers(3, prefixed("blocks.{n}.", pairs(_ANIMA_BLOCK, 8, 7))),
    **layers(2, prefixed("llm_adapter.blocks.{n}.", pairs("q_proj mlp.0", 8, 7))),
    **pairs("final_layer.linear t_embedder.1.linear_1 x_embedder.proj.1", 8, 7),
})  # fmt: skip

_FLUX_2_BLOCK = "img_attn.proj txt_attn.proj img_mlp.0 img_mlp.2 txt_mlp.0 txt_mlp.2"
_FLUX_2_ENDS = ("img_in txt_in time_in.in_layer time_in.out_layer guidance_in.in_layer "
                "guidance_in.out_layer final_layer.linear single_stream_modulation.lin "
                "double_stream_modulation_img.lin double_stream_modulation_txt.lin")  # fmt: skip
_FLUX_2 = prefixed("diffusion_model.", {
    **layers(3, prefixed("double_blocks.{n}.", pairs(_FLUX_2_BLOCK, 8, 7))),
    **layers(3, prefixed("double_blocks.{n}.", pairs("img_attn.qkv txt_attn.qkv", 24, 7))),
    **layers(2, prefixed("single_blocks.{n}.", pairs("linear1 linear2", 8, 7))),
    **pairs(_FLUX_2_ENDS, 8, 7), **pair("final_layer.adaLN_modulation.1", 16, 7),
})  # fmt: skip
_KOHYA_FLUX_2 = (
    layers(3, _underscored("lora_unet_double_blocks_{n}_", _FLUX_2_BLOCK))
    | layers(3, _underscored("lora_unet_double_blocks_{n}_", "img_attn.qkv txt_attn.qkv", 24))
    | layers(2, _underscored("lora_unet_single_blocks_{n}_", "linear1 linear2"))
    | _underscored("lora_unet_", "img_in txt_in time_in.in_layer final_layer.linear")
)
_FLUX_3 = prefixed("diffusion_model.", layers(3, {
    name: shape for block in ("content_mode_blocks.{n}.image", "single_blocks.{n}")
    for name, shape in prefixed(f"{block}.", pairs(
        "q_proj k_proj v_proj attn_out mlp_in mlp_out", 8, 7)).items()
}))  # fmt: skip


def _lokr(names: str) -> Shapes:
    found: Shapes = {}
    for name in names.split():
        found |= {
            f"{name}.lokr_w1": (3, 2),
            f"{name}.lokr_w2_a": (4, 5),
            f"{name}.lokr_w2_b": (5, 7),
        }
    return found


_Z_BLOCK = "attention.to_q attention.to_k attention.to_v attention.to_out.0 feed_forward.w1 feed_forward.w2"
_Z_IMAGE = prefixed("diffusion_model.", {
    **layers(3, prefixed("layers.{n}.", pairs(_Z_BLOCK, 8, 7))),
    **layers(2, prefixed("noise_refiner.{n}.", pairs(_Z_BLOCK, 8, 7))),
    **pairs("cap_embedder.1 t_embedder.mlp.0", 8, 7),
})  # fmt: skip
_KOHYA_Z_IMAGE = (
    layers(3, _underscored("lora_unet_layers_{n}_", "attention.qkv", 24))
    | layers(
        3, _underscored("lora_unet_layers_{n}_", "attention.out feed_forward.w1 adaLN_modulation.0")
    )
    | layers(2, _underscored("lora_unet_context_refiner_{n}_", "attention.out feed_forward.w3"))
)

_IDEOGRAM_BLOCK = pair("attention.qkv", 24, 7) | pairs(
    "attention.o feed_forward.w1 feed_forward.w2 feed_forward.w3 adaln_modulation", 8, 7
)
_IDEOGRAM = prefixed("diffusion_model.", layers(3, prefixed("layers.{n}.", _IDEOGRAM_BLOCK)))

_KREA_BLOCK = "attn.wq attn.wk attn.wv attn.wo attn.gate mlp.gate mlp.up mlp.down"
_KREA = prefixed("base_model.model.diffusion_model.", {
    **layers(3, prefixed("blocks.{n}.", pairs(_KREA_BLOCK, 8, 7))),
    **layers(2, prefixed("txtfusion.refiner_blocks.{n}.", pairs(_KREA_BLOCK, 8, 7))),
    **pairs("first last.linear tmlp.0 tmlp.2 tproj.1 txtmlp.1 txtmlp.3 txtfusion.projector", 8, 7),
})  # fmt: skip
_ACE = layers(3, prefixed("base_model.model.layers.{n}.", pairs(
    " ".join(f"{a}_attn.{p}_proj" for a in ("self", "cross") for p in "qkvo"), 8, 7)))  # fmt: skip

_MINIMAX_BLOCK = (
    pair("attn.qkv_proj", 24, 7) | pair("mlp.fc1", 22, 8) | pairs("attn.out_proj mlp.fc2", 8, 7)
)
_MINIMAX = (
    layers(3, prefixed("blocks.{n}.", _MINIMAX_BLOCK | pair("adaln_proj.linear", 48, 8)))
    | layers(2, prefixed("token_refiner.blocks.{n}.", _MINIMAX_BLOCK))
    | pairs("video_patch_proj audio_patch_proj condition_proj time_embedder.proj_in "
            "final_layer.video_out final_layer.adaln_proj.linear", 8, 7)
)  # fmt: skip
_MINIMAX_FLAT = layers(3, {
    name: shape for part, rows in (("attn_qkv_proj", 24), ("attn_out_proj", 8), ("mlp_fc1", 22))
    for name, shape in pair(f"lora_unet_blocks_{{n}}_{part}", rows, 7, _KOHYA).items()
}) | pair("lora_unet_condition_proj", 8, 7, _KOHYA)  # fmt: skip
_MINIMAX_HEADS = layers(2, pair(
    "blocks.{n}.attn.qkv_proj", 3 * 128 * 2, 3, "lora_A.default lora_B.default"
) | pair("blocks.{n}.mlp.fc2", 8, 7, "lora_A.default lora_B.default"))  # fmt: skip

_PLAIN = prefixed(
    "diffusion_model.", layers(3, prefixed("blocks.{n}.", pairs("attn.to_q ff.up", 8, 7)))
)
_LTX_2 = prefixed("diffusion_model.", {
    **layers(3, prefixed("transformer_blocks.{n}.", pairs("attn1.to_q audio_ff.net.2", 8, 7))),
    **pairs("patchify_proj audio_patchify_proj adaln_single.linear audio_adaln_single.linear "
            "av_ca_a2v_gate_adaln_single.linear prompt_adaln_single.linear", 8, 7),
})  # fmt: skip
_LYCORIS = layers(3, _lokr(" ".join(f"lycoris_transformer_blocks_{{n}}_{part}" for part in (
    "attn_to_q", "attn_to_out_0", "attn_add_k_proj", "ff_linear_in", "ff_context_linear_out"
))))  # fmt: skip
_FLUX_2_LOKR = prefixed("diffusion_model.", {
    **layers(3, prefixed("double_blocks.{n}.", _lokr(f"img_attn.qkv txt_attn.qkv {_FLUX_2_BLOCK}"))),
    **layers(2, prefixed("single_blocks.{n}.", _lokr("linear1 linear2"))),
    **_lokr(f"{_FLUX_2_ENDS} final_layer.adaLN_modulation.1"),
})  # fmt: skip
_Z_LOKR = prefixed("diffusion_model.", layers(3, prefixed("layers.{n}.", _lokr(_Z_BLOCK))))

_OF_FLUX = "_convert_kohya_flux_lora_to_diffusers"
_OF_QWEN = "_convert_non_diffusers_qwen_lora_to_diffusers"
_OF_Z_IMAGE = "_convert_non_diffusers_z_image_lora_to_diffusers"
_OF_WAN = "_convert_non_diffusers_wan_lora_to_diffusers"
_OF_MINIMAX = "_convert_non_diffusers_minimax_h3_lora_to_diffusers"
_OF_LOKR = "_convert_non_diffusers_lokr_to_diffusers"
LORAS: dict[str, tuple[str, Shapes]] = {
    "kohya-flux": (_OF_FLUX, _FLUX | _FLUX_ENDS | _TEXT),
    "kohya-flux-alpha": (_OF_FLUX, with_alpha(_FLUX)),
    "comfy-flux": (_OF_FLUX, _flux("diffusion_model.", ".", _KOHYA)),
    "mixed-flux-alpha": (_OF_FLUX, with_alpha(_FLUX_MIXTURE)),
    "xlabs-flux": ("_convert_xlabs_flux_lora_to_diffusers", _XLABS),
    "hunyuan-video": ("_convert_hunyuan_video_lora_to_diffusers", _HUNYUAN),
    "lumina2": ("_convert_non_diffusers_lumina2_lora_to_diffusers", _LUMINA),
    "wan": (_OF_WAN, _WAN),
    "wan-alpha": (_OF_WAN, with_alpha(_wan(_KOHYA))),
    "musubi-wan-alpha": ("_convert_musubi_wan_lora_to_diffusers", _MUSUBI_WAN),
    "hidream": ("_convert_non_diffusers_hidream_lora_to_diffusers", _PLAIN),
    "ltx": ("_convert_non_diffusers_ltxv_lora_to_diffusers", _PLAIN),
    "ltx-2": ("_convert_non_diffusers_ltx2_lora_to_diffusers", _LTX_2),
    "kohya-qwen": (_OF_QWEN, _QWEN),
    "kohya-qwen-alpha": (_OF_QWEN, with_alpha(_QWEN)),
    "qwen": (_OF_QWEN, layers(3, prefixed("diffusion_model.transformer_blocks.{n}.", pairs(_QWEN_BLOCK, 8, 7)))),
    "anima": ("_convert_non_diffusers_anima_lora_to_diffusers", _ANIMA),
    "flux-2": ("_convert_non_diffusers_flux2_lora_to_diffusers", _FLUX_2),
    "flux-3": ("_convert_non_diffusers_flux3_lora_to_diffusers", _FLUX_3),
    "kohya-flux-2": ("_convert_kohya_flux2_lora_to_diffusers", _KOHYA_FLUX_2),
    "lokr": (_OF_LOKR, _Z_LOKR),
    "lokr-alpha": (_OF_LOKR, _Z_LOKR | {f"{n.removesuffix('.lokr_w1')}.alpha": () for n in _Z_LOKR if n.endswith("w1")}),
    "flux-2-lokr": ("_convert_non_diffusers_flux2_lokr_to_diffusers", _FLUX_2_LOKR),
    "lycoris-flux-2-lokr": ("_convert_lycoris_flux2_lokr_to_diffusers", _LYCORIS),
    "z-image": (_OF_Z_IMAGE, _Z_IMAGE),
    "kohya-z-image": (_OF_Z_IMAGE, _KOHYA_Z_IMAGE),
    "ideogram-4": ("_convert_non_diffusers_ideogram4_lora_to_diffusers", _IDEOGRAM),
    "krea-2": ("_convert_non_diffusers_krea2_lora_to_diffusers", _KREA),
    "ace-step": ("_convert_non_diffusers_ace_step_lora_to_diffusers", _ACE),
    "minimax-h3": (_OF_MINIMAX, _MINIMAX),
    "minimax-h3-musubi": (_OF_MINIMAX, _MINIMAX_FLAT),
    "minimax-h3-diffsynth": (_OF_MINIMAX, _MINIMAX_HEADS),
}  # fmt: skip
"""By the name of the conversion: the converter, and the arrays that it takes."""

_ENCODER = "text_model.encoder.layers.{n}."
_OLD = layers(
    3,
    prefixed(
        _ENCODER,
        pairs(
            " ".join(f"self_attn.to_{part}_lora" for part in ("q", "k", "v", "out")),
            8,
            7,
            "down up",
        ),
    ),
)
_NEW = layers(
    3,
    prefixed(
        _ENCODER,
        pairs(
            " ".join(f"self_attn.{part}_proj.lora_linear_layer" for part in ("q", "k", "v", "out"))
            + " mlp.fc1.lora_linear_layer",
            8,
            7,
            "down up",
        ),
    ),
)
_PEFT = layers(3, prefixed(_ENCODER, pairs("self_attn.q_proj self_attn.out_proj", 8, 7)))
_UNET = layers(
    2,
    prefixed(
        "down_blocks.{n}.attentions.0.transformer_blocks.0.",
        pairs(
            " ".join(
                f"attn{k}.processor.to_{part}_lora"
                for k in (1, 2)
                for part in ("q", "k", "v", "out")
            )
            + " ff.net.2.lora",
            8,
            7,
            "down up",
        ),
    ),
)
UTILITIES: dict[str, tuple[str, Shapes]] = {
    "older-to-peft": ("convert_state_dict_to_peft", _OLD),
    "to-peft": ("convert_state_dict_to_peft", _NEW),
    "older-to-diffusers": ("convert_state_dict_to_diffusers", _OLD),
    "peft-to-diffusers": ("convert_state_dict_to_diffusers", _PEFT),
    "peft-to-kohya": ("convert_state_dict_to_kohya", prefixed("unet.", _PEFT)),
    "unet-to-peft": ("convert_unet_state_dict_to_peft", _UNET),
}  # fmt: skip
"""Between names of LoRAs that diffusers itself has had."""
