"""Tensors that have the memory of NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from unickpt.adapters.torch_distributed import TO_NUMPY
from unickpt.arrays.dtypes import Array

FROM_NUMPY = {dtype: torch_dtype for torch_dtype, dtype in TO_NUMPY.items()}


def as_torch(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this dtype, which has an array's memory."""
    if dtype in (torch.bfloat16,) or dtype.itemsize == 1:
        bits = np.dtype(f"i{dtype.itemsize}" if dtype.itemsize > 1 else "u1")
        return torch.from_numpy(array.view(bits)).view(dtype)
    return torch.from_numpy(array)


def from_numpy(array: Array) -> Any:
    """A tensor of an array's memory; an array of a dtype that torch lacks is returned unchanged."""
    dtype = FROM_NUMPY.get(array.dtype)
    return array if dtype is None else as_torch(array, dtype)
