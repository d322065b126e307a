"""The dtypes a checkpoint can hold: their names, their NumPy form, and how zarr stores them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from unickpt.quoting import quoted

Array = np.ndarray[Any, Any]

_NATIVE = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
_ML_DTYPES = (
    "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn",
    "int4", "int2",
)  # fmt: skip
# Dtypes that TensorStore's zarr3 driver lacks are stored as the same bits of another type.
_STORED_AS = {"float8_e4m3": "uint8"}

_TIME = r"(datetime64|timedelta64)(\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"

DType = np.dtype[Any]
# What to store instead of unsupported NumPy dtypes, by their kind.
_HINTS = {
    "U": ", store x.tolist()",
    "S": ", store x.tolist()",
    "O": ", store x.tolist(), if it holds plain values",
    "V": ", store each of its fields as an array",
    "f": ", store x.astype(numpy.float64), which is less precise",
    "c": ", store x.astype(numpy.complex128), which is less precise",
}


_BY_NAME: dict[str, DType] = {
    **{name: np.dtype(name) for name in _NATIVE},
    **{n: np.dtype(getattr(ml_dtypes, n)) for n in _ML_DTYPES if hasattr(ml_dtypes, n)},
}
_BY_DTYPE = {dtype: name for name, dtype in _BY_NAME.items()}


def supported() -> tuple[str, ...]:
    """Names of all supported dtypes except datetime64 and timedelta64."""
    return tuple(_BY_NAME)


def with_shape(dtype: str, shape: Sequence[int]) -> str:
    """A dtype and a shape as text.

    Example:
        >>> with_shape("bfloat16", (2, 3))
        'bfloat16[2, 3]'
    """
    return f"{dtype}{list(shape)}"


@lru_cache(maxsize=256)
def name_of(dtype: DType) -> str:
    """The checkpoint's name of a NumPy dtype, without byte order.

    Raises:
        TypeError: the dtype is not supported.
    """
    little = dtype.newbyteorder("=")
    if little in _BY_DTYPE:
        return _BY_DTYPE[little]
    if dtype.kind in "mM" and re.fullmatch(_TIME, little.name):
        return little.name
    raise TypeError(
        f"dtype {dtype} cannot be stored{_hint(dtype)}; supported are "
        f"{', '.join(supported())}, datetime64 and timedelta64"
    )


def _hint(dtype: DType) -> str:
    """What to store instead of an array of an unsupported dtype."""
    if dtype.names == ("float0",):  # of JAX, for gradients of integers
        return ", and has no values: leave it out, or store None in its place"
    if dtype.kind == "V" and dtype.names is None:  # such as those of ml_dtypes
        if dtype.name.startswith("void"):
            return ", store x.view(numpy.uint8)"
        wide = {"u": "numpy.uint8", "i": "numpy.int8"}.get(dtype.name[0], "numpy.float32")
        return f", store x.astype({wide}), and call .astype({dtype.name!r}) after the load"
    return _HINTS.get(dtype.kind, "")


@lru_cache(maxsize=256)
def from_name(name: str) -> DType:
    """The NumPy dtype of a checkpoint's dtype name.

    Raises:
        TypeError: for an unknown name.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    if re.fullmatch(_TIME, name):  # NumPy's own parser divides by zero for `[s/0]`
        dtype = np.dtype(name)
        if dtype.name == name:
            return dtype
    raise TypeError(f"unknown dtype {quoted(name)}")


@lru_cache(maxsize=256)
def stored_as(name: str) -> str:
    """The zarr v3 data type whose bits hold a dtype of the checkpoint."""
    if name not in _BY_NAME and re.fullmatch(_TIME, name):
        return "int64"
    return _STORED_AS.get(name, name)


def castable(source: DType, target: DType) -> bool:
    """Whether `cast=True` may turn `source` into `target`: only within one kind of number."""
    return source == target or (kind(source) == kind(target) and kind(source) != "other")


def kind(dtype: DType) -> str:
    """'float', 'integer', 'complex' or 'other' (bool, dates)."""
    if dtype.kind == "c":
        return "complex"
    name = _BY_DTYPE.get(dtype, "")
    if name.startswith(("float", "bfloat")):
        return "float"
    return "integer" if name.startswith(("int", "uint")) else "other"


def constant(value: float, dtype: DType) -> Any:
    """A number as a scalar of a dtype; floats may lose precision.

    Raises:
        ValueError: the dtype cannot hold it.
    """
    with np.errstate(all="ignore"):
        scalar = np.asarray(value).astype(dtype)
    same = bool(scalar.astype(np.float64) == value)
    if not same and (kind(dtype) not in ("float", "complex") or not np.isfinite(scalar)):
        raise ValueError(f"{name_of(dtype)} cannot hold {value:g}")
    return scalar


def holds_all(target: DType, values: np.ndarray[Any, Any]) -> bool:
    """Whether an integer dtype holds all integers of an array; true for other kinds, which only
    lose precision."""
    if kind(target) != "integer" or not values.size:
        return True
    limits: Any = ml_dtypes.iinfo
    bounds = limits(target)
    wide = values.astype(np.int64) if values.dtype.itemsize == 1 else values
    return int(bounds.min) <= int(wide.min()) and int(wide.max()) <= int(bounds.max)
