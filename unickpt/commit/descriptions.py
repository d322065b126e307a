"""The descriptions that other processes have published of what they save."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import tensorstore as ts
import xxhash

from unickpt.commit.messages import Record, Records
from unickpt.errors import StorageError
from unickpt.format import index_json
from unickpt.format.index import Index
from unickpt.storage.locations import Location


def read(
    records: Records,
    known_digests: Collection[int],
    folder_of: Callable[[int], Location],
    context: ts.Context,
) -> dict[int, Index]:
    """The descriptions that records name, by their digests; equal ones are read once.

    Arguments:
        records: of all processes.
        known_digests: the digests of those that need not be read.
        folder_of: the folder in which a process writes.
        context: the TensorStore context of the save.

    Raises:
        StorageError: one is damaged.
    """
    first: dict[int, tuple[int, Record]] = {}
    for process, record in records:
        if record.description not in known_digests:
            first.setdefault(record.description, (process, record))
    reads = {
        digest: _reading(record, folder_of(process), context)
        for digest, (process, record) in first.items()
    }
    described = {}
    for digest, result in reads.items():
        process, data = first[digest][0], result()
        where = str(folder_of(process))
        if xxhash.xxh3_64_intdigest(data) != digest:
            raise StorageError(f"{where}: the description of process {process} is damaged")
        described[digest] = index_json.decode(data, where, partial=True)
    return described


def _reading(record: Record, folder: Location, context: ts.Context) -> Callable[[], bytes]:
    """Starts to read a description; returns what waits for it."""
    assert record.described is not None, "only the coordinator does not write its own"
    number, offset, length = record.described
    within = slice(offset, offset + length)
    if number < 0:
        return partial(bytes, record.inline[within])
    future = folder.store(context).read(record.files[number], byte_range=within)
    return lambda: bytes(future.result().value)
