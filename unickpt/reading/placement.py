"""Copies elements to their destination, with the conversions that were asked for."""

from __future__ import annotations

import numpy as np

from unickpt.arrays import dtypes, strided_copy
from unickpt.arrays.dtypes import Array
from unickpt.errors import LoadMismatch
from unickpt.reading.recipes import ElementSource


def place(data: Array, out: Array, source: ElementSource) -> None:
    """Copies elements of a stored array to their destination, with the arithmetic of rules."""
    if not source.is_exact:
        wide = np.dtype(np.float64 if np.float64 in (data.dtype, out.dtype) else np.float32)
        scale, offset = (np.asarray(x, wide) for x in (source.scale, source.offset))
        data = np.add(np.multiply(data.astype(wide), scale), offset)
    put(data, out, f"{source.entry.name!r}: stored as {source.entry.dtype}")


def put(data: Array, out: Array, what: str) -> None:
    """Copies elements into an array, whose dtype may differ.

    Arguments:
        data: the elements.
        out: the array.
        what: names the array and its stored dtype, for messages.

    Raises:
        LoadMismatch: the dtype of `out` does not hold all values.
    """
    if data.dtype != out.dtype:
        real = data.dtype.kind == "c" and out.dtype.kind != "c"
        cast = (data.real if real else data).astype(out.dtype)
        if not _holds(cast, data):
            raise LoadMismatch(
                f"array {what}, asked for as {out.dtype}, which does not hold all its values; load "
                "it with its stored dtype"
            )
        data = cast
    strided_copy.copy(out, data)


def _holds(cast: Array, data: Array) -> bool:
    """Whether a cast kept all values; casts between floats may lose precision."""
    kinds = dtypes.kind(data.dtype), dtypes.kind(cast.dtype)
    if kinds == ("integer", "integer"):
        return dtypes.holds_all(cast.dtype, data)
    if kinds[0] == kinds[1] and kinds[0] != "other":
        return True
    return bool(np.array_equal(cast.astype(data.dtype), data))
