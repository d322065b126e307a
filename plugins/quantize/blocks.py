"""Blocks: the elements of a chunk that share a scale; and how many bytes a chunk takes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unickpt.plugins.quantize import codes as kinds

BLOCK = 256
"""The most elements of a block."""
ROW = 64
"""The fewest elements of a row, if the chunk has as many."""
_TILE = 1 << 17  # elements: one unit of work stays in the processor's cache


@dataclass(frozen=True)
class Tile:
    """Whole blocks of equal extent.

    Arguments:
        rows, elements: which rows, and which of their elements.
        blocks: which of their blocks.
        extent: elements of each block.
    """

    rows: slice
    elements: slice
    blocks: slice
    extent: int


@dataclass(frozen=True)
class Blocks:
    """How a chunk is divided: into rows, and these into blocks; the last block may be shorter.

    Arguments:
        rows: their number.
        length: elements of a row.
    """

    rows: int
    length: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> Blocks:
        """The blocks of a chunk: a row spans as few of the last dimensions as have `ROW` elements
        together."""
        length, dim = 1, len(shape)
        while dim and length < ROW:
            dim -= 1
            length *= shape[dim]
        return cls(math.prod(shape[:dim]), length)

    @property
    def per_row(self) -> int:
        return -(-self.length // BLOCK)

    def tiles(self) -> Iterator[Tile]:
        """All blocks, a bounded number of elements at a time."""
        whole, remainder = divmod(self.length, BLOCK)
        wide = min(whole, _TILE // BLOCK)
        high = max(1, _TILE // max(1, wide * BLOCK))
        for row in range(0, self.rows, high):
            rows = slice(row, min(row + high, self.rows))
            for first in range(0, whole, wide or 1):
                last = min(first + wide, whole)
                elements = slice(first * BLOCK, last * BLOCK)
                yield Tile(rows, elements, slice(first, last), BLOCK)
            if remainder:
                elements = slice(whole * BLOCK, self.length)
                yield Tile(rows, elements, slice(whole, whole + 1), remainder)


def stored_bytes(shape: Sequence[int], dtype: str, codes: str) -> int:
    """The bytes of a stored chunk.

    Arguments:
        shape: of the chunk.
        dtype: of its elements.
        codes: how they are stored.
    """
    size = math.prod(shape)
    if codes == kinds.ROUNDED:
        return 2 * size
    blocks = Blocks.of(shape)
    scales = 2 * blocks.rows * blocks.per_row * kinds.working(dtype).itemsize
    return scales + -(-size * kinds.BITS[codes] // 8)
