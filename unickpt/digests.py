"""The digest table: for every chunk of a checkpoint its content digest and who wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from unickpt import plan
from unickpt.index import ArrayEntry, Index

DTYPE = np.dtype([("digest", "<u8"), ("process", "<u4")])
Table = np.ndarray[Any, Any]


def offsets(arrays: Mapping[str, ArrayEntry]) -> dict[str, int]:
    """Position of each array's first chunk in the table, and under '\\0' the table's length."""
    at, total = {}, 0
    for name, entry in arrays.items():
        at[name] = total
        total += sum(part.count for part in plan.parts(entry))
    at["\0"] = total
    return at


def decode(data: bytes, index: Index, total: int) -> Table:
    """The table of an index; both come from storage, so each is held against the other.

    Arguments:
        data: the stored table; untrusted.
        index: the index.
        total: number of chunks of the index's arrays, from `offsets`.

    Raises:
        ValueError: says how they differ.
    """
    if index.chunks != total or len(data) != total * DTYPE.itemsize:
        raise ValueError(
            f"the arrays have {total} chunks, the index names {index.chunks}, and the digest table "
            f"has {len(data)} bytes"
        )
    if f"{xxhash.xxh3_64_intdigest(data):016x}" != index.digests_xxh3:
        raise ValueError("the digest table does not match the digest of it in the index")
    return np.frombuffer(data, DTYPE)
