"""timm: its loaders of NumPy files of Google's ViT and BiT, on tiny models."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.zoo import timm_filters, vision_operators
from benchmarks.zoo.conversion import Conversion
from benchmarks.zoo.keras_hub import flattened, nested


def conversions() -> Iterator[Conversion]:
    """Each loader."""
    vision_operators.defined()
    vit = importlib.import_module("timm.models.vision_transformer")
    bit = importlib.import_module("timm.models.resnetv2")
    for title, prefix in (
        ("flax", ""),
        ("flax-optimizer", "opt/target/"),
        ("big-vision", "params/"),
    ):
        model = vit.VisionTransformer(
            img_size=24, patch_size=8, embed_dim=24, depth=3, num_heads=4, num_classes=5
        )
        yield _loader(f"vit-{title}", model, _vit(prefix))
    layers = (2, 3)
    model = bit.ResNetV2(
        layers=layers, channels=(16, 32), num_classes=5, stem_chs=8, stem_type="",
        conv_layer=bit.StdConv2d, norm_layer=lambda size, **_: bit.GroupNormAct(size, 4),
    )  # fmt: skip
    yield _loader("bit-resnetv2", model, _bit(model))
    yield from timm_filters.conversions()


def _loader(name: str, model: Any, example: dict[str, Any]) -> Conversion:
    def load(arrays: Any) -> Any:
        with tempfile.NamedTemporaryFile(suffix=".npz") as file:
            np.savez(file, **flattened(arrays))
            file.flush()
            model.load_pretrained(file.name)
        return {key: value.clone() for key, value in model.state_dict().items()}

    return Conversion(f"{name}/npz", load, nested(example))


def _vit(prefix: str) -> dict[str, Any]:
    """The names and shapes of the file of a ViT."""
    e, h, d, f = 24, 4, 6, 96
    shapes: dict[str, tuple[int, ...]] = {
        "embedding/kernel": (8, 8, 3, e), "embedding/bias": (e,), "cls": (1, 1, e),
        "Transformer/encoder_norm/scale": (e,), "Transformer/encoder_norm/bias": (e,),
        "head/kernel": (e, 5), "head/bias": (5,),
    }  # fmt: skip
    is_newer = prefix == "params/"
    shapes["pos_embedding" if is_newer else "Transformer/posembed_input/pos_embedding"] = (1, 10, e)
    attention = "MultiHeadDotProductAttention_0" if is_newer else "MultiHeadDotProductAttention_1"
    norm, mlp = ("LayerNorm_1", "MlpBlock_0") if is_newer else ("LayerNorm_2", "MlpBlock_3")
    for n in range(3):
        block = f"Transformer/encoderblock_{n}/"
        for each in ("LayerNorm_0", norm):
            shapes |= {f"{block}{each}/scale": (e,), f"{block}{each}/bias": (e,)}
        for each in ("query", "key", "value"):
            shapes[f"{block}{attention}/{each}/kernel"] = (e, h, d)
            shapes[f"{block}{attention}/{each}/bias"] = (h, d)
        shapes |= {
            f"{block}{attention}/out/kernel": (h, d, e), f"{block}{attention}/out/bias": (e,),
            f"{block}{mlp}/Dense_0/kernel": (e, f), f"{block}{mlp}/Dense_0/bias": (f,),
            f"{block}{mlp}/Dense_1/kernel": (f, e), f"{block}{mlp}/Dense_1/bias": (e,),
        }  # fmt: skip
    return {f"{prefix}{key}": np.zeros(shape, np.float32) for key, shape in shapes.items()}


def _bit(model: Any) -> dict[str, Any]:
    """The names and shapes of the file of a BiT."""
    own = {key: tuple(x.shape) for key, x in model.state_dict().items()}

    def kernel(key: str) -> tuple[int, ...]:
        out, into, height, width = own[key]
        return height, width, into, out

    conv = "standardized_conv2d/kernel"
    shapes = {
        f"root_block/{conv}": kernel("stem.conv.weight"),
        "group_norm/gamma": own["norm.weight"], "group_norm/beta": own["norm.bias"],
        "head/conv2d/kernel": kernel("head.fc.weight"), "head/conv2d/bias": own["head.fc.bias"],
    }  # fmt: skip
    for s, stage in enumerate(model.stages):
        for n, block in enumerate(stage.blocks):
            there, here = f"block{s + 1}/unit{n + 1:02d}/", f"stages.{s}.blocks.{n}."
            for number, letter in enumerate("abc", 1):
                shapes[f"{there}{letter}/{conv}"] = kernel(f"{here}conv{number}.weight")
                shapes[f"{there}{letter}/group_norm/gamma"] = own[f"{here}norm{number}.weight"]
                shapes[f"{there}{letter}/group_norm/beta"] = own[f"{here}norm{number}.bias"]
            if block.downsample is not None:
                shapes[f"{there}a/proj/{conv}"] = kernel(f"{here}downsample.conv.weight")
    return {f"resnet/{key}": np.zeros(shape, np.float32) for key, shape in shapes.items()}
