"""Frames of Blosc as TensorStore reads them, whatever they hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from unickpt.arrays import dtypes
from unickpt.format import chunk_encoding
from unickpt.format.chunk_encoding import zarr_metadata
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry
from unickpt.plugins.compress import blosc_frames
from unickpt.plugins.compress.auto import chosen_encoding

KINDS = ["random", "zeros", "few", "ramp", "half random"]
DTYPES = ["bfloat16", "float16", "float32", "int64", "complex128", "float8_e4m3fn", "int4", "bool"]


def values(kind: str, count: int, itemsize: int, seed: int) -> np.ndarray[Any, Any]:
    """The bytes of so many elements."""
    rng, size = np.random.default_rng(seed), count * itemsize
    found = rng.integers(0, 256, size, np.uint8)
    if kind == "zeros":
        found[:] = 0
    if kind == "few":
        found = rng.integers(0, 2, size, np.uint8)
    if kind == "ramp":
        found = (np.arange(size) // itemsize % 251).astype(np.uint8)
    if kind == "half random":
        found[size // 2 :] = 7
    return found


def read(data: bytes, dtype: str, count: int) -> np.ndarray[Any, Any]:
    """What TensorStore makes of a chunk with these stored bytes."""
    encoding = chosen_encoding(dtype)
    entry = ArrayEntry("w", (count,), dtype, (count,), encoding=encoding)
    context = ts.Context({"memory_key_value_store": {}})
    memory = {"driver": "memory", "path": "w/"}
    store = ts.KvStore.open(memory, context=context).result()
    store.write("c/0", data).result()
    metadata = zarr_metadata(entry, Part.whole("w", (count,), (count,)))
    assert [each["name"] for each in metadata["codecs"]] == ["bytes", "blosc"]
    store.write("zarr.json", chunk_encoding.zarr_json(metadata)).result()
    opened = ts.open({"driver": "zarr3", "kvstore": memory}, context=context).result()
    found = np.ascontiguousarray(opened.read().result())
    assert opened.dtype.name == dtype
    return found.view(np.uint8)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(DTYPES),
    st.integers(1, 6000) | st.integers(260_000, 700_000),
    st.integers(0, 99),
)
def test_tensorstore_reads_them(kind: str, dtype: str, count: int, seed: int) -> None:
    itemsize = dtypes.from_name(dtype).itemsize
    data = values("few" if dtype == "bool" else kind, count, itemsize, seed)
    frame = blosc_frames.compressed(data, itemsize, blosc_frames.compressor())
    if frame is not None:
        assert len(frame) < 0.97 * len(data)
        assert read(bytes(frame), dtype, count).tobytes() == data.tobytes()
    elif kind in ("zeros", "ramp") and len(data) > 4096:
        pytest.fail("it should be shorter")
    header = blosc_frames.stored_header(len(data), itemsize)
    stored = bytes(header) + data.tobytes()
    assert read(stored, dtype, count).tobytes() == data.tobytes()


@pytest.mark.parametrize("kind", ["half random", "few", "random"])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_blocks_of_every_length(kind: str, itemsize: int) -> None:
    block = blosc_frames.BLOCK_BYTES // itemsize
    dtype = {1: "int8", 2: "bfloat16", 4: "int32", 8: "complex64", 16: "complex128"}[itemsize]
    for count in (1, 127, 128, 129, block - 1, block, block + 1, 2 * block, 3 * block + 5):
        data = values(kind, count, itemsize, 3)
        frame = blosc_frames.compressed(data, itemsize, blosc_frames.compressor())
        assert frame is None or kind != "random"
        assert frame is not None or kind == "random" or count < 2000
        if frame is not None:
            assert read(bytes(frame), dtype, count).tobytes() == data.tobytes()


def test_planes_that_shrink_only_in_some_blocks_are_found_again() -> None:
    block = blosc_frames.BLOCK_BYTES
    data = np.concatenate([values("random", block * 5, 1, 1), values("zeros", block * 20, 1, 1)])
    frame = blosc_frames.compressed(data, 1, blosc_frames.compressor())
    assert frame is not None
    assert len(frame) < 5.1 * block
    assert read(bytes(frame), "uint8", len(data)).tobytes() == data.tobytes()


def test_trained_weights_shrink_by_two_fifths_and_more() -> None:
    import ml_dtypes

    rng = np.random.default_rng(0)
    rows = rng.standard_normal((512, 4096)) * np.exp(rng.normal(-4, 0.5, (512, 1)))
    data = chunk_encoding.bytes_of(rows.astype(ml_dtypes.bfloat16))
    frame = blosc_frames.compressed(data, 2, blosc_frames.compressor())
    assert frame is not None
    assert len(data) / len(frame) > 1.45
