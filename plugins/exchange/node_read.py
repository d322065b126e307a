"""Shared reading by the processes of a node: a chunk that several of them need is read once.

Shards rarely end where chunks do, and replicas need the same chunks: alone, every process reads and
checks all chunks that its shard touches. Here one process reads and checks each such chunk, in
shared memory, and every process copies the part that it needs. That pays off where reading crosses
a network. It also does from a disk: the system reads it once for all of the node, but each chunk
would be copied from its cache and checked several times.

This never changes the result of a load. It begins only when as many processes as the launcher
started on this node have come to read the same checkpoint; one that does not find them soon reads
alone, and checks from time to time. If anything goes wrong afterwards (one of them fails,
ends, is killed, or keeps the others waiting), each reads the rest alone. Only the processes of the
node take part, so the cost does not depend on the size of the job.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from unickpt import LoadOptions
from unickpt.extend import (
    Array,
    ChunkReader,
    Filled,
    Job,
    Reader,
    dtype_from_name,
    in_batches,
    launched_index,
    launched_together,
    read_arrays,
    unickpt_version,
)
from unickpt.plugins.exchange.node_rendezvous import Arrival, Rendezvous, RendezvousEnded, can_meet
from unickpt.plugins.exchange.shared_read import (
    Exchange,
    Rounds,
    SharedChunk,
    SharedRead,
    Waiting,
    Wants,
    schedule,
    wanted_chunks,
    wants_of,
)
from unickpt.types import Box

_log = logging.getLogger("unickpt")

# The bytes read more than once must be worth a rendezvous: their number, and their share of all.
# From a disk the system reads once in any case, and copying once more takes about as long as
# reading from its cache and checking (measured: benchmarks/ranks.py; twice as much is as fast
# alone).
_LEAST_BYTES, _LEAST_RATIO, _LEAST_RATIO_LOCAL = 64 << 20, 1.25, 3.0
_LEAST_ARRAY_BYTES = 1 << 20
# Processes that load together come within moments. A process that loads alone waits at most this
# long, and from a disk at most as long as its bytes take at this rate: under a tenth of the load.
# Then it begins to read alone, at first so many bytes, and checks each time whether all have come.
_PATIENCE_S, _PATIENCE_BYTES = 2.0, 80 << 30
_ALONE_BYTES, _MOST_ALONE_BYTES = 128 << 20, 1 << 30
_TIMEOUT_S = 60.0
# Bytes of a process in a round: enough requests in flight; or so few that they stay in a cache.
_ROUND_BYTES, _ROUND_BYTES_LOCAL = 128 << 20, 16 << 20
_ALIGN = 64  # of chunks in shared memory, in bytes
_ROUNDS_HELD = 3  # in shared memory at a time
# What a process needs, bytes of a round, its number in the job.
_REPORT = msgspec.json.Decoder(tuple[Wants, int, int])
_SECONDS = struct.Struct("<d")


def on_node(
    stored: Reader, jobs: Sequence[Job], options: LoadOptions, filled: Filled
) -> dict[str, Any]:
    """As `read_arrays`, together with the other processes of this node where that reads less."""
    reading = _NodeRead(stored, options, filled)
    count = launched_together(options.group)
    shares = _is_slow(stored) or stored.location.is_local  # not the memory of this process
    if can_meet(count) and shares and stored.index.attempt:
        large = [job for job in jobs if _is_spread(stored, job)]
        mine = _bytes_of(large, wants_of(large))
        if _is_worth_sharing(stored, large, mine, count):
            try:
                reading.read(large, mine)
            except RendezvousEnded as error:
                _log.info("%s: this process reads alone: %s", stored.location, error)
            except Exception as error:  # if it persists, reading alone reports it better
                _log.warning("%s: this process reads alone: %r", stored.location, error)
    return reading.done | read_arrays(stored, reading.left(jobs), options, filled=filled)


@dataclass
class _NodeRead:
    """Reads by a process and others of its node; see `read_arrays` for the arguments."""

    stored: Reader
    options: LoadOptions
    filled: Filled
    done: dict[str, Any] = field(default_factory=dict)

    def left(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """The jobs that are not done."""
        return [job for job in jobs if not job.targets.keys() <= self.done.keys()]

    def read(self, jobs: Sequence[Job], mine: int) -> None:
        """Reads alone until all have come, then together; adds complete leaves to `done`.

        Arguments:
            jobs: the arrays to read.
            mine: the bytes that this process would read alone.

        Raises:
            RendezvousEnded: the processes cannot meet, or no longer are together.
        """
        stored, options = self.stored, self.options
        purpose = f"{unickpt_version} {stored.identity} {options.verify}"
        patience_s = _PATIENCE_S if _is_slow(stored) else min(_PATIENCE_S, mine / _PATIENCE_BYTES)
        counts = self.filled.counts
        most, timeout_s = _ALONE_BYTES, min(options.timeout_s, _TIMEOUT_S)
        with (
            Arrival(purpose, launched_together(options.group), timeout_s) as arrival,
            closing(ChunkReader(stored, sizes=counts.read_sizes)) as alone,
        ):
            while left := self.left(jobs):
                began = time.perf_counter()
                met = arrival.wait(patience_s)
                counts.wait(time.perf_counter() - began)
                if met is not None:
                    self._read_with(met, left)
                    return
                batch = next(in_batches(left, None, most, _stored_bytes))
                self.done |= read_arrays(stored, batch, options, alone, self.filled)
                patience_s, most = 0.0, min(2 * most, _MOST_ALONE_BYTES)

    def _read_with(self, met: Rendezvous, jobs: Sequence[Job]) -> None:
        """Reads together.

        Raises:
            RendezvousEnded: the processes no longer are together, or little would be gained.
        """
        stored, options = self.stored, self.options
        most = _ROUND_BYTES if _is_slow(stored) else _ROUND_BYTES_LOCAL
        most = max(_ALIGN, min(most, options.working_bytes // _ROUNDS_HELD))
        number = launched_index() if options.group is None else options.group.index
        own_report = msgspec.json.encode((wants_of(jobs), most, number))
        reports = list(map(_REPORT.decode, met.gather(own_report)))
        wants = [theirs for theirs, _, _ in reports]
        most = min(nbytes for _, nbytes, _ in reports)
        waiting = Waiting(self.filled.counts, met.index, [process for _, _, process in reports])
        entries = [e for e in stored.index.arrays.values() if any(e.name in w for w in wants)]
        rounds = schedule(entries, wants, _shared_bytes, most)
        spared = [(len(c.wanted_boxes) - 1) * c.nbytes for chunks in rounds for c in chunks]
        if sum(spared) < _LEAST_BYTES:
            raise RendezvousEnded("they need different chunks")
        # A process that took the wrong chunk would load wrong values.
        facts = [[(*chunk.key, chunk.owner) for chunk in chunks] for chunks in rounds]
        planned = hashlib.blake2b(msgspec.json.encode(facts), digest_size=16).digest()
        if set(met.gather(planned)) != {planned}:
            raise RendezvousEnded("they planned differently")
        work = SharedRead(stored, jobs, options, self.filled)
        needed = Counter(
            c.entry.name for chunks in rounds for c in chunks if met.index in c.wanted_boxes
        )
        work.read(rounds, needed, SharedMemory(met, rounds, waiting), self.done)


def _is_slow(stored: Reader) -> bool:
    """Whether each process that reads a chunk gets it over the network."""
    return stored.location.is_remote


def _is_spread(stored: Reader, job: Job) -> bool:
    """Whether a job's arrays are large, in chunks, and distributed over processes."""
    entries = job.entries
    return (
        job.processes > 1
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

    All processes should reach the same result, else those that meet wait for the others in vain; so
    this depends on the layouts more than on the position of the process in them.
    """
    least = _LEAST_RATIO if _is_slow(stored) else _LEAST_RATIO_LOCAL
    spread = max((t.processes for job in jobs for t in job.targets.values()), default=1)
    whole = sum({e.name: e.nbytes for job in jobs for e in job.entries}.values())
    return spread * mine >= least * whole and min(count, spread) * mine >= _LEAST_BYTES


def _shared_bytes(chunk: SharedChunk) -> Mapping[int, int]:
    """Memory of the reading process that a chunk takes, if others need it."""
    aligned = -(-chunk.nbytes // _ALIGN) * _ALIGN
    return {chunk.owner: aligned} if len(chunk.wanted_boxes) > 1 else {}


class SharedMemory:
    """The `Transport` of a node, and the `Exchange` of all its rounds: chunks lie in memory of the
    process that read them, which all processes see.

    There is memory for three rounds: one is read, one is placed, and others may still be copying
    from the one before that.

    Arguments:
        met: the processes.
        rounds: all rounds.
        waiting: measures them.

    Raises:
        RendezvousEnded: there is no such memory.
    """

    def __init__(self, met: Rendezvous, rounds: Rounds, waiting: Waiting) -> None:
        self.index, self._met, self._waiting = met.index, met, waiting
        # For each chunk that others need: the third of its owner's memory, and its offset there.
        self._places: dict[tuple[str, int], tuple[int, int]] = {}
        self._round_bytes = 0
        for number, chunks in enumerate(rounds):
            ends = [0] * met.count
            for chunk in chunks:
                for owner, nbytes in _shared_bytes(chunk).items():
                    self._places[chunk.key] = number % _ROUNDS_HELD, ends[owner]
                    ends[owner] += nbytes
            self._round_bytes = max(self._round_bytes, *ends)
        self._memory = met.share(_ROUNDS_HELD * self._round_bytes)

    def begin(self, number: int, chunks: Sequence[SharedChunk]) -> Exchange:
        return self

    def end(self, error: Exception | None) -> None:
        if error is not None:
            raise error

    def to_fill(self, chunk: SharedChunk) -> Sequence[tuple[Box, Array]]:
        return self.received(chunk) if self.is_received(chunk) else ()

    def is_received(self, chunk: SharedChunk) -> bool:
        return chunk.key in self._places

    def exchange(self, error: Exception | None) -> None:
        self.end(error)
        last_s = _SECONDS.pack(self._waiting.last_s)
        with self._waiting.step():
            messages = self._met.gather(last_s)  # waits for all
        self._waiting.learn([_SECONDS.unpack(message)[0] for message in messages])

    def received(self, chunk: SharedChunk) -> Sequence[tuple[Box, Array]]:
        third, offset = self._places[chunk.key]
        begin = third * self._round_bytes + offset
        bits = self._memory[chunk.owner][begin : begin + chunk.nbytes]
        data = bits.view(dtype_from_name(chunk.entry.dtype)).reshape(chunk.box.shape)
        return [(chunk.box, data)]
