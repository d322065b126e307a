"""The owner of each chunk: the process that writes it; all processes compute the same one.

Nothing is communicated. The processes that hold a chunk are its *replicas*. Each of them computes
the writer from facts that all of them know: the arrays that they hold alike. So only chunks of the
same replicas are balanced with each other, and with those of larger groups that contain them.
(The load of other groups is not known to all of them, unless the previous step records it: for
experts that take turns it does, so that other arrays go to processes that write few experts.)
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import xxhash

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


_NOTHING: Mapping[int, int] = {}


def shares(
    fragments: Sequence[Shared], process: int, alone: Mapping[int, int] = _NOTHING
) -> list[range]:
    """The run of chunks of each fragment, by position, that a process writes.

    Each chunk goes to the replica with the fewest bytes so far, the largest chunks first, so that
    at the end the bytes of two processes of a group differ by a small chunk. Bytes that they write
    for larger groups count from the beginning.

    Arguments:
        fragments: the fragments that the process holds.
        process: whose runs are returned.
        alone: by process, the bytes that it writes in any case besides these; equal on all
            processes.
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
    done: list[dict[int, int]] = []  # bytes by process, of groups that were shared out
    for replicas in sorted(groups, key=lambda group: (-len(group), group)):
        if len(replicas) == 1:
            continue
        larger = [group for group in done if group.keys() >= set(replicas)]
        written = {p: alone.get(p, 0) + sum(group[p] for group in larger) for p in replicas}
        before, units = dict(written), {index: fragments[index] for index in groups[replicas]}
        ranges |= _share_out(units, written, process)
        done.append({p: written[p] - before[p] for p in replicas})
    return [*ranges.values()]


def shares_of_assumed(
    fragments: Sequence[Shared], process: int, alone: Mapping[int, int] = _NOTHING
) -> list[range]:
    """The same for whole arrays that all processes are assumed to hold, split over all of them.

    Process 0 writes arrays of a single chunk, so that arrays that belong together come from one
    process even if the processes differ: the smallest first, up to its equal share of all bytes,
    and all small ones. The rest is split so that all write the same amount. Arguments as for
    `shares`.
    """
    if not fragments:
        return []
    processes = fragments[0].replicas
    first = alone.get(0, 0)
    total = sum(unit.nbytes for unit in fragments) + sum(alone.get(p, 0) for p in processes)
    left = dict(enumerate(fragments))
    ranges = {index: range(unit.chunks * (process == 0)) for index, unit in left.items()}
    single = [(unit.nbytes, unit.key, index) for index, unit in left.items() if unit.chunks == 1]
    for nbytes, _, index in sorted(single):
        if not is_little(nbytes) and (first + nbytes) * len(processes) > total:
            break
        del left[index]
        first += nbytes
    written = {p: alone.get(p, 0) for p in processes} | {0: first}
    ranges |= _share_out(left, written, process)
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
