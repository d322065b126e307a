"""diffusers: autoencoders, with names as their authors wrote them, tiny."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.zoo.diffusers_shapes import Shapes, both, each, layers, prefixed


def autoencoders() -> Iterator[tuple[str, Callable[[Any], Any], Shapes]]:
    """The converters, each with the arrays that it takes."""
    from diffusers.loaders import single_file_utils as utils
    from diffusers.pipelines.stable_diffusion import convert_from_ckpt as older

    for name, (function, shapes) in MODELS.items():
        yield name, getattr(utils, function), shapes
    config = {"down_block_types": ["D", "D", "D"], "up_block_types": ["U", "U", "U"]}
    for name, convert in (
        ("vae", utils.convert_ldm_vae_checkpoint),
        ("vae-older", older.convert_ldm_vae_checkpoint),
    ):
        yield name, lambda arrays, convert=convert: convert(arrays, config), _stable_diffusion()


def _stable_diffusion() -> Shapes:
    """Of latent diffusion: three sizes, two residual layers in each."""

    def residual(name: str, channels: int, into: int) -> Shapes:
        found = both(f"{name}.norm1", into) | both(f"{name}.conv1", channels, into, 3, 3)
        found |= both(f"{name}.norm2", channels) | both(f"{name}.conv2", channels, channels, 3, 3)
        if channels != into:
            found |= both(f"{name}.nin_shortcut", channels, into, 1, 1)
        return found

    found: Shapes = both("quant_conv", 8, 8, 1, 1) | both("post_quant_conv", 4, 4, 1, 1)
    sizes = (6, 7, 9)
    for side, path, sampler in (("encoder", "down", "downsample"), ("decoder", "up", "upsample")):
        count = 2 if side == "encoder" else 3
        part: Shapes = both("conv_in", 6, 3, 3, 3) | both("conv_out", 8, 9, 3, 3)
        part |= both("norm_out", 9)
        for n, channels in enumerate(sizes):
            into = sizes[max(n - 1, 0)] if side == "encoder" else sizes[min(n + 1, 2)]
            for k in range(count):
                part |= residual(f"{path}.{n}.block.{k}", channels, channels if k else into)
            if n != (2 if side == "encoder" else 0):
                part |= both(f"{path}.{n}.{sampler}.conv", channels, channels, 3, 3)
        for k in (1, 2):
            part |= residual(f"mid.block_{k}", 9, 9)
        part |= both("mid.attn_1.norm", 9)
        part |= each("mid.attn_1.{x}", "q k v proj_out", both("", 9, 9, 1, 1))
        found |= prefixed(f"{side}.", part)
    return prefixed("first_stage_model.", found)


def _ltx_vae(kinds: dict[str, str], *, columns: int, time: bool = False) -> Shapes:
    """Blocks of residual layers (r), of one with a shortcut (s), and of a convolution (c)."""
    found: Shapes = {}
    for side, letters in kinds.items():
        part = "encoder.down_blocks" if side == "down" else "decoder.up_blocks"
        for n, letter in enumerate(letters):
            c, block = 3 + n, f"{part}.{n}."
            if letter == "c":
                found |= both(f"{block}conv.conv", c, c + 1, 3, 3, 3)
                continue
            inner = both("conv1.conv", c, c + 1, 3, 3, 3) | both("conv2.conv", c, c, 3, 3, 3)
            if letter == "s":
                shortcut = both("conv_shortcut", c, c + 1, 1, 1, 1) | both("norm3.norm", c + 1)
                found |= prefixed(block, inner | shortcut)
            else:
                found |= prefixed(block, layers(2, prefixed("res_blocks.{n}.", inner)))
                if time and side == "up":
                    found |= both(f"{block}time_embedder.timestep_embedder.linear_1", 12, 7)
    for side in ("encoder", "decoder"):
        found |= both(f"{side}.conv_in.conv", 5, 4, 3, 3, 3)
        found |= both(f"{side}.conv_out.conv", 4, columns if side == "encoder" else 6, 1, 3, 3)
    if time:
        found |= both("decoder.last_time_embedder.timestep_embedder.linear_1", 8, 7)
        found |= {"decoder.last_scale_shift_table": (2, 8)}
    statistics = ("mean-of-means", "std-of-means", "mean-of-stds", "channel")
    found |= {f"per_channel_statistics.{name}": (9,) for name in statistics}
    return prefixed("vae.", found)


_OF_LTX = "convert_ltx_vae_checkpoint_to_diffusers"

_WAN_RESIDUAL = {
    "residual.0.gamma": (6, 1, 1, 1), "residual.3.gamma": (7, 1, 1, 1),
    **both("residual.2", 7, 6, 3, 3, 3), **both("residual.6", 7, 7, 3, 3, 3),
}  # fmt: skip


def _wan_vae() -> Shapes:
    found = both("conv1", 8, 8, 1, 1, 1) | both("conv2", 4, 4, 1, 1, 1)
    for side in ("encoder", "decoder"):
        part = both("conv1", 6, 3, 3, 3, 3) | both("head.2", 8, 7, 3, 3, 3)
        part |= each("middle.{x}.", "0 2", _WAN_RESIDUAL) | {"head.0.gamma": (7, 1, 1, 1)}
        part |= both("middle.1.to_qkv", 21, 7, 1, 1) | both("middle.1.proj", 7, 7, 1, 1)
        found |= prefixed(f"{side}.", part | {"middle.1.norm.gamma": (7, 1, 1)})
    for n in (0, 1, 3, 4, 6, 7, 9, 10):
        found |= prefixed(f"encoder.downsamples.{n}.", _WAN_RESIDUAL)
    for n in (2, 5, 8):
        found |= both(f"encoder.downsamples.{n}.resample.1", 7, 7, 3, 3)
    for n in (5, 8):
        found |= both(f"encoder.downsamples.{n}.time_conv", 7, 7, 3, 1, 1)
    found |= both("encoder.downsamples.3.shortcut", 7, 6, 1, 1, 1)
    for n in (0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14):
        found |= prefixed(f"decoder.upsamples.{n}.", _WAN_RESIDUAL)
    for n in (3, 7, 11):
        found |= both(f"decoder.upsamples.{n}.resample.1", 6, 7, 3, 3)
    for n in (3, 7):
        found |= both(f"decoder.upsamples.{n}.time_conv", 14, 7, 3, 1, 1)
    return found | both("decoder.upsamples.4.shortcut", 7, 6, 1, 1, 1)


def _dc_encoder() -> Shapes:
    conv = {
        **both("inverted_conv.conv", 12, 4, 1, 1), **both("depth_conv.conv", 12, 1, 3, 3),
        "point_conv.conv.weight": (4, 6, 1, 1), **both("point_conv.norm", 4),
    }  # fmt: skip
    attention = {
        "qkv.conv.weight": (15, 4, 1, 1), "proj.conv.weight": (4, 10, 1, 1), **both("proj.norm", 4),
        "aggreg.0.0.weight": (15, 1, 5, 5), "aggreg.0.1.weight": (15, 5, 1, 1),
    }  # fmt: skip
    residual = {**both("conv1.conv", 4, 4, 3, 3), "conv2.conv.weight": (4, 4, 3, 3),
                **both("conv2.norm", 4)}  # fmt: skip
    found: Shapes = {}
    for side in ("encoder", "decoder"):
        for n in range(2):
            stage = f"{side}.stages.{n}.op_list."
            for k in range(2):
                found |= prefixed(f"{stage}{k}.main.", residual)
            found |= both(f"{stage}2.main.conv.conv", 5, 4, 3, 3)
        for k in range(2):
            stage = f"{side}.stages.2.op_list.{k}."
            found |= prefixed(f"{stage}context_module.main.", attention)
            found |= prefixed(f"{stage}local_module.main.", conv)
        found |= both(f"{side}.project_in.conv", 4, 3, 3, 3)
    found |= both("encoder.project_out.0.conv", 7, 5, 3, 3)
    return found | both("decoder.project_out.0", 5) | both("decoder.project_out.2.conv", 3, 5, 3, 3)


MODELS: dict[str, tuple[str, Shapes]] = {
    "ltx-vae-0.9": (_OF_LTX, _ltx_vae({"down": "rcsrcsrcrr", "up": "rscrscrscr"}, columns=6)),
    "ltx-vae-0.9.1": (
        _OF_LTX, _ltx_vae({"down": "rcsrcsrcrr", "up": "rcrcrcr"}, columns=6, time=True),
    ),
    "ltx-vae-0.9.5": (
        _OF_LTX, _ltx_vae({"down": "rcrcrcrcr", "up": "rcrcrcr"}, columns=2048, time=True),
    ),
    "autoencoder-dc": ("convert_autoencoder_dc_checkpoint_to_diffusers", _dc_encoder()),
    "wan-vae": ("convert_wan_vae_to_diffusers", _wan_vae()),
    "ltx-2-vae": (
        "convert_ltx2_vae_to_diffusers",
        _ltx_vae({"down": "rcrcrcrcr", "up": "rcrcrcr"}, columns=6),
    ),
    "ltx-2-audio-vae": (
        "convert_ltx2_audio_vae_to_diffusers",
        prefixed("audio_vae.", {
            **{name: shape for side in ("encoder", "decoder") for k in range(2) for name, shape in
               both(f"{side}.mid.block_{k}.conv1.conv", 4 + k, 4, 3, 3).items()},
            "per_channel_statistics.mean-of-means": (9,),
            "per_channel_statistics.std-of-means": (9,),
        }),
    ),
}  # fmt: skip
"""By the name of the conversion: the converter, and the arrays that it takes."""
