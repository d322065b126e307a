"""Trees all of whose elements are one number, so that a mix of two versions shows."""

from __future__ import annotations

from typing import Any

import numpy as np

SHAPES = {"small": (3000,), "rows": (16, 4096), "empty": (0, 2)}


def tree(number: int) -> dict[str, Any]:
    """A tree all of whose elements are one number."""
    return {**{k: np.full(s, float(number)) for k, s in SHAPES.items()}, "number": number}


def number_of(found: dict[str, Any]) -> int:
    """The number of a tree; fails where it is not whole, or of more than one version."""
    number = found["number"]
    for name, shape in SHAPES.items():
        assert found[name].shape == shape
        assert (found[name] == number).all(), f"{name} is of another version"
    return int(number)
