"""Converters: a user's function on trees of arrays, called with our own arrays."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from unickpt import Checkpoint
from unickpt.errors import RuleError
from unickpt.extend import (
    Array,
    DType,
    Expansion,
    Leaf,
    Node,
    adapters,
    counted,
    dtype_from_name,
    dtype_name,
    expand_leaf,
    first_few,
    flatten_tree,
    is_saved_as_leaf,
    leaves_of_tree,
    opened_checkpoint,
    rebuild_tree,
    tree_from_json,
)

FRAMEWORKS = ("numpy", "torch", "jax")


@dataclass(frozen=True)
class Example:
    """The arguments of a converter.

    Arguments:
        node: the containers.
        arrays: shape and dtype of each array, by name.
        plain: the leaves that are no arrays, by name.
        framework: whose arrays these are.
    """

    node: Node | Leaf
    arrays: Mapping[str, tuple[tuple[int, ...], DType]]
    plain: Mapping[str, Any]
    framework: str

    @classmethod
    def of(cls, source: Any, framework: str | None) -> Example:
        """The example that a user gives.

        Arguments:
            source: a tree of arrays, of objects with a shape and a dtype, or of shapes; or a
                checkpoint.
            framework: of the arrays that the converter gets; None for that of `source`.

        Raises:
            RuleError: there is no array in it, or the framework is not known.
        """
        if isinstance(source, str | PathLike | Checkpoint):
            return cls._of_checkpoint(opened_checkpoint(source), framework or "numpy")
        node = _flattened(source, is_example=True)
        arrays, plain, frameworks = {}, {}, set()
        for leaf in leaves_of_tree(node):
            shape = _shape_of(leaf.value)
            if shape is None:
                plain[leaf.name] = leaf.value
                continue
            arrays[leaf.name] = shape, _dtype_of(leaf.value, leaf.name)
            frameworks.add(_framework_of(leaf.value))
        if not arrays:
            raise RuleError(
                "the example has no arrays: give a dict of arrays, or of shapes such as "
                "{'layers.0.weight': (4, 6)}"
            )
        return cls(node, arrays, plain, framework or max(frameworks, key=FRAMEWORKS.index))

    @classmethod
    def _of_checkpoint(cls, opened: Checkpoint, framework: str) -> Example:
        """The names, shapes and dtypes of a checkpoint; none of its elements is read."""
        index = opened.reader.index
        arrays = {
            name: (entry.shape, dtype_from_name(entry.dtype))
            for name, entry in index.entries.items()
        }
        return cls(tree_from_json(index.tree), arrays, index.values, framework)

    def __post_init__(self) -> None:
        if self.framework not in FRAMEWORKS:
            raise RuleError(f"framework={self.framework!r} must be one of {', '.join(FRAMEWORKS)}")

    def array(self, x: Array) -> Any:
        """A copy of an array, as one of the framework."""
        return _MAKERS[self.framework](np.array(x))


class Converter:
    """A function that is called with trees like an example, by name.

    Arguments:
        function: the converter.
        example: of its argument.
    """

    def __init__(self, function: Callable[[Any], Any], example: Example) -> None:
        self._function, self._example = function, example
        self.plain: Mapping[str, Any] = {}
        """The values that are not arrays in its last result, by name."""

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """All arrays that it returns; if it returns None, those in its changed argument."""
        example = self._example
        values = {name: example.array(x) for name, x in arrays.items()}
        argument = rebuild_tree(
            example.node, lambda name: values[name] if name in values else example.plain[name]
        )
        try:
            result = self._function(argument)
        except Exception as error:
            raise RuleError(self._failure(error)) from error
        made, self.plain = leaves_in(argument if result is None else result)
        return made

    def _failure(self, error: Exception) -> str:
        """The error of a converter, and the content of the example."""
        place = traceback.extract_tb(error.__traceback__)[-1]
        names = list(self._example.arrays)
        return (
            f"the converter {getattr(self._function, '__name__', self._function)} raised "
            f"{type(error).__name__}: {error}\n"
            f"the example has {counted(len(names), 'array')}: {first_few(list(map(repr, names)))}\n"
            "if the converter takes a part of a checkpoint, give that part: "
            "unickpt.open(path).under(name), on the command line --under NAME\n"
            f"raised at {place.filename}:{place.lineno}"
        )


def leaves_in(tree: Any) -> tuple[dict[str, Array], dict[str, Any]]:
    """All arrays in a converter's result, and all other values, by name."""
    if not hasattr(tree, "shape") and _is_pairs(tree):
        tree = dict(tree)
    arrays, plain = {}, {}
    for leaf in leaves_of_tree(_flattened(tree)):
        if hasattr(leaf.value, "shape") and hasattr(leaf.value, "dtype"):
            arrays[leaf.name] = to_numpy(leaf.value)
        else:
            plain[leaf.name] = leaf.value
    return arrays, plain


def _is_pairs(tree: Any) -> bool:
    """Whether it is a series of names with arrays, as the loaders of engines take and give."""
    if isinstance(tree, Iterator):
        return True
    return (
        isinstance(tree, list | tuple)
        and bool(tree)
        and all(isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], str) for x in tree)
    )


def _flattened(tree: Any, *, is_example: bool = False) -> Node | Leaf:
    among = adapters()

    def is_leaf(obj: Any) -> bool:
        if is_example and _is_shape(obj):
            return True
        if isinstance(obj, dict | list | tuple):
            return False
        if hasattr(obj, "shape") and hasattr(obj, "dtype"):
            return True
        return is_saved_as_leaf(obj, among)

    def expand(obj: Any, name: str) -> Expansion | None:
        level = expand_leaf(obj, name, among)
        if level is None and isinstance(obj, Mapping):
            keys = tuple(obj)
            return Expansion(
                "dict", keys, tuple(obj.values()), lambda xs: dict(zip(keys, xs, strict=True))
            )
        return level

    return flatten_tree(tree, is_leaf, expand, "a converter's arrays cannot be named")


def _is_shape(obj: Any) -> bool:
    return isinstance(obj, tuple | list) and all(type(n) is int for n in obj)


def _shape_of(leaf: Any) -> tuple[int, ...] | None:
    if _is_shape(leaf):
        return tuple(leaf)
    return tuple(leaf.shape) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else None


def _dtype_of(leaf: Any, name: str) -> DType:
    if _is_shape(leaf):
        return np.dtype(np.float32)
    text = str(leaf.dtype).removeprefix("torch.").removeprefix("<dtype: ").rstrip(">")
    try:
        return dtype_from_name(text) if "<class" not in text else np.dtype(leaf.dtype)
    except TypeError:
        raise RuleError(f"{name!r} is of dtype {text}, which cannot be stored") from None


def _framework_of(leaf: Any) -> str:
    module = type(leaf).__module__
    return "torch" if module.startswith("torch") else "jax" if module.startswith("jax") else "numpy"


# --- arrays of frameworks -------------------------------------------------------------------------


def to_numpy(array: Any) -> Array:
    """A copy of an array of any framework."""
    if not hasattr(array, "detach"):
        return np.array(array)
    torch = sys.modules["torch"]
    tensor = array.detach().cpu().contiguous()
    dtype = dtype_from_name(str(tensor.dtype).removeprefix("torch."))
    if dtype.isbuiltin == 1:
        return np.array(tensor.numpy())
    bits = torch.uint8 if dtype.itemsize == 1 else torch.int16
    copy: Array = np.array(tensor.view(bits).numpy()).view(dtype)
    return copy


def _to_torch(array: Array) -> Any:
    torch = importlib.import_module("torch")
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    bits = np.uint8 if array.dtype.itemsize == 1 else np.int16
    return torch.from_numpy(array.view(bits)).view(getattr(torch, dtype_name(array.dtype)))


_MAKERS: Mapping[str, Callable[[Array], Any]] = {
    "numpy": lambda array: array,
    "torch": _to_torch,
    "jax": lambda array: importlib.import_module("jax.numpy").asarray(array),
}
