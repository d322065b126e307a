"""What tests do with older versions of torch: make test-oldest runs them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest


def has_torch(wanted: str) -> bool:
    """Whether torch is of this version, such as "2.8", or newer; True without torch."""
    try:
        found = version("torch")
    except PackageNotFoundError:  # it is for the test to say so
        return True
    return _numbers(found) >= _numbers(wanted)


def needs_torch(wanted: str, what: str) -> pytest.MarkDecorator:
    """Skips a test with older versions of torch.

    Arguments:
        wanted: the first version with which it runs.
        what: that version has.
    """
    return pytest.mark.skipif(not has_torch(wanted), reason=f"torch {wanted} has {what}")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.partition("+")[0].split(".")[:2]]


DCP_ALONE: dict[str, Any] = {"no_dist": True} if has_torch("2.8") else {}
"""Arguments with which DCP's functions are for this process alone; older ones guess it."""
