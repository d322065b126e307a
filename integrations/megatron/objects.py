"""The values of Megatron's sharded objects: stored as their parts, and restored exactly.

Only objects of unknown classes are pickled; those are opaque, and unpickled only on the user's
request. Other values than plain Python containers are stored in a wrapper with the name of their
type, so that names are the same as in Megatron's own files.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from unickpt import Opaque
from unickpt.errors import LoadMismatch, UnsupportedFormat, UnsupportedLeaf
from unickpt.extend import (
    PYTHON_TYPES,
    Leaf,
    Node,
    SavedOnly,
    StoredType,
    has_known_factory,
    is_plain,
    quoted,
)
from unickpt.integrations.torch_types import OF_TORCH, class_name
from unickpt.types import LocalFragments

_MARK = "megatron "
_TENSOR, _ON_DEVICE, _NUMPY, _SCALAR = "tensor", "tensor on a device", "numpy", "numpy scalar "
_KINDS = "?biufc"  # of NumPy's dtypes
_TYPES = (
    *PYTHON_TYPES,
    *OF_TORCH,
    StoredType("BytesIO", (io.BytesIO,), io.BytesIO.getvalue, io.BytesIO),
    StoredType(_TENSOR, (), lambda x: x, lambda x: x),
    StoredType(_ON_DEVICE, (), lambda x: x, lambda x: x.to(torch.cuda.current_device())),
)
_BY_NAME = {kind.name: kind for kind in _TYPES}
_BY_CLASS = {cls: kind for kind in _TYPES for cls in kind.kinds}


class _Typed(SavedOnly):
    """A value that is stored as another; a wrapper in the tree. Its subclasses have the names of
    types."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def state_dict(self) -> Any:
        return self._stored


@cache
def _wrapper(name: str) -> type[_Typed]:
    return type(f"{_MARK}{name}", (_Typed,), {})


def stored_form(value: Any, where: str) -> Any:
    """A value as unickpt can store it.

    Arguments:
        value: of a `ShardedObject`.
        where: its name, for errors.

    Raises:
        UnsupportedLeaf: part of it can neither be stored nor pickled.
    """
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        kind = _TENSOR if tensor.device.type == "cpu" else _ON_DEVICE
        return _wrapper(kind)(LocalFragments.whole(tensor))
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        return _wrapper(_NUMPY)(LocalFragments.whole(value))
    if isinstance(value, np.generic) and value.dtype.kind in _KINDS.replace("c", ""):
        return _wrapper(f"{_SCALAR}{value.dtype.name}")(value.item())
    if is_plain(value):
        return value
    if type(value) in (dict, OrderedDict) and all(type(key) in (str, int) for key in value):
        return type(value)((k, stored_form(x, f"{where}/{k}")) for k, x in value.items())
    if type(value) in (list, tuple):
        return type(value)(stored_form(x, f"{where}/{n}") for n, x in enumerate(value))
    if type(value) in (dict, OrderedDict):
        return _typed("items", value, where)
    stored_type = _BY_CLASS.get(type(value))
    if stored_type is not None and has_known_factory(value):
        return _typed(stored_type.name, value, where)
    return _opaque(value, where)


def _typed(name: str, value: Any, where: str) -> _Typed:
    return _wrapper(name)(stored_form(_BY_NAME[name].store(value), where))


def _opaque(value: Any, where: str) -> Opaque:
    try:
        data = pickle.dumps(value)
    except Exception as error:
        raise UnsupportedLeaf(
            f"{where!r}: a {class_name(value)} is no plain value and cannot be pickled: {error}; "
            "wrap it in a LocalNonpersistentObject, or leave it out"
        ) from error
    return Opaque(class_name(value), data)


def empty(node: Node | Leaf, entry: Callable[[str], Any], kind: str = "") -> dict[str, Any]:
    """New memory for the arrays of a stored value, by name.

    Arguments:
        node: its structure.
        entry: the shape and dtype of a stored array; None of a plain value.
        kind: of the wrapper around it.
    """
    if isinstance(node, Leaf):
        array = entry(node.name)
        if array is None:
            return {}
        if kind in (_TENSOR, _ON_DEVICE):
            dtype = getattr(torch, str(array.dtype))
            return {node.name: torch.empty(tuple(array.shape), dtype=dtype)}
        return {node.name: np.empty(array.shape, array.dtype)}
    below = _kind(node)
    return {
        name: memory
        for child in node.children
        for name, memory in empty(child, entry, below).items()
    }


def restored(
    node: Node | Leaf, values: Mapping[str, Any], arrays: Mapping[str, Any], unpickle: bool
) -> Any:
    """A value as it was.

    Arguments:
        node: its structure.
        values: the plain values by name.
        arrays: the arrays by name.
        unpickle: whether to unpickle opaque objects.

    Raises:
        LoadMismatch: something is opaque, and not to be unpickled.
        UnsupportedFormat: a type is not known, or does not fit the stored value.
    """
    if isinstance(node, Leaf):
        value = arrays[node.name] if node.name in arrays else values[node.name]
        if not isinstance(value, Opaque):
            return value
        if not unpickle:
            raise LoadMismatch(
                f"{node.name!r} is stored as a pickle of {value.class_name}; "
                "LoadStrategy(unpickle=True) unpickles it, which runs code that the checkpoint "
                "names: do so only with checkpoints that you trust"
            )
        return pickle.loads(value.pickle)
    children = [restored(child, values, arrays, unpickle) for child in node.children]
    container, name = node.rebuild(children), _kind(node)
    if not name:
        return container
    try:
        if name.startswith(_SCALAR):
            return np.dtype(name.removeprefix(_SCALAR)).type(container)
        return _BY_NAME[name].restore(container)
    except Exception as error:
        raise UnsupportedFormat(
            f"a value is stored as {quoted(name)}, which this version of unickpt cannot restore: "
            f"{error!r}"
        ) from error


def _kind(node: Node) -> str:
    """The name of the original type of a stored value, if it is within our wrapper."""
    ours = node.kind == "wrapper" and node.type_name.startswith(_MARK)
    return node.type_name.removeprefix(_MARK) if ours else ""
