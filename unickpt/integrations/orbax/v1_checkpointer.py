"""`Checkpointer`, with the surface of Orbax's version 1."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from unickpt.integrations.orbax import items, policies, step_log, v1_context, v1_deletion
from unickpt.integrations.orbax.described import RootMetadata
from unickpt.integrations.orbax.run import (
    Info,
    Run,
    SavePolicies,
    StepAlreadyExistsError,
    StepNotFoundError,
    custom_metadata,
)
from unickpt.integrations.orbax.stored import as_path, item_of, items_of, saved_with
from unickpt.integrations.orbax.v1_context import Settings
from unickpt.integrations.orbax.v1_responses import (
    Response,
    SaveResponse,
    StepCheckpointMetadata,
    only_name,
)
from unickpt.integrations.orbax.values import (
    STATE,
    described_values,
    restored_value,
    value_metadata,
    without_metadata,
)
from unickpt.storage import paths


class OrbaxCheckpointer:
    """The checkpoints of a training run, as `orbax.checkpoint.v1.training.Checkpointer`.

    See `CheckpointManager` of `unickpt.integrations.orbax` for the folder, and for steps that Orbax
    saved there.

    Arguments:
        directory: a local path or a URL (file, memory, s3, gs).
        context: Orbax's, for what is called outside of a `with` block of another; by default that
            in which this is called. docs/integrations/orbax.md says which of its options count.
        save_decision_policy: when to save; by default whenever no save is in progress.
        preservation_policy: what to keep; by default all.
        step_name_format: Orbax's, says which folders of Orbax are steps; those of unickpt are
            always `step_<n>`.
        custom_metadata: JSON about the run; what the newest step has takes precedence.
        cleanup_tmp_directories, lightweight_initialize: of no effect.
        logger: its `log_entry` is called with a dict about each save and load.
        unickpt: further arguments of `unickpt.Checkpointer`.

    Example:
        >>> import numpy as np
        >>> from unickpt.integrations.orbax import v1 as ocp
        >>> keep = ocp.training.preservation_policies.LatestN(2)
        >>> with ocp.training.Checkpointer("memory://orbax/v1", preservation_policy=keep) as ckptr:
        ...     saved = [ckptr.save(step, {"w": np.full(2, step)}) for step in (1, 2, 3)]
        ...     ckptr.wait()
        ...     [each.step for each in ckptr.checkpoints], ckptr.load()
        ([2, 3], {'w': array([3, 3])})
    """

    def __init__(
        self,
        directory: paths.PathLike,
        *,
        context: Any = None,
        save_decision_policy: policies.SaveDecisionPolicy | None = None,
        preservation_policy: policies.PreservationPolicy | None = None,
        step_name_format: Any = None,
        custom_metadata: Any = None,
        cleanup_tmp_directories: bool = False,
        lightweight_initialize: bool = False,
        logger: Any = None,
        unickpt: Mapping[str, Any] | None = None,
    ) -> None:
        v1_context.check(context)
        self._context = v1_context.active() if context is None else context
        self._log = step_log.StepLog(logger, directory)
        given = dict(unickpt or {})
        given["options"] = Settings(self._context).save_options(given.get("options"))
        default = policies.AnySavePolicy(
            [
                policies.InitialSavePolicy(),
                policies.ContinuousCheckpointingPolicy(),
                policies.PreemptionCheckpointingPolicy(),
            ]
        )
        root = None
        if custom_metadata is not None:
            root = items.plain_json("custom_metadata", custom_metadata)
        keep = preservation_policy or policies.PreserveAll()
        named = _named_by(step_name_format, directory)
        rules = SavePolicies(save_decision_policy or default, keep, metadata=root, named=named)
        self._run = Run(directory, rules, given)
        self._directory = as_path(directory)

    # --- what there is ---------------------------------------------------------------------------

    @property
    def directory(self) -> Any:
        """As given: an `epath.Path` if that is installed."""
        return self._directory

    @property
    def latest(self) -> StepCheckpointMetadata | None:
        """The newest step; None if there is none."""
        return None if self._run.latest is None else _metadata(self._run.latest)

    @property
    def checkpoints(self) -> list[StepCheckpointMetadata]:
        """The steps, ascending, also one that is being saved."""
        return [_metadata(info) for info in self._run.infos]

    def reload(self) -> None:
        """Lists the storage anew, after somebody else has changed it."""
        self._run.reload()

    # --- saving ----------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether `save` would save this step."""
        return self._run.should_save(_number(step))

    def save(self, step: int, state: Any, **options: Any) -> bool:
        """Saves a step if the policy says so, and waits for the commit.

        Arguments:
            step: its number, above those that exist.
            state: a tree.
            checkpointable_name, force, overwrite, metrics, custom_metadata: as for `save_async`.

        Returns:
            Whether it was saved.

        Raises:
            StepAlreadyExistsError: the step exists.
            UnickptError: as `unickpt.Checkpointer.save`.
        """
        response = self.save_async(step, state, **options)
        return response is not None and bool(response.result())

    def save_async(
        self,
        step: int,
        state: Any,
        *,
        checkpointable_name: str = STATE,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> SaveResponse | None:
        """Saves a step in the background, if the policy says so.

        Arguments:
            checkpointable_name: the name of the state among others.
            force: save in any case.
            overwrite: replace the step if it exists, atomically.
            metrics: JSON, for policies.
            custom_metadata: JSON about the step.

        Returns:
            None, if it is not saved.
        """
        return self.save_checkpointables_async(
            step,
            {checkpointable_name: state},
            force=force,
            overwrite=overwrite,
            metrics=metrics,
            custom_metadata=custom_metadata,
        )

    def save_checkpointables(
        self, step: int, checkpointables: Mapping[str, Any], **options: Any
    ) -> bool:
        """Saves several things by name, as `save`."""
        response = self.save_checkpointables_async(step, checkpointables, **options)
        return response is not None and bool(response.result())

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: Mapping[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> SaveResponse | None:
        """Saves several things by name in the background, as `save_async`: trees, and objects with
        the functions of Orbax's `StatefulCheckpointable`, or with a handler."""
        settings = self._settings()
        settings.save_options()  # refuses what cannot be honoured
        number = _number(step)
        existing = next((info for info in self._run.infos if info.step == number), None)
        if existing is not None and not overwrite:
            raise StepAlreadyExistsError(f"step {number} exists at {existing.path}")
        if not force and not self._run.should_save(number, overwrite):
            return None
        tree, how = described_values(checkpointables, settings)
        with self._log.saving(number, synchronous=False):
            pending = self._run.save(
                number,
                tree,
                how,
                metrics=None if metrics is None else items.plain_json("metrics", metrics),
                metadata=items.plain_json("custom_metadata", custom_metadata or {}),
                overwrite=overwrite,
            )
        return SaveResponse(pending, self._run, settings.on_commit)

    def cancel(self, step: Any = None) -> None:
        """Not supported: a save in progress is waited for.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "Checkpointer.cancel is not supported: wait() until the save is committed, and "
            "delete(step)"
        )

    def is_saving_in_progress(self) -> bool:
        """Whether a save is not committed yet."""
        return self._run.is_saving

    def wait(self) -> None:
        """Waits until the save in progress is committed, and old steps are removed."""
        self._run.wait()

    # --- loading ---------------------------------------------------------------------------------

    def load(
        self, step: Any = None, abstract_state: Any = None, *, checkpointable_name: str = STATE
    ) -> Any:
        """Loads the state of a step, saved by this Checkpointer or by Orbax.

        Arguments:
            step: a number or `CheckpointMetadata`; None for the newest.
            abstract_state: a tree of `jax.ShapeDtypeStruct` with shardings, of arrays, or of
                metadata; None loads what was saved, onto devices as it was on.

        Raises:
            StepNotFoundError: the step does not exist.
            LoadMismatch: what is stored does not fit; as `unickpt.load`.
        """
        wanted = {checkpointable_name: without_metadata(abstract_state)}
        return self.load_checkpointables(step, wanted)[checkpointable_name]

    def load_checkpointables(
        self, step: Any = None, abstract_checkpointables: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Loads several things by name, as `load`; None loads all."""
        settings = self._settings()
        info, found = self._run.opened(_number(step))
        wanted = without_metadata(abstract_checkpointables)
        if wanted is None:
            wanted = dict.fromkeys(items_of(info, found, STATE))
        load = partial(self._run.load, info, options=settings.load_options())

        def restored(name: str, abstract: Any) -> Any:
            item = item_of(info, found, name, STATE, load)
            return restored_value(item, abstract, settings, saved_with(info, found, name))

        with self._log.restoring(info.step):
            return {name: restored(name, abstract) for name, abstract in wanted.items()}

    def load_async(
        self, step: Any = None, abstract_state: Any = None, *, checkpointable_name: str = STATE
    ) -> Response[Any]:
        """Loads the state of a step on a thread, as `load`."""
        which = {"checkpointable_name": checkpointable_name}
        return Response(partial(self.load, step, abstract_state, **which))

    def load_checkpointables_async(
        self, step: Any = None, abstract_checkpointables: Mapping[str, Any] | None = None
    ) -> Response[dict[str, Any]]:
        """Loads several things by name on a thread, as `load`."""
        return Response(partial(self.load_checkpointables, step, abstract_checkpointables))

    # --- metadata --------------------------------------------------------------------------------

    def metadata(self, step: Any = None) -> StepCheckpointMetadata:
        """What is stored in a step, as a tree."""
        found = self.checkpointables_metadata(step)
        only = found.metadata[only_name(found.metadata, found.path)]
        return replace(found, metadata=only)

    def checkpointables_metadata(self, step: Any = None) -> StepCheckpointMetadata:
        """What is stored in a step, as trees by name."""
        info, found = self._run.opened(_number(step))
        settings, read = self._settings(), partial(self._run.load, info)

        def described(name: str) -> Any:
            item = item_of(info, found, name, STATE, read)
            return value_metadata(item, settings, saved_with(info, found, name))

        trees = {name: described(name) for name in items_of(info, found, STATE)}
        return _metadata(info, trees, custom_metadata(info, found))

    def root_metadata(self) -> RootMetadata:
        """What is known of the run."""
        return RootMetadata(self._run.root_metadata, self.directory)

    # --- removing, closing -----------------------------------------------------------------------

    def delete(
        self, step: Any, *, checkpointable_name: None = None, missing_ok: bool = False
    ) -> bool:
        """Removes a step.

        Arguments:
            checkpointable_name: None; parts of a step cannot be removed.
            missing_ok: return False if it does not exist.
        """
        self._settings().check_deletion()
        v1_deletion.check_whole(checkpointable_name)
        try:
            self._run.delete(_number(step))
        except StepNotFoundError:
            if not missing_ok:
                raise
            return False
        return True

    def delete_async(
        self, step: Any, *, checkpointable_name: None = None, missing_ok: bool = False
    ) -> Response[bool]:
        """Removes a step on a thread, as `delete`; wait for it before the next save."""
        which: dict[str, Any] = {
            "checkpointable_name": checkpointable_name,
            "missing_ok": missing_ok,
        }
        return Response(partial(self.delete, step, **which))

    def close(self) -> None:
        """Waits as `wait`, then releases the directory."""
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

    # Orbax's names of before.
    save_pytree, save_pytree_async = save, save_async
    load_pytree, load_pytree_async, pytree_metadata = load, load_async, metadata

    def _settings(self) -> Settings:
        return Settings.current(self._context)


def _metadata(info: Info, found: Any = None, custom: Any = None) -> StepCheckpointMetadata:
    return StepCheckpointMetadata(info.step, as_path(info.path), found, custom, info)


def _named_by(step_name_format: Any, directory: paths.PathLike) -> Callable[[str, int], bool]:
    """Whether a folder of Orbax is a step, by its name and number."""
    if step_name_format is None:
        return lambda name, step: True
    if not callable(getattr(step_name_format, "find_step", None)):
        raise TypeError(
            f"step_name_format={step_name_format!r} must be one of Orbax's, such as "
            "path.step.standard_name_format()"
        )

    def named(name: str, step: int) -> bool:
        try:
            found = step_name_format.find_step(as_path(directory), step)
        except ValueError:  # there is none of that name
            return False
        return os.path.basename(str(found.path).rstrip("/")) == name

    return named


def _number(step: Any) -> Any:
    """The number of a step; None stays None."""
    return getattr(step, "step", step)
