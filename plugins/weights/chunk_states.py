"""Stored chunks as an update needs them: from the state that is live and patches, else read whole;
each is compared with its digest."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

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

Undo = tuple[int, bytes]
"""An earlier state of a chunk: its digest, and the patch that leads to it from the next one."""


@dataclass(frozen=True)
class ChunkState:
    """A state of a chunk, without its elements.

    Arguments:
        digest: of the elements, or of the stored bytes.
        undo: the earlier states that the next patches may refer to, the oldest first.
    """

    digest: int
    undo: tuple[Undo, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that the earlier states take."""
        return sum(len(patch) for _, patch in self.undo)


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
        depths = {digest: depth for depth, (digest, _) in enumerate(live.undo)}
        depths[live.digest] = len(live.undo)
        additions, nbytes = list[bytes](), 0
        depth = None
        for value in self._chain(chunk)[:0:-1]:
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
            for _, undo in live.undo[depth:][::-1]:
                patches.apply(undo, out)
            undos = self._add(out, additions, live.undo[:depth])
        except NotDecodable:
            return ChunkState(0), nbytes
        return ChunkState(chunk_digest(out), undos), nbytes

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
            undos = self._add(out, additions, ())
        except (Failed, NotDecodable) as error:
            raise self.reader.chunks.naming(error, entry, part, number) from error
        if chunk_digest(out) != chunk.digest:
            raise self._damaged(chunk)
        return ChunkState(chunk.digest, undos), out.nbytes + sum(map(len, additions))

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

    def _add(
        self, out: Array, additions: Sequence[bytes], undos: tuple[Undo, ...]
    ) -> tuple[Undo, ...]:
        """Applies patches; the earlier states after that."""
        for patch in additions:
            before = out.copy()
            patches.apply(patch, out)
            nothing = patches.PatchedState(0)
            undo = patches.encode(out, before, nothing, 0, out.nbytes // 2)
            # The states before this one cannot be reached without it.
            digest = patches.state_of(patch).digest
            undos = () if undo is None else (*undos, (digest, undo))
        return undos

    def _damaged(self, chunk: VersionChunk) -> Exception:
        where = chunk.part.chunk_box(chunk.number)
        return self.reader.damaged(
            f"array {chunk.entry.name!r} {where}: the stored bytes do not match their digest"
        )


def digest_in_memory(chunk: VersionChunk, elements: Array) -> int:
    """The digest that a chunk with these elements has; 0 if that depends on its codec."""
    return 0 if chunk.entry.codec is not None else chunk_digest(np.ascontiguousarray(elements))
