"""Copies between arrays of any strides, tile by tile: NumPy is slow where axes change places."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import add, mul

import numpy as np

from unickpt.adapt import Array
from unickpt.box import Box

# Measured: with tiles of these extents 1.3 to 6 times as fast as one np.copyto, whose every read
# misses a cache; planes that fit into a cache, or are narrow, gain nothing.
_ALONG_SOURCE, _ALONG_OUT, _TILE = 512, 16, 2048
_PLANE_BYTES, _NARROW = 256 << 10, 8


@lru_cache(maxsize=64)
def unit_steps(rank: int) -> tuple[tuple[int, ...], ...]:
    """Steps of axes that are an array's own."""
    return tuple(tuple(int(i == j) for j in range(rank)) for i in range(rank))


def view(
    array: Array, start: Sequence[int], steps: Sequence[Sequence[int]], shape: tuple[int, ...]
) -> Array:
    """Elements of an array, seen along other axes.

    Arguments:
        array: of any strides.
        start: the first element.
        steps: for each axis of the view, its step along each axis of `array`.
        shape: of the view; all that it holds lies within `array`.

    Example:
        >>> view(np.arange(6).reshape(2, 3), (0, 2), ((1, 0), (0, -1)), (2, 3)).tolist()
        [[2, 1, 0], [5, 4, 3]]
    """
    if steps == unit_steps(array.ndim):
        return array[Box(tuple(start), tuple(map(add, start, shape))).slices]
    strides = tuple(sum(map(mul, step, array.strides)) for step in steps)
    # The function knows NumPy's own dtypes only.
    size = array.itemsize
    bits = array.view(f"u{size}") if size in (1, 2, 4, 8) else array
    first: Array = bits[tuple(slice(i, i + 1) for i in start)].reshape(())
    seen: Array = np.lib.stride_tricks.as_strided(first, shape, strides)
    return seen.view(array.dtype)


def copy(out: Array, source: Array) -> None:
    """Copies `source` into `out`, both of one shape and dtype.

    Example:
        >>> out = np.empty((2, 3)); copy(out, np.ones((3, 2)).T); out.sum()
        np.float64(6.0)
    """
    a, b = _fastest(source), _fastest(out)
    if a == b or not _worth_tiles(source.shape[a], source.shape[b], source.itemsize):
        np.copyto(out, source)
        return
    along_source = min(source.shape[a], _ALONG_SOURCE)
    along_out = max(_ALONG_OUT, _TILE // along_source)
    rest = [1 if axis in (a, b) else n for axis, n in enumerate(source.shape)]
    for at in np.ndindex(*rest):
        where = [slice(i, i + 1) for i in at]
        for i in range(0, source.shape[a], along_source):
            for j in range(0, source.shape[b], along_out):
                where[a], where[b] = slice(i, i + along_source), slice(j, j + along_out)
                tile = tuple(where)
                np.copyto(out[tile], source[tile])


def _worth_tiles(m: int, n: int, itemsize: int) -> bool:
    return min(m, n) >= _NARROW and m * n * itemsize >= _PLANE_BYTES


def _fastest(array: Array) -> int:
    """The axis along which neighbours lie closest in memory."""
    steps = [
        (abs(step), -axis)
        for axis, (n, step) in enumerate(zip(array.shape, array.strides, strict=True))
        if n > 1
    ]
    return -min(steps)[1] if steps else 0
