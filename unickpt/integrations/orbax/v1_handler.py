"""unickpt inside Orbax's version 1: a handler that stores trees in our format."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable
from typing import Any, ClassVar

import orbax.checkpoint as v0
from orbax.checkpoint import v1 as ocp

from unickpt.integrations.orbax.handler import (
    begin_save,
    open_stored_tree,
    write_marker,
)
from unickpt.integrations.orbax.restoring import StoredTree
from unickpt.reading.options import LoadOptions
from unickpt.rules.rule_set import Rules
from unickpt.saving.options import SaveOptions

TREE_MARKER = "_METADATA"
"""The file by which Orbax's version 1 knows the folder of a tree."""


class TreeHandler:
    """Stores and loads trees of arrays for Orbax's version 1, in unickpt's format.

    Orbax makes one of these for each save and load; `v1_registry` binds their options.
    """

    save_options: ClassVar[SaveOptions] = SaveOptions()
    load_options: ClassVar[LoadOptions | None] = None
    rules: ClassVar[Rules | None] = None

    def __init__(self) -> None:
        self._orbax = ocp.handlers.PyTreeHandler()

    async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
        """Stages a tree; the awaitable writes it once Orbax has created the directory."""
        created = threading.Event()
        path = os.fspath(directory.path)
        pending = begin_save(path, checkpointable, self.save_options, created)

        async def finish() -> None:
            folder = await directory.await_creation()
            created.set()
            await asyncio.to_thread(pending.result)
            if v0.multihost.is_primary_host(0):
                write_marker(folder)
                (folder / TREE_MARKER).write_text("{}")

        return finish()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """Loads a tree onto any mesh and any number of processes."""
        stored = self._stored(directory)
        partial = ocp.Context().pytree_options.loading.partial_load
        args = v0.args.PyTreeRestore(abstract_checkpointable, partial_restore=partial)
        return asyncio.to_thread(stored.restore, args)

    async def metadata(self, directory: Any) -> Any:
        """The stored tree, with an abstract array for each array."""
        return self._stored(directory).abstract()

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether Orbax would save it as a tree."""
        return bool(self._orbax.is_handleable(checkpointable))

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Whether Orbax would load it as a tree."""
        handleable: bool | None = self._orbax.is_abstract_handleable(abstract_checkpointable)
        return handleable

    def _stored(self, directory: Any) -> StoredTree:
        return open_stored_tree(directory, self.rules, self.load_options)


def v1_registry(
    *names: str,
    save_options: SaveOptions | None = None,
    load_options: LoadOptions | None = None,
    rules: Rules | None = None,
) -> Any:
    """A registry for a `Context` of Orbax's version 1 in which unickpt stores all trees.

    Arguments:
        names: of checkpointables that are always trees, beside `state`.
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
    theirs = ocp.handlers.PyTreeHandler
    everything = ocp.handlers.global_registry()
    result = ocp.handlers.local_registry(include_global_registry=False)
    for kind, name in everything.get_all_entries():
        if kind is not theirs:
            typestrs = everything.get_secondary_typestrs(kind)
            result.add(kind, checkpointable_name=name, secondary_typestrs=typestrs)
    typestrs = [*everything.get_secondary_typestrs(theirs), _typestr(theirs)]
    result.add(handler, secondary_typestrs=typestrs)
    for name in ("state", *names):
        result.add(handler, checkpointable_name=name)
    return result


def _typestr(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
