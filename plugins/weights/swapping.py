"""Torch tensors that take other memory in a flip, so that it takes microseconds."""

from __future__ import annotations

from collections import Counter
from typing import Any

from unickpt.extend import flatten_state, leaves_of_tree, rebuild_tree


def with_spares(tree: Any) -> tuple[Any, dict[str, Any]]:
    """A tree with copies of torch tensors; and these tensors, by the names of the copies.

    A tensor that shares its memory with another object, or with a larger one, stays: the other
    would keep the old memory.

    Arguments:
        tree: of tensors and other arrays.
    """
    node = flatten_state(tree)
    leaves = {leaf.name: leaf.value for leaf in leaves_of_tree(node)}
    tensors = {name: leaf for name, leaf in leaves.items() if hasattr(leaf, "untyped_storage")}
    objects = {id(leaf): leaf for leaf in tensors.values()}
    users = Counter(leaf.untyped_storage().data_ptr() for leaf in objects.values())
    copies = {
        number: leaf.detach().clone()
        for number, leaf in objects.items()
        if leaf.is_leaf
        and users[leaf.untyped_storage().data_ptr()] == 1
        and leaf.untyped_storage().nbytes() == leaf.nbytes
    }
    spared = {name: leaf for name, leaf in tensors.items() if id(leaf) in copies}
    return rebuild_tree(node, lambda name: copies.get(id(leaves[name]), leaves[name])), spared
