"""Chunks that stay in an earlier checkpoint beside the new one, which names it as its base.

Only a checkpoint without a base of its own is borrowed from, so that a checkpoint needs at most one
other, and retention can remove all between them. Check-N-Run (arXiv 2010.08679) calls this a
one-shot differential; when too much has changed since, the next checkpoint is whole again.
"""

from __future__ import annotations

from unickpt.format import borrowed
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry, BaseEntry
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.storage.btree.nodes import DataReference

# Of the base's bytes, the share that a checkpoint must have borrowed for the next one to borrow.
LEAST_USED = 0.5


class Siblings:
    """A base beside the new checkpoint, or the base that this one has itself; a `base.Share`.

    Arguments:
        reader: of the checkpoint before.
    """

    takes_full_chunks = False

    def __init__(self, reader: OcdbtReader) -> None:
        self._reader = reader
        own = BaseEntry(borrowed.name_of(reader.location), reader.manifest_digest)
        self.base = reader.index.bases[0] if reader.index.bases else own

    def is_worthwhile(self) -> bool:
        """Whether enough of the base is still in use. All processes find the same."""
        index = self._reader.index
        if not index.bases:
            return True
        arrays = self._reader.base_index(self.base).arrays.values()
        return index.reused >= LEAST_USED * sum(entry.nbytes for entry in arrays)

    def find(self, entry: ArrayEntry, part: Part, number: int) -> bytes | DataReference | None:
        """Where the base has a chunk: in a data file, or itself, from the B-tree."""
        is_there = not self._reader.index.bases or self._reader.is_borrowed(entry, part, number)
        return self._reader.stored(entry, part, number) if is_there else None

    def unit(self, where: bytes | DataReference) -> str:
        """The data file; empty for the B-tree."""
        return where.path if isinstance(where, DataReference) else ""

    def least_bytes(self, unit: str) -> float:
        """None: `is_worthwhile` decides for all chunks."""
        return 0

    def is_older(self, where: bytes | DataReference) -> bool:
        """Whether the base borrowed it, too."""
        return bool(self._reader.index.bases)

    def take(self, where: bytes | DataReference, *, as_full: bool = False) -> BaseEntry | None:
        """Borrows a chunk; no full chunk."""
        return None if as_full else self.base
