"""The tree of an index, which names the same leaves as the index's lists."""

from __future__ import annotations

from unickpt.format.index import Index
from unickpt.quoting import quoted
from unickpt.trees import tree, tree_json


def tree_of(index: Index) -> tree.Node | tree.Leaf:
    """The structure of a checkpoint.

    Raises:
        BadTree: it is invalid, or its leaves are not those that the index lists.
    """
    root = tree_json.from_json(index.tree)
    differ = {leaf.name for leaf in tree.leaves(root)} ^ set(index.names)
    if differ:
        raise tree_json.BadTree(
            f"leaf {quoted(min(differ))} is in the tree of the index or in its lists, but not in "
            "both"
        )
    return root
