"""The Checkpointer: saves, keeps, cleans up and resumes the steps of a training run."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

from unickpt.features import SaveCall, SaveFeature
from unickpt.frameworks.leaves import job_group
from unickpt.loading.loader import LoadArguments
from unickpt.loading.report import LoadReport
from unickpt.options import SaveOptions, take_write_policy
from unickpt.reading.load_options import LoadOptions
from unickpt.run_event import hears_events
from unickpt.runs.arguments import (
    PolicyFields,
    StepArguments,
    fences_of,
    roles_of,
    run_text,
    take_policies,
    take_tier,
)
from unickpt.runs.background_removal import Cleaning
from unickpt.runs.current_steps import Steps, step_number
from unickpt.runs.requested_removal import Removal
from unickpt.runs.retention import Retention
from unickpt.runs.run_events import RunEvents
from unickpt.runs.run_features import Listener, RunFeatures
from unickpt.runs.save_triggers import SaveEvery, SaveTriggers, SigtermHandler
from unickpt.runs.step_folder import StepFolder
from unickpt.runs.step_loader import StepLoader
from unickpt.runs.step_save import StepSave, check_changed, find_base, knowing
from unickpt.runs.tier_copies import IN_ROOT, Copying
from unickpt.saving.background import PendingSave, SaveQueue, SaveRequest
from unickpt.storage import paths

T = TypeVar("T")


class Checkpointer:
    """The checkpoints of a training run, as `step_<n>` below one folder.

    Saves run in the background, one after another. `PendingSave.result` raises their errors, else
    the next `save`, `wait` or `close` does, else the program exits with status 1. In a job of
    several processes, all create a Checkpointer with the same arguments and call `save`, `load` and
    `should_save` together; only process 0 deletes and copies.

    One job at a time may save into `root`. On object storage, if the last job did not close its
    Checkpointer, the next job waits for 40 s before its first save, to see whether the other still
    runs.

    Arguments:
        root: a local path or a URL (file, memory, s3, gs).
        keep_last: keep this many of the newest steps; without any rule, all are kept.
        keep: which other steps to keep, see `Retention`; a step is kept if any rule keeps it.
        after: continue after this step, abandoning later steps of earlier jobs (howto/steps.md).
        save_every: `should_save` returns true at multiples of this; or `SaveEvery`, by time, too.
        local: a path on fast storage that all processes share, to commit to first.
        node_local: a path of each node's own, such as in its memory, to save to first.
        roles: the roots of all parts of a job that save separately (howto/processes.md).
        reuse: do not write equal chunks again: True or "digest", "compare", "patch" (reuse.md).
        experts: save only some experts of a mixture of experts at a time, see `Experts`.
        optimizers: torch optimizers; only their `step` changes what they own (docs/howto/save.md).
        options: for all saves, see `SaveOptions`.
        policies: fields of `Retention`, `SaveEvery` (`save_every_s`) or `Experts`, given directly;
            and those of `node_local` (docs/howto/nodes.md).

    Raises:
        ValueError: the arguments are invalid.
        InvalidPath: a path does not name a storage.
        StorageError: one of `roles` cannot be listed.

    Example:
        >>> import numpy as np, unickpt
        >>> state = {"w": np.zeros(3), "step": 0}
        >>> with unickpt.Checkpointer("memory://run/docs", keep_last=2, save_every=10) as ckpt:
        ...     if ckpt.latest() is not None:
        ...         state = ckpt.load(state)
        ...     for step in range(state["step"], 41):
        ...         state["w"] += 1
        ...         if ckpt.should_save(step):
        ...             _ = ckpt.save(step, state | {"step": step})
        ...     ckpt.wait()
        ...     ckpt.steps()
        [30, 40]
    """

    def __init__(
        self,
        root: paths.PathLike,
        *,
        keep_last: int | None = None,
        keep: Retention | Callable[[int], bool] | None = None,
        after: int | None = None,
        save_every: int | SaveEvery | None = None,
        local: paths.PathLike | None = None,
        node_local: paths.PathLike | None = None,
        roles: Sequence[paths.PathLike] = (),
        reuse: bool | Literal["digest", "compare", "patch"] = False,
        experts: SaveFeature | None = None,
        optimizers: Sequence[Any] = (),
        options: SaveOptions | None = None,
        **policies: Unpack[PolicyFields],
    ) -> None:
        arguments: dict[str, Any] = {"keep_last": keep_last, "keep": keep, "experts": experts}
        arguments |= {"save_every": save_every, "reuse": reuse, **policies}
        self._options, folder = SaveOptions.or_default(options), StepFolder(root)
        if (chosen := take_write_policy(arguments)) is not None:
            self._options = self._options.with_feature(chosen)
        tier = take_tier(folder, local, node_local, arguments, self._options)
        retention, when = take_policies(arguments)
        self._reuses = reuse is not False
        if self._reuses:
            _ = self._options.references  # a missing plug-in is reported here
        check_changed(self._options.changed, self._reuses)
        if not isinstance(reuse, bool):
            self._options = replace(self._options, reuse=reuse)
        refused: dict[str, Any] = {"after": after, "local": local, "node_local": node_local}
        refused |= {"save_every_s": when.seconds, "preemption": when.preemption or None}
        refused["when_busy"] = None if when.when_busy == "wait" else when.when_busy
        other_roles = roles_of(folder, roles, refused)
        after = after if after is None else step_number(after, "after=")
        local_folder = None if tier is None else tier.folder
        self._steps = Steps(folder, retention, local_folder, other_roles, after)
        self._queue = SaveQueue()
        self._triggers = SaveTriggers(when, self._queue.unfinished)
        self._saved_at = time.monotonic()
        leaves_out, ended = tier is None or not tier.takes_all, self._queue.wait_ended
        self._features = RunFeatures(self._options, self._steps.first, ended, leaves_out=leaves_out)
        self._fences = fences_of(optimizers, self._queue.fence)
        self._sigterm: SigtermHandler | None = None
        if when.preemption:
            self._sigterm = SigtermHandler(self._triggers.request_stop)
            weakref.finalize(self, self._sigterm.remove).atexit = False
        self._cleaning = Cleaning(self._steps, retires=self._features.need_steps_before)
        self._copying: Copying | None = None
        if tier is not None:
            parts = self._steps, self._cleaning, self._queue.errors
            self._copying = tier.copying(*parts, self._options)
        run = self._steps, self._cleaning, self._features, self._queue
        self._removal = Removal(*run, fsync=self._options.fsync)
        self._events: RunEvents | None = None
        if hears_events(self._options.metrics):
            self._events = RunEvents(self._options.metrics, self._steps)
        self._closed = False
        self._group = partial(job_group, self._options.group, self._options.timeout_s)
        self.loaded_step: int | None = None
        """The step that `load` returned."""

    def __repr__(self) -> str:
        return run_text(self._steps, self._closed)

    # --- saving --------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether to save now: by `save_every`, or because the job must stop; else False.
        All processes get the same answer. They communicate if it depends on time, preemption or
        `when_busy`, so all must call this at the same steps.

        Raises:
            ValueError: the step is not an integer, or the processes cannot agree (see
                `ProcessGroup`).
        """
        group = self._group()
        is_due = self._triggers.is_due(step_number(step), group, self._saved_at)
        if self._events is not None:
            self._events.reached(step_number(step), group)
            if self._triggers.has_skipped:
                self._events.skipped(step_number(step), group)
        return is_due

    def preempt(self) -> None:
        """Announces that the job is about to be stopped, as SIGTERM does with
        `SaveEvery(preemption=True)`."""
        self._triggers.request_stop()

    @property
    def preempted(self) -> bool:
        """Whether the job must stop, as agreed by all processes in `should_save`."""
        return self._triggers.preempted

    def prepare(self, tree: Any) -> int:
        """Prepares for the saves of a state, so that the first call of `save` takes no longer than
        later ones: plans them, and takes the memory for copies of the state, on an accelerator
        page-locked, within `SaveOptions(budget_bytes=)`. Nothing is written. All processes call it.

        Arguments:
            tree: as for `save`; its arrays are copied, and the copies dropped.

        Returns:
            The bytes of this process for which there is memory now; 0 where `save` copies nothing.

        Raises:
            UnsupportedLeaf: something cannot be stored.
            ValueError: the Checkpointer is closed.

        Example:
            >>> import numpy as np, unickpt
            >>> with unickpt.Checkpointer("memory://run/prepared") as ckpt:
            ...     ckpt.prepare({"w": np.zeros(10**6)})
            8000000
        """
        self._queue.check_process()  # before the lock, as in `save`
        with self._queue.beginning:
            _check_open(self)
            request = SaveRequest(
                self._steps.first.location_of(0),
                tree,
                self._features.options_without,
                owners=_owners(self._fences),
                group=self._group(saves=True),
            )
            return self._queue.prepare(request)

    def save(
        self,
        step: int,
        tree: Any,
        *,
        wait: bool = False,
        metrics: Mapping[str, float] | None = None,
        tokens: Mapping[str, Mapping[int, float] | Sequence[float]] | None = None,
        changed: Mapping[str, Any] | Literal["tracked"] | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> PendingSave:
        """Saves a step in the background.

        Arguments:
            step: its number, not negative.
            tree: as for `unickpt.save`.
            wait: return only after the commit; on process 0, without `local`, also after old steps
                are removed.
            metrics: numbers by which `Retention(keep_best=)` chooses, stored in the metadata;
                process 0's are used. With `experts`, "tokens/<layer>/<number>" is one of `tokens`.
            tokens: with `experts`, how many tokens each expert has seen since the start of the run:
                by layer, counts by the expert's number, or those of all experts in order. The layer
                is the part of the arrays' names before the expert's number, or the name of a
                stacked array, or a key of `Experts`. Process 0's are used.
            changed: with `reuse`, the arrays that changed since the last call; overrides
                `SaveOptions.changed` for the arrays that it names. Each process states it for the
                arrays that it has.
            metadata: as for `unickpt.save`.
            overwrite: replace the step if it exists.

        Returns:
            The pending save. With `local`, it ends with the commit there; `Checkpointer.wait` also
            waits for the copy.

        Raises:
            UnsupportedLeaf: something cannot be stored; the save did not start.
            CheckpointExists: the step exists. On remote storage, raised in the background.
            ValueError: `keep_best` is given, and the first save of the run lacks its metric; or
                `changed` is without `reuse`, or names no array.
            LaterStepsExist: later steps exist, even with `overwrite`; says how to go back. On
                remote storage, raised in the background.
            CheckpointNotFound: the step `after` does not exist.
            SaveConflict: another job saves into this folder; raised in the background.
            UnickptError: an earlier background error that was not raised yet; this save did not
                start.
        """
        self._queue.check_process()  # before the lock, which another thread may hold for ever
        if self._events is not None:
            with self._queue.following():
                _check_open(self)
                # Not with the lock: it may wait for a save of another thread.
                self._events.reached(step_number(step), self._group(saves=True))
        with self._queue.beginning, self._queue.following():
            _check_open(self)
            step, group = step_number(step), self._group(saves=True)
            if self._removal.is_due:
                self._removal.before_save(group)
            keywords = {} if tokens is None else {"tokens": tokens}
            is_coordinator = group.index == 0
            call = SaveCall(step, metrics if is_coordinator else None, keywords, is_coordinator)
            options, more, listeners = self._options, dict[str, Any](), list[Listener]()
            if self._features.of_run:
                options, more, listeners = self._features.before_save(call)
            if call.keywords:
                raise ValueError(
                    "tokens= counts what experts have seen; create the Checkpointer with experts="
                )
            parts = self._steps, self._cleaning, self._copying
            save = StepSave(*parts, call, overwrite, listeners)
            request = SaveRequest(
                self._steps.first.location_of(step),
                tree,
                knowing(options, changed, self._reuses),
                overwrite,
                metadata=partial(save.metadata, metadata, more),
                owners=_owners(self._fences),
                callbacks=save.callbacks(),
                find_base=partial(find_base, self._steps, self._reuses),
                group=group,
                waits=wait,
            )
            try:
                pending = self._queue.save(request)
            except BaseException as error:
                self._features.failed(error)
                raise
        self._saved_at = time.monotonic()
        if wait:
            pending.result()
            if self._copying is None:
                self._cleaning.wait()
        return pending

    def wait(self) -> None:
        """Waits until all saves are committed and copied to `root`, and old steps are removed.

        Raises:
            UnickptError: a background error that was not raised yet.
        """
        self._drain()
        self._queue.errors.raise_first()

    def release(self) -> None:
        """Lets another Checkpointer or job save into the folder, until the next save here.

        Waits for saves in flight, copies and removals; their errors are raised by the next call of
        `wait` or `save`.
        """
        while True:
            self._drain()
            with self._queue.beginning:  # another thread may have begun a save
                if not self._queue.unfinished():
                    self._steps.close()
                    return

    def close(self) -> None:
        """Waits as `wait`, then releases the lease, the signal handler and the hooks.

        Raises:
            UnickptError: as `wait`.
        """
        self._drain()
        with self._queue.beginning:  # a save in another thread has begun, or is refused
            if self._closed:  # `SaveOptions.metrics` may have closed it
                return
            self._closed = True
        if self._copying is not None:
            self._copying.close()
        self.release()
        if self._events is not None:
            self._events.ended()
        for fence in self._fences:
            fence.remove()
        if self._sigterm is not None:
            self._sigterm.remove()
        self._queue.errors.raise_first()

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

    # --- removing ------------------------------------------------------------------------------

    def drop_later_steps(self, step: int | None = None) -> list[int]:
        """Removes all steps after a step, to continue from it.

        All processes of a job call this; process 0 removes, and the others wait for it. Waits for
        saves in flight.

        Arguments:
            step: an existing step; by default the one that was loaded.

        Returns:
            The removed steps, ascending; they are removed one by one, the newest first.

        Raises:
            ValueError: no step is given, and none was loaded; or the processes cannot agree (see
                `ProcessGroup`).
            CheckpointNotFound: the step does not exist; nothing was removed.
            CoverageError: the processes gave different steps; nothing was removed.
            SaveConflict: another job saves into this folder.
            StorageError: the storage failed.

        Example:
            >>> import numpy as np, unickpt
            >>> with unickpt.Checkpointer("memory://run/drop") as ckpt:
            ...     for step in (100, 150, 200):
            ...         _ = ckpt.save(step, {"w": np.ones(3)}, wait=True)
            ...     _ = ckpt.load(step=150)
            ...     ckpt.drop_later_steps()
            [200]
        """
        _check_open(self)
        if step is None and self.loaded_step is None:
            raise ValueError("no step was loaded; give the step: drop_later_steps(step)")
        last_step = step_number(self.loaded_step if step is None else step)
        return self._removal.drop_later(last_step, self._group(), self._drain)

    def delete(self, step: int) -> None:
        """Removes a step, even if a rule such as `keep_last` keeps it.

        All processes of a job call this; process 0 removes, and the others wait for it.

        Arguments:
            step: its number.

        Raises:
            CheckpointNotFound: the step does not exist.
            CoverageError: the processes gave different steps; nothing was removed.
            SaveConflict: it is being saved; or another job saves into this folder.
            ValueError: the processes cannot agree (see `ProcessGroup`).
            StorageError: the storage failed.
        """
        _check_open(self)
        self._removal.delete(step_number(step), self._group(), self._drain)

    # --- finding and loading -------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The committed steps of both tiers, ascending, except those that `after` abandons or that
        one of `roles` lacks.

        Raises:
            StorageError: the storage failed.
        """
        return self._steps.counting()

    def latest(self) -> int | None:
        """The newest of `steps`; None if there is none."""
        return max(self.steps(), default=None)

    def survives(self) -> dict[int, str]:
        """What each of `steps` survives: with a tier in front of `root`, less until it is copied.

        Raises:
            StorageError: the storage failed.

        Example:
            >>> import numpy as np, unickpt
            >>> with unickpt.Checkpointer("memory://run/survives") as ckpt:
            ...     _ = ckpt.save(1, {"w": np.ones(3)}, wait=True)
            ...     ckpt.survives()
            {1: 'all but the loss of the root'}
        """
        copying, steps = self._copying, self.steps()
        return {step: IN_ROOT if copying is None else copying.survives(step) for step in steps}

    def path(self, step: int) -> str:
        """The path of a step, saved or not; in the local tier only if `root` lacks this version.

        Raises:
            StorageError: the storage failed.
        """
        return self._steps.path(step_number(step))

    @overload
    def load(
        self,
        like: None = None,
        *,
        return_report: Literal[False] = False,
        **arguments: Unpack[StepArguments],
    ) -> Any: ...

    @overload
    def load(
        self, like: None = None, *, return_report: Literal[True], **arguments: Unpack[StepArguments]
    ) -> tuple[Any, LoadReport]: ...

    @overload
    def load(
        self, like: T, *, return_report: Literal[False] = False, **arguments: Unpack[StepArguments]
    ) -> T: ...

    @overload
    def load(
        self, like: T, *, return_report: Literal[True], **arguments: Unpack[StepArguments]
    ) -> tuple[T, LoadReport]: ...

    def load(
        self,
        like: Any = None,
        *,
        step: int | None = None,
        fallback: bool = False,
        return_report: bool = False,
        **arguments: Unpack[LoadArguments],
    ) -> Any:
        """Loads a step, by default the newest, and sets `loaded_step`.

        Arguments:
            like, rules, strict, only, skip, missing, unexpected, mismatched, cast, return_report,
                strict_experts, since, options: as for `unickpt.load`.
            step: its number.
            fallback: if a step is damaged, load the next older one, on all processes.

        Returns:
            The tree, with `return_report` also the report, as `unickpt.load`.

        Raises:
            CheckpointNotFound: the step does not exist, or no step does.
            CheckpointCorrupt: it is damaged; the message names the next older one.
            TypeError: an argument is none of these.
        """
        for name in arguments.keys() - LoadArguments.__annotations__.keys():
            raise TypeError(f"Checkpointer.load() got an unexpected keyword argument {name!r}")
        self._removal.check_load(fallback)
        options = LoadOptions.or_default(arguments.get("options"))
        group = job_group(options.group or self._options.group, self._options.timeout_s)
        arguments["options"] = replace(options, group=group)
        step = None if step is None else step_number(step)
        if self._events is not None:
            self._events.began(group)
        needs_report = return_report or self._events is not None
        load_arguments = {**arguments, "like": like, "return_report": needs_report}
        loader = StepLoader(self._steps, group, load_arguments, self._events)
        loaded, result = loader.load(step, fallback)
        if loader.path is not None:
            self._features.loaded(loaded, loader.path)
        self.loaded_step = loaded
        self._queue.forget()
        self._steps.resume_from(loaded, is_coordinator=group.index == 0)
        if self._events is not None:
            self._events.loaded(loaded, result[1])
        return result[0] if needs_report and not return_report else result

    # --- helpers -------------------------------------------------------------------------------

    def _drain(self) -> None:
        self._queue.wait()
        if self._copying is not None:
            self._copying.wait()
        self._cleaning.wait()


def _check_open(run: Checkpointer) -> None:
    if run._closed:
        raise ValueError(f"the Checkpointer of {run._steps.root.location} is closed")


def _owners(fences: Sequence[Any]) -> set[Any] | None:
    """The memory of the optimizers whose steps wait for saves; None if there are none."""
    return {owner for fence in fences for owner in fence.owners()} if fences else None
