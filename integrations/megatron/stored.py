"""The content of our checkpoint by Megatron's names: tensors and objects by their keys."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from unickpt import Checkpoint
from unickpt.errors import LoadMismatch
from unickpt.extend import (
    Leaf,
    Node,
    children_by_key,
    leaves_of_tree,
    plain_to_json,
    structure_of,
    tree_to_json,
    unwrapped,
)
from unickpt.integrations.megatron.optimizers import is_of_group, same_object

_SHARD = re.compile(r"shard_[\d.]+_[\d.]+")


class StoredItems:
    """The items of a checkpoint.

    Arguments:
        stored: the checkpoint.
        folder: where it is, for errors.
    """

    def __init__(self, stored: Checkpoint, folder: str) -> None:
        self.stored, self._folder = stored, folder
        node = unwrapped(structure_of(stored))
        if not isinstance(node, Node) or node.kind != "dict":
            raise LoadMismatch(
                f"{folder}: it was not saved by SaveStrategy; load it with unickpt.load"
            )
        self._root = node

    def find(self, key: str) -> Node | Leaf | None:
        """The stored value of a key; each `/` is a level of the tree."""
        parts = key.split("/")
        node: Node | Leaf | None = self._root
        for part in parts if all(parts) else [key]:
            node = _children(node).get(part)
        return node

    def object(self, requested: ShardedObject) -> tuple[str, Node | Leaf] | None:
        """The key and the value of an object. With other parallel sizes, the value of an optimizer
        of one data-parallel group is that of any group, if all are equal.

        Raises:
            LoadMismatch: they are not.
        """
        exact = self.find(requested.unique_key)
        if exact is not None:
            return requested.unique_key, exact
        if not is_of_group(requested.key):
            return None
        key = requested.unique_key
        same = {name: node for name, node in self._objects() if same_object(name, key)}
        texts = {name: self._text(node) for name, node in same.items()}
        if len(set(texts.values())) > 1:
            raise LoadMismatch(
                f"{self._folder}: {requested.key!r} is not stored, and "
                f"{', '.join(map(repr, same))} differ, so none of them can represent it: load with "
                "the parallel sizes that were saved"
            )
        return next(iter(same.items()), None)

    def shards(self, key: str) -> str:
        """Which parts of an object are stored."""
        pairs = [name.rpartition("/") for name, _ in self._objects()]
        names = [shard for above, _, shard in pairs if above == key]
        return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")

    def _text(self, node: Node | Leaf) -> str:
        """All that a value holds."""
        values = self.stored.index.values
        parts = [repr(tree_to_json(node))]
        for leaf in leaves_of_tree(node):
            if leaf.name in values:
                parts.append(repr(plain_to_json(values[leaf.name])))
            else:
                parts.append(self.stored[leaf.name][...].tobytes().hex())
        return "\n".join(parts)

    def tensors(self) -> dict[str, ShardedTensor]:
        """The tensors by key, each as one whole shard without data; none of those in values, which
        are within wrappers."""
        tensors = {}
        for key, node in _items(self._root, ()):
            entry = self.stored.index.arrays.get(node.name) if isinstance(node, Leaf) else None
            dtype = None if entry is None else getattr(torch, entry.dtype, None)
            if entry is not None and dtype is not None:
                like = torch.empty(entry.shape, dtype=dtype, device="meta")
                tensors[key] = ShardedTensor.from_rank_offsets(key, like).without_data()
        return tensors

    def objects(self) -> dict[str, ShardedObject]:
        """The objects by their unique keys, without data."""
        return {name: ShardedObject.empty_from_unique_key(name) for name, _ in self._objects()}

    def _objects(self) -> Iterator[tuple[str, Node | Leaf]]:
        for key, node in _items(self._root, ()):
            if _SHARD.fullmatch(key.rpartition("/")[2]):
                yield key, node


def _children(node: Node | Leaf | None) -> dict[str | int, Node | Leaf]:
    return children_by_key(node) if isinstance(node, Node) and node.kind == "dict" else {}


def _items(node: Node | Leaf, above: tuple[str, ...]) -> Iterator[tuple[str, Node | Leaf]]:
    """All leaves and objects by key; objects are not taken apart."""
    for key, child in _children(node).items():
        path = (*above, str(key))
        if isinstance(child, Leaf) or _SHARD.fullmatch(str(key)):
            yield "/".join(path), child
        else:
            yield from _items(child, path)
