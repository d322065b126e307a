"""Small arrays that are one chunk each, of which many are read together.

A model may have 100,000 of them. What it costs to read one is then not its bytes, but Python's work
for a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from unickpt.arrays import dtypes
from unickpt.arrays.dtypes import Array
from unickpt.format.chunk_grid import only_key
from unickpt.format.chunk_store import SMALL
from unickpt.format.index import ArrayEntry
from unickpt.format.zarr_metadata import join_key
from unickpt.storage.errors import Failed
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
    return math.prod(entry.shape) * dtypes.from_name(entry.dtype).itemsize <= SMALL


def read(
    values: DatabaseReader, entries: Sequence[ArrayEntry], out: Sequence[Array]
) -> Iterator[bool]:
    """Reads arrays for which `is_one_chunk` is true.

    Arguments:
        values: of the database, which is not compressed.
        entries: the arrays.
        out: contiguous memory of each array's shape and dtype.

    Yields:
        For each array whether it was read. If not, it is missing or damaged, or the storage failed:
        reading it as any other chunk tells what it is.
    """
    keys = [_key_of(entry) for entry in entries]
    found = values.request_all(keys)
    for key, to in zip(keys, out, strict=True):
        requested = found.get(key)
        try:
            value = b"" if requested is None else requested.result().value
        except Failed:
            value = b""
        if len(value) == to.nbytes:
            # Unlike NumPy, this keeps the GIL, for which other threads would compete.
            to.reshape(-1).view(np.uint8).data[:] = value
        yield len(value) == to.nbytes


def _key_of(entry: ArrayEntry) -> str:
    """As `chunk_store.key_of`, of an array's only chunk."""
    return join_key(entry.name, only_key(len(entry.shape)))
