"""Boxes and flat ranges against brute force over single elements."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import shapes

from unickpt.arrays.box import Box, flat_range_to_boxes, overlap, uncovered


@st.composite
def boxes_within(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(start, tuple(draw(st.integers(a, n)) for a, n in zip(start, shape, strict=True)))


some_boxes = shapes(max_rank=3, max_extent=5).flatmap(
    lambda shape: st.tuples(st.just(shape), st.lists(boxes_within(shape), max_size=6))
)


def painted(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    canvas = np.zeros(shape, int)
    for box in boxes:
        canvas[box.slices] += 1
    return canvas


@given(shapes(), st.data())
def test_a_flat_range_is_its_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    flat = np.arange(size).reshape(shape)

    boxes = flat_range_to_boxes(shape, start, stop)

    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    got = [flat[box.slices].ravel() for box in boxes]
    assert np.array_equal(np.concatenate([*got, np.empty(0, int)]), np.arange(start, stop))


@given(some_boxes)
def test_overlap_and_holes_are_found_exactly(case: tuple) -> None:
    shape, boxes = case
    canvas = painted(shape, boxes)

    pair = overlap(boxes)
    assert (pair is not None) == bool((canvas > 1).any())
    if pair is not None:
        assert boxes[pair[0]].intersect(boxes[pair[1]]) is not None
        return  # only of disjoint boxes are holes looked for

    hole = uncovered(Box.whole(shape), boxes)
    assert (hole is not None) == bool((canvas == 0).any())
    if hole is not None:
        assert not canvas[hole.slices].any()
        assert hole.size


@given(some_boxes)
def test_intersection_is_the_common_elements(case: tuple) -> None:
    shape, boxes = case
    for a in boxes:
        for b in boxes:
            both = (painted(shape, [a]) > 0) & (painted(shape, [b]) > 0)
            common = a.intersect(b)
            assert (common is None) == (not both.any())
            if common is not None:
                assert np.array_equal(painted(shape, [common]) > 0, both)
                assert a.contains(common)


def test_malformed_boxes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in rank"):
        Box((0,), (1, 2))
    with pytest.raises(ValueError, match="negative"):
        Box((3,), (2,))
    with pytest.raises(ValueError, match=r"flat range \[2, 9\) does not lie within shape \(2, 3\)"):
        flat_range_to_boxes((2, 3), 2, 9)
