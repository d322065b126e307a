"""The stored values of processes: read whole, or by ranges."""

from __future__ import annotations

from typing import Protocol

from unickpt.format.index import Index
from unickpt.frameworks.per_process import blob_key
from unickpt.frameworks.sections import StoredValue

_MOST_SPARSE = 1 << 28  # bytes of a section with holes, in which some file systems store zeros


class Keys(Protocol):
    """What is needed of a reader."""

    index: Index

    def read_key(self, key: str, length: int | None = None) -> bytes: ...

    def read_range(
        self, key: str, start: int, length: int, *, may_be_sparse: bool = False
    ) -> bytes: ...

    def damaged(self, reason: str) -> Exception: ...


def stored_value(reader: Keys, name: str, process: int) -> StoredValue:
    """The value of a process for a leaf.

    Arguments:
        reader: of the checkpoint.
        name: of the leaf.
        process: its number.
    """
    entry, key = reader.index.per_process[name], blob_key(name, process)
    size, digest, head = entry.of(process)

    def read(start: int, length: int) -> bytes:
        if length == size:
            return reader.read_key(key, size)
        sparse = start >= head and length <= _MOST_SPARSE
        return reader.read_range(key, start, length, may_be_sparse=sparse)

    def damaged(reason: str) -> Exception:
        return reader.damaged(f"the value of process {process} for {name!r} {reason}")

    return StoredValue(size, digest, head, read, damaged, entry.is_binary)
