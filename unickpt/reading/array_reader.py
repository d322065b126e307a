"""Reads arrays into their destinations, each chunk that they need once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from unickpt.arrays import dtypes, strided_copy
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array, DType
from unickpt.errors import OutOfMemory, out_of_memory
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry, nbytes_of
from unickpt.format.reader_protocol import Reader, Request
from unickpt.frameworks.adapter_protocol import ArrayTarget, Uploader
from unickpt.frameworks.host_memory import prefer_huge_pages
from unickpt.reading.chunk_reader import TASK_BYTES, TASK_CHUNKS, ChunkReader, Task, mismatch
from unickpt.reading.load_options import LoadOptions
from unickpt.reading.read_plan import Consumer, Planner, TargetBox, consumers_of
from unickpt.reading.recipes import Recipe, Unchanged
from unickpt.reading.targets import NewTarget, put
from unickpt.storage.regular_files import files_kept_open
from unickpt.threads import Window, in_batches

if TYPE_CHECKING:
    from concurrent.futures import Future

    from unickpt.progress import ProgressFunction

_NBYTES, _OUT, _PROCESSES = attrgetter("nbytes"), attrgetter("out"), attrgetter("processes")


class Job:
    """Arrays to read together, because they are tied, requested more than once, or need the same
    chunks.

    An array that is loaded as stored needs only this object; of the 100,000 arrays that a model may
    have, nearly all are.

    Arguments:
        targets: the destinations, by name.
        recipes: their sources, by the same names.
        entry: instead of these, the stored array for all of the targets.
    """

    __slots__ = ("_recipes", "entry", "targets")

    def __init__(
        self,
        targets: Mapping[str, ArrayTarget],
        recipes: Mapping[str, Recipe] | None = None,
        entry: ArrayEntry | None = None,
    ) -> None:
        self.targets, self._recipes, self.entry = targets, recipes or {}, entry

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """The sources, by the names of the destinations."""
        if self.entry is None:
            return self._recipes
        return dict.fromkeys(self.targets, Recipe((Unchanged(self.entry),)))

    @property
    def nbytes(self) -> int:
        """Bytes of all destinations."""
        return sum(
            box.size * target.dtype.itemsize for target in self.targets.values()
            for box in target.boxes
        )  # fmt: skip

    def staged(self, most_bytes: int) -> Iterator[Job]:
        """The same reads, into memory from which devices copy.

        Arguments:
            most_bytes: a larger array is read in parts, if they do not share chunks.
        """
        from unickpt.reading.staging import StagedTarget, pieces_of

        targets = {
            name: target if target.device_memory is None else StagedTarget(target, target.boxes)
            for name, target in self.targets.items()
        }
        source = self._only_source()
        if source is None or self.nbytes <= most_bytes:
            yield Job(targets, self._recipes, self.entry)
            return
        ((name, target),) = self.targets.items()
        for piece in pieces_of(source, target.boxes[0], most_bytes):
            yield Job({name: StagedTarget(target, (piece,))}, self._recipes, self.entry)

    def _only_source(self) -> ArrayEntry | None:
        """The stored array that its only target, of one box, takes unchanged; else None."""
        if len(self.targets) > 1 or any(len(t.boxes) != 1 for t in self.targets.values()):
            return None
        ((_, recipe),) = self.recipes.items()
        source = recipe.sources[0] if len(recipe.sources) == 1 else None
        if source is None or recipe.fills or recipe.function or not source.is_identity:
            return None
        return source.entry

    @property
    def processes(self) -> int:
        """The least number of processes over which a destination is distributed; 1 if none is."""
        return min(map(_PROCESSES, self.targets.values()), default=1)

    @property
    def entries(self) -> list[ArrayEntry]:
        """The stored arrays that are read."""
        used = (source.entry for recipe in self.recipes.values() for source in recipe.sources)
        return list({entry.name: entry for entry in used}.values())

    def finish(self, buffers: dict[str, list[Array]], done: dict[str, Any]) -> None:
        """Adds the leaves of filled memory to `done`; drops the memory."""
        for name, target in self.targets.items():
            done[name] = target.finish(buffers.pop(name))


class _WholeArray(NamedTuple):
    """An array that is one chunk and is read whole: its job, its only target, its bytes."""

    job: Job
    name: str
    target: ArrayTarget
    entry: ArrayEntry
    nbytes: int


ReadArrays = Callable[[Reader, Sequence[Job]], dict[str, Any]]
"""Reads arrays of a checkpoint; see `read_arrays`."""


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
        jobs: the arrays to read.
        options: see `LoadOptions`.
        reader: of this checkpoint, to reuse its threads for several calls.
        filled: counts the bytes of destinations.
    """
    filled = filled or Filled(jobs)
    stored = _checking(stored, jobs) if options.verify and reader is None else stored
    done: dict[str, Any] = {}
    whole, other_jobs, on_devices = _whole_arrays(jobs)
    nbytes = sum(map(_NBYTES, whole))
    is_small = len(whole) <= TASK_CHUNKS and nbytes <= TASK_BYTES
    try:
        # Starting a thread for one piece of work takes as long as reading a megabyte.
        is_alone = not (other_jobs or on_devices) and reader is None
        if whole and is_alone and (is_small or len(whole) == 1):
            batch = _ReadBatch(stored, whole, options.verify)
            with files_kept_open():
                for index in stored.read(batch.requests) if batch.requests else ():
                    raise mismatch(stored, batch.requests[index])
            filled.counts.read_sizes.append(sum(map(_NBYTES, map(_OUT, batch.requests))))
            batch.finish(filled, done)
            whole, nbytes, other_jobs = [], 0, batch.other_jobs
        if whole or other_jobs or on_devices:
            sizes = filled.counts.read_sizes
            nbytes += sum(map(_NBYTES, other_jobs + on_devices))
            own_reader = (
                nullcontext(reader)
                if reader
                else closing(ChunkReader(stored, sizes=sizes, nbytes=nbytes))
            )
            with own_reader as chunk_reader:
                budget = options.working_bytes
                planner, window = Planner(stored, options.verify), Window(budget)
                reads = _Reads(stored, chunk_reader, planner, window, filled, done)
                reads.run(whole, other_jobs)
                if on_devices:
                    reads.run_on_devices(on_devices, max(1, budget // 2))
    except MemoryError as error:
        raise out_of_memory(f"reading {stored.location}", error) from error
    return done


def _checking(stored: Reader, jobs: Sequence[Job]) -> Reader:
    """The checkpoint with checksums compared, if the jobs request at least as many bytes as their
    arrays have: other formats have checksums of whole arrays."""
    if not stored.has_wide_checksums:
        return stored
    entries = {entry.name: entry.nbytes for job in jobs for entry in job.entries}
    is_most = sum(job.nbytes for job in jobs) >= sum(entries.values())
    return stored.checking() if is_most else stored


class LoadCounts:
    """What one load of this process reads, and how long it waits for other processes."""

    __slots__ = (
        "filled_bytes", "read_sizes", "received_bytes", "unchanged_bytes", "waited_for", "waited_s"
    )  # fmt: skip

    def __init__(self) -> None:
        self.filled_bytes = 0
        """Of destinations."""
        self.read_sizes: list[int] = []
        """Bytes that were read from the storage together; threads may append to it."""
        self.received_bytes = 0
        """From other processes."""
        self.unchanged_bytes = 0
        """Of destinations that held them already."""
        self.waited_s = 0.0
        self.waited_for: dict[int, float] = {}
        """Seconds by process, as far as it is known."""

    def wait(self, seconds: float, process: int = -1) -> None:
        """Counts seconds of waiting.

        Arguments:
            seconds: how many.
            process: for which process; negative if that is not known.
        """
        self.waited_s += seconds
        if process >= 0:
            self.waited_for[process] = self.waited_for.get(process, 0.0) + seconds


class Filled:
    """The bytes of the destinations of jobs, as they are filled.

    Arguments:
        jobs: all jobs.
        progress: called with the bytes that are filled, and those of all, if given.
        counts: of the load.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        progress: ProgressFunction | None = None,
        counts: LoadCounts | None = None,
    ) -> None:
        self.counts = counts or LoadCounts()
        self._total = 0 if progress is None else sum(job.nbytes for job in jobs)
        self._done, self._progress = 0, progress
        self._parts = dict[str, int]()  # of jobs that are not whole yet, by their first target
        if progress is not None:
            progress(0, self._total)

    def part(self, job: Job, ended: int, total: int) -> None:
        """Counts the filled part of a job, in chunks or in tasks."""
        if self._progress is not None:
            self._parts[next(iter(job.targets))] = job.nbytes * ended // total
            self._progress(self._done + sum(self._parts.values()), self._total)

    def whole(self, jobs: Sequence[Job], nbytes: int) -> None:
        """Counts jobs that are filled."""
        self._done += nbytes
        self.counts.filled_bytes += nbytes
        for job in jobs if self._parts else ():
            self._parts.pop(next(iter(job.targets)), None)
        if self._progress is not None:
            self._progress(self._done + sum(self._parts.values()), self._total)


class _ReadBatch:
    """Arrays that are read whole, each of them one chunk: their memory, and the requests.

    Arguments:
        stored: the checkpoint.
        arrays: the arrays.
        verify: whether they are checked against their digests.
    """

    requests: Sequence[Request]
    other_jobs: list[Job]
    """Those to read another way, because their memory is not contiguous."""

    def __init__(self, stored: Reader, arrays: Sequence[_WholeArray], verify: bool) -> None:
        digests: Sequence[int | None] = [None] * len(arrays)
        rows = stored.first_digests([array.entry for array in arrays])  # before memory is allocated
        is_large = sum(map(_NBYTES, arrays)) > TASK_BYTES  # then it may be a single array
        for array in arrays if rows is None or is_large else ():
            stored.check_backed(array.entry)
        if rows is not None and verify:
            digests = rows["digest"].tolist()
        memory = [buffer_of(stored, array.name, array.target, 0) for array in arrays]
        for buffer in memory if is_large else ():
            prefer_huge_pages(buffer)
        plain = [buffer.flags.c_contiguous for buffer in memory]
        self._arrays = list(compress(arrays, plain))
        self.other_jobs = [
            array.job for array, is_plain in zip(arrays, plain, strict=True) if not is_plain
        ]
        self.requests = [
            Request(entry, _only_part(entry), 0, buffer, digest)
            for (_, _, _, entry, _), buffer, digest in compress(
                zip(arrays, memory, digests, strict=True), plain
            )
        ]

    def finish(self, filled: Filled, done: dict[str, Any]) -> None:
        """Adds the arrays to `done`, once they are read."""
        memory = [request.out for request in self.requests]
        filled.whole([array.job for array in self._arrays], sum(map(_NBYTES, memory)))
        for array, buffer in zip(self._arrays, memory, strict=True):
            done[array.name] = array.target.finish([buffer])


@dataclass(frozen=True)
class _Reads:
    """Reads of arrays on threads; see `read_arrays` for the arguments."""

    stored: Reader
    reader: ChunkReader
    planner: Planner
    window: Window
    filled: Filled
    done: dict[str, Any]

    def run(self, whole: Iterable[_WholeArray], other_jobs: Sequence[Job]) -> None:
        """Reads all.

        Arguments:
            whole: the arrays that are read whole, and are one chunk.
            other_jobs: all others.
        """
        left = [*other_jobs]
        batches = [*in_batches(whole, TASK_CHUNKS, self.reader.task_bytes, _NBYTES)]
        # The largest first: else one thread may read that at the end, and the others nothing.
        for batch in sorted(batches, key=lambda batch: -sum(map(_NBYTES, batch))):
            left += self._start_whole(batch)
        for job in left:
            self._start(job)
        self.window.drain()

    def run_on_devices(self, jobs: Sequence[Job], most_bytes: int) -> None:
        """Reads arrays of devices, which copy what was read while more is read.

        Arguments:
            jobs: with a target on a device.
            most_bytes: to copy at once, unless a single chunk is larger.
        """
        from unickpt.reading.staging import STAGED_ARRAYS, STAGED_BYTES  # only with a device

        most_bytes = min(STAGED_BYTES, most_bytes)
        uploaders, buffers = dict[Hashable, Uploader](), dict[str, list[Array]]()
        staged_jobs = chain.from_iterable(job.staged(most_bytes) for job in jobs)
        try:
            for batch in in_batches(staged_jobs, STAGED_ARRAYS, most_bytes, _NBYTES):
                self._start_staged(batch, uploaders, buffers)
            self.window.drain()
        finally:  # also after an error, copies use the memory
            for uploader in uploaders.values():
                uploader.close()
        for job in jobs:
            job.finish({name: buffers.get(name, []) for name in job.targets}, self.done)

    def _start_staged(
        self,
        jobs: Sequence[Job],
        uploaders: dict[Hashable, Uploader],
        buffers: dict[str, list[Array]],
    ) -> None:
        """As `_start`, for jobs whose memory is copied to devices together.

        Arguments:
            jobs: the jobs.
            uploaders: by device.
            buffers: gets the memory of targets in host memory.
        """
        from unickpt.reading.staging import StagedTarget, apart, stage

        nbytes = sum(map(_NBYTES, jobs))
        self.window.make_room(nbytes)
        try:
            starts = stage((t for job in jobs for t in apart(job.targets.values())), uploaders)
        except MemoryError as error:
            raise OutOfMemory(
                f"{self.stored.location}: no memory to read array {next(iter(jobs[0].targets))!r} "
                f"and others: {error}"
            ) from None
        whole, other_jobs, _ = _whole_arrays(jobs)
        requests: list[Future[None]] = []
        for arrays in in_batches(whole, TASK_CHUNKS, self.reader.task_bytes, _NBYTES):
            batch = _ReadBatch(self.stored, arrays, self.planner.verify)
            requests.append(self.reader.submit_requests(batch.requests))
        tasks: dict[Task, None] = {}
        for job in other_jobs:
            job_buffers, consumers = prepare(self.stored, job, self.planner.verify)
            submitted = map(self.reader.submit, self.planner.reads(consumers))
            tasks |= dict.fromkeys(chain.from_iterable(submitted))
            buffers |= {
                name: job_buffers[name]
                for name, target in job.targets.items()
                if not isinstance(target, StagedTarget)
            }

        def finish() -> None:
            for request in requests:
                request.result()
            for task in tasks:
                self.reader.wait(task)
            for start in starts:
                start()
            self.filled.whole(jobs, nbytes)

        self.window.add(nbytes, finish)

    def _start(self, job: Job) -> None:
        """Starts to read an array when there is room; the window waits for it and finishes the
        leaf."""
        nbytes = job.nbytes
        self.window.make_room(nbytes)
        buffers, consumers = prepare(self.stored, job, self.planner.verify)
        # Each once, in reading order: progress is reported as they end.
        submitted = map(self.reader.submit, self.planner.reads(consumers))
        pending = dict.fromkeys(chain.from_iterable(submitted))

        def finish() -> None:
            for ended, task in enumerate(pending, 1):
                self.reader.wait(task)
                self.filled.part(job, ended, len(pending))
            self.filled.whole([job], nbytes)
            job.finish(buffers, self.done)

        self.window.add(nbytes, finish)

    def _start_whole(self, arrays: Sequence[_WholeArray]) -> Sequence[Job]:
        """As `_start`, for a batch on one thread; returns those to read another way."""
        nbytes = sum(map(_NBYTES, arrays))
        self.window.make_room(nbytes)
        batch = _ReadBatch(self.stored, arrays, self.planner.verify)
        ended = self.reader.submit_requests(batch.requests)

        def finish() -> None:
            self.reader.result(ended)
            batch.finish(self.filled, self.done)

        self.window.add(nbytes, finish)
        return batch.other_jobs


Consumers = Mapping[str, tuple[ArrayEntry, list[Consumer]]]
"""The consumers of elements of stored arrays, by the arrays' names."""


def prepare(stored: Reader, job: Job, verify: bool) -> tuple[dict[str, list[Array]], Consumers]:
    """Memory for all boxes of all targets, with all elements that need no chunk filled in; and the
    consumers of each stored array in it.

    Raises:
        OutOfMemory: names the array.
    """
    for entry in job.entries:
        stored.check_backed(entry)
    buffers = dict[str, list[Array]]()
    first = dict[Hashable, list[Array]]()  # of targets that share memory
    for name, target in job.targets.items():
        shared = None if target.identity is None else first.get(target.identity)
        if shared is None:
            shared = [buffer_of(stored, name, target, i) for i in range(len(target.boxes))]
            first[target.identity] = shared
        buffers[name] = [*shared]
    for buffer in chain.from_iterable(buffers.values()):
        prefer_huge_pages(buffer)
    slots = slots_of(job)
    _fill(slots, buffers, verify)
    return buffers, consumers_of(slots, buffers)


def buffer_of(stored: Reader, name: str, target: ArrayTarget, position: int) -> Array:
    """Memory for a box of a target. Raises as `prepare`."""
    try:
        return target.buffer(position)
    except MemoryError as error:
        raise OutOfMemory(
            f"{stored.location}: no memory for array {name!r}, "
            f"{dtypes.with_shape(dtypes.name_of(target.dtype), target.shape)}: {error}"
        ) from None


def slots_of(job: Job) -> list[TargetBox]:
    """All boxes to fill; targets that share memory count once."""
    first: dict[Hashable, str] = {}
    slots: list[TargetBox] = []
    for name, target in job.targets.items():
        if target.identity is None or first.setdefault(target.identity, name) == name:
            recipe = job.recipes[name]
            slots += [TargetBox(name, i, box, recipe) for i, box in enumerate(target.boxes)]
    return slots


def _fill(slots: Sequence[TargetBox], buffers: Mapping[str, Sequence[Array]], verify: bool) -> None:
    """Fills in the elements that need no chunk."""
    for name, position, box, recipe in slots:
        buffer = buffers[name][position]
        for constant in recipe.fills:
            for copy in constant.copies(box):
                view = strided_copy.view(buffer, copy.out, copy.out_steps, copy.shape)
                view[...] = constant.value
        if recipe.function is not None:
            values = recipe.function(box, verify)
            put(values, buffer, f"{recipe.function.name!r}: made as {values.dtype}")


def read_box(stored: Reader, entry: ArrayEntry, box: Box, *, verify: bool) -> Array:
    """A box of a stored array as a new NumPy array."""
    job = Job({entry.name: NewTarget(entry, box)}, entry=entry)
    array: Array = read_arrays(stored, [job], LoadOptions(verify=verify))[entry.name]
    return array


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
    array: Array = read_arrays(stored, [job], options, reader)[entry.name]
    return array


def _whole_arrays(jobs: Sequence[Job]) -> tuple[list[_WholeArray], list[Job], list[Job]]:
    """The arrays that are read whole and are one chunk; the other jobs; those of devices.

    A model may have 100,000 small arrays. The cost of reading one is then Python's work per chunk,
    not its bytes; so each needs only a `Request`.
    """
    whole: list[_WholeArray] = []
    other_jobs: list[Job] = []
    on_devices: list[Job] = []
    for job in jobs:
        for target in job.targets.values():
            if target.device_memory is not None:
                on_devices.append(job)
                break
        else:
            entry = job.entry
            if entry is not None and len(job.targets) == 1 and _is_one_chunk(entry):
                ((name, target),) = job.targets.items()
                dtype, boxes, _ = _kind(entry.shape, entry.dtype)
                if target.dtype == dtype and tuple(target.boxes) == boxes:
                    nbytes = nbytes_of(entry.shape, entry.dtype)
                    whole.append(_WholeArray(job, name, target, entry, nbytes))
                    continue
            other_jobs.append(job)
    whole.sort(key=attrgetter("entry.name"))  # as in the database: neighbours are in one file
    return whole, other_jobs, on_devices


@lru_cache(maxsize=4096)
def _kind(shape: tuple[int, ...], dtype: str) -> tuple[DType, tuple[Box, ...], tuple[int, ...]]:
    """The dtype of arrays of one shape and dtype, the box of all of one, a grid of one chunk."""
    return dtypes.from_name(dtype), (Box.whole(shape),), (1,) * len(shape)


def _only_part(entry: ArrayEntry) -> Part:
    """The part of an array that is one chunk."""
    _, (box,), grid = _kind(entry.shape, entry.dtype)
    return Part(entry.name, box, entry.chunk, grid, 1)


def _is_one_chunk(entry: ArrayEntry) -> bool:
    return entry.shape == entry.chunk and not entry.cut and entry.boxes is None
