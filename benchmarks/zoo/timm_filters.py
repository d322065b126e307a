"""timm: `checkpoint_filter_fn` of its models, from what the original authors published.

The names of an original are those of a tiny model of timm, renamed backwards.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.zoo.conversion import Conversion

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Original:
    """A checkpoint of another project.

    Arguments:
        module: of timm, whose filter reads it.
        kind: the class of the model.
        sizes: of a tiny one.
        names: from timm's names to the original ones: patterns, and what takes their place.
        changed: what else is not as in the model, such as arrays that are fused.
        under: the key under which the arrays are.
    """

    module: str
    kind: str
    sizes: Mapping[str, Any]
    names: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = ()
    changed: Callable[[Shapes], Shapes] = field(default=lambda shapes: shapes)
    under: str | None = None


_FOUR: dict[str, Any] = {"depths": (2, 1, 3, 1), "num_classes": 5}
_VIT: dict[str, Any] = {
    "img_size": 24, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 4, "num_classes": 5,
}  # fmt: skip
_CONVNEXT = (
    (r"^stem\.", "downsample_layers.0."), (r"^stages\.(\d+)\.blocks\.", r"stages.\1."),
    (r"^stages\.(\d+)\.downsample\.", r"downsample_layers.\1."), ("conv_dw", "dwconv"),
    (r"mlp\.fc", "pwconv"), (r"^head\.fc\.", "head."), (r"^head\.norm\.", "norm."),
)  # fmt: skip
_LAYER_BEFORE = (
    (r"^layers\.(\d+)\.downsample", lambda m: f"layers.{int(m[1]) - 1}.downsample"),
    (r"^head\.fc\.", "head."),
)


def _blocks(match: re.Match[str]) -> str:
    return f"network.{2 * int(match[1])}."


def _between(match: re.Match[str]) -> str:
    return f"network.{2 * int(match[1]) - 1}."


def _with(more: Callable[[str, tuple[int, ...]], Shapes]) -> Callable[[Shapes], Shapes]:
    def changed(shapes: Shapes) -> Shapes:
        found: Shapes = {}
        for name, shape in shapes.items():
            found[name] = shape
            found |= more(name, shape)
        return found

    return changed


def _index(name: str, shape: tuple[int, ...]) -> Shapes:
    """A buffer that is no longer stored."""
    table = "relative_position_bias_table"
    return {name.replace(table, "relative_position_index"): (16, 16)} if table in name else {}


def _grn(shapes: Shapes) -> Shapes:
    return {
        name.replace("pwconv.grn.bias", "grn.beta").replace("pwconv.grn.weight", "grn.gamma"): (
            (1, 1, 1, *shape) if "grn" in name else shape
        )
        for name, shape in shapes.items()
    }


def _fused(shapes: Shapes) -> Shapes:
    """One array for q, k and v of the last blocks."""
    found: Shapes = {}
    for name, shape in shapes.items():
        kind = re.search(r"cls_attn_blocks\.\d+\.attn\.([qkv])\.", name)
        if kind is None:
            found[name] = shape
        elif kind[1] == "q":
            found[name.replace(".q.", ".qkv.")] = (3 * shape[0], *shape[1:])
    return found


ORIGINALS: dict[str, Original] = {
    "convnext-fb": Original(
        "convnext", "ConvNeXt", {**_FOUR, "dims": (8, 12, 16, 20)}, _CONVNEXT
    ),
    "convnext-v2": Original(
        "convnext", "ConvNeXt",
        {**_FOUR, "dims": (8, 12, 16, 20), "use_grn": True, "ls_init_value": None},
        (*_CONVNEXT[:4], (r"mlp\.(fc|grn)", lambda m: "pwconv" + (".grn" * (m[1] == "grn"))),
         *_CONVNEXT[5:]), _grn,
    ),
    "edgenext": Original(
        "edgenext", "EdgeNeXt",
        {"dims": (8, 16, 24, 32), "depths": (1, 2, 2, 1), "global_block_counts": (0, 1, 1, 1),
         "heads": (2, 2, 2, 2), "num_classes": 5}, _CONVNEXT, under="model_ema",
    ),
    "pvt-v2": Original(
        "pvt_v2", "PyramidVisionTransformerV2",
        {**_FOUR, "embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 3, 4)},
        (
            (r"^patch_embed\.", "patch_embed1."),
            (r"^stages\.(\d+)\.downsample\.", lambda m: f"patch_embed{int(m[1]) + 1}."),
            (r"^stages\.(\d+)\.blocks\.", lambda m: f"block{int(m[1]) + 1}."),
            (r"^stages\.(\d+)\.norm\.", lambda m: f"norm{int(m[1]) + 1}."),
            (r"\.dwconv\.", ".dwconv.dwconv."),
        ),
    ),
    "focalnet": Original(
        "focalnet", "FocalNet", {**_FOUR, "embed_dim": 12},
        ((r"^stem\.", "patch_embed."), *_LAYER_BEFORE),
    ),
    "poolformer": Original(
        "metaformer", "MetaFormer", {**_FOUR, "dims": (8, 12, 16, 20)},
        (
            (r"^stem\.conv\.", "patch_embed.proj."),
            (r"^stages\.(\d+)\.downsample\.conv\.", lambda m: f"{_between(m)}proj."),
            (r"^stages\.(\d+)\.blocks\.", _blocks), (r"layer_scale(\d)\.scale", r"layer_scale_\1"),
            (r"^head\.fc\.", "head."), (r"^head\.norm\.", "norm."),
        ),
    ),
    "xcit": Original(
        "xcit", "Xcit", {**_VIT, "cls_attn_layers": 2},
        ((r"^pos_embed\.", "pos_embeder."),), _fused, "model",
    ),
    "swin": Original(
        "swin_transformer", "SwinTransformer",
        {**_FOUR, "img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 12,
         "depths": (2, 2, 2), "num_heads": (2, 3, 4)}, _LAYER_BEFORE, _with(_index), "model",
    ),
    "swin-v2": Original(
        "swin_transformer_v2", "SwinTransformerV2",
        {**_FOUR, "img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 12,
         "depths": (2, 2, 2), "num_heads": (2, 3, 4)}, _LAYER_BEFORE, under="model",
    ),
    "davit": Original(
        "davit", "DaVit", {**_FOUR, "embed_dims": (8, 12, 16, 20), "num_heads": (2, 3, 4, 5)},
        (
            (r"^stem\.conv\.", "patch_embeds.0.proj."), (r"^stem\.", "patch_embeds.0."),
            (r"^stages\.(\d+)\.downsample\.conv\.", r"patch_embeds.\1.proj."),
            (r"^stages\.(\d+)\.downsample\.", r"patch_embeds.\1."),
            (r"^stages\.(\d+)\.blocks\.", r"main_blocks.\1."), (r"^head\.norm\.", "norms."),
            (r"^head\.fc\.", "head."), (r"\bcpe(\d)\b", lambda m: f"cpe.{int(m[1]) - 1}"),
        ),
    ),
    "efficientformer": Original(
        "efficientformer", "EfficientFormer", {**_FOUR, "embed_dims": (8, 12, 16, 20)},
        (
            (r"^stem\.conv1\.", "patch_embed.0."), (r"^stem\.norm1\.", "patch_embed.1."),
            (r"^stem\.conv2\.", "patch_embed.3."), (r"^stem\.norm2\.", "patch_embed.4."),
            (r"^stages\.(\d+)\.downsample\.conv\.", lambda m: f"{_between(m)}proj."),
            (r"^stages\.(\d+)\.downsample\.norm\.", lambda m: f"{_between(m)}norm."),
            (r"^stages\.(\d+)\.blocks\.", _blocks), (r"\.ls(\d)\.gamma", r".layer_scale_\1"),
            (r"^head_dist", "dist_head"),
        ),
    ),
    "swiftformer": Original(
        "swiftformer", "SwiftFormer", {**_FOUR, "embed_dims": (8, 12, 16, 20)},
        (
            (r"^stem\.", "patch_embed."), (r"^head_dist\.", "dist_head."),
            (r"attn\.proj\.", "attn.Proj."), (r"\.layer_scale(_\d)?\.gamma", r".layer_scale\1"),
            (r"^stages\.(\d+)\.downsample\.", _between), (r"^stages\.(\d+)\.blocks\.", _blocks),
        ),
    ),
    "mvit-v2": Original(
        "mvitv2", "MultiScaleVit", {"depths": (1, 2, 2, 1), "num_classes": 5}, under="model_state"
    ),
    "hiera": Original(
        "hiera", "Hiera",
        {"embed_dim": 8, "num_heads": 1, "stages": (1, 2, 2, 1), "num_classes": 5},
        ((r"^head\.fc\.", "head.projection."), (r"^head\.norm\.", "norm.")), under="model_state",
    ),
    "resmlp": Original(
        "mlp_mixer", "MlpMixer",
        {"img_size": 24, "patch_size": 8, "embed_dim": 16, "num_blocks": 3, "num_classes": 5},
    ),
    "beit": Original(
        "beit", "Beit", {**_VIT, "use_rel_pos_bias": True, "init_values": 0.1},
        changed=_with(_index), under="model",
    ),
    "cait": Original("cait", "Cait", _VIT, ((r"^", "module."),), under="model"),
    "dinov2": Original(
        "vision_transformer", "VisionTransformer",
        {**_VIT, "init_values": 0.1, "num_classes": 0, "reg_tokens": 3, "no_embed_class": True},
        ((r"^reg_token$", "register_tokens"),),
        lambda shapes: {**shapes, "mask_token": (1, 24), "pos_embed": (1, 10, 24)},
    ),
}  # fmt: skip
"""By the name of the conversion."""


def conversions() -> Iterator[Conversion]:
    """Each filter."""
    for name, original in ORIGINALS.items():
        try:
            yield _conversion(name, original)
        except Exception as error:
            print(f"# {name}: not run: {type(error).__name__}: {str(error)[:300]}", flush=True)


def _conversion(name: str, original: Original) -> Conversion:
    module = importlib.import_module(f"timm.models.{original.module}")
    sizes = dict(original.sizes)
    if original.module == "metaformer":
        sizes |= {"token_mixers": module.Pooling, "norm_layers": module.GroupNorm1,
                  "use_mlp_head": False, "layer_scale_init_values": 0.1}  # fmt: skip
    if original.module == "mvitv2":
        sizes = {"cfg": module.MultiScaleVitCfg(depths=(1, 2, 2, 1), embed_dim=16, num_heads=1),
                 "num_classes": 5, "img_size": (64, 64)}  # fmt: skip
    if name == "resmlp":
        sizes |= {"block_layer": module.ResBlock, "norm_layer": module.Affine, "mlp_ratio": 4}
    model = getattr(module, original.kind)(**sizes)
    own = {key: tuple(x.shape) for key, x in model.state_dict().items()}
    shapes: Shapes = {}
    for key, shape in own.items():
        for pattern, other in _names(original, model):
            key = re.sub(pattern, other, key)
        shapes[key] = shape
    shapes = original.changed(shapes)
    torch = importlib.import_module("torch")
    arrays = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    filtered = module.checkpoint_filter_fn

    def convert(state: Any) -> Any:
        copied = (
            dict(state) if original.under is None else {original.under: {**state[original.under]}}
        )
        return dict(filtered(copied, model))

    found = convert({original.under: dict(arrays)} if original.under else arrays)
    if {*found} != {*own}:
        missing, more = sorted({*own} - {*found}), sorted({*found} - {*own})
        print(f"# {name}: the model has {missing[:4]}, the filter makes {more[:4]}", flush=True)
    return Conversion(
        f"{name}/filter", convert, {original.under: arrays} if original.under else arrays
    )


def _names(original: Original, model: Any) -> Any:
    if original.module == "mvitv2":
        begin = [sum(model.depths[:n]) for n in range(len(model.depths))]
        return (
            (r"^stages\.(\d+)\.blocks\.(\d+)", lambda m: f"blocks.{begin[int(m[1])] + int(m[2])}"),
            (r"\.shortcut_proj_attn\.", ".proj."), (r"^head\.fc\.", "head.projection."),
        )  # fmt: skip
    if original.kind == "MlpMixer":
        return (
            (r"^stem\.", "patch_embed."), (r"linear_tokens\.", "attn."), (r"mlp_channels\.", "mlp."),
            (r"\bls(\d)", r"gamma_\1"),
        )  # fmt: skip
    return original.names
