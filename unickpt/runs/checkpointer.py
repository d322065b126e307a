"""The Checkpointer: saves, keeps, cleans up and resumes the steps of a training run."""

from __future__ import annotations

import logging
import math
import operator
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, overload

from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    CoverageError,
    InvalidPath,
    ProcessFailed,
    SaveConflict,
    UnsupportedLeaf,
)
from unickpt.format.index import RESERVED
from unickpt.frameworks.process_group import Group, within
from unickpt.frameworks.protocol import Fence
from unickpt.frameworks.registry import adapters, current_group
from unickpt.loading.loader import load
from unickpt.loading.report import LoadReport
from unickpt.reading.options import LoadOptions
from unickpt.rules import Rules
from unickpt.runs.branch import Branch
from unickpt.runs.housekeeping import Upkeep
from unickpt.runs.retention import Retention
from unickpt.runs.save_triggers import Policy, SigtermHandler
from unickpt.runs.step_folder import PROBE
from unickpt.runs.tiers import Newer, Tier, compare
from unickpt.saving.describe import check_mapping
from unickpt.saving.options import SaveOptions
from unickpt.saving.pending import PendingSave
from unickpt.saving.save_queue import SaveQueue, SaveRequest
from unickpt.storage import contexts, paths

_log = logging.getLogger("unickpt")
_FINE, _DAMAGED, _GONE, _FAILED = range(4)
_STEPS_END = 10**18  # the folders of later steps are not recognised
_TRIES = 50  # to load the newest step while other jobs commit and remove steps


class Checkpointer:
    """The checkpoints of a training run, as `step_<n>` below one folder.

    Saves run in the background, one after another. `PendingSave.result` raises their errors, else
    the next `save`, `wait` or `close` does, else the program exits with status 1. In a job of
    several processes, all create a Checkpointer with the same arguments and call `save`, `load` and
    `should_save` together; only process 0 deletes and copies.

    One job at a time may save into `root`. On object storage, after a job that did not close its
    Checkpointer, the next job waits for 40 s before its first save, to see whether the other still
    runs.

    Arguments:
        root: a local path or a URL (file, memory, s3, gs).
        keep_last: keep this many of the newest steps.
        keep_every: keep steps that are multiples of this.
        keep_best: keep this many of the best steps by `metric`.
        metric: the name of one of the `metrics` given to `save`.
        best: whether the smallest ("min") or the largest ("max") value is the best.
        keep: called with a step; returns whether to keep it. A step is kept if any rule keeps it;
            without rules, all are. The newest step and the step that was just saved are never
            removed.
        after: continue after this step and abandon later steps of earlier jobs: `steps`, `latest`
            and `load` do not see them, and the first `save` removes them. A job that is restarted
            with the same argument sees the steps that it saved itself; to go back to the same step
            again, call `drop_later_steps`. Several processes must be able to agree (see
            `ProcessGroup`).
        save_every: `should_save` returns true at steps that are multiples of this.
        save_every_s: and when this many seconds have passed since the last save.
        preemption: handle SIGTERM: `should_save` returns true once more, on all processes, and
            `preempted` becomes true, so that the loop can end. Call `should_save` at every step
            then.
        local: a path on fast storage that all processes of the job share, such as "/dev/shm/<run>".
            Checkpoints are committed there first, and copied to `root` in the background; the
            newest stays there. A copy is read back and checked against its digests before it is
            committed, so a step in `root` is complete or absent. If a job ends before it has copied
            all steps, the next job copies them after its first save. If the tiers have different
            versions of a step, the one saved later is used; clocks do not matter. A step that a run
            without `local` replaced or removed in `root` is not restored from `local`, and uncopied
            steps do not count if such a run went on from an earlier step. If `root` has no step at
            all, those in `local` count. Several processes must be able to agree (see
            `ProcessGroup`).
        optimizers: torch optimizers. Their parameters and state on an accelerator (with
            `SaveOptions(staging="lazy")` also on the host) are copied during forward and backward,
            and their next `step` waits for the copy. Until then nothing else may change them. A
            change that torch's version counters show is an error (`StateChanged`); changes through
            `.data`, and of DTensors outside of `step`, are not detected on an accelerator.
        options: for all saves, see `SaveOptions`.

    Raises:
        ValueError: the arguments are invalid.
        InvalidPath: a path does not name a storage.

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
        root: paths.Path,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        metric: str | None = None,
        best: Literal["min", "max"] = "min",
        keep: Callable[[int], bool] | None = None,
        after: int | None = None,
        save_every: int | None = None,
        save_every_s: float | None = None,
        preemption: bool = False,
        local: paths.Path | None = None,
        optimizers: Sequence[Any] = (),
        options: SaveOptions | None = None,
    ) -> None:
        retention = Retention(keep_last, keep_every, keep_best, metric, best, keep)
        self._policy = Policy(save_every, save_every_s, preemption)
        self._options = SaveOptions.or_default(options)
        self._root = Tier(root)
        self._local = None if local is None else Tier(local)
        self._tiers = [tier for tier in (self._local, self._root) if tier is not None]
        if self._local is not None and self._local.location.spec == self._root.location.spec:
            raise ValueError(f"local and root are the same folder: {self._root.location}")
        self._queue = SaveQueue()
        self._fences = _fences(optimizers, self._queue.fence)
        self._sigterm = SigtermHandler(self._policy.tell) if preemption else None
        self._branch = Branch(after if after is None else _number(after, "after="))
        self._upkeep = Upkeep(
            self._root, self._local, retention, self._options, self._branch, self._queue.errors.add
        )
        self._closed = self._shared = self._left = self._is_tidy = False
        self._closing = threading.Lock()
        self.loaded_step: int | None = None
        """The step that `load` returned."""

    # --- saving --------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether to save now, by `save_every`, `save_every_s`, or because the job must stop. All
        processes get the same answer; with `save_every_s` or `preemption` they communicate, so all
        must call this at the same steps.

        Raises:
            ValueError: the step is not an integer, or the processes cannot agree (see
                `ProcessGroup`).
        """
        return self._policy.is_due(_number(step), self._group())

    def preempt(self) -> None:
        """Announces that the job is about to be stopped, as SIGTERM does with `preemption=True`."""
        self._policy.tell()

    @property
    def preempted(self) -> bool:
        """Whether the job must stop, as agreed by all processes in `should_save`."""
        return self._policy.preempted

    def save(
        self,
        step: int,
        tree: Any,
        *,
        wait: bool = False,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> PendingSave:
        """Saves a step in the background.

        Arguments:
            step: its number, not negative.
            tree: as for `unickpt.save`.
            wait: return only after the commit.
            metrics: numbers by which `keep_best` chooses, stored in the metadata; process 0's are
                used.
            metadata: as for `unickpt.save`.
            overwrite: replace the step if it exists.

        Returns:
            The pending save. With `local`, it ends with the commit there; `Checkpointer.wait` also
            waits for the copy.

        Raises:
            UnsupportedLeaf: something cannot be stored; the save did not start.
            CheckpointExists: the step exists. On remote storage, raised in the background.
            LaterStepsExist: later steps exist, even with `overwrite`; says how to go back. On
                remote storage, raised in the background.
            CheckpointNotFound: the step `after` does not exist.
            SaveConflict: another job saves into this folder; raised in the background.
            UnickptError: an earlier background error that was not raised yet; this save did not
                start.
        """
        self._check_open()
        step = _number(step)
        group = self._group()
        self._check_shared(group)
        owners = None
        if self._fences:
            owners = {owner for fence in self._fences for owner in fence.owners()}
        self._remove_abandoned(group)
        self._leave_behind(group)
        hooks = (
            self._upkeep.hooks(step, metrics or {}, overwrite)
            if group.index == 0
            else self._upkeep.hooks_of_others(step, overwrite)
        )
        shown = metrics if group.index == 0 else None
        request = SaveRequest(
            self._tiers[0].path(step),
            tree,
            self._options,
            overwrite,
            metadata=partial(_metadata, step, shown, metadata, self._branch.recorded),
            owners=owners,
            callbacks=hooks,
        )
        pending = self._queue.save(request)
        self._policy.saved()
        if wait:
            pending.result()
        return pending

    def wait(self) -> None:
        """Waits until all saves are committed and copied to `root`, and old steps are removed.

        Raises:
            UnickptError: a background error that was not raised yet.
        """
        self._drain()
        self._queue.errors.raise_first()

    def close(self) -> None:
        """Waits as `wait`, then releases the lease, the signal handler and the hooks.

        Raises:
            UnickptError: as `wait`.
        """
        self._drain()
        with self._closing:  # `SaveOptions.metrics` may have closed it
            if self._closed:
                return
            self._closed = True
        for fence in self._fences:
            fence.remove()
        if self._sigterm is not None:
            self._sigterm.remove()
        self._upkeep.close()
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
        self._check_open()
        if step is None and self.loaded_step is None:
            raise ValueError("no step was loaded; give the step: drop_later_steps(step)")
        kept = _number(self.loaded_step if step is None else step)
        group = self._group()
        self._check_same_step(group, "drop_later_steps", kept)
        self._drain()
        self._remove_abandoned(group)
        self._meet(group)
        there = self._all_steps()
        later = [s for s in there if s > kept]
        if kept not in there:
            raise self._not_found(kept, there)
        self._on_process_0(group, f"remove the steps after {kept}", partial(self._remove, later))
        return later

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
        self._check_open()
        step, group = _number(step), self._group()
        self._check_same_step(group, "delete", step)
        is_in_flight = self._upkeep.is_in_flight(step)
        if group.count > 1:  # a save does not end at one moment on all of them
            is_in_flight = group.agree(int(is_in_flight)) > 0
        if is_in_flight:
            raise SaveConflict(f"{self.path(step)} is being saved; call wait() first")
        self._drain()
        self._remove_abandoned(group)
        self._meet(group)
        there = self._all_steps()
        if step not in there:
            raise self._not_found(step, there)
        self._on_process_0(group, f"remove step {step}", partial(self._remove, [step]))

    def _remove(self, steps: Collection[int]) -> None:
        self._upkeep.remove(steps)

    def _remove_abandoned(self, group: Group) -> None:
        """Removes steps of the local tier that another run abandoned, before the first change."""
        if self._local is None or self._is_tidy:
            return
        self._on_process_0(
            group, f"remove stale steps from {self._local.location}", self._upkeep.remove_abandoned
        )
        self._is_tidy = True

    def _leave_behind(self, group: Group) -> None:
        """Removes the steps that `after` abandons, before the first save."""
        if self._branch.after is None or self._left:
            return
        self._check_after()
        gone = {step for tier in self._tiers for step in self._branch.abandoned(tier)}
        after = self._branch.after
        self._on_process_0(group, f"remove the steps after {after}", partial(self._remove, gone))
        self._left = True

    def _check_after(self) -> None:
        """Raises CheckpointNotFound if the step `after` does not exist."""
        after = self._branch.after
        if after is not None and not any(step >= after for step in self.steps()):
            raise CheckpointNotFound(f"after={after}: {self._not_found(after, self._all_steps())}")

    # --- finding and loading -------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The committed steps of both tiers, ascending; without those that `after` abandons.

        Raises:
            StorageError: the storage failed.
        """
        found = {tier: set(self._branch.steps(tier, steady=True)) for tier in self._tiers}
        if self._local is not None:
            for step in found[self._local] - found[self._root]:
                if compare(self._local, self._root, step).is_abandoned:
                    found[self._local].remove(step)
        return sorted(set().union(*found.values()))

    def latest(self) -> int | None:
        """The newest committed step; None if there is none."""
        return max(self.steps(), default=None)

    def path(self, step: int) -> str:
        """The path of a step, saved or not; in the local tier only if `root` lacks this version.

        Raises:
            StorageError: the storage failed.
        """
        step = _number(step)
        if self._local is None:
            return self._root.path(step)
        is_local = compare(self._local, self._root, step).newer is Newer.LOCAL
        return (self._local if is_local else self._root).path(step)

    def _holders(self, step: int) -> list[Tier]:
        """The tiers that have the current version of a step, the fastest first."""
        found = [self._root]
        if self._local is not None:
            standing = compare(self._local, self._root, step)
            if standing.newer is Newer.SAME:
                found = [self._local, self._root]
            elif standing.newer is Newer.LOCAL:
                found = [self._local]
            elif standing.local is not None:
                _log.warning(
                    "%s is %s in %s",
                    *(self._local.path(step), standing.fault, self._root.location),
                )
        return [tier for tier in found if self._branch.has(tier, step)]

    @overload
    def load(
        self,
        like: Any = None,
        *,
        step: int | None = None,
        fallback: bool = False,
        rules: Rules | None = None,
        strict: bool = True,
        mismatched: Literal["error", "keep"] = "error",
        cast: bool = False,
        return_report: Literal[False] = False,
        options: LoadOptions | None = None,
    ) -> Any: ...

    @overload
    def load(
        self,
        like: Any = None,
        *,
        step: int | None = None,
        fallback: bool = False,
        rules: Rules | None = None,
        strict: bool = True,
        mismatched: Literal["error", "keep"] = "error",
        cast: bool = False,
        return_report: Literal[True],
        options: LoadOptions | None = None,
    ) -> tuple[Any, LoadReport]: ...

    def load(
        self,
        like: Any = None,
        *,
        step: int | None = None,
        fallback: bool = False,
        rules: Rules | None = None,
        strict: bool = True,
        mismatched: Literal["error", "keep"] = "error",
        cast: bool = False,
        return_report: bool = False,
        options: LoadOptions | None = None,
    ) -> Any:
        """Loads a step, by default the newest, and sets `loaded_step`.

        Arguments:
            like, rules, strict, mismatched, cast, return_report, options: as for `unickpt.load`.
            step: its number.
            fallback: if a step is damaged, load the next older one, on all processes.

        Returns:
            The tree, with `return_report` also the report, as `unickpt.load`.

        Raises:
            CheckpointNotFound: the step does not exist, or no step does.
            CheckpointCorrupt: it is damaged; the message names the next older one.
        """
        self._check_after()
        options = LoadOptions.or_default(options)
        group = self._group(options)
        options = replace(options, group=group)
        step = None if step is None else _number(step)
        arguments = {
            "rules": rules,
            "strict": strict,
            "mismatched": mismatched,
            "cast": cast,
            "return_report": return_report,
            "options": options,
        }
        together = group.count > 1 and (fallback or step is None)
        damaged: set[int] = set()
        tries = 0
        while True:
            listed = step is None or step in damaged
            wanted = self._newest(group, step, damaged) if listed or step is None else step
            tree, error = self._try(wanted, like, arguments)
            outcome = _outcome(error, listed)
            if together:
                outcome = group.agree(outcome)
            if outcome == _FINE:
                self._has_loaded(wanted, group)
                return tree
            tries += outcome == _GONE
            if outcome == _DAMAGED and fallback:
                _log.warning("step %d is damaged, falling back to an older one: %s", wanted, error)
                damaged.add(wanted)
            elif outcome != _GONE or tries > _TRIES:
                raise error or ProcessFailed(f"{self.path(wanted)}: another process cannot load it")

    def _has_loaded(self, step: int, group: Group) -> None:
        self.loaded_step = self._upkeep.loaded = step
        if group.index == 0:
            for tier in self._holders(step)[:1]:
                self._branch.goes_on_from(tier, step)

    def _newest(self, group: Group, below: int | None, damaged: Collection[int]) -> int:
        """The newest step that is not known to be damaged, as seen by the coordinator.

        Arguments:
            group: the processes.
            below: the step must be below this one; None for any step.
            damaged: the steps that were tried before.
        """
        steps = [s for s in self.steps() if s not in damaged and (below is None or s < below)]
        found = max(steps, default=-1)
        if group.count > 1:
            found = group.agree(found + 1 if group.index == 0 else 0) - 1
        if found < 0 and damaged:
            raise CheckpointNotFound(
                f"{self.path(min(damaged))} is damaged, and there is no older step to fall back to"
            )
        if found < 0:
            try:
                self._root.check_no_checkpoint()
            except CheckpointExists as error:
                raise CheckpointNotFound(str(error)) from None
            raise CheckpointNotFound(f"no step is committed in {self._root.location}")
        return found

    def _try(
        self, step: int, like: Any, arguments: Mapping[str, Any]
    ) -> tuple[Any, Exception | None]:
        """Loads a step from the fastest tier that has it undamaged, or returns the error."""
        damage: list[str] = []
        gone: CheckpointNotFound | None = None
        try:
            holders, before = self._holders(step), list[Tier]()
            while holders != before and not damage:  # it may have moved to the other tier
                for tier in holders:
                    try:
                        return load(tier.path(step), like, **arguments), None
                    except CheckpointNotFound as error:
                        gone = error
                    except CheckpointCorrupt as error:
                        _log.warning("%s is damaged: %s", tier.path(step), error)
                        damage.append(str(error))
                holders, before = self._holders(step), holders
        except Exception as error:
            return None, error
        steps = self.steps()
        if not damage:  # if it exists, it was replaced while it was read
            return None, (gone if step in steps else None) or self._not_found(step, steps)
        older = max((s for s in steps if s < step), default=None)
        hint = "there is no older step"
        if older is not None:
            hint = f"the next older step is {older}: load(step={older}), or load(fallback=True)"
        return None, CheckpointCorrupt(f"{'; '.join(damage)}; {hint}")

    # --- helpers -------------------------------------------------------------------------------

    def _group(self, options: LoadOptions | None = None) -> Group:
        given = options.group if options is not None and options.group else self._options.group
        return within(given or current_group(adapters()), self._options.timeout_s)

    def _all_steps(self) -> list[int]:
        """The committed steps, including those that `after` abandons."""
        return sorted({step for tier in self._tiers for step in tier.steady()})

    def _not_found(self, step: int, steps: Sequence[int]) -> CheckpointNotFound:
        have = ", ".join(map(str, steps[-10:])) or "none"
        return CheckpointNotFound(
            f"step {step} is not in {self._root.location}; the committed steps are: {have}"
        )

    def _meet(self, group: Group) -> None:
        """Waits until all processes call this."""
        if group.count > 1:
            group.agree(0)

    def _check_same_step(self, group: Group, call: str, step: int) -> None:
        """Checks that all processes call a method with the same step.

        Raises:
            CoverageError: on all processes, if they do not.
        """
        if group.count == 1:
            return
        highest = group.agree(step)
        if group.agree(int(step != highest)):
            other = f"another with {highest}" if step != highest else "another with an earlier one"
            raise CoverageError(
                f"{self._root.location}: the processes call {call} with different steps: process "
                f"{group.index} with {step}, {other}. Nothing was removed"
            )

    def _on_process_0(self, group: Group, what: str, work: Callable[[], object]) -> None:
        """Calls `work` on process 0, while the others wait for it."""
        self._meet(group)
        error: Exception | None = None
        if group.index == 0:
            try:
                work()
            except Exception as raised:
                error = raised
        failed = group.agree(int(error is not None)) if group.count > 1 else error is not None
        if failed:
            raise error or ProcessFailed(
                f"{self._root.location}: process 0 could not {what}; see the error of process 0"
            )

    def _drain(self) -> None:
        self._queue.wait()
        self._upkeep.wait()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the Checkpointer of {self._root.location} is closed")

    def _check_shared(self, group: Group) -> None:
        """Checks once that all processes see the same local tier."""
        if self._shared or self._local is None or group.count == 1:
            return
        place = self._local.location.store(contexts.context(fsync=False))
        token = group.agree(secrets.randbits(60) + 1 if group.index == 0 else 0)
        name = f"{PROBE}{token:x}"
        if group.index == 0:
            place.write(name, b"").result()
        group.agree(0)
        seen = place.read(name).result().state == "value"
        alone = group.agree(int(not seen))
        if group.index == 0:
            place.write(name, None).result()
        if alone:
            raise InvalidPath(
                f"local={str(self._local.location)!r} is not the same storage on all processes; "
                "give a path that they share, or omit local="
            )
        self._shared = True


def _outcome(error: Exception | None, listed: bool) -> int:
    """The outcome of loading a step as a number; the maximum over all processes is used.

    Arguments:
        error: the error that was raised, if any.
        listed: whether the step was just listed; if it is missing then, it was removed since.
    """
    if error is None:
        return _FINE
    if isinstance(error, CheckpointCorrupt):
        return _DAMAGED
    return _GONE if listed and isinstance(error, CheckpointNotFound) else _FAILED


def _number(step: object, what: str = "step ") -> int:
    """A step as an int, from any integer type, including NumPy's.

    Raises:
        ValueError: it is not one that a Checkpointer would find again.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{what}{step!r} must be an integer, at least 0")
    if number >= _STEPS_END:
        raise ValueError(f"{what}{step!r} must be less than 10**18")
    return number


def _fences(optimizers: Sequence[Any], wait: Callable[[], None]) -> list[Fence]:
    among, found = adapters(), []
    if not isinstance(optimizers, Iterable):
        raise ValueError(
            f"optimizers is of type {type(optimizers).__name__}; pass a list, even for a single "
            "optimizer"
        )
    for optimizer in optimizers:
        fence = next((f for f in (a.fence(optimizer, wait) for a in among) if f), None)
        if fence is None:
            raise ValueError(
                f"optimizers: {type(optimizer).__name__} is not a torch.optim.Optimizer; omit it "
                "in JAX, whose arrays never change"
            )
        found.append(fence)
    return found


def _metadata(
    step: int,
    metrics: Mapping[str, float] | None,
    metadata: Mapping[str, Any] | None,
    after: int | None,
) -> dict[str, Any]:
    """The metadata of a step.

    Raises:
        UnsupportedLeaf: it cannot be stored.
    """
    check_mapping("metadata", metadata)
    check_mapping("metrics", metrics)
    if RESERVED in (metadata or {}):
        raise UnsupportedLeaf(
            f"metadata: the key {RESERVED!r} is reserved for the Checkpointer; rename yours"
        )
    numbers = {str(name): _metric(name, value) for name, value in (metrics or {}).items()}
    shown = {n: v if math.isfinite(v) else str(v) for n, v in numbers.items()}  # JSON lacks nan
    own = {"step": step, "metrics": shown}
    return {**(metadata or {}), RESERVED: own if after is None else {**own, "after": after}}


def _metric(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedLeaf(f"metrics must be numbers: {name!r}: {error}") from error
