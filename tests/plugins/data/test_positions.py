"""What is left of one order when ranks that took turns stop: `unickpt.data.Positions`, pure."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unickpt.data import Positions

TAKEN = st.lists(st.integers(0, 9), min_size=1, max_size=9)


@given(st.lists(TAKEN, max_size=5), st.integers(1, 9))
def test_each_position_comes_once_whatever_the_numbers_of_ranks(
    jobs: list[list[int]], last: int
) -> None:
    positions, used = Positions(), list[int]()
    for taken in jobs:
        for rank, number in enumerate(taken):
            used += islice(positions.of(rank, len(taken)), number)
        positions = positions.after(taken)
    assert len(set(used)) == len(used)
    rest = [
        list(islice(positions.of(rank, last), 40 + len(positions.left))) for rank in range(last)
    ]
    end = max([positions.start, *used])
    together = sorted([*used, *(p for part in rest for p in part if p <= end)])
    assert together == list(range(end + 1))
    assert all(part == sorted(part) for part in rest)


@given(st.integers(1, 9), st.integers(0, 50))
def test_ranks_that_are_as_far_as_each_other_leave_nothing(count: int, taken: int) -> None:
    assert Positions().after([taken] * count) == Positions(count * taken)


@given(TAKEN, st.integers(0, 9))
def test_a_rank_goes_on_where_it_was(taken: list[int], more: int) -> None:
    positions = Positions().after(taken)
    assert next(positions.of(0, 3, more)) == list(islice(positions.of(0, 3), more + 1))[-1]


@pytest.mark.parametrize(
    ("start", "left"), [(-1, ()), (3, (3,)), (3, (2, 1)), (3, (1, 1)), (3, (-1, 2))]
)
def test_positions_that_do_not_ascend_are_refused(start: int, left: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not ascending, from 0 on"):
        Positions(start, left)


def test_a_rank_cannot_have_taken_less_than_nothing() -> None:
    with pytest.raises(ValueError, match="cannot have taken -1"):
        Positions().after([3, -1])
