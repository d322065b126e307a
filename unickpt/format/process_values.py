"""The stored values of processes: read whole, or by ranges."""

from __future__ import annotations

from unickpt.format.chunk_store import ChunkStore
from unickpt.format.index import Index
from unickpt.frameworks.per_process import blob_key
from unickpt.frameworks.sections import StoredValue

_MOST_SPARSE = 1 << 28  # bytes of a section with holes, in which some file systems store zeros


def stored_value(index: Index, chunks: ChunkStore, name: str, process: int) -> StoredValue:
    """The value of a process for a leaf.

    Arguments:
        index: of the checkpoint.
        chunks: its database.
        name: of the leaf.
        process: its number.
    """
    entry, key = index.per_process[name], blob_key(name, process)
    size, digest, head = entry.of(process)

    def read(start: int, length: int) -> bytes:
        if length == size:
            return chunks.read_key(key, size)
        sparse = start >= head and length <= _MOST_SPARSE
        return chunks.read_range(key, start, length, may_be_sparse=sparse)

    def damaged(reason: str) -> Exception:
        return chunks.damaged(f"the value of process {process} for {name!r} {reason}")

    return StoredValue(size, digest, head, read, damaged, entry.is_binary)
