"""unickpt inside Orbax's own managers: a checkpoint handler that stores trees in our format."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_args import register_with_handler

from unickpt.errors import SaveTimeout
from unickpt.integrations.destination import Destination
from unickpt.integrations.orbax.placement import described_placement
from unickpt.integrations.orbax.restoring import METADATA, StoredTree
from unickpt.reading.checkpoint import open as open_checkpoint
from unickpt.reading.options import LoadOptions
from unickpt.rules.rule_set import Rules
from unickpt.saving import saver
from unickpt.saving.background import PendingSave, SaveCallbacks, SaveRequest
from unickpt.saving.options import SaveOptions

MARKER = "UNICKPT.txt"
_OF_ORBAX = ("_CHECKPOINT_METADATA", "commit_success.txt")  # files that Orbax writes beside a tree
_MARKER_TEXT = """\
unickpt wrote this folder. Orbax alone cannot read it; its handler can:

    from unickpt.integrations.orbax import registry
    manager = ocp.CheckpointManager(path, handler_registry=registry())

To give the step back to Orbax: unickpt export FOLDER NEW_FOLDER --to orbax
"""


class Handler(ocp.handlers.AsyncCheckpointHandler):
    """Stores and restores trees of arrays for Orbax, in unickpt's format.

    Orbax keeps its managers, options, policies, names, metadata and other items. The handler
    restores trees that Orbax's own handler wrote, too.

    Arguments:
        save_options: how to save; see `unickpt.SaveOptions`.
        load_options: how to load; see `unickpt.LoadOptions`.
        rules: map the names and axes of what is stored to those of the tree to restore.

    Example:
        >>> import tempfile, jax.numpy as jnp, orbax.checkpoint as ocp
        >>> from unickpt.integrations.orbax import registry
        >>> path = tempfile.mkdtemp()
        >>> with ocp.CheckpointManager(path, handler_registry=registry()) as manager:
        ...     _ = manager.save(4, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
        ...     manager.wait_until_finished()
        ...     restored = manager.restore(4)
        >>> restored["w"]
        Array([1., 1., 1.], dtype=float32)
        >>> import unickpt
        >>> unickpt.load(f"{path}/4/default")["w"]
        array([1., 1., 1.], dtype=float32)
    """

    def __init__(
        self,
        *,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        rules: Rules | None = None,
    ) -> None:
        self._save_options = SaveOptions.or_default(save_options)
        self._load_options, self._rules = load_options, rules

    async def async_save(self, directory: Any, args: Any) -> list[Any]:
        """Stages a tree, and saves it in the background once Orbax has created the directory."""
        created = threading.Event()
        pending = self._begin(directory, args, created)

        async def finish() -> None:
            created.set()
            await asyncio.to_thread(pending.result)

        name = f"unickpt {os.fspath(directory)}"
        return [ocp.future.CommitFutureAwaitingContractedSignals(finish(), name=name)]

    def save(self, directory: Any, args: Any) -> None:
        """Saves a tree; returns when it is committed."""
        created = threading.Event()
        created.set()
        self._begin(directory, args, created).result()

    def _begin(self, directory: Any, args: Any, created: threading.Event) -> PendingSave:
        tree = _cast(args.item, args.save_args)
        path = os.fspath(directory)
        return begin_save(path, tree, self._save_options, created, args.custom_metadata)

    def restore(self, directory: Any, args: Any = None) -> Any:
        """Restores a tree; onto any mesh and any number of processes."""
        return self._stored(directory).restore(Restore() if args is None else args)

    def metadata(self, directory: Any) -> Any:
        """The structure of a stored tree, as Orbax describes it."""
        return self._stored(directory).metadata(directory)

    def finalize(self, directory: Any) -> None:
        """Leaves a file that says what the folder is."""
        if ocp.multihost.is_primary_host(0):
            write_marker(directory)

    def close(self) -> None:
        """Does nothing: no resources outlive a call."""

    def _stored(self, directory: Any) -> StoredTree:
        return open_stored_tree(directory, self._rules, self._load_options)


def begin_save(
    path: str,
    tree: Any,
    options: SaveOptions,
    created: threading.Event,
    custom_metadata: Any = None,
) -> PendingSave:
    """Stages a tree; a thread saves it as soon as its directory is there.

    Arguments:
        path: of the directory.
        tree: what to save.
        options: of the save.
        created: set when Orbax has created the directory.
        custom_metadata: for Orbax's metadata of the tree.
    """

    def wait_for_directory(_: str) -> None:
        if not created.wait(options.timeout_s):
            raise SaveTimeout(f"{path}: Orbax did not create it within {options.timeout_s:g} s")

    own: dict[str, Any] = described_placement(tree)
    if custom_metadata is not None:
        own["custom_metadata"] = custom_metadata
    callbacks = SaveCallbacks(prepare=wait_for_directory)
    return saver.begin(
        SaveRequest(
            Destination.of(path, lambda _: (), _OF_ORBAX).location,
            tree,
            options,
            metadata=lambda: {METADATA: own},
            callbacks=callbacks,
        )
    )


def open_stored_tree(
    directory: Any, rules: Rules | None, options: LoadOptions | None
) -> StoredTree:
    """The tree in a directory, of unickpt or of Orbax."""
    return StoredTree(open_checkpoint(os.fspath(directory)), rules, options)


def write_marker(directory: Any) -> None:
    """Leaves a file that says what a directory is."""
    (directory / MARKER).write_text(_MARKER_TEXT)


@register_with_handler(Handler, for_save=True)
class Save(ocp.args.PyTreeSave):
    """The arguments with which a `Handler` saves if Orbax chooses them."""


@register_with_handler(Handler, for_restore=True)
class Restore(ocp.args.PyTreeRestore):
    """The arguments with which a `Handler` restores if Orbax chooses them."""


def registry(*items: str, handler: Handler | None = None) -> Any:
    """A registry for Orbax's managers in which a `Handler` stores all trees.

    Arguments:
        items: names of items that are restored without arguments, beside `default`.
        handler: the handler; by default one with default options.

    Returns:
        A `CheckpointHandlerRegistry`, to which you may add handlers for other items.

    Example:
        >>> import orbax.checkpoint as ocp
        >>> from unickpt.integrations.orbax import registry
        >>> manager = ocp.CheckpointManager("/tmp/run", handler_registry=registry())
    """
    handler = Handler() if handler is None else handler
    made = ocp.handlers.DefaultCheckpointHandlerRegistry()
    kinds = (
        ocp.args.StandardSave,
        ocp.args.StandardRestore,
        ocp.args.PyTreeSave,
        ocp.args.PyTreeRestore,
        Save,
        Restore,
    )
    for item in (None, "default", *items):
        for kind in kinds:
            made.add(item, kind, handler)
    return made


def _cast(tree: Any, save_args: Any) -> Any:
    """The arrays of a tree in the dtypes of Orbax's `SaveArgs`."""
    if not any(getattr(each, "dtype", None) is not None for each in jax.tree.leaves(save_args)):
        return tree

    def cast(leaf: Any, how: Any) -> Any:
        dtype = getattr(how, "dtype", None)
        if dtype is None:
            return leaf
        return leaf.astype(dtype) if hasattr(leaf, "astype") else np.asarray(leaf, dtype)

    return jax.tree.map(cast, tree, save_args)
