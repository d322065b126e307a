"""What each process stored for itself, as a `Reader` returns it."""

from __future__ import annotations

from typing import Any

from unickpt.frameworks import per_process
from unickpt.frameworks.registry import adapters


def encoded(value: Any) -> bytes:
    """The value of one process: containers of plain values and of NumPy arrays.

    Raises:
        UnsupportedLeaf: names what cannot be stored.
    """
    return per_process.encode(value, adapters())
