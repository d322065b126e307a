"""Merge: the descriptions and records of all processes -> one index and one digest table.

Checks that a checkpoint is complete and consistent. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from unickpt.commit.merge_chunks import Chunks, Requests, merged_chunks, requests
from unickpt.commit.merge_index import per_process, unite, with_boxes, with_errors, with_patches
from unickpt.commit.record import Records
from unickpt.commit.replicas import Difference, Replicas
from unickpt.format import digest_table
from unickpt.format.index import Index
from unickpt.reuse.experts import with_steps


@dataclass(frozen=True)
class Merged:
    """What all processes wrote, as one checkpoint.

    Arguments:
        index: of the checkpoint.
        chunks: all of its chunks.
        differences: the arrays that were assumed to be replicas but differ.
    """

    index: Index
    chunks: Chunks
    differences: Sequence[Difference]


@dataclass(frozen=True)
class Totals:
    """Number of arrays of a checkpoint, and their logical bytes."""

    arrays: int
    nbytes: int

    @classmethod
    def of(cls, index: Index) -> Totals:
        return cls(len(index.arrays), sum(entry.nbytes for entry in index.arrays.values()))


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
    replicas = Replicas(records, names) if len(records) > 1 else None
    assumed, winners = set[str]() if replicas is None else replicas.names, dict[str, int]()
    chunks = merged_chunks(index, records, names, assumed)
    differences = [] if replicas is None else replicas.differences(chunks.contested)
    if differences:
        winners = {found.name: found.stored for found in differences}
        chunks = merged_chunks(index, records, names, assumed, winners)
    wrote = {process: record.statistics.get("bytes", 0) for process, record in records}
    missing = requests(index, chunks.table, names, winners, wrote)
    written = records
    if missing:
        written = [*records, *request(missing)]
        chunks = merged_chunks(index, written, names, assumed, winners)
        requests(index, chunks.table, [])
    lent = chunks.borrowed.tobytes()
    index = replace(
        index,
        arrays=with_patches(
            with_errors(index, written, names, winners), chunks.patched(index.arrays)
        ),
        metadata=_metadata(index, records),
        per_process=per_process(index, records),
        chunks=len(chunks.table),
        reused=int(sum(record.statistics.get("reused_bytes", 0) for _, record in written)),
        digests_xxh3=f"{xxhash.xxh3_64_intdigest(chunks.table.tobytes()):016x}",
        digest_blocks=digest_table.blocks(chunks.table),
        bases=chunks.bases,
        borrowed=len(chunks.borrowed),
        borrowed_xxh3=f"{xxhash.xxh3_64_intdigest(lent):016x}" if chunks.bases else "",
    )
    return Merged(index, chunks, differences)


def _metadata(index: Index, records: Records) -> Mapping[str, Any]:
    """The metadata, with the steps of experts, if some may be left out of a save."""
    steps = [(process, record.experts) for process, record in records]
    return with_steps(index.metadata, steps) if any(each for _, each in steps) else index.metadata
