"""Stored chunks as an update needs them: from the state that is live and patches, else read whole;
each is compared with its digest."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import numpy as np

from unickpt.extend import (
    Array,
    ArrayEntry,
    ChunkValue,
    Failed,
    NotDecodable,
    OcdbtReader,
    Part,
    Request,
    chunk_digest,
    read_full_chunk,
)
from unickpt.plugins.incremental import patches


class Undo(NamedTuple):
    """An earlier state of a chunk.

    Arguments:
        digest: of it.
        patch: leads to it from the next state.
    """

    digest: int
    patch: bytes


@dataclass(frozen=True)
class ChunkState:
    """A state of a chunk, without its elements.

    Arguments:
        digest: of the elements, or of the stored bytes.
        patches: how many its chain has; 0 if that is unknown.
        undo: the earlier states that the next patches may refer to, the oldest first.
    """

    digest: int
    patches: int = 0
    undo: tuple[Undo, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that the earlier states take."""
        return sum(len(undo.patch) for undo in self.undo)


@dataclass(frozen=True)
class VersionChunk:
    """A chunk of a version.

    Arguments:
        entry, part, number: which chunk.
        digest: from the version's table.
    """

    entry: ArrayEntry
    part: Part
    number: int
    digest: int

    @property
    def key(self) -> tuple[str, int]:
        return self.part.key, self.number


class VersionReader:
    """Reads the chunks of a version.

    Arguments:
        reader: of the version.
    """

    def __init__(self, reader: OcdbtReader) -> None:
        self.reader = reader
        self._lock = Lock()
        self.seconds = 0.0
        """For which threads waited for the storage, together."""

    def advance(self, chunk: VersionChunk, live: ChunkState, out: Array) -> tuple[ChunkState, int]:
        """Turns the live state of a chunk into that of the version, by patches.

        Arguments:
            chunk: which chunk.
            live: its live state.
            out: the elements of that; undefined if the result is not the version's.

        Returns:
            The state, whose digest differs from the chunk's if this is not possible; and the bytes
            that were read.
        """
        depths = {undo.digest: depth for depth, undo in enumerate(live.undo)}
        depths[live.digest] = len(live.undo)
        additions, nbytes = list[bytes](), 0
        depth, chain = depths.get(chunk.digest), self._chain(chunk)
        for value in chain[:0:-1] if depth is None else ():
            with self._timed():
                patch = self.reader.chunk_values.read_value(chunk.entry, value, chunk.number)
            additions.insert(0, patch)
            nbytes += len(patch)
            depth = depths.get(patches.state_of(patch).digest)
            if depth is not None:
                break
        if depth is None:
            return ChunkState(0), nbytes
        try:
            for undo in live.undo[depth:][::-1]:
                patches.apply(undo.patch, out)
            count = live.patches - len(live.undo) + depth
            start, undos = len(chain) - 1 - len(additions), live.undo[:depth]
            if additions and start < count:  # patches were merged: their states are in no chain
                undos = _without_last(undos, out, count - start)
            count = start if additions else count
            undos = _add(out, additions, undos)
        except NotDecodable:
            return ChunkState(0), nbytes
        return ChunkState(chunk_digest(out), count + len(additions), undos), nbytes

    def read(self, chunk: VersionChunk, out: Array) -> tuple[ChunkState, int]:
        """Reads a chunk whole.

        Arguments:
            chunk: which chunk.
            out: memory for its elements.

        Returns:
            Its state, and the bytes that were read.

        Raises:
            CheckpointCorrupt: it does not match its digest, or is missing.
            StorageError: the storage failed.
        """
        entry, part, number = chunk.entry, chunk.part, chunk.number
        chain = self._chain(chunk)
        if len(chain) < 2:
            with self._timed():
                damaged = self.reader.read([Request(entry, part, number, out, chunk.digest)])
            if damaged:
                raise self._damaged(chunk)
            return ChunkState(chunk.digest), out.nbytes
        with self._timed():
            additions = [self.reader.chunk_values.read_value(entry, v, number) for v in chain[1:]]
        try:
            with self._timed():
                read_full_chunk(entry, number, chain, out)
            undos = _add(out, additions, ())
        except (Failed, NotDecodable) as error:
            raise self.reader.chunks.naming(error, entry, part, number) from error
        if chunk_digest(out) != chunk.digest:
            raise self._damaged(chunk)
        nbytes = out.nbytes + sum(map(len, additions))
        return ChunkState(chunk.digest, len(additions), undos), nbytes

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        with self._lock:
            self.seconds += time.perf_counter() - began

    def _chain(self, chunk: VersionChunk) -> Sequence[ChunkValue]:
        if chunk.entry.codec is not None:  # patches are of the stored bytes
            return ()
        values = self.reader.chunk_values
        return values.values(chunk.entry, chunk.part, chunk.number)

    def _damaged(self, chunk: VersionChunk) -> Exception:
        where = chunk.part.chunk_box(chunk.number)
        return self.reader.damaged(
            f"array {chunk.entry.name!r} {where}: the stored bytes do not match their digest"
        )


def _add(out: Array, additions: Sequence[bytes], undos: tuple[Undo, ...]) -> tuple[Undo, ...]:
    """Applies patches; the earlier states after that."""
    for patch in additions:
        before = out.copy()
        patches.apply(patch, out)
        undo = _undo(out, before)
        # The states before this one cannot be reached without it.
        undos = () if undo is None else (*undos, Undo(patches.state_of(patch).digest, undo))
    return undos


def _without_last(undos: tuple[Undo, ...], elements: Array, count: int) -> tuple[Undo, ...]:
    """Earlier states without the last ones.

    Arguments:
        undos: the earlier states.
        elements: of the state that the last of them is undone from.
        count: how many to leave out.
    """
    if count >= len(undos):
        return ()
    before = elements.copy()
    for undo in reversed(undos[-1 - count :]):
        patches.apply(undo.patch, before)
    patch = _undo(elements, before)
    return () if patch is None else (*undos[: -1 - count], undos[-1 - count]._replace(patch=patch))


def _undo(after: Array, before: Array) -> bytes | None:
    """The patch from a state to the one before; None if it would be large."""
    return patches.encode(after, before, patches.PatchedState(0), 0, after.nbytes // 2)


def digest_in_memory(chunk: VersionChunk, elements: Array) -> int:
    """The digest that a chunk with these elements has; 0 if that depends on its codec."""
    return 0 if chunk.entry.codec is not None else chunk_digest(np.ascontiguousarray(elements))
