"""Patches: what differs between two chunks, and what a damaged or hostile one may say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unickpt.arrays import dtypes
from unickpt.format import patches
from unickpt.format.patches import BadPatch, FullChunk

HEADER = 32
DTYPES = [*dtypes.supported(), "datetime64[s]"]


def header(count: int, width: int, *, spent: int = 0) -> bytes:
    return np.array([5, spent, count, width], "<u8").tobytes()


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(DTYPES),
    size=st.sampled_from([1, 7, 300, 70_000, 300_000]),
    share=st.sampled_from([0, 1e-5, 1e-3, 0.02, 0.3, 1]),
    seed=st.integers(0, 99),
)
def test_a_patch_makes_the_chunk_bit_by_bit(name: str, size: int, share: float, seed: int) -> None:
    dtype, rng = dtypes.from_name(name), np.random.default_rng(seed)
    full = rng.integers(0, 256, size * dtype.itemsize, np.uint8)  # any bits, also of NaNs
    chunk = full.copy()
    rows = chunk.reshape(size, -1)
    rows[rng.random(size) < share] ^= rng.integers(0, 2, dtype.itemsize, np.uint8)
    old, new = full.view(dtype), chunk.view(dtype)
    patch = patches.encode(old, new, FullChunk(77, 1000), 1 << 40)
    assert patch is not None
    assert patches.of_patch(patch) == FullChunk(77, 1000 + len(patch))
    assert patches.encode(old, new, FullChunk(77), len(patch)) is not None
    assert patches.encode(old, new, FullChunk(77), len(patch) - 1) is None
    out = old.copy()
    patches.apply(patch, out)
    assert out.tobytes() == chunk.tobytes()


def test_the_signs_of_zeros_and_the_bits_of_nans_count() -> None:
    full = np.array([0.0, 0.0, np.nan, 1.0], np.float32)
    chunk = full.copy()
    chunk[1] = -0.0
    chunk.view(np.uint32)[2] ^= 1
    patch = patches.encode(full, chunk, FullChunk(1), 1000)
    assert patch is not None
    assert len(patch) == HEADER + 2 * (1 + 4)
    patches.apply(patch, full)
    assert full.tobytes() == chunk.tobytes()


@pytest.mark.parametrize(("apart", "each"), [(50, 3), (3000, 4), (100_000, 6)])
def test_positions_take_as_few_bytes_as_their_gaps_allow(apart: int, each: int) -> None:
    full = np.zeros(apart * 40, np.uint16)
    chunk = full.copy()
    chunk[apart - 1 :: apart] = 1
    patch = patches.encode(full, chunk, FullChunk(1), 1000)
    assert patch is not None
    assert len(patch) == HEADER + 40 * each


def test_a_gap_too_wide_for_its_type_is_filled_with_elements_that_do_not_differ() -> None:
    full = np.arange(2000, dtype=np.uint16)
    chunk = full.copy()
    changed = [*range(100), 700, 701, 1999]
    chunk[changed] += 5
    patch = patches.encode(full, chunk, FullChunk(1), 10_000)
    assert patch is not None
    assert patch[24] == 1
    assert len(patch) == HEADER + (len(changed) + 2 + 5) * 3
    patches.apply(patch, full)
    assert np.array_equal(full, chunk)


def gaps(*values: int, width: int = 1, size: int = 2) -> bytes:
    body = np.array(values, f"<u{width}").tobytes() + bytes(size * len(values))
    return header(len(values), width) + body


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (b"", "0 bytes, at least 32"),
        (header(0, 1)[:-1], "31 bytes, at least 32"),
        (header(0, 1) + b"x", "33 bytes, 32 expected"),
        (gaps(1, 2)[:-1], "37 bytes, 38 expected"),
        (gaps(1, 2) + b"\0", "39 bytes, 38 expected"),
        (gaps(10), "element 10 of 10"),
        (gaps(4, 4, 0), "element 10 of 10"),
        (gaps(*[(1 << 32) - 1] * 10, width=4), "element .* of 10"),
        (gaps(*[0] * 11), "11 elements"),
        (header((1 << 64) - 1, 1), "18446744073709551615 elements"),
        (header(1, 0), "in 0 bytes each"),
        (header(1, 3) + bytes(5), "in 3 bytes each"),
        (header(1, 8) + bytes(10), "in 8 bytes each"),
        (header(1, 1 << 63) + bytes(10), "bytes each"),
    ],
)
def test_a_patch_that_contradicts_itself_is_refused(patch: bytes, reason: str) -> None:
    with pytest.raises(BadPatch, match=reason):
        patches.apply(patch, np.zeros(10, np.uint16))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80), st.integers(0, 12), st.sampled_from([1, 2, 4]))
def test_no_patch_writes_outside_the_chunk(body: bytes, count: int, width: int) -> None:
    memory: Any = np.full(40, 7, np.uint32)
    out = memory[10:30]
    for patch in (body, header(count, width) + body[: count * (width + 4)]):
        try:
            patches.apply(patch, out)
        except BadPatch:
            continue
    assert (memory[:10] == 7).all()
    assert (memory[30:] == 7).all()
