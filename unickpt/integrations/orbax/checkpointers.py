"""`Checkpointer` and its kinds, with the surface of Orbax's version 0: one checkpoint at a path.

What they save are ordinary checkpoints of unickpt; what Orbax saved, they restore as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from unickpt.errors import CheckpointExists, CheckpointNotFound, UnickptError
from unickpt.integrations.orbax import handlers, items, names
from unickpt.integrations.orbax.args import Composite, StandardRestore, StandardSave
from unickpt.integrations.orbax.described import StepMetadata, TreeMetadata
from unickpt.integrations.orbax.items import StoredItem
from unickpt.integrations.orbax.options import CheckpointManagerOptions, reading_arguments
from unickpt.integrations.orbax.placement import described_placement
from unickpt.integrations.orbax.policies import MultiprocessingOptions
from unickpt.integrations.orbax.replacing import Replaced
from unickpt.integrations.orbax.run import Info, custom_metadata, how_saved
from unickpt.integrations.orbax.steps import ORBAX
from unickpt.integrations.orbax.stored import item_metadata, item_of, items_of, saved_of
from unickpt.loading import loader
from unickpt.reading.checkpoint import Checkpoint, open
from unickpt.saving import saver
from unickpt.saving.background import PendingSave, SaveCallbacks, SaveRequest
from unickpt.saving.options import SaveOptions
from unickpt.storage import paths

__all__ = ["AsyncCheckpointer", "Checkpointer", "PyTreeCheckpointer", "StandardCheckpointer"]

ITEM = "default"


class DestinationExists(CheckpointExists, ValueError):
    """There is a checkpoint already, and `force` is False."""


class Checkpointer:
    """Saves and restores one checkpoint at a path, as `orbax.checkpoint.Checkpointer`.

    Arguments:
        handler: Orbax's or ours, such as `PyTreeCheckpointHandler()`, which says what is saved; its
            options tune Orbax's files, and are of no effect. Or one of your own.
        multiprocessing_options, file_options, atomicity_options, temporary_path_class: as of
            `CheckpointManagerOptions`.
        checkpoint_metadata_store: None.
        unickpt: {"options": unickpt.SaveOptions(...)}, and for restoring {"rules":
            unickpt.Rules(...), "hints": {...}, "load_options": unickpt.LoadOptions(...)}.

    Raises:
        ValueError, TypeError: an argument cannot be honoured; names it.

    Example:
        >>> import numpy as np
        >>> import unickpt.integrations.orbax as ocp
        >>> checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        >>> checkpointer.save("memory://orbax/alone", {"w": np.ones(2), "step": 3})
        >>> checkpointer.restore("memory://orbax/alone")
        {'w': array([1., 1.]), 'step': 3}
    """

    def __init__(
        self,
        handler: Any,
        *,
        multiprocessing_options: Any = None,
        file_options: Any = None,
        atomicity_options: Any = None,
        checkpoint_metadata_store: Any = None,
        temporary_path_class: Any = None,
        async_options: Any = None,
        unickpt: Mapping[str, Any] | None = None,
    ) -> None:
        if checkpoint_metadata_store is not None:
            raise ValueError(
                "checkpoint_metadata_store= is not supported: metadata are in the checkpoint; "
                "leave it out"
            )
        given = {
            "multiprocessing_options": multiprocessing_options,
            "file_options": file_options,
            "atomicity_options": atomicity_options,
            "temporary_path_class": temporary_path_class,
            "async_options": async_options,
        }
        CheckpointManagerOptions(**{k: v for k, v in given.items() if v is not None})  # checks them
        self.handler = handler
        more = dict(unickpt or {})
        self._reading = reading_arguments(more)
        self._options = SaveOptions.or_default(more.pop("options", None))
        if more:
            raise TypeError(f"unickpt= has no {next(iter(more))!r}; it has options, rules, hints")
        self._pending: PendingSave | None = None

    # --- saving ----------------------------------------------------------------------------------

    def save(
        self,
        directory: paths.PathLike,
        *args: Any,
        force: bool = False,
        custom_metadata: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Saves a checkpoint, and waits until it is committed.

        Arguments:
            directory: a local path or a URL (file, memory, s3, gs).
            args, kwargs: `args=ocp.args.PyTreeSave(tree)` and the like, or what such a class takes:
                `item`, `save_args=`.
            force: replace a checkpoint at the path, atomically; one that Orbax wrote, in a local
                folder.
            custom_metadata: JSON.

        Raises:
            CheckpointExists: there is a checkpoint already; also a `ValueError`.
            ValueError, TypeError: an argument cannot be honoured; names it.
            UnickptError: as `unickpt.save`.
        """
        self._pending = self._begin(directory, args, kwargs, force, custom_metadata)
        self._wait()

    def _begin(
        self,
        directory: paths.PathLike,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        force: bool,
        metadata: Mapping[str, Any] | None,
    ) -> PendingSave:
        handler, given = handlers.arguments(self.handler, True, *args, **kwargs)
        kinds, trees, single = {}, {}, given is None or items.kind_of(given) != "Composite"
        of_items = {ITEM: handler} if single else handlers.of_items(handler)
        for name, each in ({ITEM: given} if single else dict(given.items())).items():
            kinds[name], trees[name] = items.to_save(name, each, of_items.get(name))
        tree = trees[ITEM] if single else trees
        how = {"items": kinds, "single": ITEM if single else None, **described_placement(tree)}
        stored = {
            "custom_metadata": items.plain_json("custom_metadata", metadata or {}),
            # As Orbax, which has no folder for the only item; for an export.
            ORBAX: {**how, "alone": single},
        }
        location = paths.resolve(directory)
        replaced = Replaced.at(location, self._options, force=force)
        callbacks = SaveCallbacks(committed=replaced.committed, failed=lambda _: replaced.failed())
        try:
            return saver.begin(
                SaveRequest(
                    location,
                    tree,
                    self._options,
                    force,
                    metadata=lambda: stored,
                    callbacks=callbacks,
                )
            )
        except CheckpointExists as error:
            replaced.failed()
            raise _exists(error) from error
        except BaseException:
            replaced.failed()
            raise

    # --- restoring -------------------------------------------------------------------------------

    def restore(self, directory: paths.PathLike, *args: Any, **kwargs: Any) -> Any:
        """Restores a checkpoint, saved here or by Orbax.

        Arguments:
            directory: its path.
            args, kwargs: `args=ocp.args.PyTreeRestore(tree)` and the like, or what such a class
                takes: `item`, `restore_args=`, `transforms={}`. Nothing restores what is stored.

        Raises:
            CheckpointNotFound: there is none, also a `FileNotFoundError`.
            LoadMismatch: what is stored does not fit; as `unickpt.load`.
            ValueError, TypeError: an argument cannot be honoured; names it.
        """
        handler, given = handlers.arguments(self.handler, False, *args, **kwargs)
        if items.kind_of(given) != "Composite":
            return items.restore(self.stored_item(directory), given, handler)
        info, found = self._opened(directory)
        of_items = handlers.of_items(handler)
        wanted = dict(given.items()) or dict.fromkeys(items_of(info, found, None))
        load = partial(self._load, found)
        restored = {
            name: items.restore(item_of(info, found, name, None, load), each, of_items.get(name))
            for name, each in wanted.items()
        }
        return Composite(**restored)

    def _opened(self, directory: paths.PathLike) -> tuple[Info, Checkpoint]:
        found = open(directory, **self._reading.open)
        foreign, opening = found.reader.format == ORBAX, self._reading.open
        return Info(0, str(directory), foreign=foreign, opening=opening), found

    def _found(self, directory: paths.PathLike) -> tuple[Info, Checkpoint, str | None]:
        """A checkpoint, and the item of it that a path leads to; None for all of it."""
        try:
            return (*self._opened(directory), None)
        except CheckpointNotFound:
            step, _, name = str(directory).rstrip("/").rpartition("/")
            with suppress(UnickptError):
                info, found = self._opened(step)
                if name in how_saved(found).get("items", {}):
                    return info, found, name
            raise

    def _load(self, found: Checkpoint, like: Any, *, as_stored: bool, **arguments: Any) -> Any:
        more = self._reading.arguments(as_stored, arguments.get("under", ""))
        return loader.load(found, like, **arguments, **more)

    def stored_item(self, directory: paths.PathLike) -> StoredItem:
        """All of a checkpoint, as the one item that it is here; of `<step>/<item>`, as Orbax's
        folders of a manager's items are called, this item. It is not loaded."""
        info, found, name = self._found(directory)
        load = partial(self._load, found)
        kinds = how_saved(found).get("items", {})
        if name is not None:
            return item_of(info, found, name, None, load)
        kind = str(next(iter(kinds.values()))) if len(kinds) == 1 else ""
        return StoredItem(ITEM, "", found, kind, load, saved_of(info, found))

    def metadata(self, directory: paths.PathLike) -> StepMetadata:
        """What is known of a checkpoint: its tree in `item_metadata`, and `custom_metadata`."""
        info, found, _ = self._found(directory)
        kinds: Mapping[str, str] = {ITEM: ""}
        tree: Any
        if isinstance(self.handler, handlers.CompositeCheckpointHandler):
            kinds = items_of(info, found, None)
            trees = {n: TreeMetadata(item_metadata(item_of(info, found, n, None))) for n in kinds}
            tree = Composite(**trees)
        else:
            tree = TreeMetadata(item_metadata(self.stored_item(directory)))
        made = int(info.time.timestamp() * 1e9)
        return StepMetadata(kinds, tree, {}, made, custom_metadata(info, found))

    # --- closing ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for a save in the background."""
        self._wait()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except CheckpointExists as error:
            raise _exists(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"unickpt: {type(failed).__name__} in the background: {failed}")


def _exists(error: CheckpointExists) -> DestinationExists:
    return DestinationExists(f"{error}. Here, overwrite=True is called force=True")


class AsyncCheckpointer(Checkpointer):
    """A `Checkpointer` that saves in the background; the state may change when `save` returns.

    Example:
        >>> import numpy as np
        >>> import unickpt.integrations.orbax as ocp
        >>> with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        ...     tree = ocp.args.StandardSave({"w": np.ones(2)})
        ...     checkpointer.save("memory://orbax/behind", args=tree)
        ...     checkpointer.wait_until_finished()
        ...     checkpointer.restore("memory://orbax/behind")
        {'w': array([1., 1.])}
    """

    def __init__(self, handler: Any, timeout_secs: float | None = None, **options: Any) -> None:
        """As `Checkpointer`.

        Arguments:
            timeout_secs: how long processes wait for each other; or that of `async_options`.
        """
        super().__init__(handler, **options)
        asynchronous = options.get("async_options")
        if timeout_secs is None and asynchronous is not None:
            timeout_secs = asynchronous.timeout_secs
        if timeout_secs is not None:
            self._options = replace(self._options, timeout_s=float(timeout_secs))

    def save(
        self,
        directory: paths.PathLike,
        *args: Any,
        force: bool = False,
        custom_metadata: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Saves in the background, as `Checkpointer.save`; first waits for the save before.

        Raises:
            UnickptError: as `Checkpointer.save`, also of the save before.
        """
        self._wait()
        self._pending = self._begin(directory, args, kwargs, force, custom_metadata)

    def wait_until_finished(self) -> None:
        """Waits until the save is committed.

        Raises:
            UnickptError: it failed.
        """
        self._wait()

    def check_for_errors(self) -> None:
        """Raises the error of a save that has failed by now."""
        if self._pending is not None and self._pending.done():
            self._wait()


class StandardCheckpointer(AsyncCheckpointer):
    """An `AsyncCheckpointer` of trees, as `orbax.checkpoint.StandardCheckpointer`.

    Arguments:
        options: as for `Checkpointer`; those of `StandardCheckpointHandler` are of no effect.

    Example:
        >>> import numpy as np
        >>> import unickpt.integrations.orbax as ocp
        >>> with ocp.StandardCheckpointer() as checkpointer:
        ...     checkpointer.save("memory://orbax/standard", {"w": np.ones(2)})
        ...     checkpointer.wait_until_finished()
        ...     checkpointer.restore("memory://orbax/standard", {"w": np.zeros(2)})
        {'w': array([1., 1.])}
    """

    def __init__(self, **options: Any) -> None:
        own = inspect.signature(Checkpointer).parameters
        rest = {name: options[name] for name in options if name not in own}
        given = {name: options[name] for name in options if name in own}
        super().__init__(handlers.StandardCheckpointHandler(**rest), **given)

    def save(  # type: ignore[override]
        self,
        directory: paths.PathLike,
        state: Any,
        *,
        save_args: Any = None,
        force: bool = False,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Saves a tree in the background, as `AsyncCheckpointer.save`.

        Arguments:
            state: the tree.
            save_args: None, or a tree of `SaveArgs`, which only tune Orbax's files.
        """
        given = StandardSave(state, save_args)
        super().save(directory, args=given, force=force, custom_metadata=custom_metadata)

    def restore(self, directory: paths.PathLike, target: Any = None, *, strict: bool = True) -> Any:
        """Restores a tree, as `Checkpointer.restore`.

        Arguments:
            target: as the `item` of `StandardRestore`.
            strict: True; arrays are not padded or cut.
        """
        return super().restore(directory, args=StandardRestore(target, strict=strict))


class PyTreeCheckpointer(Checkpointer):
    """A `Checkpointer` of trees, as `orbax.checkpoint.PyTreeCheckpointer`.

    Arguments:
        primary_host: 0; process 0 commits.
        use_ocdbt, use_zarr3, use_compression: of Orbax's files; of no effect.
        unickpt: as for `Checkpointer`.

    Example:
        >>> import numpy as np
        >>> import unickpt.integrations.orbax as ocp
        >>> checkpointer = ocp.PyTreeCheckpointer()
        >>> checkpointer.save("memory://orbax/tree", {"w": np.ones(2), "b": np.ones(1)})
        >>> checkpointer.restore("memory://orbax/tree", item={"w": np.zeros(2)}, transforms={})
        {'w': array([1., 1.])}
    """

    def __init__(
        self,
        primary_host: int | None = 0,
        use_ocdbt: bool = True,
        use_zarr3: bool = False,
        use_compression: bool = True,
        *,
        unickpt: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            handlers.PyTreeCheckpointHandler(),
            multiprocessing_options=MultiprocessingOptions(primary_host=primary_host),
            unickpt=unickpt,
        )


def __getattr__(name: str) -> Any:
    return names.of_orbax("checkpointers", name)
