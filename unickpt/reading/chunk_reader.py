"""Reads chunks on threads, each once, checks and places them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import compress
from operator import attrgetter, itemgetter, mul
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from unickpt.arrays import dtypes, strided_copy
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array, DType
from unickpt.errors import out_of_memory
from unickpt.format import chunk_grid
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry, nbytes_of
from unickpt.format.reader import Reader, Request
from unickpt.frameworks.host_memory import Scratch, prefer_huge_pages
from unickpt.reading.options import LoadOptions
from unickpt.reading.read_plan import (
    ChunkRead,
    Job,
    Planner,
    StoredJob,
    buffer_of,
    buffers_of,
    consumers_of,
    fill,
    narrowed,
    slots_of,
)
from unickpt.reading.targets import NewTarget
from unickpt.storage.local_files import files_kept_open
from unickpt.threads import Pool, Window, in_batches

if TYPE_CHECKING:
    from unickpt.progress import ProgressFunction
    from unickpt.reading.recipes import Copy, Recipe

T = TypeVar("T")
ReadArrays = Callable[[Reader, Sequence[Job]], dict[str, Any]]
"""Reads arrays of a checkpoint; see `read_arrays`."""

_NAME = "unickpt-load"  # of threads
_MOST_THREADS = 32  # of remote storage so many, because each request crosses a network
# A task reads chunks in sequence; small chunks share a task, to reduce scheduling overhead. From a
# disk also larger ones do, if enough tasks are left for each thread.
TASK_BYTES, _MOST_TASK_BYTES = 1 << 20, 16 << 20
TASK_CHUNKS = 256
_TASKS_PER_THREAD = 4


@cache
def _local_threads() -> int:
    return min(_MOST_THREADS, max(4, 2 * (os.cpu_count() or 1)))


def read_arrays(
    stored: Reader,
    jobs: Sequence[Job],
    options: LoadOptions,
    reader: ChunkReader | None = None,
    filled: Filled | None = None,
) -> dict[str, Any]:
    """Reads arrays; reads every chunk that a job needs exactly once.

    Arguments:
        stored: the checkpoint.
        jobs: what to read.
        options: see `LoadOptions`.
        reader: of this checkpoint, to reuse its threads for several calls.
        filled: counts the bytes of destinations.
    """
    filled = filled or Filled(jobs)
    stored = _checking(stored, jobs) if options.verify and reader is None else stored
    done: dict[str, Any] = {}
    whole, others = _whole_jobs(jobs)
    sizes = [nbytes_of(job.entry.shape, job.entry.dtype) for job in whole]
    is_small = len(whole) <= TASK_CHUNKS and sum(sizes) <= TASK_BYTES
    # To start a thread for one piece of work takes as long as to read a megabyte.
    own = reader or ChunkReader(stored, alone=not others and (is_small or len(whole) == 1))
    window = Window(options.working_bytes)
    work = _Reads(stored, Planner(stored, options.verify), own, window, filled, done)
    try:
        if reader is None:
            own.expect(sum(sizes) + sum(map(attrgetter("nbytes"), others)))
        sized = zip(whole, sizes, strict=True)
        for batch in in_batches(sized, TASK_CHUNKS, own.task_bytes, itemgetter(1)):
            together, nbytes = zip(*batch, strict=True)
            others += work.start_whole(together, sum(nbytes))
        for job in others:
            work.start(job)
        window.drain()
    except MemoryError as error:
        raise out_of_memory(f"reading {stored.location}", error) from error
    finally:
        if reader is None:
            own.close()
    return done


def _checking(stored: Reader, jobs: Sequence[Job]) -> Reader:
    """A checkpoint that compares checksums, if about as much is asked as is stored: those of other
    formats are of whole arrays."""
    if not stored.has_wide_checksums:
        return stored
    entries = {entry.name: entry.nbytes for job in jobs for entry in job.entries}
    is_most = sum(job.nbytes for job in jobs) >= sum(entries.values())
    return stored.checking() if is_most else stored


class Filled:
    """The bytes of the destinations of jobs, as they are filled.

    Arguments:
        jobs: all jobs.
        told: called with the bytes that are filled, and those of all; None for nobody.
    """

    def __init__(self, jobs: Sequence[Job], told: ProgressFunction | None = None) -> None:
        self._total = 0 if told is None else sum(job.nbytes for job in jobs)
        self._done, self._told = 0, told
        self._parts = dict[str, int]()  # of jobs that are not whole yet, by their first target
        if told is not None:
            told(0, self._total)

    def part(self, job: Job, ended: int, of: int) -> None:
        """Counts the part of a job that is filled: so many of its chunks, or of its tasks."""
        if self._told is not None:
            self._parts[next(iter(job.targets))] = job.nbytes * ended // of
            self._told(self._done + sum(self._parts.values()), self._total)

    def whole(self, jobs: Sequence[Job], nbytes: int) -> None:
        """Counts jobs that are filled."""
        self._done += nbytes
        for job in jobs if self._parts else ():
            self._parts.pop(next(iter(job.targets)), None)
        if self._told is not None:
            self._told(self._done + sum(self._parts.values()), self._total)


@dataclass
class _Reads:
    """What a call of `read_arrays` has; see there."""

    stored: Reader
    planner: Planner
    reader: ChunkReader
    window: Window
    filled: Filled
    done: dict[str, Any]

    def start(self, job: Job) -> None:
        """Starts to read an array, when there is room; the window waits for it and finishes the
        leaf."""
        nbytes = job.nbytes
        self.window.make_room(nbytes)
        for entry in job.entries:
            self.stored.check_backed(entry)
        buffers = buffers_of(self.stored, job)
        slots = slots_of(job)
        fill(slots, buffers, self.planner.verify)
        reads = self.planner.reads(consumers_of(slots, buffers))
        # Each once, in the order in which they are read: progress is told as they end.
        pending = dict.fromkeys(self.reader.submit(read) for read in reads)

        def finish() -> None:
            for ended, task in enumerate(pending, 1):
                self.reader.wait(task)
                self.filled.part(job, ended, len(pending))
            self.filled.whole([job], nbytes)
            for name, target in job.targets.items():
                self.done[name] = target.finish(buffers.pop(name))

        self.window.add(nbytes, finish)

    def start_whole(self, batch: Sequence[StoredJob], nbytes: int) -> list[Job]:
        """As `start`, for arrays that are read whole, on one thread.

        Arguments:
            batch: the arrays.
            nbytes: of all of them.

        Returns:
            The jobs of those that have to be read otherwise, because their memory is not
            contiguous.
        """
        self.window.make_room(nbytes)
        digests: Sequence[int | None] = [None] * len(batch)
        rows = self.stored.first_digests([job.entry for job in batch])  # before there is memory
        is_large = nbytes > TASK_BYTES  # then it may be of one array
        for job in batch if rows is None or is_large else ():
            self.stored.check_backed(job.entry)
        if rows is not None and self.planner.verify:
            digests = rows["digest"].tolist()
        memory = [buffer_of(self.stored, job.name, job.target, 0) for job in batch]
        for to in memory if is_large else ():
            prefer_huge_pages(to)
        plain = [to.flags.c_contiguous for to in memory]
        whole, out = list(compress(batch, plain)), list(compress(memory, plain))
        read = sum(map(attrgetter("nbytes"), out))
        requests = [
            Request(job.entry, _only_part(job.entry), 0, to, digest)
            for job, to, digest in zip(whole, out, compress(digests, plain), strict=True)
        ]
        ended = self.reader.submit_requests(requests)

        def finish() -> None:
            ended.result()
            self.filled.whole(whole, read)
            for job, to in zip(whole, out, strict=True):
                self.done[job.name] = job.target.finish([to])

        self.window.add(nbytes, finish)
        return [job for job, is_plain in zip(batch, plain, strict=True) if not is_plain]


class Task:
    """Chunks that one thread reads in sequence."""

    def __init__(self) -> None:
        self.reads: list[ChunkRead] = []
        self.nbytes = 0
        self.future: Future[Any] | None = None


class ChunkReader:
    """Threads that read chunks, many if each request crosses a network; small chunks share a task,
    also across arrays.

    Arguments:
        stored: the checkpoint.
        name, background: of the threads; see `Pool`.
        alone: whether the calling thread reads, because there is one piece of work.
    """

    def __init__(
        self, stored: Reader, name: str = _NAME, *, background: bool = False, alone: bool = False
    ) -> None:
        threads = _MOST_THREADS if stored.location.is_remote else _local_threads()
        self._pool = Pool(0 if alone else threads, name, background=background)
        self._files = ExitStack()
        self._files.enter_context(files_kept_open())
        self._stored, self._scratch, self._task = stored, Scratch(), Task()
        self.task_bytes = TASK_BYTES

    def expect(self, nbytes: int) -> None:
        """Makes tasks as large as is good for so many bytes in all."""
        if not self._stored.location.is_remote:
            each = nbytes // (_TASKS_PER_THREAD * _local_threads())
            self.task_bytes = min(max(each, TASK_BYTES), _MOST_TASK_BYTES)

    def submit(self, read: ChunkRead) -> Task:
        """Adds a chunk to a task, which starts once it is large enough for a thread."""
        task = self._task
        task.reads.append(read)
        task.nbytes += read.box.size * dtypes.from_name(read.entry.dtype).itemsize
        if task.nbytes >= self.task_bytes or len(task.reads) == TASK_CHUNKS:
            self._flush()
        return task

    def submit_requests(self, requests: Sequence[Request]) -> Future[None]:
        """Reads chunks on a thread."""
        return self._pool.submit(self._read, requests)

    def wait(self, task: Task) -> Any:
        """Waits for a task; returns its result or raises its error."""
        if task.future is None:
            self._flush()
        assert task.future is not None, "only the newest task has not started"
        return task.future.result()

    def work(self, function: Callable[[T], object], items: Sequence[T]) -> None:
        """Calls a function with each item, on the threads."""
        for _ in self._pool.map(function, items):
            pass

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._files.close()

    def _flush(self) -> None:
        task, self._task = self._task, Task()
        task.future = self._pool.submit(self._run, task.reads)

    def _run(self, reads: list[ChunkRead]) -> Any:
        """Reads the chunks of one task; `wait` returns the result."""
        indirect: list[ChunkRead] = []
        requests: list[Request] = []
        for read in reads:
            if self._stored.reads_boxes(read.entry):
                read = narrowed(read)
            there = _direct(read)
            if there is None:
                indirect.append(read)
            else:
                requests.append(read.request(there))
        self._read(requests)
        for batch in in_batches(indirect, TASK_CHUNKS, TASK_BYTES, attrgetter("nbytes")):
            memory = self._memory(batch)
            self._read([read.request(to) for read, to in zip(batch, memory, strict=True)])
            for read, chunk in zip(batch, memory, strict=True):
                for piece in read.pieces:
                    piece.place(chunk)

    def _memory(self, reads: Sequence[ChunkRead]) -> Sequence[Array]:
        """Memory for chunks, until this thread asks for that of others."""
        kinds = [(read.box.shape, dtypes.from_name(read.entry.dtype)) for read in reads]
        try:
            return self._scratch.arrays(kinds)
        except MemoryError as error:
            where = f"{self._stored.location}: array {reads[0].entry.name!r} {reads[0].box}"
            raise out_of_memory(where, error) from None

    def _read(self, requests: Sequence[Request]) -> None:
        for at in self._stored.read(requests) if requests else ():
            raise self._mismatch(requests[at])

    def _mismatch(self, request: Request) -> Exception:
        stored, entry, part, number = self._stored, request.entry, request.part, request.number
        rows, before = stored.digests_of(entry.name), 0
        for first, other in chunk_grid.numbered_parts(entry):
            before = first if other.box == part.box else before
        process = "?" if rows is None else rows[before + number]["process"]
        return stored.damaged(
            f"array {entry.name!r} {part.chunk_box(number)}, written by process {process}: "
            "the stored bytes do not match their digest"
        )


def _direct(read: ChunkRead) -> Array | None:
    """The destination into which a chunk can be read directly: contiguous, of its dtype, the only
    one."""
    copy, out, source = read.pieces[0]
    if len(read.pieces) > 1 or out.size != read.box.size or not out.flags.c_contiguous:
        return None
    if not source.is_exact or out.dtype != dtypes.from_name(read.entry.dtype):
        return None
    return out.reshape(read.box.shape) if _in_order(copy, read.box.shape) else None


def _in_order(copy: Copy, shape: tuple[int, ...]) -> bool:
    """Whether a copy takes the whole chunk in its stored order."""
    if copy.shape == shape and copy.source_steps == strided_copy.unit_steps(len(shape)):
        return True
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    below = 1
    for n, steps in zip(reversed(copy.shape), reversed(copy.source_steps), strict=True):
        if n > 1 and sum(map(mul, steps, strides)) != below:
            return False
        below *= n
    return True


def read_box(stored: Reader, entry: ArrayEntry, box: Box, *, verify: bool) -> Array:
    """A box of a stored array as a new NumPy array."""
    job = StoredJob(entry.name, NewTarget(entry, box), entry)
    found: Array = read_arrays(stored, [job], LoadOptions(verify=verify))[entry.name]
    return found


def read_made(
    stored: Reader,
    entry: ArrayEntry,
    recipe: Recipe,
    box: Box,
    options: LoadOptions,
    reader: ChunkReader | None = None,
) -> Array:
    """A box of an array made by a recipe, as a new NumPy array with an entry's dtype."""
    job = Job({entry.name: NewTarget(entry, box)}, {entry.name: recipe})
    found: Array = read_arrays(stored, [job], options, reader)[entry.name]
    return found


class _Kind(NamedTuple):
    """What arrays of one shape and dtype have in common."""

    dtype: DType
    boxes: tuple[Box, ...]


def _whole_jobs(jobs: Sequence[Job]) -> tuple[list[StoredJob], list[Job]]:
    """The jobs that read an array whole that is one chunk; and the others."""
    whole: list[StoredJob] = []
    others: list[Job] = []
    for job in jobs:
        if isinstance(job, StoredJob) and _is_one_chunk(job.entry):
            target, kind = job.target, _kind(job.entry.shape, job.entry.dtype)
            if target.dtype == kind.dtype and tuple(target.boxes) == kind.boxes:
                whole.append(job)
                continue
        others.append(job)
    whole.sort(key=attrgetter("entry.name"))  # as in the database: neighbours are in one file
    return whole, others


@lru_cache(maxsize=4096)
def _kind(shape: tuple[int, ...], dtype: str) -> _Kind:
    return _Kind(dtypes.from_name(dtype), (Box.whole(shape),))


def _only_part(entry: ArrayEntry) -> Part:
    """The part of an array that is one chunk."""
    box = _kind(entry.shape, entry.dtype).boxes[0]
    return Part(entry.name, box, entry.chunk, (1,) * len(entry.shape), 1)


def _is_one_chunk(entry: ArrayEntry) -> bool:
    """Whether an array is stored as one chunk.

    A model may have 100,000 small ones. What it costs to read one is then not its bytes, but
    Python's work for a chunk; so no more is made of it than a `Request`.
    """
    return entry.shape == entry.chunk and not entry.cut and entry.boxes is None
