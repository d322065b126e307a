"""zstd, the codec of OCDBT's nodes, for untrusted bytes: in bounded memory.

TensorStore has zstd, but exposes it only within other formats, such as a method of ZIP archives. So
the bytes are put into an archive in memory; reading a range of a file in it unpacks only that.
"""

from __future__ import annotations

import struct

import tensorstore as ts

from unickpt.storage.errors import Failed
from unickpt.storage.tensorstore_calls import KvStore

_ZSTD_IN_ZIP = 93
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_BLOCK = 128 << 10


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
    content: bytes = read.value
    return content if len(content) == size else None


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
    offset = 5 + (1 - single) + (0, 1, 2, 4)[kind & 3]
    width = (single, 2, 4, 8)[kind >> 6]
    declared = int.from_bytes(stream[offset : offset + width], "little") + (
        256 if width == 2 else 0
    )
    offset += width
    most = 0
    while offset + 3 <= len(stream):
        header = int.from_bytes(stream[offset : offset + 3], "little")
        size, packing = header >> 3, header >> 1 & 3
        most += size if packing < 2 else _ZSTD_BLOCK
        offset += 3 + (1 if packing == 1 else size)
        if header & 1:
            return min(declared if width else most - _ZSTD_BLOCK, most), most
    return 0, 0
