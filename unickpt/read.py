"""Reading: finds the chunks for the boxes of arrays; reads, checks and places each once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from unickpt import dtypes, plan, strided
from unickpt.adapt import Array, ArrayTarget
from unickpt.adapters.numpy import NumpyTarget
from unickpt.box import Box
from unickpt.errors import LoadMismatch
from unickpt.feed import Copy, Itself, Recipe, Source, Wanted
from unickpt.index import ArrayEntry
from unickpt.options import LoadOptions
from unickpt.plan import Part
from unickpt.stage import Scratch, Window
from unickpt.workers import Pool, step_back

if TYPE_CHECKING:
    from unickpt.checkpoint import Checkpoint

T = TypeVar("T")

_REMOTE_THREADS = 32
# A task reads chunks in sequence; small chunks share a task, to reduce scheduling overhead.
TASK_BYTES = 1 << 20
TASK_CHUNKS = 256


def threads_for(stored: Checkpoint, name: str, *, behind: bool = False) -> ThreadPoolExecutor:
    """Threads that read chunks: many if each request crosses a network."""
    local = max(4, 2 * (os.cpu_count() or 1))
    count = _REMOTE_THREADS if stored.location.is_remote else local
    return Pool(count, thread_name_prefix=name, initializer=step_back if behind else None)


@dataclass(frozen=True)
class Job:
    """Arrays to read together, because they are tied, requested more than once, or need the same
    chunks.

    Arguments:
        targets: the destinations, by name.
        recipes: their sources, by the same names.
    """

    targets: Mapping[str, ArrayTarget]
    recipes: Mapping[str, Recipe]

    @property
    def nbytes(self) -> int:
        """Bytes of all destinations."""
        return sum(
            box.size * target.dtype.itemsize for target in self.targets.values()
            for box in target.boxes
        )  # fmt: skip

    @property
    def entries(self) -> list[ArrayEntry]:
        """The stored arrays that are read."""
        used = (feed.entry for recipe in self.recipes.values() for feed in recipe.feeds)
        return list({entry.name: entry for entry in used}.values())


class NewTarget(NumpyTarget):
    """A new NumPy array.

    Arguments:
        entry: gives its shape and dtype.
        box: the box to read; the whole array by default.
    """

    def __init__(self, entry: ArrayEntry, box: Box | None = None) -> None:
        box = box or Box.whole(entry.shape)
        self.leaf, self.shape, self.dtype = None, box.shape, dtypes.from_name(entry.dtype)
        self.boxes, self.in_place, self.identity = (box,), False, None


class NumberTarget(NewTarget):
    """A plain number from a 0-d array."""

    def finish(self, buffers: Sequence[Array]) -> Any:
        return buffers[0].item()


class Slot(NamedTuple):
    """A box of a target to fill."""

    name: str
    position: int
    box: Box
    recipe: Recipe


class User(NamedTuple):
    """A buffer, and what it needs from a stored array."""

    needed: Wanted
    buffer: Array
    feed: Source

    def pieces(self, box: Box) -> Iterator[Piece]:
        """What it needs from a box of the stored array."""
        for copy in self.needed.copies(box):
            out = strided.view(self.buffer, copy.out, copy.out_steps, copy.shape)
            yield Piece(copy, out, self.feed)


class Piece(NamedTuple):
    """A piece of a box of a stored array, and its destination."""

    copy: Copy
    out: Array
    feed: Source

    def place(self, source: Array) -> None:
        """Copies the elements of the box to the destination."""
        copy = self.copy
        _place(
            strided.view(source, copy.source, copy.source_steps, copy.shape), self.out, self.feed
        )


@dataclass(slots=True)
class ChunkRead:
    """One chunk to read, and the destinations of its pieces.

    Arguments:
        entry, part, number: which one.
        box: of the chunk.
        row: of the digest table; None without verification.
        pieces: of the chunk.
    """

    entry: ArrayEntry
    part: Part
    number: int
    box: Box
    row: Any
    pieces: Sequence[Piece]


def read_arrays(
    stored: Checkpoint,
    jobs: Sequence[Job],
    options: LoadOptions,
    reader: Reader | None = None,
) -> dict[str, Any]:
    """Reads arrays; reads every chunk that a job needs exactly once.

    Arguments:
        stored: the checkpoint.
        jobs: what to read.
        options: see `LoadOptions`.
        reader: of this checkpoint, to reuse its threads for several calls.
    """
    done: dict[str, Any] = {}
    window = Window(options.budget_bytes)
    own = reader or Reader(stored)
    try:
        for job in jobs:
            nbytes = job.nbytes
            window.make_room(nbytes)
            window.add(nbytes, _start(stored, job, options.verify, own, done))
        window.drain()
    finally:
        if reader is None:
            own.close()
    return done


def _start(
    stored: Checkpoint, job: Job, verify: bool, reader: Reader, done: dict[str, Any]
) -> Callable[[], None]:
    """Starts to read an array; calling the result waits for it and finishes the leaf."""
    for entry in job.entries:
        stored.check_backed(entry)
    buffers = buffers_of(stored, job)
    slots = slots_of(job)
    fill(slots, buffers, verify)
    pending = {reader.submit(read) for read in _reads(stored, users_of(slots, buffers), verify)}

    def finish() -> None:
        for task in pending:
            reader.wait(task)
        for name, target in job.targets.items():
            done[name] = target.finish(buffers.pop(name))

    return finish


def buffers_of(stored: Checkpoint, job: Job) -> dict[str, list[Array]]:
    """Memory for all boxes of all targets.

    Raises:
        MemoryError: names the array.
    """
    buffers = {}
    for name, target in job.targets.items():
        try:
            buffers[name] = [target.buffer(i) for i in range(len(target.boxes))]
        except MemoryError as error:
            raise MemoryError(
                f"{stored.location}: no memory for array {name!r}, "
                f"{dtypes.name_of(target.dtype)}{list(target.shape)}: {error}"
            ) from None
    return buffers


def slots_of(job: Job) -> list[Slot]:
    """All boxes to fill; targets that share memory count once."""
    first: dict[Hashable, str] = {}
    slots: list[Slot] = []
    for name, target in job.targets.items():
        if target.identity is None or first.setdefault(target.identity, name) == name:
            recipe = job.recipes[name]
            slots += [Slot(name, i, box, recipe) for i, box in enumerate(target.boxes)]
    return slots


def fill(slots: Sequence[Slot], buffers: Mapping[str, Sequence[Array]], verify: bool) -> None:
    """Fills in what needs no chunk."""
    for name, position, box, recipe in slots:
        buffer = buffers[name][position]
        for constant in recipe.fills:
            for copy in constant.copies(box):
                view = strided.view(buffer, copy.out, copy.out_steps, copy.shape)
                view[...] = constant.value
        if recipe.function is not None:
            found = recipe.function(box, verify)
            _put(found, buffer, f"{recipe.function.name!r}: made as {found.dtype}")


def users_of(
    slots: Sequence[Slot], buffers: Mapping[str, Sequence[Array]]
) -> dict[str, tuple[ArrayEntry, list[User]]]:
    """The users of each stored array, by its name."""
    users: dict[str, tuple[ArrayEntry, list[User]]] = {}
    for name, position, box, recipe in slots:
        for feed in recipe.feeds:
            needed = feed.within(box)
            if needed is not None:
                of_entry = users.setdefault(feed.entry.name, (feed.entry, []))[1]
                of_entry.append(User(needed, buffers[name][position], feed))
    return users


def _reads(
    stored: Checkpoint, users: Mapping[str, tuple[ArrayEntry, list[User]]], verify: bool
) -> Iterator[ChunkRead]:
    for name, (entry, of_entry) in users.items():
        table = stored.digests_of(name) if verify else None
        for first, part in plan.numbered_parts(entry):
            for number, by in sorted(by_chunk(part, of_entry).items()):
                chunk = part.chunk_box(number)
                pieces = [piece for user in by for piece in user.pieces(chunk)]
                if pieces:
                    row = None if table is None else table[first + number]
                    yield ChunkRead(entry, part, number, chunk, row, pieces)


def by_chunk(part: Part, users: Iterable[User]) -> dict[int, list[User]]:
    """The users of each chunk of a part."""
    found: dict[int, list[User]] = {}
    for user in users:
        for number in _chunks_of(part, user.needed.boxes):
            found.setdefault(number, []).append(user)
    return found


def _chunks_of(part: Part, boxes: Sequence[Box]) -> Iterable[int]:
    if len(boxes) == 1:
        return part.chunks_in(boxes[0])
    return {number for box in boxes for number in part.chunks_in(box)}


class Task:
    """Chunks that one thread reads in sequence."""

    def __init__(self) -> None:
        self.reads: list[ChunkRead] = []
        self.nbytes = 0
        self.future: Future[Any] | None = None


class Reader:
    """Threads that read chunks; small chunks share a task, also across arrays."""

    def __init__(
        self, stored: Checkpoint, name: str = "unickpt-load", *, behind: bool = False
    ) -> None:
        self._pool = threads_for(stored, name, behind=behind)
        self._stored, self._scratch, self._task = stored, Scratch(), Task()

    def submit(self, read: ChunkRead) -> Task:
        """Adds a chunk to a task, which starts once it is large enough for a thread."""
        task = self._task
        task.reads.append(read)
        task.nbytes += read.box.size * dtypes.from_name(read.entry.dtype).itemsize
        if task.nbytes >= TASK_BYTES or len(task.reads) == TASK_CHUNKS:
            self._flush()
        return task

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

    def _flush(self) -> None:
        task, self._task = self._task, Task()
        task.future = self._pool.submit(self._run, task.reads)

    def _run(self, reads: list[ChunkRead]) -> Any:
        """Reads the chunks of one task; `wait` returns the result."""
        stored = self._stored
        requests = [stored.request_chunk(r.entry, r.part, r.number) for r in reads]
        for read, requested in zip(reads, requests, strict=True):
            there = _direct(read)
            if there is not None:
                self._fetch(read, there, requested)
                continue
            chunk = self._scratch.array(read.box.shape, dtypes.from_name(read.entry.dtype))
            self._fetch(read, chunk, requested)
            for piece in read.pieces:
                piece.place(chunk)

    def _fetch(self, read: ChunkRead, out: Array, requested: Any) -> None:
        stored, row = self._stored, read.row
        if not stored.read_chunk(read.entry, read.part, read.number, row, out, requested):
            raise stored.damaged(
                f"array {read.entry.name!r} {read.box}, written by process {row['process']}: "
                "the stored bytes do not match their digest"
            )


def _direct(read: ChunkRead) -> Array | None:
    """The destination into which a chunk can be read directly: contiguous, of its dtype, the only
    one."""
    copy, out, feed = read.pieces[0]
    if len(read.pieces) > 1 or out.size != read.box.size or not out.flags.c_contiguous:
        return None
    if not feed.is_exact or out.dtype != dtypes.from_name(read.entry.dtype):
        return None
    return out.reshape(read.box.shape) if _in_order(copy, read.box.shape) else None


def _in_order(copy: Copy, shape: tuple[int, ...]) -> bool:
    """Whether a copy takes the whole chunk in its stored order."""
    if copy.shape == shape and copy.source_steps == strided.unit_steps(len(shape)):
        return True
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    below = 1
    for n, steps in zip(reversed(copy.shape), reversed(copy.source_steps), strict=True):
        if n > 1 and sum(map(mul, steps, strides)) != below:
            return False
        below *= n
    return True


def _place(source: Array, out: Array, feed: Source) -> None:
    if not feed.is_exact:
        wide = np.dtype(np.float64 if np.float64 in (source.dtype, out.dtype) else np.float32)
        scale, offset = (np.asarray(x, wide) for x in (feed.scale, feed.offset))
        source = np.add(np.multiply(source.astype(wide), scale), offset)
    _put(source, out, f"{feed.entry.name!r}: stored as {feed.entry.dtype}")


def _put(source: Array, out: Array, what: str) -> None:
    """Copies elements into an array, whose dtype may differ."""
    if source.dtype != out.dtype:
        real = source.dtype.kind == "c" and out.dtype.kind != "c"
        cast = (source.real if real else source).astype(out.dtype)
        if not _holds(cast, source):
            raise LoadMismatch(
                f"array {what}, asked for as {out.dtype}, which does not hold all its values; load "
                "it with its stored dtype"
            )
        source = cast
    strided.copy(out, source)


def _holds(cast: Array, source: Array) -> bool:
    """Whether a cast kept all values; casts between floats may lose precision."""
    kinds = dtypes.kind(source.dtype), dtypes.kind(cast.dtype)
    if kinds == ("integer", "integer"):
        return dtypes.holds_all(cast.dtype, source)
    if kinds[0] == kinds[1] and kinds[0] != "other":
        return True
    return bool(np.array_equal(cast.astype(source.dtype), source))


def read_box(stored: Checkpoint, entry: ArrayEntry, box: Box, *, verify: bool) -> Array:
    """A box of a stored array as a new NumPy array."""
    return read_made(stored, entry, Recipe((Itself(entry),)), box, LoadOptions(verify=verify))


def read_made(
    stored: Checkpoint,
    entry: ArrayEntry,
    recipe: Recipe,
    box: Box,
    options: LoadOptions,
    reader: Reader | None = None,
) -> Array:
    """A box of an array made by a recipe, as a new NumPy array with an entry's dtype."""
    job = Job({entry.name: NewTarget(entry, box)}, {entry.name: recipe})
    found: Array = read_arrays(stored, [job], options, reader)[entry.name]
    return found
