"""The range that codes of a block cover: shrunk where that lessens the error.

The adaptive asymmetric quantisation of Check-N-Run (arXiv 2010.08679): from the smallest and the
largest element, the range is shrunk step by step, each time on the side that gives the smaller
error. The best range of all is taken. Few large elements are stored less exactly for it, and all
others more.
"""

from __future__ import annotations

import numpy as np

from unickpt.extend import Array

# Steps into which the whole range is divided, and the part of it that may be cut off, by the bits
# of a code. Measured: more and smaller steps take several times as long, and gain at most 2 %; with
# 8 bits nothing gains more than that.
BINS = {2: 16, 3: 16, 4: 25}
RATIO = {2: 0.5, 3: 0.375, 4: 0.24}


def shrunk(values: Array, low: Array, high: Array, bits: int) -> tuple[Array, Array]:
    """Where the range of each block begins and ends.

    Arguments:
        values: a row for each block.
        low, high: the smallest and the largest element of each.
        bits: of a code; one of `BINS`.
    """
    bins = BINS[bits]
    left, right = _greedy(_normal(values, low, high), bins, round(bins * RATIO[bits]), bits)
    span = high.astype(np.float64) - low
    begin = (low + span * left / bins).astype(low.dtype)
    return begin, (high - span * right / bins).astype(low.dtype)


def _normal(values: Array, low: Array, high: Array) -> Array:
    """The elements as parts of the range, in float32: enough to compare errors."""
    span = high - low
    with np.errstate(over="ignore", invalid="ignore"):
        normal = (values - low[:, None]) / np.where(span > 0, span, 1)[:, None]
    return normal.astype(np.float32, copy=False)


def _greedy(normal: Array, bins: int, steps: int, bits: int) -> tuple[Array, Array]:
    """How many bins are cut off at each side."""
    levels = np.float32((1 << bits) - 1)
    work = np.empty_like(normal), np.empty_like(normal)
    left = np.zeros(len(normal), np.float32)
    right, best_left, best_right = left.copy(), left.copy(), left.copy()
    best = _loss(normal, left, right, bins, levels, work)
    for _ in range(steps):
        first = _loss(normal, left + 1, right, bins, levels, work)
        second = _loss(normal, left, right + 1, bins, levels, work)
        moves = first < second
        left, right = left + moves, right + ~moves
        loss = np.where(moves, first, second)
        better = loss < best
        best = np.where(better, loss, best)
        best_left = np.where(better, left, best_left)
        best_right = np.where(better, right, best_right)
    return best_left.astype(np.float64), best_right.astype(np.float64)


def _loss(
    normal: Array, left: Array, right: Array, bins: int, levels: np.float32, work: tuple[Array, ...]
) -> Array:
    """The sum of squared errors of each block."""
    steps, rounded = work
    width = (np.float32(bins) - left - right) / (np.float32(bins) * levels)
    np.subtract(normal, (left / np.float32(bins))[:, None], out=steps)
    np.multiply(steps, (1 / width)[:, None], out=steps)
    np.rint(steps, out=rounded)
    np.clip(rounded, 0, levels, out=rounded)
    np.subtract(steps, rounded, out=steps)
    np.multiply(steps, steps, out=steps)
    loss: Array = steps.sum(axis=1) * width * width
    return loss
