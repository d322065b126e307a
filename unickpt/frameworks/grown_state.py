"""Grown state: extends the state of a fresh object to the members that the checkpoint has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from unickpt.frameworks.adapter_protocol import StoredTree
from unickpt.trees import tree

MakeArray = Callable[[Any], Any]
"""Makes an array to load a stored one into."""
_DICTS, _SEQUENCES = ("dict", "ordereddict"), ("list", "tuple")


def with_grown(state: Any, name: str, stored: StoredTree, make: MakeArray | None) -> Any:
    """The state of a fresh object, in which containers have the members that are stored.

    An empty container, None and an array without elements become their stored counterparts. Other
    lists, tuples and nested dicts gain the stored members without arrays. The keys of the state
    itself stay: they are the object's attributes, so a difference there is one of classes.

    Arguments:
        state: the result of the object's `state_dict`.
        name: of the object in the tree.
        stored: the checkpoint.
        make: makes arrays; None if their framework is not known, so that none are made.

    Example:
        >>> from unickpt.trees.tree_json import from_json
        >>> values = {"losses/0": 3.0, "losses/1": 2.0}
        >>> node = from_json({"dict": [["losses", {"list": ["*", "*"]}]]})
        >>> with_grown({"losses": []}, "", StoredTree(values, lambda: node), None)
        {'losses': [3.0, 2.0]}
    """
    members = list(_members(state))
    itself = isinstance(state, list | tuple) or (isinstance(state, dict) and not members)
    if not itself and not any(x is None or isinstance(x, dict | list | tuple) for x in members):
        return state
    return _GrownLeaves(stored, make).grown(state, stored.find(name), is_whole=True)


def first_array(value: Any, is_array: Callable[[Any], bool]) -> Any:
    """The first array of a state; None if there is none."""
    if is_array(value):
        return value
    return next((x for v in _members(value) if (x := first_array(v, is_array)) is not None), None)


class _GrownLeaves:
    def __init__(self, stored: StoredTree, make: MakeArray | None) -> None:
        self._stored, self._make = stored, make

    def grown(self, value: Any, node: tree.Node | tree.Leaf | None, is_whole: bool = False) -> Any:
        """A value of the state; `is_whole` if it is the whole state."""
        node = tree.unwrapped(node)
        if node is None:
            return value
        if value is None:
            return self._made(node) if self._can_make(node, arrays=True) else None
        if isinstance(node, tree.Leaf):
            return self._grown_array(value, node.name)
        if isinstance(value, dict) and node.kind in _DICTS:
            return self._grown_dict(value, node, is_whole)
        if type(value) in (list, tuple) and node.kind in _SEQUENCES:
            members = [*map(self.grown, value, node.children), *value[len(node.children) :]]
            added = node.children[len(value) :]
            if all(self._can_make(child, arrays=not value) for child in added):
                members += map(self._made, added)
            return type(value)(members)
        return value

    def _grown_dict(self, value: dict[Any, Any], node: tree.Node, is_whole: bool) -> Any:
        children = tree.by_key(node)
        members = {key: self.grown(member, children.get(key)) for key, member in value.items()}
        for key, child in children.items() if not (is_whole and value) else ():
            if key not in value and self._can_make(child, arrays=not value):
                members[key] = self._made(child)
        filled = copy.copy(value)  # keeps the class
        filled.update(members)
        return filled

    def _grown_array(self, value: Any, name: str) -> Any:
        entry: Any = self._stored.get(name)
        shape = tuple(getattr(value, "shape", ()))
        if self._make is None or 0 not in shape or not hasattr(entry, "shape"):
            return value
        return value if shape == tuple(entry.shape) else self._make(entry)

    def _can_make(self, node: tree.Node | tree.Leaf, arrays: bool) -> bool:
        names = [leaf.name for leaf in tree.leaves(node)]
        if not all(name in self._stored for name in names):
            return False  # the load leaves some out
        has_arrays = any(hasattr(self._stored[name], "shape") for name in names)
        return not has_arrays or (arrays and self._make is not None)

    def _made(self, node: tree.Node | tree.Leaf) -> Any:
        return tree.rebuild(node, self._made_leaf)

    def _made_leaf(self, name: str) -> Any:
        entry = self._stored[name]
        if not hasattr(entry, "shape"):
            return entry
        assert self._make is not None, "_can_make was checked"
        return self._make(entry)


def _members(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
