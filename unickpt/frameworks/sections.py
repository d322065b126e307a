"""The bytes of a per-process value whose sections are read one by one: a head, then the sections.

docs/format.md, section 11, is the normative text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy as np
import xxhash

from unickpt.arrays.dtypes import Array
from unickpt.quoting import quoted

ALIGN = 64
"""Sections and their values begin at multiples of this, so that arrays are read without a copy."""
_MOST_HEAD = 1 << 30
_SPACES = b" " * ALIGN
_Size = Annotated[int, msgspec.Meta(ge=0)]
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]


class Malformed(ValueError):
    """The bytes are not a per-process value."""


@dataclass(frozen=True)
class EncodedValue:
    """The bytes of a process's value.

    Arguments:
        data: all of them; empty if the process has none of its own.
        head: bytes of the head, which has the digests of the rest; 0 if all is JSON.
    """

    data: bytes | memoryview
    head: int = 0

    @property
    def digest(self) -> int:
        """xxh3-64 of the head, or of all."""
        return xxhash.xxh3_64_intdigest(memoryview(self.data)[: self.head or None])


@dataclass(frozen=True)
class Joined:
    """Arrays of one dimension and one dtype, stored as one array."""

    arrays: Sequence[Array]


@dataclass(frozen=True)
class Place:
    """The place of a section: first byte, size, size of its JSON, and digest."""

    start: int
    size: int
    json: int
    digest: int


@dataclass(frozen=True)
class Head:
    """The decoded head of a value.

    Arguments:
        facts: of a value that was saved as `Sections`; None for any other, which is one section.
        places: of the sections, by their keys.
    """

    facts: Mapping[str, Any] | None
    places: Mapping[str, Place]


def padding(size: int) -> int:
    """The number of bytes missing to a multiple of `ALIGN`."""
    return -size % ALIGN


def join(
    sections: Mapping[str, tuple[bytes, Sequence[Sequence[memoryview]]]],
    facts: Mapping[str, Any] | None,
) -> EncodedValue:
    """The value of these sections, copied once.

    Arguments:
        sections: for each its JSON, and the elements of its arrays, in pieces.
        facts: facts that a reader gets without reading a section; JSON.
    """
    values = {key: _padded(text, arrays) for key, (text, arrays) in sections.items()}
    sizes = {key: sum(map(len, pieces)) for key, pieces in values.items()}
    # The size of the head must be known before the digests, which always have as many digits.
    table = [[key, sizes[key], len(text), "0" * 16] for key, (text, _) in sections.items()]
    head = {"sections": table} if facts is None else {"facts": facts, "sections": table}
    size = len(_json(head))
    size += padding(size)
    # NumPy uses huge pages, which the system provides several times as fast as those of `bytes`.
    data, offset = np.empty(size + sum(sizes.values()), np.uint8), size
    for row, (key, pieces) in zip(table, values.items(), strict=True):
        out = data[offset : offset + sizes[key]]
        np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces], out=out)
        row[3] = f"{xxhash.xxh3_64_intdigest(out.data):016x}"
        offset += len(out)
    data[:size] = np.frombuffer(_json(head).ljust(size), np.uint8)
    return EncodedValue(data.data, size)


def _padded(text: bytes, arrays: Sequence[Sequence[memoryview]]) -> list[bytes | memoryview]:
    """The pieces of a section, each value filled up with spaces; none of them is empty."""
    pieces = list[bytes | memoryview]()
    values: Iterable[Sequence[bytes | memoryview]] = ((text,), *arrays)
    for value in values:
        pieces += [piece for piece in value if piece]
        missing = padding(sum(map(len, value)))
        if missing:
            pieces.append(_SPACES[:missing])
    return pieces


def _json(head: Mapping[str, Any]) -> bytes:
    return json.dumps(head, separators=(",", ":"), allow_nan=False).encode()


def parse_head(text: bytes, size: int) -> Head:
    """Decodes the head of a value of `size` bytes; untrusted.

    Raises:
        Malformed: it is no head, or not for so many bytes.
    """
    try:
        body = _HEAD.decode(text)
    except (RecursionError, UnicodeError, msgspec.DecodeError) as error:
        raise Malformed(f"the head of a per-process value is malformed: {error}") from None
    places, offset = dict[str, Place](), len(text)
    for row in body.sections:
        key, length, json_length, digest = row
        if not json_length <= length <= size - offset or key in places:
            raise Malformed(f"a section of a per-process value is {quoted(row)}")
        places[key] = Place(offset, length, json_length, int(digest, 16))
        offset += length
    if offset != size:
        raise Malformed(f"the sections of a per-process value end at byte {offset} of {size}")
    if body.facts is None and list(places) != [""]:
        raise Malformed("a per-process value has several sections, but no facts")
    return Head(body.facts, places)


class _StoredHead(msgspec.Struct, frozen=True):
    """The JSON of a head: a row for each section, and the facts."""

    sections: list[tuple[str, _Size, _Size, _Digest]]
    facts: dict[str, Any] | None = None


_HEAD = msgspec.json.Decoder(_StoredHead)


@dataclass(eq=False)
class StoredValue:
    """The stored value of one process; sections are read on request. Untrusted.

    Arguments:
        size: of all of it.
        digest: of the head, or of all.
        head_size: bytes of the head; 0 if all is JSON.
        read: reads bytes of it, by offset and number.
        damaged: makes the error for damage, from its description.
        may_be_empty: whether it may have no bytes: only if that of another process has a head.
        restored: as `read`, for bytes that do not match their digest.
    """

    size: int
    digest: int
    head_size: int
    read: Callable[[int, int], bytes]
    damaged: Callable[[str], Exception]
    may_be_empty: bool
    restored: Callable[[int, int], bytes]

    @property
    def is_empty(self) -> bool:
        """Whether the process saved none of its own, because another one has it."""
        return self.size == 0 and self.may_be_empty

    @cached_property
    def head(self) -> Head:
        """Its head, verified; a value without a head is JSON, which counts as one section.

        Raises:
            CheckpointCorrupt: it is damaged.
        """
        if self.head_size == 0:
            return Head(None, {"": Place(0, self.size, self.size, self.digest)})
        if self.head_size > min(self.size, _MOST_HEAD):
            raise self.damaged(f"has {self.size} bytes, but a head of {self.head_size}")
        text = self._verified(0, self.head_size, self.digest)
        try:
            return parse_head(text, self.size)
        except Malformed as error:
            raise self.damaged(f"is malformed: {error}") from None

    def section(self, key: str) -> tuple[bytes, memoryview]:
        """The JSON of a section, and its arrays, verified.

        Raises:
            KeyError: there is none of this key.
            CheckpointCorrupt: it is damaged.
        """
        place = self.head.places[key]
        data = memoryview(self._verified(place.start, place.size, place.digest))
        return bytes(data[: place.json]), data[place.json + padding(place.json) :]

    def check(self) -> None:
        """Verifies all of it.

        Raises:
            CheckpointCorrupt: it is damaged.
        """
        for key in () if self.is_empty else self.head.places:
            self.section(key)

    def _verified(self, start: int, length: int, digest: int) -> bytes:
        data = self.read(start, length)
        if xxhash.xxh3_64_intdigest(data) != digest:
            data = self.restored(start, length)
        if xxhash.xxh3_64_intdigest(data) != digest:
            raise self.damaged("does not match its digest")
        return data


class LazyMapping(Mapping[str, Any]):
    """Sections by their keys, each read and decoded on request."""

    def __init__(self, stored: StoredValue, decode: Callable[[str], Any]) -> None:
        self._stored, self._decode = stored, decode

    def __getitem__(self, key: str) -> Any:
        if key not in self._stored.head.places:
            raise KeyError(key)
        return self._decode(key)

    def __contains__(self, key: object) -> bool:
        return key in self._stored.head.places

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored.head.places)

    def __len__(self) -> int:
        return len(self._stored.head.places)
