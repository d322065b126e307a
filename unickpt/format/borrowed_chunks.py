"""The chunks that a checkpoint has in sibling checkpoints, its bases."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property

import numpy as np

from unickpt.errors import CheckpointCorrupt, UnickptError
from unickpt.format import borrowed, chunk_grid
from unickpt.format.chunk_grid import Part
from unickpt.format.index import BORROWED_KEY, ArrayEntry, Index
from unickpt.format.verified_chunks import ChunkDigests, ChunkStore
from unickpt.storage.errors import Damaged, Failed, reading_failed


class BorrowedChunks:
    """The chunks of a checkpoint that its bases have.

    Arguments:
        index: of the checkpoint.
        store: its database.
        digests: of its chunks.
    """

    def __init__(self, index: Index, store: ChunkStore, digests: ChunkDigests) -> None:
        self._index, self._own, self._digests = index, store, digests
        self._first_rows: dict[str, dict[str, int]] = {}
        self.bases: list[ChunkStore] = []

    def open(self) -> None:
        """Opens the bases.

        Raises:
            CheckpointCorrupt: one is missing, or was replaced.
            StorageError: the storage failed.
        """
        location = self._own.location
        for number, base in enumerate(self._index.bases):
            try:
                database = borrowed.pinned(location, base, self._own.database.context)
            except Damaged as error:
                names = list[str]()
                with suppress(UnickptError):
                    names = borrowed.names(self.table, self._digests.spans, number)
                raise _lost(location, names, error) from error
            except Failed as error:
                raise reading_failed(error, str(location)) from error
            if self._own.database.restorers:
                database = database.restored() or database
            self.bases.append(ChunkStore(database))

    @cached_property
    def table(self) -> borrowed.BorrowedTable:
        """The borrowed values.

        Raises:
            CheckpointCorrupt: it is missing, or damaged.
        """
        nbytes = self._index.borrowed * borrowed.DTYPE.itemsize
        self._digests.check_length()
        if self._own.key_length(BORROWED_KEY) != nbytes:
            raise self._own.damaged(f"key {BORROWED_KEY!r} is missing, or has not {nbytes} bytes")
        try:
            return borrowed.decode(self._own.read_key(BORROWED_KEY, nbytes), self._index)
        except ValueError as error:
            raise self._own.damaged(str(error)) from None

    def links(self, entry: ArrayEntry, part: Part, number: int) -> dict[int, int]:
        """The borrowed values of a chunk: the positions of their bases, by link."""
        if not self._index.bases:
            return {}
        rows = self.rows(entry, part, range(number, number + 1))
        return dict(zip(rows["link"].tolist(), rows["base"].tolist(), strict=True))

    def rows(self, entry: ArrayEntry, part: Part, numbers: range) -> borrowed.BorrowedTable:
        """The same for consecutive chunks, as rows of the table."""
        if entry.name not in self._first_rows:
            numbered = chunk_grid.numbered_parts(entry)
            self._first_rows[entry.name] = {part.key: first for first, part in numbered}
        first = self._digests.spans[entry.name].start + self._first_rows[entry.name][part.key]
        rows = first + numbers.start, first + numbers.stop
        low, high = np.searchsorted(self.table["row"], rows)
        return self.table[low:high]


def _lost(location: object, names: Sequence[str], error: Exception) -> CheckpointCorrupt:
    """The error of a checkpoint that cannot be read without another one.

    Arguments:
        location: of the checkpoint.
        names: the arrays that need the other one.
        error: names the other one, and says what to do.
    """
    listed = ", ".join(repr(name) for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    prefix = f"array {listed}{more}: " if names else ""
    return CheckpointCorrupt(f"{location}: {prefix}{error}")
