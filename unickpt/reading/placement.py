"""Copies elements to their destination, with the conversions that were asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from unickpt.arrays import dtypes, strided_copy
from unickpt.arrays.dtypes import Array
from unickpt.errors import LoadMismatch
from unickpt.reading.recipes import Source

if TYPE_CHECKING:
    pass


def place(source: Array, out: Array, feed: Source) -> None:
    if not feed.is_exact:
        wide = np.dtype(np.float64 if np.float64 in (source.dtype, out.dtype) else np.float32)
        scale, offset = (np.asarray(x, wide) for x in (feed.scale, feed.offset))
        source = np.add(np.multiply(source.astype(wide), scale), offset)
    put(source, out, f"{feed.entry.name!r}: stored as {feed.entry.dtype}")


def put(source: Array, out: Array, what: str) -> None:
    """Copies elements into an array, whose dtype may differ."""
    if source.dtype != out.dtype:
        real = source.dtype.kind == "c" and out.dtype.kind != "c"
        cast = (source.real if real else source).astype(out.dtype)
        if not _holds(cast, source):
            raise LoadMismatch(
                f"array {what}, asked for as {out.dtype}, which does not hold all its values; load "
                "it with its stored dtype"
            )
        source = cast
    strided_copy.copy(out, source)


def _holds(cast: Array, source: Array) -> bool:
    """Whether a cast kept all values; casts between floats may lose precision."""
    kinds = dtypes.kind(source.dtype), dtypes.kind(cast.dtype)
    if kinds == ("integer", "integer"):
        return dtypes.holds_all(cast.dtype, source)
    if kinds[0] == kinds[1] and kinds[0] != "other":
        return True
    return bool(np.array_equal(cast.astype(source.dtype), source))
