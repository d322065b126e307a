"""The digest table: the content digest and the writer of every chunk of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

from unickpt.format.index import DigestBlocks

DTYPE = np.dtype([("digest", "<u8"), ("process", "<u4")])
Table = np.ndarray[Any, Any]
Numbers = np.ndarray[Any, np.dtype[np.int64]]
BLOCK_ROWS = 1 << 14
"""Rows of a block: 196 KB, about as much as a node of the B-tree. For a table of one block, its own
digest is enough."""


class Mismatch(ValueError):
    """A block of the digest table contradicts the index."""


def blocks(table: Table, rows: int = 0) -> DigestBlocks | None:
    """The digests of a table's blocks; None if there is only one.

    Arguments:
        table: the table.
        rows: of a block; 0 for as many as this version writes.
    """
    size = rows or BLOCK_ROWS
    if not rows and len(table) <= size:
        return None
    digests = (
        xxhash.xxh3_64_intdigest(table[first : first + size].tobytes())
        for first in range(0, len(table), size)
    )
    return DigestBlocks(size, tuple(digests))


class TableBlocks:
    """The blocks of a stored table, read when they are needed.

    Arguments:
        digests: of the blocks.
        total: number of rows of the table.
        read: returns bytes of the stored table, by the position of the first and their number.
    """

    def __init__(
        self, digests: DigestBlocks, total: int, read: Callable[[int, int], bytes]
    ) -> None:
        self._digests, self._total, self._read = digests, total, read
        self._known: dict[int, Table] = {}

    def rows(self, which: slice | Numbers) -> Table:
        """Some rows: those of a range, or of any numbers.

        Raises:
            Mismatch: a block does not match its digest.
        """
        size = self._digests.rows
        if isinstance(which, slice):
            if which.start >= which.stop:
                return np.zeros(0, DTYPE)
            numbers = range(which.start // size, -(-which.stop // size))
            pieces = [
                rows[max(0, which.start - number * size) : which.stop - number * size]
                for number, rows in zip(numbers, self._blocks(numbers), strict=True)
            ]
            return pieces[0].copy() if len(pieces) == 1 else np.concatenate(pieces)
        table = np.empty(len(which), DTYPE)
        blocks, inverse = np.unique(which // size, return_inverse=True)
        for block_index, rows in enumerate(self._blocks(blocks.tolist())):
            is_there = inverse == block_index
            table[is_there] = rows[which[is_there] % size]
        return table

    def _blocks(self, numbers: Sequence[int]) -> list[Table]:
        """Some blocks, ascending."""
        missing = [block for block in numbers if block not in self._known]
        if missing:
            size = self._digests.rows
            first, stop = missing[0] * size, min((missing[-1] + 1) * size, self._total)
            data = self._read(first * DTYPE.itemsize, (stop - first) * DTYPE.itemsize)
            table = np.frombuffer(data, DTYPE)
            for block in range(missing[0], missing[-1] + 1):
                self._known[block] = self._checked(block, table[block * size - first :][:size])
        return [self._known[block] for block in numbers]

    def _checked(self, block: int, rows: Table) -> Table:
        if xxhash.xxh3_64_intdigest(rows.tobytes()) != self._digests.digests[block]:
            raise Mismatch(f"block {block} of the digest table does not match its digest")
        return rows
