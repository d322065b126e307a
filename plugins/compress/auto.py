"""`compression="auto"`: which arrays are stored compressed, and in which form their chunks are
stored.

Each process compresses a sample of the first chunk that it writes of an array. Whether the array is
compressed is decided only when all have written (`Auto.settle`), without any waiting. An
uncompressed chunk is a Blosc frame too: a header of 16 bytes, then the raw bytes. If no process
compressed any chunk of the array, it is stored raw, without these headers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from unickpt.errors import CoverageError
from unickpt.extend import (
    MOST_COMPRESSED_BYTES,
    Array,
    ArrayEntry,
    Column,
    EncodedChunk,
    Encoding,
    EncodingPolicy,
    Index,
    Part,
    SaveEncoder,
    Settled,
    bytes_of_chunk,
    chunk_digest,
    compressed_chunk,
    dtype_from_name,
    encoding_of,
    parts_of_array,
    raw_chunk,
)
from unickpt.plugins.compress import blosc_frames
from unickpt.plugins.compress.blosc_frames import HEADER_BYTES

_LEAST_BYTES = 64 << 10
"""Of an array that is compressed."""
_PIECES, _PIECE_BYTES = 8, 32 << 10
"""Of a sample."""
_MOST_OF_SAMPLE = 0.95
"""An array must become smaller than that: each reader decodes compressed chunks, and can neither
map them into memory nor read them in ranges."""


@cache
def chosen_encoding(dtype: str) -> Encoding:
    """The codec that arrays of a dtype may have."""
    itemsize = dtype_from_name(dtype).itemsize
    # Measured: of bools, planes of bits take half as much, in half the time; of others more.
    settings = blosc_frames.configuration(itemsize, bits=dtype == "bool")
    return encoding_of({"name": "blosc", "configuration": settings})


def is_undecided(entry: ArrayEntry) -> bool:
    """Whether chunks of an array may be frames that are stored as they are."""
    return bool(entry.encoding) and entry.encoding == chosen_encoding(entry.dtype)


class Auto(EncodingPolicy):
    """Compresses arrays if that pays."""

    name = "compress"

    def encoding(self, dtype: str, nbytes: int, chunk_bytes: int) -> Encoding | None:
        """The codec of an array that is not too small, nor has chunks that are too large."""
        is_possible = nbytes >= _LEAST_BYTES and chunk_bytes <= MOST_COMPRESSED_BYTES
        return chosen_encoding(dtype) if is_possible else None

    def begin(self, *, alone: bool) -> Compressing:
        """The choice of this process."""
        return Compressing(alone=alone)

    def settle(
        self,
        arrays: Mapping[str, ArrayEntry],
        stored: Callable[[str], tuple[Column, Column]],
        notes: Sequence[tuple[Sequence[str], Any]],
    ) -> Mapping[str, Settled]:
        """The arrays that turn out to be stored raw; see `EncodingPolicy`."""
        followed: dict[str, set[bool]] = {}
        for names, note in notes:
            for number, is_compressed in note["follows"].items():
                followed.setdefault(names[int(number)], set()).add(is_compressed)
        is_known = all(note["knows_base"] for _, note in notes)
        settled_arrays = dict[str, Settled]()
        for name, entry in arrays.items():
            if not is_undecided(entry):
                continue
            lengths, is_elsewhere = stored(name)
            raw, said = _raw_lengths(entry), followed.get(name, set())
            is_framed = lengths == raw + HEADER_BYTES
            if True in said or not (said or is_framed.all()):
                if False in said:
                    raise _contradiction(name, said)
                continue
            is_raw = (lengths == raw) & bool(said) | is_elsewhere
            if not (is_framed | is_raw).all():
                raise _contradiction(name, said)
            # A process that did not know the base's choice has not tried: the next save does.
            encoding = () if is_known or said else None
            settled_arrays[name] = encoding, HEADER_BYTES * (is_framed & ~is_raw)
        return settled_arrays


def _raw_lengths(entry: ArrayEntry) -> Column:
    """The bytes that are stored of each chunk without compression."""
    parts = parts_of_array(entry)
    lengths = [math.prod(part.chunk) * entry.itemsize for part in parts]
    chunk_lengths: Column = np.repeat(np.array(lengths, np.int64), [part.count for part in parts])
    return chunk_lengths


def _contradiction(name: str, said: Sequence[bool] | set[bool]) -> CoverageError:
    return CoverageError(
        f"array {name!r}: some processes compressed it, and others took chunks that are not "
        f"compressed from the base (which says {sorted(said)}). All must save with the same "
        "SaveOptions.compression and base; save again"
    )


class Compressing(SaveEncoder):
    """The choice of one save in one process.

    Arguments:
        alone: whether no other process saves with this one.
    """

    def __init__(self, *, alone: bool) -> None:
        self._pays: dict[int, bool] = {}
        self._before: Index | None = None
        self._is_known, self._alone = True, alone
        self._counting = threading.Lock()
        self.saved_bytes = 0
        """How many bytes compression saved."""

    def is_undecided(self, entry: ArrayEntry) -> bool:
        """Whether chunks of an array may be frames that are stored as they are."""
        return is_undecided(entry)

    # --- choices of the base --------------------------------------------------------------------

    def follow(self, before: Index | None) -> None:
        """Continues with the choices of the base, whose chunks may become chunks of this save.

        Arguments:
            before: its index; None if it cannot be read here, though perhaps by other processes.
                Then nothing is compressed, which is right whatever they take of it.
        """
        self._before, self._is_known = before, self._alone or before is not None

    def note(self, entries: Sequence[ArrayEntry]) -> dict[str, Any]:
        """Of those arrays that the base has, by their numbers, whether they are compressed there;
        and whether this process knew that."""
        choices = {number: self._followed(entry) for number, entry in enumerate(entries)}
        follows = {number: choice for number, choice in choices.items() if choice is not None}
        return {"follows": follows, "knows_base": self._is_known}

    def _followed(self, entry: ArrayEntry) -> bool | None:
        theirs = None if self._before is None else self._before.arrays.get(entry.name)
        if theirs is None or not is_undecided(entry):
            return None
        if (theirs.shape, theirs.dtype) != (entry.shape, entry.dtype):
            return None
        return bool(theirs.encoding) if theirs.encoding in ((), entry.encoding) else None

    # --- this save ------------------------------------------------------------------------------

    def look(self, number: int, entry: ArrayEntry, chunk: Array) -> None:
        """Decides whether this process compresses an array, if this is its first chunk."""
        if number not in self._pays:
            is_raw = self._followed(entry) is False
            self._pays[number] = self._is_known and not is_raw and pays(entry, chunk)

    def encode(self, number: int, entry: ArrayEntry, part: Part, chunk: Array) -> EncodedChunk:
        """A chunk as it is stored."""
        value = raw_chunk(part, chunk)
        nbytes = sum(map(len, value))
        digest = chunk_digest(chunk)
        if self._pays.get(number):
            short = shorter(entry, part, chunk, value)
            if short is not None:
                with self._counting:
                    self.saved_bytes += max(0, chunk.nbytes - len(short))
                return EncodedChunk((short,), digest)
        header = blosc_frames.stored_header(nbytes, entry.itemsize)
        return EncodedChunk((header, *value), digest)


def pays(entry: ArrayEntry, chunk: Array) -> bool:
    """Whether compression makes a chunk smaller, by a sample of several places.

    Arguments:
        entry: the array.
        chunk: its elements.
    """
    data = bytes_of_chunk(chunk)
    sample = data
    if len(data) > _PIECES * _PIECE_BYTES:
        whole = len(data) // entry.itemsize
        piece_elements = _PIECE_BYTES // entry.itemsize
        starts = np.linspace(0, whole - piece_elements, _PIECES).astype(np.int64) * entry.itemsize
        sample = np.concatenate([data[start : start + _PIECE_BYTES] for start in starts.tolist()])
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
        value: its stored form without compression.
    """
    nbytes = sum(map(len, value))
    zstd: Any = None if entry.dtype == "bool" else blosc_frames.compressor()
    if zstd is not None:
        data = np.frombuffer(value[0] if len(value) == 1 else b"".join(value), np.uint8)
        return blosc_frames.compressed(data, entry.itemsize, zstd)
    frame = compressed_chunk(entry, part, chunk)
    return frame if blosc_frames.is_shorter(len(frame), nbytes) else None
