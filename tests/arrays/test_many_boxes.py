"""Whether many boxes overlap or leave a gap, in little time."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.counts import lines_run

from unickpt.arrays import box
from unickpt.types import Box


def quadratic(boxes: list[Box]) -> bool:
    return any(a.intersect(b) is not None for i, a in enumerate(boxes) for b in boxes[:i])


@st.composite
def cut_up(draw: st.DrawFn) -> tuple[Box, list[Box]]:
    """A shape cut into disjoint boxes, of which one may then be moved."""
    rank = draw(st.integers(1, 4))
    boxes = [Box((0,) * rank, tuple(draw(st.integers(1, 6)) for _ in range(rank)))]
    whole = boxes[0]
    for _ in range(draw(st.integers(0, 8))):
        at = draw(st.integers(0, len(boxes) - 1))
        dim = draw(st.integers(0, rank - 1))
        b = boxes[at]
        if b.shape[dim] > 1:
            middle = draw(st.integers(b.start[dim] + 1, b.stop[dim] - 1))
            stop = (*b.stop[:dim], middle, *b.stop[dim + 1 :])
            start = (*b.start[:dim], middle, *b.start[dim + 1 :])
            boxes[at : at + 1] = [Box(b.start, stop), Box(start, b.stop)]
    if draw(st.booleans()):
        at = draw(st.integers(0, len(boxes) - 1))
        start = [draw(st.integers(0, n - 1)) for n in whole.stop]
        stop = [draw(st.integers(a + 1, n)) for a, n in zip(start, whole.stop, strict=True)]
        boxes[at] = Box(tuple(start), tuple(stop))
    return whole, draw(st.permutations(boxes))


@given(cut_up())
def test_boxes_are_judged_as_by_comparing_all(case: tuple[Box, list[Box]]) -> None:
    whole, boxes = case
    pair = box.overlap(boxes)
    assert (pair is not None) == quadratic(boxes)
    if pair is not None:
        assert boxes[pair[0]].intersect(boxes[pair[1]]) is not None
        assert not box.fill_exactly(whole, boxes)
        return  # only of disjoint boxes are holes looked for
    size = sum(b.size for b in boxes)
    assert box.fill_exactly(whole, boxes) == (size == whole.size)
    hole = box.uncovered(whole, boxes)
    canvas = np.zeros(whole.shape, bool)
    for b in boxes:
        canvas[b.slices] = True
    assert (hole is None) == bool(canvas.all())
    assert hole is None or (hole.size and not canvas[hole.slices].any())


def staircase(n: int) -> list[Box]:
    return [Box((i, i), (2 * n, i + 1)) for i in range(n)]


def pinwheels(n: int) -> list[Box]:
    """Disjoint boxes that no straight cut separates: a ring of four within a ring of four."""
    out = []
    for k in range(n // 4):
        a, b = k, n - k
        out += [Box((a, a), (a + 1, b - 1)), Box((a, b - 1), (b - 1, b))]
        out += [Box((b - 1, a + 1), (b, b)), Box((a + 1, a), (b, a + 1))]
    return out


@pytest.mark.parametrize("make", [staircase, pinwheels])
def test_many_boxes_take_little_time(make: Callable[[int], list[Box]]) -> None:
    """The work for twenty times as many boxes is some twenty times more, not four hundred."""
    few, many = make(400), make(8000)
    work = [lines_run(lambda boxes=boxes: box.overlap(boxes)) for boxes in (few, many)]
    assert work[1] < 60 * work[0], work
    started = time.process_time()  # of what NumPy does within a line, too: it was 10 to 30 s
    assert box.overlap(make(20_000)) is None
    assert time.process_time() - started < 5
    size = max(max(b.stop) for b in few)
    assert box.uncovered(Box.whole((size, size)), few[1:]) is not None
