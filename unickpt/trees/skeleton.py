"""The structure of a tree without what is in it, to recognise a tree of the same structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unickpt.trees.tree import Expand, Key, Leaf, Node, child_names


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A container's structure; holds neither the container nor its leaves.

    Arguments:
        name: of the container in its tree.
        of: its type.
        kind, keys, type_name: as of `Node`.
        children: their structures; None for a leaf.
    """

    name: str
    of: type
    kind: str
    keys: tuple[Key, ...]
    type_name: str
    children: tuple[Skeleton | None, ...]

    def is_of(self, kind: str, keys: tuple[Key, ...], type_name: str) -> bool:
        """Whether a container has this structure, but for its children."""
        return (
            kind == self.kind
            and keys == self.keys
            and type_name == self.type_name
            and list(map(type, keys)) == list(map(type, self.keys))  # because 1 == True
        )


def skeleton(root: Node | Leaf) -> Skeleton | None:
    """The structure of a flattened tree; None if it is a leaf, or contains a wrapped leaf."""
    return _skeleton(root, "") if isinstance(root, Node) else None


def _skeleton(node: Node, name: str) -> Skeleton | None:
    if node.original is None:
        return None
    names = child_names(node.kind, node.keys, name)
    children = []
    for child, child_name in zip(node.children, names, strict=True):
        below = _skeleton(child, child_name) if isinstance(child, Node) else None
        if below is None and isinstance(child, Node):
            return None
        children.append(below)
    of = type(node.original)
    return Skeleton(name, of, node.kind, node.keys, node.type_name, tuple(children))


def leaves_of(root: Any, like: Skeleton, level: Expand) -> list[Any] | None:
    """The values of a tree's leaves, in the order of its containers.

    Arguments:
        root: the tree.
        like: the structure that it may have.
        level: expands one level of a container, as `tree.flatten` does it.

    Returns:
        None if it has another structure.
    """
    found: list[Any] = []
    return found if _collect(root, like, level, found) else None


def _collect(obj: Any, like: Skeleton, level: Expand, found: list[Any]) -> bool:
    children = _children(obj, like, level)
    if children is None:
        return False
    if not any(like.children):
        found.extend(children)
        return True
    for child, below in zip(children, like.children, strict=True):
        if below is None:
            found.append(child)
        elif not _collect(child, below, level, found):
            return False
    return True


def _children(obj: Any, like: Skeleton, level: Expand) -> Any:
    """The children of a container; None if it has another structure."""
    of = type(obj)
    if of is not like.of:
        return None
    if of is dict:
        return obj.values() if like.is_of("dict", tuple(obj), "") else None
    if of is list or of is tuple:
        return obj if len(obj) == len(like.children) else None
    found = level(obj, like.name)
    if found is None or not like.is_of(found.kind, found.keys, found.type_name):
        return None
    return found.children
