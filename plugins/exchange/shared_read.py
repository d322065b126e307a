"""Shared reading: of the chunks that several processes need, one process reads each.

All processes compute the same rounds from the needs of each: which process reads which chunk, and
when the others get it. A `Transport` delivers it: messages between the processes of a job
(`collective_read`), or memory that all processes of a node see (`node_read`). (ByteCheckpoint,
https://arxiv.org/abs/2407.20143, section 4, eliminates repeated reads among replicas in this way.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from unickpt import LoadOptions
from unickpt.extend import (
    Array,
    ArrayEntry,
    ChunkRead,
    ChunkReader,
    Consumer,
    Filled,
    Job,
    LoadCounts,
    Part,
    Reader,
    Task,
    Unchanged,
    boxes_to_fill,
    consumers_by_chunk,
    numbered_parts,
    prepare_buffers,
)
from unickpt.types import Box

Wants = dict[str, list[Box]]
"""Boxes of stored arrays, by name; processes exchange them as JSON."""


def wants_of(jobs: Iterable[Job]) -> Wants:
    """The boxes that this process needs."""
    wants: dict[str, dict[Box, None]] = {}
    for job in jobs:
        for slot in boxes_to_fill(job):
            for source in slot.recipe.sources:
                needed = source.within(slot.box)
                boxes = () if needed is None else needed.boxes
                wants.setdefault(source.entry.name, {}).update(dict.fromkeys(boxes))
    return {name: list(boxes) for name, boxes in wants.items() if boxes}


class Hop(NamedTuple):
    """A box of a chunk on its way from one process to another.

    Arguments:
        is_relayed: whether the sender got it from the reader, on another node.
    """

    box: Box
    sender: int
    receiver: int
    is_relayed: bool = False


class SharedChunk(NamedTuple):
    """A chunk, the process that reads it, and the boxes of it that each process needs.

    `hops` are those from or to this process; None if the reader sends everything itself.
    """

    entry: ArrayEntry
    part: Part
    number: int
    row: int
    box: Box
    owner: int
    wanted_boxes: Mapping[int, Sequence[Box]]
    hops: Sequence[Hop] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the chunk."""
        return self.box.size * self.entry.itemsize

    @property
    def key(self) -> tuple[str, int]:
        """The name of its array, and its row in the array's digest table."""
        return self.entry.name, self.row


Rounds = Sequence[Sequence[SharedChunk]]


def wanted_chunks(
    entry: ArrayEntry, wants: Sequence[Wants]
) -> Iterator[tuple[Part, int, int, dict[int, list[Box]]]]:
    """The needed chunks of an array: part, number, row, and the boxes that each process needs."""
    for first, part in numbered_parts(entry):
        boxes_by_chunk: dict[int, dict[int, list[Box]]] = {}
        for process, of_process in enumerate(wants):
            for box in of_process.get(entry.name, ()):
                for number in part.chunks_in(box):
                    common = part.chunk_box(number).intersect(box)
                    assert common is not None, "the chunk meets the box"
                    boxes_by_chunk.setdefault(number, {}).setdefault(process, []).append(common)
        for number in sorted(boxes_by_chunk):
            yield part, number, first + number, boxes_by_chunk[number]


def moved_bytes(chunk: SharedChunk) -> Mapping[int, int]:
    """The bytes of a chunk that each process sends or receives."""
    itemsize, boxes_by_process = chunk.entry.itemsize, chunk.wanted_boxes.items()
    moved = {
        process: itemsize * sum(box.size for box in boxes) for process, boxes in boxes_by_process
    }
    moved[chunk.owner] = sum(moved.values())
    return moved


def assign(entries: Iterable[ArrayEntry], wants: Sequence[Wants]) -> Iterator[SharedChunk]:
    """All chunks that any process needs; all processes get the same.

    A chunk is read by a process that needs it, the one with the least to read so far.

    Arguments:
        entries: the stored arrays.
        wants: the boxes that each process needs.
    """
    read = [0] * len(wants)
    for entry in entries:
        for part, number, row, boxes_by_process in wanted_chunks(entry, wants):
            owner = min(boxes_by_process, key=lambda process: (read[process], process))
            chunk_box = part.chunk_box(number)
            chunk = SharedChunk(entry, part, number, row, chunk_box, owner, boxes_by_process)
            read[owner] += chunk.nbytes
            yield chunk


def schedule(
    entries: Iterable[ArrayEntry],
    wants: Sequence[Wants],
    held_for: Callable[[SharedChunk], Mapping[int, int]],
    most_bytes: int,
) -> list[list[SharedChunk]]:
    """As `assign`, in rounds.

    Arguments:
        entries: the stored arrays.
        wants: the boxes that each process needs.
        held_for: the bytes of memory that processes need for a chunk until the end of its round.
        most_bytes: the memory of a process for a round, unless a single chunk needs more.
    """
    round_bytes = [0] * len(wants)
    rounds: list[list[SharedChunk]] = [[]]
    for chunk in assign(entries, wants):
        more = held_for(chunk)
        full = max(round_bytes) > most_bytes  # by a chunk that is larger than that
        if rounds[-1] and (full or any(round_bytes[p] + n > most_bytes for p, n in more.items())):
            rounds.append([])
            round_bytes = [0] * len(wants)
        rounds[-1].append(chunk)
        for process, nbytes in more.items():
            round_bytes[process] += nbytes
    return rounds if rounds[0] else []


class Waiting:
    """How long this process waits for each of the others, in steps that all of them end together.

    The last one to come waits the least: so long the step itself takes. Processes learn it from
    each other, in the messages of the next step; no clocks of different machines are compared.

    Arguments:
        counts: of the load.
        index: of this process.
        numbers: of all processes, for `counts`; by default, their indices.
    """

    def __init__(
        self, counts: LoadCounts, index: int, numbers: Sequence[int] | None = None
    ) -> None:
        self._counts, self._index, self._numbers = counts, index, numbers
        self.last_s = 0.0
        """How long the last step took this process."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step."""
        began = time.perf_counter()
        yield
        self.last_s = time.perf_counter() - began

    def learn(self, seconds: Sequence[float]) -> None:
        """Counts how long the step before the last one took each process."""
        last = min(range(len(seconds)), key=seconds.__getitem__)
        if last != self._index:
            number = last if self._numbers is None else self._numbers[last]
            self._counts.wait(seconds[self._index] - seconds[last], number)


class Exchange(Protocol):
    """The exchange of one round between processes."""

    def to_fill(self, chunk: SharedChunk) -> Sequence[tuple[Box, Array]]:
        """Memory for boxes of a chunk that this process reads for others."""

    def is_received(self, chunk: SharedChunk) -> bool:
        """Whether this process takes a chunk from `received`, not from its own read."""

    def exchange(self, error: Exception | None) -> None:
        """Gives the others the chunks that this process has read; called by all.

        Arguments:
            error: why this process cannot.

        Raises:
            Exception: a process cannot continue.
        """

    def received(self, chunk: SharedChunk) -> Sequence[tuple[Box, Array]]:
        """After `exchange`: the boxes of a chunk that this process got."""


class Transport(Protocol):
    """Delivers the chunks that processes read to each other."""

    index: int

    def begin(self, number: int, chunks: Sequence[SharedChunk]) -> Exchange:
        """Begins a round. At most two run at a time: the previous one may not have ended."""

    def end(self, error: Exception | None) -> None:
        """Called by all after the last round. As `Exchange.exchange`."""


@dataclass
class _Round:
    """A round in progress."""

    chunks: Sequence[SharedChunk]
    exchange: Exchange
    tasks: set[Task] = field(default_factory=set)


@dataclass
class _Filling:
    """A job in progress, which is filled with chunks in any order.

    Arguments:
        job: the job.
        left: the number of chunks that it still needs.
        chunks: the number of all that it needs.
        buffers: memory of its targets; None before its first chunk is read.
        consumers: the buffers that need each chunk of its stored arrays, by name and row.
    """

    job: Job
    left: int = 0
    chunks: int = 0
    buffers: dict[str, list[Array]] | None = None
    consumers: dict[tuple[str, int], list[Consumer]] = field(default_factory=dict)


class SharedRead:
    """One load by several processes.

    A round's chunks are read while those of the previous round are exchanged and placed. A process
    that fails keeps taking part until the transport stops it: no other process waits in vain.

    Arguments:
        stored: the checkpoint.
        jobs: the jobs of this process; no two of them read the same stored array.
        options: see `LoadOptions`.
        filled: counts the bytes of destinations.
    """

    def __init__(
        self, stored: Reader, jobs: Sequence[Job], options: LoadOptions, filled: Filled
    ) -> None:
        self._stored, self._verify, self._filled = stored, options.verify, filled
        self._counts = filled.counts
        self._fillings = [_Filling(job) for job in jobs]
        self._by_entry = {entry.name: f for f in self._fillings for entry in f.job.entries}
        self._error: Exception | None = None

    def read(
        self,
        rounds: Iterable[Sequence[SharedChunk]],
        counts: Mapping[str, int],
        transport: Transport,
        done: dict[str, Any],
    ) -> None:
        """Reads, and adds complete leaves to `done`.

        Arguments:
            rounds: as many on all processes, each with all chunks that this one reads or needs.
            counts: the number of chunks of each stored array that this process needs.
            transport: delivers them.
            done: the leaves by name.

        Raises:
            Exception: as raised by the transport, if a process fails.
        """
        self._me, self._done = transport.index, done
        for name, count in counts.items():
            filling = self._by_entry[name]
            filling.left = filling.chunks = filling.chunks + count
        self._reader = ChunkReader(self._stored, sizes=self._counts.read_sizes)
        try:
            for filling in self._fillings:
                if not filling.chunks:
                    self._try(self._finish, filling)
            under_way: _Round | None = None
            for number, chunks in enumerate(rounds):
                begun = _Round(chunks, transport.begin(number, chunks))
                self._try(self._begin, begun)
                if under_way is not None:
                    self._end(under_way)
                under_way = begun
            if under_way is not None:
                self._end(under_way)
            transport.end(self._error)
        finally:
            self._reader.close()

    def _begin(self, begun: _Round) -> None:
        """Begins to read this process's chunks of a round."""
        for chunk in begun.chunks:
            if chunk.owner == self._me:
                consumers = [_copying(chunk, *memory) for memory in begun.exchange.to_fill(chunk)]
                if not begun.exchange.is_received(chunk):
                    consumers += self._consumers(chunk)
                pieces = [piece for consumer in consumers for piece in consumer.pieces(chunk.box)]
                if pieces:
                    begun.tasks.update(self._reader.submit(self._read_of(chunk, pieces)))

    def _read_of(self, chunk: SharedChunk, pieces: Sequence[Any]) -> ChunkRead:
        table = self._stored.digests_of(chunk.entry.name) if self._verify else None
        row = None if table is None else table[chunk.row]
        return ChunkRead(chunk.entry, chunk.part, chunk.number, chunk.box, row, pieces)

    def _end(self, begun: _Round) -> None:
        for task in begun.tasks:
            self._try(self._reader.wait, task)
        begun.exchange.exchange(self._error)
        self._try(self._place, begun)

    def _place(self, begun: _Round) -> None:
        """Takes the boxes that this process needs from the chunks of a round."""

        def place(part: tuple[Box, Array, Sequence[Consumer]]) -> None:
            box, data, consumers = part
            for consumer in consumers:
                for piece in consumer.pieces(box):
                    piece.place(data)

        own_chunks = [chunk for chunk in begun.chunks if self._me in chunk.wanted_boxes]
        self._reader.work(
            place,
            [
                (box, data, self._consumers(chunk))
                for chunk in own_chunks
                if begun.exchange.is_received(chunk)
                for box, data in begun.exchange.received(chunk)
            ],
        )
        for chunk in own_chunks:
            if chunk.owner != self._me:
                boxes = chunk.wanted_boxes[self._me]
                self._counts.received_bytes += chunk.entry.itemsize * sum(b.size for b in boxes)
            filling = self._by_entry[chunk.entry.name]
            filling.left -= 1
            if filling.left:
                self._filled.part(filling.job, filling.chunks - filling.left, filling.chunks)
            else:
                self._finish(filling)

    def _consumers(self, chunk: SharedChunk) -> Sequence[Consumer]:
        """The buffers of this process that need a chunk."""
        filling = self._by_entry[chunk.entry.name]
        self._open(filling)
        return filling.consumers[chunk.key]

    def _open(self, filling: _Filling) -> dict[str, list[Array]]:
        """The memory of a job's targets; allocates it on first use, and fills in elements that need
        no chunk."""
        if filling.buffers is None:
            filling.buffers, by_array = prepare_buffers(self._stored, filling.job, self._verify)
            for name, (entry, consumers) in by_array.items():
                for first, part in numbered_parts(entry):
                    for number, which in consumers_by_chunk(part, consumers).items():
                        filling.consumers[name, first + number] = [consumers[w] for w in which]
        return filling.buffers

    def _finish(self, filling: _Filling) -> None:
        buffers = self._open(filling)
        filling.buffers, filling.consumers = {}, {}
        filling.job.finish(buffers, self._done)
        self._filled.whole([filling.job], filling.job.nbytes)

    def _try(self, work: Callable[..., object], *arguments: Any) -> None:
        """Calls `work`, and keeps the first error for the transport."""
        if self._error is None:
            try:
                work(*arguments)
            except Exception as error:
                self._error = error


def _copying(chunk: SharedChunk, box: Box, memory: Array) -> Consumer:
    """A consumer that fills memory with a box of a chunk."""
    source = Unchanged(chunk.entry)
    needed = source.within(box)
    assert needed is not None, "an empty box is never requested"
    return Consumer(needed, memory, source)
