"""New NumPy arrays and plain numbers as targets."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.arrays.memory_region import MemoryRegion
from unickpt.format.index import ArrayEntry
from unickpt.frameworks.protocol import ArrayTarget


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
    span: tuple[int, int] | None = None

    def __init__(self, entry: ArrayEntry, box: Box | None = None) -> None:
        box = box or Box.whole(entry.shape)
        self.shape, self.dtype = box.shape, dtypes.from_name(entry.dtype)
        self.boxes: Sequence[Box] = (box,)

    def regions(self) -> Sequence[MemoryRegion]:
        return ()

    def buffer(self, position: int) -> Array:
        return np.empty(self.shape, self.dtype)

    def finish(self, buffers: Sequence[Array]) -> Any:
        (filled,) = buffers
        return filled


class NewMemory:
    """The boxes of a target in new memory; becomes the buffers.

    Arguments:
        target: the target.
    """

    identity: Hashable = None
    span: tuple[int, int] | None = None

    def __init__(self, target: ArrayTarget) -> None:
        self.shape, self.dtype, self.boxes = target.shape, target.dtype, target.boxes
        self.abstract, self.processes, self.prng = target.abstract, target.processes, target.prng

    def regions(self) -> Sequence[MemoryRegion]:
        return ()

    def buffer(self, position: int) -> Array:
        return np.empty(self.boxes[position].shape, self.dtype)

    def finish(self, buffers: Sequence[Array]) -> Sequence[Array]:
        return buffers


class NumberTarget(NewTarget):
    """A plain number from a 0-d array."""

    def finish(self, buffers: Sequence[Array]) -> Any:
        return buffers[0].item()
