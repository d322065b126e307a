"""Reading by the processes of a node together: chunks that several of them need are read once.

Shards rarely end where chunks do, and replicas need the same: alone, every process reads and checks
all chunks that its shard touches. Here each such chunk is read and checked by one process, in
memory that all of them see, and every process takes from it what it needs. That pays where reading
crosses a network; and from a disk, which the system reads once for all of the node, where each
chunk would be taken from its cache and checked several times.

This never changes what a load does. It begins only once as many processes as the launcher started
on this node have come to read the same checkpoint; a process that does not find them after a moment
reads alone, and looks from time to time. Whatever goes wrong afterwards (one of
them fails, ends, is killed, or keeps the others waiting), each of them reads what it still needs
alone. No process but those of the node takes part, so that it costs the same in a job of any size.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from unickpt._version import __version__
from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry
from unickpt.format.reader import Reader
from unickpt.frameworks.process_group import launched_on_node
from unickpt.reading.chunk_reader import ChunkReader, Filled, Task, read_arrays
from unickpt.reading.fillings import (
    Fillings,
    Wants,
    as_json,
    wanted_chunks,
    wants_from,
    wants_of,
)
from unickpt.reading.node_rendezvous import Rendezvous, RendezvousEnded, can_meet, rendezvous
from unickpt.reading.options import LoadOptions
from unickpt.reading.read_plan import ChunkRead, Consumer, Job
from unickpt.reading.recipes import Unchanged
from unickpt.threads import in_batches

_log = logging.getLogger("unickpt")

# What is read more than once must be worth a rendezvous: bytes, and a share of all. From a disk
# the system reads once in any case, and copying once more takes about as long as reading from its
# cache and checking (measured: benchmarks/ranks.py; twice as much is as fast alone).
_LEAST_BYTES, _LEAST_RATIO, _LEAST_RATIO_LOCAL = 64 << 20, 1.25, 3.0
_LEAST_ARRAY_BYTES = 1 << 20
# Processes that load together come within moments. Whoever loads alone waits no longer than this,
# and from a disk no longer than its bytes take at so many a second: less than a tenth of the load.
# Then it begins to read alone, at first so many bytes, and looks each time whether all have come.
_PATIENCE_S, _PATIENCE_BYTES = 2.0, 80 << 30
_ALONE_BYTES, _MOST_ALONE_BYTES = 128 << 20, 1 << 30
_TIMEOUT_S = 60.0
# Of a process, in a round: enough requests in flight; or so little that it stays in a cache.
_ROUND_BYTES, _ROUND_BYTES_LOCAL = 128 << 20, 16 << 20
_ALIGN = 64  # of chunks in shared memory, in bytes


def read_on_node(
    stored: Reader, jobs: Sequence[Job], options: LoadOptions, filled: Filled | None = None
) -> dict[str, Any]:
    """As `read_arrays`, together with the other processes of this node where that reads less."""
    done: dict[str, Any] = {}
    filled = filled or Filled(jobs)
    count = launched_on_node() or 1
    shares = _is_slow(stored) or stored.location.is_local  # not the memory of this process
    if can_meet(count) and shares and stored.index.attempt:
        large = [job for job in jobs if _is_spread(stored, job)]
        wants = wants_of(large)
        mine = _bytes_of(large, wants)
        if _is_worth_sharing(stored, large, mine, count):
            try:
                _read_large(stored, large, options, filled, mine, done)
            except RendezvousEnded as error:
                _log.info("%s: this process reads alone: %s", stored.location, error)
            except Exception as error:  # reading alone says better what it is, if it stays
                _log.warning("%s: this process reads alone: %r", stored.location, error)
    return done | read_arrays(stored, _left(jobs, done), options, filled=filled)


def _left(jobs: Sequence[Job], done: Mapping[str, Any]) -> Sequence[Job]:
    return [job for job in jobs if not job.targets.keys() <= done.keys()] if done else jobs


def _read_large(
    stored: Reader,
    jobs: Sequence[Job],
    options: LoadOptions,
    filled: Filled,
    mine: int,
    done: dict[str, Any],
) -> None:
    """Reads alone until all have come, then together; adds what is complete to `done`.

    Arguments:
        mine: the bytes that this process would read alone.

    Raises:
        RendezvousEnded: the processes cannot meet, or are not together any more.
    """
    index = stored.index
    purpose = f"{__version__} {index.attempt} {index.created} {options.verify}"
    patience_s = _PATIENCE_S if _is_slow(stored) else min(_PATIENCE_S, mine / _PATIENCE_BYTES)
    most, timeout_s = _ALONE_BYTES, min(options.timeout_s, _TIMEOUT_S)
    with (
        rendezvous(purpose, launched_on_node() or 1, timeout_s) as others,
        closing(ChunkReader(stored)) as alone,
    ):
        while left := _left(jobs, done):
            met = others.wait(patience_s)
            if met is not None:
                _NodeRead(stored, left, options, met, filled).read(wants_of(left), done)
                return
            batch = next(in_batches(left, None, most, _stored_bytes))
            done |= read_arrays(stored, batch, options, alone, filled)
            patience_s, most = 0.0, min(2 * most, _MOST_ALONE_BYTES)


def _is_slow(stored: Reader) -> bool:
    """Whether each process that reads a chunk gets it over the network."""
    return stored.location.is_remote


def _is_spread(stored: Reader, job: Job) -> bool:
    """Whether a job's arrays are large, in chunks, and distributed over processes."""
    entries = job.entries
    return (
        all(target.processes > 1 for target in job.targets.values())
        and _stored_bytes(job) >= _LEAST_ARRAY_BYTES
        and not any(stored.reads_boxes(entry) for entry in entries)
    )


def _stored_bytes(job: Job) -> int:
    return sum(entry.nbytes for entry in job.entries)


def _bytes_of(jobs: Sequence[Job], wants: Wants) -> int:
    """Bytes of the chunks that a process needs."""
    entries = {entry.name: entry for job in jobs for entry in job.entries}
    return sum(
        part.chunk_box(number).size * entry.itemsize
        for entry in entries.values()
        for part, number, _, _ in wanted_chunks(entry, [wants])
    )


def _is_worth_sharing(stored: Reader, jobs: Sequence[Job], mine: int, count: int) -> bool:
    """Whether chunks are read more than once, if the other processes need as much as this one.

    All processes should come to the same, or those who meet wait for the others in vain; so this
    depends on the layouts more than on the position of the process in them.
    """
    least = _LEAST_RATIO if _is_slow(stored) else _LEAST_RATIO_LOCAL
    spread = max((t.processes for job in jobs for t in job.targets.values()), default=1)
    whole = sum({e.name: e.nbytes for job in jobs for e in job.entries}.values())
    return spread * mine >= least * whole and min(count, spread) * mine >= _LEAST_BYTES


class _NodeChunk(NamedTuple):
    """A chunk, who reads it, and where it lies in that process's memory; None if only one process
    needs it."""

    entry: ArrayEntry
    part: Part
    number: int
    row: int
    box: Box
    owner: int
    wanted: Mapping[int, Sequence[Box]]
    offset: int | None


def rounds_of(
    entries: Sequence[ArrayEntry], wants: Sequence[Wants], most_bytes: int
) -> tuple[list[list[_NodeChunk]], int, int]:
    """All chunks that any process needs, in rounds; all processes get the same.

    A chunk is read by a process that needs it, the one with the least to read so far.

    Arguments:
        entries: the stored arrays.
        wants: what each process needs.
        most_bytes: of memory that a process has for the shared chunks of a round, unless a single
            one is larger.

    Returns:
        The rounds; the bytes that a process needs for one; and those that are saved, because they
        are not read again.
    """
    read, held = [0] * len(wants), [0] * len(wants)
    rounds: list[list[_NodeChunk]] = [[]]
    largest = saved = 0
    for entry in entries:
        for part, number, row, wanted in wanted_chunks(entry, wants):
            owner = min(wanted, key=lambda process: (read[process], process))
            box = part.chunk_box(number)
            nbytes = -(-box.size * entry.itemsize // _ALIGN) * _ALIGN
            read[owner] += nbytes
            offset = None
            if len(wanted) > 1:
                saved += nbytes * (len(wanted) - 1)
                if held[owner] and held[owner] + nbytes > most_bytes:
                    rounds.append([])
                    held = [0] * len(wants)
                offset = held[owner]
                held[owner] += nbytes
                largest = max(largest, held[owner])
            rounds[-1].append(_NodeChunk(entry, part, number, row, box, owner, wanted, offset))
    return rounds, largest, saved


class _NodeRead:
    """One load by the processes of a node.

    A round's chunks are read while those of the round before are placed, in the other half of the
    memory. At the end of each round all wait for each other: then the half that was placed is free.
    """

    def __init__(
        self,
        stored: Reader,
        jobs: Sequence[Job],
        options: LoadOptions,
        met: Rendezvous,
        filled: Filled,
    ) -> None:
        self._stored, self._options, self._met = stored, options, met
        self._fillings = Fillings(stored, jobs, options.verify, filled)
        self._names = {entry.name for job in jobs for entry in job.entries}

    def read(self, wants: Wants, done: dict[str, Any]) -> None:
        """Reads, and adds what is complete to `done`.

        Raises:
            RendezvousEnded: the processes are not together any more, or little would be gained.
        """
        most = _ROUND_BYTES if _is_slow(self._stored) else _ROUND_BYTES_LOCAL
        most = max(_ALIGN, min(most, self._options.working_bytes // 2))
        every = self._met.gather(json.dumps([as_json(wants), most]).encode())
        told = [json.loads(one) for one in every]
        wanted, most = [wants_from(of) for of, _ in told], min(nbytes for _, nbytes in told)
        entries = [
            e for e in self._stored.index.arrays.values() if any(e.name in w for w in wanted)
        ]
        rounds, half, saved = rounds_of(entries, wanted, most)
        if saved < _LEAST_BYTES:
            raise RendezvousEnded("they need different chunks")
        self._check_agreed(rounds)
        for chunk in (chunk for chunks in rounds for chunk in chunks):
            if self._met.index in chunk.wanted:
                self._fillings.expect(chunk.entry.name)
        self._half, self._shared = half, self._met.share(2 * half)
        self._fillings.begin(done)
        self._reader = ChunkReader(self._stored)
        try:
            self._wait(self._begin(rounds, 0))
            for number, chunks in enumerate(rounds):
                self._met.gather(b"")
                tasks = self._begin(rounds, number + 1)
                self._place(chunks, number, done)
                self._wait(tasks)
        finally:
            self._reader.close()

    def _check_agreed(self, rounds: Sequence[Sequence[_NodeChunk]]) -> None:
        """Whoever took another's chunk for the one that it needs would load other values."""
        facts = [[(c.entry.name, c.row, c.owner, c.offset) for c in chunks] for chunks in rounds]
        planned = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).digest()
        if set(self._met.gather(planned)) != {planned}:
            raise RendezvousEnded("they planned differently")

    def _begin(self, rounds: Sequence[Sequence[_NodeChunk]], number: int) -> set[Task]:
        """Begins to read this process's chunks of a round."""
        chunks = rounds[number] if number < len(rounds) else ()
        return {self._start(chunk, number) for chunk in chunks if chunk.owner == self._met.index}

    def _start(self, chunk: _NodeChunk, number: int) -> Task:
        entry = chunk.entry
        if chunk.offset is None:
            consumers = self._fillings.consumers(entry.name, chunk.row)
        else:
            source = Unchanged(entry)
            needed = source.within(chunk.box)
            assert needed is not None, "a chunk is not empty"
            consumers = [Consumer(needed, self._memory(chunk, number), source)]
        pieces = [piece for consumer in consumers for piece in consumer.pieces(chunk.box)]
        table = self._stored.digests_of(entry.name) if self._options.verify else None
        row = None if table is None else table[chunk.row]
        return self._reader.submit(
            ChunkRead(entry, chunk.part, chunk.number, chunk.box, row, pieces)
        )

    def _wait(self, tasks: set[Task]) -> None:
        for task in tasks:
            self._reader.wait(task)

    def _place(self, chunks: Sequence[_NodeChunk], number: int, done: dict[str, Any]) -> None:
        """Takes what this process needs of the chunks of a round."""

        def place(taken: tuple[Array, Box, Sequence[Consumer]]) -> None:
            data, box, consumers = taken
            for consumer in consumers:
                for piece in consumer.pieces(box):
                    piece.place(data)

        own = [chunk for chunk in chunks if self._met.index in chunk.wanted]
        self._reader.work(
            place,
            [
                (self._memory(c, number), c.box, self._fillings.consumers(c.entry.name, c.row))
                for c in own
                if c.offset is not None
            ],
        )
        for chunk in own:
            self._fillings.placed(chunk.entry.name, done)

    def _memory(self, chunk: _NodeChunk, number: int) -> Array:
        """Where a chunk of a round lies."""
        assert chunk.offset is not None, "it is shared"
        dtype = dtypes.from_name(chunk.entry.dtype)
        begin = number % 2 * self._half + chunk.offset
        bits = self._shared[chunk.owner][begin : begin + chunk.box.size * dtype.itemsize]
        return bits.view(dtype).reshape(chunk.box.shape)
