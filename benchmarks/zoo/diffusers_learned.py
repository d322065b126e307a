"""diffusers: converters that ask for arrays by name, until they have all that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.zoo.diffusers_shapes import Shapes, layers

_MOST_NAMES = 1600


def _flux_like(section: str) -> Shapes:
    return layers(3, {f"{section}.{{n}}.img_attn.qkv.weight": (96, 8)})


SEEDS: dict[str, tuple[str, Shapes]] = {
    "sd3": (
        "convert_sd3_transformer_checkpoint_to_diffusers",
        {"pos_embed": (1, 36, 96), **layers(3, {"joint_blocks.{n}.context_block.attn.qkv.weight":
                                                (96, 8)})},
    ),
    "mochi": ("convert_mochi_transformer_checkpoint_to_diffusers", {}),
    "chroma": (
        "convert_chroma_transformer_checkpoint_to_diffusers",
        _flux_like("double_blocks") | layers(2, {"single_blocks.{n}.linear1.weight": (21504, 2)})
        | layers(2, {"distilled_guidance_layer.layers.{n}.in_layer.weight": (96, 8)}),
    ),
    "sana": (
        "convert_sana_transformer_to_diffusers", layers(3, {"blocks.{n}.attn.qkv.weight": (96, 8)})
    ),
    "lumina2": (
        "convert_lumina2_to_diffusers",
        layers(3, {
            "layers.{n}.attention.qkv.weight": (2304 + 2 * 768, 3),
            "layers.{n}.attention.out.weight": (24, 5), "layers.{n}.attention.q_norm.weight": (6,),
            "layers.{n}.attention.k_norm.weight": (6,), "layers.{n}.feed_forward.w1.weight": (24, 7),
            "layers.{n}.feed_forward.w2.weight": (7, 24), "layers.{n}.feed_forward.w3.weight":
            (24, 7), "layers.{n}.adaLN_modulation.1.weight": (96, 9),
            "layers.{n}.attention_norm1.weight": (24,), "layers.{n}.attention_norm2.weight": (24,),
        }) | {
            "cap_embedder.0.weight": (11,), "t_embedder.mlp.0.weight": (24, 6),
            "t_embedder.mlp.2.weight": (24, 24), "final_layer.linear.weight": (5, 24),
            "final_layer.adaLN_modulation.1.weight": (24, 9),
        },
    ),
    "hunyuan-video": (
        "convert_hunyuan_video_transformer_to_diffusers",
        layers(3, {
            f"double_blocks.{{n}}.{part}{rest}.weight": shape
            for part in ("img", "txt")
            for rest, shape in (
                ("_attn_qkv", (72, 24)), ("_attn_proj", (24, 25)), ("_mlp.fc1", (48, 24)),
                ("_mlp.fc2", (24, 48)), ("_mod.linear", (144, 24)), ("_attn_q_norm", (6,)),
            )
        }) | layers(2, {
            "single_blocks.{n}.linear1.weight": (7 * 3072, 2),
            "single_blocks.{n}.modulation.linear.weight": (72, 24),
            "single_blocks.{n}.linear2.weight": (24, 120),
        }),
    ),
    "wan": (
        "convert_wan_transformer_to_diffusers",
        layers(3, {
            **{f"blocks.{{n}}.{attention}.{part}.{kind}": (24, 25) if kind == "weight" else (24,)
               for attention in ("self_attn", "cross_attn") for part in "qkvo"
               for kind in ("weight", "bias")},
            "blocks.{n}.ffn.0.weight": (48, 24), "blocks.{n}.ffn.2.weight": (24, 48),
            "blocks.{n}.norm3.weight": (24,), "blocks.{n}.modulation": (1, 6, 24),
        }) | {
            "head.modulation": (1, 2, 24), "head.head.weight": (5, 24),
            "time_embedding.0.weight": (24, 7), "text_embedding.2.weight": (24, 24),
        },
    ),
}  # fmt: skip
"""By the name of the conversion: the converter, and arrays that tell how many layers there are."""


def learned() -> Iterator[tuple[str, Callable[[Any], Any], Shapes]]:
    """The converters, each with the arrays that it takes."""
    from diffusers.loaders import single_file_utils as utils

    for name, (function, seed) in SEEDS.items():
        convert = getattr(utils, function)
        yield name, convert, asked(convert, seed, _shape)


def asked(
    convert: Callable[[Any], Any], seed: Shapes, shape: Callable[[str], tuple[int, ...]]
) -> Shapes:
    """The arrays that a converter asks for, from some that tell how many layers there are."""
    import torch

    found = dict(seed)
    for _ in range(_MOST_NAMES):
        try:
            convert({key: torch.empty(size, device="meta") for key, size in found.items()})
        except KeyError as error:
            found[error.args[0]] = shape(error.args[0])
        else:
            return found
    raise LookupError(f"it asks for more than {_MOST_NAMES} arrays")


def _shape(name: str) -> tuple[int, ...]:
    fused = 21504 if ".linear1." in name else 96
    *_, before, last = f".{name}".split(".")
    return (fused,) if last in ("bias", "scale", "gamma") or "norm" in before else (fused, 8)
