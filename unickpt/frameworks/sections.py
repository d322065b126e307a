"""The bytes of a per-process value whose sections are read one by one: a head, then the sections.

docs/format.md, section 11, is the normative text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from unickpt.arrays.dtypes import Array
from unickpt.quoting import quoted

ALIGN = 64
"""Sections, and what is in them, begin at multiples of this: an array is not copied to be read."""
_MOST_HEAD = 1 << 30
_SPACES = b" " * ALIGN
_SHORT, _MOST_JOINED = 4 << 10, 256 << 10


class Malformed(ValueError):
    """The bytes are not a per-process value."""


@dataclass(frozen=True)
class EncodedValue:
    """The bytes of a process's value.

    Arguments:
        data: all of them; empty where the process has none of its own.
        head: how many are the head, which has the digests of the others; 0 if it is all JSON.
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
    """Where a section is: its first byte, its size, that of its JSON, and its digest."""

    start: int
    size: int
    json: int
    digest: int


@dataclass(frozen=True)
class Head:
    """What the head of a value says.

    Arguments:
        facts: of a value that was saved as `Sections`; None for any other, which is one section.
        places: of the sections, by their keys.
    """

    facts: Mapping[str, Any] | None
    places: Mapping[str, Place]


def padding(size: int) -> int:
    """How many bytes are missing to a multiple of `ALIGN`."""
    return -size % ALIGN


def join(
    sections: Mapping[str, tuple[bytes, Sequence[Sequence[memoryview]]]],
    facts: Mapping[str, Any] | None,
) -> EncodedValue:
    """The value of these sections, copied once.

    Arguments:
        sections: for each its JSON, and the elements of its arrays, in pieces.
        facts: what a reader shall know without reading a section; JSON.
    """
    values = {key: _padded(text, arrays) for key, (text, arrays) in sections.items()}
    sizes = {key: sum(map(len, pieces)) for key, pieces in values.items()}
    # The size of the head must be known before the digests, which have always as many digits.
    table = [[key, sizes[key], len(text), "0" * 16] for key, (text, _) in sections.items()]
    head = {"sections": table} if facts is None else {"facts": facts, "sections": table}
    size = len(_json(head))
    size += padding(size)
    # NumPy takes huge pages, which the system hands out several times as fast as those of `bytes`.
    data = memoryview(np.empty(size + sum(sizes.values()), np.uint8).data)
    offset = size
    for row, pieces in zip(table, values.values(), strict=True):
        start = offset
        for piece in _long(pieces):
            data[offset : offset + len(piece)] = piece
            offset += len(piece)
        row[3] = f"{xxhash.xxh3_64_intdigest(data[start:offset]):016x}"
    data[:size] = _json(head).ljust(size)
    return EncodedValue(data, size)


def _padded(text: bytes, arrays: Sequence[Sequence[memoryview]]) -> list[bytes | memoryview]:
    """The pieces of a section, each value filled up with spaces."""
    pieces = list[bytes | memoryview]()
    values: Iterable[Sequence[bytes | memoryview]] = ((text,), *arrays)
    for value in values:
        pieces += value
        missing = padding(len(value[0]) if len(value) == 1 else sum(map(len, value)))
        if missing:
            pieces.append(_SPACES[:missing])
    return pieces


def _long(pieces: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes in fewer pieces: short ones are joined, a statement for each takes longer."""
    short, size = list[bytes | memoryview](), 0
    for piece in pieces:
        if len(piece) <= _SHORT:
            short.append(piece)
            size += len(piece)
        if short and (len(piece) > _SHORT or size > _MOST_JOINED):
            yield b"".join(short)
            short, size = [], 0
        if len(piece) > _SHORT:
            yield piece
    if short:
        yield b"".join(short)


def _json(head: Mapping[str, Any]) -> bytes:
    return json.dumps(head, separators=(",", ":"), allow_nan=False).encode()


def parse_head(text: bytes, size: int) -> Head:
    """What the head of a value of `size` bytes says; untrusted.

    Raises:
        Malformed: it is no head, or not of so many bytes.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the head of a per-process value is not JSON: {error}") from None
    table = body.get("sections") if isinstance(body, dict) else None
    facts = body.get("facts") if isinstance(body, dict) else None
    if not isinstance(table, list) or not isinstance(facts, dict | None):
        raise Malformed(f"the head of a per-process value is {quoted(body)}")
    places, offset = dict[str, Place](), len(text)
    for row in table:
        match row:
            case [str(key), int(length), int(start), str(digest)] if (
                0 <= start <= length <= size - offset and key not in places and _is_digest(digest)
            ):
                places[key] = Place(offset, length, start, int(digest, 16))
                offset += length
            case _:
                raise Malformed(f"a section of a per-process value is {quoted(row)}")
    if offset != size:
        raise Malformed(f"the sections of a per-process value end at byte {offset} of {size}")
    if facts is None and list(places) != [""]:
        raise Malformed("a per-process value has several sections, but no facts")
    return Head(facts, places)


def _is_digest(text: str) -> bool:
    return len(text) == 16 and set(text) <= set("0123456789abcdef")


class StoredValue:
    """The stored value of one process; sections are read on request. Untrusted.

    Arguments:
        size: of all of it.
        digest: of the head, or of all.
        head: bytes of the head; 0 if it is all JSON.
        read: reads bytes of it: from which on, and how many.
        damaged: the error that says what is wrong with it.
        may_be_empty: whether it may have no bytes: only if that of another process has a head.
    """

    def __init__(
        self,
        size: int,
        digest: int,
        head: int,
        read: Callable[[int, int], bytes],
        damaged: Callable[[str], Exception],
        may_be_empty: bool,
    ) -> None:
        self.size, self.digest, self._head_size = size, digest, head
        self._read, self.damaged = read, damaged
        self._may_be_empty = may_be_empty
        self._head: Head | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the process saved none of its own: another one has it."""
        return self.size == 0 and self._may_be_empty

    @property
    def is_json(self) -> bool:
        """Whether it is JSON without a head, which has no sections."""
        return self._head_size == 0

    def head(self) -> Head:
        """What its head says, verified.

        Raises:
            CheckpointCorrupt: it is damaged.
        """
        if self._head is None:
            if self._head_size > min(self.size, _MOST_HEAD):
                raise self.damaged(f"has {self.size} bytes, but a head of {self._head_size}")
            text = self._verified(0, self._head_size, self.digest)
            try:
                self._head = parse_head(text, self.size)
            except Malformed as error:
                raise self.damaged(f"is malformed: {error}") from None
        return self._head

    def json(self) -> bytes:
        """All of one without a head, verified."""
        return self._verified(0, self.size, self.digest)

    def section(self, key: str) -> tuple[bytes, memoryview]:
        """The JSON of a section, and its arrays, verified.

        Raises:
            KeyError: there is none of this key.
            CheckpointCorrupt: it is damaged.
        """
        place = self.head().places[key]
        data = memoryview(self._verified(place.start, place.size, place.digest))
        return bytes(data[: place.json]), data[place.json + padding(place.json) :]

    def check(self) -> None:
        """Verifies all of it.

        Raises:
            CheckpointCorrupt: it is damaged.
        """
        if self.is_empty:
            return
        if self.is_json:
            self.json()
            return
        for key in self.head().places:
            self.section(key)

    def _verified(self, start: int, length: int, digest: int) -> bytes:
        data = self._read(start, length)
        if xxhash.xxh3_64_intdigest(data) != digest:
            raise self.damaged("does not match its digest")
        return data


class LazyMapping(Mapping[str, Any]):
    """Sections by their keys, each read and decoded on request."""

    def __init__(self, stored: StoredValue, decode: Callable[[str], Any]) -> None:
        self._stored, self._decode = stored, decode

    def __getitem__(self, key: str) -> Any:
        if key not in self._stored.head().places:
            raise KeyError(key)
        return self._decode(key)

    def __contains__(self, key: object) -> bool:
        return key in self._stored.head().places

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored.head().places)

    def __len__(self) -> int:
        return len(self._stored.head().places)
