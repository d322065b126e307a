"""Patched chunks: the *full chunk*, an earlier state of a chunk, and the patches that lead to it.

The patches of a chunk form a *chain*: each refers to the state that the one before it makes, the
first to the full chunk. Saves are counted since one wrote everything; the number of the save that
made a patch is its *generation*. A save refers to the state after the save whose number is its own
with the lowest bit that is set cleared. So a chain has at most as many patches as the number has
bits set: of `n` states, each opens with at most log2(n) patches. What a save refers to is what the
save before it referred to, or that one itself; and what it needs of earlier saves, it needs whole.

Each is a value of its own, which this checkpoint has, or one beside it, its *base*. Full chunks and
patches have keys of their own, so that no reader takes the full chunk, which is old, for the chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unickpt.arrays.dtypes import Array
from unickpt.errors import CheckpointCorrupt
from unickpt.format import codec, codecs, links, patches
from unickpt.format.chunk_grid import Part, chunk_key
from unickpt.format.chunk_store import ChunkStore
from unickpt.format.codecs import NotDecodable
from unickpt.format.index import ArrayEntry
from unickpt.format.links import FULL_LINK
from unickpt.format.patches import BadPatch, State
from unickpt.format.reader import Request
from unickpt.storage.errors import Damaged, Failed

_MOST = 64
"""Patches of a chain: generations have so many bits."""
_WAY_OUT = (
    "bring back the checkpoint that had it, or use another step; a whole copy that is made in time "
    "(`unickpt copy`) needs no other checkpoint"
)


def parent_generation(generation: int) -> int:
    """Of the state to which the patches of a generation refer."""
    return generation & (generation - 1)


def is_on_the_way(generation: int, to: int) -> bool:
    """Whether a generation is one of those that lead to another, or that one itself."""
    return to & -(generation & -generation) == generation


@dataclass(frozen=True)
class Value:
    """A value of a patched chunk.

    Arguments:
        store: which has it.
        part: whose key leads to it there.
        base: the position of its base in the index; None if it is in this checkpoint.
    """

    store: ChunkStore
    part: Part
    base: int | None = None


@dataclass(frozen=True)
class Parent:
    """The state to which the next patch of a chunk refers.

    Arguments:
        state: what is known of it.
        values: of how many values of the chunk it consists.
        is_read: whether its elements were read.
    """

    state: State
    values: int
    is_read: bool


@dataclass(frozen=True)
class KnownChunk:
    """A chunk for which a patch may be written.

    Arguments:
        before: the digest that it had when it was saved last.
        now: the digest that it has.
        generation: of the patch.
    """

    before: int
    now: int
    generation: int


Borrowed = Callable[[ArrayEntry, Part, int], Mapping[int, int]]
"""The values of a chunk that bases have: by their links, the positions of the bases."""


class Chains:
    """The patched chunks of a checkpoint.

    Arguments:
        own: the checkpoint's database.
        bases: those of its bases.
        borrowed: what they have.
    """

    def __init__(self, own: ChunkStore, bases: Sequence[ChunkStore], borrowed: Borrowed) -> None:
        self._own, self._bases, self._borrowed = own, bases, borrowed
        self._is_slow = not own.location.is_local  # so that several reads at once pay

    def of(self, entry: ArrayEntry, part: Part, number: int) -> Sequence[Value]:
        """The full chunk and the patches of a chunk, in order; nothing if it is stored whole.

        Raises:
            Failed: a database is damaged.
        """
        if not entry.patched:
            return ()
        lent = self._borrowed(entry, part, number)
        found: list[Value] = []
        while len(found) <= _MOST:
            link = len(found) + FULL_LINK
            value = self._value(part, number, link, lent.get(link))
            if value is None:
                break
            found.append(value)
        return found

    def _value(self, part: Part, number: int, link: int, base: int | None) -> Value | None:
        """A value, if it is there; the first of a chain may be a base's whole chunk."""
        there = links.part_of(part, link)
        if base is None:
            is_own = self._own.values.length(chunk_key(there, number)) is not None
            return Value(self._own, there) if is_own else None
        store = self._bases[base]
        if link == FULL_LINK and store.values.length(chunk_key(there, number)) is None:
            there = part
        return Value(store, there, base)

    def read(self, request: Request, chain: Sequence[Value]) -> int | None:
        """Reads a patched chunk, into the memory of the request.

        Arguments:
            request: which; whether it has a digest says whether one is needed.
            chain: from `of`.

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
                codecs.decode(entry, data, out)
        except (Failed, NotDecodable, BadPatch) as error:
            raise self._naming(error, entry, part, number) from error
        return None if expected is None else codec.digest(data)

    def stored_bytes(
        self, entry: ArrayEntry, part: Part, number: int, chain: Sequence[Value]
    ) -> Array:
        """The stored bytes of a chunk whose codec is none of Zarr's, of which one value is whole.

        Raises:
            CheckpointCorrupt, StorageError: as `read`.
        """
        try:
            return self._rebuilt(entry, part, number, chain, np.empty(0, np.uint8))
        except (Failed, BadPatch) as error:
            raise self._naming(error, entry, part, number) from error

    def _rebuilt(
        self, entry: ArrayEntry, part: Part, number: int, chain: Sequence[Value], out: Array
    ) -> Array:
        """A full chunk with its patches; in `out`, or what its codec stores."""
        data = self._full(entry, number, chain, out)
        for patch in self._patches(entry, part, number, chain):
            patches.apply(patch, data)
        return data

    def read_parent(
        self,
        entry: ArrayEntry,
        part: Part,
        number: int,
        chain: Sequence[Value],
        known: KnownChunk,
        out: Array,
    ) -> Parent:
        """Reads the state of a chunk to which its next patch refers.

        Arguments:
            entry, part, number: which chunk.
            chain: from `of`.
            known: what the writer knows of it.
            out: contiguous memory for its elements, or for what its codec stores.

        Raises:
            CheckpointCorrupt: that state does not match its digest; or as `read`.
            StorageError: the storage failed.
        """
        to = parent_generation(known.generation)
        try:
            found = self._patches(entry, part, number, chain)
            states = [patches.state_of(patch) for patch in found]  # each: of the state before it
            on_the_way = (is_on_the_way(state.generation, to) for state in states)
            used = sum(1 for _ in itertools.takewhile(bool, on_the_way))
            # A patch says what it refers to.
            expected = states[used].digest if used < len(states) else known.before
            if expected == known.now:
                return Parent(State(expected), 1 + used, False)
            self._full(entry, number, chain, out)
            for patch in found[:used]:
                patches.apply(patch, out)
        except (Failed, NotDecodable, BadPatch) as error:
            raise self._naming(error, entry, part, number) from error
        if codec.digest(out) != expected:
            raise self._naming(
                Damaged("an earlier state does not match its digest"), entry, part, number
            )
        return Parent(State(expected), 1 + used, True)

    def _full(self, entry: ArrayEntry, number: int, chain: Sequence[Value], out: Array) -> Array:
        """Reads the full chunk; returns its elements in `out`, or what its codec stores."""
        store, part = chain[0].store, chain[0].part
        try:
            if entry.codec is None:
                store.read_whole(entry, part, number, out)
                return out
            data = store.stored_bytes(entry, part, number)
        except Damaged as error:
            raise Damaged(f"{error}{_of(chain[0])}") from error
        if out.dtype == np.uint8 and out.shape == data.shape:
            out[:] = data
            return out
        return data.copy()

    def _patches(
        self, entry: ArrayEntry, part: Part, number: int, chain: Sequence[Value]
    ) -> list[bytes]:
        """The patches of a chain; all are requested before the first one is awaited."""
        keys = [chunk_key(value.part, number) for value in chain]
        most = codec.nbytes_as_stored(entry, part.chunk_box(number).shape)
        requested = []
        for value, key in list(zip(chain, keys, strict=True))[1:]:
            length = value.store.values.length(key)
            if length is None:
                raise Damaged(f"no bytes stored of a patch{_of(value)}")
            if length > most:
                raise Damaged(f"a patch of {length} bytes for a chunk of {most}")
            values = value.store.values
            asked: Any = values.request(key) if self._is_slow else values.read(key, length)
            requested.append((value, length, asked))
        found = []
        for value, length, asked in requested:
            data = asked.result().value if self._is_slow else asked
            if data is None or len(data) != length:
                stored = "no" if data is None else len(data)
                raise Damaged(f"{stored} bytes stored of a patch, {length} expected{_of(value)}")
            found.append(bytes(data))
        return found

    def _naming(self, error: Exception, entry: ArrayEntry, part: Part, number: int) -> Exception:
        return self._own.naming(error, entry, part, number)


def _of(value: Value) -> str:
    """Whose a value is, and what to do without it, for messages."""
    if value.base is None:
        return ""
    return f", of a chain of patches, which {value.store.location} should have; {_WAY_OUT}"


def lost(location: object, names: Sequence[str], error: Exception) -> CheckpointCorrupt:
    """The error of a checkpoint that cannot be read without another one.

    Arguments:
        location: of the checkpoint.
        names: the arrays that need the other one.
        error: which it is, and what to do.
    """
    listed = ", ".join(repr(name) for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    of = f"array {listed}{more}: " if names else ""
    return CheckpointCorrupt(f"{location}: {of}{error}")
