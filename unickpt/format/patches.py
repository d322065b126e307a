"""Patches: a chunk as a few elements that differ from another one, the *full chunk*.

Where elements change scattered over an array, every chunk of it changes, but little of each. Then a
checkpoint stores an earlier checkpoint's chunk as the full chunk, by reference, and the elements
that differ from it. Never against another patch: to read a chunk takes at most these two. Both have
keys of their own, so that no reader takes the full chunk, which is old, for the chunk. Nothing here
does I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from unickpt.arrays.dtypes import Array
from unickpt.format.chunk_grid import Part

FULL, PATCH = "full", "patch"
"""Below a part's key: where full chunks are, and the patches."""
_HEADER = np.dtype([("full", "<u8"), ("spent", "<u8"), ("count", "<u8"), ("width", "<u8")])
_WIDTHS = (1, 2, 4)
# Compared, and put in place, while they are in the processor's cache.
_AT_ONCE = 1 << 18


class BadPatch(ValueError):
    """A patch that contradicts the format; says how."""


@dataclass(frozen=True)
class FullChunk:
    """The chunk that a patch refers to, or will.

    Arguments:
        digest: of its elements.
        spent: the bytes of all patches that were written since it was; see `encode`.
    """

    digest: int
    spent: int = 0


def full_of(part: Part) -> Part:
    """Where the full chunks of a part are."""
    return replace(part, key=f"{part.key}/{FULL}" if part.key else FULL)


def patch_of(part: Part) -> Part:
    """Where the patches of a part are."""
    return replace(part, key=f"{part.key}/{PATCH}" if part.key else PATCH)


def encode(full: Array, chunk: Array, of: FullChunk, most: int) -> bytes | None:
    """What of a chunk differs from the full chunk, bit by bit.

    Arguments:
        full: the elements of the full chunk.
        chunk: those of the chunk, of the same shape and dtype.
        of: of the full chunk.
        most: how many bytes the patch may have.

    Returns:
        The patch; None if it would be longer.
    """
    old, new = _words(full), _words(chunk)
    at_least = min(_WIDTHS) + new.itemsize
    found, count = [np.empty(0, np.int64)], 0
    for first in range(0, len(new), _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        differ = np.flatnonzero(old[some] != new[some])
        count += len(differ)
        if _HEADER.itemsize + count * at_least > most:
            return None
        found.append(differ + first)
    positions = np.concatenate(found)
    gaps = np.diff(positions, prepend=-1) - 1
    width = _cheapest_width(gaps, new.itemsize)
    narrow = _narrow(gaps, width)
    length = _HEADER.itemsize + len(narrow) * (width + new.itemsize)
    if length > most:
        return None
    at = positions if narrow is gaps else np.cumsum(narrow + 1) - 1
    header = np.array([(of.digest, of.spent + length, len(narrow), width)], _HEADER)
    return b"".join([header.tobytes(), narrow.astype(f"<u{width}").tobytes(), new[at].tobytes()])


def _cheapest_width(gaps: Array, itemsize: int) -> int:
    """With how many bytes for each gap a patch is the shortest."""
    if not len(gaps) or not _fillers(gaps.max(), min(_WIDTHS)):
        return min(_WIDTHS)
    return min(_WIDTHS, key=lambda w: (len(gaps) + _fillers(gaps, w).sum()) * (w + itemsize))


def _fillers(gaps: Array, width: int) -> Array:
    """How many positions must be named within each gap, so that none is wider than its type."""
    return gaps >> (8 * width)


def _narrow(gaps: Array, width: int) -> Array:
    """The gaps with some elements named though they do not differ, so that each fits its type."""
    fillers = _fillers(gaps, width)
    if not fillers.any():
        return gaps
    widest = (1 << 8 * width) - 1
    narrow = np.full(len(gaps) + int(fillers.sum()), widest)
    narrow[np.cumsum(fillers + 1) - 1] = gaps & widest
    return narrow


def of_patch(data: bytes) -> FullChunk:
    """What a patch says of its full chunk.

    Arguments:
        data: the patch; untrusted.

    Raises:
        BadPatch: it is too short.
    """
    full, spent, _, _ = _header(data)
    return FullChunk(full, spent)


def apply(data: bytes, out: Array) -> None:
    """Makes a full chunk the chunk that a patch describes.

    Arguments:
        data: the patch; untrusted.
        out: the elements of the full chunk, contiguous; changed in place.

    Raises:
        BadPatch: its numbers contradict each other, or a position is outside the chunk.
    """
    words = _words(out)
    _, _, count, width = _header(data)
    if width not in _WIDTHS or count > len(words):
        raise BadPatch(f"a patch of {count} elements in {width} bytes each")
    expected = _HEADER.itemsize + count * (width + words.itemsize)
    if len(data) != expected:
        raise BadPatch(f"a patch of {len(data)} bytes, {expected} expected")
    gaps = np.frombuffer(data, f"<u{width}", count, _HEADER.itemsize)
    values = np.frombuffer(data, words.dtype, count, _HEADER.itemsize + gaps.nbytes)
    for some, positions in _positions(gaps):
        if positions[-1] >= len(words):
            raise BadPatch(f"a patch of element {positions[-1]} of {len(words)}")
        words[positions] = values[some]


def _positions(gaps: Array) -> Iterator[tuple[slice, Array]]:
    """The positions that gaps say, some at a time; they ascend whatever the gaps are."""
    before = -1
    for first in range(0, len(gaps), _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        steps = gaps[some].astype(np.int64) + 1
        positions = np.cumsum(steps) + before
        before = int(positions[-1])
        yield some, positions


def _header(data: bytes) -> tuple[int, int, int, int]:
    if len(data) < _HEADER.itemsize:
        raise BadPatch(f"a patch of {len(data)} bytes, at least {_HEADER.itemsize} expected")
    full, spent, count, width = np.frombuffer(data, _HEADER, 1)[0].tolist()
    return full, spent, count, width


def _words(array: Array) -> Array:
    """The elements as integers: -0.0 differs from 0.0, and a NaN from others. Of 16 bytes, two."""
    size = min(array.itemsize, 8)
    return np.ascontiguousarray(array).reshape(-1).view(f"<u{size}")
