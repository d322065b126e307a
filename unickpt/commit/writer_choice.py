"""The owner of each chunk: the process that writes it; all processes compute the same one.

Nothing is communicated. The processes that hold a chunk are its *replicas*. Each of them computes
the writer from facts that all of them know: the arrays that they hold alike, and so those of the
larger groups that contain theirs. The bytes of other groups, such as experts and pipeline stages,
are known from an earlier save (`JobBytes`), those of experts that take turns from the previous
step. Shared arrays then go to the processes with less to write. If processes know different numbers
after a failure, a chunk may have two writers or none: the merge drops one, or requests the chunk.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import xxhash

from unickpt.frameworks.job_bytes import ExpectedBytes, JobBytes, Replicas, writers_of

# Statistics and biases are smaller. Writing all weights in one process would be unbalanced.
_LITTLE_BYTES = 64 << 10
# The golden ratio of 2^64: its multiples spread evenly.
_GOLDEN = 0x9E3779B97F4A7C15


class Shared(NamedTuple):
    """Chunks that the same processes hold: those of a part that lie in one fragment.

    Arguments:
        key: of the part.
        start: of the fragment's box.
        replicas: the processes that hold them, ascending.
        chunks: how many.
        nbytes: of all of them.
    """

    key: str
    start: tuple[int, ...]
    replicas: tuple[int, ...]
    chunks: int
    nbytes: int


@dataclass(frozen=True)
class Workload:
    """The facts besides the replicas by which chunks are shared out, alike on all processes.

    Arguments:
        alone: by process, the bytes that it writes in any case besides the groups of `job`.
        job: the bytes of all groups, if known.
        most_writers: how many replicas of a chunk may write it; None for all.
    """

    alone: Mapping[int, int] = field(default_factory=dict)
    job: JobBytes | None = None
    most_writers: int | None = None

    @cached_property
    def _expected(self) -> ExpectedBytes | None:
        return None if self.job is None else self.job.expected(self.alone, self.most_writers)

    def writers(self, replicas: Replicas) -> Replicas:
        """The replicas that may write."""
        return writers_of(replicas, self.most_writers)

    def beside(self, replicas: Replicas, without: Iterable[Replicas]) -> dict[int, int]:
        """The bytes that the writers of a group have to write besides some groups."""
        writers = self.writers(replicas)
        if self._expected is None:
            return {process: self.alone.get(process, 0) for process in writers}
        return self._expected.beside(writers, without)


_EQUAL = Workload()


def shares(fragments: Sequence[Shared], process: int, work: Workload = _EQUAL) -> list[range]:
    """The run of chunks of each fragment, by position, that a process writes.

    Each chunk goes to the replica with the fewest bytes so far, the largest chunks first, so that
    at the end the bytes of two processes of a group differ by a small chunk. Bytes that they write
    for larger groups, and the expected ones of other groups, count from the beginning.

    Arguments:
        fragments: the fragments that the process holds.
        process: whose runs are returned.
        work: of all processes.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    # By identity: hashing thousands of processes takes long.
    groups_by_id: dict[int, list[int]] = {}
    for index, unit in enumerate(fragments):
        group = groups_by_id.get(id(unit.replicas))
        if group is None:
            group = groups_by_id[id(unit.replicas)] = groups.setdefault(unit.replicas, [])
        group.append(index)
    ranges = {index: range(unit.chunks) for index, unit in enumerate(fragments)}
    done = list[tuple[Replicas, set[int], dict[int, int]]]()  # bytes of groups that are shared out
    for replicas in sorted(groups, key=lambda group: (-len(group), group)):
        if len(replicas) == 1:
            continue
        members = set(replicas)
        larger = [group for group in done if group[1] >= members]
        beside = work.beside(replicas, [replicas, *(group for group, _, _ in larger)])
        written = {
            p: nbytes + sum(parts.get(p, 0) for _, _, parts in larger)
            for p, nbytes in beside.items()
        }
        before, units = dict(written), {index: fragments[index] for index in groups[replicas]}
        ranges |= _share_out(units, written, process)
        done.append((replicas, members, {p: written[p] - before[p] for p in written}))
    return [*ranges.values()]


def shares_of_assumed(
    fragments: Sequence[Shared], process: int, work: Workload = _EQUAL
) -> list[range]:
    """The same for whole arrays that all processes are assumed to hold, split over all of them.

    Process 0 writes arrays of a single chunk, so that arrays that belong together come from one
    process even if the processes differ: the smallest first, up to its equal share of all bytes,
    and all small ones. The rest is split so that all write the same amount. Arguments as for
    `shares`.
    """
    if not fragments:
        return []
    written = work.beside(fragments[0].replicas, ())
    first = written[0]
    total = sum(unit.nbytes for unit in fragments) + sum(written.values())
    left = dict(enumerate(fragments))
    ranges = {index: range(unit.chunks * (process == 0)) for index, unit in left.items()}
    single = [(unit.nbytes, unit.key, index) for index, unit in left.items() if unit.chunks == 1]
    for nbytes, _, index in sorted(single):
        if not is_little(nbytes) and (first + nbytes) * len(written) > total:
            break
        del left[index]
        first += nbytes
    ranges |= _share_out(left, written | {0: first}, process)
    return [*ranges.values()]


def is_little(nbytes: int) -> bool:
    """Whether an array is so small that its writer does not matter for the balance."""
    return nbytes <= _LITTLE_BYTES


def _share_out(
    units: Mapping[int, Shared], written: dict[int, int], process: int
) -> dict[int, range]:
    """Splits fragments of one group; each replica gets a run of a fragment's chunks.

    Arguments:
        units: the fragments, by index.
        written: bytes of each process so far; the new ones are added.
        process: whose runs are returned.
    """
    ranges = dict[int, range]()
    # Processes with equally few bytes take turns in an order that spreads over any regular smaller
    # group, so that the smaller group can balance it, and that begins elsewhere for each group.
    turn = xxhash.xxh3_64_intdigest(repr(sorted(written)).encode())
    least = [
        (nbytes, (n * _GOLDEN + turn) % (1 << 64), p)
        for n, (p, nbytes) in enumerate(written.items())
    ]
    heapq.heapify(least)
    # By key and start: dicts may have another order on other processes.
    order = [(-(u.nbytes // u.chunks), u.key, u.start, index) for index, u in units.items()]
    for *_, index in sorted(order):
        unit = units[index]
        chunk_bytes = -(-unit.nbytes // unit.chunks)
        counts: dict[int, int] = {}
        for _ in range(unit.chunks):
            nbytes, place, p = least[0]
            heapq.heapreplace(least, (nbytes + chunk_bytes, place, p))
            counts[p] = counts.get(p, 0) + 1
        ranges[index] = _run(counts, process)
    written.update((p, nbytes) for nbytes, _, p in least)
    return ranges


def _run(counts: Mapping[int, int], process: int) -> range:
    """The run of a process, if runs follow each other in the order of the processes."""
    if process not in counts:
        return range(0)
    first = sum(count for p, count in counts.items() if p < process)
    return range(first, first + counts[process])
