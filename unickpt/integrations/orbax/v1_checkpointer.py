"""`Checkpointer`, with the surface of Orbax's version 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

from unickpt.integrations.orbax import items, policies
from unickpt.integrations.orbax.described import RootMetadata
from unickpt.integrations.orbax.run import (
    Info,
    Run,
    SavePolicies,
    StepAlreadyExistsError,
    StepNotFoundError,
    custom_metadata,
)
from unickpt.integrations.orbax.stored import as_path, item_metadata, item_of, items_of
from unickpt.integrations.orbax.values import STATE, described_values, restored_value
from unickpt.reading.checkpoint import Checkpoint
from unickpt.saving.background import PendingSave
from unickpt.storage import paths


@dataclass(frozen=True)
class CheckpointMetadata:
    """A step.

    Arguments:
        step: its number.
        path: its folder.
        metadata: None, or what is stored: a tree, or trees by name.
        custom_metadata: as given to `save`; only if metadata is not None.
    """

    step: int
    path: Any
    metadata: Any = None
    custom_metadata: Mapping[str, Any] | None = None
    info: Info | None = field(default=None, repr=False)

    @property
    def metrics(self) -> Any:
        return self.info and self.info.metrics

    @property
    def time(self) -> Any:
        return self.info and self.info.time

    @property
    def commit_timestamp_nsecs(self) -> int | None:
        return None if self.info is None else int(self.info.time.timestamp() * 1e9)


class SaveResponse:
    """A save in the background."""

    def __init__(self, pending: PendingSave, run: Run | None = None) -> None:
        self._pending, self._run = pending, run

    def result(self, timeout: float | None = None) -> bool:
        """Waits for the commit.

        Raises:
            SaveTimeout: it takes longer; the save continues.
            UnickptError: the save failed.
        """
        try:
            self._pending.result(timeout)
        finally:
            if self._run is not None:
                self._run.settle(self._pending)
        return True

    def on_complete(self, callback: Callable[[bool], None]) -> None:
        """Calls a function with True after the commit; not if the save fails."""

        def ended() -> None:
            self._pending.result()  # its error is logged, and raised by whoever waits
            callback(True)

        self._pending.add_done_callback(ended)


class OrbaxCheckpointer:
    """The checkpoints of a training run, as `orbax.checkpoint.v1.training.Checkpointer`.

    See `CheckpointManager` of `unickpt.integrations.orbax` for the folder, and for steps that Orbax
    saved there.

    Arguments:
        directory: a local path or a URL (file, memory, s3, gs).
        context, step_name_format, logger: None.
        save_decision_policy: when to save; by default whenever no save is in progress.
        preservation_policy: what to keep; by default all.
        custom_metadata: JSON about the run; what the newest step has takes precedence.
        cleanup_tmp_directories, lightweight_initialize: of no effect.
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
        refused = {"context": context, "step_name_format": step_name_format, "logger": logger}
        for name, value in refused.items():
            if value is not None:
                raise ValueError(
                    f"{name}={type(value).__name__} is not supported; options of unickpt go into "
                    "unickpt={'options': unickpt.SaveOptions(...)}"
                )
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
        rules = SavePolicies(save_decision_policy or default, keep, metadata=root)
        self._run = Run(directory, rules, unickpt or {})
        self._directory = as_path(directory)

    # --- what there is ---------------------------------------------------------------------------

    @property
    def directory(self) -> Any:
        """As given: an `epath.Path` if that is installed."""
        return self._directory

    @property
    def latest(self) -> CheckpointMetadata | None:
        """The newest step; None if there is none."""
        return None if self._run.latest is None else _metadata(self._run.latest)

    @property
    def checkpoints(self) -> list[CheckpointMetadata]:
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
        return response is not None and response.result()

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
        return response is not None and response.result()

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
        the functions of Orbax's `StatefulCheckpointable`."""
        number = _number(step)
        existing = next((info for info in self._run.infos if info.step == number), None)
        if existing is not None and not overwrite:
            raise StepAlreadyExistsError(f"step {number} exists at {existing.path}")
        if not force and not self._run.should_save(number, overwrite):
            return None
        tree, how = described_values(checkpointables)
        pending = self._run.save(
            number,
            tree,
            how,
            metrics=None if metrics is None else items.plain_json("metrics", metrics),
            metadata=items.plain_json("custom_metadata", custom_metadata or {}),
            overwrite=overwrite,
        )
        return SaveResponse(pending, self._run)

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
                metadata; None loads NumPy arrays.

        Raises:
            StepNotFoundError: the step does not exist.
            LoadMismatch: what is stored does not fit; as `unickpt.load`.
        """
        wanted = {checkpointable_name: abstract_state}
        return self.load_checkpointables(step, wanted)[checkpointable_name]

    def load_checkpointables(
        self, step: Any = None, abstract_checkpointables: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Loads several things by name, as `load`; None loads all."""
        info, found = self._run.opened(_number(step))
        wanted = abstract_checkpointables
        if wanted is None:
            wanted = dict.fromkeys(items_of(info, found, STATE))
        load = partial(self._run.load, info)
        return {
            name: restored_value(item_of(info, found, name, STATE, load), abstract)
            for name, abstract in wanted.items()
        }

    # --- metadata --------------------------------------------------------------------------------

    def metadata(self, step: Any = None) -> CheckpointMetadata:
        """What is stored in a step, as a tree."""
        found = self.checkpointables_metadata(step)
        names = list(found.metadata)
        if STATE not in names and len(names) != 1:
            raise StepNotFoundError(f"{found.path} has no {STATE!r}; there are {', '.join(names)}")
        only = found.metadata[STATE if STATE in names else names[0]]
        return CheckpointMetadata(found.step, found.path, only, found.custom_metadata, found.info)

    def checkpointables_metadata(self, step: Any = None) -> CheckpointMetadata:
        """What is stored in a step, as trees by name."""
        info, found = self._run.opened(_number(step))
        return _metadata(info, _trees(info, found), custom_metadata(info, found))

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
        if checkpointable_name is not None:
            raise ValueError(
                f"checkpointable_name={checkpointable_name!r} is not supported: parts of a step "
                "cannot be removed; save it again without"
            )
        try:
            self._run.delete(_number(step))
        except StepNotFoundError:
            if not missing_ok:
                raise
            return False
        return True

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

    save_pytree, save_pytree_async, load_pytree, pytree_metadata = save, save_async, load, metadata


def _metadata(info: Info, found: Any = None, custom: Any = None) -> CheckpointMetadata:
    return CheckpointMetadata(info.step, as_path(info.path), found, custom, info)


def _trees(info: Info, found: Checkpoint) -> dict[str, Any]:
    names = items_of(info, found, STATE)
    return {name: item_metadata(item_of(info, found, name, STATE)) for name in names}


def _number(step: Any) -> Any:
    """The number of a step; None stays None."""
    return getattr(step, "step", step)
