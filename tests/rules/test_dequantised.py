"""`Function.dequantised`: any box is the same as of the whole array, and as NumPy computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unickpt
from unickpt import Function, LoadMismatch, Rules
from unickpt.arrays.box import Box
from unickpt.errors import RuleError


@st.composite
def cases(draw: Any) -> tuple[Any, ...]:
    """Codes, scales, perhaps zero points; the sizes of a block, the order of axes, and a box."""
    rank = draw(st.integers(1, 3))
    blocks = [draw(st.integers(1, 4)) for _ in range(rank)]
    shape = [draw(st.integers(1, 9)) for _ in range(rank)]
    counts = [-(-n // k) for n, k in zip(shape, blocks, strict=True)]
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    codes = random.integers(-128, 128, shape, np.int8)
    scales = random.standard_normal(counts).astype(draw(st.sampled_from(["float32", "float16"])))
    zero = random.integers(-8, 8, counts, np.int8)
    axes = draw(st.permutations(range(rank)))
    whole = [shape[axis] for axis in axes]
    start = [draw(st.integers(0, n - 1)) for n in whole]
    stop = [draw(st.integers(a + 1, n)) for a, n in zip(start, whole, strict=True)]
    return codes, scales, zero, blocks, axes, Box(tuple(start), tuple(stop))


@given(case=cases(), with_zero=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_box_is_that_of_the_whole_array(case: Any, with_zero: bool) -> None:
    codes, scales, zero, blocks, axes, box = case
    spread = [np.arange(n) // k for n, k in zip(codes.shape, blocks, strict=True)]
    values = codes.astype(np.int32) - (zero[np.ix_(*spread)] if with_zero else 0)
    expected = values.astype(np.float32) * scales.astype(np.float32)[np.ix_(*spread)]
    expected = expected.transpose(axes)[box.slices].astype(ml_dtypes.bfloat16)
    inputs = [codes, scales, *[zero] * with_zero]
    function = Function.dequantised("bfloat16", block=blocks, axes=axes)
    shapes = [x.shape for x in inputs]
    assert function.region is not None
    regions = function.region(box, *shapes)
    parts = [x[region.slices] for x, region in zip(inputs, regions, strict=True)]
    found = function.apply(box, *parts)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.tobytes() == expected.tobytes()
    assert function.shape(*shapes) == tuple(codes.shape[axis] for axis in axes)


@pytest.mark.parametrize("scale", [np.float32(0.5), np.float32([[0.5]]), np.float32([0.5])])
def test_one_scale(scale: Any, tmp_path: Path) -> None:
    codes = np.arange(12, dtype=np.uint8).reshape(3, 4)
    unickpt.save(tmp_path / "c", {"q": codes, "s": scale})
    axes = " ".join("abc"[: scale.ndim])
    rules = Rules.parse(
        f"q [o i], s [{axes}] <-> w [o i] as float32 via f",
        functions={"f": Function.dequantised("float32", codes="float8_e4m3fn")},
    )
    like = {"w": np.zeros((3, 4), np.float32)}
    unickpt.load(tmp_path / "c", like, rules=rules)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.5)
    assert like["w"].tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("shape", "block", "message"),
    [
        ((2, 1), None, r"\[5, 4\] do not have scales of shape \[2, 1\] for whole blocks"),
        ((2,), None, r"do not have scales of shape \[2\] for whole blocks; pass block="),
        ((2, 1), (2, 4), r"do not have scales of shape \[2, 1\] for blocks of \[2, 4\]"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    shape: Any, block: Any, message: str, tmp_path: Path
) -> None:
    scales = np.ones(shape, np.float32)
    unickpt.save(tmp_path / "c", {"q": np.ones((5, 4), np.int8), "s": scales})
    axes = " ".join("bc"[: len(shape)])
    rules = Rules.parse(
        f"q [o i], s [{axes}] <-> w [o i] as float32 via f",
        functions={"f": Function.dequantised("float32", block=block)},
    )
    with pytest.raises((RuleError, LoadMismatch), match=message):
        unickpt.load(tmp_path / "c", {"w": np.zeros((5, 4), np.float32)}, rules=rules)
