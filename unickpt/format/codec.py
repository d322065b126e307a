"""Codecs: a chunk -> the bytes that are stored of it. Those that are read say how in the index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from unickpt.arrays.dtypes import Array
from unickpt.errors import UnsupportedLeaf
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry
from unickpt.format.zarr_metadata import Codecs


class Encoded(NamedTuple):
    """A chunk as it is stored.

    Arguments:
        value: its bytes, in parts.
        digest: of the chunk; None if that is the digest of the bytes.
        errors: of a quantised one: the largest absolute and relative error.
    """

    value: tuple[memoryview, ...]
    digest: int | None = None
    errors: tuple[float, float] | None = None


def encode(entry: ArrayEntry, part: Part, codecs: Codecs, chunk: Array) -> Encoded:
    """A chunk as it is stored.

    Arguments:
        entry: the array.
        part: the part of the array.
        codecs: the compression of the checkpoint.
        chunk: its elements.

    Raises:
        UnsupportedLeaf: it cannot be quantised; names the array.
    """
    if entry.quantized is not None:
        return _quantized(entry, entry.quantized, chunk)
    if codecs:
        from unickpt.format import compression

        return Encoded((compression.encode(entry, part, codecs, chunk),), digest(chunk))
    value = raw(part, chunk)
    return Encoded(value, None if len(value) == 1 else digest(chunk))


def _quantized(entry: ArrayEntry, codes: str, chunk: Array) -> Encoded:
    from unickpt.quantized import values  # only where it is asked for, as compression

    try:
        found = values.encode(chunk, codes)
    except values.NotQuantizable as error:
        raise UnsupportedLeaf(
            f"array {entry.name!r} ({entry.dtype_and_shape}) cannot be stored as {codes} "
            f"(SaveOptions.quantize): {error}. Leave it out, with None for its name before the "
            "pattern that matches it"
        ) from None
    return Encoded((found.data.data,), None, (found.absolute, found.relative))


class NotDecodable(ValueError):
    """Why stored bytes cannot be decoded."""


def decode(entry: ArrayEntry, data: Array, out: Array) -> None:
    """Decodes a chunk of a quantised array.

    Arguments:
        entry: the array.
        data: the bytes that are stored, as many as `nbytes_as_stored` says; untrusted.
        out: of the chunk's shape; receives its elements.

    Raises:
        NotDecodable: they are not what an encoder makes.
    """
    from unickpt.quantized import values

    assert entry.quantized is not None, "others are stored as they are, or decoded by TensorStore"
    try:
        values.decode(data, out, entry.quantized)
    except values.BadCodes as error:
        raise NotDecodable(str(error)) from None


def digest(chunk: Array) -> int:
    """xxh3-64 of a chunk's logical elements: row-major, little-endian."""
    return xxhash.xxh3_64_intdigest(bytes_of(chunk).data)


def digest_as_stored(entry: ArrayEntry, chunk: Array) -> int:
    """The digest of a chunk of an array; if it is quantised, of the bytes that are stored.

    Raises:
        UnsupportedLeaf: it cannot be quantised.
    """
    if entry.quantized is None:
        return digest(chunk)
    return xxhash.xxh3_64_intdigest(_quantized(entry, entry.quantized, chunk).value[0])


def nbytes_as_stored(entry: ArrayEntry, shape: Sequence[int]) -> int:
    """The bytes that are stored of a chunk, before compression."""
    if entry.quantized is None:
        return math.prod(shape) * entry.itemsize
    from unickpt.quantized.blocks import stored_bytes

    return stored_bytes(shape, entry.dtype, entry.quantized)


def raw(part: Part, chunk: Array) -> tuple[memoryview, ...]:
    """A chunk as Zarr stores it without compression: its elements, and what fills it up, because
    one at the end of a part is stored as long as the others."""
    own = bytes_of(chunk).data
    if chunk.shape == part.chunk:
        return (own,)
    if chunk.shape[1:] == part.chunk[1:]:
        rest = math.prod(part.chunk) * chunk.itemsize - chunk.nbytes
        return own, memoryview(bytes(rest))
    whole = np.zeros(part.chunk, chunk.dtype)
    whole[tuple(slice(size) for size in chunk.shape)] = chunk
    return bytes_of(whole).data, memoryview(b"")


def bytes_of(chunk: Array) -> Array:
    """The bytes of an array, row-major."""
    return np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
