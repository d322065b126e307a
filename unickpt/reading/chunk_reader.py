"""Threads that read chunks, each once, check and place them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import cache
from operator import attrgetter, mul
from typing import TYPE_CHECKING, Any, TypeVar

from unickpt.arrays import dtypes, strided_copy
from unickpt.arrays.dtypes import Array
from unickpt.errors import out_of_memory
from unickpt.format import chunk_grid
from unickpt.format.reader_protocol import Reader, Request
from unickpt.frameworks.host_memory import Scratch
from unickpt.reading.read_plan import ChunkRead, narrowed
from unickpt.storage.regular_files import files_kept_open
from unickpt.threads import Pool, in_batches

if TYPE_CHECKING:
    from unickpt.reading.recipes import Copy

T = TypeVar("T")
_NAME = "unickpt-load"  # of threads
_MOST_THREADS = 32  # for remote storage, because each request crosses a network
# A task reads chunks in sequence; small chunks share a task, to reduce scheduling overhead. From a
# disk also larger ones do, if enough tasks are left for each thread.
TASK_BYTES, _MOST_TASK_BYTES = 1 << 20, 32 << 20
TASK_CHUNKS = 256
_TASKS_PER_THREAD = 4
# Up to so many bytes, which may be in the page cache, one thread per core reads from a disk: more
# take the cores from each other while they hold the GIL.
_FEW_BYTES = 1 << 30


@cache
def _local_threads() -> int:
    return min(_MOST_THREADS, max(4, 2 * (os.cpu_count() or 1)))


def _threads_for(nbytes: int | None) -> int:
    """How many read from a local folder."""
    if nbytes is not None and nbytes < _FEW_BYTES:
        return min(_local_threads(), os.cpu_count() or 1)
    return _local_threads()


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
        sizes: gets the bytes that were read together.
        nbytes: how many will be read, if known.
    """

    def __init__(
        self,
        stored: Reader,
        name: str = _NAME,
        *,
        background: bool = False,
        sizes: list[int] | None = None,
        nbytes: int | None = None,
    ) -> None:
        self._sizes = sizes
        is_remote = stored.location.is_remote
        threads = _MOST_THREADS if is_remote else _threads_for(nbytes) - (not background)
        self._pool = Pool(threads, name, background=background)
        self._helps = not (is_remote or background)
        self._files = ExitStack()
        self._files.enter_context(files_kept_open())
        self._stored, self._scratch, self._task = stored, Scratch(), Task()
        self.task_bytes = TASK_BYTES
        if nbytes is not None and not is_remote:
            task_bytes = nbytes // (_TASKS_PER_THREAD * _threads_for(nbytes))
            self.task_bytes = min(max(task_bytes, TASK_BYTES), _MOST_TASK_BYTES)

    def submit(self, read: ChunkRead) -> list[Task]:
        """Adds a chunk to tasks, which start once they are large enough for a thread: to one, but
        for parts that are read alone."""
        tasks: list[Task] = []
        narrows = read.pieces and self._stored.reads_boxes(read.entry)
        for part in narrowed(read) if narrows else (read,):
            task = self._task
            tasks.append(task)
            task.reads.append(part)
            task.nbytes += part.box.size * dtypes.from_name(part.entry.dtype).itemsize
            if task.nbytes >= self.task_bytes or len(task.reads) == TASK_CHUNKS:
                self._flush()
        return tasks

    def submit_requests(self, requests: Sequence[Request]) -> Future[None]:
        """Reads chunks on a thread."""
        return self._pool.submit(self._read, requests)

    def wait(self, task: Task) -> Any:
        """Waits for a task; returns its result or raises its error."""
        if task.future is None:
            self._flush()
        assert task.future is not None, "only the newest task has not started"
        return self.result(task.future)

    def result(self, future: Future[T]) -> T:
        """The result of a future of this reader. This thread works, too: from the page cache, it
        reads as fast as another one."""
        return self._pool.result(future) if self._helps else future.result()

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
            destination = _direct(read)
            if destination is None:
                indirect.append(read)
            else:
                requests.append(read.request(destination))
        self._read(requests)
        for batch in in_batches(indirect, TASK_CHUNKS, TASK_BYTES, attrgetter("nbytes")):
            memory = self._memory(batch)
            self._read([read.request(buffer) for read, buffer in zip(batch, memory, strict=True)])
            for read, chunk in zip(batch, memory, strict=True):
                for piece in read.pieces:
                    piece.place(chunk)

    def _memory(self, reads: Sequence[ChunkRead]) -> Sequence[Array]:
        """Memory for chunks, valid until this thread requests memory for others."""
        kinds = [(read.box.shape, dtypes.from_name(read.entry.dtype)) for read in reads]
        try:
            return self._scratch.arrays(kinds)
        except MemoryError as error:
            where = f"{self._stored.location}: array {reads[0].entry.name!r} {reads[0].box}"
            raise out_of_memory(where, error) from None

    def _read(self, requests: Sequence[Request]) -> None:
        for index in self._stored.read(requests) if requests else ():
            raise mismatch(self._stored, requests[index])
        if self._sizes is not None:
            self._sizes.append(sum(request.out.nbytes for request in requests))


def mismatch(stored: Reader, request: Request) -> Exception:
    """The error for a chunk that does not match its digest."""
    entry, part, number = request.entry, request.part, request.number
    rows, before = stored.digests_of(entry.name), 0
    for first, other in chunk_grid.numbered_parts(entry):
        before = first if other.box == part.box else before
    process = "?" if rows is None else rows[before + number]["process"]
    return stored.damaged(
        f"array {entry.name!r} {part.chunk_box(number)}, written by process {process}: "
        "the stored bytes do not match their digest"
    )


def _direct(read: ChunkRead) -> Array | None:
    """The destination into which a chunk can be read directly: contiguous, of its dtype, and the
    only one."""
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
