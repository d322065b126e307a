"""Reading: which chunks serve the boxes of an array; each is read once, checked, and placed."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from unickpt import dtypes, plan, strided
from unickpt.adapt import Array, ArrayTarget
from unickpt.adapters.numpy import NumpyTarget
from unickpt.box import Box
from unickpt.errors import CheckpointCorrupt, LoadMismatch
from unickpt.index import ArrayEntry
from unickpt.options import LoadOptions
from unickpt.plan import Part
from unickpt.stage import Scratch, Window

if TYPE_CHECKING:
    from unickpt.checkpoint import Checkpoint

_REMOTE_THREADS = 32
# A task reads chunks one after the other; small ones share a task, to save on scheduling.
TASK_BYTES = 1 << 20
TASK_CHUNKS = 256


def threads_for(stored: Checkpoint, name: str) -> ThreadPoolExecutor:
    """Threads that read chunks: many where each request crosses a network."""
    local = max(4, 2 * (os.cpu_count() or 1))
    count = _REMOTE_THREADS if stored.location.is_remote else local
    return ThreadPoolExecutor(count, thread_name_prefix=name)


@dataclass(frozen=True)
class Job:
    """One array to read, and where it goes: under several names where it was tied, or is asked
    for more than once."""

    entry: ArrayEntry
    targets: Mapping[str, ArrayTarget]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all destinations."""
        return sum(
            box.size * target.dtype.itemsize for target in self.targets.values()
            for box in target.boxes
        )  # fmt: skip


class NewTarget(NumpyTarget):
    """A new NumPy array of what is stored."""

    def __init__(self, entry: ArrayEntry) -> None:
        self.leaf, self.shape, self.dtype = None, entry.shape, dtypes.from_name(entry.dtype)
        self.boxes, self.in_place, self.identity = (Box.whole(entry.shape),), False, None


class NumberTarget(NewTarget):
    """A plain number out of a 0-d array."""

    def finish(self, buffers: Sequence[Array]) -> Any:
        return buffers[0].item()


@dataclass(frozen=True)
class _Read:
    """One chunk to read, and the buffers that want a piece of it."""

    entry: ArrayEntry
    part: Part
    number: int
    box: Box
    row: Any
    wanted_by: tuple[tuple[Box, Array], ...]


def read_arrays(stored: Checkpoint, jobs: Sequence[Job], options: LoadOptions) -> dict[str, Any]:
    """Reads arrays; every chunk that any of a job's boxes needs is read exactly once."""
    done: dict[str, Any] = {}
    window = Window(options.budget_bytes)
    reader = _Reader(stored)
    try:
        for job in jobs:
            window.make_room(job.nbytes)
            window.add(job.nbytes, _start(stored, job, options.verify, reader, done))
        window.drain()
    finally:
        reader.close()
    return done


def _start(
    stored: Checkpoint, job: Job, verify: bool, reader: _Reader, done: dict[str, Any]
) -> Callable[[], None]:
    """Starts to read an array; the result waits for it and finishes the leaf."""
    stored.check_backed(job.entry)
    buffers = _buffers(stored, job)
    wanted = _distinct(job, buffers)
    pending = {reader.submit(read) for read in _reads(stored, job.entry, wanted, verify)}

    def finish() -> None:
        for task in pending:
            reader.wait(task)
        for name, target in job.targets.items():
            done[name] = target.finish(buffers.pop(name))

    return finish


def _buffers(stored: Checkpoint, job: Job) -> dict[str, list[Array]]:
    try:
        return {
            name: [target.buffer(i) for i in range(len(target.boxes))]
            for name, target in job.targets.items()
        }
    except (MemoryError, ValueError) as error:
        raise MemoryError(
            f"{stored.location}: no memory for array {job.entry.name!r}, "
            f"{job.entry.dtype}{list(job.entry.shape)}: {error}"
        ) from None


def _distinct(job: Job, buffers: Mapping[str, list[Array]]) -> list[tuple[Box, Array]]:
    """The boxes with their buffers; targets that share their memory are filled once."""
    first: dict[Hashable, str] = {}
    wanted: list[tuple[Box, Array]] = []
    for name, target in job.targets.items():
        if target.identity is None or first.setdefault(target.identity, name) == name:
            wanted += zip(target.boxes, buffers[name], strict=True)
    return wanted


def _reads(
    stored: Checkpoint, entry: ArrayEntry, wanted: list[tuple[Box, Array]], verify: bool
) -> Iterator[_Read]:
    table = stored.digests_of(entry.name) if verify else None
    first = 0
    for part in plan.parts(entry):
        by_chunk: dict[int, list[tuple[Box, Array]]] = {}
        for box, buffer in wanted:
            for number in part.chunks_in(box):
                by_chunk.setdefault(number, []).append((box, buffer))
        for number, by in sorted(by_chunk.items()):
            row = None if table is None else table[first + number]
            yield _Read(entry, part, number, part.chunk_box(number), row, tuple(by))
        first += part.count


class _Task:
    """Chunks that one thread reads, one after the other."""

    def __init__(self) -> None:
        self.reads: list[_Read] = []
        self.nbytes = 0
        self.future: Future[None] | None = None


class _Reader:
    """Threads that read chunks; small chunks, of different arrays too, share a task."""

    def __init__(self, stored: Checkpoint) -> None:
        self._pool = threads_for(stored, "unickpt-load")
        self._stored, self._scratch, self._task = stored, Scratch(), _Task()

    def submit(self, read: _Read) -> _Task:
        """Adds a chunk to a task, which starts once it is worth a thread's while."""
        task = self._task
        task.reads.append(read)
        task.nbytes += read.box.size * dtypes.from_name(read.entry.dtype).itemsize
        if task.nbytes >= TASK_BYTES or len(task.reads) == TASK_CHUNKS:
            self._flush()
        return task

    def wait(self, task: _Task) -> None:
        """Waits for a task, and raises what went wrong in it."""
        if task.future is None:
            self._flush()
        assert task.future is not None, "only the newest task has not started"
        task.future.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _flush(self) -> None:
        task, self._task = self._task, _Task()
        task.future = self._pool.submit(self._run, task.reads)

    def _run(self, reads: list[_Read]) -> None:
        stored = self._stored
        requests = [stored.request_chunk(r.entry, r.part, r.number) for r in reads]
        for read, requested in zip(reads, requests, strict=True):
            there = _direct(read)
            if there is not None:
                self._fetch(read, there, requested)
                continue
            piece = self._scratch.array(read.box.shape, dtypes.from_name(read.entry.dtype))
            self._fetch(read, piece, requested)
            for box, buffer in read.wanted_by:
                common = read.box.intersect(box)
                assert common is not None, "a chunk is read only for boxes that meet it"
                source = piece[common.relative_to(read.box.start).slices]
                _place(source, buffer, common.relative_to(box.start), read.entry.name)

    def _fetch(self, read: _Read, out: Array, requested: Any) -> None:
        stored, row = self._stored, read.row
        if not stored.read_chunk(read.entry, read.part, read.number, row, out, requested):
            raise CheckpointCorrupt(
                f"{stored.location}: array {read.entry.name!r} {read.box}, written by process "
                f"{row['process']}: the stored bytes do not match their digest"
            )


def _direct(read: _Read) -> Array | None:
    """The memory where a chunk can land as it is: contiguous, of its dtype, wanted only there."""
    box, buffer = read.wanted_by[0]
    if len(read.wanted_by) > 1 or buffer.dtype != dtypes.from_name(read.entry.dtype):
        return None
    if not box.contains(read.box):
        return None
    there = buffer[read.box.relative_to(box.start).slices]
    return there if there.flags.c_contiguous else None


def _place(source: Array, buffer: Array, at: Box, name: str) -> None:
    if source.dtype == buffer.dtype:
        strided.copy(buffer[at.slices], source)
        return
    if not dtypes.holds_all(buffer.dtype, source):
        raise LoadMismatch(
            f"array {name!r}: stored as {source.dtype}, asked for as {buffer.dtype}, which does "
            "not hold all its values; load it as it is stored"
        )
    buffer[at.slices] = source.astype(buffer.dtype)


def read_box(stored: Checkpoint, entry: ArrayEntry, box: Box, *, verify: bool) -> Array:
    """A box of an array as a new NumPy array."""
    target = NewTarget(entry)
    target.shape, target.boxes = box.shape, (box,)
    options = LoadOptions(verify=verify)
    found: Array = read_arrays(stored, [Job(entry, {entry.name: target})], options)[entry.name]
    return found
