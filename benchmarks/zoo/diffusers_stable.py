"""diffusers: networks and text models of latent diffusion, Kandinsky 3 and image prompts, tiny."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.zoo.diffusers_shapes import Shapes, both, each, layers, prefixed

_LEVELS = (6, 9)
"""Channels of a network of two sizes, with two residual layers in each."""


def stable() -> Iterator[tuple[str, Callable[[Any], Any], Shapes]]:
    """The converters, each with the arrays that it takes."""
    from diffusers.loaders import single_file_utils as utils
    from diffusers.pipelines.kandinsky3 import convert_kandinsky3_unet as kandinsky
    from diffusers.pipelines.stable_diffusion import convert_from_ckpt as older
    from diffusers.utils import state_dict_utils

    config = {
        "layers_per_block": 2, "class_embed_type": None, "addition_embed_type": None,
        "num_class_embeds": None,
    }  # fmt: skip
    large = config | {"addition_embed_type": "text_time"}
    classes = config | {"class_embed_type": "projection"}
    unet = prefixed("model.diffusion_model.", _unet())
    labelled = unet | each("model.diffusion_model.label_emb.0.{x}", "0 2", both("", 8, 7))
    for name, module in (("", utils), ("-older", older)):
        convert = module.convert_ldm_unet_checkpoint
        yield f"unet{name}", functools.partial(convert, config=config), unet
        yield f"unet-xl{name}", functools.partial(convert, config=large), labelled
        yield f"unet-classes{name}", functools.partial(convert, config=classes), labelled
    control = prefixed("control_model.", _controlnet())
    convert = utils.convert_controlnet_checkpoint
    yield "controlnet", functools.partial(convert, config=config), control
    yield "controlnet-alone", functools.partial(convert, config=config), _controlnet()
    yield (
        "clip",
        utils.convert_ldm_clip_checkpoint,
        prefixed("cond_stage_model.transformer.text_model.", _clip()),
    )
    model = types.SimpleNamespace(config=types.SimpleNamespace(hidden_size=8))
    convert = functools.partial(utils.convert_open_clip_checkpoint, model)
    prefix = "conditioner.embedders.1.model."
    yield "open-clip", convert, prefixed("cond_stage_model.model.", _open_clip())
    with_projection = _open_clip() | {"text_projection": (8, 9)}
    convert = functools.partial(convert, prefix=prefix)
    yield "open-clip-xl", convert, prefixed(prefix, with_projection)
    convert = utils.convert_stable_cascade_unet_single_file_to_diffusers
    yield "stable-cascade-c", convert, _cascade("clip_txt_mapper")
    yield "stable-cascade-b", convert, _cascade("clip_mapper")
    yield "kandinsky-3", kandinsky.convert_state_dict, _kandinsky()
    convert = state_dict_utils.convert_sai_sd_control_lora_state_dict_to_peft
    yield "control-lora", convert, _control_lora()


def _residual(name: str, channels: int, into: int) -> Shapes:
    found = both(f"{name}.in_layers.0", into) | both(f"{name}.in_layers.2", channels, into, 3, 3)
    found |= both(f"{name}.emb_layers.1", channels, 8) | both(f"{name}.out_layers.0", channels)
    found |= both(f"{name}.out_layers.3", channels, channels, 3, 3)
    if channels != into:
        found |= both(f"{name}.skip_connection", channels, into, 1, 1)
    return found


def _attention(name: str, channels: int) -> Shapes:
    block = each("{x}.weight", "norm1 norm2 norm3", {"": (channels,)})
    block |= each("attn1.{x}.weight", "to_q to_k to_v", {"": (channels, channels)})
    block |= each("attn2.{x}.weight", "to_k to_v", {"": (channels, 11)})
    block |= {"attn2.to_q.weight": (channels, channels)} | both("ff.net.2", channels, 4 * channels)
    block |= each("attn{x}.to_out.0", "1 2", both("", channels, channels))
    block |= both("ff.net.0.proj", 8 * channels, channels)
    found = both("norm", channels) | prefixed("transformer_blocks.0.", block)
    found |= each("proj_{x}", "in out", both("", channels, channels, 1, 1))
    return prefixed(f"{name}.", found)


def _input_side(*, convolutions: bool = True) -> Shapes:
    small, large = _LEVELS
    found = both("time_embed.0", 8, 6) | both("time_embed.2", 8, 8)
    found |= both("input_blocks.0.0", small, 4, 3, 3)
    for n, channels, into in (
        (1, small, small),
        (2, small, small),
        (4, large, small),
        (5, large, large),
    ):
        found |= _residual(f"input_blocks.{n}.0", channels, into)
        if n < 4:
            found |= _attention(f"input_blocks.{n}.1", channels)
    found |= both("input_blocks.3.0.op", small, small, 3, 3)
    for n in (0, 2):
        found |= _residual(f"middle_block.{n}", large, large)
    return found | _attention("middle_block.1", large)


def _unet() -> Shapes:
    small, large = _LEVELS
    found = _input_side() | both("out.0", small) | both("out.2", 4, small, 3, 3)
    for n in range(6):
        channels = large if n < 3 else small
        found |= _residual(f"output_blocks.{n}.0", channels, channels + (5, 6, 4)[n % 3])
        if n >= 3:
            found |= _attention(f"output_blocks.{n}.1", channels)
    return found | both("output_blocks.2.1.conv", large, large, 3, 3)


def _controlnet() -> Shapes:
    small, large = _LEVELS
    found = _input_side() | both("middle_block_out.0", large, large, 1, 1)
    for n in range(6):
        channels = small if n < 4 else large
        found |= both(f"zero_convs.{n}.0", channels, channels, 1, 1)
    for n in range(8):
        found |= both(f"input_hint_block.{2 * n}", 3 + n, 2 + n, 3, 3)
    return found


def _clip() -> Shapes:
    layer = each("self_attn.{x}_proj", "q k v out", both("", 8, 8))
    layer |= both("mlp.fc1", 11, 8) | both("mlp.fc2", 8, 11)
    layer |= both("layer_norm1", 8) | both("layer_norm2", 8)
    return (
        layers(3, prefixed("encoder.layers.{n}.", layer))
        | {"embeddings.token_embedding.weight": (13, 8)}
        | {"embeddings.position_embedding.weight": (7, 8)}
        | both("final_layer_norm", 8)
    )


def _open_clip() -> Shapes:
    layer = {"attn.in_proj_weight": (24, 8), "attn.in_proj_bias": (24,)}
    layer |= both("attn.out_proj", 8, 8) | both("ln_1", 8) | both("ln_2", 8)
    layer |= both("mlp.c_fc", 11, 8) | both("mlp.c_proj", 8, 11)
    found = layers(3, prefixed("transformer.resblocks.{n}.", layer)) | both("ln_final", 8)
    found |= {"positional_embedding": (7, 8), "token_embedding.weight": (13, 8)}
    return found | {"logit_scale": (1,)}


def _cascade(mapper: str) -> Shapes:
    attention = {"attn.in_proj_weight": (24, 8), "attn.in_proj_bias": (24,)}
    attention |= both("attn.out_proj", 8, 8)
    found = both(f"{mapper}", 8, 7) | both("embedding.1", 8, 5, 1, 1) | both("clf.1", 5, 8, 1, 1)
    for side in ("down_blocks", "up_blocks"):
        for n in range(2):
            block = both("0.depthwise", 8, 1, 3, 3) | both("1.mapper", 16, 6)
            block |= prefixed("2.attention.", attention) | both("2.kv_mapper.1", 8, 8)
            found |= layers(2, prefixed(f"{side}.{n}.{{n}}.", block))
    return found


def _kandinsky() -> Shapes:
    residual = both("res_block.0.projection", 8, 5) | both("res_block.0.in_proj", 8, 8, 3, 3)
    attention = each("attention.{x}.weight", "to_query to_key to_value output_layer", {"": (8, 7)})
    found = both("to_time_embed.1", 8, 6) | both("to_time_embed.3", 8, 8)
    found |= both("projection_lin", 8, 9) | both("projection_ln", 8)
    found |= each("feature_pooling.{x}", "context_proj time_proj", both("", 8, 7))
    found |= both("in_layer", 8, 4, 3, 3) | both("out_layer.0", 8) | both("out_layer.2", 4, 8, 3, 3)
    for side in ("down_samples", "up_samples"):
        for n in range(2):
            block = f"{side}.{n}."
            for k in range(2):
                found |= prefixed(f"{block}resnet_attn_blocks.{k}.0.", residual)
                found |= prefixed(f"{block}resnet_attn_blocks.{k}.1.", attention)
                found |= prefixed(f"{block}resnet_attn_blocks.{k}.2.", residual)
            found |= prefixed(f"{block}self_attention_block.", attention)
    return found


def _control_lora() -> Shapes:
    """Of each linear layer and convolution two factors, of rank 3; norms and zeros whole."""
    found: Shapes = {}
    whole = ("zero_convs", "middle_block_out", "norm", "in_layers.0", "out_layers.0", "input_hint")
    for name, shape in _controlnet().items():
        if name.endswith(".weight") and not any(part in name for part in whole):
            base = name.removesuffix(".weight")
            found[f"{base}.up"] = (shape[0], 3, *(1 for _ in shape[2:]))
            found[f"{base}.down"] = (3, *shape[1:])
        else:
            found[name] = shape
    return found


def image_prompts() -> Iterator[tuple[str, Callable[[Any], Any], Shapes]]:
    """IP-Adapters' image projections, whose converters return the module."""
    from diffusers.loaders.transformer_flux import FluxTransformer2DLoadersMixin as Flux
    from diffusers.loaders.transformer_sd3 import SD3Transformer2DLoadersMixin as StableDiffusion3
    from diffusers.loaders.unet import UNet2DConditionLoadersMixin as Unet

    linear = both("proj", 28, 9) | both("norm", 7)
    full = both("proj.0", 8, 8) | both("proj.2", 7, 8) | both("proj.3", 7)
    face = both("proj.0", 16, 8) | both("proj.2", 21, 16) | both("norm", 7)
    layer = both("0.norm1", 10) | both("0.norm2", 10) | both("1.0", 10)
    layer |= {"0.to_q.weight": (64, 10), "0.to_kv.weight": (128, 10), "0.to_out.weight": (10, 64)}
    layer |= {"1.1.weight": (40, 10), "1.3.weight": (10, 40)}
    ends = both("proj_out", 7, 10) | both("norm_out", 7)
    plus = layers(4, prefixed("layers.{n}.", layer)) | both("proj_in", 10, 9) | ends
    resampler = prefixed("perceiver_resampler.", plus)
    face_plus = resampler | both("proj.0", 16, 8) | both("proj.2", 40, 16) | both("norm", 10)
    adaptive = layers(4, prefixed("layers.{n}.", layer | both("2.1", 40, 10)))
    adaptive |= both("proj_in", 10, 9) | ends | both("time_embedding.linear_1", 10, 6)
    adaptive |= both("time_embedding.linear_2", 10, 10) | {"latents": (1, 5, 10)}
    for name, loader, shapes in (
        ("ip-adapter", Unet, linear), ("ip-adapter-full", Unet, full),
        ("ip-adapter-face-id", Unet, face),
        ("ip-adapter-face-id-plus", Unet, face_plus),
        ("ip-adapter-plus", Unet, plus | {"latents": (1, 5, 10)}),
        ("ip-adapter-flux", Flux, linear), ("ip-adapter-sd3", StableDiffusion3, adaptive),
    ):  # fmt: skip
        yield name, functools.partial(_module, loader), shapes


def _module(loader: Any, arrays: Any) -> Any:
    convert = loader._convert_ip_adapter_image_proj_to_diffusers
    return convert(None, arrays, low_cpu_mem_usage=False).state_dict()
