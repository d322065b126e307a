"""Parity files: bytes of a sum, then a table of its group, then a trailer (docs/format.md).

A file of the same form, without a sum, lists all groups of a folder: the loss of a parity file is
noticed, and its groups are known without it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from typing import Annotated

import msgspec
import xxhash

from unickpt.extend import Damaged
from unickpt.plugins.parity.codes import MOST_FILES, MOST_SUMS

_TRAILER = struct.Struct("<8sQ16s")
TRAILER_BYTES = _TRAILER.size
_MAGIC = b"UCPARITY"
_MOST_TABLE_BYTES = 64 << 20
LIST = "groups"
"""The name of the file that lists all groups of a folder."""
_PATH = re.compile(r"((d|reused|p)/)?(?!\.{1,2}$)[^/\x00]{1,255}")
_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Hash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]


class GroupTable(msgspec.Struct, frozen=True):
    """A group: files, and the sums of them.

    Arguments:
        files: path, bytes and digest of each file, in the order in which they were added.
        parity: path of each parity file, and the digest of its sum.
    """

    files: list[tuple[str, _Size, _Hash]]
    parity: list[tuple[str, _Hash]]

    @property
    def nbytes(self) -> int:
        """Bytes of a sum."""
        return max(size for _, size, _ in self.files)

    @property
    def is_valid(self) -> bool:
        """Whether it has one of each path, and all may be in the folder."""
        paths = [facts[0] for facts in self.files] + [facts[0] for facts in self.parity]
        return (
            1 <= len(self.files) <= MOST_FILES
            and 1 <= len(self.parity) <= MOST_SUMS
            and len(set(paths)) == len(paths)
            and all(map(_PATH.fullmatch, paths))
        )


class _Tables(msgspec.Struct, frozen=True):
    """The JSON in a file."""

    groups: list[GroupTable]
    format: int = 1


_DECODER = msgspec.json.Decoder(_Tables)


def encode(groups: Iterable[GroupTable]) -> bytes:
    """Tables and the trailer."""
    ordered = sorted(groups, key=lambda group: group.parity)
    table = msgspec.json.encode(_Tables(ordered))
    return table + _TRAILER.pack(_MAGIC, len(table), xxhash.xxh3_128_digest(table))


def table_bytes(trailer: bytes) -> int:
    """The bytes of the table before a trailer.

    Raises:
        Damaged: it is no trailer.
    """
    magic, length, _ = _TRAILER.unpack(trailer) if len(trailer) == TRAILER_BYTES else (b"", 0, b"")
    if magic != _MAGIC or length > _MOST_TABLE_BYTES:
        raise Damaged("it does not end as a parity file")
    return int(length)


def decode(data: bytes) -> list[GroupTable]:
    """Tables, from their bytes and those of the trailer.

    Raises:
        Damaged: it is damaged, or contradicts the format.
    """
    text, trailer = data[:-TRAILER_BYTES], data[-TRAILER_BYTES:]
    if xxhash.xxh3_128_digest(text) != _TRAILER.unpack(trailer)[2]:
        raise Damaged("the table of a parity file does not match its digest")
    try:
        tables = _DECODER.decode(text)
    except (RecursionError, UnicodeError, msgspec.DecodeError) as error:
        raise Damaged(f"the table of a parity file is malformed: {error}") from None
    if tables.format != 1 or not all(group.is_valid for group in tables.groups):
        raise Damaged("the table of a parity file contradicts the format")
    return tables.groups
