"""Reads arrays into their destinations, each chunk that they need once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from unickpt.arrays import dtypes, strided_copy
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array, DType
from unickpt.errors import OutOfMemory, out_of_memory
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry, nbytes_of
from unickpt.format.reader import Reader, Request
from unickpt.frameworks.host_memory import prefer_huge_pages
from unickpt.frameworks.protocol import ArrayTarget
from unickpt.reading.chunk_reader import TASK_BYTES, TASK_CHUNKS, ChunkReader, mismatch
from unickpt.reading.options import LoadOptions
from unickpt.reading.read_plan import Planner, TargetBox, consumers_of
from unickpt.reading.recipes import Recipe, Unchanged
from unickpt.reading.targets import NewTarget, put
from unickpt.storage.local_files import files_kept_open
from unickpt.threads import Window, in_batches

if TYPE_CHECKING:
    from unickpt.progress import ProgressFunction


class Job:
    """Arrays to read together, because they are tied, requested more than once, or need the same
    chunks.

    Arguments:
        targets: the destinations, by name.
        recipes: their sources, by the same names.
    """

    __slots__ = ("_recipes", "_targets")

    def __init__(self, targets: Mapping[str, ArrayTarget], recipes: Mapping[str, Recipe]) -> None:
        self._targets, self._recipes = targets, recipes

    @property
    def targets(self) -> Mapping[str, ArrayTarget]:
        """The destinations, by name."""
        return self._targets

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """Their sources, by the same names."""
        return self._recipes

    @property
    def nbytes(self) -> int:
        """Bytes of all destinations."""
        return sum(
            box.size * target.dtype.itemsize for target in self.targets.values()
            for box in target.boxes
        )  # fmt: skip

    @property
    def processes(self) -> int:
        """Over how many processes all destinations are distributed, at least; 1 for none."""
        return min((target.processes for target in self.targets.values()), default=1)

    @property
    def entries(self) -> list[ArrayEntry]:
        """The stored arrays that are read."""
        used = (source.entry for recipe in self.recipes.values() for source in recipe.sources)
        return list({entry.name: entry for entry in used}.values())


class StoredJob(Job):
    """An array that one target takes as it is stored: of the 100,000 that a model may have nearly
    all, so that no more is made of them than this.

    Arguments:
        name: of the target.
        target: the target.
        entry: the stored array.
    """

    __slots__ = ("entry", "name", "target")

    def __init__(self, name: str, target: ArrayTarget, entry: ArrayEntry) -> None:
        self.name, self.target, self.entry = name, target, entry

    @property
    def targets(self) -> Mapping[str, ArrayTarget]:
        return {self.name: self.target}

    @property
    def processes(self) -> int:
        return self.target.processes

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        return {self.name: Recipe((Unchanged(self.entry),))}


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
        jobs: what to read.
        options: see `LoadOptions`.
        reader: of this checkpoint, to reuse its threads for several calls.
        filled: counts the bytes of destinations.
    """
    filled = filled or Filled(jobs)
    stored = _checking(stored, jobs) if options.verify and reader is None else stored
    done: dict[str, Any] = {}
    whole, other_jobs = _whole_jobs(jobs)
    sizes = [nbytes_of(job.entry.shape, job.entry.dtype) for job in whole]
    is_small = len(whole) <= TASK_CHUNKS and sum(sizes) <= TASK_BYTES
    try:
        # To start a thread for one piece of work takes as long as to read a megabyte.
        if whole and not other_jobs and reader is None and (is_small or len(whole) == 1):
            batch = _ReadBatch(stored, whole, sum(sizes), options.verify)
            with files_kept_open():
                for index in stored.read(batch.requests) if batch.requests else ():
                    raise mismatch(stored, batch.requests[index])
            batch.finish(filled, done)
            whole, sizes, other_jobs = [], [], batch.other_jobs
        if whole or other_jobs:
            chunk_reader = reader or ChunkReader(stored)
            try:
                if reader is None:
                    chunk_reader.expect(sum(sizes) + sum(map(attrgetter("nbytes"), other_jobs)))
                _Reads(stored, options, chunk_reader, filled, done).run(whole, sizes, other_jobs)
            finally:
                if reader is None:
                    chunk_reader.close()
    except MemoryError as error:
        raise out_of_memory(f"reading {stored.location}", error) from error
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
        progress: called with the bytes that are filled, and those of all, if given.
    """

    def __init__(self, jobs: Sequence[Job], progress: ProgressFunction | None = None) -> None:
        self._total = 0 if progress is None else sum(job.nbytes for job in jobs)
        self._done, self._progress = 0, progress
        self._parts = dict[str, int]()  # of jobs that are not whole yet, by their first target
        if progress is not None:
            progress(0, self._total)

    def part(self, job: Job, ended: int, total: int) -> None:
        """Counts the part of a job that is filled: so many of its chunks, or of its tasks."""
        if self._progress is not None:
            self._parts[next(iter(job.targets))] = job.nbytes * ended // total
            self._progress(self._done + sum(self._parts.values()), self._total)

    def whole(self, jobs: Sequence[Job], nbytes: int) -> None:
        """Counts jobs that are filled."""
        self._done += nbytes
        for job in jobs if self._parts else ():
            self._parts.pop(next(iter(job.targets)), None)
        if self._progress is not None:
            self._progress(self._done + sum(self._parts.values()), self._total)


class _ReadBatch:
    """Arrays that are read whole, each of them one chunk: their memory, and what is read.

    Arguments:
        stored: the checkpoint.
        jobs: the arrays.
        nbytes: of all of them.
        verify: whether they are checked against their digests.
    """

    requests: Sequence[Request]
    other_jobs: list[Job]
    """Those that have to be read otherwise, because their memory is not contiguous."""

    def __init__(
        self, stored: Reader, jobs: Sequence[StoredJob], nbytes: int, verify: bool
    ) -> None:
        digests: Sequence[int | None] = [None] * len(jobs)
        rows = stored.first_digests([job.entry for job in jobs])  # before there is memory
        is_large = nbytes > TASK_BYTES  # then it may be of one array
        for job in jobs if rows is None or is_large else ():
            stored.check_backed(job.entry)
        if rows is not None and verify:
            digests = rows["digest"].tolist()
        memory = [buffer_of(stored, job.name, job.target, 0) for job in jobs]
        for buffer in memory if is_large else ():
            prefer_huge_pages(buffer)
        plain = [buffer.flags.c_contiguous for buffer in memory]
        self._jobs = list(compress(jobs, plain))
        self.other_jobs = [job for job, is_plain in zip(jobs, plain, strict=True) if not is_plain]
        self.requests = [
            Request(job.entry, _only_part(job.entry), 0, buffer, digest)
            for job, buffer, digest in compress(zip(jobs, memory, digests, strict=True), plain)
        ]

    def finish(self, filled: Filled, done: dict[str, Any]) -> None:
        """Adds the arrays to `done`, once they are read."""
        memory = [request.out for request in self.requests]
        filled.whole(self._jobs, sum(map(attrgetter("nbytes"), memory)))
        for job, buffer in zip(self._jobs, memory, strict=True):
            done[job.name] = job.target.finish([buffer])


class _Reads:
    """Reads of arrays on threads; see `read_arrays` for the arguments."""

    def __init__(
        self,
        stored: Reader,
        options: LoadOptions,
        reader: ChunkReader,
        filled: Filled,
        done: dict[str, Any],
    ) -> None:
        self._stored, self._reader, self._filled, self._done = stored, reader, filled, done
        self._planner = Planner(stored, options.verify)
        self._window = Window(options.working_bytes)

    def run(
        self, whole: Iterable[StoredJob], sizes: Iterable[int], other_jobs: Sequence[Job]
    ) -> None:
        """Reads all.

        Arguments:
            whole: the arrays that are read whole, and are one chunk.
            sizes: their bytes.
            other_jobs: all others.
        """
        left = [*other_jobs]
        sized = zip(whole, sizes, strict=True)
        for batch in in_batches(sized, TASK_CHUNKS, self._reader.task_bytes, itemgetter(1)):
            together, nbytes = zip(*batch, strict=True)
            left += self._start_whole(together, sum(nbytes))
        for job in left:
            self._start(job)
        self._window.drain()

    def _start(self, job: Job) -> None:
        """Starts to read an array, when there is room; the window waits for it and finishes the
        leaf."""
        nbytes = job.nbytes
        self._window.make_room(nbytes)
        for entry in job.entries:
            self._stored.check_backed(entry)
        buffers = buffers_of(self._stored, job)
        slots = slots_of(job)
        fill(slots, buffers, self._planner.verify)
        reads = self._planner.reads(consumers_of(slots, buffers))
        # Each once, in the order in which they are read: progress is reported as they end.
        pending = dict.fromkeys(self._reader.submit(read) for read in reads)

        def finish() -> None:
            for ended, task in enumerate(pending, 1):
                self._reader.wait(task)
                self._filled.part(job, ended, len(pending))
            self._filled.whole([job], nbytes)
            for name, target in job.targets.items():
                self._done[name] = target.finish(buffers.pop(name))

        self._window.add(nbytes, finish)

    def _start_whole(self, jobs: Sequence[StoredJob], nbytes: int) -> Sequence[Job]:
        """As `_start`, for a batch on one thread; returns those that have to be read otherwise."""
        self._window.make_room(nbytes)
        batch = _ReadBatch(self._stored, jobs, nbytes, self._planner.verify)
        ended = self._reader.submit_requests(batch.requests)

        def finish() -> None:
            ended.result()
            batch.finish(self._filled, self._done)

        self._window.add(nbytes, finish)
        return batch.other_jobs


def buffers_of(stored: Reader, job: Job) -> dict[str, list[Array]]:
    """Memory for all boxes of all targets.

    Raises:
        OutOfMemory: names the array.
    """
    buffers = {}
    for name, target in job.targets.items():
        buffers[name] = [buffer_of(stored, name, target, i) for i in range(len(target.boxes))]
        for buffer in buffers[name]:
            prefer_huge_pages(buffer)
    return buffers


def buffer_of(stored: Reader, name: str, target: ArrayTarget, position: int) -> Array:
    """Memory for a box of a target. Raises as `buffers_of`."""
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


def fill(slots: Sequence[TargetBox], buffers: Mapping[str, Sequence[Array]], verify: bool) -> None:
    """Fills in what needs no chunk."""
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
    job = StoredJob(entry.name, NewTarget(entry, box), entry)
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


class _Kind(NamedTuple):
    """What arrays of one shape and dtype have in common."""

    dtype: DType
    boxes: tuple[Box, ...]


def _whole_jobs(jobs: Sequence[Job]) -> tuple[list[StoredJob], list[Job]]:
    """The jobs that read an array whole that is one chunk; and the others."""
    whole: list[StoredJob] = []
    other_jobs: list[Job] = []
    for job in jobs:
        if isinstance(job, StoredJob) and _is_one_chunk(job.entry):
            target, kind = job.target, _kind(job.entry.shape, job.entry.dtype)
            if target.dtype == kind.dtype and tuple(target.boxes) == kind.boxes:
                whole.append(job)
                continue
        other_jobs.append(job)
    whole.sort(key=attrgetter("entry.name"))  # as in the database: neighbours are in one file
    return whole, other_jobs


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
