"""Write plans: which process writes which chunk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.commit import chunk_owners
from unickpt.format import chunk_grid
from unickpt.format.chunk_grid import Part
from unickpt.format.coverage import check_boxes
from unickpt.format.index import ArrayEntry
from unickpt.frameworks.protocol import Fragment
from unickpt.saving.describe import Description


@dataclass(frozen=True, eq=False)
class ChunkJob:
    """One chunk that this process holds.

    Arguments:
        array: number of the array in this process's description.
        entry: the array.
        part: the part of the array.
        number: the chunk's row-major number in the part.
        position: its number among the chunks of all parts (see `unickpt.commit.record`).
        box: its box in the global array.
        fragment: holds its data.
        assumed: as `ArraySource.assumed`.
    """

    array: int
    entry: ArrayEntry
    part: Part
    number: int
    position: int
    box: Box
    fragment: Fragment
    assumed: bool = False

    @property
    def dtype(self) -> dtypes.DType:
        return dtypes.from_name(self.entry.dtype)

    @property
    def nbytes(self) -> int:
        return self.box.size * self.dtype.itemsize


def held_chunks(description: Description) -> Iterator[ChunkJob]:
    """All chunks that this process could write, in the order of the description."""
    for array, (name, entry) in enumerate(description.index.arrays.items()):
        source = description.sources[name]
        fragments, assumed = source.fragments, source.assumed
        told = entry.boxes == ()
        parts = (
            [chunk_grid.box_part(entry, f.box) for f in fragments]
            if told
            else chunk_grid.parts(entry)
        )
        first = 0
        for part in parts:
            for fragment in fragments:
                for number in part.chunks_in(fragment.box):
                    box = part.chunk_box(number)
                    assert fragment.box.contains(box), f"chunk {box} crosses {fragment.box}"
                    at = first + number
                    yield ChunkJob(array, entry, part, number, at, box, fragment, assumed)
            first += part.count


def own_share(held: Sequence[ChunkJob], process: int) -> list[ChunkJob]:
    """The chunks that a process writes; replicas are split among the processes that hold them."""
    assumed = [job for job in held if job.assumed]
    mine = _own_assumed(assumed, process) if assumed else []
    known = [job for job in held if not job.assumed] if assumed else held
    for _, run in itertools.groupby(known, lambda j: (j.array, j.part.key, j.fragment.box)):
        jobs = list(run)
        name, fragment = jobs[0].entry.name, jobs[0].fragment
        share = chunk_owners.chunks_of_replica(
            name, fragment.box, process, fragment.replicas, len(jobs)
        )
        mine += [jobs[k] for k in share]
    return sorted(mine, key=attrgetter("array"))


def _own_assumed(held: Sequence[ChunkJob], process: int) -> list[ChunkJob]:
    """The same for arrays that all processes are assumed to hold, split over all of them."""
    # By name: dicts may have another order on other processes.
    jobs = sorted(held, key=lambda job: (job.entry.name, job.number))
    sizes = [job.nbytes for job in jobs]
    whole = [chunk_grid.is_whole(job.entry, job.part) for job in jobs]
    writers = chunk_owners.share_assumed(sizes, whole, len(jobs[0].fragment.replicas))
    return [job for job, writer in zip(jobs, writers, strict=True) if writer == process]


def check_alone(description: Description) -> None:
    """Checks, for a job of one process, that its `LocalFragments` cover their arrays.

    Raises:
        CoverageError: names the array and the gap.
    """
    for name, entry in description.index.arrays.items():
        if entry.boxes == ():
            fragments = description.sources[name].fragments
            check_boxes(entry, [(f.box, f.replicas) for f in fragments])
