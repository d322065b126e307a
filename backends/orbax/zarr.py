"""Zarr arrays that another system wrote, of version 2 or 3: their metadata, and reads of boxes."""

from __future__ import annotations

import errno
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from unickpt.errors import CheckpointCorrupt, UnsupportedFormat
from unickpt.extend import (
    Box,
    Damaged,
    Files,
    OcdbtDatabase,
    dtype_from_name,
    dtype_name,
    quoted,
    zarr_dtype,
)

READ_BYTES = 1 << 20
"""Neighbouring chunks are read together up to so many bytes: each read takes time of its own."""
SMALL = 64 << 10
"""Below so many bytes, several reads are faster if they are started together."""
METADATA = {2: ".zarray", 3: "zarr.json"}
"""The file or key with an array's metadata, below its own name."""
_MOST_METADATA = 1 << 20
_MOST_RANK = 32  # TensorStore has no arrays of more dimensions
_MOST_EXTENT = 1 << 60
_NUMPY = re.compile(r"[<>|][bifuc][0-9]{1,2}")
_COMPRESSORS = ("zstd", "blosc", "zlib", "gzip", "bz2")
_PLAIN_CODECS = ("bytes", "transpose", "crc32c")
_MOST_PER_BYTE = 1 << 16


@dataclass(frozen=True)
class ZarrArray:
    """The metadata of an array.

    Arguments:
        version: of Zarr.
        shape: of the array.
        dtype: a name of `unickpt.arrays.dtypes`.
        chunk: the extents of a decoding unit: a chunk, or a chunk within a shard.
        stored: the extents of the unit under one key: a chunk or a shard.
        compressed: whether chunks are.
        key: begins the keys of chunks.
        separator: of the numbers in the keys of chunks.
        metadata: all of it.
    """

    version: int
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    stored: tuple[int, ...]
    compressed: bool
    key: str
    separator: str
    metadata: Mapping[str, Any]

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk) * dtype_from_name(self.dtype).itemsize

    @property
    def least_stored(self) -> int:
        """The fewest bytes in which a chunk can be stored."""
        return -(-self.chunk_bytes // _MOST_PER_BYTE) if self.compressed else self.chunk_bytes

    @property
    def read_at_once(self) -> tuple[int, ...]:
        """The extents of one read: whole chunks, several if they are small."""
        extents, left = list(self.chunk), READ_BYTES // max(1, self.chunk_bytes)
        for dim in reversed(range(len(extents))):
            count = -(-self.shape[dim] // extents[dim])
            extents[dim] *= max(1, min(count, left))
            left //= max(1, count)
        return tuple(extents)

    def keys(self, box: Box) -> Iterator[str]:
        """The keys of all chunks or shards with elements of a box, below the array's name."""
        ranges = [
            range(a // n, -(-b // n))
            for a, b, n in zip(box.start, box.stop, self.stored, strict=True)
        ]
        for position in itertools.product(*ranges):
            numbers = [*([self.key] if self.key else []), *map(str, position)]
            yield self.separator.join(numbers) or "0"  # which version 2 calls it without numbers


# --- metadata -----------------------------------------------------------------------------------


def parse(version: int, data: bytes, where: str) -> ZarrArray:
    """The metadata of an array.

    Arguments:
        version: of Zarr.
        data: `.zarray` or `zarr.json`; untrusted.
        where: the path and the array, for messages.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: it has a dtype or a codec that is not known.
    """
    try:
        metadata = json.loads(data)
        return (_parse_2 if version == 2 else _parse_3)(metadata, where)
    except UnsupportedFormat:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(f"{where}: its Zarr metadata is damaged: {error!r}") from error


def _parse_2(metadata: Mapping[str, Any], where: str) -> ZarrArray:
    if metadata["zarr_format"] != 2:
        raise ValueError(f"zarr_format is {quoted(metadata['zarr_format'])}")
    if metadata["filters"]:
        raise UnsupportedFormat(f"{where}: Zarr filters {quoted(metadata['filters'])} are not read")
    compressor = metadata["compressor"]
    if compressor is not None and compressor["id"] not in _COMPRESSORS:
        raise UnsupportedFormat(f"{where}: the compressor {quoted(compressor)} is not known")
    shape = _extents(metadata["shape"], 0)
    chunk = _extents(metadata["chunks"], 1, shape)
    dtype = _dtype(metadata["dtype"], where)
    separator = _separator(metadata.get("dimension_separator", "."))
    return ZarrArray(2, shape, dtype, chunk, chunk, compressor is not None, "", separator, metadata)


def _parse_3(metadata: Mapping[str, Any], where: str) -> ZarrArray:
    if (metadata["zarr_format"], metadata["node_type"]) != (3, "array"):
        raise ValueError("it does not describe an array of version 3")
    shape = _extents(metadata["shape"], 0)
    grid = metadata["chunk_grid"]
    if grid["name"] != "regular":
        raise UnsupportedFormat(f"{where}: the chunk grid {quoted(grid['name'])} is not known")
    stored = chunk = _extents(grid["configuration"]["chunk_shape"], 1, shape)
    codecs = _codecs(metadata["codecs"])
    if [name for name, _ in codecs] == ["sharding_indexed"]:
        inner = codecs[0][1]
        chunk = _extents(inner["chunk_shape"], 1, shape)
        if any(n % c for n, c in zip(stored, chunk, strict=True)):
            raise ValueError(f"shards of {quoted(stored)} do not consist of chunks {quoted(chunk)}")
        codecs = _codecs(inner["codecs"])
    names = [name for name, _ in codecs]
    for name in names:
        if name not in (*_COMPRESSORS, *_PLAIN_CODECS):
            raise UnsupportedFormat(f"{where}: the codec {quoted(name)} is not known")
    encoding = metadata["chunk_key_encoding"]
    is_default = {"default": True, "v2": False}[encoding["name"]]
    separator = encoding.get("configuration", {}).get("separator", "/" if is_default else ".")
    dtype, compressed = _dtype(metadata["data_type"], where), not {*names}.isdisjoint(_COMPRESSORS)
    key, separator = "c" if is_default else "", _separator(separator)
    return ZarrArray(3, shape, dtype, chunk, stored, compressed, key, separator, metadata)


def _codecs(codecs: Sequence[Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(str(codec["name"]), codec.get("configuration", {})) for codec in codecs]


def _separator(separator: Any) -> str:
    if separator not in (".", "/"):
        raise ValueError(f"the separator {quoted(separator)}")
    return str(separator)


def _extents(extents: Any, least: int, shape: Sequence[int] | None = None) -> tuple[int, ...]:
    if not isinstance(extents, list) or len(extents) > _MOST_RANK:
        raise ValueError(f"extents {quoted(extents)}")
    if any(type(n) is not int or not least <= n < _MOST_EXTENT for n in extents):
        raise ValueError(f"extents {quoted(extents)}")
    if shape is not None and len(extents) != len(shape):
        raise ValueError(f"chunks {quoted(extents)} for the shape {quoted(shape)}")
    return tuple(extents)


def _dtype(dtype: Any, where: str) -> str:
    try:
        if isinstance(dtype, str) and _NUMPY.fullmatch(dtype):
            return dtype_name(np.dtype(dtype))
        name = dtype_name(dtype_from_name(dtype))
        ts.dtype(zarr_dtype(name))
        return name
    except TypeError as error:
        raise UnsupportedFormat(f"{where}: the dtype {quoted(dtype)} is not known") from error


# --- stores -------------------------------------------------------------------------------------


def below(array: str, key: str) -> str:
    """A key of an array, whose name may be empty or end with a slash."""
    return f"{array}{key}" if not array or array.endswith("/") else f"{array}/{key}"


class InDatabase:
    """Arrays in an OCDBT database.

    Arguments:
        database: with a pinned manifest.
    """

    def __init__(self, database: OcdbtDatabase) -> None:
        self._database, self._values = database, database.reader()

    def read(self, key: str) -> bytes | None:
        """A small value; None if it is missing.

        Raises:
            Damaged: it is too large.
            Failed: the storage failed.
        """
        if (self._values.length(key) or 0) > _MOST_METADATA:
            raise Damaged(f"key {quoted(key)} has more than {_MOST_METADATA} bytes")
        return self._values.read(key)

    def spec(self, array: str) -> dict[str, Any]:
        """The JSON of TensorStore's key-value store of one array."""
        return {**self._database.array_spec(""), "path": below(array, "")}

    def check(self, array: str, keys: Iterable[str], least: int, *, fill: bool) -> None:
        """Checks chunks of an array before TensorStore reads them, where that needs no request.

        Arguments:
            array: its name.
            keys: of its chunks, below its name.
            least: bytes that each must have.
            fill: whether they may be missing.

        Raises:
            Damaged: one is missing, too small, or no file to be opened.
        """
        self._values.check(below(array, ""))
        for key in keys:
            _check_length(key, self._values.length(below(array, key)), least, fill)


class InFolders:
    """Arrays that are folders of files; has the methods of `InDatabase`.

    Arguments:
        files: those of the folder that contains them.
    """

    def __init__(self, files: Files) -> None:
        self._files = files

    def read(self, key: str) -> bytes | None:
        if key.startswith("/") or ".." in key.split("/"):
            raise Damaged(f"{quoted(key)} leads out of the folder")
        try:
            data = self._files.tail(key, _MOST_METADATA + 1)
        except Damaged as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        if len(data) > _MOST_METADATA:
            raise Damaged(f"{key} has more than {_MOST_METADATA} bytes")
        return data

    def spec(self, array: str) -> dict[str, Any]:
        base = dict(self._files.location.spec)
        return {**base, "path": base["path"] + below(array, "")}

    def check(self, array: str, keys: Iterable[str], least: int, *, fill: bool) -> None:
        if not self._files.location.is_local:
            return  # object storage holds only objects, and lists no sizes
        for key in keys:
            try:
                length = self._files.size(below(array, key))
            except Damaged as error:
                if error.errno != errno.ENOENT:
                    raise
                length = None
            _check_length(key, length, least, fill)


Store = InDatabase | InFolders
"""Where the keys of arrays are."""


def _check_length(key: str, length: int | None, least: int, fill: bool) -> None:
    if length is None and not fill:
        raise Damaged(f"chunk {quoted(key)} is missing")
    if length is not None and length < least:
        raise Damaged(f"{length} bytes stored in chunk {quoted(key)}, at least {least} expected")
