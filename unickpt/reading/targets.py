"""New NumPy arrays and plain numbers as targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unickpt.adapters.numpy import NumpyTarget
from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.format.index import ArrayEntry

if TYPE_CHECKING:
    pass


class NewTarget(NumpyTarget):
    """A new NumPy array.

    Arguments:
        entry: gives its shape and dtype.
        box: the box to read; the whole array by default.
    """

    def __init__(self, entry: ArrayEntry, box: Box | None = None) -> None:
        box = box or Box.whole(entry.shape)
        self.leaf, self.shape, self.dtype = None, box.shape, dtypes.from_name(entry.dtype)
        self.boxes, self.in_place, self.identity = (box,), False, None


class NumberTarget(NewTarget):
    """A plain number from a 0-d array."""

    def finish(self, buffers: Sequence[Array]) -> Any:
        return buffers[0].item()
