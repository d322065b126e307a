"""diffusers: converters of single files, LoRAs and image prompts, on as few numbers as they take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.zoo.conversion import Conversion
from benchmarks.zoo.diffusers_autoencoders import autoencoders
from benchmarks.zoo.diffusers_learned import learned
from benchmarks.zoo.diffusers_lora import loras
from benchmarks.zoo.diffusers_names import named
from benchmarks.zoo.diffusers_stable import image_prompts, stable


def conversions() -> Iterator[Conversion]:
    """All that take arrays by name, and return them or a module."""
    from diffusers.loaders import single_file_utils as utils

    for name, function, shapes in (
        ("flux", utils.convert_flux_transformer_checkpoint_to_diffusers, _flux(guidance=True)),
        (
            "flux-schnell",
            utils.convert_flux_transformer_checkpoint_to_diffusers,
            _flux(guidance=False),
        ),
        ("animatediff", utils.convert_animatediff_checkpoint_to_diffusers, _motion()),
        ("sd3-t5", utils.convert_sd3_t5_checkpoint_to_diffusers, _t5()),
    ):
        yield conversion(f"{name}/single-file", function, shapes)
    for kind, every in (
        ("single-file", learned), ("single-file", named), ("single-file", autoencoders),
        ("single-file", stable), ("image-prompt", image_prompts), ("lora", loras),
    ):  # fmt: skip
        for name, function, shapes in every():
            yield conversion(f"{name}/{kind}", function, shapes)


def conversion(name: str, function: Any, shapes: dict[str, tuple[int, ...]]) -> Conversion:
    """A conversion of arrays of these shapes.

    Arguments:
        name: of it.
        function: takes arrays by name, and may change what it is given.
        shapes: of the arrays.
    """
    import torch

    def convert(arrays: Any) -> Any:
        return function(dict(arrays))

    return Conversion(name, convert, {k: torch.empty(s) for k, s in shapes.items()})


def _flux(*, guidance: bool) -> dict[str, tuple[int, ...]]:
    """Names of Flux; the converter fixes the number of rows of one array only."""
    e, into, h = 8, 6, 3072
    found: dict[str, tuple[int, ...]] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = (rows, columns), (rows,)

    for part in ("time_in", "vector_in", *(["guidance_in"] if guidance else [])):
        linear(f"{part}.in_layer", e, into)
        linear(f"{part}.out_layer", e, e)
    linear("txt_in", e, into)
    linear("img_in", e, into + 1)
    for n in range(3):
        for part in ("img", "txt"):
            block = f"double_blocks.{n}.{part}"
            linear(f"{block}_mod.lin", 6 * e, e)
            linear(f"{block}_attn.qkv", 3 * e, e)
            linear(f"{block}_attn.proj", e, e)
            linear(f"{block}_mlp.0", 4 * e, e)
            linear(f"{block}_mlp.2", e, 4 * e)
            for each in ("query_norm", "key_norm"):
                found[f"{block}_attn.norm.{each}.scale"] = (e // 2,)
    for n in range(2):
        block = f"single_blocks.{n}"
        linear(f"{block}.modulation.lin", 3 * e, e)
        linear(f"{block}.linear1", 7 * h, 2)
        linear(f"{block}.linear2", 5, 7)
        for each in ("query_norm", "key_norm"):
            found[f"{block}.norm.{each}.scale"] = (e // 2,)
    linear("final_layer.linear", 4, e)
    linear("final_layer.adaLN_modulation.1", 2 * e, e)
    return found


def _motion() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for side in ("down_blocks", "up_blocks"):
        for n in range(2):
            for m in range(2):
                base = f"{side}.{n}.motion_modules.{m}.temporal_transformer."
                block = f"{base}transformer_blocks.0."
                found |= {f"{base}norm.weight": (8,), f"{base}proj_in.weight": (8, 6)}
                for k in range(2):
                    attention = f"{block}attention_blocks.{k}."
                    found[f"{attention}to_q.weight"] = (8, 7)
                    found[f"{attention}to_out.0.bias"] = (8,)
                    found[f"{attention}pos_encoder.pe"] = (1, 5, 8)
                    found[f"{block}norms.{k}.weight"] = (8,)
                found |= {f"{block}ff.net.0.proj.weight": (9, 8), f"{block}ff_norm.bias": (8,)}
    return found


def _t5() -> dict[str, tuple[int, ...]]:
    prefix = "text_encoders.t5xxl.transformer."
    found: dict[str, tuple[int, ...]] = {f"{prefix}shared.weight": (11, 8), "model.other": (3,)}
    for n in range(3):
        block = f"{prefix}encoder.block.{n}.layer."
        for each in "qkvo":
            found[f"{block}0.SelfAttention.{each}.weight"] = (8, 7)
        found |= {f"{block}1.DenseReluDense.wo.weight": (8, 9), f"{block}0.layer_norm.weight": (8,)}
    return found
