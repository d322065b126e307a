"""Whatever a converter does by moving elements along axes becomes rules, for all sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from unickpt import Rules
from unickpt.plugins.observe.regular_blocks import blocks_of

State = dict[str, Any]
SIZES = st.integers(2, 5)


@st.composite
def moves(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], list[tuple[str, Any]]]:
    """Shapes of some arrays, and steps that move their elements."""
    shapes = {
        f"a{n}": tuple(draw(st.lists(SIZES, min_size=1, max_size=4)))
        for n in range(draw(st.integers(1, 3)))
    }
    kinds = st.sampled_from(["transpose", "merge", "flip", "split", "halve", "stack", "pad"])
    steps = [(draw(kinds), draw(st.integers(0, 10**6))) for _ in range(draw(st.integers(0, 5)))]
    return shapes, steps


def run(state: State, steps: list[tuple[str, int]]) -> State:
    """Moves elements; what a step does depends on shapes alone."""
    arrays = dict(state)
    for number, (kind, seed) in enumerate(steps):
        random = np.random.default_rng(seed)
        name = sorted(arrays)[random.integers(len(arrays))]
        x = arrays[name]
        axis = int(random.integers(max(1, x.ndim)))
        if kind == "transpose":
            arrays[name] = x.transpose(random.permutation(x.ndim))
        elif kind == "merge" and x.ndim > 1:
            at = int(random.integers(x.ndim - 1))
            merged = (*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])
            arrays[name] = x.reshape(merged)
        elif kind == "flip":
            arrays[name] = np.flip(x, axis)
        elif kind == "split" and x.shape[axis] % 2 == 0 and x.ndim < 5:
            arrays[name] = x.reshape(*x.shape[:axis], 2, x.shape[axis] // 2, *x.shape[axis + 1 :])
        elif kind == "halve" and x.shape[axis] > 1:
            cut = int(random.integers(1, x.shape[axis]))
            first, second = np.split(arrays.pop(name), [cut], axis)
            arrays |= {f"{name}x{number}": first, f"{name}y{number}": second}
        elif kind == "stack":
            same = [other for other in sorted(arrays) if arrays[other].shape == x.shape]
            if len(same) > 1:
                arrays[f"s{number}"] = np.stack([arrays.pop(other) for other in same], axis)
        elif kind == "pad" and len(steps) < 3:
            arrays[name] = np.pad(x, [(0, 3 * (d == axis)) for d in range(x.ndim)])
    return {f"out.{name}": x for name, x in arrays.items()}


@given(moves())
@settings(max_examples=150, deadline=None)
def test_moves_become_rules_that_do_the_same_both_ways(given_moves: Any) -> None:
    shapes, steps = given_moves
    rules = Rules.observe(lambda state: run(state, steps), shapes, strict=False)
    assert rules.report is not None
    # What takes more axes than sums of products have is refused, and never made wrongly.
    assume(not rules.report.refused)
    assert not rules.report.dropped
    arrays = {n: np.random.default_rng(3).random(s, np.float32) for n, s in shapes.items()}
    assert rules.check(arrays, run(arrays, steps), probes=10**6)


@given(st.lists(SIZES, min_size=1, max_size=4), st.integers(0, 10**6))
@settings(deadline=None)
def test_a_permutation_of_axes_is_one_block(shape: list[int], seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(shape))
    index = np.indices(shape).reshape(len(shape), -1)
    rows = np.concatenate([index, index[order]]).T
    assert len(blocks_of(rows, len(shape))) == 1
