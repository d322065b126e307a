"""New NumPy arrays and plain numbers as targets; elements for arrays of another dtype."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from unickpt.arrays import dtypes, strided_copy
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.errors import LoadMismatch
from unickpt.format.index import ArrayEntry
from unickpt.frameworks.adapter_protocol import ArrayTarget, DeviceMemory
from unickpt.frameworks.host_memory import new_array

if TYPE_CHECKING:
    from unickpt.arrays.layout import Layout
    from unickpt.arrays.memory_region import MemoryRegion
    from unickpt.reading.recipes import ElementSource


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
    device_memory: DeviceMemory | None = None
    layout: Layout | None = None
    span: tuple[int, int] | None = None

    def __init__(self, entry: ArrayEntry, box: Box | None = None) -> None:
        box = box or Box.whole(entry.shape)
        self.shape, self.dtype = box.shape, dtypes.from_name(entry.dtype)
        self.boxes: Sequence[Box] = (box,)

    def regions(self) -> Sequence[MemoryRegion]:
        return ()

    def buffer(self, position: int) -> Array:
        return new_array(self.shape, self.dtype)

    def finish(self, buffers: Sequence[Array]) -> Any:
        (filled,) = buffers
        return filled


class NewMemory(NewTarget):
    """The boxes of a target in new memory; becomes the buffers.

    Arguments:
        target: the target.
    """

    def __init__(self, target: ArrayTarget) -> None:
        self.shape, self.dtype, self.boxes = target.shape, target.dtype, target.boxes
        self.abstract, self.processes, self.prng = target.abstract, target.processes, target.prng
        self.layout = target.layout

    def buffer(self, position: int) -> Array:
        return new_array(self.boxes[position].shape, self.dtype)

    def finish(self, buffers: Sequence[Array]) -> Sequence[Array]:
        return buffers


class NumberTarget(NewTarget):
    """A plain number from a 0-d array."""

    def finish(self, buffers: Sequence[Array]) -> Any:
        return buffers[0].item()


def place(data: Array, out: Array, source: ElementSource) -> None:
    """Copies elements of a stored array to their destination, with the arithmetic of rules."""
    if not source.is_exact:
        wide = np.dtype(np.float64 if np.float64 in (data.dtype, out.dtype) else np.float32)
        scale, offset = (np.asarray(x, wide) for x in (source.scale, source.offset))
        data = np.add(np.multiply(data.astype(wide), scale), offset)
    put(data, out, f"{source.entry.name!r}: stored as {source.entry.dtype}")


def put(data: Array, out: Array, what: str) -> None:
    """Copies elements into an array, whose dtype may differ.

    Arguments:
        data: the elements.
        out: the array.
        what: the array and its stored dtype, for messages.

    Raises:
        LoadMismatch: the dtype of `out` does not hold all values.
    """
    if data.dtype != out.dtype:
        real = data.dtype.kind == "c" and out.dtype.kind != "c"
        cast = (data.real if real else data).astype(out.dtype)
        if not _holds(cast, data):
            raise LoadMismatch(
                f"array {what}, requested as {out.dtype}, which does not hold all its values; load "
                "it with its stored dtype"
            )
        data = cast
    strided_copy.copy(out, data)


def _holds(cast: Array, data: Array) -> bool:
    """Whether a cast kept all values; casts between floats may lose precision."""
    kinds = dtypes.kind(data.dtype), dtypes.kind(cast.dtype)
    if kinds == ("integer", "integer"):
        return dtypes.holds_all(cast.dtype, data)
    if kinds[0] == kinds[1] and kinds[0] != "other":
        return True
    return bool(np.array_equal(cast.astype(data.dtype), data))
