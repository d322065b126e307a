"""The stored values of chunks: one of a whole chunk, several of a composed one.

A composed chunk consists of a *full chunk*, which is an earlier state of it, and the values added
to that, in order (docs/format.md, patches). Each is a separate value in this checkpoint or in a
sibling, its *base*. They have separate keys, so that no reader mistakes the old full chunk for the
chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from unickpt import doors
from unickpt.arrays.dtypes import Array
from unickpt.errors import UnsupportedFormat
from unickpt.format import chunk_encoding, codec_protocol
from unickpt.format.chunk_grid import FULL_LINK, WHOLE_LINK, Part, chunk_key
from unickpt.format.codec_protocol import NotDecodable
from unickpt.format.index import PATCHES, ArrayEntry
from unickpt.format.reader_protocol import Request
from unickpt.format.verified_chunks import ChunkStore
from unickpt.storage.btree.nodes import DataReference
from unickpt.storage.errors import Damaged, Failed

if TYPE_CHECKING:
    from unickpt.format.borrowed_chunks import BorrowedChunks

_MOST = 64
"""Values that are added to a full chunk."""
_WAY_OUT = (
    "bring back the checkpoint that had it, or use another step; a whole copy that is made in time "
    "(`unickpt copy`) needs no other checkpoint"
)


@dataclass(frozen=True)
class Value:
    """A value of a chunk.

    Arguments:
        store: the store that has it.
        part: the part whose key leads to it there.
        base: the position of its base in the index; None if it is in this checkpoint.
    """

    store: ChunkStore
    part: Part
    base: int | None = None


class Additions(Protocol):
    """The target of a door of the group `values`, by the name of the feature in the index."""

    def apply(self, added: bytes, data: Array) -> None:
        """Turns an earlier state of a chunk into the next one.

        Arguments:
            added: the value, untrusted.
            data: elements of the chunk, or the bytes that its codec stores; changed in place.

        Raises:
            NotDecodable: the value does not fit.
        """


class ChunkValues:
    """The stored values of a checkpoint's chunks; each is in this checkpoint, or in a base.

    Arguments:
        store: the checkpoint's database.
        borrowed: the values in its bases.
    """

    def __init__(self, store: ChunkStore, borrowed: BorrowedChunks) -> None:
        self._own, self._borrowed = store, borrowed

    def values(self, entry: ArrayEntry, part: Part, number: int) -> Sequence[Value]:
        """All values of a chunk: the whole one, or its full chunk and patches.

        Raises:
            CheckpointCorrupt: a database is damaged.
        """
        if chain := self.chain(entry, part, number):
            return chain
        base = self._borrowed.links(entry, part, number).get(WHOLE_LINK)
        return (Value(self._own if base is None else self._borrowed.bases[base], part, base),)

    def chain(self, entry: ArrayEntry, part: Part, number: int) -> Sequence[Value]:
        """The full chunk and the patches of a chunk, in order; nothing if it is stored whole.

        Raises:
            CheckpointCorrupt: a database is damaged.
        """
        if not entry.composed:
            return ()
        lent = self._borrowed.links(entry, part, number)
        values: list[Value] = []
        with self._own.naming_array(entry):
            while len(values) <= _MOST:
                link = len(values) + FULL_LINK
                value = self._value(part, number, link, lent.get(link))
                if value is None:
                    break
                values.append(value)
        return values

    def _value(self, part: Part, number: int, link: int, base: int | None) -> Value | None:
        """A value, if it is there; the first of a chain may be a base's whole chunk."""
        linked_part = part.linked(link)
        if base is None:
            is_own = self._own.values.length(chunk_key(linked_part, number)) is not None
            return Value(self._own, linked_part) if is_own else None
        store = self._borrowed.bases[base]
        if link == FULL_LINK and store.values.length(chunk_key(linked_part, number)) is None:
            linked_part = part
        return Value(store, linked_part, base)

    def where(self, entry: ArrayEntry, part: Part, number: int) -> DataReference | None:
        """The file and the bytes in which a whole chunk is stored, or the full chunk of a patched
        one; None if it is not in a file of this checkpoint, but missing, borrowed, or so small that
        it is stored in the B-tree.

        Raises:
            CheckpointCorrupt: the database is damaged.
        """
        value = self.values(entry, part, number)[0]
        place = None if value.base is not None else self.place(entry, value, number)
        return place if isinstance(place, DataReference) else None

    def place(self, entry: ArrayEntry, value: Value, number: int) -> bytes | DataReference | None:
        """The file and the bytes of a value of a chunk; of one in the B-tree, its bytes. Raises as
        `chain`."""
        try:  # not `naming_array`: this runs for each chunk
            return value.store.values.tree.find(chunk_key(value.part, number))
        except Failed as error:
            raise self._own.explained(error, f"array {entry.name!r}") from error

    def whole_places(
        self, chunks: Sequence[tuple[ArrayEntry, Part, int]]
    ) -> Sequence[bytes | DataReference | None]:
        """As `place`, for many chunks that are whole and in this checkpoint."""
        if not chunks:
            return []
        places: list[bytes | DataReference | None] = [None] * len(chunks)
        keys = [chunk_key(part, number) for _, part, number in chunks]
        with self._own.naming_array(chunks[0][0]):
            for leaf, which, positions in self._own.values.tree.find_all(keys):
                for index, position in zip(which, positions, strict=True):
                    places[index] = leaf.find(position)
        return places

    def check_end(self, entry: ArrayEntry, value: Value, number: int) -> None:
        """Checks that the last byte of a value of a chunk is there. Raises as `read_value`."""
        values, key = value.store.values, chunk_key(value.part, number)
        with self._own.naming_array(entry):
            values.has(key, values.length(key) or 0)

    def read_value(self, entry: ArrayEntry, value: Value, number: int) -> bytes:
        """The stored bytes of a value of a chunk.

        Raises:
            CheckpointCorrupt: it is missing, or damaged.
            StorageError: it cannot be read.
        """
        key = chunk_key(value.part, number)
        with self._own.naming_array(entry):
            stored = value.store.values.read(key)
        if stored is None:
            raise self._own.damaged(f"key {key!r} is missing in {value.store.location}")
        return bytes(stored)

    def read(self, requests: Sequence[Request]) -> Sequence[int]:
        """As `Reader.read`."""
        of_store: dict[ChunkStore, list[int]] = {}
        wrong = list[int]()
        for index, request in enumerate(requests):
            chunk = request.entry, request.part, request.number
            if chain := self.chain(*chunk):
                wrong += [index] * (self._read_composed(request, chain) != request.digest)
                continue
            of_store.setdefault(self.values(*chunk)[0].store, []).append(index)
        for store, positions in of_store.items():
            mismatches = store.read([requests[position] for position in positions])
            wrong += [positions[index] for index in mismatches]
        return sorted(wrong)

    def _read_composed(self, request: Request, chain: Sequence[Value]) -> int | None:
        """Reads a patched chunk, into the memory of the request.

        Arguments:
            request: the chunk; the digest is computed only if the request has one.
            chain: from `chain`.

        Returns:
            The digest of the chunk.

        Raises:
            CheckpointCorrupt: a value is missing, or damaged.
            StorageError: the storage failed.
        """
        entry, part, number, out, expected, _ = request
        try:
            data = self._rebuilt(entry, part, number, chain, out)
            if data is not out:
                codec_protocol.decode(entry, data, out)
        except (Failed, NotDecodable) as error:
            raise self._own.naming(error, entry, part, number) from error
        return None if expected is None else chunk_encoding.digest(data)

    def encoded_bytes(self, entry: ArrayEntry, part: Part, number: int) -> Array:
        """The stored bytes of a chunk whose codec is none of Zarr's, whether it has patches or not.

        Raises:
            CheckpointCorrupt, StorageError: as `read`.
        """
        values = self.values(entry, part, number)
        try:
            return self._rebuilt(entry, part, number, values, np.empty(0, np.uint8))
        except (Failed, NotDecodable) as error:
            raise self._own.naming(error, entry, part, number) from error

    def _rebuilt(
        self, entry: ArrayEntry, part: Part, number: int, chain: Sequence[Value], out: Array
    ) -> Array:
        """A full chunk with its added values; in `out`, or as the bytes that its codec stores."""
        data = read_full(entry, number, chain, out)
        if len(chain) > 1:
            door = doors.find("values", PATCHES)
            if door is None:
                raise UnsupportedFormat(
                    f"{self._own.location}: {entry.composed} chunks of array {entry.name!r} are "
                    f"stored as {PATCHES}, which this installation of unickpt has no plug-in for "
                    "(entry points unickpt.values); install unickpt whole"
                )
            kind: Additions = door.open()
            for added in self.additions(entry, part, number, chain):
                kind.apply(added, data)
        return data

    def additions(
        self, entry: ArrayEntry, part: Part, number: int, chain: Sequence[Value]
    ) -> list[bytes]:
        """The values added to a full chunk; all are requested before the first one is awaited.

        Raises:
            Failed: it is missing, or damaged.
        """
        keys = [chunk_key(value.part, number) for value in chain]
        most = chunk_encoding.nbytes_as_stored(entry, part.chunk_box(number).shape)
        requested = []
        for value, key in list(zip(chain, keys, strict=True))[1:]:
            length = value.store.values.length(key)
            if length is None:
                raise Damaged(f"no bytes stored of a patch{_base_note(value)}")
            if length > most:
                raise Damaged(f"a patch of {length} bytes for a chunk of {most}")
            requested.append((value, length, value.store.values.request(key)))
        additions = []
        for value, length, response in requested:
            data = response.result().value
            if len(data) != length:
                raise Damaged(
                    f"{len(data)} bytes stored of a patch, {length} expected{_base_note(value)}"
                )
            additions.append(bytes(data))
        return additions


def read_full(entry: ArrayEntry, number: int, chain: Sequence[Value], out: Array) -> Array:
    """Reads the full chunk; returns its elements in `out`, or the bytes that its codec stores."""
    store, part = chain[0].store, chain[0].part
    try:
        if entry.codec is None:
            store.read_whole(entry, part, number, out)
            return out
        data = store.stored_bytes(entry, part, number)
    except Damaged as error:
        raise Damaged(f"{error}{_base_note(chain[0])}") from error
    if out.dtype == np.uint8 and out.shape == data.shape:
        out[:] = data
        return out
    return data.copy()


def _base_note(value: Value) -> str:
    """The owner of a value, and what to do without it, for messages."""
    if value.base is None:
        return ""
    return f", of a chain of patches, which {value.store.location} should have; {_WAY_OUT}"
