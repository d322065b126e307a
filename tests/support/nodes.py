"""Manifests and B-tree nodes of OCDBT, written byte by byte, as an enemy would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from support.forging import crc32c

MAX_VARINT = (1 << 64) - 1


@dataclass(frozen=True)
class Away:
    """A value that lies in a file."""

    path: str
    offset: int
    length: int


def varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def varints(numbers: Sequence[int]) -> bytes:
    return b"".join(map(varint, numbers))


def files(paths: Sequence[str]) -> bytes:
    """A table of files whose nodes name theirs from the top."""
    names = [path.encode() for path in paths]
    count = len(names)
    return b"".join(
        [
            varint(count),
            varints([0] * max(0, count - 1)),
            varints([len(name) for name in names]),
            varints([0] * count),
            *names,
        ]
    )


def sealed(magic: str, body: bytes, *, packed: bool = False) -> bytes:
    """What encloses a manifest or a node."""
    length = (4 + 8 + 2 + len(body) + 4).to_bytes(8, "little")
    data = bytes.fromhex(magic) + length + bytes([0, packed]) + body
    return data + crc32c(data).to_bytes(4, "little")


def node(body: bytes, *, packed: bool = False) -> bytes:
    return sealed("0cdb20de", body, packed=packed)


def manifest(path: str, offset: int, length: int, height: int = 0, *, body: bytes = b"") -> bytes:
    """A manifest of one version."""
    config = bytes(16) + bytes([0]) + varint(100) + varint(8 << 20) + bytes([4, 0])
    root = varints([1]) + bytes([height]) + varints([0, offset, length, 1, 1, 1]) + bytes(8)
    return sealed("0cdb3a2a", config + files([path]) + varint(1) + root + varint(0) + body)


def leaf_body(
    keys: Sequence[bytes], shared: Sequence[int], rest: Sequence[int], values: bytes = b""
) -> bytes:
    """A leaf of keys, as they are stored, with values of no bytes."""
    count = len(rest)
    head = bytes([0]) + files([]) + varint(count) + varints(shared) + varints(rest)
    return head + b"".join(keys) + varints([0] * count) + bytes(count) + values


def leaf(values: Mapping[str, bytes | Away]) -> bytes:
    """A leaf of some keys."""
    keys = sorted(values)
    away = [v for key in keys if isinstance(v := values[key], Away)]
    near = [v for key in keys if isinstance(v := values[key], bytes)]
    paths = sorted({v.path for v in away})
    lengths = [v.length if isinstance(v := values[key], Away) else len(v) for key in keys]
    return node(
        b"".join(
            [
                bytes([0]),
                files(paths),
                varint(len(keys)),
                varints([0] * (len(keys) - 1)),
                varints([len(key.encode()) for key in keys]),
                *(key.encode() for key in keys),
                varints(lengths),
                bytes(isinstance(values[key], Away) for key in keys),
                varints([paths.index(v.path) for v in away]),
                varints([v.offset for v in away]),
                *near,
            ]
        )
    )


def inner(entries: Sequence[tuple[bytes, bytes, str, int, int]], height: int) -> bytes:
    """An inner node of entries: key, what all below begins with, file, offset, length."""
    paths = sorted({entry[2] for entry in entries})
    count = len(entries)
    return node(
        b"".join(
            [
                bytes([height]),
                files(paths),
                varint(count),
                varints([0] * (count - 1)),
                varints([len(entry[0]) for entry in entries]),
                varints([len(entry[1]) for entry in entries]),
                *(entry[0] for entry in entries),
                varints([paths.index(entry[2]) for entry in entries]),
                varints([entry[3] for entry in entries]),
                varints([entry[4] for entry in entries]),
                varints([1] * 3 * count),
            ]
        )
    )


def zstd(*blocks: tuple[int, bytes, int]) -> bytes:
    """A zstd stream of blocks: 0 for bytes as they are, 1 for one byte that stands many times."""
    out = [b"\x28\xb5\x2f\xfd\x00\x58"]
    for number, (kind, data, size) in enumerate(blocks):
        last = number == len(blocks) - 1
        out += [(size << 3 | kind << 1 | last).to_bytes(3, "little"), data]
    return b"".join(out)


def plain(data: bytes) -> bytes:
    """A zstd stream of bytes as they are."""
    most = 1 << 17
    return zstd(
        *((0, data[at : at + most], len(data[at : at + most])) for at in range(0, len(data), most))
    )
