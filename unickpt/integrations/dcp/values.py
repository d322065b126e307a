"""State dicts as torch.distributed.checkpoint sees them: which values of a tree are one item."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from unickpt.errors import LoadMismatch
from unickpt.trees.plain_values import Plain
from unickpt.trees.tree import Key, Leaf, Node, rebuild

Path = tuple[Key, ...]
Values = Mapping[str, Plain]

BYTES = "TorchSaved"
"""The name of the type of a wrapper around bytes that a planner made of an object."""


def items(
    node: Node | Leaf, values: Values, above: Path = ()
) -> Iterator[tuple[Path, Node | Leaf]]:
    """The items of a stored tree, with the keys that lead to each.

    As in DCP, dicts are always taken apart, lists only if arrays or dicts are in them, and tuples
    only if they cannot be values.

    Arguments:
        node: the structure.
        values: the plain values, by name.
        above: the keys that lead to `node`.
    """
    whole = isinstance(node, Leaf) or node.type_name == BYTES
    if whole or (_is_sequence(node) and is_value(node, values)):
        yield above, node
        return
    assert isinstance(node, Node)
    for key, child in zip(node.keys, node.children, strict=True):
        yield from items(child, values, above if node.kind == "wrapper" else (*above, key))


def is_value(node: Node | Leaf, values: Values) -> bool:
    """Whether a part of a tree consists of values and sequences alone."""
    if isinstance(node, Leaf):
        return node.name in values
    if node.kind == "wrapper" or _is_sequence(node):
        return all(is_value(child, values) for child in node.children)
    return False


def value_of(node: Node | Leaf, values: Values) -> Any:
    """The value that such a part holds."""
    return rebuild(node, values.__getitem__)


def portable(given: Any) -> Any:
    """A state dict to save, in which what is in an `io.BytesIO` is bytes."""
    if type(given) in (dict, OrderedDict):
        return type(given)((key, portable(value)) for key, value in given.items())
    if type(given) is list:
        return [portable(value) for value in given]
    return given.getvalue() if isinstance(given, io.BytesIO) else given


def with_stored_lists(given: Any, node: Node | Leaf | None, values: Values) -> Any:
    """A state dict to load into, in which lists of values have the length that is stored, and an
    `io.BytesIO` is bytes.

    To DCP such a list is one item, which a load replaces as a whole.

    Arguments:
        given: a state dict, or a part of it.
        node: the same part of what is stored, if it is there.
        values: the stored plain values, by name.

    Raises:
        LoadMismatch: an object is asked for that is stored as pickled bytes.
    """
    while isinstance(node, Node) and node.kind == "wrapper":
        (child,) = node.children
        if node.type_name == BYTES and isinstance(child, Leaf):
            raise LoadMismatch(
                f"{child.name!r} was stored by a StorageWriter, as bytes that only torch's planner "
                "unpickles: load it with torch.distributed.checkpoint.load and "
                "unickpt.integrations.dcp.StorageReader(path)"
            )
        node = child
    if isinstance(given, io.BytesIO):
        return b""
    if node is not None and _is_sequence(node) and is_value(node, values) and _is_whole(given):
        return value_of(node, values)
    below = zip(node.keys, node.children, strict=True) if isinstance(node, Node) else ()
    children = {str(key): child for key, child in below}
    if type(given) in (dict, OrderedDict):
        adopted = (with_stored_lists(v, children.get(str(k)), values) for k, v in given.items())
        return type(given)(zip(given, adopted, strict=True))
    if type(given) is list:
        numbered = enumerate(given)
        return [with_stored_lists(v, children.get(str(n)), values) for n, v in numbered]
    return given


def filled(given: Any, found: Any) -> Any:
    """What was loaded, in the dicts and lists that were given: DCP changes these in place."""
    if given is found:
        return given
    if isinstance(given, dict) and isinstance(found, dict):
        for key, value in found.items():
            given[key] = filled(given[key], value)
        return given
    if isinstance(given, list) and isinstance(found, list):
        same = len(given) == len(found)
        given[:] = [filled(*pair) for pair in zip(given, found, strict=True)] if same else found
        return given
    return io.BytesIO(found) if isinstance(given, io.BytesIO) else found


def _is_sequence(node: Node | Leaf) -> bool:
    return isinstance(node, Node) and node.kind in ("list", "tuple", "namedtuple")


def _is_whole(given: Any) -> bool:
    """Whether DCP would replace this as a whole."""
    if isinstance(given, list | tuple):
        return all(map(_is_whole, given))
    return not isinstance(given, Mapping | torch.Tensor)
