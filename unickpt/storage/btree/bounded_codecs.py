"""The codecs of OCDBT's nodes, crc32c and zstd, for untrusted bytes: in bounded memory.

TensorStore has both, but exposes them only within other formats: as a codec of Zarr arrays, and as
a method of ZIP archives. So the bytes are put into an array or an archive in memory. Reading a
range of a file in an archive unpacks only that range.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import tensorstore as ts

from unickpt.storage.errors import Failed
from unickpt.storage.kvstore import KvStore, asking

_ZSTD_IN_ZIP = 93
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_BLOCK = 128 << 10
_SMALL = 1 << 10


def _crc_row(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ 0x82F63B78 * (value & 1)
    return value


_CRC_TABLE = tuple(map(_crc_row, range(256)))


def crc32c(data: bytes) -> bytes:
    """The CRC-32C, as four bytes."""
    if len(data) < _SMALL:
        value = 0xFFFFFFFF
        for byte in data:
            value = value >> 8 ^ _CRC_TABLE[(value ^ byte) & 255]
        return (value ^ 0xFFFFFFFF).to_bytes(4, "little")
    context = ts.Context({"memory_key_value_store": {}})
    with asking():
        _sealed_array(len(data), context).write(np.frombuffer(data, np.uint8)).result()
    stored = KvStore.open("memory://", context).read("c/0").result()
    found: bytes = stored.value[-4:]
    return found


def crc32c_matches(data: bytes) -> bool:
    """Whether the last four bytes are the CRC-32C of those before them."""
    if len(data) <= 4:
        return False
    if len(data) < _SMALL:
        return crc32c(data[:-4]) == data[-4:]
    context = ts.Context({"memory_key_value_store": {}})
    KvStore.open("memory://", context).write("c/0", data).result()
    try:
        with asking():
            _sealed_array(len(data) - 4, context).read().result()
    except Failed:
        return False
    return True


def _sealed_array(size: int, context: ts.Context) -> ts.TensorStore:
    """An array in memory, of bytes that are stored with their CRC-32C behind them."""
    spec: dict[str, Any] = {
        "driver": "zarr3",
        "kvstore": "memory://",
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
        "metadata": {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [size],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [size]}},
            "chunk_key_encoding": {"name": "default"},
            "fill_value": 0,
            "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
        },
    }
    return ts.open(spec, context=context, open=True, assume_metadata=True).result()


def zstd_prefix(stream: bytes, size: int) -> bytes | None:
    """The first bytes of the content of a zstd stream.

    Arguments:
        stream: the stream; untrusted.
        size: number of bytes, at least 1; also the limit of the memory used.

    Returns:
        The bytes, or None if the stream is damaged or has fewer.
    """
    fields = (_ZSTD_IN_ZIP, 0, 0x21, 0, len(stream), size, 1)
    entry = struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, *fields, 0) + b"x"
    listed = struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, 0, *fields, 0, 0, 0, 0, 0, 0)
    end = struct.pack(
        "<IHHHHIIH", 0x06054B50, 0, 0, 1, 1, len(listed) + 1, len(entry) + len(stream), 0
    )
    context = ts.Context({"memory_key_value_store": {}})
    whole = b"".join([entry, stream, listed, b"x", end])
    KvStore.open("memory://", context).write("zip", whole).result()
    archive = {"driver": "zip", "base": {"driver": "memory", "path": "zip"}}
    try:
        read = KvStore.open(archive, context).read("x").result()
    except Failed:
        return None
    found: bytes = read.value
    return found if len(found) == size else None


def zstd_sizes(stream: bytes) -> tuple[int, int]:
    """The probable and the maximum size of a zstd stream's content, from its headers.

    Unpacks nothing. The first number may be false. The second cannot: a compressed block holds at
    most 128 KiB, and most streams have only such blocks, except for the last.

    Arguments:
        stream: the stream; untrusted.

    Returns:
        The sizes; 0 if this is not a zstd stream.
    """
    if stream[:4] != _ZSTD_MAGIC or len(stream) < 6:
        return 0, 0
    kind = stream[4]
    single = kind >> 5 & 1
    at = 5 + (1 - single) + (0, 1, 2, 4)[kind & 3]
    width = (single, 2, 4, 8)[kind >> 6]
    declared = int.from_bytes(stream[at : at + width], "little") + (256 if width == 2 else 0)
    at += width
    most = 0
    while at + 3 <= len(stream):
        header = int.from_bytes(stream[at : at + 3], "little")
        size, packing = header >> 3, header >> 1 & 3
        most += size if packing < 2 else _ZSTD_BLOCK
        at += 3 + (1 if packing == 1 else size)
        if header & 1:
            return min(declared if width else most - _ZSTD_BLOCK, most), most
    return 0, 0
