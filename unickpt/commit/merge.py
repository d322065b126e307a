"""Merge: the descriptions and records of all processes -> one index and one digest table.

Checks that a checkpoint is complete and consistent. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import xxhash

from unickpt.commit.merge_chunks import (
    Patched,
    Requests,
    lost_arrays,
    merged_borrowed,
    merged_digests,
    merged_patched,
    requests,
)
from unickpt.commit.merge_index import per_process, unite, with_boxes, with_errors, with_patches
from unickpt.commit.record import Records
from unickpt.commit.replicas import Difference, Replicas
from unickpt.format import borrowed, digest_table
from unickpt.format.index import Index
from unickpt.reuse.experts import with_steps


@dataclass(frozen=True)
class Merged:
    """What all processes wrote, as one checkpoint.

    Arguments:
        index: of the checkpoint.
        table: the digests of its chunks.
        borrowed: the chunks that are in other checkpoints.
        linking: the processes that linked files of an earlier checkpoint.
        dropped: for each process, the arrays whose chunks are not taken from it.
        differences: the arrays that were assumed to be replicas but differ.
        patched: the chunks that are stored as patches.
    """

    index: Index
    table: digest_table.Table
    borrowed: borrowed.Table
    linking: Sequence[int]
    dropped: Mapping[int, Sequence[str]]
    differences: Sequence[Difference]
    patched: Patched


def merge_all(
    records: Records, described: Mapping[int, Index], request: Callable[[Requests], Records]
) -> Merged:
    """Merges what all processes wrote.

    Arguments:
        records: of all processes, in order.
        described: what they have to save, by the digests in their records.
        request: makes processes write chunks that their planned writers do not hold; returns the
            records of these.

    Raises:
        CoverageError: the processes contradict each other, or leave out a part of an array.
    """
    arrays = {digest: list(index.arrays) for digest, index in described.items()}
    names = [arrays[record.description] for _, record in records]
    index = with_boxes(unite(records, described), records, names)
    replicas = Replicas(records, names)
    assumed, winners = replicas.names, dict[str, int]()
    table, contested = merged_digests(index, records, names, assumed)
    differences = replicas.differences(contested)
    if differences:
        winners = {found.name: found.stored for found in differences}
        table, _ = merged_digests(index, records, names, assumed, winners)
    wrote = {process: record.statistics.get("bytes", 0) for process, record in records}
    missing = requests(index, table, names, winners, wrote)
    written = records
    if missing:
        written = [*records, *request(missing)]
        table, _ = merged_digests(index, written, names, assumed, winners)
        requests(index, table, [])
    bases, there = merged_borrowed(index, written, names, winners)
    patched = merged_patched(index, written, names, winners)
    index = replace(
        index,
        arrays=with_patches(with_errors(index, written, names, winners), patched.counts),
        metadata=with_steps(index.metadata, [(p, record.experts) for p, record in records]),
        per_process=per_process(index, records),
        chunks=len(table),
        reused=int(sum(record.statistics.get("reused_bytes", 0) for _, record in written)),
        digests_xxh3=f"{xxhash.xxh3_64_intdigest(table.tobytes()):016x}",
        bases=bases,
        borrowed=len(there),
        borrowed_xxh3=f"{xxhash.xxh3_64_intdigest(there.tobytes()):016x}" if bases else "",
    )
    linking = sorted({process for process, record in written if record.linked})
    lost = lost_arrays(records, names, winners)
    return Merged(index, table, there, linking, lost, differences, patched)
