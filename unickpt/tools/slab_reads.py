"""Streaming of arrays for all tools: boxes are read in slabs of many into reused memory, one slab
ahead of writing or comparing."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.errors import CheckpointCorrupt
from unickpt.format.index import ArrayEntry
from unickpt.format.reader_protocol import Reader
from unickpt.frameworks.host_memory import HostBuffers
from unickpt.frameworks.process_group import Group
from unickpt.loading.views import View
from unickpt.reading.array_reader import read_arrays
from unickpt.reading.load_options import LoadOptions
from unickpt.reading.targets import NewTarget
from unickpt.references.value_places import WriteItem
from unickpt.saving.write_plan import Staged, StagedChunk

# Shares of the budget of a conversion or a merge: two slabs, one of them read ahead, and the
# writer's memory.
AHEAD, WRITER = 6, 2

_MOST_DAMAGE = 10

Buffered = tuple[Array, Array]
"""The elements of a box, and their memory, for `HostBuffers.give`."""
K = TypeVar("K", bound=Hashable)


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

    def finish(self, buffers: Sequence[Array]) -> list[Buffered]:
        return list(zip(buffers, self.memory, strict=True))


def read_boxes(
    view: View, boxes: Sequence[tuple[ArrayEntry, Box]], options: LoadOptions, buffers: HostBuffers
) -> list[Buffered]:
    """Reads boxes of arrays, each stored chunk once.

    Arguments:
        view: the checkpoint to read.
        boxes: each with the entry as which to read its array; the entry's dtype may differ from
            that of the view.
        options: of reading.
        buffers: provide the memory.
    """
    numbers: dict[str, list[int]] = {}
    for number, (entry, _) in enumerate(boxes):
        numbers.setdefault(entry.name, []).append(number)
    targets = {
        name: {name: _BoxesTarget(boxes[indices[0]][0], [boxes[n][1] for n in indices], buffers)}
        for name, indices in numbers.items()
    }
    results = read_arrays(view.checkpoint, view.jobs(targets), options)
    of_array = {name: iter(buffers) for name, buffers in results.items()}
    return [next(of_array[entry.name]) for entry, _ in boxes]


def check_rest(stored: Reader, group: Group) -> None:
    """Compares the read data with the format's checksums after the last slab, for a checkpoint of
    `Reader.checking`: later writes would make it appear sound.

    Raises:
        CheckpointCorrupt: they differ.
    """
    damage = [reason for _, reason in stored.check_rest(group.index, group.count)]
    if damage:
        raise CheckpointCorrupt("\n".join(damage[:_MOST_DAMAGE]))


class Slabs(Generic[K]):
    """Elements of boxes, made in slabs of many boxes, one slab ahead.

    Arguments:
        slabs: the boxes to make, in order, split into slabs.
        read: makes the elements of each box of a slab.
    """

    def __init__(
        self, slabs: Iterable[list[K]], read: Callable[[Sequence[K]], Sequence[Buffered]]
    ) -> None:
        self._read = read
        self._slabs = list(slabs)
        self._slab_of = {key: index for index, slab in enumerate(self._slabs) for key in slab}
        self._reading: dict[int, Future[dict[K, Buffered]]] = {}
        self._ready: dict[K, Buffered] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="unickpt-slabs")

    def take(self, key: K) -> Buffered:
        """The elements of a box; elements that were already taken are made again."""
        if key not in self._ready:
            index = self._slab_of.pop(key, None)
            if index is None or index not in self._start(index):
                self._ready.update(self._made([key]))
            else:
                self._ready.update(self._reading.pop(index).result())
                self._start(index + 1)
        return self._ready.pop(key)

    def close(self) -> None:
        """Stops reading; discards slabs that were not used."""
        self._pool.shutdown(cancel_futures=True)

    def _made(self, slab: Sequence[K]) -> dict[K, Buffered]:
        return dict(zip(slab, self._read(slab), strict=True))

    def _start(self, index: int) -> Mapping[int, Any]:
        """Starts to read the next slab, if there is one."""
        if index < len(self._slabs) and self._slabs[index]:
            slab, self._slabs[index] = self._slabs[index], []
            self._reading[index] = self._pool.submit(self._made, slab)
        return self._reading


class SlabSource(Slabs[WriteItem]):
    """The chunks of a new checkpoint, for the writer.

    Arguments:
        slabs, read: see `Slabs`.
        buffers: provide memory for `read`.
    """

    background = False
    staged = Staged()

    def __init__(
        self,
        slabs: Iterable[list[WriteItem]],
        read: Callable[[Sequence[WriteItem]], Sequence[Buffered]],
        buffers: HostBuffers,
    ) -> None:
        super().__init__(slabs, read)
        self._buffers = buffers

    def ready(self, items: Sequence[WriteItem]) -> bool:
        return True

    def digest(self, item: WriteItem) -> int:
        raise AssertionError("requested of assumed replicas, and there are none")

    def fetch(self, item: WriteItem) -> StagedChunk:
        data, memory = self.take(item)
        return StagedChunk(data, data.nbytes, partial(self._buffers.give, memory))
