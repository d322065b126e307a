"""Write plans: the chunks that this process writes, cut and staged."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from unickpt.arrays.dtypes import Array
from unickpt.errors import StateChanged
from unickpt.format import chunk_encoding, chunk_grid
from unickpt.frameworks.host_memory import HostBuffers, stage
from unickpt.references.value_places import WriteItem
from unickpt.saving.describe import Description

if TYPE_CHECKING:
    from unickpt.commit.writer_choice import Shared
    from unickpt.frameworks.job_bytes import JobBytes, Replicas
    from unickpt.frameworks.process_group import JobSession
    from unickpt.references.policy import ReferenceSource


_MOST_JOBS = 4  # trees


@dataclass(frozen=True)
class WritePlan:
    """The chunks of this process.

    Arguments:
        held_items: all that it could write, in the order of the description.
        own_items: those that it writes, in the order of writing.
        alone: whether no other process holds any of them.
        group_bytes: of the groups of replicas of which this process is one, without units.
        job: the bytes of all groups by which the chunks are shared out, if known.
    """

    held_items: Sequence[WriteItem]
    own_items: Sequence[WriteItem]
    alone: bool = False
    group_bytes: Mapping[Replicas, int] = field(default_factory=dict)
    job: JobBytes | None = None


@dataclass(frozen=True)
class Sharing:
    """The facts by which replicas are shared out, alike on all processes.

    Arguments:
        process: that plans.
        jobs: the bytes of trees that were saved before, the newest first.
        most_writers: how many replicas of a chunk may write it; None for all.
    """

    process: int
    jobs: Sequence[JobBytes] = ()
    most_writers: int | None = None

    def job_of(self, group_bytes: Mapping[Replicas, int]) -> JobBytes | None:
        """The bytes of the tree in which this process holds these groups, if known."""
        return next((job for job in self.jobs if job.describes(group_bytes)), None)


class LearnedBytes:
    """The bytes of a job's groups of replicas, as one save learns them for the next ones.

    Arguments:
        session: of the processes; None if nothing is kept for them.
    """

    job: JobBytes | None = None
    """Known after the commit; None if the next saves do not need it."""

    def __init__(self, session: JobSession | None) -> None:
        self._session = session
        self.jobs: tuple[JobBytes, ...] = () if session is None else session.jobs
        """Those of earlier saves, when this one was requested."""

    def remember(self) -> None:
        """Lets the next saves balance by this one. All processes call this at the same point of the
        program, not when they learn of the commit: else only some would plan the next save so."""
        if self._session is not None and self.job is not None:
            older = (job for job in self._session.jobs if job.digest != self.job.digest)
            self._session.jobs = (self.job, *older)[:_MOST_JOBS]


def plan_writes(description: Description, sharing: Sharing) -> WritePlan:
    """Plans what a process writes."""
    return _plan(list(_held_items(description)), description, sharing)


def plan_again(plan: WritePlan, description: Description, sharing: Sharing) -> WritePlan:
    """As `plan_writes`, from an earlier plan of the same tree, perhaps of a save of other units."""
    selection = description.selection
    job = sharing.job_of(plan.group_bytes) if sharing.jobs else None
    if selection is None or not description.units:
        if job == plan.job:
            return plan
        if plan.alone:  # replicas are not split
            return replace(plan, job=job)
        return _plan(plan.held_items, description, sharing)
    changed = dict[int, WriteItem]()
    for item in plan.held_items:
        if item.unit is not None:  # a chunk has one unit
            borrowed = not selection.writes(item.unit)
            if borrowed != item.borrowed:
                changed[id(item)] = item.with_borrowed(borrowed)
    held_items = [changed.get(id(item), item) for item in plan.held_items]
    if plan.alone:  # replicas are not split
        own_items = [changed.get(id(item), item) for item in plan.own_items]
        return replace(plan, held_items=held_items, own_items=own_items, job=job)
    return _plan(held_items, description, sharing)


def _plan(held_items: Sequence[WriteItem], description: Description, sharing: Sharing) -> WritePlan:
    alone = all(len(item.fragment.replicas) == 1 for item in held_items)
    group_bytes = _bytes_by_group(held_items) if description.index.processes > 1 else {}
    job = sharing.job_of(group_bytes) if sharing.jobs else None
    own_items = list(held_items) if alone else _own_items(held_items, sharing, job, description)
    if description.units:  # each unit is written to files of its own: see `Writer`
        own_items.sort(key=lambda item: item.unit or ("", -1))
    return WritePlan(held_items, own_items, alone, group_bytes, job)


def _bytes_by_group(held_items: Sequence[WriteItem]) -> Mapping[Replicas, int]:
    """The bytes of the groups of replicas of which this process is one, without units; those of
    assumed replicas under an empty group."""
    # By identity: hashing thousands of processes takes long.
    groups_by_id: dict[int, tuple[Replicas, int]] = {}
    for item in held_items:
        if item.unit is None:
            replicas: Replicas = () if item.assumed else item.fragment.replicas
            _, nbytes = groups_by_id.get(id(replicas), ((), 0))
            groups_by_id[id(replicas)] = replicas, nbytes + _stored_bytes(item)
    group_bytes: dict[Replicas, int] = {}
    for replicas, nbytes in groups_by_id.values():
        group_bytes[replicas] = group_bytes.get(replicas, 0) + nbytes
    return group_bytes


def _stored_bytes(item: WriteItem) -> int:
    # Without a codec as in memory: other processes may have more pieces.
    if item.entry.codec is None:
        return item.nbytes
    return chunk_encoding.nbytes_as_stored(item.entry, item.box.shape)


def _held_items(description: Description) -> Iterator[WriteItem]:
    """All chunks that this process could write, in the order of the description."""
    skipped = description.skipped
    for array, (name, entry) in enumerate(description.index.arrays.items()):
        source = description.sources[name]
        selection = description.selection if name in description.units else None
        fragments, assumed = source.fragments, source.assumed
        parts = chunk_grid.parts_of(entry, [fragment.box for fragment in fragments])
        itemsize, first = source.dtype.itemsize, 0
        # None of it is staged: it is saved in as few pieces as it has fragments.
        is_lent = skipped is not None and selection is None and entry.codec is None
        for part in parts:
            for fragment in fragments:
                if skipped is not None and is_lent and skipped.skips(name, fragment.box):
                    for run in part.runs_in(fragment.box):
                        every = run == range(part.count)
                        boxes = [part.box] if every else map(part.chunk_box, run)
                        nbytes = sum(box.size for box in boxes) * itemsize
                        args = (
                            array,
                            entry,
                            part,
                            run.start,
                            first + run.start,
                            fragment.box,
                            nbytes,
                        )
                        yield WriteItem(*args, fragment, assumed, None, True, len(run))
                    continue
                for number in part.chunks_in(fragment.box):
                    box = part.chunk_box(number)
                    inside = box is fragment.box or fragment.box.contains(box)
                    assert inside, f"chunk {box} crosses {fragment.box}"
                    position, nbytes = first + number, box.size * itemsize
                    unit, borrowed = None, False
                    if selection is not None:
                        unit, borrowed = selection.unit_at(name, box)
                    if skipped is not None and skipped.skips_chunk(name, box):
                        borrowed = True
                    args = array, entry, part, number, position, box, nbytes
                    yield WriteItem(*args, fragment, assumed, unit, borrowed)
            first += part.count


def _own_items(
    held_items: Sequence[WriteItem],
    sharing: Sharing,
    job: JobBytes | None,
    description: Description,
) -> list[WriteItem]:
    """The chunks that a process writes; replicas are split among the processes that hold them.

    Chunks of units are split first and on their own, the same way in each save, so that a process
    finds the chunks that it leaves out in its own files. Then the others are split, so that all
    processes write the same amount.
    """
    from unickpt.commit import writer_choice  # only where several processes hold the same

    runs = [
        list(run)
        for _, run in itertools.groupby(held_items, lambda i: (i.array, i.part.key, i.fragment.box))
    ]
    mine: list[WriteItem] = []
    selection = description.selection
    alone = {} if selection is None else selection.bytes_by_process
    most = sharing.most_writers
    for work, candidate_runs in (
        (
            writer_choice.Workload(most_writers=most),
            [run for run in runs if run[0].unit is not None] if description.units else [],
        ),
        (
            writer_choice.Workload(alone, job, most),
            [run for run in runs if run[0].unit is None] if description.units else runs,
        ),
    ):
        for assumed, share in (
            (False, writer_choice.shares),
            (True, writer_choice.shares_of_assumed),
        ):
            matching_runs = [run for run in candidate_runs if run[0].assumed is assumed]
            shared = [_shared(run) for run in matching_runs]
            for run, positions in zip(
                matching_runs, share(shared, sharing.process, work), strict=True
            ):
                mine += _some_of(run, positions)
    return sorted(mine, key=attrgetter("array"))


def _some_of(run: Sequence[WriteItem], positions: range) -> Iterator[WriteItem]:
    """Some of the chunks of a run, by their positions in it."""
    first = 0
    for item in run:
        low, high = max(positions.start - first, 0), min(positions.stop - first, item.count)
        if low < high:
            yield item.select(range(low, high))
        first += item.count


def _shared(run: Sequence[WriteItem]) -> Shared:
    """The facts that determine the writer of the chunks of a part in one fragment."""
    from unickpt.commit.writer_choice import Shared

    first = run[0]
    box, replicas = first.fragment.box, first.fragment.replicas
    nbytes = 0
    if len(replicas) > 1:
        nbytes = sum(map(_stored_bytes, run))
    return Shared(first.part.key, box.start, replicas, sum(i.count for i in run), nbytes)


def check_alone(description: Description) -> None:
    """Checks, for a job of one process, that its `LocalFragments` cover their arrays.

    Raises:
        CoverageError: names the array and the gap.
    """
    for name, entry in description.index.arrays.items():
        if entry.boxes == ():
            from unickpt.format.coverage import check_boxes

            fragments = description.sources[name].fragments
            check_boxes(entry, [(f.box, f.replicas) for f in fragments])


@dataclass(slots=True, eq=False)  # not frozen: see `adapter_protocol`
class StagedChunk:
    """A chunk in host memory, unchanged until `release`; never modified.

    Arguments:
        data: the chunk, contiguous and in native byte order.
        nbytes: memory that this holds, beyond the state itself and bytes already counted.
        release: releases the memory.
    """

    data: Array
    nbytes: int
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Staged:
    """Statistics of the chunks that were staged in advance; see `SaveReport`."""

    staged_bytes: int = 0
    drained_bytes: int = 0
    budget_wait_s: float = 0.0


class ChunkSource(Protocol):
    """The source of a writer's chunks.

    `background` says whether it is written in the background of a training loop.
    """

    background: bool

    @property
    def staged(self) -> Staged: ...

    def ready(self, items: Sequence[WriteItem]) -> bool:
        """Whether `fetch` returns without waiting."""

    def fetch(self, item: WriteItem) -> StagedChunk:
        """Waits until a chunk is staged, and returns it."""

    def digest(self, item: WriteItem) -> int:
        """The digest of a chunk, which can still be fetched afterwards."""


class DirectSource:
    """Stages chunks when they are written, from memory that does not change.

    Arguments:
        budget_bytes: bytes of memory to keep for copies.
    """

    background = False
    staged = Staged()

    def __init__(self, budget_bytes: int) -> None:
        self._buffers = HostBuffers(budget_bytes)

    def ready(self, items: Sequence[WriteItem]) -> bool:
        return True

    def fetch(self, item: WriteItem) -> StagedChunk:
        buffers: list[Array] = []

        def take(nbytes: int) -> Array:
            buffers.append(self._buffers.take(nbytes))
            return buffers[0]

        try:
            data = stage(item.fragment, item.box, item.dtype, take)
        except StateChanged as error:
            raise naming(error, item) from None
        # Kept for every chunk until its commit: as few objects as possible, because Python's
        # garbage collector visits each repeatedly.
        if not buffers:
            return StagedChunk(data, 0, _nothing_to_release)
        return StagedChunk(data, data.nbytes, partial(self._buffers.give, buffers[0]))

    def digest(self, item: WriteItem) -> int:
        staged = self.fetch(item)
        try:
            return chunk_encoding.digest_as_stored(item.entry, staged.data)
        finally:
            staged.release()


def _nothing_to_release() -> None:
    """The release of a chunk that is a view of the state itself, or its own memory."""


class BorrowingSource:
    """Takes some chunks from the base of a save, to write them again.

    Arguments:
        source: provides the others.
        base: has the borrowed chunks.
    """

    def __init__(self, source: ChunkSource, base: ReferenceSource) -> None:
        self._source, self._base = source, base
        self.background = source.background

    @property
    def staged(self) -> Staged:
        return self._source.staged

    def ready(self, items: Sequence[WriteItem]) -> bool:
        return self._source.ready([item for item in items if not item.borrowed])

    def fetch(self, item: WriteItem) -> StagedChunk:
        if not item.borrowed:
            return self._source.fetch(item)
        data = self._base.read(item)
        return StagedChunk(data, data.nbytes, _nothing_to_release)

    def digest(self, item: WriteItem) -> int:
        if not item.borrowed:
            return self._source.digest(item)
        return self._base.digest(item)


def naming(error: StateChanged, item: WriteItem) -> StateChanged:
    """The error that names the array if its memory is gone when a chunk is read."""
    return StateChanged(
        f"array {item.entry.name!r} {item.box}: {error} after the save was requested and before "
        "it was read. The checkpoint was not saved. Call PendingSave.wait_staged() before that "
        'change, or save with SaveOptions(staging="copy")'
    )
