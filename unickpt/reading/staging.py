"""Memory of the host from which devices copy while more is read, and the parts of large arrays."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.format import chunk_grid
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry
from unickpt.frameworks.adapter_protocol import ArrayTarget, Uploader
from unickpt.reading.targets import NewMemory
from unickpt.threads import in_batches

STAGED_BYTES = 32 << 20
"""Of the memory that is copied at once, unless a single box is larger."""
STAGED_ARRAYS = 4096
"""Of small arrays that are copied at once."""


class StagedTarget(NewMemory):
    """Boxes of a target on a device, in memory of the host that is copied there.

    Arguments:
        target: the target.
        boxes: all of its boxes, or a part of its only one.
    """

    def __init__(self, target: ArrayTarget, boxes: Sequence[Box]) -> None:
        super().__init__(target)
        self.identity: Hashable = target.identity
        self.boxes, self._target = boxes, target
        self._buffers = [np.empty(box.shape if box.empty else 0, self.dtype) for box in boxes]

    def buffer(self, position: int) -> Array:
        return self._buffers[position]

    def staged_boxes(self) -> Iterator[_StagedBox]:
        """Its boxes that are not empty."""
        memory = self._target.device_memory
        assert memory is not None, "it is on a device"
        for position, box in enumerate(self.boxes):
            if not box.empty:
                destination = memory.destination(position, box)
                nbytes = box.size * self.dtype.itemsize
                yield _StagedBox(self._buffers, position, memory.device, destination, nbytes)

    def uploader(self) -> Uploader:
        """A new uploader to its device."""
        assert self._target.device_memory is not None, "it is on a device"
        return self._target.device_memory.uploader()


class _StagedBox(NamedTuple):
    """A box to copy to a device: where its host memory is kept, its destination and its size."""

    buffers: list[Array]
    position: int
    device: Hashable
    destination: object
    nbytes: int


def stage(
    targets: Iterable[StagedTarget], uploaders: dict[Hashable, Uploader]
) -> list[Callable[[], None]]:
    """Gives targets their memory.

    Arguments:
        targets: those of different memory on devices.
        uploaders: by device; new ones are added.

    Returns:
        Functions that start to copy the memory, once it is filled.
    """
    by_device: dict[Hashable, list[_StagedBox]] = {}
    for target in targets:
        for box in target.staged_boxes():
            by_device.setdefault(box.device, []).append(box)
            if box.device not in uploaders:
                uploaders[box.device] = target.uploader()
    starts = list[Callable[[], None]]()
    for device, boxes in by_device.items():
        for batch in in_batches(boxes, None, STAGED_BYTES, lambda box: box.nbytes):
            memory, start = uploaders[device].stage([box.destination for box in batch])
            for box, buffer in zip(batch, memory, strict=True):
                box.buffers[box.position] = buffer
            starts.append(start)
    return starts


def apart(targets: Iterable[ArrayTarget]) -> Iterable[StagedTarget]:
    """Those on devices; of those that share memory, the first."""
    first: dict[Hashable, StagedTarget] = {}
    for target in targets:
        if isinstance(target, StagedTarget):
            first.setdefault(target if target.identity is None else target.identity, target)
    return first.values()


def pieces_of(entry: ArrayEntry, box: Box, most_bytes: int) -> list[Box]:
    """The parts of a box that are read apart, because no two of them need the same chunk.

    Arguments:
        entry: the stored array.
        box: of it.
        most_bytes: what a part has at most, if chunks are not larger.
    """
    parts = [part for part in chunk_grid.parts(entry) if part.box.intersect(box) is not None]
    divisions = [_cut(parts, box, dim, most_bytes, entry.itemsize) for dim in range(len(box.shape))]
    return min(divisions, key=lambda pieces: max(piece.size for piece in pieces), default=[box])


def _cut(parts: Sequence[Part], box: Box, dim: int, most_bytes: int, itemsize: int) -> list[Box]:
    """The pieces of a box along a dimension."""
    start, stop = box.start[dim], box.stop[dim]
    spans = sorted({(p.box.start[dim], p.box.stop[dim], p.chunk[dim]) for p in parts})
    if any(span[1] > later[0] for span, later in pairwise(spans)):
        return [box]  # parts with different grids lie side by side
    ends = np.concatenate([np.arange(a, b, c) for a, b, c in spans] + [[stop]])
    ends = ends[(ends > start) & (ends <= stop)]
    most = max(1, most_bytes // (box.size // (stop - start) * itemsize))
    pieces, first = list[Box](), start
    while first < stop:
        after = max(
            np.searchsorted(ends, first, "right"), np.searchsorted(ends, first + most, "right") - 1
        )
        end = int(ends[after])
        pieces.append(
            Box(
                (*box.start[:dim], first, *box.start[dim + 1 :]),
                (*box.stop[:dim], end, *box.stop[dim + 1 :]),
            )
        )
        first = end
    return pieces
