"""Boxes of a view, read many at a time into memory that is used again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.arrays.host_memory import HostBuffers
from unickpt.format.index import ArrayEntry
from unickpt.loading.views import CheckpointView, jobs_of
from unickpt.reading.chunk_reader import read_arrays
from unickpt.reading.options import LoadOptions
from unickpt.reading.targets import NewTarget

Held = tuple[Array, Array]
"""The elements of a box, and the memory that they are in, for `HostBuffers.give`."""


class _BoxesTarget(NewTarget):
    """Boxes of one array, each with its own memory."""

    def __init__(self, entry: ArrayEntry, boxes: Sequence[Box], buffers: HostBuffers) -> None:
        super().__init__(entry)
        self.boxes = tuple(boxes)
        self.memory = [buffers.take(box.size * self.dtype.itemsize) for box in boxes]

    def buffer(self, position: int) -> Array:
        shape = self.boxes[position].shape
        nbytes = math.prod(shape) * self.dtype.itemsize
        buffer: Array = self.memory[position][:nbytes].view(self.dtype).reshape(shape)
        return buffer

    def finish(self, buffers: Sequence[Array]) -> list[Held]:
        return list(zip(buffers, self.memory, strict=True))


def read_boxes(
    view: CheckpointView,
    boxes: Mapping[str, tuple[ArrayEntry, Sequence[Box]]],
    options: LoadOptions,
    buffers: HostBuffers,
) -> dict[str, list[Held]]:
    """Reads boxes of arrays, each stored chunk once.

    Arguments:
        view: what to read.
        boxes: for arrays of the view, the entry as which to read it, whose dtype may differ, and
            the boxes.
        options: of reading.
        buffers: provide the memory.
    """
    wanted = {
        name: {name: _BoxesTarget(entry, of_array, buffers)}
        for name, (entry, of_array) in boxes.items()
    }
    found: dict[str, list[Held]] = read_arrays(view.checkpoint, jobs_of(view, wanted), options)
    return found
