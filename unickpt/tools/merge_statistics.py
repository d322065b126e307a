"""What a merge has to know about whole arrays before it merges their elements.

The results do not depend on how an array is cut into pieces: elements come in row-major order, in
pieces of whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from unickpt.arrays.dtypes import Array
from unickpt.tools.merge_arithmetic import BLOCK, is_finite, magnitudes, wide_dtype
from unickpt.tools.merge_methods import Slerp, Ties, slerp_weights

ElementPieces = Callable[[], Iterator[Sequence[Array]]]
"""Goes through an array once: its elements in all inputs, one-dimensional, in row-major order, in
pieces of whole blocks (the last one may be shorter)."""
_BITS = 16  # of a key that are counted in one pass


class NotFinite(Exception):
    """An input has NaN or infinite elements; its argument is the number of the input."""


def blocks_of(pieces: ElementPieces) -> Iterator[list[Array]]:
    """The elements of an array in all inputs, in the dtype of the arithmetic, block by block.

    Raises:
        NotFinite: an element is NaN or infinite.
    """
    for piece in pieces():
        for first in range(0, len(piece[0]), BLOCK):
            blocks = [one[first : first + BLOCK] for one in piece]
            with np.errstate(all="ignore"):
                wide = [block.astype(wide_dtype(block.dtype)) for block in blocks]
                for number, block in enumerate(wide):
                    if not is_finite(block):
                        raise NotFinite(number)
            yield wide


def slerp_statistics(method: Slerp, pieces: ElementPieces) -> list[float]:
    """The weights of two arrays in their spherical interpolation; see `Slerp`. NaN if the squares
    of their elements are too large for float64.

    Raises:
        NotFinite: an element is NaN or infinite.
    """
    sums: tuple[list[float], ...] = ([], [], [])
    for a, b in blocks_of(pieces):
        x, y = a.view(np.float64), b.view(np.float64)  # complex numbers as pairs
        with np.errstate(over="ignore"):
            for total, product in zip(sums, (x * x, y * y, x * y), strict=True):
                total.append(float(product.sum()))
    try:
        weights, _ = slerp_weights(method.t, *map(math.fsum, sums))
    except (OverflowError, ValueError):  # of squares above the largest float64
        return [math.nan, math.nan]
    return list(weights)


def ties_statistics(method: Ties, pieces: ElementPieces, size: int, wide: bool) -> list[float]:
    """For each source, the smallest magnitude of its differences from the base that is kept.

    Arguments:
        method: how many are kept.
        pieces: of the sources and the base; passed through once for each 16 bits of a magnitude.
        size: elements of the array.
        wide: see `magnitudes`.

    Raises:
        NotFinite: an element is NaN or infinite.
    """
    kept = max(1, math.floor(method.density * size))
    bits = 64 if wide else 32
    selections: list[KthLargest] = []
    for _ in range(bits // _BITS):
        for *sources, base in blocks_of(pieces):
            selections = selections or [KthLargest(kept, bits) for _ in sources]
            for selection, source in zip(selections, sources, strict=True):
                found = magnitudes(source - base, wide)
                selection.add(found.view(np.uint64 if wide else np.uint32))
        for selection in selections:
            selection.end_pass()
    floats = np.float64 if wide else np.float32
    keys = np.array([one.prefix for one in selections], np.uint64 if wide else np.uint32)
    return [float(value) for value in keys.view(floats)]


class KthLargest:
    """The k-th largest of many unsigned integers, in several passes over them.

    Each pass counts 16 bits, from the highest to the lowest, of the integers whose higher bits are
    those of the result.

    Arguments:
        k: 1 for the largest.
        bits: of an integer, a multiple of 16.
    """

    def __init__(self, k: int, bits: int) -> None:
        self._k, self._shift, self._first = k, bits - _BITS, True
        self.prefix = 0
        """The bits of the result that are known."""
        self._counts = np.zeros(1 << _BITS, np.int64)

    def add(self, keys: Array) -> None:
        kind = keys.dtype.type
        if not self._first:
            keys = keys[keys >> kind(self._shift + _BITS) == kind(self.prefix)]
        digits = (keys >> kind(self._shift)) & kind((1 << _BITS) - 1)
        self._counts += np.bincount(digits.astype(np.int64), minlength=1 << _BITS)

    def end_pass(self) -> None:
        """Ends a pass over all integers."""
        above = np.cumsum(self._counts[::-1])
        at = int(np.searchsorted(above, self._k))
        self._k -= int(above[at - 1]) if at else 0
        self.prefix = self.prefix << _BITS | (1 << _BITS) - 1 - at
        self._first, self._shift = False, self._shift - _BITS
        self._counts[:] = 0
