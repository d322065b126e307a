"""Steps as Orbax's managers save them: a folder for each item, and what makes them a step.

Sources: orbax/checkpoint/checkpoint_manager.py, _src/handlers, _src/metadata/checkpoint.py. Which
items there are, and how each was saved, `unickpt.integrations.orbax` says in the metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from unickpt.backends.orbax.tree_writer import (
    TreeFiles,
    tree_files,
    unwrapped,
)
from unickpt.errors import UnsupportedLeaf
from unickpt.foreign.orbax_arrays import SavedArrays
from unickpt.format.index import Index
from unickpt.format.writer import Plan, PlannedFile, text_file
from unickpt.quoting import quoted
from unickpt.trees import tree

ORBAX = "orbax"
"""The key of a checkpoint's metadata that says how it was saved."""
_DEFAULT = "default"
_ALONE = (_DEFAULT, "state", "pytree")  # items whose names are not shown, if they are the only one
_FILES = "files"
_COMMITTED = "commit_success.txt"
_INDICATOR = "orbax.checkpoint"  # of version 1
_HANDLERS = "orbax.checkpoint._src.handlers"
_MODULES = {
    "StandardSave": "standard_checkpoint_handler.StandardCheckpointHandler",
    "PyTreeSave": "pytree_checkpoint_handler.PyTreeCheckpointHandler",
    "ArraySave": "array_checkpoint_handler.ArrayCheckpointHandler",
    "JsonSave": "json_checkpoint_handler.JsonCheckpointHandler",
    "JaxRandomKeySave": "random_key_checkpoint_handler.JaxRandomKeyCheckpointHandler",
    "NumpyRandomKeySave": "random_key_checkpoint_handler.NumpyRandomKeyCheckpointHandler",
}
_KEYS_OF_ORBAX = "threefry2x32"  # it restores keys as those of JAX's default


@dataclass(frozen=True)
class Items:
    """The items of a checkpoint.

    Arguments:
        kinds: how each was saved, by its name.
        single: the name of the one that is all of the checkpoint; None if items have names.
        custom: what the user gave with each.
        alone: whether the single one has no folder of its own, as a `Checkpointer` saves it.
        handlers: of version 1, by which files were saved; None if version 0 saved it.
        arrays: what is known of its arrays.
    """

    kinds: Mapping[str, str]
    single: str | None = None
    custom: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False
    handlers: Mapping[str, str] | None = None
    arrays: SavedArrays = field(default_factory=SavedArrays)


STEP = Items({_DEFAULT: "StandardSave"}, _DEFAULT)
"""A tree, as the only item of a step."""
TREE = Items({_DEFAULT: "StandardSave"}, _DEFAULT, alone=True)
"""A tree, without a step."""


def items_of(index: Index, node: tree.Node | tree.Leaf) -> Items | None:
    """The items of a checkpoint, as its metadata has them; None if it has none, or others."""
    how = index.metadata.get(ORBAX)
    kinds = how.get("items") if isinstance(how, Mapping) else None
    if not isinstance(how, Mapping) or not isinstance(kinds, Mapping) or not kinds:
        return None
    single, custom = how.get("single"), how.get("item_metadata")
    alone = how.get("alone") is True
    named = {str(k): str(v) for k, v in kinds.items()}
    arrays = SavedArrays.of_json(how)
    found = Items(named, single, custom or {}, alone, how.get("handlers"), arrays)
    if single is not None:
        return found if list(found.kinds) == [single] else None
    names = node.keys if isinstance(node, tree.Node) and node.kind == "dict" else ()
    return found if set(names) == set(found.kinds) else None


def _handler(kind: str) -> str:
    """The name of Orbax's handler, by which it knows how an item is to be restored."""
    return f"{_HANDLERS}.{_MODULES[kind]}"


def about(index: Index, handlers: Any) -> Iterator[PlannedFile]:
    """What makes a folder a checkpoint that is committed.

    Arguments:
        handlers: of its items, or of itself.
    """
    told: dict[str, Any] = {"item_handlers": handlers, "metrics": {}, "performance_metrics": {}}
    try:
        created = int(datetime.fromisoformat(index.created).timestamp()) * 10**9
    except ValueError:  # it is not recorded
        created = 0
    if created > 0:
        told |= {"init_timestamp_nsecs": created, "commit_timestamp_nsecs": created}
    custom = index.metadata.get("custom_metadata")
    told["custom_metadata"] = custom if isinstance(custom, Mapping) else {}
    yield text_file("_CHECKPOINT_METADATA", json.dumps(told), last=True)
    yield text_file(_COMMITTED, "written by unickpt", last=True)


def plan(index: Index, node: tree.Node | tree.Leaf, items: Items, chunk_bytes: int) -> Plan:
    """The files of a step, or of an item alone.

    Arguments:
        node: the tree of the checkpoint.
        items: of it.
        chunk_bytes: the most bytes of a file.

    Raises:
        UnsupportedLeaf: Orbax cannot hold something.
    """
    files: list[PlannedFile] = []
    arrays, values, handlers = dict[str, str](), dict[str, str](), dict[str, str]()
    others = False
    for name, kind in items.kinds.items():
        part = node if items.single else _child(node, name)
        prefix = "" if items.single else tree.component(name)
        custom = items.custom.get(name)
        item = _Item(index, unwrapped(part), prefix, chunk_bytes, custom, items.arrays)
        made = item.made(kind)
        if not items.alone:
            made = made.within(name, "" if items.single in _ALONE else tree.component(name))
            files.append(_committed(name))
        files += made.files
        arrays |= made.arrays
        values |= made.values
        others |= made.others
        if kind in _MODULES:
            handlers[name] = _handler(kind)
        elif items.handlers is not None and name in items.handlers:
            handlers[name] = items.handlers[name]
    if not items.alone and (metrics := index.metadata.get("metrics")) is not None:
        # Those that JSON cannot hold are kept as the text that Python makes of them.
        text = metrics if isinstance(metrics, str) else json.dumps(metrics)
        files += [text_file("metrics/metrics", text), _committed("metrics")]
        handlers["metrics"] = _handler("JsonSave")
    if items.handlers is not None:
        files.append(text_file(_INDICATOR, "", last=True))
    if items.alone:  # on object storage, what a reader looks for in a tree comes last
        files = [*about(index, next(iter(handlers.values()), None)), *files]
    else:
        files += about(index, handlers)
    return Plan(tuple(files), arrays, values, others=others)


def _committed(folder: str) -> PlannedFile:
    return text_file(f"{folder}/{_COMMITTED}", "written by unickpt")


def _child(node: tree.Node | tree.Leaf, name: str) -> tree.Node | tree.Leaf:
    assert isinstance(node, tree.Node), "as items_of has checked"
    return node.children[node.keys.index(name)]


@dataclass(frozen=True)
class _Item:
    """An item that is to be written.

    Arguments:
        index: of the checkpoint.
        node: its tree.
        prefix: of the names of its leaves.
        chunk_bytes: the most bytes of a file.
        custom: what the user gave with it.
        arrays: what is known of its arrays.
    """

    index: Index
    node: tree.Node | tree.Leaf
    prefix: str
    chunk_bytes: int
    custom: Any
    arrays: SavedArrays

    def made(self, kind: str) -> TreeFiles:
        """Its files, by how it was saved."""
        if kind == "JsonSave":
            return self._json("metadata")
        if kind == _FILES:
            return self._files()
        if kind == "JaxRandomKeySave":
            return self._random_key()
        if kind == "NumpyRandomKeySave":
            state = self._tree().within("np_random_key", "np_random_key")
            is_tuple = isinstance(self.node, tree.Node) and self.node.kind in ("tuple", "list")
            return _with_metadata(state, "np_random_key", {"legacy": is_tuple})
        if kind == "ArraySave":
            return self._array()
        return self._tree()

    def _tree(self) -> TreeFiles:
        if isinstance(self.node, tree.Leaf):
            raise UnsupportedLeaf(
                f"Orbax stores trees, and the item {quoted(self.node.name)} is a single leaf"
            )
        return tree_files(self.index, self.node, self.chunk_bytes, self.custom, self.arrays)

    def _array(self) -> TreeFiles:
        """Of one array or number, which Orbax calls `checkpoint`."""
        keys = ("checkpoint",)
        whole = tree.Node("dict", keys, (self.node,), tuple)
        return tree_files(self.index, whole, self.chunk_bytes, self.custom, self.arrays)

    def _json(self, file: str) -> TreeFiles:
        values = self.index.values
        text = json.dumps(tree.rebuild(self.node, lambda name: values[name]))
        names = [leaf.name for leaf in tree.leaves(self.node)]
        own = {name: name.removeprefix(self.prefix).lstrip("/") for name in names}
        return TreeFiles((text_file(file, text),), {}, own)

    def _files(self) -> TreeFiles:
        """The files of a handler, each of which is a value."""
        found: list[PlannedFile] = []
        for key, leaf in zip(*_children(self.node), strict=True):
            value = self.index.values.get(leaf.name) if isinstance(leaf, tree.Leaf) else None
            if not isinstance(value, bytes) or not {"", ".", ".."}.isdisjoint(str(key).split("/")):
                raise UnsupportedLeaf(
                    f"{quoted(key)} is no file of a handler; export with layout='tree'"
                )
            found.append(text_file(str(key), value))
        return TreeFiles(tuple(found), {}, {}, others=True)

    def _random_key(self) -> TreeFiles:
        (leaf,) = tree.leaves(self.node)
        prng = self.index.entry(leaf.name).prng
        if prng not in (None, _KEYS_OF_ORBAX):
            raise UnsupportedLeaf(
                f"{quoted(leaf.name)} is a random key of {quoted(prng)}, and Orbax would restore "
                f"it as one of {_KEYS_OF_ORBAX}; drop it by a rule"
            )
        entry = self.index.entry(leaf.name)
        arrays = {**self.index.arrays, entry.name: replace(entry, prng=None)}
        plain = replace(self.index, arrays=arrays)
        state = replace(self, index=plain, node=leaf)._array()
        made = state.within("jax_random_key", "jax_random_key")
        return _with_metadata(made, "jax_random_key", {"typed": prng is not None})


def _with_metadata(found: TreeFiles, name: str, about: Any) -> TreeFiles:
    more = (
        _committed(name),
        text_file(f"{name}_metadata/metadata", json.dumps(about)),
        _committed(f"{name}_metadata"),
    )
    return replace(found, files=(*found.files, *more), others=True)


def _children(node: tree.Node | tree.Leaf) -> tuple[Any, Any]:
    return (node.keys, node.children) if isinstance(node, tree.Node) else ((), ())
