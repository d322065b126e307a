"""Encodes an OCDBT database whose values are ranges of files that exist already.

TensorStore writes the values of a database itself, or copies references from another one. Neither
makes a database of references that lead to files of one's own choice. TensorStore documents the
format; `nodes` decodes it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from unickpt.storage.btree import bounded_codecs
from unickpt.storage.btree.nodes import MANIFEST_MAGIC, NODE_MAGIC, DataReference
from unickpt.threads import in_batches

_ENTRIES = 4096
"""Of a node. Decoded, they take far less than the 8 MiB that TensorStore's nodes have at most."""
_MOST_INLINE, _MOST_DECODED, _ARITY_LOG2 = 100, 8 << 20, 4  # TensorStore's defaults
_MISSING = (1 << 64) - 1


@dataclass(frozen=True)
class _Placed:
    """A node, and where it is.

    Arguments:
        first: its first key.
        at: where it is.
        keys: number of keys below it.
        tree_bytes: of it and of all nodes below it.
        value_bytes: of all values below it.
    """

    first: bytes
    at: DataReference
    keys: int
    tree_bytes: int
    value_bytes: int


def build(values: Iterable[tuple[bytes, DataReference]], nodes: str) -> tuple[bytes, bytes]:
    """A database of references.

    Arguments:
        values: keys and where their values are, in files below the database's folder.
        nodes: the path of the file for the nodes, likewise.

    Returns:
        The manifest, and the content of the file for the nodes.
    """
    out: list[bytes] = []
    size = 0

    def place(first: bytes, node: bytes, keys: int, below: int, nbytes: int) -> _Placed:
        nonlocal size
        at = DataReference(nodes, size, len(node))
        out.append(node)
        size += len(node)
        return _Placed(first, at, keys, len(node) + below, nbytes)

    level = [
        place(some[0][0], _leaf(some), len(some), 0, sum(at.length for _, at in some))
        for some in in_batches(sorted(values, key=lambda value: value[0]), _ENTRIES)
    ]
    height = 0
    while len(level) > 1:
        height += 1
        level = [
            place(
                some[0].first,
                _inner(height, some),
                sum(each.keys for each in some),
                sum(each.tree_bytes for each in some),
                sum(each.value_bytes for each in some),
            )
            for some in in_batches(level, _ENTRIES)
        ]
    return _manifest(level[0] if level else None, height), b"".join(out)


def _manifest(root: _Placed | None, height: int) -> bytes:
    config = [
        os.urandom(16),
        b"\0",  # everything about the versions is in this file
        _number(_MOST_INLINE),
        _number(_MOST_DECODED),
        bytes([_ARITY_LOG2]),
        _number(0),  # no compression
    ]
    body = [
        *config,
        _files(["" if root is None else root.at.path]),
        _number(1),
        _number(1),
        bytes([height]),
        *_references([root] if root is not None else [], {root.at.path: 0} if root else {}),
        time.time_ns().to_bytes(8, "little"),
        _number(0),  # no older versions
    ]
    return _sealed(MANIFEST_MAGIC, b"".join(body))


def _leaf(values: Sequence[tuple[bytes, DataReference]]) -> bytes:
    numbers, table = _table(at.path for _, at in values)
    body = [
        b"\0",
        table,
        _number(len(values)),
        *_keys([key for key, _ in values], is_inner=False),
        *(_number(at.length) for _, at in values),
        b"\1" * len(values),  # each value is in a file
        *(_number(numbers[at.path]) for _, at in values),
        *(_number(at.offset) for _, at in values),
    ]
    return _sealed(NODE_MAGIC, b"".join(body))


def _inner(height: int, nodes: Sequence[_Placed]) -> bytes:
    numbers, table = _table(node.at.path for node in nodes)
    body = [
        bytes([height]),
        table,
        _number(len(nodes)),
        *_keys([node.first for node in nodes], is_inner=True),
        *_references(nodes, numbers),
    ]
    return _sealed(NODE_MAGIC, b"".join(body))


def _references(nodes: Sequence[_Placed], files: dict[str, int]) -> list[bytes]:
    """Where nodes are, and what is below them; column by column."""
    if not nodes:
        zero = _number(0)
        return [zero, _number(_MISSING), _number(_MISSING), zero, zero, zero]
    columns = [
        [files[node.at.path] for node in nodes],
        [node.at.offset for node in nodes],
        [node.at.length for node in nodes],
        [node.keys for node in nodes],
        [node.tree_bytes for node in nodes],
        [node.value_bytes for node in nodes],
    ]
    return [_number(value) for column in columns for value in column]


def _keys(keys: Sequence[bytes], *, is_inner: bool) -> list[bytes]:
    """Keys, each without what it shares with the one before; no prefix is shared by all below."""
    shared, rest = _without_shared(keys)
    return [
        *map(_number, shared[1:]),
        *(_number(len(ending)) for ending in rest),
        *([_number(0)] * len(keys) if is_inner else []),
        *rest,
    ]


def _table(paths: Iterable[str]) -> tuple[dict[str, int], bytes]:
    """The numbers of files, and the table of their paths."""
    ordered = sorted(set(paths))
    return {path: number for number, path in enumerate(ordered)}, _files(ordered)


def _files(paths: Sequence[str]) -> bytes:
    encoded = [path.encode() for path in paths]
    if not encoded:
        return _number(0)
    shared, rest = _without_shared(encoded)
    return b"".join(
        [
            _number(len(encoded)),
            *map(_number, shared[1:]),
            *(_number(len(ending)) for ending in rest),
            *[_number(0)] * len(encoded),  # relative to the database's folder
            *rest,
        ]
    )


def _without_shared(texts: Sequence[bytes]) -> tuple[list[int], list[bytes]]:
    """How many bytes each shares with the one before, and its other bytes."""
    shared = [0] * len(texts)
    for at, (a, b) in enumerate(pairwise(texts)):
        most = min(len(a), len(b))
        shared[at + 1] = next((n for n in range(most) if a[n] != b[n]), most)
    return shared, [text[n:] for text, n in zip(texts, shared, strict=True)]


def _number(value: int) -> bytes:
    """Seven bits per byte, the lowest first; all bytes except the last are above 127."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _sealed(magic: bytes, body: bytes) -> bytes:
    """A body with its header and its checksum, not compressed."""
    length = len(magic) + 8 + 2 + len(body) + 4
    data = b"".join([magic, length.to_bytes(8, "little"), b"\0\0", body])
    return data + bounded_codecs.crc32c(data)
