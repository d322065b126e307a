"""Restore one tree for Orbax: what to load each leaf into, and its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint._src.metadata.tree import build_default_tree_metadata  # has no other name

from unickpt.errors import LoadMismatch
from unickpt.foreign.orbax_arrays import SavedArrays
from unickpt.frameworks.leaves import PerProcess, adapters, expand, is_leaf
from unickpt.integrations.orbax import placement
from unickpt.integrations.orbax.described import abstract_array
from unickpt.loading.loader import load
from unickpt.loading.views import StoredView
from unickpt.reading.checkpoint import Checkpoint
from unickpt.reading.options import LoadOptions
from unickpt.rules.rule_set import Rules
from unickpt.trees import tree

METADATA = "orbax"
"""The key of our checkpoint's metadata under which the handler stores its own."""
_PLAIN_TYPES: tuple[type, ...] = (bool, int, float, str, bytes)
_HOLE: Any = abstract_array((), np.dtype("bool"))  # stands for PLACEHOLDER in a load
_REFUSED: Mapping[str, tuple[Any, str]] = {
    "strict": (True, "arrays are neither padded nor cut"),
    "legacy_transform_fn": (None, "pass rules to the handler"),
    "transforms_default_to_original": (True, "pass rules to the handler"),
}


class StoredTree:
    """One tree in a checkpoint, of unickpt or of Orbax.

    Arguments:
        checkpoint: the open checkpoint.
        rules: map its names and axes to those of the tree to restore.
        options: of the load.
    """

    def __init__(
        self, checkpoint: Checkpoint, rules: Rules | None, options: LoadOptions | None
    ) -> None:
        self._checkpoint, self._rules, self._options = checkpoint, rules, options
        own = checkpoint.metadata.get(METADATA)
        self._own: Mapping[str, Any] = own if isinstance(own, Mapping) else {}
        read = getattr(checkpoint.reader, "saved", None)
        self._saved = SavedArrays.of_json(self._own) if read is None else read

    # --- what is stored ----------------------------------------------------------------------

    def abstract(self) -> Any:
        """The stored tree: plain values, and for each array a target that is placed as it was."""
        return tree.rebuild(StoredView(self._checkpoint.reader).node(), self._abstract_leaf)

    def _abstract_leaf(self, name: str) -> Any:
        checkpoint = self._checkpoint
        if name in checkpoint.values:
            return checkpoint.values[name]
        if name not in checkpoint:
            return PerProcess()
        return placement.target(checkpoint.index.entry(name), self._saved, str(checkpoint.location))

    def metadata(self, directory: Any) -> Any:
        """Orbax's `TreeMetadata` of the stored tree."""
        node = StoredView(self._checkpoint.reader).node()
        leaves = tree.rebuild(node, lambda name: self._leaf_metadata(name, directory))
        return build_default_tree_metadata(leaves, custom_metadata=self._own.get("custom_metadata"))

    def _leaf_metadata(self, name: str, directory: Any) -> Any:
        checkpoint, own = self._checkpoint, name.replace("/", ".")
        if name in checkpoint.values:
            value = checkpoint.values[name]
            if isinstance(value, str):
                return ocp.metadata.StringMetadata(name=own, directory=directory)
            if isinstance(value, int | float):
                dtype = jax.dtypes.canonicalize_dtype(type(value))
                return ocp.metadata.ScalarMetadata(
                    name=own, directory=directory, shape=(), sharding=None, dtype=dtype
                )
            return value
        if name not in checkpoint:
            return None
        array = checkpoint[name]
        try:
            sharding = getattr(self._abstract_leaf(name), "sharding", None)
        except LoadMismatch:  # it was on devices that this job lacks
            sharding = None
        return ocp.metadata.ArrayMetadata(
            name=own,
            directory=directory,
            shape=tuple(array.shape),
            sharding=_sharding_metadata(sharding),
            dtype=array.dtype,
        )

    # --- restore -----------------------------------------------------------------------------

    def restore(self, args: Any) -> Any:
        """The tree that `StandardRestore` or `PyTreeRestore` ask for.

        Raises:
            ValueError: an argument cannot be honoured.
            LoadMismatch: what is stored does not fit.
        """
        _check_arguments(args)
        target, restore_args = args.item, getattr(args, "restore_args", None)
        partial = getattr(args, "partial_restore", False)
        partial = partial or getattr(args, "transforms", None) == {}
        if target is None:
            target = self.abstract()
        leaves = _Targets(self, _by_path(restore_args), args)
        like = jax.tree_util.tree_map_with_path(leaves.target, target)
        holes = _names_of_holes(like)
        restored = load(
            self._checkpoint,
            like,
            rules=None if args.item is None else self._rules,
            cast=True,
            skip=holes,
            unexpected="skip" if partial else "error",
            options=self._options,
        )
        if not holes:
            return restored
        return jax.tree.map(lambda leaf: ocp.PLACEHOLDER if leaf is _HOLE else leaf, restored)


class _Targets:
    """Makes of each leaf of a tree to restore what to load it into.

    Arguments:
        stored: the stored tree.
        restore_args: Orbax's `RestoreArgs`, by paths.
        args: of the restore.
    """

    def __init__(self, stored: StoredTree, restore_args: Mapping[str, Any], args: Any) -> None:
        self._stored, self._restore_args = stored, restore_args
        self._fallback = getattr(args, "fallback_sharding", None)
        self._keeps_layout = getattr(args, "support_layout", False)
        self._abstract: dict[str, Any] | None = None

    def _stored_leaf(self, path: str) -> Any:
        """What is stored at a path; None if nothing is."""
        if self._abstract is None:
            self._abstract = _by_path(self._stored.abstract())
        return self._abstract.get(path)

    def target(self, key_path: Any, leaf: Any) -> Any:
        """What to load a leaf into."""
        path = _path_text(key_path)
        restore_args = self._restore_args.get(path)
        leaf = _without_metadata(leaf)
        if leaf is ocp.PLACEHOLDER:
            return _HOLE
        if type(leaf) is object or (restore_args is not None and not hasattr(leaf, "shape")):
            leaf = self._stored_leaf(path) if self._stored_leaf(path) is not None else leaf
        if isinstance(leaf, type) and leaf in _PLAIN_TYPES:
            return leaf()
        if not hasattr(leaf, "shape"):
            return leaf
        return self._array(path, leaf, restore_args)

    def _array(self, path: str, leaf: Any, restore_args: Any) -> Any:
        if not getattr(restore_args, "strict", True):
            raise ValueError(
                f"ArrayRestoreArgs(strict=False) of {path!r} is not supported: arrays are neither "
                "padded nor cut"
            )
        shape = getattr(restore_args, "global_shape", None) or leaf.shape
        dtype = getattr(restore_args, "dtype", None) or leaf.dtype
        restore_type = getattr(restore_args, "restore_type", None)
        if restore_type is np.ndarray or isinstance(leaf, np.ndarray | np.generic):
            return np.empty(tuple(shape), dtype)
        if restore_type in _PLAIN_TYPES:
            return restore_type()
        sharding = _sharding_of(restore_args) or self._sharding(leaf)
        if sharding is None and not isinstance(leaf, jax.Array):
            sharding = getattr(self._stored_leaf(path), "sharding", None) or self._fallback
        return abstract_array(tuple(shape), dtype, sharding)

    def _sharding(self, leaf: Any) -> Any:
        layout = getattr(leaf, "format", None) if self._keeps_layout else None
        return layout or getattr(leaf, "sharding", None)


def _check_arguments(args: Any) -> None:
    for name, (default, advice) in _REFUSED.items():
        value = getattr(args, name, default)
        if value is not default:
            raise ValueError(f"{name}={value!r} is not supported: {advice}")
    if getattr(args, "transforms", None):
        raise ValueError("transforms= is not supported: pass rules to the handler")


def _by_path(whole: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths."""
    leaves = jax.tree_util.tree_flatten_with_path(whole)[0]
    return {_path_text(path): leaf for path, leaf in leaves}


def _path_text(path: Any) -> str:
    """A path as text; the same for a field of an object and the key of a dict."""
    parts = (getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))) for key in path)
    return "/".join(str(part) for part in parts)


def _without_metadata(leaf: Any) -> Any:
    """A leaf of Orbax's metadata as the target that it describes; all others as they are."""
    if isinstance(leaf, ocp.metadata.StringMetadata):
        return ""
    if isinstance(leaf, ocp.metadata.ScalarMetadata):
        return np.dtype(leaf.dtype).type(0).item()
    if isinstance(leaf, ocp.metadata.ArrayMetadata):
        return abstract_array(leaf.shape, leaf.dtype, _as_jax(leaf.sharding))
    return leaf


def _as_jax(sharding: Any) -> Any:
    convert = getattr(sharding, "to_jax_sharding", None)
    return sharding if convert is None else convert()


def _sharding_of(restore_args: Any) -> Any:
    """The sharding that `ArrayRestoreArgs` name; None if they name none."""
    sharding = getattr(restore_args, "sharding", None)
    if sharding is not None:
        return _as_jax(sharding)
    mesh = getattr(restore_args, "mesh", None)
    axes = getattr(restore_args, "mesh_axes", None)
    return None if mesh is None or axes is None else jax.sharding.NamedSharding(mesh, axes)


def _sharding_metadata(sharding: Any) -> Any:
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    return ocp.metadata.NamedShardingMetadata.from_jax_sharding(sharding)


def _names_of_holes(like: Any) -> list[str]:
    """The names of the leaves that are not restored."""
    frameworks = adapters()
    node = tree.flatten(
        like,
        lambda value: is_leaf(value, frameworks),
        lambda value, name: expand(value, name, frameworks),
    )
    return [leaf.name for leaf in tree.leaves(node) if leaf.value is _HOLE]
