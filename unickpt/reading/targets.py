"""New NumPy arrays and plain numbers as targets."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.format.index import ArrayEntry


class NewTarget:
    """A new NumPy array.

    Arguments:
        entry: gives its shape and dtype.
        box: the box to read; the whole array by default.
    """

    identity: Hashable = None
    abstract = False
    processes = 1
    prng: str | None = None

    def __init__(self, entry: ArrayEntry, box: Box | None = None) -> None:
        box = box or Box.whole(entry.shape)
        self.shape, self.dtype = box.shape, dtypes.from_name(entry.dtype)
        self.boxes: Sequence[Box] = (box,)

    def buffer(self, position: int) -> Array:
        return np.empty(self.shape, self.dtype)

    def finish(self, buffers: Sequence[Array]) -> Any:
        (filled,) = buffers
        return filled


class NumberTarget(NewTarget):
    """A plain number from a 0-d array."""

    def finish(self, buffers: Sequence[Array]) -> Any:
        return buffers[0].item()
