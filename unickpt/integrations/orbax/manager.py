"""`CheckpointManager`, with the surface of Orbax's version 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from unickpt.integrations.orbax import handlers, items, policies
from unickpt.integrations.orbax import options as manager_options
from unickpt.integrations.orbax.args import Composite
from unickpt.integrations.orbax.described import RootMetadata, StepMetadata, TreeMetadata
from unickpt.integrations.orbax.older import args_of_old, handlers_of, saves_in_background
from unickpt.integrations.orbax.options import CheckpointManagerOptions
from unickpt.integrations.orbax.placement import described_placement
from unickpt.integrations.orbax.run import Info, Run, SavePolicies, custom_metadata, how_saved
from unickpt.integrations.orbax.run import reached_preemption as _reached_preemption
from unickpt.integrations.orbax.step_log import StepLog
from unickpt.integrations.orbax.stored import as_path, item_metadata, item_of, items_of
from unickpt.reading.checkpoint import Checkpoint
from unickpt.storage import paths

DEFAULT = "default"


class CheckpointManager:
    """The checkpoints of a training run, as `orbax.checkpoint.CheckpointManager`.

    All processes create it with the same arguments and call the same methods. Each step is an
    ordinary checkpoint of unickpt, `step_<n>` below the directory. Steps that Orbax saved into the
    same directory are listed and restored as well; they are never removed, and no option counts
    them.

    Arguments:
        directory: a local path or a URL (file, memory, s3, gs).
        checkpointers: the old way: a `Checkpointer`, or one for each item; then `save` and
            `restore` take `items` as well.
        options: Orbax's `CheckpointManagerOptions` or ours.
        metadata: JSON about the run; what the newest step has takes precedence.
        item_names: names of items; then `args` are a `Composite` of some of them.
        item_handlers: a handler, or one for each item; Orbax's own, or with `save(directory,
            args=)` and `restore(directory, args=)`.
        logger: Orbax's, or with `log_entry(dict)`: is told of each save and restore.
        handler_registry: one of Orbax's, instead of `item_handlers`.
        unickpt: further arguments of `unickpt.Checkpointer`, such as {"reuse": True} or
            {"options": unickpt.SaveOptions(...)}. For restoring what Orbax saved, or what is in
            another directory: "rules", a `unickpt.Rules` or one for each item, by which trees are
            restored into others; "hints"; and "load_options".

    Raises:
        ValueError, TypeError: an argument cannot be honoured; names it.
        CheckpointExists: a step is there twice, saved by Orbax and by unickpt.

    Example:
        >>> import numpy as np
        >>> import unickpt.integrations.orbax as ocp
        >>> options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=10)
        >>> with ocp.CheckpointManager("memory://orbax/run", options=options) as manager:
        ...     for step in range(31):
        ...         _ = manager.save(step, args=ocp.args.StandardSave({"w": np.full(2, step)}))
        ...     manager.wait_until_finished()
        ...     manager.all_steps(), manager.restore(manager.latest_step())
        ([20, 30], {'w': array([30, 30])})
    """

    def __init__(
        self,
        directory: paths.PathLike,
        checkpointers: Any = None,
        options: Any = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
        *,
        unickpt: Mapping[str, Any] | None = None,
        is_other: bool = False,
    ) -> None:
        self._options = CheckpointManagerOptions() if options is None else options
        manager_options.check(self._options)
        self._given, self._directory = directory, as_path(directory)
        self._more, self._log = dict(unickpt or {}), StepLog(logger, directory)
        self._of_old: Any = None
        if checkpointers is not None:
            if item_names or item_handlers is not None:
                raise ValueError("checkpointers= goes without item_names= and item_handlers=")
            self._of_old = item_handlers = handlers_of(checkpointers)
        self._in_background = self._options.enable_async_checkpointing and (
            checkpointers is None or saves_in_background(checkpointers)
        )
        self._handlers: dict[str, Any] = {}
        self._of_kinds: dict[type, Any] = {}
        self._names = tuple(item_names or ())
        self._default: bool | None = False if item_names else None
        if isinstance(item_handlers, Mapping):
            self._handlers = {name: handlers.of_user(h) for name, h in item_handlers.items()}
            self._default = False
        elif item_handlers is not None:
            if item_names:
                raise ValueError("item_names= goes with item_handlers= by the names of items")
            self._handlers = {DEFAULT: handlers.of_user(item_handlers)}
            self._default = True
        if handler_registry is not None:
            if item_handlers is not None:
                raise ValueError("pass item_handlers= or handler_registry=, not both")
            self._handlers, self._of_kinds = handlers.of_registry(handler_registry)
        waiting = self._options.async_options
        root = None if metadata is None else items.plain_json("metadata", metadata)
        self._run = Run(
            directory,
            _rules(self._options, root, self._in_background),
            self._more,
            None if waiting is None else waiting.timeout_secs,
            is_other=is_other,
        )

    # --- saving ----------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether `save` would save this step."""
        return self._run.should_save(step)

    def reached_preemption(self, step: int) -> bool:
        """Whether the job is about to be stopped, as `jax.distributed` tells all processes."""
        return _reached_preemption(step)

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool | None = False,
        args: Any = None,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> bool:
        """Saves a step if the options say so, in the background.

        Arguments:
            step: its number, above those that exist.
            items, save_kwargs: the old way, for a manager with `checkpointers`.
            metrics: JSON, for `best_fn`.
            force: save in any case, except with `read_only`.
            args: what to save: `args.StandardSave(tree)` and the like, or a `Composite` of them.
            custom_metadata: JSON about the step.

        Returns:
            Whether it is saved.

        Raises:
            StepAlreadyExistsError: the step exists.
            LaterStepsExist: later steps exist.
            ValueError, TypeError: an argument cannot be honoured; names it.
            UnickptError: as `unickpt.Checkpointer.save`, also of the save before.
        """
        args = args_of_old(self._of_old, True, items, save_kwargs, args)
        if args is None:
            raise ValueError("save: args= is missing, such as args.StandardSave(tree)")
        self._check_args(args)
        if self._options.read_only or not (force or self.should_save(step)):
            return False
        with self._log.saving(step, not self._in_background) as log:
            tree, how = self._described(args)
            as_json = _json
            with log.part("wait_for_prev"):
                self._run.wait_saved()
            with log.part("checkpointer_blocking"):
                self._run.save(
                    step,
                    tree,
                    how,
                    metrics=None if metrics is None else as_json("metrics", metrics),
                    metadata=as_json("custom_metadata", custom_metadata or {}),
                )
        return True

    def _described(self, args: Any) -> tuple[Any, dict[str, Any]]:
        """The tree to save, and how it is to be restored."""
        given = {DEFAULT: args} if self._default else dict(args.items())
        kinds, trees = {}, {}
        unknown = [name for name in given if self._names and name not in self._names]
        if unknown:
            raise ValueError(
                f"the item {unknown[0]!r} does not match with any registered handler: item_names= "
                f"has {', '.join(self._names)}"
            )
        for name, each in given.items():
            kinds[name], trees[name] = items.to_save(name, each, self._handler(name, each))
        own = {n: m for n, e in given.items() if (m := getattr(e, "custom_metadata", None))}
        tree, single = (trees[DEFAULT], DEFAULT) if self._default else (trees, None)
        how = {"items": kinds, "single": single, **described_placement(tree)}
        if own:
            how["item_metadata"] = _json("custom_metadata", own)
        return tree, how

    def _handler(self, name: str, args: Any) -> Any:
        """The user's own handler of an item."""
        return self._handlers.get(name, self._of_kinds.get(type(args)))

    def _check_args(self, args: Any) -> None:
        composite = items.kind_of(args) == "Composite"
        if self._default is None:
            self._default = not composite
        if composite == self._default:
            wanted = "one item, not a Composite" if self._default else "a Composite of named items"
            raise ValueError(f"args= is a {type(args).__name__}; this manager has {wanted}")

    def wait_until_finished(self) -> None:
        """Waits until the save in progress is committed, and old steps are removed.

        Raises:
            UnickptError: it failed.
        """
        self._run.wait()

    def is_saving_in_progress(self) -> bool:
        """Whether a save is not committed yet."""
        return self._run.is_saving

    def check_for_errors(self) -> None:
        """Raises the error of a save that has failed by now."""
        self._run.check_for_errors()

    # --- restoring -------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: paths.PathLike | None = None,
        args: Any = None,
    ) -> Any:
        """Restores a step, saved by this manager or by Orbax.

        Arguments:
            step: its number; None for the newest.
            items, restore_kwargs: the old way, for a manager with `checkpointers`.
            directory: of another run.
            args: what to restore: `args.StandardRestore(abstract_tree)` and the like, or a
                `Composite` of them, in which None restores an item as it was saved. None restores
                all.

        Returns:
            The item; a `Composite`, if the items have names.

        Raises:
            StepNotFoundError: the step does not exist.
            LoadMismatch: what is stored does not fit; as `unickpt.load`.
            ValueError, TypeError: an argument cannot be honoured; names it.
        """
        args = args_of_old(self._of_old, False, items, restore_kwargs, args)
        if directory is not None:
            return self._restore_other(step, directory, args)
        info, found = self._run.opened(step)
        with self._log.restoring(info.step):
            return self._restore(info, found, args)

    def _restore(self, info: Info, found: Checkpoint, args: Any) -> Any:
        if self._default is None:
            self._default = DEFAULT in items_of(info, found, None)
        if args is not None:
            self._check_args(args)
        names = items_of(info, found, DEFAULT if self._default else None)
        if self._default:
            return self._restored(info, found, DEFAULT, args)
        wanted: dict[str, Any] = dict.fromkeys(names) if args is None else dict(args.items())
        restored = {n: self._restored(info, found, n, each) for n, each in wanted.items()}
        return Composite(**restored)

    def _restored(self, info: Info, found: Checkpoint, name: str, args: Any) -> Any:
        single = DEFAULT if self._default else None
        item = item_of(info, found, name, single, partial(self._run.load, info))
        return items.restore(item, args, self._handler(name, args))

    def _restore_other(self, step: int | None, directory: paths.PathLike, args: Any) -> Any:
        only_read = CheckpointManagerOptions(read_only=True, create=False)
        with CheckpointManager(
            directory,
            options=only_read,
            item_handlers=self._handlers or None,
            unickpt=self._more,
            is_other=True,
        ) as other:
            return other.restore(step, args=args)

    # --- what there is ---------------------------------------------------------------------------

    @property
    def directory(self) -> Any:
        """As given: an `epath.Path` if that is installed."""
        return self._directory

    def all_steps(self, read: bool = False) -> list[int]:
        """The steps, ascending, also one that is being saved.

        Arguments:
            read: list the storage anew, as `reload`.
        """
        if read:
            self.reload()
        return [info.step for info in self._run.infos]

    def latest_step(self) -> int | None:
        """The newest step; None if there is none."""
        return None if self._run.latest is None else self._run.latest.step

    def best_step(self) -> int | None:
        """The best step by `best_fn`; without it the newest. None if there is none."""
        best_fn = self._options.best_fn
        if best_fn is None:
            return self.latest_step()
        infos = self._run.infos
        ranked = policies.ranking(infos, best_fn, self._options.best_mode == "min")
        return infos[ranked[-1]].step if ranked else None

    def reload(self) -> None:
        """Lists the storage anew, after somebody else has changed it."""
        self._run.reload()

    def delete(self, step: int) -> None:
        """Removes a step; with `read_only`, does nothing.

        Raises:
            StepNotFoundError: it does not exist.
            CheckpointExists: Orbax wrote it; remove the folder.
        """
        if not self._options.read_only:
            self._run.delete(step)

    def metrics(self, step: int) -> Any:
        """The metrics of a step; None if it has none."""
        return self._run.info(step).metrics

    def item_metadata(self, step: int) -> Any:
        """The trees of a step: a `TreeMetadata`, or a `Composite` of them."""
        return self.metadata(step).item_metadata

    def metadata(self, step: int | None = None) -> Any:
        """The `StepMetadata` of a step; the `RootMetadata` of the run, if no step is given."""
        if step is None:
            return RootMetadata(self._run.root_metadata, self.directory)
        info, found = self._run.opened(step)
        if self._default is None:
            self._default = DEFAULT in items_of(info, found, None)
        single = DEFAULT if self._default else None
        kinds = items_of(info, found, single)
        own = how_saved(found).get("item_metadata", {})
        trees = {
            name: TreeMetadata(item_metadata(item_of(info, found, name, single)), own.get(name))
            for name in kinds
        }
        return StepMetadata(
            kinds,
            trees[DEFAULT] if self._default else Composite(**trees),
            info.metrics or {},
            int(info.time.timestamp() * 1e9),
            custom_metadata(info, found),
        )

    # --- closing ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits as `wait_until_finished`, then releases the directory.

        Raises:
            UnickptError: as `wait_until_finished`.
        """
        self._run.close()

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


_json = items.plain_json  # within `save`, `items` is an argument


def _rules(options: Any, metadata: Mapping[str, Any] | None, in_background: bool) -> SavePolicies:
    return SavePolicies(
        manager_options.save_policy(options),
        manager_options.preservation_policy(options),
        options.read_only,
        options.create or options.read_only,
        in_background,
        not options.prevent_write_metrics,
        metadata if options.save_root_metadata else None,
        options.enable_should_save_is_saving_in_progress_check,
        named=manager_options.step_names(options),
    )
