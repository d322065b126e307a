"""Compressed chunks: Zarr's codecs, as TensorStore runs them, in memory."""

from __future__ import annotations

import os
from typing import Any

import tensorstore as ts

from unickpt.arrays import dtypes
from unickpt.arrays.dtypes import Array
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry
from unickpt.format.zarr_metadata import Codecs, zarr_metadata
from unickpt.storage.kvstore import asking


def encode(entry: ArrayEntry, part: Part, codecs: Codecs, chunk: Array) -> memoryview:
    """A chunk as Zarr stores it: TensorStore writes it into memory, from where it is taken.

    Arguments:
        entry: the array.
        part: the part of the array.
        codecs: the compression.
        chunk: the elements of the chunk.
    """
    memory = {"driver": "memory", "path": f"{os.urandom(16).hex()}/"}
    metadata = zarr_metadata(entry, part, codecs)
    metadata["shape"] = list(part.chunk)
    spec: dict[str, Any] = {
        "driver": "zarr3",
        "kvstore": memory,
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,  # else such a chunk would be left out
    }
    with asking():
        context = ts.Context({"memory_key_value_store": {}})
        opened = ts.open(spec, context=context, open=True, assume_metadata=True).result()
        where = opened[tuple(slice(size) for size in chunk.shape)] if chunk.ndim else opened
        where.write(as_stored(chunk, entry.dtype)).result()
        store = ts.KvStore.open(memory, context=context).result()
        key = "/".join(["c", *("0" for _ in chunk.shape)])
        return memoryview(store.read(key).result().value)


def as_stored(chunk: Array, dtype: str) -> Array:
    """An array with the element type that Zarr knows for it."""
    stored = ts.dtype(dtypes.stored_as(dtype)).numpy_dtype
    return chunk if chunk.dtype == stored else chunk.view(stored)
