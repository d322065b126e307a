"""Collective reading: the processes of a job read each chunk once, and send it to each other.

Every process sends the others the boxes of stored arrays that it needs. All then compute the same
schedule: who reads which chunk, and where its boxes go. (ByteCheckpoint,
https://arxiv.org/abs/2407.20143, section 4, eliminates repeated reads among replicas in this way.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    CheckpointReplaced,
    ProcessFailed,
    SaveTimeout,
)
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry
from unickpt.format.reader import Reader
from unickpt.frameworks.process_group import Group, all_gather_bytes
from unickpt.progress import ProgressFunction, nothing, reporting
from unickpt.reading.chunk_reader import ChunkReader, Filled, ReadArrays
from unickpt.reading.fillings import (
    Fillings,
    Wants,
    as_json,
    wanted_chunks,
    wants_from,
    wants_of,
)
from unickpt.reading.options import LoadOptions
from unickpt.reading.read_plan import ChunkRead, Consumer, Job
from unickpt.reading.recipes import Unchanged

_LOADING = "loading"
_ALIGN = 16  # bytes, also of a message's header, whose first byte is the status
_IN_FLIGHT = 4  # buffers in the budget: for two rounds, what is sent and what is received

# A caller may recover from these with a new or older checkpoint or a copy; then all must.
_SAME: Mapping[str, type[Exception]] = {
    kind.__name__: kind for kind in (CheckpointCorrupt, CheckpointNotFound, CheckpointReplaced)
}


@contextmanager
def exchanging(group: Group, options: LoadOptions) -> Iterator[ReadArrays]:
    """The function that reads arrays for all processes of a job together.

    If one process fails before it is called, the others learn of it.

    Arguments:
        group: the job.
        options: see `LoadOptions`.
    """
    exchange = _Exchange(group, options)
    try:
        with reporting(options.progress, _LOADING, group.index) as told:
            exchange.told = told
            yield exchange.read
    except Exception as error:
        with suppress(_Unreachable):  # then this error says more
            exchange.fail(error)  # raises if the others do not know yet
        raise


class _Unreachable(ProcessFailed):
    """The processes cannot exchange anything any more."""


class _ExchangedChunk(NamedTuple):
    """A chunk, its reader, and the boxes of it that each process needs."""

    entry: ArrayEntry
    part: Part
    number: int
    row: int
    box: Box
    owner: int
    wanted: Mapping[int, Sequence[Box]]


def schedule(
    entries: Sequence[ArrayEntry], wants: Sequence[Wants], budget_bytes: int
) -> Iterator[list[_ExchangedChunk]]:
    """All chunks that any process needs, in rounds; all processes get the same result.

    A chunk is read by a process that needs it, the one with the least to read so far.

    Arguments:
        entries: the stored arrays.
        wants: what each process needs.
        budget_bytes: the most bytes that a process sends and receives in a round, unless a single
            chunk is larger.
    """
    read = [0] * len(wants)
    held = [0] * len(wants)
    batch: list[_ExchangedChunk] = []
    for entry in entries:
        itemsize = dtypes.from_name(entry.dtype).itemsize
        for part, number, row, wanted in wanted_chunks(entry, wants):
            owner = min(wanted, key=lambda process: (read[process], process))
            box = part.chunk_box(number)
            read[owner] += box.size
            chunk = _ExchangedChunk(entry, part, number, row, box, owner, wanted)
            moved = {p: itemsize * sum(b.size for b in boxes) for p, boxes in wanted.items()}
            moved[owner] = sum(moved.values())
            full = max(held) > budget_bytes  # by a chunk that is larger than that
            if batch and (full or any(held[p] + n > budget_bytes for p, n in moved.items())):
                yield batch
                batch, held = [], [0] * len(wants)
            batch.append(chunk)
            for process, nbytes in moved.items():
                held[process] += nbytes
    if batch:
        yield batch


class _SentBox(NamedTuple):
    """A box of a chunk that is sent, and its place in the message of a process."""

    chunk: _ExchangedChunk
    box: Box
    process: int
    offset: int


class _Messages:
    """What a process sends to or receives from each process in a round: a header, then boxes."""

    def __init__(self, count: int) -> None:
        self.sizes = [_ALIGN] * count
        self.items: list[_SentBox] = []

    def add(self, chunk: _ExchangedChunk, box: Box, process: int) -> _SentBox:
        item = _SentBox(chunk, box, process, self.sizes[process])
        nbytes = box.size * dtypes.from_name(chunk.entry.dtype).itemsize
        self.sizes[process] += -(-nbytes // _ALIGN) * _ALIGN
        self.items.append(item)
        return item

    @cached_property
    def starts(self) -> list[int]:
        """Where each message begins, after everything was added."""
        return [0, *accumulate(self.sizes)][:-1]

    def view(self, data: Array, item: _SentBox) -> Array:
        """A box in the bytes of all messages."""
        dtype = dtypes.from_name(item.chunk.entry.dtype)
        begin = self.starts[item.process] + item.offset
        bits = data[begin : begin + item.box.size * dtype.itemsize]
        return bits.view(dtype).reshape(item.box.shape)


@dataclass
class _Round:
    """A batch of chunks in progress."""

    chunks: Sequence[_ExchangedChunk]
    sent: _Messages
    received: _Messages
    outbox: Array
    tasks: set[Any] = field(default_factory=set)


class _Exchange:
    """One load by all processes of a group.

    A process that fails keeps taking part until all know of it, so that nobody waits for it. The
    error of the first failed process decides for all, so that all continue in the same way.
    """

    def __init__(self, group: Group, options: LoadOptions) -> None:
        self._group, self._options = group, options
        self._has_reported = False
        self._error: Exception | None = None
        self.told: ProgressFunction = nothing

    def fail(self, error: Exception) -> None:
        """Tells the others, if they still wait for what this process needs."""
        if not self._has_reported:
            self._error = error
            self._exchange_wants({}, "")

    def read(self, stored: Reader, jobs: Sequence[Job]) -> dict[str, Any]:
        """As `read_arrays`, by all processes together.

        Raises:
            ProcessFailed: another process failed; has that process's message.
        """
        filled = Filled(jobs, self.told)
        self._fillings = Fillings(stored, jobs, self._options.verify, filled)
        opened = f"{stored.index.attempt} {stored.index.created}"
        wants, least = self._exchange_wants(wants_of(jobs), opened)
        budget = max(1, least // _IN_FLIGHT)
        rounds = list(schedule(list(stored.index.arrays.values()), wants, budget))
        for chunk in (chunk for chunks in rounds for chunk in chunks):
            if self._group.index in chunk.wanted:
                self._fillings.expect(chunk.entry.name)
        done: dict[str, Any] = {}
        self._stored, self._reader = stored, ChunkReader(stored)
        try:
            self._try(self._fillings.begin, done)
            under_way: _Round | None = None
            for chunks in [*rounds, None]:
                begun = None if chunks is None else self._begin(chunks)
                if under_way is not None:
                    self._end(under_way, done)
                under_way = begun
            self._gather_reports()
        finally:
            self._reader.close()
        return done

    def _exchange_wants(self, mine: Wants, opened: str) -> tuple[list[Wants], int]:
        """What each process needs, and the least memory that one has for this, in bytes; raises if
        one has already failed.

        Arguments:
            mine: what this one needs.
            opened: which checkpoint it opened.

        Raises:
            CheckpointReplaced: in all processes, if they opened different checkpoints.
        """
        self._has_reported = True
        reports = self._gather_reports([as_json(mine), opened, self._options.working_bytes])
        if len({of for _, of, _ in reports}) > 1:
            raise CheckpointReplaced(
                "the processes opened different checkpoints, because a save replaced the one at "
                "this path; load again"
            )
        wants = [wants_from(theirs) for theirs, _, _ in reports]
        return wants, min(int(working) for _, _, working in reports)

    # --- a round --------------------------------------------------------------------------------

    def _begin(self, chunks: Sequence[_ExchangedChunk]) -> _Round:
        """Begins to read this process's chunks of a round."""
        me, count = self._group.index, self._group.count
        sent, received = _Messages(count), _Messages(count)
        own: list[tuple[_ExchangedChunk, list[_SentBox]]] = []
        for chunk in chunks:
            if chunk.owner == me:
                others = [(p, box) for p, of_p in chunk.wanted.items() for box in of_p if p != me]
                own.append((chunk, [sent.add(chunk, box, p) for p, box in others]))
            else:
                for box in chunk.wanted.get(me, ()):
                    received.add(chunk, box, chunk.owner)
        begun = _Round(chunks, sent, received, np.empty(sum(sent.sizes), np.uint8))
        self._try(self._read, begun, own)
        return begun

    def _read(
        self, begun: _Round, own: Sequence[tuple[_ExchangedChunk, Sequence[_SentBox]]]
    ) -> None:
        for chunk, items in own:
            consumers = self._fillings.consumers(chunk.entry.name, chunk.row)
            pieces = [piece for consumer in consumers for piece in consumer.pieces(chunk.box)]
            for item in items:
                source = Unchanged(chunk.entry)
                needed = source.within(item.box)
                assert needed is not None, "nobody needs an empty box"
                memory = begun.sent.view(begun.outbox, item)
                pieces += Consumer(needed, memory, source).pieces(chunk.box)
            if pieces:
                verify = self._options.verify
                table = self._stored.digests_of(chunk.entry.name) if verify else None
                row = None if table is None else table[chunk.row]
                read = ChunkRead(chunk.entry, chunk.part, chunk.number, chunk.box, row, pieces)
                begun.tasks.add(self._reader.submit(read))

    def _end(self, begun: _Round, done: dict[str, Any]) -> None:
        """Sends what this process read, receives what the others read, and places it."""
        for task in begun.tasks:
            self._try(self._reader.wait, task)
        begun.outbox[begun.sent.starts] = self._error is not None
        inbox = _exchange(self._group, begun.outbox, begun.sent.sizes, begun.received.sizes)
        if self._error is not None or inbox[begun.received.starts].any():
            self._gather_reports()
        self._try(self._place, begun, inbox, done)

    def _place(self, begun: _Round, inbox: Array, done: dict[str, Any]) -> None:
        def place(received: tuple[_SentBox, Sequence[Consumer]]) -> None:
            item, consumers = received
            data = begun.received.view(inbox, item)
            for consumer in consumers:
                for piece in consumer.pieces(item.box):
                    piece.place(data)

        items = begun.received.items
        self._reader.work(
            place,
            [
                (item, self._fillings.consumers(item.chunk.entry.name, item.chunk.row))
                for item in items
            ],
        )
        for chunk in begun.chunks:
            if self._group.index in chunk.wanted:
                self._fillings.placed(chunk.entry.name, done)

    # --- errors ---------------------------------------------------------------------------------

    def _try(self, work: Callable[..., object], *arguments: Any) -> None:
        """Calls `work`, and keeps the first error for `_gather_reports`."""
        if self._error is None:
            try:
                work(*arguments)
            except Exception as error:
                self._error = error

    def _gather_reports(self, report: Any = None) -> list[Any]:
        """What every process reports; if any failed, raises the error of the first one.

        Called by all processes at the same point.
        """
        error = self._error
        failed = None if error is None else [type(error).__name__, str(error)]
        every = [json.loads(x) for x in _gather(self._group, json.dumps([failed, report]).encode())]
        for process, (failure, _) in enumerate(every):
            if failure is None:
                continue
            if error is not None and process == self._group.index:
                raise error
            kind, text = failure
            made = _SAME.get(kind, ProcessFailed)
            raise made(f"process {process} failed: {kind}: {text}") from error
        return [theirs for _, theirs in every]


def _gather(group: Group, data: bytes) -> list[bytes]:
    """The `data` of each process of a group."""
    with _reaching():
        return all_gather_bytes(group, data)


def _exchange(group: Group, data: Array, sent: Sequence[int], received: Sequence[int]) -> Array:
    with _reaching():
        return group.exchange(data, sent, received)


@contextmanager
def _reaching() -> Iterator[None]:
    """Raises what kept the processes from communicating as `_Unreachable`."""
    try:
        yield
    except SaveTimeout as error:
        raise _Unreachable(str(error)) from error
    except RuntimeError as error:
        raise _Unreachable(
            "the processes could not exchange the chunks that they read; one of them may have "
            f"ended: {error}"
        ) from error
