"""Leaves of `like` that share a part of their memory: loaded if the stored values agree there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from unickpt.arrays.dtypes import Array
from unickpt.errors import LoadMismatch
from unickpt.frameworks.adapter_protocol import ArrayTarget
from unickpt.loading.report import Difference
from unickpt.reading.targets import NewMemory

if TYPE_CHECKING:
    from unickpt.arrays.memory_region import MemoryRegion

Buffers = Sequence[Array]

HALF_FILLED = (
    "unickpt: the load failed midway, after arrays of `like` had been filled: some objects of "
    "`like` hold new values, others old ones"
)

TargetsByArray = Mapping[str, Mapping[str, ArrayTarget]]


class Overlaps:
    """The targets that share a part of their memory, each read into new memory first.

    Arguments:
        by_array: the targets of a load, by array and name.
    """

    def __init__(self, by_array: TargetsByArray) -> None:
        targets = {name: t for named in by_array.values() for name, t in named.items()}
        self._pairs = list(overlapping(targets))
        self._originals = {name: targets[name] for pair in self._pairs for name in pair}

    def separate(self, by_array: TargetsByArray) -> TargetsByArray:
        """The targets to read; in place of those that overlap, targets with new memory."""
        if not self._originals:
            return by_array
        apart = {name: NewMemory(target) for name, target in self._originals.items()}
        return {
            array: {name: apart.get(name, target) for name, target in named.items()}
            for array, named in by_array.items()
        }

    def finish(self, where: str, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """Fills the memory of `like`.

        Arguments:
            where: the checkpoint, for messages.
            loaded: all that was loaded, by name; of each of these targets its buffers.

        Returns:
            All that was loaded, with the leaves of these targets.

        Raises:
            LoadMismatch: different values are stored for two leaves that share memory.
        """
        rows = [
            Difference(other, "overlap", "values of its own", f"memory of {name}")
            for name, other in self._pairs
            if not _agree(self._regions(name, loaded), self._regions(other, loaded))
        ]
        if rows:
            from unickpt.loading import mismatch

            error = LoadMismatch(mismatch.message(where, rows))
            error.add_note(HALF_FILLED)
            raise error
        filled = {name: _filled(target, loaded[name]) for name, target in self._originals.items()}
        return {**loaded, **filled}

    def _regions(self, name: str, loaded: Mapping[str, Buffers]) -> list[_Part]:
        return list(zip(self._originals[name].regions(), loaded[name], strict=True))


_Part = tuple["MemoryRegion", Array]


def overlapping(targets: Mapping[str, ArrayTarget]) -> Iterator[tuple[str, str]]:
    """The pairs of targets that share a part of their memory, but not all of it."""
    spans = sorted((t.span, name) for name, t in targets.items() if t.span is not None)
    group, end = list[str](), 0
    for (begin, stop), name in spans:
        if begin >= end:
            if len(group) > 1:
                yield from _pairs_among(group, targets)
            group = []
        group.append(name)
        end = max(end, stop)
    yield from _pairs_among(group, targets)


def _pairs_among(
    names: Sequence[str], targets: Mapping[str, ArrayTarget]
) -> Iterator[tuple[str, str]]:
    """As `overlapping`, of targets whose spans overlap."""
    if len({targets[name].identity for name in names}) < 2:
        return
    from unickpt.arrays.memory_region import share

    regions = [
        (*region.span, name, region)
        for name in names
        for region in targets[name].regions()
        if 0 not in region.shape
    ]
    regions.sort(key=itemgetter(0))
    before = list[tuple[int, str, str, Array]]()
    pairs = dict[tuple[str, str], None]()
    for begin, end, name, region in regions:
        before = [earlier for earlier in before if earlier[0] > begin]
        memory, identity = region.as_bytes(), targets[name].identity
        for _, other, device, other_memory in before:
            is_apart = device == region.device and targets[other].identity != identity
            if is_apart and share(memory, other_memory):
                pairs[min(other, name), max(other, name)] = None
        before.append((end, name, region.device, memory))
    yield from pairs


def _agree(ours: Sequence[_Part], theirs: Sequence[_Part]) -> bool:
    """Whether two arrays have the same bytes in the memory that they share."""
    for (region, buffer), (other, other_buffer) in product(ours, theirs):
        if not region.overlaps(other):
            continue
        start = min(region.span[0], other.span[0])
        memory = np.zeros(max(region.span[1], other.span[1]) - start, np.uint8)
        first = region.within(memory, start, buffer.dtype)
        first[...] = buffer
        other.within(memory, start, other_buffer.dtype)[...] = other_buffer
        if first.tobytes() != buffer.tobytes():
            return False
    return True


def _filled(target: ArrayTarget, loaded: Buffers) -> Any:
    buffers = [target.buffer(position) for position in range(len(target.boxes))]
    for buffer, values in zip(buffers, loaded, strict=True):
        buffer[...] = values
    return target.finish(buffers)
