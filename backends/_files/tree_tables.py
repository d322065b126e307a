"""The table of the arrays in a tree, as files of trees have them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from unickpt.errors import UnickptError
from unickpt.extend import (
    ArrayTable,
    Expansion,
    Files,
    Leaf,
    flatten_tree,
    is_plain,
    leaves_of_tree,
)


def table_of_tree(
    files: Files,
    root: Any,
    kinds: type | tuple[type, ...],
    put: Callable[[ArrayTable, Leaf], None],
    expand: Callable[[Any, str], Expansion | None] = lambda value, name: None,
    identity: Callable[[Any], Hashable] = id,
) -> ArrayTable:
    """The table of a tree of containers, plain values and arrays.

    Arguments:
        files: of the checkpoint.
        root: the tree.
        kinds: the classes of placeholders for arrays in it.
        put: adds the placeholder of an array to the table.
        expand: as for `flatten_tree`.
        identity: equal for placeholders of the same array, whose other names are aliases.

    Raises:
        UnsupportedFormat: the tree has names, or is nested, as no tree of unickpt; besides, all
            that `put` raises.
    """

    def is_leaf(value: Any) -> bool:
        return isinstance(value, kinds) or is_plain(value)

    try:
        node = flatten_tree(root, is_leaf, expand)
    except UnickptError as error:
        raise files.unsupported(f"{error}") from error
    table, first = ArrayTable(node), dict[Hashable, str]()
    for leaf in leaves_of_tree(node):
        if not isinstance(leaf.value, kinds):
            table.values[leaf.name] = leaf.value
            continue
        first_name = first.setdefault(identity(leaf.value), leaf.name)
        if first_name == leaf.name:
            put(table, leaf)
        else:
            table.aliases[leaf.name] = first_name
    return table
