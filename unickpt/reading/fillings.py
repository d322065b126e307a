"""What several processes need of stored arrays, and the jobs that are filled with it, chunk by
chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.format import chunk_grid
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry
from unickpt.format.reader import Reader
from unickpt.reading.chunk_reader import Filled
from unickpt.reading.read_plan import (
    Consumer,
    Job,
    buffers_of,
    by_chunk,
    consumers_of,
    fill,
    slots_of,
)

Wants = Mapping[str, Sequence[Box]]
"""Boxes of stored arrays, by name."""


def wants_of(jobs: Iterable[Job]) -> Wants:
    """What this process needs."""
    wants: dict[str, dict[Box, None]] = {}
    for job in jobs:
        for slot in slots_of(job):
            for source in slot.recipe.sources:
                needed = source.within(slot.box)
                boxes = () if needed is None else needed.boxes
                wants.setdefault(source.entry.name, {}).update(dict.fromkeys(boxes))
    return {name: list(boxes) for name, boxes in wants.items() if boxes}


def as_json(wants: Wants) -> dict[str, Any]:
    """As lists of numbers."""
    return {name: [[b.start, b.stop] for b in of_name] for name, of_name in wants.items()}


def wants_from(found: Mapping[str, Any]) -> Wants:
    """From lists of numbers."""
    return {name: [Box(tuple(a), tuple(b)) for a, b in of] for name, of in found.items()}


def wanted_chunks(
    entry: ArrayEntry, wants: Sequence[Wants]
) -> Iterator[tuple[Part, int, int, dict[int, list[Box]]]]:
    """The needed chunks of an array: part, number, row, and the boxes that each process needs."""
    for first, part in chunk_grid.numbered_parts(entry):
        found: dict[int, dict[int, list[Box]]] = {}
        for process, of_process in enumerate(wants):
            for box in of_process.get(entry.name, ()):
                for number in part.chunks_in(box):
                    common = part.chunk_box(number).intersect(box)
                    assert common is not None, "the chunk meets the box"
                    found.setdefault(number, {}).setdefault(process, []).append(common)
        for number in sorted(found):
            yield part, number, first + number, found[number]


@dataclass
class _Filling:
    """A job under way.

    Arguments:
        job: the job.
        left: the number of chunks that it still needs.
        buffers: memory of its targets; None before its first chunk is read.
        consumers: the buffers that need each chunk of its stored arrays, by name and row.
    """

    job: Job
    left: int = 0
    buffers: dict[str, list[Array]] | None = None
    consumers: dict[tuple[str, int], list[Consumer]] = field(default_factory=dict)


class Fillings:
    """Jobs that are filled with chunks in any order; memory is allocated with their first chunk.

    Arguments:
        stored: the checkpoint.
        jobs: the jobs; no two of them read the same stored array.
        verify: whether chunks that functions of rules read are checked.
        filled: counts the bytes of destinations.
    """

    def __init__(self, stored: Reader, jobs: Sequence[Job], verify: bool, filled: Filled) -> None:
        self._stored, self._verify, self._filled = stored, verify, filled
        self._all = [_Filling(job) for job in jobs]
        self._by_entry = {entry.name: f for f in self._all for entry in f.job.entries}

    def expect(self, name: str) -> None:
        """One more chunk of a stored array is going to be placed."""
        self._by_entry[name].left += 1

    def begin(self, done: dict[str, Any]) -> None:
        """Finishes the jobs that need no chunk."""
        for filling in self._all:
            if not filling.left:
                self._finish(filling, done)

    def consumers(self, name: str, row: int) -> Sequence[Consumer]:
        """The buffers that need a chunk of a stored array."""
        filling = self._by_entry[name]
        self._open(filling)
        return filling.consumers[name, row]

    def placed(self, name: str, done: dict[str, Any]) -> None:
        """A chunk of a stored array was placed; finishes its job if that was the last one."""
        filling = self._by_entry[name]
        filling.left -= 1
        if not filling.left:
            self._finish(filling, done)

    def _open(self, filling: _Filling) -> None:
        """Allocates memory for the targets of a job, and fills in what needs no chunk."""
        if filling.buffers is None:
            for entry in filling.job.entries:
                self._stored.check_backed(entry)
            filling.buffers = buffers_of(self._stored, filling.job)
            slots = slots_of(filling.job)
            fill(slots, filling.buffers, self._verify)
            for name, (entry, consumers) in consumers_of(slots, filling.buffers).items():
                for first, part in chunk_grid.numbered_parts(entry):
                    for number, which in by_chunk(part, consumers).items():
                        filling.consumers[name, first + number] = [consumers[w] for w in which]

    def _finish(self, filling: _Filling, done: dict[str, Any]) -> None:
        self._open(filling)
        buffers, filling.buffers, filling.consumers = filling.buffers, {}, {}
        assert buffers is not None, "it was opened"
        for name, target in filling.job.targets.items():
            done[name] = target.finish(buffers.pop(name))
        self._filled.whole(filling.job.nbytes)
