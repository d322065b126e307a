"""Quantised chunks: the documented bytes, how far elements may move, and what is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from unickpt.arrays import dtypes
from unickpt.plugins.quantize import codes as kinds
from unickpt.plugins.quantize import packing, quantized_chunk, range_search
from unickpt.plugins.quantize.blocks import Blocks, stored_bytes

DTYPES = ("float32", "float64", "bfloat16", "float16")
CODES = tuple(kinds.BITS)
PAIRS = [*itertools.product(DTYPES, CODES), ("float32", "bfloat16"), ("float64", "bfloat16")]
SHAPES = [
    (),
    (1,),
    (7,),
    (63,),
    (64,),
    (257,),
    (3, 5),
    (40, 3, 3),
    (5, 300),
    (2, 513),
    (600, 70),
    (2, 1, 33_000),
]


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """Elements with some that are far larger than most."""
    rng = np.random.default_rng(seed)
    return np.asarray(rng.standard_t(3, shape)).astype(dtypes.from_name(dtype))


def back(encoded: quantized_chunk.QuantizedChunk, like: Any, codes: str) -> Any:
    out = np.empty_like(like)
    quantized_chunk.decode(encoded.data, out, codes)
    return out


def by_the_book(data: bytes, shape: tuple[int, ...], dtype: str, codes: str) -> Any:
    """Decodes a chunk as docs/format.md says, an element at a time."""
    kind = np.dtype(dtypes.from_name(dtype))
    size = math.prod(shape)
    if codes == "bfloat16":
        return np.frombuffer(data, ml_dtypes.bfloat16).astype(kind).reshape(shape)
    length, dims = 1, list(shape)
    while dims and length < 64:
        length *= dims.pop()
    work = np.float64 if dtype == "float64" else np.float32
    per_row = math.ceil(length / 256)
    count = size // length * per_row
    scales = np.frombuffer(data, work, 2 * count)
    stream = int.from_bytes(data[scales.nbytes :], "little")
    bits = {"uint8": 8, "int4": 4, "int3": 3, "int2": 2}[codes]
    found = []
    for at in range(size):
        code = stream >> (at * bits) & ((1 << bits) - 1)
        block = at // length * per_row + at % length // 256
        product = work(code) * scales[count + block]
        found.append(work(product + scales[block]))
    assert len(data) == scales.nbytes + math.ceil(size * bits / 8)
    return np.array(found, work).astype(kind).reshape(shape)


@pytest.mark.parametrize("shape", SHAPES[:11], ids=str)
@pytest.mark.parametrize(("dtype", "codes"), PAIRS)
def test_the_bytes_are_those_of_the_format(dtype: str, codes: str, shape: tuple[int, ...]) -> None:
    if math.prod(shape) > 5000 and dtype != "float32":
        shape = (20, *shape[1:])
    x = numbers(shape, dtype)
    encoded = quantized_chunk.encode(x, codes)
    assert encoded.data.nbytes == stored_bytes(shape, dtype, codes)
    found = back(encoded, x, codes)
    assert found.tobytes() == by_the_book(encoded.data.tobytes(), shape, dtype, codes).tobytes()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "codes"), PAIRS)
def test_the_errors_are_as_measured(dtype: str, codes: str, shape: tuple[int, ...]) -> None:
    x = numbers(shape, dtype)
    encoded = quantized_chunk.encode(x, codes)
    wide = np.float64 if dtype == "float64" else np.float32
    apart = np.abs(back(encoded, x, codes).astype(wide) - x.astype(wide))
    assert encoded.absolute == float(apart.max())
    blocks = Blocks.of(shape)
    rows, sizes = (a.reshape(blocks.rows, blocks.length) for a in (apart, np.abs(x.astype(wide))))
    relative = max(
        float((rows[:, a : a + 256].max(axis=1) / sizes[:, a : a + 256].max(axis=1)).max())
        for a in range(0, blocks.length, 256)
    )
    assert encoded.relative == relative


def elements(dtype: str) -> st.SearchStrategy[Any]:
    """Any finite arrays, of few or many digits, in blocks and across them."""
    width = 64 if dtype == "float64" else 16 if dtype in ("float16", "bfloat16") else 32
    floats = st.floats(width=width, allow_nan=False, allow_infinity=False)
    shape = hnp.array_shapes(min_dims=0, max_dims=3, max_side=9) | st.just((300,))
    base = np.dtype(f"float{width}")
    return hnp.arrays(base, shape, elements=floats).map(lambda x: x.astype(dtypes.from_name(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_an_element_moves_at_most_half_a_scale(dtype: str, data: st.DataObject) -> None:
    x = data.draw(elements(dtype))
    try:
        encoded = quantized_chunk.encode(x, "uint8")
    except quantized_chunk.NotQuantizable:
        assume(False)
    found = back(encoded, x, "uint8").astype(np.longdouble)
    count = Blocks.of(x.shape).rows * Blocks.of(x.shape).per_row
    work = kinds.working(dtype)
    scales = np.frombuffer(encoded.data.tobytes(), work, 2 * count)[count:]
    length = Blocks.of(x.shape).length
    per_row = Blocks.of(x.shape).per_row
    at = np.arange(x.size)
    scale = scales[at // length * per_row + at % length // 256].reshape(x.shape)
    apart = np.abs(found - x.astype(np.longdouble))
    # Besides, the difference and the sum are rounded to float32 or float64, then to the dtype.
    size, tiny = np.abs(x.astype(np.longdouble)), ml_dtypes.finfo(x.dtype).smallest_subnormal
    size = np.maximum(size, np.abs(found))  # a zero need not stay one
    rounding = 3 * size.max() * np.finfo(work).eps + size * float(ml_dtypes.finfo(x.dtype).eps)
    limit = scale.astype(np.longdouble) / 2 * (1 + 1e-4) + rounding + float(tiny)
    assert (apart <= limit).all()


@pytest.mark.parametrize("codes", ["int4", "int3", "int2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shrunk_range_is_never_worse(
    dtype: str, codes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gained = 0
    for seed, shape in enumerate([(40, 256), (200, 64), (30, 700), (3, 3), (16, 1)]):
        x = numbers(shape, dtype, seed)
        shrunk = back(quantized_chunk.encode(x, codes), x, codes)
        with monkeypatch.context() as patch:
            patch.setattr(range_search, "BINS", {})
            plain = back(quantized_chunk.encode(x, codes), x, codes)
        blocks = Blocks.of(shape)
        squares = [
            ((found.astype(np.float64) - x.astype(np.float64)) ** 2).reshape(-1, blocks.length)
            for found in (shrunk, plain)
        ]
        for a in range(0, blocks.length, 256):
            mine, other = (square[:, a : a + 256].sum(axis=1) for square in squares)
            assert (mine <= other * (1 + 1e-5)).all()
            gained += int((mine < 0.95 * other).sum())
    assert gained > 100


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("exponent", [-100, -60, 60, 100])
def test_the_unit_of_an_array_makes_no_difference(codes: str, exponent: int) -> None:
    x = numbers((40, 256), "float32")
    one, other = (
        quantized_chunk.encode(each, codes) for each in (x, x * np.float32(2.0**exponent))
    )
    assert (one.data[2 * 40 * 4 :] == other.data[2 * 40 * 4 :]).all()
    assert one.relative == other.relative


@pytest.mark.parametrize("codes", ["int4", "int3", "int2"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(x=elements("float32"))
def test_nothing_decodes_outside_of_its_block_s_range(codes: str, x: Any) -> None:
    try:
        encoded = quantized_chunk.encode(x, codes)
    except quantized_chunk.NotQuantizable:
        assume(False)
    found = back(encoded, x, codes).astype(np.float64)
    span = float(x.max()) - float(x.min())
    assert found.min() >= x.min()
    assert found.max() <= float(x.max()) + span * 1e-6 + 1e-44


@pytest.mark.parametrize(("dtype", "codes"), [p for p in PAIRS if p[1] != "bfloat16"])
def test_a_constant_block_is_exact(dtype: str, codes: str) -> None:
    for value in (0.0, -0.0, 0.3, -1e-5, 6e4):
        x = np.full((3, 300), value).astype(dtypes.from_name(dtype))
        encoded = quantized_chunk.encode(x, codes)
        assert (back(encoded, x, codes) == x).all()
        assert (encoded.absolute, encoded.relative) == (0, 0)


def test_zeros_of_either_sign_give_the_same_bytes() -> None:
    x = np.zeros(300, np.float32)
    x[::2] = -0.0
    assert (quantized_chunk.encode(x, "int4").data == quantized_chunk.encode(-x, "int4").data).all()


@pytest.mark.parametrize("codes", CODES)
def test_the_smallest_numbers_have_scales(codes: str) -> None:
    tiny = np.finfo(np.float32).smallest_subnormal
    x = np.arange(300, dtype=np.float32) * tiny
    encoded = quantized_chunk.encode(x, codes)
    levels = (1 << kinds.BITS[codes]) - 1
    assert encoded.absolute <= tiny * math.ceil(300 / levels)
    if codes == "uint8":
        assert (back(quantized_chunk.encode(x[:256], codes), x[:256], codes) == x[:256]).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 1001])
def test_packed_codes_unpack(bits: int, count: int) -> None:
    given = np.random.default_rng(count).integers(0, 1 << bits, count).astype(np.uint8)
    packed = packing.pack(given, bits)
    stream = sum(int(code) << (bits * at) for at, code in enumerate(given))
    assert packed.tobytes() == stream.to_bytes(math.ceil(count * bits / 8), "little")
    assert (packing.unpack(packed, bits, count) == given).all()


@pytest.mark.parametrize(("dtype", "codes"), PAIRS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_elements_that_are_not_finite_are_refused(dtype: str, codes: str, bad: float) -> None:
    for at in (0, 299, 599):
        x = numbers((2, 300), dtype)
        x.reshape(-1)[at] = bad
        with pytest.raises(quantized_chunk.NotQuantizable, match="not finite"):
            quantized_chunk.encode(x, codes)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("codes", kinds.NAMES)
def test_a_range_that_overflows_is_refused(dtype: str, codes: str) -> None:
    x = numbers((2, 300), dtype)
    x[0, 0], x[0, 1] = np.finfo(x.dtype).max, np.finfo(x.dtype).min
    with pytest.raises(quantized_chunk.NotQuantizable, match=f"too large for {codes}"):
        quantized_chunk.encode(x, codes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_whole_range_of_small_dtypes_is_stored(dtype: str) -> None:
    x = numbers((2, 300), "float32").astype(dtypes.from_name(dtype))
    largest = ml_dtypes.finfo(x.dtype).max
    x[0, 0] = largest
    x[1, 0] = -largest
    found = back(quantized_chunk.encode(x, "int4"), x, "int4")
    assert np.isfinite(found.astype(np.float32)).all()


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("scale", np.nan, "a scale is negative or NaN"),
        ("scale", -1.0, "a scale is negative or NaN"),
        ("scale", np.inf, "the range of a block is not finite"),
        ("low", np.nan, "the range of a block is not finite"),
        ("low", -np.inf, "the range of a block is not finite"),
        ("scale", 1e4, "the range of a block is not finite"),  # no code may be beyond float16
    ],
)
def test_hostile_scales_are_refused(place: str, value: float, reason: str) -> None:
    x = numbers((2, 300), "float16")
    data = quantized_chunk.encode(x, "int4").data.copy()
    both = data[: 2 * 4 * 4].view(np.float32)
    both[5 if place == "scale" else 3] = value
    with pytest.raises(quantized_chunk.BadCodes, match=reason):
        quantized_chunk.decode(data, np.empty_like(x), "int4")


def test_hostile_roundings_are_refused() -> None:
    x = numbers((2, 300), "float32")
    data = quantized_chunk.encode(x, "bfloat16").data.copy()
    data.view(ml_dtypes.bfloat16)[7] = np.nan
    with pytest.raises(quantized_chunk.BadCodes, match="not finite"):
        quantized_chunk.decode(data, np.empty_like(x), "bfloat16")


@given(shape=hnp.array_shapes(min_dims=0, max_dims=4, max_side=700))
def test_tiles_are_all_blocks_once(shape: tuple[int, ...]) -> None:
    blocks = Blocks.of(shape)
    assume(blocks.rows * blocks.length < 1 << 22)
    assert blocks.rows * blocks.length == math.prod(shape)
    seen = np.zeros((blocks.rows, blocks.length), np.uint8)
    scales = np.zeros((blocks.rows, blocks.per_row), np.uint8)
    for tile in blocks.tiles():
        seen[tile.rows, tile.elements] += 1
        scales[tile.rows, tile.blocks] += 1
        assert seen[tile.rows, tile.elements].size % tile.extent == 0
    assert (seen == 1).all()
    assert (scales == 1).all()
