"""The arithmetic of a merge, on blocks of elements, and the facts it needs about whole arrays.

Pure functions of NumPy arrays. All is done in float64 (complex128 for complex numbers).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash

from unickpt.extend import Array, DType, dtype_name
from unickpt.plugins.merge.method_parameters import Dare, Slerp, Ties, slerp_weights
from unickpt.types import Box

BLOCK = 1 << 15
"""Elements that are computed at once; their float64 copies stay in the cache."""


@dataclass(frozen=True)
class ElementSpan:
    """Consecutive elements of a box of an array, in row-major order.

    Arguments:
        shape: of the array.
        box: of the array.
        first, stop: numbers of elements of the box.
    """

    shape: tuple[int, ...]
    box: Box
    first: int
    stop: int

    @cached_property
    def positions(self) -> Array:
        """The row-major numbers of the elements in the whole array."""
        within = np.arange(self.first, self.stop, dtype=np.uint64)
        positions, stride = np.zeros_like(within), 1
        for n, extent, start in zip(
            reversed(self.box.shape), reversed(self.shape), reversed(self.box.start), strict=True
        ):
            within, index = np.divmod(within, np.uint64(n))
            positions += (index + np.uint64(start)) * np.uint64(stride)
            stride *= extent
        return positions


Formula = Callable[[Sequence[Array], ElementSpan], Array]
"""The arithmetic of one array: from elements of all inputs, the sources and then the base, in
float64 or complex128, makes those of the result."""


def weighted_sum(weights: Sequence[float], inputs: Sequence[Array], span: ElementSpan) -> Array:
    """A weighted sum."""
    total: Array = inputs[0] * weights[0]
    for weight, block in zip(weights[1:], inputs[1:], strict=True):
        total += block * weight
    return total


def average(inputs: Sequence[Array], span: ElementSpan) -> Array:
    """The sum, divided by the number of inputs: `weighted_sum` would round 1/3 before its use."""
    total: Array = inputs[0].copy()
    for block in inputs[1:]:
        total += block
    return total / len(inputs)


def add_differences(weights: Sequence[float], inputs: Sequence[Array], span: ElementSpan) -> Array:
    """The base, plus a weighted sum of the sources' differences from it."""
    *sources, base = inputs
    total: Array = base.copy()
    for weight, block in zip(weights, sources, strict=True):
        total += (block - base) * weight
    return total


def add_random_differences(
    weights: Sequence[float], method: Dare, name: str, inputs: Sequence[Array], span: ElementSpan
) -> Array:
    """The same, of differences with most elements dropped.

    Arguments:
        weights: of the sources.
        method: how many to drop, and the seed.
        name: of the array.
        inputs, span: see `Formula`.
    """
    *sources, base = inputs
    total: Array = base.copy()
    for number, (weight, block) in enumerate(zip(weights, sources, strict=True)):
        mask = is_kept(method, name, number, span.positions)
        total += np.where(mask, (block - base) * (weight / (1 - method.drop)), 0)
    return total


def add_elected(
    thresholds: Sequence[float],
    scale: float,
    wide: bool,
    inputs: Sequence[Array],
    span: ElementSpan,
) -> Array:
    """The base, plus the mean of the large differences whose sign prevails.

    Arguments:
        thresholds: for each source, the smallest magnitude that is kept.
        scale: of the merged difference.
        wide: whether magnitudes are compared as float64.
        inputs, span: see `Formula`.
    """
    *sources, base = inputs
    trimmed = []
    for threshold, block in zip(thresholds, sources, strict=True):
        difference = block - base
        trimmed.append(np.where(magnitudes(difference, wide) >= threshold, difference, 0))
    sign = np.sign(sum(trimmed))
    agreeing = [np.where(np.sign(part) == sign, part, 0) for part in trimmed]
    count = sum((part != 0).astype(np.float64) for part in agreeing)
    merged: Array = base + scale * (sum(agreeing) / np.maximum(count, 1))
    return merged


def magnitudes(difference: Array, wide: bool) -> Array:
    """The magnitudes by which TIES compares differences.

    Arguments:
        difference: in float64.
        wide: whether a source or the base is of float64; otherwise float32 is enough.
    """
    return np.abs(difference) if wide else np.abs(difference).astype(np.float32)


_GAMMA, _MIX = np.uint64(0x9E3779B97F4A7C15), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def is_kept(method: Dare, name: str, source: int, positions: Array) -> Array:
    """Which elements DARE keeps; the same for any split of the array.

    The random number of an element is that of the generator SplitMix64 at the element's position,
    seeded with the xxh3-64 of `<seed>/<source>/<name>`.

    Arguments:
        method: how many to drop, and the seed.
        name: of the array.
        source: its number.
        positions: row-major numbers of elements in the array, as uint64.
    """
    start = np.uint64(xxhash.xxh3_64_intdigest(f"{method.seed}/{source}/{name}".encode()))
    with np.errstate(over="ignore"):
        z = start + (positions + np.uint64(1)) * _GAMMA
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX[0])
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX[1])
    z ^= z >> np.uint64(31)
    mask: Array = (z >> np.uint64(11)) >= np.uint64(math.ceil(method.drop * 2**53))
    return mask


def wide_dtype(dtype: DType) -> DType:
    """The dtype in which elements are computed."""
    return np.dtype(np.complex128 if dtype.kind == "c" else np.float64)


def is_finite(block: Array) -> bool:
    # A sum is cheaper than a mask, and is not finite if an element is not; it may also overflow.
    return bool(np.isfinite(block.sum()) or np.isfinite(block).all())


@dataclass
class Outcome:
    """The findings of merging a box.

    Arguments:
        nonfinite: the numbers of the inputs with NaN or infinite elements.
        overflows: whether the result's dtype cannot hold the merge of finite elements.
    """

    nonfinite: set[int]
    overflows: bool = False


def merge_box(
    formula: Formula, inputs: Sequence[Array], shape: tuple[int, ...], box: Box, out: Array
) -> Outcome:
    """Merges a box of an array.

    Arguments:
        formula: the arithmetic.
        inputs: the box in all inputs, contiguous.
        shape: of the array.
        box: of the array.
        out: contiguous; receives the result, cast once to its dtype.
    """
    flat, target = [array.reshape(-1) for array in inputs], out.reshape(-1)
    outcome = Outcome(set())
    limit = _saturates_above(out.dtype)
    with np.errstate(all="ignore"):
        for first in range(0, len(target), BLOCK):
            stop = min(first + BLOCK, len(target))
            blocks = [array[first:stop].astype(wide_dtype(array.dtype)) for array in flat]
            bad = {number for number, block in enumerate(blocks) if not is_finite(block)}
            outcome.nonfinite |= bad
            made = formula(blocks, ElementSpan(shape, box, first, stop))
            target[first:stop] = made.astype(out.dtype)
            if not bad:
                is_representable = is_finite(target[first:stop].astype(wide_dtype(out.dtype)))
                outcome.overflows |= not is_representable or bool((np.abs(made) > limit).any())
    return outcome


def _saturates_above(dtype: DType) -> float:
    """The magnitude above which a dtype without infinities and NaN takes its largest number."""
    return 7.0 if dtype_name(dtype) == "float4_e2m1fn" else math.inf


# --- facts about whole arrays --------------------------------------------------------------------
# It does not depend on how an array is cut into pieces: elements come in row-major order, in pieces
# of whole blocks.


ElementPieces = Callable[[], Iterator[Sequence[Array]]]
"""Iterates over an array once: its elements in all inputs, one-dimensional, in row-major order, in
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
            blocks = [array[first : first + BLOCK] for array in piece]
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
    k = max(1, math.floor(method.density * size))
    bits, kind = (64, np.uint64) if wide else (32, np.uint32)
    selections: list[KthLargest] = []
    for _ in range(bits // _BITS):
        for *sources, base in blocks_of(pieces):
            selections = selections or [KthLargest(k, bits) for _ in sources]
            for selection, source in zip(selections, sources, strict=True):
                selection.add(magnitudes(source - base, wide).view(kind))
        for selection in selections:
            selection.end_pass()
    keys = np.array([selection.prefix for selection in selections], kind)
    return [float(value) for value in keys.view(np.float64 if wide else np.float32)]


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
        position = int(np.searchsorted(above, self._k))
        self._k -= int(above[position - 1]) if position else 0
        self.prefix = self.prefix << _BITS | (1 << _BITS) - 1 - position
        self._first, self._shift = False, self._shift - _BITS
        self._counts[:] = 0
