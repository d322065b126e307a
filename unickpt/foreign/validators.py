"""Checks of what files say, as all formats need them; the files are untrusted."""

from __future__ import annotations

from typing import Any

from unickpt.quoting import quoted

_MOST_SIZE = 1 << 62
MOST_RANK = 32
"""Dimensions of an array, in formats that have no limit of their own."""


def is_size(found: Any) -> bool:
    """Whether a value is an extent, an offset or a number of elements or bytes."""
    return type(found) is int and 0 <= found < _MOST_SIZE


def sizes(found: Any, most: int = MOST_RANK) -> tuple[int, ...]:
    """A value that must be a list or tuple of sizes, such as a shape.

    Arguments:
        found: the value.
        most: how many there may be.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(found, list | tuple) or len(found) > most or not all(map(is_size, found)):
        raise ValueError(f"{quoted(found)} is not a list of sizes")
    return tuple(found)
