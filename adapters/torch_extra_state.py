"""Extra states of modules, which a load makes of the checkpoint, as `load_state_dict` does."""

from __future__ import annotations

import copy
import enum
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from unickpt.adapters.torch_fresh_state import dtype_of
from unickpt.arrays import dtypes
from unickpt.frameworks.adapter_protocol import StoredTree
from unickpt.trees.tree import Leaf, Node, by_key

_KEY = "_extra_state"  # as torch calls it
_CONTAINERS = ("dict", "ordereddict", "list", "tuple", "namedtuple")


def with_extra_states(
    state: dict[str, Any], names: Mapping[str, str], name: str, stored: StoredTree
) -> dict[str, Any]:
    """The state of a module to load into, with extra states of the structure that is stored.

    Only the module knows which structure fits: torch passes the saved value to `set_extra_state`.

    Arguments:
        state: the `state_dict`.
        names: the keys in the checkpoint by the keys of the state.
        name: of the module in the tree.
        stored: the checkpoint.
    """
    keys = [key for key in state if key.rpartition(".")[2] == _KEY]
    node = stored.find(name) if keys else None
    if not isinstance(node, Node):
        return state
    children = by_key(node)
    new_state = copy.copy(state)  # with the versions of modules
    for key in keys:
        if names[key] in children:
            new_state[key] = _made(state[key], children[names[key]], stored)
    return new_state


def _made(value: Any, node: Node | Leaf, stored: StoredTree) -> Any:
    """The value to load into an extra state, or a part of it.

    Arguments:
        value: its value in the fresh module; None if nothing.
        node: the stored structure.
        stored: the checkpoint.
    """
    if isinstance(node, Leaf):
        return _made_leaf(value, stored[node.name]) if node.name in stored else value
    if node.kind == "wrapper" and node.type_name == io.BytesIO.__name__:
        return io.BytesIO()
    if node.kind == "wrapper" and not isinstance(value, enum.Enum):
        return _made(value, node.children[0], stored)
    if node.kind not in _CONTAINERS:
        return value
    children = zip(node.keys, node.children, strict=True)
    return node.rebuild([_made(_member(value, key), child, stored) for key, child in children])


def _member(value: Any, key: str | int) -> Any:
    if isinstance(value, dict):
        return value.get(key)
    if isinstance(value, list | tuple) and isinstance(key, int) and key < len(value):
        return value[key]
    return getattr(value, str(key), None) if hasattr(value, "_fields") else None


def _made_leaf(value: Any, entry: Any) -> Any:
    if not hasattr(entry, "shape"):
        return entry  # a plain value
    if isinstance(value, np.ndarray):
        return np.empty(entry.shape, dtypes.from_name(entry.dtype))
    is_tensor = isinstance(value, torch.Tensor)
    dtype = dtype_of(entry)
    if is_tensor and (tuple(value.shape), value.dtype) == (tuple(entry.shape), dtype):
        return value
    device = value.device if is_tensor and not value.is_meta else "cpu"
    return torch.empty(entry.shape, dtype=dtype, device=device)
