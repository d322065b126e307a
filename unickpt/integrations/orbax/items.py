"""Items: what `args` describe, as trees to save and as trees to load into."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from unickpt.errors import CheckpointCorrupt, LoadMismatch, UnsupportedLeaf
from unickpt.foreign.orbax_arrays import SavedArrays
from unickpt.frameworks.leaves import PerProcess, adapters, expand, is_leaf
from unickpt.integrations.orbax import handlers, placement
from unickpt.integrations.orbax.described import abstract_array, described, sharding_of
from unickpt.loading.views import StoredView
from unickpt.reading.checkpoint import Checkpoint
from unickpt.trees import tree

FILES = "files"
PLACEHOLDER = ...
"""In a tree to restore: leaves that are not restored."""

_HOLE: Any = abstract_array((), np.dtype("bool"))  # what stands for PLACEHOLDER while loading
_NAME = re.compile(r"[\w.-]+")
_TREES = ("StandardSave", "PyTreeSave", "ArraySave")
_SAVES = (*_TREES, "JsonSave", "JaxRandomKeySave", "NumpyRandomKeySave")
_RESTORES = {
    "StandardRestore": _TREES,
    "PyTreeRestore": _TREES,
    "ArrayRestore": _TREES,
    "JsonRestore": ("JsonSave",),
    "JaxRandomKeyRestore": ("JaxRandomKeySave",),
    "NumpyRandomKeyRestore": ("NumpyRandomKeySave",),
}


_PLAIN_TYPES: tuple[type, ...] = (bool, int, float, str, bytes)
"""Of version 1's abstract leaves, those of plain values."""


# --- saving --------------------------------------------------------------------------------------


def to_save(name: str, args: Any, handler: Any = None) -> tuple[str, Any]:
    """How an item is saved, for `restore`, and the tree to save.

    Arguments:
        name: of the item, for messages.
        args: Orbax's or ours.
        handler: one of the user's own, for this item.

    Raises:
        TypeError, ValueError: something cannot be honoured; names the item and the field.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"the item {name!r} needs a name of letters, digits, '_', '-' and '.'")
    kind = kind_of(args)
    if handler is not None or kind not in _SAVES:
        handler = handlers.handler_of(name, args, handler)
        return FILES, handlers.files_of(handler, args)
    _check_save_args(name, getattr(args, "save_args", None))
    if kind == "JsonSave":
        return kind, plain_json(name, args.item)
    return kind, args.item


def kind_of(args: Any) -> str:
    """The name of a class of arguments, Orbax's or ours; empty for all others."""
    cls = type(args)
    if cls.__module__.split(".")[0] not in ("orbax", "unickpt"):
        return ""
    return cls.__name__.removesuffix("Args")


def plain_json(name: str, value: Any) -> Any:
    """What JSON makes of a value: keys are texts, tuples are lists.

    Raises:
        UnsupportedLeaf: it is not JSON.
    """
    try:
        return json.loads(json.dumps(value, default=_number))
    except (TypeError, ValueError) as error:
        raise UnsupportedLeaf(f"{name!r} is not JSON: {error}") from error


def _number(value: Any) -> Any:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _check_save_args(name: str, save_args: Any) -> None:
    for each in jax.tree.leaves(save_args):
        if getattr(each, "dtype", None) is not None:
            raise ValueError(
                f"item {name!r}: SaveArgs(dtype={each.dtype}) is not supported; cast the arrays "
                "before the save"
            )


# --- restoring -----------------------------------------------------------------------------------

Load = Callable[..., Any]


@dataclass(frozen=True)
class StoredItem:
    """An item of an opened checkpoint.

    Arguments:
        name: of the item, for messages.
        prefix: of its names; empty if it is all of the checkpoint.
        found: the checkpoint.
        kind: how it was saved; empty if that is not known.
        load: loads from the checkpoint, with the arguments of `unickpt.load`; with
            `as_stored=True` not by rules.
        saved: what is known of its arrays.
    """

    name: str
    prefix: str
    found: Checkpoint
    kind: str
    load: Load
    saved: SavedArrays = field(default_factory=SavedArrays)

    @property
    def node(self) -> tree.Node | tree.Leaf:
        """Its structure."""
        whole = StoredView(self.found.reader).node()
        if not self.prefix:
            return whole
        if not isinstance(whole, tree.Node) or self.prefix not in whole.keys:
            raise CheckpointCorrupt(
                f"{self.found.location}: its metadata names an item {self.name!r}, which it lacks"
            )
        return whole.children[whole.keys.index(self.prefix)]

    def abstract(self) -> Any:
        """Its tree, with its plain values, and what to load each array into: as it was saved."""
        return tree.rebuild(self.node, self.abstract_leaf)

    def abstract_leaf(self, name: str) -> Any:
        if name in self.found.values:
            return self.found.values[name]
        if name not in self.found:
            return PerProcess()
        return placement.target(self.found.index.entry(name), self.saved, str(self.found.location))

    def load_as(self, like: Any, *, partial: bool = False, as_stored: bool = False) -> Any:
        """Loads it into a tree like `like`; None for what is stored, as NumPy arrays.

        Arguments:
            partial: leave out what `like` lacks.
            as_stored: `like` is the tree that is stored, so rules are of no use.
        """
        node, part = self.node, dict[str, Any]()
        is_leaf = self.prefix and isinstance(node, tree.Leaf)
        if is_leaf:
            part = {"only": self.prefix}
        elif self.prefix:
            if not any(tree.leaves(node)):
                return tree.rebuild(node, lambda name: None) if like is None else like
            part = {"under": f"{self.prefix}/"}
        if like is None:
            found = self.load(None, **part, as_stored=True)
            return found[self.prefix] if is_leaf else found
        like = {self.prefix: like} if is_leaf else like
        holes = _holes(like)
        found = self.load(
            like,
            **part,
            cast=True,
            skip=holes,
            as_stored=as_stored,
            unexpected="skip" if partial else "error",
        )
        found = found[self.prefix] if is_leaf else found
        if not holes:
            return found
        return jax.tree.map(lambda leaf: PLACEHOLDER if leaf is _HOLE else leaf, found)


def restore(item: StoredItem, args: Any, handler: Any = None) -> Any:
    """Restores an item.

    Arguments:
        args: Orbax's or ours; None restores what is stored, in the way that it was saved.
        handler: one of the user's own, for this item.

    Raises:
        TypeError, ValueError: something cannot be honoured; names the item and the field.
        LoadMismatch: what is stored does not fit; as `unickpt.load`.
    """
    kind = kind_of(args)
    if item.kind == FILES or handler is not None or (args is not None and kind not in _RESTORES):
        if args is None:
            raise ValueError(
                f"item {item.name!r} was saved by a handler; pass the arguments that it takes"
            )
        handler = handlers.handler_of(item.name, args, handler)
        return handlers.restore_files(handler, args, item.load_as(None))
    if args is not None and item.kind and item.kind not in _RESTORES[kind]:
        raise LoadMismatch(
            f"{item.found.location}: item {item.name!r} was saved with {item.kind}, and "
            f"{kind} was asked for; pass {item.kind.replace('Save', 'Restore')}"
        )
    if "RandomKey" in kind and not item.kind:
        raise LoadMismatch(
            f"{item.found.location}: the random key {item.name!r} was saved by Orbax, which stores "
            "it in parts; restore it with Orbax, and save it again"
        )
    if "JaxRandomKey" in (item.kind or kind):
        return _random_key(item)
    if item.kind == "JsonSave" or kind in ("JsonRestore", "NumpyRandomKeyRestore"):
        return item.load_as(None)
    if args is None:
        return item.load_as(item.abstract(), as_stored=True)
    _check_restore(item.name, args)
    like, partial = _like(item, args)
    return item.load_as(like, partial=partial, as_stored=args.item is None)


def _like(item: StoredItem, args: Any) -> tuple[Any, bool]:
    """The tree to load into, and whether what it lacks is left out."""
    wanted, restore_args = args.item, getattr(args, "restore_args", None)
    partial = getattr(args, "partial_restore", False) or getattr(args, "transforms", None) == {}
    wanted = getattr(wanted, "tree", wanted) if type(wanted).__name__ == "TreeMetadata" else wanted
    if wanted is None:
        wanted = item.abstract()
        if restore_args is None:
            return wanted, False
    hows = _by_path(restore_args)  # it may have more than is wanted
    stored: dict[str, Any] = {}

    def target(path: Any, leaf: Any) -> Any:
        at = jax.tree_util.keystr(path)
        if restore_args is not None and at not in hows:
            raise ValueError(f"item {item.name!r}: restore_args= has nothing for {at}")
        # What is stored decides, if the leaf only says that it is wanted.
        if leaf is not PLACEHOLDER and (_is_any(leaf) or (at in hows and not _has_shape(leaf))):
            stored.update(stored or _by_path(item.abstract()))
            leaf = stored.get(at, leaf)
        return _target(item.name, leaf, hows.get(at))

    return jax.tree_util.tree_map_with_path(target, wanted), partial


def _by_path(whole: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, as text."""
    found = jax.tree_util.tree_flatten_with_path(whole)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in found}


def _has_shape(leaf: Any) -> bool:
    return hasattr(described(leaf), "shape")


def _is_any(leaf: Any) -> bool:
    """Whether a leaf stands for whatever is stored."""
    return type(leaf) is object


def _target(name: str, leaf: Any, how: Any) -> Any:
    """What to load a leaf into.

    Arguments:
        leaf: of the tree to restore.
        how: None, or its `RestoreArgs`, Orbax's or ours.
    """
    if leaf is PLACEHOLDER:
        return _HOLE
    leaf = described(leaf)
    if isinstance(leaf, type) and leaf in _PLAIN_TYPES:
        return leaf()
    if type(leaf).__name__ == "NumpyShapeDtype":
        return np.empty(leaf.shape, leaf.dtype)
    if isinstance(leaf, np.ndarray):
        leaf = np.empty_like(leaf)  # the user's own stays as it is
    if how is None or not hasattr(leaf, "shape"):
        return leaf
    if not getattr(how, "strict", True):
        raise ValueError(
            f"item {name!r}: ArrayRestoreArgs(strict=False) is not supported: arrays are not "
            "padded or cut"
        )
    shape = getattr(how, "global_shape", None) or getattr(how, "shape", None) or leaf.shape
    dtype = leaf.dtype if how.dtype is None else how.dtype
    if how.restore_type is np.ndarray:
        return np.empty(shape, dtype)
    sharding = sharding_of(how)
    if sharding is None:
        sharding = getattr(leaf, "sharding", None)
    return abstract_array(tuple(shape), dtype, sharding=sharding)


def _holes(like: Any) -> list[str]:
    """The names of the leaves that are not restored."""
    among = adapters()
    node = tree.flatten(
        like, lambda obj: is_leaf(obj, among), lambda obj, name: expand(obj, name, among)
    )
    return [leaf.name for leaf in tree.leaves(node) if leaf.value is _HOLE]


_REFUSED: Mapping[str, tuple[Any, str]] = {
    "strict": (True, "arrays are not padded or cut"),
    "support_layout": (False, "layouts on the devices are JAX's"),
    "fallback_sharding": (None, "give shardings in item"),
    "legacy_transform_fn": (None, "see unickpt.load(rules=)"),
    "transforms_default_to_original": (True, "see unickpt.load(rules=)"),
}


def _check_restore(name: str, args: Any) -> None:
    for each, (default, advice) in _REFUSED.items():
        value = getattr(args, each, default)
        if value is not default:
            raise ValueError(
                f"item {name!r}: {kind_of(args)}({each}={value!r}) is not supported: {advice}"
            )
    if getattr(args, "transforms", None):
        raise ValueError(
            f"item {name!r}: PyTreeRestore(transforms=) is not supported: rules do more, see "
            "unickpt.load(rules=)"
        )


def _random_key(item: StoredItem) -> Any:
    """A typed JAX key."""
    names = [leaf.name for leaf in tree.leaves(item.node)]
    keys = [n for n in names if n in item.found and item.found.index.arrays[n].prng is not None]
    if len(keys) != 1:
        raise LoadMismatch(f"{item.found.location}: item {item.name!r} has no JAX random key")
    data = jax.numpy.asarray(item.found[keys[0]][...])
    return jax.random.wrap_key_data(data, impl=item.found.index.arrays[keys[0]].prng)
