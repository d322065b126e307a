"""Small arrays that are one chunk each, of which many are read together.

A model may have 100,000 of them. What it costs to read one is then not its bytes, but Python's work
for a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from unickpt.arrays.dtypes import Array
from unickpt.format.chunk_grid import only_key
from unickpt.format.chunk_store import SMALL
from unickpt.format.index import ArrayEntry
from unickpt.format.zarr_metadata import join_key
from unickpt.storage.ocdbt import DatabaseReader


def is_one_chunk(entry: ArrayEntry) -> bool:
    """Whether an array is stored as one small chunk, which has its elements as they are.

    Example:
        >>> is_one_chunk(ArrayEntry("w", (2, 3), "int8", (2, 3)))
        True
        >>> is_one_chunk(ArrayEntry("w", (2, 3), "int8", (1, 3)))
        False
    """
    if entry.shape != entry.chunk or entry.cut or entry.boxes is not None:
        return False
    if entry.quantized is not None or entry.patched:
        return False
    return entry.nbytes <= SMALL


def read(
    values: DatabaseReader, entries: Sequence[ArrayEntry], out: Sequence[Array]
) -> Sequence[bool]:
    """Reads arrays for which `is_one_chunk` is true.

    Arguments:
        values: of the database, which is not compressed.
        entries: the arrays.
        out: contiguous memory of each array's shape and dtype.

    Returns:
        For each array whether it was read. If not, it is missing or damaged, or the storage failed:
        reading it as any other chunk tells what it is.
    """
    return values.read_all([_key_of(entry) for entry in entries], out)


def _key_of(entry: ArrayEntry) -> str:
    """As `zarr_metadata.chunk_key`, of an array's only chunk."""
    return join_key(entry.name, only_key(len(entry.shape)))
