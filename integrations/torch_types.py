"""How values of torch's own types are stored that the format does not know; see `StoredType`."""

from __future__ import annotations

from typing import Any

import torch

from unickpt.errors import CheckpointCorrupt
from unickpt.extend import StoredType, quoted


def dtype_named(name: Any) -> torch.dtype:
    """A dtype of torch, such as "bfloat16".

    Raises:
        CheckpointCorrupt: torch has none of this name.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointCorrupt(f"torch has no dtype {quoted(name)}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype of torch, for `dtype_named`."""
    return str(dtype).removeprefix("torch.")


def class_name(value: object) -> str:
    """The name of a value's class, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


OF_TORCH = (
    StoredType("torch.Size", (torch.Size,), list, torch.Size),
    StoredType("torch.device", (torch.device,), str, torch.device),
    StoredType("torch.dtype", (torch.dtype,), dtype_name, dtype_named),
)
