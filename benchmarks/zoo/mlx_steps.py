"""What lies on the Hub, told from shapes of mlx-lm's own models: steps from the one to the other,
and what several models share.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from benchmarks.zoo.tiny import MORE_SIZES, SIZES

Shapes = dict[str, tuple[int, ...]]
Step = Callable[[Shapes], Shapes]
Model = tuple[dict[str, Any], tuple[Step, ...]]
"""What the configuration of a model has beyond `BASE`, and what is otherwise on the Hub."""

BASE: dict[str, Any] = {**SIZES, **MORE_SIZES, "rms_norm_eps": 1e-5, "rope_theta": 1e4}


def text(**change: Any) -> dict[str, Any]:
    """The configuration of a model that has its text model's inside it."""
    return {"text_config": {**BASE, **change}}


def renamed(pattern: str, to: str) -> Step:
    """Names as they are on the Hub."""
    return lambda shapes: {re.sub(pattern, to, key): shape for key, shape in shapes.items()}


def unstacked(pattern: str, to: str) -> Step:
    """One array for each of the first axis, whose number is `{e}` in `to`."""

    def step(shapes: Shapes) -> Shapes:
        found: Shapes = {}
        for key, shape in shapes.items():
            if not re.search(pattern, key):
                found[key] = shape
                continue
            name = re.sub(pattern, to, key)
            found |= {name.replace("{e}", str(e)): shape[1:] for e in range(shape[0])}
        return found

    return step


def swapped(pattern: str) -> Step:
    """The last two axes the other way round: kernels of torch have the channels first."""
    return lambda shapes: {
        key: (*shape[:-2], shape[-1], shape[-2]) if re.search(pattern, key) else shape
        for key, shape in shapes.items()
    }


def reshaped(pattern: str, of: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Step:
    """Another shape."""
    return lambda shapes: {
        key: of(shape) if re.search(pattern, key) else shape for key, shape in shapes.items()
    }


def joined(parts: tuple[str, ...], to: str, axis: int) -> Step:
    """Arrays whose names end as `parts` are one array, along an axis."""

    def step(shapes: Shapes) -> Shapes:
        found = dict(shapes)
        for key in shapes:
            if not key.endswith(parts[0]):
                continue
            before = key.removesuffix(parts[0])
            of_parts = [found.pop(before + part) for part in parts]
            shape = list(of_parts[0])
            shape[axis] = sum(each[axis] for each in of_parts)
            found[before + to] = tuple(shape)
        return found

    return step


def latent(shapes: Shapes) -> Shapes:
    """Keys and values of latent attention as one matrix."""
    found = dict(shapes)
    for key in shapes:
        if key.endswith(".embed_q.weight"):
            heads, rank, keys = found.pop(key)
            before = key.removesuffix("embed_q.weight")
            values = found.pop(f"{before}unembed_out.weight")[1]
            found[f"{before}kv_b_proj.weight"] = (heads * (keys + values), rank)
    return found


def also(**more: tuple[int, ...]) -> Step:
    """What mlx-lm leaves away; `__` in a name is a point."""
    return lambda shapes: shapes | {key.replace("__", "."): value for key, value in more.items()}


def without(pattern: str) -> Step:
    """Without what is tied, and not in files."""
    return lambda shapes: {key: x for key, x in shapes.items() if not re.search(pattern, key)}


def packed(shapes: Shapes) -> Shapes:
    """Weights of experts in MXFP4: 32 of a row are 16 bytes of a block, with a scale."""
    found: Shapes = {}
    for key, shape in shapes.items():
        if ".experts." in key and key.endswith(".weight"):
            before = key.removesuffix(".weight")
            found[f"{before}_blocks"] = (*shape[:-1], shape[-1] // 32, 16)
            found[f"{before}_scales"] = (*shape[:-1], shape[-1] // 32)
        else:
            found[key] = shape
    return found


def dbrx_experts(shapes: Shapes) -> Shapes:
    """The experts of DBRX one below the other; the last matrix is turned there."""
    found: Shapes = {}
    for key, shape in shapes.items():
        name = re.sub(r"experts\.\d+\.(\w+)\.weight", r"experts.mlp.\1", key)
        if name == key:
            found[key] = shape
        elif "experts.0." in key:
            rows, columns = shape[::-1] if name.endswith("w2") else shape
            found[name] = (6 * rows, columns)
    return found


def in_three(name: str, to: str) -> Step:
    """Queries, keys and values apart."""

    def step(shapes: Shapes) -> Shapes:
        found: Shapes = {}
        for key, shape in shapes.items():
            if f".{name}." in key:
                for each in "qkv":
                    new = key.replace(f".{name}.", f".{to.format(each)}.")
                    found[new] = (shape[0] // 3, *shape[1:])
            else:
                found[key] = shape
        return found

    return step


EXPERTS = unstacked(r"\.switch_mlp\.(\w+_proj)\.", r".experts.{e}.\1.")
EXPERTS_IN_PLACE = unstacked(r"\.mlp\.experts\.(\w+_proj)\.", r".mlp.experts.{e}.\1.")
ROPE = also(model__layers__0__self_attn__rotary_emb__inv_freq=(3,))
HEAD = also(lm_head__weight=(101, 24))
VISION = also(
    vision_tower__patch__weight=(24, 13), multi_modal_projector__linear_1__weight=(24, 14)
)
TURNS = ["sliding_attention", "full_attention", "sliding_attention"]
PAIRS = ["sliding_attention", "full_attention"] * 2
DELTA = {
    "num_heads": 3,
    "head_dim": 6,
    "short_conv_kernel_size": 4,
    "kda_layers": [1, 3],
    "full_attn_layers": [2],
}
YARN = {
    "type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32,
    "beta_slow": 1, "original_max_position_embeddings": 8,
}  # fmt: skip
GATE_UP = ("gate_proj.weight", "up_proj.weight")
W_EXPERTS: tuple[Step, ...] = (
    unstacked(r"\.switch_mlp\.gate_proj\.", ".experts.{e}.w1."),
    unstacked(r"\.switch_mlp\.down_proj\.", ".experts.{e}.w2."),
    unstacked(r"\.switch_mlp\.up_proj\.", ".experts.{e}.w3."),
)
