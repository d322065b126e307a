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
from unickpt.format.reader import Reader
from unickpt.frameworks.process_group import launched_together
from unickpt.reading.array_reader import Filled, Job, read_arrays
from unickpt.reading.chunk_reader import ChunkReader
from unickpt.reading.node_rendezvous import Rendezvous, RendezvousEnded, can_meet, rendezvous
from unickpt.reading.options import LoadOptions
from unickpt.reading.shared_read import (
    Exchange,
    Rounds,
    SharedChunk,
    SharedRead,
    Wants,
    as_json,
    schedule,
    wanted_chunks,
    wants_from,
    wants_of,
)
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
_ROUNDS_HELD = 3  # in shared memory at a time


def read_on_node(
    stored: Reader, jobs: Sequence[Job], options: LoadOptions, filled: Filled | None = None
) -> dict[str, Any]:
    """As `read_arrays`, together with the other processes of this node where that reads less."""
    done: dict[str, Any] = {}
    filled = filled or Filled(jobs)
    count = launched_together(options.group)
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
    purpose = f"{__version__} {index.attempt} {index.created} {options.verify} {stored.under}"
    patience_s = _PATIENCE_S if _is_slow(stored) else min(_PATIENCE_S, mine / _PATIENCE_BYTES)
    most, timeout_s = _ALONE_BYTES, min(options.timeout_s, _TIMEOUT_S)
    with (
        rendezvous(purpose, launched_together(options.group), timeout_s) as arrival,
        closing(ChunkReader(stored)) as alone,
    ):
        while left := _left(jobs, done):
            met = arrival.wait(patience_s)
            if met is not None:
                _read_with(stored, left, options, filled, met, done)
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

    All processes should come to the same, or those who meet wait for the others in vain; so this
    depends on the layouts more than on the position of the process in them.
    """
    least = _LEAST_RATIO if _is_slow(stored) else _LEAST_RATIO_LOCAL
    spread = max((t.processes for job in jobs for t in job.targets.values()), default=1)
    whole = sum({e.name: e.nbytes for job in jobs for e in job.entries}.values())
    return spread * mine >= least * whole and min(count, spread) * mine >= _LEAST_BYTES


def _shared_bytes(chunk: SharedChunk) -> Mapping[int, int]:
    """Memory that a chunk takes of the process that reads it, if others need it."""
    return {chunk.owner: _aligned(chunk)} if len(chunk.wanted_boxes) > 1 else {}


def _aligned(chunk: SharedChunk) -> int:
    return -(-chunk.nbytes // _ALIGN) * _ALIGN


def _read_with(
    stored: Reader,
    jobs: Sequence[Job],
    options: LoadOptions,
    filled: Filled,
    met: Rendezvous,
    done: dict[str, Any],
) -> None:
    """Reads, and adds what is complete to `done`.

    Raises:
        RendezvousEnded: the processes are not together any more, or little would be gained.
    """
    most = _ROUND_BYTES if _is_slow(stored) else _ROUND_BYTES_LOCAL
    most = max(_ALIGN, min(most, options.working_bytes // _ROUNDS_HELD))
    own_report = json.dumps([as_json(wants_of(jobs)), most]).encode()
    reports = [json.loads(message) for message in met.gather(own_report)]
    wants = [wants_from(encoded) for encoded, _ in reports]
    most = min(nbytes for _, nbytes in reports)
    entries = [e for e in stored.index.arrays.values() if any(e.name in w for w in wants)]
    rounds = schedule(entries, wants, _shared_bytes, most)
    if (
        sum((len(c.wanted_boxes) - 1) * c.nbytes for chunks in rounds for c in chunks)
        < _LEAST_BYTES
    ):
        raise RendezvousEnded("they need different chunks")
    # Whoever took another's chunk for the one that it needs would load other values.
    facts = [[(*chunk.key, chunk.owner) for chunk in chunks] for chunks in rounds]
    planned = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).digest()
    if set(met.gather(planned)) != {planned}:
        raise RendezvousEnded("they planned differently")
    SharedRead(stored, jobs, options, filled).read(rounds, SharedMemory(met, rounds), done)


class SharedMemory:
    """The `Transport` of a node: chunks lie in memory of who read them, which all processes see.

    There is memory for three rounds: one is read, one is placed, and from the one before that
    others may still be taking what they need.

    Arguments:
        met: the processes.
        rounds: all rounds.

    Raises:
        RendezvousEnded: there is no such memory.
    """

    def __init__(self, met: Rendezvous, rounds: Rounds) -> None:
        self.index, self._met = met.index, met
        self._offsets: dict[tuple[str, int], int] = {}
        self._round_bytes = 0
        for chunks in rounds:
            ends = [0] * met.count
            for chunk in chunks:
                for owner, nbytes in _shared_bytes(chunk).items():
                    self._offsets[chunk.key] = ends[owner]
                    ends[owner] += nbytes
            self._round_bytes = max(self._round_bytes, *ends)
        self._memory = met.share(_ROUNDS_HELD * self._round_bytes)

    def begin(self, number: int, chunks: Sequence[SharedChunk]) -> Exchange:
        return _RoundInMemory(self, number % _ROUNDS_HELD * self._round_bytes)

    def end(self, error: Exception | None) -> None:
        if error is not None:
            raise error

    def gather(self) -> None:
        """Waits for all."""
        self._met.gather(b"")

    def is_shared(self, chunk: SharedChunk) -> bool:
        """Whether others need a chunk."""
        return chunk.key in self._offsets

    def view(self, chunk: SharedChunk, begin: int) -> Array:
        """The memory of a shared chunk.

        Arguments:
            begin: where that of the round begins.
        """
        begin += self._offsets[chunk.key]
        bits = self._memory[chunk.owner][begin : begin + chunk.nbytes]
        return bits.view(dtypes.from_name(chunk.entry.dtype)).reshape(chunk.box.shape)


class _RoundInMemory(NamedTuple):
    """A round in shared memory, and where it begins."""

    memory: SharedMemory
    begin: int

    def to_fill(self, chunk: SharedChunk) -> Sequence[tuple[Box, Array]]:
        return self.received(chunk) if self.is_received(chunk) else ()

    def is_received(self, chunk: SharedChunk) -> bool:
        return self.memory.is_shared(chunk)

    def exchange(self, error: Exception | None) -> None:
        self.memory.end(error)
        self.memory.gather()

    def received(self, chunk: SharedChunk) -> Sequence[tuple[Box, Array]]:
        return [(chunk.box, self.memory.view(chunk, self.begin))]
