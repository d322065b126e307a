"""Write plans: which process writes which chunk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.commit import chunk_owners
from unickpt.commit.chunk_owners import Shared
from unickpt.format import chunk_grid, codec
from unickpt.format.chunk_grid import Part
from unickpt.format.coverage import check_boxes
from unickpt.format.index import ArrayEntry
from unickpt.frameworks.protocol import Fragment
from unickpt.reuse.partial_save import Expert
from unickpt.saving.describe import Description


@dataclass(slots=True, eq=False)  # not frozen: a save makes one for each chunk, see `protocol`
class WriteItem:
    """One chunk that this process holds; never modified.

    Arguments:
        array: number of the array in this process's description.
        entry: the array.
        part: the part of the array.
        number: the chunk's row-major number in the part.
        position: its number among the chunks of all parts (see `commit.record`).
        box: its box in the global array.
        nbytes: of its elements in memory.
        fragment: holds its data.
        assumed: as `ArraySource.assumed`.
        expert: of which it is a part.
        borrowed: whether the chunk of the step before is saved, not its data.
    """

    array: int
    entry: ArrayEntry
    part: Part
    number: int
    position: int
    box: Box
    nbytes: int
    fragment: Fragment
    assumed: bool = False
    expert: Expert | None = None
    borrowed: bool = False

    @property
    def dtype(self) -> dtypes.DType:
        return dtypes.from_name(self.entry.dtype)


@dataclass(frozen=True)
class WritePlan:
    """The chunks of this process.

    Arguments:
        held: all that it could write, in the order of the description.
        own: those that it writes, in the order in which it does.
    """

    held: Sequence[WriteItem]
    own: Sequence[WriteItem]


def plan_writes(description: Description, process: int) -> WritePlan:
    """Plans what a process writes."""
    held = list(_held_items(description))
    own = _own_items(held, process)
    if description.experts:  # each expert is written to files of its own: see `Writer`
        own.sort(key=lambda item: item.expert or ("", -1))
    return WritePlan(held, own)


def _held_items(description: Description) -> Iterator[WriteItem]:
    """All chunks that this process could write, in the order of the description."""
    for array, (name, entry) in enumerate(description.index.arrays.items()):
        source = description.sources[name]
        selection = description.selection if name in description.experts else None
        fragments, assumed = source.fragments, source.assumed
        declared = entry.boxes == ()
        parts = (
            [chunk_grid.box_part(entry, f.box) for f in fragments]
            if declared
            else chunk_grid.parts(entry)
        )
        first = 0
        for part in parts:
            for fragment in fragments:
                for number in part.chunks_in(fragment.box):
                    box = part.chunk_box(number)
                    inside = box is fragment.box or fragment.box.contains(box)
                    assert inside, f"chunk {box} crosses {fragment.box}"
                    at, nbytes = first + number, box.size * entry.itemsize
                    item = WriteItem(array, entry, part, number, at, box, nbytes, fragment, assumed)
                    if selection is not None:
                        expert, borrowed = selection.of(name, box)
                        item = replace(item, expert=expert, borrowed=borrowed)
                    yield item
            first += part.count


def _own_items(held: Sequence[WriteItem], process: int) -> list[WriteItem]:
    """The chunks that a process writes; replicas are split among the processes that hold them."""
    if all(len(item.fragment.replicas) == 1 for item in held):
        return list(held)
    runs = [
        list(run)
        for _, run in itertools.groupby(held, lambda i: (i.array, i.part.key, i.fragment.box))
    ]
    mine: list[WriteItem] = []
    for assumed, share in (False, chunk_owners.shares), (True, chunk_owners.shares_of_assumed):
        of = [run for run in runs if run[0].assumed is assumed]
        for run, own in zip(of, share([_shared(run) for run in of], process), strict=True):
            mine += run[own.start : own.stop]
    return sorted(mine, key=attrgetter("array"))


def _shared(run: Sequence[WriteItem]) -> Shared:
    """What decides who writes the chunks of a part that lie in one fragment."""
    first = run[0]
    box, replicas = first.fragment.box, first.fragment.replicas
    nbytes = 0
    if len(replicas) > 1:
        nbytes = sum(codec.nbytes_as_stored(first.entry, item.box.shape) for item in run)
    return Shared(first.part.key, box.start, replicas, len(run), nbytes)


def check_alone(description: Description) -> None:
    """Checks, for a job of one process, that its `LocalFragments` cover their arrays.

    Raises:
        CoverageError: names the array and the gap.
    """
    for name, entry in description.index.arrays.items():
        if entry.boxes == ():
            fragments = description.sources[name].fragments
            check_boxes(entry, [(f.box, f.replicas) for f in fragments])
