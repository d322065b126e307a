"""The digest table: the content digest and the writer of every chunk of a checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from unickpt.format import chunk_grid
from unickpt.format.index import ArrayEntry, Index

DTYPE = np.dtype([("digest", "<u8"), ("process", "<u4")])
Table = np.ndarray[Any, Any]


def count(entry: ArrayEntry) -> int:
    """Number of chunks of all parts of an array.

    Its time does not depend on the number of chunks, because the index is untrusted.
    """
    if math.prod(entry.shape) == 0:
        return 0
    if entry.boxes is not None:
        return sum(chunk_grid.box_part(entry, box).count for box, _ in entry.boxes)
    if not entry.cut:
        return chunk_grid.grid_of(entry.shape, entry.chunk)[1]
    return math.prod(_count_along(entry, dim) for dim in range(len(entry.shape)))


def _count_along(entry: ArrayEntry, dim: int) -> int:
    n, chunk = entry.shape[dim], entry.chunk[dim]
    if dim not in entry.cut:
        return -(-n // chunk)
    assert entry.layout is not None, "the index is checked: only arrays with a layout are cut"
    lengths = Counter({n: 1})
    for axis in entry.layout.dims[dim]:
        lengths = _split(lengths, entry.layout.mesh.size(axis))
    # Balancing the chunks of a part does not change their number.
    return sum(times * -(-length // chunk) for length, times in lengths.items())


def _split(lengths: Counter[int], pieces: int) -> Counter[int]:
    """How often each length occurs after every interval is cut into pieces, as layouts do."""
    out: Counter[int] = Counter()
    for length, times in lengths.items():
        step = -(-length // pieces)
        out[step] += times * (length // step)
        if length % step:
            out[length % step] += times
    return out


def length(arrays: Mapping[str, ArrayEntry]) -> int:
    """Number of rows of the table: one for each chunk of each array."""
    return sum(map(count, arrays.values()))


def spans(arrays: Mapping[str, ArrayEntry]) -> dict[str, slice]:
    """The rows of each array's chunks."""
    at, first = {}, 0
    for name, entry in arrays.items():
        at[name] = slice(first, first + count(entry))
        first = at[name].stop
    return at


class Mismatch(ValueError):
    """The digest table and the index contradict each other."""


def check(nbytes: int, index: Index, total: int) -> None:
    """Checks the length of the table against the index, before the table is read.

    Arguments:
        nbytes: size of the stored table; untrusted, as is the index.
        index: the index.
        total: number of chunks of the index's arrays, from `length`.

    Raises:
        Mismatch: says how they differ.
    """
    if index.chunks != total or nbytes != total * DTYPE.itemsize:
        raise Mismatch(
            f"the arrays have {total} chunks, the index names {index.chunks}, and the digest table "
            f"has {nbytes} bytes"
        )


def decode(data: bytes, index: Index) -> Table:
    """Decodes a table whose length has passed `check`.

    Arguments:
        data: the stored table; untrusted.
        index: the index.

    Raises:
        Mismatch: says how they differ.
    """
    if f"{xxhash.xxh3_64_intdigest(data):016x}" != index.digests_xxh3:
        raise Mismatch("the digest table does not match its digest in the index")
    return np.frombuffer(data, DTYPE)
