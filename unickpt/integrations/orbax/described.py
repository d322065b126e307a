"""Abstract arrays, as Orbax and JAX take them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

_ShapeDtypeStruct: Any = jax.ShapeDtypeStruct  # which has no types


def abstract_array(shape: Any, dtype: Any, sharding: Any = None) -> Any:
    """What to load an array into; a NumPy array, if JAX would truncate it to 32 bits."""
    if sharding is None and is_truncated(dtype):
        return np.empty(tuple(shape), dtype)
    return _ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


def is_truncated(dtype: Any) -> bool:
    """Whether JAX would make 32 bits of a dtype's 64, as it does without `jax_enable_x64`."""
    return bool(jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True) != dtype)
