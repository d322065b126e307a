"""The codes that stand for elements: how many bits they have, and for which dtypes."""

from __future__ import annotations

from unickpt.extend import DType, dtype_from_name

BITS = {"uint8": 8, "int4": 4, "int3": 3, "int2": 2}
"""The codes that count steps between a block's smallest and largest element, and their bits."""
ROUNDED = "bfloat16"
"""The code that is the element itself, rounded to bfloat16."""
NAMES = (*BITS, ROUNDED)
_SOURCES = ("float32", "float64", "bfloat16", "float16")


def check(codes: str, dtype: str) -> None:
    """Checks that elements of a dtype can be stored as codes.

    Raises:
        TypeError: they cannot; says why.
    """
    if codes not in NAMES:
        raise TypeError(f"{codes!r} is not one of {', '.join(NAMES)}")
    if dtype not in _SOURCES:
        raise TypeError(f"{dtype} is not one of {', '.join(_SOURCES)}")
    if codes == ROUNDED and dtype_from_name(dtype).itemsize <= 2:
        raise TypeError(f"{dtype} has no more bytes than {ROUNDED}")


def working(dtype: str) -> DType:
    """The dtype of decoded codes and of stored scales: float64 for `float64`, float32 for
    others."""
    return dtype_from_name("float64" if dtype == "float64" else "float32")
