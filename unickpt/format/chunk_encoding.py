"""Codecs: a chunk -> its stored bytes, and back; and the Zarr metadata for that."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts
import xxhash

from unickpt.arrays import dtypes
from unickpt.arrays.dtypes import Array
from unickpt.format import chunk_grid, codec_protocol
from unickpt.format.chunk_grid import Part, join_key
from unickpt.format.codec_protocol import as_codecs, codec_of, encoding_of
from unickpt.format.index import ArrayEntry, Encoding, Index
from unickpt.storage.tensorstore_calls import asking

Codecs = Sequence[Mapping[str, Any]]
AUTO = "auto"
"""The compression that gives an array a codec only if that saves space."""
PATCHED = "unickpt.patched"
"""The last codec that `zarr.json` of an array with patches names."""


_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "zstd": {"level": 3},
    "gzip": {"level": 5},
    "blosc": {"cname": "zstd", "clevel": 5, "shuffle": "shuffle"},
}


@cache
def encoding_for(compression: str) -> Encoding:
    """The encoding of all arrays, if `SaveOptions.compression` names a codec."""
    name = str.__str__(compression)
    return encoding_of({"name": name, "configuration": _SETTINGS[name]})


def common_codec(compression: str | None) -> str | None:
    """The codec of all arrays of a save; None if they have none, or each its own."""
    return None if compression == AUTO else compression


def zarr_metadata(entry: ArrayEntry, part: Part) -> dict[str, Any]:
    """The `zarr.json` of a part."""
    stored = dtypes.stored_as(entry.dtype)
    itemsize = dtypes.from_name(entry.dtype).itemsize
    fill: Any = False if stored == "bool" else 0
    if stored.startswith("complex"):
        fill = [0, 0]
    to_bytes: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
    if itemsize == 1:
        to_bytes = {"name": "bytes"}
    codecs: Codecs = as_codecs(entry.encoding) if entry.encoding else ()
    if entry.codec is not None:  # a name that TensorStore does not know, and so refuses
        (to_bytes,), codecs = as_codecs(entry.encoding or ()), ()
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(part.box.shape),
        "data_type": stored,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(part.chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": [to_bytes, *(_complete(codec, itemsize) for codec in codecs)],
        "attributes": {},
    }


def _complete(codec: Mapping[str, Any], itemsize: int) -> Mapping[str, Any]:
    """A codec with the settings that depend on the array."""
    if codec["name"] != "blosc":
        return codec
    settings = {"typesize": itemsize, "blocksize": 0, **codec["configuration"]}
    return {**codec, "configuration": settings}


def zarr_json(metadata: Mapping[str, Any]) -> bytes:
    return json.dumps(metadata, separators=(",", ":")).encode()


GROUP_JSON = zarr_json({"zarr_format": 3, "node_type": "group", "attributes": {}})


def zarr_keys(index: Index) -> dict[str, bytes]:
    """The zarr metadata of all groups and parts, by key."""
    groups, out = {""}, dict[str, bytes]()
    of_kind: dict[tuple[Any, ...], bytes] = {}  # arrays of one shape share it
    for name, entry in index.arrays.items():
        is_patched = entry.composed > 0
        for part in chunk_grid.parts(entry) or [Part.whole(name, entry.shape, entry.chunk)]:
            kind = part.box, part.chunk, entry.dtype, entry.encoding, is_patched
            document = of_kind.get(kind)
            if document is None:
                metadata = zarr_metadata(entry, part)
                if is_patched:  # a name that TensorStore does not know, and so refuses
                    metadata["codecs"].append({"name": PATCHED})
                document = of_kind[kind] = zarr_json(metadata)
            out[join_key(part.key, "zarr.json")] = document
            parent = part.key.rpartition("/")[0]
            while parent not in groups:
                groups.add(parent)
                parent = parent.rpartition("/")[0]
    for group in groups:
        out.setdefault(join_key(group, "zarr.json"), GROUP_JSON)
    return out


class Encoded(NamedTuple):
    """A chunk as it is stored.

    Arguments:
        value: its bytes, in parts.
        digest: of the chunk; None if that is the digest of the bytes.
        note: the codec's note about it (`codec_protocol.Extra`).
    """

    value: tuple[memoryview, ...]
    digest: int | None = None
    note: Any = None


def encode(entry: ArrayEntry, part: Part, chunk: Array) -> Encoded:
    """A chunk as it is stored.

    Arguments:
        entry: the array.
        part: the part of the array.
        chunk: its elements.

    Raises:
        UnsupportedLeaf: its codec cannot store it; names the array.
    """
    if entry.encoding:
        if (codec := codec_of(entry)) is not None:
            stored = codec_protocol.encode(codec, entry, chunk)
            return Encoded((stored.data.data,), None, stored.note)
        return Encoded((compressed(entry, part, chunk),), digest(chunk))
    value = raw(part, chunk)
    return Encoded(value, None if len(value) == 1 else digest(chunk))


def digest(chunk: Array) -> int:
    """xxh3-64 of a chunk's logical elements: row-major, little-endian."""
    return xxhash.xxh3_64_intdigest(bytes_of(chunk).data)


def digest_as_stored(entry: ArrayEntry, chunk: Array) -> int:
    """The digest of a chunk of an array; with a codec that is none of Zarr's, of the stored bytes.

    Raises:
        UnsupportedLeaf: its codec cannot store it.
    """
    codec = codec_of(entry)
    return digest(chunk if codec is None else codec_protocol.encode(codec, entry, chunk).data)


def nbytes_as_stored(entry: ArrayEntry, shape: Sequence[int]) -> int:
    """The stored bytes of a chunk; before compression, or if its codec does not state them, the
    bytes of its elements."""
    codec = codec_of(entry)
    nbytes = None if codec is None else codec.stored_bytes(entry, shape)
    return math.prod(shape) * entry.itemsize if nbytes is None else nbytes


def is_of_fixed_size(entry: ArrayEntry) -> bool:
    """Whether the number of bytes that patches change is the same for all elements."""
    codec = codec_of(entry)
    return codec is None or codec.stored_bytes(entry, entry.chunk) is not None


def raw(part: Part, chunk: Array) -> tuple[memoryview, ...]:
    """A chunk as Zarr stores it without compression: its elements, and padding, because a chunk at
    the end of a part is stored as long as the others."""
    elements = bytes_of(chunk).data
    if chunk.shape == part.chunk:
        return (elements,)
    if chunk.shape[1:] == part.chunk[1:]:
        padding = math.prod(part.chunk) * chunk.itemsize - chunk.nbytes
        return elements, memoryview(bytes(padding))
    return bytes_of(filled_up(part, chunk)).data, memoryview(b"")


def filled_up(part: Part, chunk: Array) -> Array:
    """A chunk as long as all others of its part, with zeros behind its elements."""
    if chunk.shape == part.chunk:
        return chunk
    whole = np.zeros(part.chunk, chunk.dtype)
    whole[tuple(slice(size) for size in chunk.shape)] = chunk
    return whole


def bytes_of(chunk: Array) -> Array:
    """The bytes of an array, row-major."""
    return np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)


def compressed(entry: ArrayEntry, part: Part, chunk: Array) -> memoryview:
    """A chunk as Zarr stores it: TensorStore writes it into memory.

    Arguments:
        entry: the array.
        part: the part of the array.
        chunk: the elements of the chunk.
    """
    memory = {"driver": "memory", "path": f"{os.urandom(16).hex()}/"}
    metadata = zarr_metadata(entry, part)
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
