"""Tensors in plain state: stored as arrays with a mark, and restored as tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from unickpt.errors import CheckpointCorrupt, UnsupportedLeaf
from unickpt.extend import dtype_name, quoted

_TENSOR, _DTYPE = "torch.Tensor", "dtype"


def packed(state: Any, what: str) -> Any:
    """A state in which tensors are packed into dicts that say so.

    Arguments:
        state: containers, plain values and tensors.
        what: names its owner, for errors.

    Raises:
        UnsupportedLeaf: it holds a DTensor, or a value that looks like a packed tensor.
    """
    if isinstance(state, torch.Tensor):
        if hasattr(state, "placements"):
            raise UnsupportedLeaf(f"{what} holds a DTensor: register its module or optimizer")
        return {_TENSOR: state.detach().cpu(), _DTYPE: str(state.dtype).removeprefix("torch.")}
    if isinstance(state, dict) and state.keys() == {_TENSOR, _DTYPE}:
        raise UnsupportedLeaf(
            f"{what} has a dict with the keys {_TENSOR!r} and {_DTYPE!r}, by which tensors are "
            "known; give them other names"
        )
    return _with_each(state, lambda value: packed(value, what))


def unpacked(state: Any, what: str) -> Any:
    """The original state of `packed`; `what` is for messages."""
    if isinstance(state, dict) and state.keys() == {_TENSOR, _DTYPE}:
        return _tensor(state[_TENSOR], state[_DTYPE], what)
    return _with_each(state, lambda value: unpacked(value, what))


def _with_each(state: Any, change: Callable[[Any], Any]) -> Any:
    """A container with a function applied to each of its values; anything else unchanged."""
    if isinstance(state, dict):
        kind = OrderedDict if isinstance(state, OrderedDict) else dict  # as the format knows them
        return kind((key, change(value)) for key, value in state.items())
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*map(change, state))
    return type(state)(map(change, state)) if type(state) in (list, tuple) else state


def _tensor(stored: Any, name: Any, what: str) -> torch.Tensor:
    """The tensor of an array, which must be of the dtype that was stored with it."""
    array = np.asarray(stored)
    # torch and the format have the same names.
    is_known = array.dtype.kind != "O" and name == dtype_name(array.dtype)
    dtype = getattr(torch, name, None) if is_known else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointCorrupt(
            f"{what}: an array of dtype {array.dtype} is said to be a tensor of dtype "
            f"{quoted(name)}. The checkpoint is damaged; load an earlier one"
        )
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.tobytes()), dtype=dtype).reshape(array.shape)
