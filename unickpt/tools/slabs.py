"""Boxes of a view, read many at a time into memory that is used again; chunks for a writer, made
slab by slab."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.errors import CheckpointCorrupt
from unickpt.format.index import ArrayEntry
from unickpt.format.reader import Reader
from unickpt.frameworks.host_memory import HostBuffers
from unickpt.frameworks.process_group import Group
from unickpt.loading.views import CheckpointView, jobs_of
from unickpt.reading.chunk_reader import read_arrays
from unickpt.reading.options import LoadOptions
from unickpt.reading.targets import NewTarget
from unickpt.saving.write_plan import Staged, StagedChunk, WriteItem

# Shares of the budget of a conversion or a merge: two slabs, of which one is read ahead, and what
# the writer holds.
AHEAD, WRITER = 6, 2

_MOST_DAMAGE = 10

Held = tuple[Array, Array]
"""The elements of a box, and the memory that they are in, for `HostBuffers.give`."""
ReadSlab = Callable[[Sequence[WriteItem]], Mapping[WriteItem, Held]]
"""Reads, or makes, chunks."""


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


def check_rest(stored: Reader, group: Group) -> None:
    """Compares what was read with the format's checksums, after the last slab, of a checkpoint of
    `Reader.checking`: what is written next would be taken for sound.

    Raises:
        CheckpointCorrupt: something differs.
    """
    damage = [reason for _, reason in stored.check_rest(group.index, group.count)]
    if damage:
        raise CheckpointCorrupt("\n".join(damage[:_MOST_DAMAGE]))


class SlabSource:
    """The chunks of a new checkpoint, for the writer; makes them in slabs, one slab ahead.

    Arguments:
        slabs: the chunks that this process writes, in order, split into slabs.
        read: makes the chunks of a slab.
        buffers: which `read` takes memory from.
    """

    background = False
    staged = Staged()

    def __init__(
        self,
        slabs: Iterable[list[WriteItem]],
        read: ReadSlab,
        buffers: HostBuffers,
    ) -> None:
        self._read, self._buffers = read, buffers
        self._slabs = list(slabs)
        self._slab_of = {item: at for at, slab in enumerate(self._slabs) for item in slab}
        self._reading: dict[int, Future[Mapping[WriteItem, Held]]] = {}
        self._ready: dict[WriteItem, Held] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="unickpt-slabs")

    def ready(self, items: Sequence[WriteItem]) -> bool:
        return True

    def digest(self, item: WriteItem) -> int:
        raise AssertionError("asked of assumed replicas, and there are none")

    def fetch(self, item: WriteItem) -> StagedChunk:
        if item not in self._ready:
            at = self._slab_of.pop(item, None)
            if at is None or at not in self._start(at):
                self._ready.update(self._read([item]))  # requested again by the coordinator
            else:
                self._ready.update(self._reading.pop(at).result())
                self._start(at + 1)
        data, memory = self._ready.pop(item)
        return StagedChunk(data, data.nbytes, partial(self._buffers.give, memory))

    def close(self) -> None:
        """Stops reading; discards slabs that were not used."""
        self._pool.shutdown(cancel_futures=True)

    def _start(self, at: int) -> Mapping[int, Any]:
        """Starts to read the next slab, if there is one."""
        if at < len(self._slabs) and self._slabs[at]:
            slab, self._slabs[at] = self._slabs[at], []
            self._reading[at] = self._pool.submit(self._read, slab)
        return self._reading
