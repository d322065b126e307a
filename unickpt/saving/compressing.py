"""`compression="auto"`: which arrays are stored compressed, and what is stored of their chunks.

Each process looks at a sample of the first chunk that it writes of an array. Whether the array is
compressed is decided only when all have written (`commit.chosen_codecs`), and nobody waits for it:
a chunk that is not compressed is written as a Blosc frame, too, of the bytes as they are behind 16
of a header. If no process has compressed any chunk of the array, it is stored raw, without these.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from unickpt.arrays.dtypes import Array
from unickpt.format import blosc_frames, codec
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry, Index
from unickpt.references.chunks import WriteItem
from unickpt.saving.write_plan import ChunkSource, Staged, StagedChunk

_PIECES, _PIECE_BYTES = 8, 32 << 10
"""Of a sample."""
_MOST_OF_SAMPLE = 0.95
"""An array must become smaller than that: what is compressed is decoded by each reader, and neither
mapped into memory nor read in ranges."""


class Compressing:
    """The choice of one save in one process. Several threads may `encode`.

    Arguments:
        alone: whether no other process saves with this one.
    """

    def __init__(self, *, alone: bool) -> None:
        self._pays: dict[int, bool] = {}
        self._before: Index | None = None
        self._is_known, self._alone = True, alone
        self._counting = threading.Lock()
        self.saved_bytes = 0
        """By how much what was written became smaller."""

    # --- what the base says ---------------------------------------------------------------------

    def follow(self, before: Index | None) -> None:
        """Goes on with the choices of the base, whose chunks may become chunks of this save.

        Arguments:
            before: its index; None if it cannot be read here, though perhaps by other processes.
                Then nothing is compressed, which is right whatever they take of it.
        """
        self._before, self._is_known = before, self._alone or before is not None

    def follows(self, entries: Sequence[ArrayEntry]) -> dict[int, bool]:
        """For those arrays that the base has, by their numbers, whether they are compressed there.

        Arguments:
            entries: the arrays that may be compressed, and all others.
        """
        found = ((number, self._followed(entry)) for number, entry in enumerate(entries))
        return {
            number: is_compressed for number, is_compressed in found if is_compressed is not None
        }

    @property
    def is_known(self) -> bool:
        """Whether this process knew what the base says."""
        return self._is_known

    def _followed(self, entry: ArrayEntry) -> bool | None:
        theirs = None if self._before is None else self._before.arrays.get(entry.name)
        if theirs is None or not codec.is_chosen(entry):
            return None
        if (theirs.shape, theirs.dtype) != (entry.shape, entry.dtype):
            return None
        return bool(theirs.encoding) if theirs.encoding in ((), entry.encoding) else None

    # --- this save ------------------------------------------------------------------------------

    def looking(self, source: ChunkSource) -> ChunkSource:
        """A source that looks at the first chunk of each array that is fetched."""
        return _LookingSource(source, self)

    def look(self, item: WriteItem, chunk: Array) -> None:
        """Decides whether this process compresses an array, if this is its first chunk."""
        if item.array in self._pays or not codec.is_chosen(item.entry):
            return
        is_raw = self._followed(item.entry) is False
        self._pays[item.array] = self._is_known and not is_raw and pays(item.entry, chunk)

    def encode(self, item: WriteItem, chunk: Array) -> codec.Encoded:
        """A chunk as it is stored."""
        entry, part = item.entry, item.part
        value = codec.raw(part, chunk)
        nbytes = sum(map(len, value))
        digest = codec.digest(chunk)
        if self._pays.get(item.array):
            short = shorter(entry, part, chunk, value)
            if short is not None:
                with self._counting:
                    self.saved_bytes += max(0, chunk.nbytes - len(short))
                return codec.Encoded((short,), digest)
        header = blosc_frames.stored_header(nbytes, entry.itemsize)
        return codec.Encoded((header, *value), digest)


class _LookingSource:
    """See `Compressing.looking`. Chunks are fetched in their order, on one thread."""

    def __init__(self, source: ChunkSource, compressing: Compressing) -> None:
        self._source, self._compressing = source, compressing
        self.background = source.background

    @property
    def staged(self) -> Staged:
        return self._source.staged

    def ready(self, items: Sequence[WriteItem]) -> bool:
        return self._source.ready(items)

    def fetch(self, item: WriteItem) -> StagedChunk:
        found = self._source.fetch(item)
        self._compressing.look(item, found.data)
        return found

    def digest(self, item: WriteItem) -> int:
        return self._source.digest(item)


def pays(entry: ArrayEntry, chunk: Array) -> bool:
    """Whether compression makes a chunk smaller, by a sample of several places.

    Arguments:
        entry: the array.
        chunk: its elements.
    """
    data = codec.bytes_of(chunk)
    sample = data
    if len(data) > _PIECES * _PIECE_BYTES:
        whole = len(data) // entry.itemsize
        own = _PIECE_BYTES // entry.itemsize
        starts = np.linspace(0, whole - own, _PIECES).astype(np.int64) * entry.itemsize
        sample = np.concatenate([data[at : at + _PIECE_BYTES] for at in starts.tolist()])
    elements = sample.view(chunk.dtype)
    part = Part.whole(entry.name, elements.shape, elements.shape)
    short = shorter(entry, part, elements, (sample.data,))
    return short is not None and len(short) < _MOST_OF_SAMPLE * len(sample)


def shorter(
    entry: ArrayEntry, part: Part, chunk: Array, value: Sequence[memoryview]
) -> memoryview | None:
    """A chunk, compressed; None if that does not make it smaller.

    Arguments:
        entry, part: the array and its part.
        chunk: the elements.
        value: what is stored of it without compression.
    """
    nbytes = sum(map(len, value))
    zstd: Any = None if entry.dtype == "bool" else blosc_frames.compressor()
    if zstd is not None:
        data = np.frombuffer(value[0] if len(value) == 1 else b"".join(value), np.uint8)
        return blosc_frames.compressed(data, entry.itemsize, zstd)
    found = codec.compressed(entry, part, chunk)
    return found if blosc_frames.is_shorter(len(found), nbytes) else None
