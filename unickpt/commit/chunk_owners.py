"""Which process writes which chunk; all processes compute the same answer."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from unickpt.arrays.box import Box

# Statistics and biases are smaller. Writing all weights in one process would be unbalanced.
_LITTLE_BYTES = 64 << 10


def chunks_of_replica(
    name: str, box: Box, process: int, replicas: Sequence[int], count: int
) -> list[int]:
    """The chunks of a replicated fragment, out of `count`, that a process writes.

    Every replica gets a contiguous run of nearly equal length; a stable hash chooses who begins, so
    that many small fragments spread over the replicas. All processes compute the same answer
    without communication.

    Returns:
        Positions within the fragment's chunks, ascending.
    """
    n = len(replicas)
    if n == 1:
        return list(range(count))
    first = xxhash.xxh3_64_intdigest(f"{name} {box}".encode()) % n
    me = replicas.index(process)
    return [
        k for k in range(count) if replicas[(first + k * n // max(count, n)) % n] == replicas[me]
    ]


def is_little(nbytes: int) -> bool:
    """Whether an array is so small that its writer does not matter for the balance."""
    return nbytes <= _LITTLE_BYTES


def split_assumed(sizes: Sequence[int], whole: Sequence[bool], processes: int) -> list[int]:
    """Which process writes each chunk of the arrays that all processes are assumed to hold.

    Process 0 writes arrays of a single chunk, so that arrays that belong together come from one
    process even if the processes differ: the smallest first, up to its equal share of all bytes,
    and all small ones. The rest is split into one run of chunks per process, so that all write the
    same amount.

    Arguments:
        sizes: bytes of each chunk.
        whole: for each chunk whether it is all of its array.
        processes: the number of processes.
    """
    total, at = sum(sizes), 0
    first, writers = 0, [-1] * len(sizes)
    for number in sorted((n for n, is_all in enumerate(whole) if is_all), key=sizes.__getitem__):
        if not is_little(sizes[number]) and (at + sizes[number]) * processes > total:
            break
        writers[number] = 0
        at += sizes[number]
    if at * processes >= total and processes > 1:  # process 0 has its share
        first, processes, total, at = 1, processes - 1, total - at, 0
    for number, size in enumerate(sizes):
        if writers[number] < 0:
            writers[number] = first + (2 * at + size) * processes // (2 * total)
            at += size
    return writers
