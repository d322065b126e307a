"""Fixtures of presets: what the converters of other projects make of seeded numbers.

A fixture has no numbers but names, shapes and digests; `tests/fixtures/presets` says who made it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from support import TESTS

FOLDER = Path(TESTS) / "fixtures" / "presets"
Arrays = dict[str, Any]
Side = dict[str, tuple[tuple[int, ...], str | None]]
"""Names to shapes and digests; no digest if the converter does not make the array."""


@dataclass(frozen=True)
class PresetCase:
    """What a converter made, in both directions.

    Arguments:
        preset: the preset that does the same.
        model: the source's name of the model.
        source: who converted, with the version.
        sizes: of axes as the preset calls them.
        left, right: what both sides hold; digests are those of what was made of `numbers` of the
            other side.
        one_way: whether the source has no way to the left, or to the right.
        dropped: what has no counterpart on the other side.
    """

    preset: str
    model: str
    source: str
    sizes: dict[str, int]
    left: Side
    right: Side
    one_way: bool
    dropped: tuple[str, ...] = ()


def numbers(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Arrays:
    """Whole numbers as float32, which the factors of the presets keep exact.

    Arguments:
        shapes: by name.
        seed: another for each side.
    """
    return {
        name: np.random.default_rng([seed, zlib.crc32(name.encode())])
        .integers(-999, 1000, shape)
        .astype(np.float32)
        for name, shape in shapes.items()
    }


def shapes_of(side: Side) -> dict[str, tuple[int, ...]]:
    """The shapes of a side."""
    return {name: tuple(shape) for name, (shape, _) in side.items()}


def digest(array: Any) -> str:
    """Tells arrays apart: a part of the sha256 of shape and elements."""
    array = np.ascontiguousarray(array, np.float32)
    text = f"{array.shape}".encode() + (array + np.float32(0)).tobytes()
    return hashlib.sha256(text).hexdigest()[:12]


def made_case(
    preset: str,
    model: str,
    source: str,
    shapes: Mapping[str, tuple[int, ...]],
    sizes: dict[str, int],
    to_right: Callable[[Arrays], Arrays],
    to_left: Callable[[Arrays], Arrays] | None,
    dropped: Mapping[str, tuple[int, ...]] | None = None,
) -> PresetCase:
    """Runs a converter in both directions.

    Arguments:
        preset, model, source, sizes: as in `PresetCase`.
        shapes: of the left side.
        to_right, to_left: the source's functions, of NumPy arrays.
        dropped: what only the right side has, and `to_left` leaves out.
    """
    right = {name: np.asarray(x) for name, x in to_right(numbers(shapes, 1)).items()}
    right_shapes = {name: x.shape for name, x in right.items()} | dict(dropped or {})
    left: Arrays = {}
    if to_left is not None:
        left = {name: np.asarray(x) for name, x in to_left(numbers(right_shapes, 2)).items()}
        assert left.keys() <= shapes.keys(), left.keys() - shapes.keys()
    lost = [name for name in shapes if left and name not in left]
    return PresetCase(
        preset, model, source, sizes,
        {n: (tuple(s), digest(left[n]) if n in left else None) for n, s in shapes.items()},
        {n: (s, digest(right[n]) if n in right else None) for n, s in right_shapes.items()},
        to_left is None, (*lost, *(dropped or ())),
    )  # fmt: skip


def of_torch(function: Callable[[Any], Any]) -> Callable[[Arrays], Arrays]:
    """A function of torch's tensors, as one of NumPy's arrays."""
    import torch  # which not every source needs

    def converted(arrays: Arrays) -> Arrays:
        given = {name: torch.from_numpy(np.array(x)) for name, x in arrays.items()}
        return {name: x.detach().numpy() for name, x in function(given).items()}

    return converted


def main(name: str, cases: Callable[[str], Iterator[PresetCase]]) -> None:
    """Writes a fixture: all of it, or the presets whose names begin as the argument does.

    Arguments:
        name: of the file.
        cases: makes them.
    """
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    found = [] if not only else [case for case in read(name) if not case.preset.startswith(only)]
    for case in cases(only):
        print(case.preset, case.model, len(case.left), len(case.right), flush=True)
        found.append(case)
    found.sort(key=lambda case: case.preset)
    text = json.dumps([asdict(case) for case in found], separators=(",", ":"))
    (FOLDER / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def read(name: str) -> list[PresetCase]:
    """The cases of a fixture."""
    found = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    for case in found:
        for side in ("left", "right"):
            case[side] = {n: (tuple(shape), text) for n, (shape, text) in case[side].items()}
        case["dropped"] = tuple(case["dropped"])
    return [PresetCase(**case) for case in found]


def all_cases() -> Iterator[PresetCase]:
    """The cases of all fixtures."""
    for file in sorted(FOLDER.glob("*.json.gz")):
        yield from read(file.name.removesuffix(".json.gz"))
