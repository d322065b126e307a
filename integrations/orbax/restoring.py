"""Restores one tree for Orbax: the target of each leaf, and the tree's metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint._src.metadata.pytree_metadata_options import PYTREE_METADATA_OPTIONS
from orbax.checkpoint._src.metadata.tree import build_default_tree_metadata, serialize_tree

import unickpt
from unickpt import Checkpoint, LoadOptions, PerProcess, Rules
from unickpt.errors import LoadMismatch
from unickpt.extend import SavedArrays, flatten_state, leaves_of_tree, rebuild_tree, structure_of
from unickpt.integrations.orbax import placement
from unickpt.integrations.orbax.placement import abstract_array

METADATA = "orbax"
"""The key of our checkpoint's metadata under which the handler stores its own."""
_PLAIN_TYPES: tuple[type, ...] = (bool, int, float, str, bytes)
_HOLE: Any = abstract_array((), np.dtype("bool"))  # stands for PLACEHOLDER in a load
_REFUSED: Mapping[str, tuple[Any, str]] = {
    "strict": (True, "arrays are neither padded nor cut"),
    "legacy_transform_fn": (None, "pass rules to the handler"),
    "transforms_default_to_original": (True, "pass rules to the handler"),
}


@dataclass(frozen=True)
class ArrayElsewhere:
    """A stored array that was distributed over devices which this job lacks.

    Arguments:
        shape, dtype: of the array.
        error: if it is to be loaded as it was.
    """

    shape: tuple[int, ...]
    dtype: Any
    error: LoadMismatch
    sharding: None = None


class OrbaxTree:
    """One tree in a checkpoint, of unickpt or of Orbax.

    Arguments:
        checkpoint: the open checkpoint.
        rules: map its names and axes to those of the tree to restore.
        options: of the load.
        metadata_options: Orbax's `PyTreeMetadataOptions`: whether a restore without an abstract
            tree, and the metadata, have tuples and named tuples. By default they have lists and
            dicts in their place.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        rules: Rules | None = None,
        options: LoadOptions | None = None,
        metadata_options: Any = None,
    ) -> None:
        self._checkpoint, self._rules, self._options = checkpoint, rules, options
        self._metadata_options = metadata_options or PYTREE_METADATA_OPTIONS
        metadata = checkpoint.metadata.get(METADATA)
        self._orbax_metadata: Mapping[str, Any] = metadata if isinstance(metadata, Mapping) else {}
        read = getattr(checkpoint.reader, "saved", None)
        self._saved = SavedArrays.of_json(self._orbax_metadata) if read is None else read

    # --- the stored tree ---------------------------------------------------------------------

    def abstract(self) -> Any:
        """The stored tree: plain values, and for each array a target that is placed as it was."""
        return rebuild_tree(structure_of(self._checkpoint), self.leaf)

    def leaf(self, name: str) -> Any:
        """A plain value, an abstract array, or an `ArrayElsewhere`."""
        checkpoint = self._checkpoint
        if name in checkpoint.values:
            return checkpoint.values[name]
        if name not in checkpoint:
            return PerProcess()
        entry, where = checkpoint.index.entry(name), str(checkpoint.location)
        try:
            return placement.target(entry, self._saved, where)
        except LoadMismatch as error:
            array = checkpoint[name]
            return ArrayElsewhere(tuple(array.shape), array.dtype, error)

    def metadata(self, directory: Any) -> Any:
        """Orbax's `TreeMetadata` of the stored tree."""
        leaves = self.described(lambda name: self._leaf_metadata(name, directory))
        custom = self._orbax_metadata.get("custom_metadata")
        return build_default_tree_metadata(leaves, custom_metadata=custom)

    def described(self, describe_leaf: Callable[[str], Any]) -> Any:
        """The stored tree in Orbax's containers.

        Arguments:
            describe_leaf: makes a leaf of a name.
        """
        node = structure_of(self._checkpoint)
        return self._as_orbax(rebuild_tree(node, describe_leaf))

    def array_metadata(self, name: str) -> tuple[Any, Any]:
        """Orbax's descriptions of an array's sharding and of its storage."""
        leaf, array = self.leaf(name), self._checkpoint[name]
        sharding, chunk = getattr(leaf, "sharding", None), array.chunk
        if sharding is None and isinstance(leaf, jax.ShapeDtypeStruct) and array.layout is not None:
            sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        if sharding is None:
            return None, ocp.metadata.StorageMetadata(chunk_shape=chunk, write_shape=None)
        kind = ocp.metadata.NamedShardingMetadata
        if isinstance(sharding, jax.sharding.SingleDeviceSharding):
            kind = ocp.metadata.SingleDeviceShardingMetadata
        shard = sharding.shard_shape(array.shape)
        storage = ocp.metadata.StorageMetadata(chunk_shape=chunk, write_shape=shard)
        return kind.from_jax_sharding(sharding), storage

    def _as_orbax(self, restored: Any) -> Any:
        """A tree with the containers that Orbax gives without an abstract tree."""
        if jax.tree_util.all_leaves([restored]):
            return restored
        if not self._metadata_options.support_rich_types:
            # `serialize_tree` keeps empty named tuples; Orbax stores none of them.
            restored = jax.tree.map(_none_if_empty, restored, is_leaf=_is_empty_named_tuple)
        return serialize_tree(restored, self._metadata_options)

    def _leaf_metadata(self, name: str, directory: Any) -> Any:
        facts: dict[str, Any]
        checkpoint, orbax_name = self._checkpoint, name.replace("/", ".")
        if name in checkpoint.values:
            value = checkpoint.values[name]
            if isinstance(value, str):
                return ocp.metadata.StringMetadata(name=orbax_name, directory=directory)
            if isinstance(value, int | float):
                facts = {"shape": (), "sharding": None, "dtype": np.asarray(value).dtype}
                return ocp.metadata.ScalarMetadata(name=orbax_name, directory=directory, **facts)
            return value
        if name not in checkpoint:
            return None
        array, (sharding, storage) = checkpoint[name], self.array_metadata(name)
        facts = {"shape": tuple(array.shape), "dtype": array.dtype}
        facts |= {"sharding": sharding, "storage": storage}
        return ocp.metadata.ArrayMetadata(name=orbax_name, directory=directory, **facts)

    # --- restore -----------------------------------------------------------------------------

    def restore(self, args: Any) -> Any:
        """The tree that `StandardRestore` or `PyTreeRestore` ask for.

        Raises:
            ValueError: an argument cannot be honoured.
            LoadMismatch: the stored tree does not fit.
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
        try:
            restored = unickpt.load(
                self._checkpoint,
                like,
                rules=None if args.item is None else self._rules,
                cast=True,
                skip=holes,
                unexpected="skip" if partial else "error",
                options=self._options,
            )
        except LoadMismatch as error:
            raise _in_words_of_orbax(error) from None
        if args.item is None:
            return self._as_orbax(restored)
        if not holes:
            return restored
        return jax.tree.map(lambda leaf: ocp.PLACEHOLDER if leaf is _HOLE else leaf, restored)


class _Targets:
    """Makes the target of each leaf of a tree to restore.

    Arguments:
        stored: the stored tree.
        restore_args: Orbax's `RestoreArgs`, by paths.
        args: of the restore.
    """

    def __init__(self, stored: OrbaxTree, restore_args: Mapping[str, Any], args: Any) -> None:
        self._stored, self._restore_args = stored, restore_args
        self._fallback = getattr(args, "fallback_sharding", None)
        self._keeps_layout = getattr(args, "support_layout", False)
        self._abstract: dict[str, Any] | None = None

    def _stored_leaf(self, path: str) -> Any:
        """The stored value at a path; None if there is none."""
        if self._abstract is None:
            self._abstract = _by_path(self._stored.abstract())
        return self._abstract.get(path)

    def target(self, key_path: Any, leaf: Any) -> Any:
        """The target of a leaf."""
        path = _path_text(key_path)
        restore_args = self._restore_args.get(path)
        leaf = _without_metadata(leaf)
        if leaf is ocp.PLACEHOLDER:
            return _HOLE
        if isinstance(leaf, ocp.RestoreArgs):
            leaf, restore_args = object(), leaf
        if type(leaf) is object or (restore_args is not None and not hasattr(leaf, "shape")):
            leaf = self._stored_leaf(path) if self._stored_leaf(path) is not None else leaf
        if isinstance(leaf, type):
            return leaf() if leaf in _PLAIN_TYPES else self._of_type(path, leaf)
        if not hasattr(leaf, "shape"):
            return leaf
        return self._array(path, leaf, restore_args)

    def _of_type(self, path: str, leaf_type: type) -> Any:
        """The stored array, as a type of array."""
        stored = self._stored_leaf(path)
        if issubclass(leaf_type, np.ndarray) and hasattr(stored, "shape"):
            return np.empty(stored.shape, stored.dtype)
        return leaf_type if stored is None else stored

    def _array(self, path: str, leaf: Any, restore_args: Any) -> Any:
        if not getattr(restore_args, "strict", True):
            raise ValueError(
                f"ArrayRestoreArgs(strict=False) of {path!r} is not supported: arrays are neither "
                "padded nor cut"
            )
        shape = getattr(restore_args, "global_shape", None) or leaf.shape
        dtype = getattr(restore_args, "dtype", None) or leaf.dtype
        restore_type = getattr(restore_args, "restore_type", None)
        if restore_type is np.ndarray or not hasattr(leaf, "sharding"):
            return np.empty(tuple(shape), dtype)
        if restore_type in _PLAIN_TYPES:
            return restore_type()
        sharding = _sharding_of(restore_args) or self._sharding(leaf)
        if sharding is None and not isinstance(leaf, jax.Array):
            stored = self._stored_leaf(path)
            if isinstance(stored, (np.ndarray, *_PLAIN_TYPES)) and self._fallback is None:
                return np.empty(tuple(shape), dtype)
            sharding = getattr(stored, "sharding", None) or self._fallback
            if sharding is None and isinstance(stored, ArrayElsewhere):
                raise stored.error
        return abstract_array(tuple(shape), dtype, sharding)

    def _sharding(self, leaf: Any) -> Any:
        layout = getattr(leaf, "format", None) if self._keeps_layout else None
        return layout or getattr(leaf, "sharding", None)


def _is_empty_named_tuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields") and not node


def _none_if_empty(leaf: Any) -> Any:
    return None if _is_empty_named_tuple(leaf) else leaf


def _in_words_of_orbax(error: LoadMismatch) -> LoadMismatch:
    """An error that begins like Orbax's, which programs match, if the trees differ."""
    message = str(error)
    if "\nmissing: " not in message and "\nunexpected: " not in message:
        return error
    words = "User-provided restore item and on-disk value metadata tree structures do not match"
    return LoadMismatch(f"{words}: {message}").with_traceback(error.__traceback__)


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


def _names_of_holes(like: Any) -> list[str]:
    """The names of the leaves that are not restored."""
    return [leaf.name for leaf in leaves_of_tree(flatten_state(like)) if leaf.value is _HOLE]
