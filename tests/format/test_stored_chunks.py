"""The bytes of uncompressed chunks: those that TensorStore writes for the same array."""

from __future__ import annotations

import math

import numpy as np
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.format import chunk_encoding
from unickpt.format.chunk_encoding import zarr_metadata
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry

SHAPES = st.lists(st.integers(1, 7), max_size=3).map(tuple)


def entry(dtype: str, shape: tuple[int, ...], chunk: tuple[int, ...]) -> ArrayEntry:
    return ArrayEntry("w", shape, dtype, chunk)


@settings(max_examples=60)
@given(
    SHAPES,
    st.data(),
    st.sampled_from(
        ["float32", "bool", "bfloat16", "int4", "complex64", "float8_e4m3fn", "uint16"]
    ),
)
def test_they_are_those_of_tensorstore(
    shape: tuple[int, ...], data: st.DataObject, dtype: str
) -> None:
    chunk = tuple(data.draw(st.integers(1, size)) for size in shape)
    described, part = entry(dtype, shape, chunk), Part.covering("w", Box.whole(shape), chunk)
    kind = dtypes.from_name(dtype)
    rng = np.random.default_rng(math.prod(shape))
    values = rng.integers(0, 2, shape).astype(kind)
    if kind.itemsize > 1:
        raw = rng.integers(0, 256, (*shape, kind.itemsize), dtype=np.uint8)
        values = raw.view(kind).reshape(shape)
    store = ts.KvStore.open({"driver": "memory", "path": f"{rng.integers(1 << 60)}/"}).result()
    metadata = zarr_metadata(described, part)
    spec = {
        "driver": "zarr3",
        "kvstore": store.spec().to_json(),
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,
    }
    context = ts.Context()
    array = ts.open(spec, create=True, context=context).result()
    kv = ts.KvStore.open(store.spec().to_json(), context=context).result()
    for number in range(part.count):
        box = part.chunk_box(number)
        one = values[box.slices].copy()
        array[box.slices].write(chunk_encoding.as_stored(one, dtype)).result()
        expected = kv.read(part.chunk_key(number)).result().value
        found = b"".join(chunk_encoding.raw(part, one))
        assert found == expected, box
