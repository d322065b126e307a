"""The memory of arrays that a load makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import unickpt
from unickpt.arrays import dtypes
from unickpt.frameworks.host_memory import new_array


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "int4", "complex128", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (0, 3), (70_001,), (301, 7, 211)])
def test_a_new_array_is_as_any_other(shape: tuple[int, ...], dtype: str) -> None:
    array = new_array(shape, dtypes.from_name(dtype))
    plain = np.empty(shape, dtypes.from_name(dtype))
    array.fill(1)
    plain.fill(1)
    assert (array.shape, array.strides, array.dtype) == (plain.shape, plain.strides, plain.dtype)
    assert array.tobytes() == plain.tobytes()
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.flags.aligned


def test_without_memory_the_error_has_the_shape() -> None:
    with pytest.raises(MemoryError, match=r"shape \(65536, 1073741824\) and data type float32"):
        new_array((1 << 16, 1 << 30), np.dtype(np.float32))
    with pytest.raises(ValueError, match="array is too big"):
        new_array((1 << 62, 1 << 20), np.dtype(np.float32))


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("chunk_bytes", [None, 40_000])
def test_a_large_array_begins_where_the_system_copies_fast_and_jax_does_not_share(
    tmp_path: Path, chunk_bytes: int | None
) -> None:
    state = {"w": np.arange(70_001, dtype=np.float32), "b": np.arange(5.0)}
    options = unickpt.SaveOptions(**({} if chunk_bytes is None else {"chunk_bytes": chunk_bytes}))
    unickpt.save(tmp_path / "c", state, options=options)
    loaded = unickpt.load(tmp_path / "c")
    assert address(loaded["w"]) % 64 == 32
    put = jax.device_put(loaded["w"])
    put.block_until_ready()
    loaded["w"][:] = 0
    assert np.asarray(put).tobytes() == state["w"].tobytes()
