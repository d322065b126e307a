"""What lies on the Hub, told from shapes of mlx-lm's own models: steps from the one to the other."""

from __future__ import annotations

import re
from collections.abc import Callable

Shapes = dict[str, tuple[int, ...]]
Step = Callable[[Shapes], Shapes]


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
