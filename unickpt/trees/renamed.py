"""The structure of leaves that got new names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from unickpt.trees import tree, tree_json
from unickpt.trees.tree import Leaf, Node


def renamed(node: Node | Leaf, sources: Mapping[str, str], names: Collection[str]) -> Node | Leaf:
    """The containers of leaves under new names.

    A container whose leaves all moved together, without others, keeps its type and its members: a
    list stays a list, and empty containers remain. All others become dicts.

    Arguments:
        node: the structure under the old names.
        sources: the old name of each leaf that was one leaf, by its new name.
        names: all new names.

    Raises:
        ValueError: a name is both a leaf and a container.

    Example:
        >>> old = tree_json.from_json({"dict": [["a", {"list": ["*", "*"]}], ["b", "*"]]})
        >>> new = renamed(old, {"x/y/0": "a/0", "x/y/1": "a/1", "z": "b"}, ["x/y/0", "x/y/1", "z"])
        >>> tree.rebuild(new, str)
        {'x': {'y': ['x/y/0', 'x/y/1']}, 'z': 'z'}
    """
    uses = Counter(sources.values())
    moves = {old: new for new, old in sources.items() if uses[old] == 1}
    below: Counter[str] = Counter()
    for name in names:
        parts = name.split("/")
        below.update("/".join(parts[:count]) for count in range(len(parts)))
    whole: dict[str, Node] = {}
    _find(node, moves, below, whole)
    return _grafted(tree_json.from_names(names), whole, 0)


def _find(
    node: Node | Leaf, moves: Mapping[str, str], below: Mapping[str, int], whole: dict[str, Node]
) -> tuple[int, str | None]:
    """Collects the outermost containers that moved whole, under their new names.

    Returns:
        The number of the node's leaves, and its new name if it moved whole.
    """
    if isinstance(node, Leaf):
        return 1, moves.get(node.name)
    inner: dict[str, Node] = {}
    count, targets = 0, set[str | None]()
    parts = tree.child_names(node.kind, node.keys, "")
    for part, child in zip(parts, node.children, strict=True):
        leaves, moved = _find(child, moves, below, inner)
        count += leaves
        if leaves:
            targets.add(moved if node.kind == "wrapper" else _parent(moved, part))
    (target,) = targets if len(targets) == 1 else (None,)
    if target is None or below[target] != count:
        whole |= inner
        return count, None
    whole[target] = _with_names(node, moves)
    return count, target


def _parent(name: str | None, part: str) -> str | None:
    """The container in which a name's last component is `part`."""
    if name is None:
        return None
    above, _, last = name.rpartition("/")
    return above if last == part else None


def _with_names(node: Node, moves: Mapping[str, str]) -> Node:
    children = (
        Leaf(moves[child.name], child.value)
        if isinstance(child, Leaf)
        else _with_names(child, moves)
        for child in node.children
    )
    return replace(node, children=tuple(children))


def _grafted(node: Node | Leaf, whole: Mapping[str, Node], depth: int) -> Node | Leaf:
    """Dicts of new names, with the containers that moved whole at their places."""
    if isinstance(node, Leaf):
        return node
    leaf = next(tree.leaves(node), None)
    if leaf is None:
        return whole.get("", node)
    prefix = "/".join(leaf.name.split("/")[:depth])
    if prefix in whole:
        return whole[prefix]
    return replace(node, children=tuple(_grafted(c, whole, depth + 1) for c in node.children))
