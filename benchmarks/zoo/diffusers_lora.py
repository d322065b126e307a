"""diffusers: LoRAs of other trainers, tiny, for the modules of which their converters know.

The rank is 5: `_convert_kohya_flux_lora_to_diffusers` takes the columns of three parts for those of
a sparse LoRA if the rank is a multiple of their number and all others are 0, so that what it does
with such ranks depends on values.

With `alpha`, most converters multiply one array by another, which no rule says: these conversions
are here with `-alpha`. Without it, a LoRA's scale is 1.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.zoo.diffusers_learned import asked
from benchmarks.zoo.diffusers_lora_names import (
    HIDDEN,
    LORAS,
    RANK,
    SD,
    SDXL,
    UTILITIES,
    pair,
    with_alpha,
    with_dora,
)
from benchmarks.zoo.diffusers_shapes import Shapes, layers


def loras() -> Iterator[tuple[str, Callable[[Any], Any], Shapes]]:
    """The converters, each with the arrays that it takes."""
    from diffusers.loaders import lora_conversion_utils as utils
    from diffusers.utils import state_dict_utils

    for name, (function, shapes) in LORAS.items():
        convert = getattr(utils, function)
        if name.endswith("-alpha"):
            convert = functools.partial(_positive, convert)
        yield name, convert, shapes
    for name, shapes in (("kohya-sd", SD), ("kohya-sd-dora", with_dora(SD))):
        yield name, functools.partial(_with_alphas, utils), shapes
        yield f"{name}-alpha", functools.partial(_with_alphas, utils), with_alpha(shapes)
    yield "kohya-sdxl", functools.partial(_of_blocks, utils), with_alpha(SDXL)
    yield (
        "flux-control",
        utils._convert_bfl_flux_control_lora_to_diffusers,
        asked(
            utils._convert_bfl_flux_control_lora_to_diffusers,
            layers(19, {"double_blocks.{n}.img_attn.qkv.lora_B.bias": (9,)}),
            _flux_shape,
        ),
    )
    yield (
        "fal-kontext",
        utils._convert_fal_kontext_lora_to_diffusers,
        asked(utils._convert_fal_kontext_lora_to_diffusers, {}, _flux_shape),
    )
    convert = functools.partial(
        utils._convert_non_diffusers_ltx2_lora_to_diffusers,
        non_diffusers_prefix="text_embedding_projection",
    )
    yield "ltx-2-connectors", convert, pair("text_embedding_projection.aggregate_embed", 8, 7)
    for name, (function, shapes) in UTILITIES.items():
        yield name, getattr(state_dict_utils, function), shapes


def _positive(convert: Callable[[Any], Any], arrays: Any) -> Any:
    """For a scale below 0 the converters do not return: benchmarks/zoo/found/diffusers_alpha.py."""
    return convert({n: x.abs() + 1 if n.endswith(".alpha") else x for n, x in arrays.items()})


def _with_alphas(utils: Any, arrays: Any) -> Any:
    import torch

    found, alphas = utils._convert_non_diffusers_lora_to_diffusers(arrays)
    return found | {name: torch.tensor(alpha) for name, alpha in alphas.items()}


def _of_blocks(utils: Any, arrays: Any) -> Any:
    config = types.SimpleNamespace(layers_per_block=2)
    return _with_alphas(utils, utils._maybe_map_sgm_blocks_to_diffusers(arrays, config))


def _flux_shape(name: str) -> tuple[int, ...]:
    if name.endswith((".bias", ".scale")):
        return (9,)
    if "lora_A" in name:
        return (RANK + 1, 4)
    return (7 * HIDDEN if ".linear1." in name else 12, RANK + 1)
