"""Patches: what differs between two states of a chunk; what damaged or hostile ones may say."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unickpt.arrays import dtypes
from unickpt.plugins.incremental import patches
from unickpt.plugins.incremental.patches import BadPatch, PatchedState

HEADER = 20
DTYPES = [*dtypes.supported(), "datetime64[s]"]
SHARES = [0, 1e-5, 1e-3, 0.01, 0.02, 0.3, 1]


def header(count: int, gap_bytes: int, *sizes: int, mode: int = 0, rest: int = 0) -> bytes:
    return struct.pack("<QIIBBH", 5, 1, count, mode, gap_bytes, rest) + b"".join(
        struct.pack("<I", size) for size in sizes
    )


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(DTYPES),
    size=st.sampled_from([1, 7, 300, 70_000, 300_000]),
    share=st.sampled_from(SHARES),
    runs=st.booleans(),
    small=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_patch_makes_the_chunk_bit_by_bit(
    name: str, size: int, share: float, runs: bool, small: bool, seed: int
) -> None:
    dtype, rng = dtypes.from_name(name), np.random.default_rng(seed)
    full = rng.integers(0, 256, size * dtype.itemsize, np.uint8)  # any bits, also of NaNs
    chunk = full.copy()
    rows = chunk.reshape(size, -1)
    which = rng.random(size) < share
    if runs:  # rows of 100 elements, of which the last may be shorter
        which = np.repeat(rng.random(-(-size // 100)) < share, 100)[:size]
    if seed % 3 == 0:
        which[[0, -1]] = True
    if small:
        rows[which, 0] += rng.integers(1, 4, int(which.sum()), np.uint8)
    else:
        rows[which] = rng.integers(0, 256, (int(which.sum()), dtype.itemsize), np.uint8)
    old, new = full.view(dtype), chunk.view(dtype)
    patch = patches.encode(old, new, PatchedState(77, 2), 4, 1 << 40)
    assert patch is not None
    assert patches.state_of(patch) == PatchedState(77, 4)
    assert patches.encode(old, new, PatchedState(77, 2), 4, len(patch) - 1) is None
    assert len(patch) <= HEADER + 4 * 20 + 4 * size + chunk.nbytes
    out = old.copy()
    patches.apply(patch, out)
    assert out.tobytes() == chunk.tobytes()


@pytest.mark.parametrize(
    ("share", "most"), [(0.001, 0.0009), (0.01, 0.0065), (0.02, 0.0115), (0.1, 0.041), (1, 0.1)]
)
def test_a_patch_takes_little_more_than_information_theory_asks_for(
    share: float, most: float
) -> None:
    rng = np.random.default_rng(0)
    old = rng.standard_normal(1 << 21).astype(dtypes.from_name("bfloat16"))
    bits = old.view(np.uint16).copy()
    which = rng.random(bits.size) < share
    bits[which] += np.where(rng.random(int(which.sum())) < 0.5, 1, 0xFFFF).astype(np.uint16)
    patch = patches.encode(old, bits.view(old.dtype), PatchedState(1), 1, old.nbytes)
    assert patch is not None
    least = share + sum(-p * np.log2(p) for p in (share, 1 - share) if p)  # bits of an element
    assert least / 16 < len(patch) / old.nbytes < most
    out = old.copy()
    patches.apply(patch, out)
    assert out.tobytes() == bits.tobytes()


def test_rows_take_their_bytes_and_hardly_more() -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 256, (4096, 264), np.uint8)  # rows of 256 codes of 8 bits
    new = old.copy()
    changed = rng.random(4096) < 0.01
    new[changed] = rng.integers(0, 256, (int(changed.sum()), 264), np.uint8)
    patch = patches.encode(old, new, PatchedState(1), 1, old.nbytes)
    assert patch is not None
    assert len(patch) < 1.05 * new[changed].nbytes


def test_the_signs_of_zeros_and_the_bits_of_nans_count() -> None:
    full = np.array([0.0, 0.0, np.nan, 1.0], np.float32)
    chunk = full.copy()
    chunk[1] = -0.0
    chunk.view(np.uint32)[2] ^= 1
    patch = patches.encode(full, chunk, PatchedState(1), 1, 1000)
    assert patch is not None
    patches.apply(patch, full)
    assert full.tobytes() == chunk.tobytes()


def test_what_is_nearly_random_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    old, new = rng.integers(0, 1 << 32, (2, 1 << 18), np.uint32)
    monkeypatch.setattr(patches, "_packed", lambda plane: pytest.fail("it was deflated"))
    assert patches.encode(old, new, PatchedState(1), 1, old.nbytes // 2) is None


def deflated(data: bytes) -> bytes:
    made = zlib.compressobj(9, zlib.DEFLATED, -15)
    return made.compress(data) + made.flush()


ONES = deflated(b"\1" * 100)


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (b"", "0 bytes, at least 20"),
        (header(0, 0, 0, 0)[:19], "19 bytes, at least 20"),
        (header(0, 0, 0), "24 bytes, at least 28"),
        (header(0, 0, 0, 0) + b"x", "29 bytes, 28 expected"),
        (header(2, 1, 2, 2, 0) + b"\0\1\5", "35 bytes, 36 expected"),
        (header(1, 1, 1, 0, 0) + b"\x64", "word 100 of 100"),
        (header(3, 1, 3, 0, 0) + b"\x32\x32\0", "word 102 of 100"),
        (header(3, 4, 3, 3, 3, 3, 0, 0) + b"\xff" * 12, "word .* of 100"),
        (header(101, 0, 0, 0), "101 words for a chunk of 100"),
        (header((1 << 32) - 1, 0, 0, 0), "4294967295 words"),
        (header(1, 5, *[0] * 7), "kind 0, 5, 0"),
        (header(1, 1, 0, 0, 0, mode=2), "kind 2, 1, 0"),
        (header(1, 1, 0, 0, 0, rest=1), "kind 0, 1, 1"),
        (header(1, 0, 2, 0) + b"ab", "2 bytes for 1 words"),
        (header(100, 0, len(ONES), 0) + ONES[:-1] + b"\xff", "deflated stream|inflated"),
        (header(100, 0, 2, 0) + b"\xff\xff", "cannot be inflated"),
        (header(99, 0, len(ONES), 0) + ONES, "more than 99 bytes|99 expected"),
        (header(100, 0, len(ONES) + 1, 0) + ONES + b"x", "100 expected"),
        (header(100, 0, len(ONES) - 1, 0) + ONES[:-1], "100 expected|deflated"),
    ],
)
def test_a_patch_that_contradicts_itself_is_refused(patch: bytes, reason: str) -> None:
    with pytest.raises(BadPatch, match=reason):
        patches.apply(patch, np.zeros(100, np.uint16))


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=80),
    st.integers(0, 12),
    st.integers(0, 4),
    st.integers(0, 1),
    st.lists(st.integers(0, 12), min_size=8, max_size=8),
)
def test_no_patch_writes_outside_the_chunk(
    body: bytes, count: int, gap_bytes: int, mode: int, sizes: list[int]
) -> None:
    memory: Any = np.full(40, 7, np.uint32)
    out = memory[10:30]
    some = sizes[: gap_bytes + 4]
    for patch in (body, header(count, gap_bytes, *some, mode=mode) + body[: sum(some)]):
        try:
            patches.apply(patch, out)
        except BadPatch:
            continue
    assert (memory[:10] == 7).all()
    assert (memory[30:] == 7).all()
