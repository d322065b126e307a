"""Patches as format 2 had them: these are read, and no longer written.

Such a patch refers to a whole chunk, the *full chunk*, never to another patch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from unickpt.arrays.dtypes import Array
from unickpt.format.patches import BadPatch, words_of

_HEADER = np.dtype([("full", "<u8"), ("spent", "<u8"), ("count", "<u8"), ("width", "<u8")])
_WIDTHS = (1, 2, 4)
# Put in place while they are in the processor's cache.
_AT_ONCE = 1 << 18


def apply(data: bytes, out: Array) -> None:
    """Makes a full chunk the chunk that a patch describes.

    Arguments:
        data: the patch; untrusted.
        out: the elements of the full chunk, contiguous; changed in place.

    Raises:
        BadPatch: its numbers contradict each other, or a position is outside the chunk.
    """
    words = words_of(out)
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
