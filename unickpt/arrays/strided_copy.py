"""Strided views, and copies between them block by block: NumPy is slow at permuting axes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from operator import add, mul

import numpy as np

from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array, DType

# Measured: blocks of these extents, copied to a cache first, are 4 to 15 times as fast as one
# np.copyto, whose reads all miss the cache when axes are permuted, and faster than torch's copy_ on
# one thread. Arrays that fit into a cache gain nothing.
_RUN_SOURCE, _RUN_OUT = 128, 512
_SMALL_BYTES, _LONG_RUN = 256 << 10, 32
_PAD = 16  # elements, so that rows of a power of two do not map to one set of a cache


@lru_cache(maxsize=64)
def unit_steps(rank: int) -> tuple[tuple[int, ...], ...]:
    """The steps of axes that are an array's own dimensions."""
    return tuple(tuple(int(i == j) for j in range(rank)) for i in range(rank))


def may_overlap(shape: Sequence[int], strides: Sequence[int], itemsize: int = 1) -> bool:
    """Whether elements of a strided array share memory; also True for some strides that interleave
    dimensions.

    Arguments:
        shape: of the array.
        strides: of its dimensions, in elements; or in bytes, with the itemsize.
        itemsize: of an element, in the unit of the strides.
    """
    reach = itemsize - 1
    for stride, n in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True)):
        if n > 1 and stride <= reach:
            return 0 not in shape
        reach += (n - 1) * stride
    return False


def view(
    array: Array, start: Sequence[int], steps: Sequence[Sequence[int]], shape: tuple[int, ...]
) -> Array:
    """A view of an array's elements along other axes.

    Arguments:
        array: with any strides.
        start: the first element.
        steps: for each axis of the view, its step along each axis of `array`.
        shape: of the view, which must lie within `array`.

    Example:
        >>> view(np.arange(6).reshape(2, 3), (0, 2), ((1, 0), (0, -1)), (2, 3)).tolist()
        [[2, 1, 0], [5, 4, 3]]
    """
    if steps == unit_steps(array.ndim):
        if shape == array.shape:
            return array
        return array[Box(tuple(start), tuple(map(add, start, shape))).slices]
    strides = tuple(sum(map(mul, step, array.strides)) for step in steps)
    # The function supports only NumPy's own dtypes.
    size = array.itemsize
    bits = array.view(f"u{size}") if size in (1, 2, 4, 8) else array
    first: Array = bits[tuple(slice(i, i + 1) for i in start)].reshape(())
    seen: Array = np.lib.stride_tricks.as_strided(first, shape, strides)
    return seen.view(array.dtype)


def copy(out: Array, source: Array) -> None:
    """Copies `source` into `out`; same shape and dtype, any strides.

    Example:
        >>> out = np.empty((2, 3)); copy(out, np.ones((3, 2)).T); float(out.sum())
        6.0
    """
    if source.nbytes < _SMALL_BYTES or _common_run(out, source) >= _LONG_RUN:
        np.copyto(out, source)
        return
    inner, outer = _by_stride(source), _by_stride(out)
    block = [1] * source.ndim
    _extend(block, source.shape, outer[:1], _RUN_OUT)  # narrow planes get longer rows
    row = _extend(block, source.shape, inner, _RUN_SOURCE * _RUN_OUT // block[outer[0]])
    _extend(block, source.shape, outer, _RUN_OUT)
    cache = _scratch(block, inner, row, source.dtype)
    for start in itertools.product(*map(range, itertools.repeat(0), source.shape, block)):
        where = tuple(slice(i, i + n) for i, n in zip(start, block, strict=True))
        source_block = source[where]
        cache_block = cache[tuple(slice(n) for n in source_block.shape)]
        np.copyto(cache_block, source_block)
        np.copyto(out[where], cache_block)


def _by_stride(array: Array) -> list[int]:
    """The axes, ordered by stride, the smallest first."""
    axes = [axis for axis, n in enumerate(array.shape) if n > 1]
    return sorted(axes, key=lambda axis: (abs(array.strides[axis]), -axis))


def _common_run(out: Array, source: Array) -> int:
    """The number of elements that are contiguous in the same order in both arrays."""
    run = 1
    for a, b in zip(_by_stride(source), _by_stride(out), strict=True):
        if a != b:
            return run
        run *= source.shape[a]
    return max(run, _LONG_RUN)


def _extend(block: list[int], shape: Sequence[int], axes: Sequence[int], target_size: int) -> int:
    """Extends a block along `axes`, in order, to about `target_size` elements."""
    run = 1
    for axis in axes:
        block[axis] = max(block[axis], min(shape[axis], -(-target_size // run)))
        run *= block[axis]
        if run >= target_size:
            break
    return run


def _scratch(block: Sequence[int], inner: Sequence[int], row: int, dtype: DType) -> Array:
    """Memory for a block, with the axis order of the source and padded rows."""
    strides = [dtype.itemsize] * len(block)
    step = dtype.itemsize
    for axis in inner:
        strides[axis] = step
        step *= block[axis]
        if step == row * dtype.itemsize:
            step += _PAD * dtype.itemsize
    raw = np.empty(step, np.uint8)
    return np.ndarray(block, f"V{dtype.itemsize}", raw, strides=strides).view(dtype)
