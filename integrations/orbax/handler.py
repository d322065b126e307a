"""unickpt inside Orbax's own managers: a checkpoint handler that stores trees in our format."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_args import register_with_handler

import unickpt
from unickpt import LoadOptions, Rules, SaveOptions
from unickpt.extend import SaveCallbacks, SaveRequest, save_in_background, settle_future
from unickpt.integrations.destination import Destination
from unickpt.integrations.orbax.placement import described_placement
from unickpt.integrations.orbax.restoring import METADATA, OrbaxTree
from unickpt.types import PendingSave

MARKER = "UNICKPT.txt"
_NOT_REPLACED = (MARKER, "_METADATA", "_CHECKPOINT_METADATA", "commit_success.txt")
"""Files next to a tree that a handler or Orbax writes, also in an earlier try."""
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
        rules: map the stored names and axes to those of the tree to restore.
        pytree_metadata_options: Orbax's `PyTreeMetadataOptions`. By default, a restore without an
            abstract tree gives lists and dicts in place of tuples and named tuples, as Orbax does.

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
        pytree_metadata_options: Any = None,
    ) -> None:
        self._save_options = SaveOptions.or_default(save_options)
        self._load_options, self._rules = load_options, rules
        self._metadata_options = pytree_metadata_options

    async def async_save(
        self, directory: Any, item: Any = None, save_args: Any = None, args: Any = None
    ) -> list[Future[None]]:
        """Stages a tree, and saves it in the background once Orbax has created the directory."""
        created = ocp.future.CommitFutureAwaitingContractedSignals(
            _NoValue(), name=f"unickpt waits for {os.fspath(directory)}"
        )
        pending = self._begin(directory, args or Save(item, save_args), created.result)
        return [as_future(pending)]

    def save(
        self, directory: Any, item: Any = None, save_args: Any = None, args: Any = None
    ) -> None:
        """Saves a tree; returns when it is committed."""
        self._begin(directory, args or Save(item, save_args), lambda: None).result()

    def _begin(self, directory: Any, args: Any, wait_created: Callable[[], None]) -> PendingSave:
        tree = args.item
        if args.save_args is not None:
            tree = cast(tree, _dtypes_of(args.save_args))
        path = os.fspath(directory)
        return begin_save(path, tree, self._save_options, wait_created, args.custom_metadata)

    def restore(self, directory: Any, item: Any = None, args: Any = None, **options: Any) -> Any:
        """Restores a tree; onto any mesh and any number of processes."""
        return self._stored(directory).restore(args or Restore(item, **options))

    def metadata(self, directory: Any) -> Any:
        """The structure of a stored tree, as Orbax describes it."""
        return self._stored(directory).metadata(directory)

    def finalize(self, directory: Any) -> None:
        """Writes a file that identifies the folder."""
        if ocp.multihost.is_primary_host(0):
            write_marker(directory)

    def close(self) -> None:
        """Does nothing: no resources outlive a call."""

    def _stored(self, directory: Any) -> OrbaxTree:
        checkpoint = unickpt.open(os.fspath(directory))
        return OrbaxTree(checkpoint, self._rules, self._load_options, self._metadata_options)


class _NoValue:
    """An awaitable that is done; unlike a coroutine, it may also never be awaited."""

    def __await__(self) -> Iterator[None]:
        return iter(())


def begin_save(
    path: str,
    tree: Any,
    options: SaveOptions,
    wait_created: Callable[[], None],
    custom_metadata: Any = None,
) -> PendingSave:
    """Stages a tree; a thread saves it as soon as its directory exists.

    Arguments:
        path: of the directory.
        tree: to save.
        options: of the save.
        wait_created: waits until Orbax has created the directory; an error fails the save.
        custom_metadata: for Orbax's metadata of the tree.
    """
    jax.tree.structure(tree)  # refuses unsortable trees, as with keys of mixed types
    metadata: dict[str, Any] = described_placement(tree)
    if custom_metadata is not None:
        metadata["custom_metadata"] = custom_metadata
    return save_in_background(
        SaveRequest(
            Destination.at_path(path, lambda _: (), _NOT_REPLACED).location,
            tree,
            options,
            overwrite=True,  # Orbax has decided that; the directory may be there from a killed job
            metadata=lambda: {METADATA: metadata},
            callbacks=SaveCallbacks(prepare=lambda _: wait_created()),
            is_delayed=True,
        )
    )


def as_future(pending: PendingSave) -> Future[Any]:
    """The outcome of a save for Orbax, which raises the error; the next save does not."""
    outcome: Future[Any] = Future()
    outcome.set_running_or_notify_cancel()  # a save that has begun is not cancelled
    pending.add_done_callback(lambda: settle_future(outcome, pending.result))
    return outcome


def write_marker(directory: Any) -> None:
    """Writes a file that identifies a directory."""
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
        items: names of items that are restored without arguments, besides `default`.
        handler: the handler; by default one with default options.

    Returns:
        A `CheckpointHandlerRegistry`, to which you may add handlers for other items.

    Example:
        >>> import orbax.checkpoint as ocp
        >>> from unickpt.integrations.orbax import registry
        >>> manager = ocp.CheckpointManager("/tmp/run", handler_registry=registry())
    """
    handler = Handler() if handler is None else handler
    result = ocp.handlers.DefaultCheckpointHandlerRegistry()
    theirs = ("StandardSave", "StandardRestore", "PyTreeSave", "PyTreeRestore")
    kinds = [*(getattr(ocp.args, name) for name in theirs), Save, Restore]
    for item in (None, "default", *items):
        for kind in kinds:
            result.add(item, kind, handler)
    return result


def _dtypes_of(save_args: Any) -> Callable[[Any, Any], Any]:
    """The dtype of Orbax's `SaveArgs` for each path and leaf."""
    leaves = jax.tree_util.tree_flatten_with_path(save_args)[0]
    dtypes = {path: leaf.dtype for path, leaf in leaves if getattr(leaf, "dtype", None)}
    return lambda path, _: dtypes.get(path)


def cast(tree: Any, dtype_of: Callable[[Any, Any], Any]) -> Any:
    """The arrays and numbers of a tree in other dtypes; random keys stay.

    Arguments:
        dtype_of: the dtype of a leaf, by its path and value; None for its own.
    """

    def cast_leaf(path: Any, leaf: Any) -> Any:
        dtype = dtype_of(path, leaf)
        if dtype is None or not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float):
            return leaf
        if isinstance(leaf, int | float):
            return np.asarray(leaf, dtype).item()
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
            return leaf
        return leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast_leaf, tree)
