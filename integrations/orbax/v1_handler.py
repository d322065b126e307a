"""unickpt inside Orbax's version 1: a handler that stores trees in our format."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any, ClassVar

import jax
import numpy as np
import orbax.checkpoint as v0
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.experimental.v1._src.context.context import get_context
from orbax.checkpoint.experimental.v1._src.serialization.array_leaf_handler import ArrayMetadata
from orbax.checkpoint.experimental.v1._src.serialization.numpy_leaf_handler import NumpyMetadata

import unickpt
from unickpt import LoadOptions, Rules, SaveOptions
from unickpt.errors import SaveTimeout
from unickpt.integrations.orbax.handler import as_future, begin_save, cast, write_marker
from unickpt.integrations.orbax.restoring import ArrayElsewhere, OrbaxTree

TREE_MARKER = "_METADATA"
"""The file that marks the folder of a tree for Orbax's version 1."""
_TheirHandler = ocp.handlers.PyTreeHandler


class TreeHandler:
    """Stores and loads trees of arrays for Orbax's version 1, in unickpt's format.

    Orbax makes one of these for each save and load; `v1_registry` binds their options.
    """

    save_options: ClassVar[SaveOptions] = SaveOptions()
    load_options: ClassVar[LoadOptions | None] = None
    rules: ClassVar[Rules | None] = None

    def __init__(self) -> None:
        self._orbax = _TheirHandler()

    async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
        """Stages a tree; the awaitable writes it once Orbax has created the directory."""
        created: Future[None] = Future()
        path, timeout_s = os.fspath(directory.path), v0.multihost.coordination_timeout()

        def wait_created() -> None:
            try:
                created.result(timeout_s)
            except TimeoutError:
                message = f"{path}: Orbax did not create it within {timeout_s:g} s"
                raise SaveTimeout(message) from None

        tree = _cast_as_context_says(checkpointable)
        pending = begin_save(path, tree, self.save_options, wait_created)
        outcome = as_future(pending)

        async def finish() -> None:
            try:
                folder = await directory.await_creation()
            except BaseException as error:
                created.set_exception(error)
                raise
            created.set_result(None)
            await asyncio.wrap_future(outcome)
            if v0.multihost.is_primary_host(0):
                write_marker(folder)
                (folder / TREE_MARKER).write_text("{}")

        return finish()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """Loads a tree onto any mesh and any number of processes."""
        partial = get_context().pytree_options.loading.partial_load
        args = v0.args.PyTreeRestore(abstract_checkpointable, partial_restore=partial)
        return asyncio.to_thread(lambda: self._stored(directory).restore(args))

    async def metadata(self, directory: Any) -> Any:
        """The structure of the stored tree, as Orbax describes it."""
        stored = self._stored(directory)
        return stored.described(lambda name: _metadata(stored, name))

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether Orbax would save it as a tree."""
        return bool(self._orbax.is_handleable(checkpointable))

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Whether Orbax would load it as a tree."""
        handleable: bool | None = self._orbax.is_abstract_handleable(abstract_checkpointable)
        return handleable

    def _stored(self, directory: Any) -> OrbaxTree:
        checkpoint = unickpt.open(os.fspath(directory))
        metadata_options = get_context().pytree_options.saving.pytree_metadata_options
        return OrbaxTree(checkpoint, self.rules, self.load_options, metadata_options)


def v1_registry(
    *names: str,
    save_options: SaveOptions | None = None,
    load_options: LoadOptions | None = None,
    rules: Rules | None = None,
) -> Any:
    """A registry for a `Context` of Orbax's version 1 in which unickpt stores all trees.

    Arguments:
        names: of checkpointables that are always trees, besides `state`.
        save_options, load_options, rules: as of `Handler`.

    Returns:
        A `CheckpointableHandlerRegistry`, to which you may add other handlers.

    Example:
        >>> from orbax.checkpoint import v1 as ocp
        >>> from unickpt.integrations.orbax import v1_registry
        >>> context = ocp.Context()
        >>> context.checkpointables.registry = v1_registry()
    """
    bound = {"save_options": SaveOptions.or_default(save_options)}
    bound |= {"load_options": load_options, "rules": rules}  # type: ignore[dict-item]
    # Orbax stores the name of the class, so that another program finds it.
    made = {"__module__": TreeHandler.__module__, "__qualname__": TreeHandler.__qualname__}
    handler = type(TreeHandler.__name__, (TreeHandler,), {**made, **bound})
    everything = ocp.handlers.global_registry()
    result = ocp.handlers.local_registry(include_global_registry=False)
    for kind, name in everything.get_all_entries():
        if kind is not _TheirHandler:
            typestrs = everything.get_secondary_typestrs(kind)
            result.add(kind, checkpointable_name=name, secondary_typestrs=typestrs)
    typestrs = [*everything.get_secondary_typestrs(_TheirHandler), _typestr(_TheirHandler)]
    result.add(handler, secondary_typestrs=typestrs)
    for name in ("state", *names):
        result.add(handler, checkpointable_name=name)
    return result


def _metadata(stored: OrbaxTree, name: str) -> Any:
    """The entry of a stored leaf in Orbax's metadata."""
    leaf = stored.leaf(name)
    if isinstance(leaf, str):
        return "string"
    if isinstance(leaf, int | float):
        return type(leaf)(0)
    if not isinstance(leaf, np.ndarray | jax.ShapeDtypeStruct | ArrayElsewhere):
        return leaf
    sharding, storage = stored.array_metadata(name)
    if isinstance(leaf, np.ndarray):
        return NumpyMetadata(leaf.shape, leaf.dtype, storage)
    return ArrayMetadata(leaf.shape, leaf.dtype, sharding, storage)


def _cast_as_context_says(tree: Any) -> Any:
    """A tree with its arrays in the dtypes of the Context's `StorageOptions`."""
    options = get_context().array_options.saving
    general = getattr(options.storage_options, "dtype", None)
    creator = options.scoped_storage_options_creator
    if creator is None:
        return tree if general is None else cast(tree, lambda _path, _leaf: general)

    def dtype_of(path: Any, leaf: Any) -> Any:
        return getattr(creator(path, leaf), "dtype", None) or general

    return cast(tree, dtype_of)


def _typestr(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
