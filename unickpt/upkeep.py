"""Upkeep of a run's steps: copies them between the tiers, and removes those that no rule keeps.

Only process 0 of a job does this work; the others let it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

from unickpt.backends import Location
from unickpt.branch import Branch
from unickpt.chores import Chores
from unickpt.errors import CheckpointExists, LaterStepsExist, StorageError
from unickpt.lease import Lease
from unickpt.merge import some
from unickpt.options import SaveOptions
from unickpt.pending import Hooks
from unickpt.retention import Retention
from unickpt.tiers import Tier

_log = logging.getLogger("unickpt")
_COPIES = 2  # checkpoints that wait to be copied from the local tier; a further save waits


class Upkeep:
    """What happens to steps around their saves.

    Arguments:
        root: where steps are kept.
        local: where they are committed first, if not in `root`.
        retention: which of them are kept.
        options: of the saves.
        branch: which of the steps that are there belong to this run.
        failed: gets what could not be copied, and why.
    """

    def __init__(
        self,
        root: Tier,
        local: Tier | None,
        retention: Retention,
        options: SaveOptions,
        branch: Branch,
        failed: Callable[[str, Exception], object],
    ) -> None:
        self._root, self._local = root, local
        self._retention, self._options = retention, options
        self._branch = branch
        self._first = local or root  # where saves go
        self._tiers = [self._first] if local is None else [self._first, root]
        self._cleaning = Chores("unickpt clean", lambda e: _log.warning("cleaning up: %s", e))
        self._copy_errors: list[Exception] = []
        self._copying = Chores(
            "unickpt copy", partial(_copy_failed, self._copy_errors, failed, root.location)
        )
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._session = ""
        self._flights: dict[object, int] = {}  # saves that are under way, and their steps
        self._saved: int | None = None
        self._failed: dict[int, BaseException] = {}  # steps whose last save failed
        self._newest: dict[Tier, int] = {}  # as far as this process knows
        self.loaded: int | None = None
        """The step that was loaded last."""
        self._uncopied: dict[int, bool] = {}  # and whether a copy may replace another step
        self._compared = False
        for tier in {self._first, root}:
            weakref.finalize(self, Lease.give_back, tier.lease)

    def hooks(self, step: int, metrics: Mapping[str, float], overwrite: bool) -> Hooks:
        """What belongs to the save of a step, which begins now, on process 0.

        Arguments:
            metrics: as for `Checkpointer.save`.
            overwrite: whether it may replace a step.
        """
        return replace(
            self.hooks_of_others(step, overwrite),
            prepare=lambda attempt: self._prepare(step, overwrite, attempt),
            check=self._first.lease.check,
            committed=lambda: self._committed(step, metrics, overwrite),
        )

    def hooks_of_others(self, step: int, overwrite: bool) -> Hooks:
        """What belongs to it on the other processes."""
        save = object()
        return Hooks(
            begin=lambda: self._begin(save, step, overwrite),
            committed=lambda: self._is_newest(step),
            failed=lambda error: self._failed.__setitem__(step, error),
            ended=lambda: self._flights.pop(save, None),
        )

    def is_in_flight(self, step: int) -> bool:
        """Whether a save of a step has begun and has not ended."""
        return step in self._in_flight

    @property
    def _in_flight(self) -> list[int]:
        return list(self._flights.values())

    def remove(self, steps: Iterable[int]) -> None:
        """Removes steps from both tiers, the newest first; nothing else may be under way.

        Raises:
            SaveConflict: another job saves here.
            StorageError: a storage failed.
        """
        for tier in self._tiers:
            tier.lease.take()
        there = {tier: tier.committed() for tier in self._tiers}
        for step in sorted(steps, reverse=True):
            for tier in self._tiers:
                if step in there[tier]:
                    _log.info("removing %s", tier.path(step))
                    tier.remove(step)
            self._metrics.pop(step, None)
            self._uncopied.pop(step, None)
            self._branch.forget(step)
        self._newest.clear()

    def wait(self) -> None:
        """Waits until all steps are copied, and cleaned up behind; raises nothing."""
        self._copying.wait()
        self._cleaning.wait()

    def close(self) -> None:
        """Lets another job have the folders."""
        for tier in {self._first, self._root}:
            tier.lease.give_back()

    def _begin(self, save: object, step: int, overwrite: bool) -> None:
        """In the call, as far as that costs no request over a network."""
        self._check_order(step, [s for s in self._in_flight if s > step])
        for tier in self._tiers:
            tier.check_no_link(step)
            if not tier.location.is_remote:
                # The root may be away; then copying finds out.
                with nullcontext() if tier is self._first else suppress(StorageError):
                    self._check_newest(step, tier)
        if not self._first.location.is_remote:
            self._check_failed(step, overwrite)
        self._flights[save] = step

    def _prepare(self, step: int, overwrite: bool, attempt: str) -> None:
        """Before anything of a step is written."""
        self._session = attempt.rpartition("-")[0]
        is_news = self._first.lease.take()  # until now, another job may have saved here
        if is_news or not self._first.location.is_remote:
            self._newest.pop(self._first, None)
        self._first.open(self._in_flight, self._session)
        self._check_newest(step, self._first)
        self._check_failed(step, overwrite)
        if self._local is None:
            return
        self._copying.wait(_COPIES - 1)
        with suppress(StorageError):  # it may be away; then copying finds out
            self._check_newest(step, self._root)
            if not overwrite and step in self._root.committed():
                raise CheckpointExists(
                    f"{self._root.path(step)} already holds a checkpoint; pass overwrite=True"
                )

    def _check_failed(self, step: int, overwrite: bool) -> None:
        """Tells who saves a step again, because that failed, why it failed; that it is there now
        says nothing.

        Raises:
            CheckpointExists: a save failed, but only after it had committed the step.
        """
        error = self._failed.get(step)
        if error is None and step in self._uncopied and self._copy_errors:
            error = self._copy_errors[-1]
        if error is not None and not overwrite and step in self._first.committed():
            raise CheckpointExists(
                f"step {step} was saved before, and that failed: {error}. Yet it had been "
                f"committed by then, to {self._first.path(step)}; pass overwrite=True to save it "
                "again"
            ) from error

    def _check_newest(self, step: int, tier: Tier) -> None:
        if self._newest.get(tier, step + 1) > step:
            found = self._branch.steps(tier)
            self._newest[tier] = max(found, default=-1)
            self._check_order(step, [s for s in found if s > step])

    def _check_order(self, step: int, later: Sequence[int]) -> None:
        """Refuses to save a step below others, where nobody would look for it.

        Raises:
            LaterStepsExist: says how to go on nevertheless.
        """
        if not later:
            return
        there = {s for tier in self._tiers for s in self._branch.steps(tier)}
        below = {s for s in there if s < step}
        base = self.loaded if self.loaded in below else max(below, default=None)
        ways = "remove them by delete(step), or save into another folder"
        if base is not None:
            ways = (
                f"to go on from step {base}, make it Checkpointer(..., after={base}), or call "
                f"drop_later_steps({base}) first; both remove the later steps"
            )
        raise LaterStepsExist(
            f"{self._root.location}: step {step} is below what is there already: "
            f"{'step' if len(later) == 1 else 'steps'} {some(later)}. A restart would go on from "
            f"step {max(later)}, not from this one; {ways}"
        )

    def _is_newest(self, step: int) -> None:
        self._saved = step
        self._failed.pop(step, None)
        if self._first in self._newest:
            self._newest[self._first] = max(step, self._newest[self._first])

    def _committed(self, step: int, metrics: Mapping[str, float], overwrite: bool) -> None:
        """After its commit."""
        self._is_newest(step)
        self._metrics[step] = metrics
        if self._local is None:
            self._cleaning.add(self._clean)
        else:
            self._uncopied[step] = overwrite
            self._copying.add(self._copy)

    def _copy(self) -> None:
        """Copies what the local tier has and the root lacks, unless it need not be kept."""
        assert self._local is not None
        self._root.open(self._in_flight, self._session)
        there, here = self._root.committed(), self._local.committed()
        if not self._compared:  # an earlier run may have replaced a step, but not its copy
            both = set(there).intersection(here)
            newer = {s for s in both if self._local.made(s) > self._root.made(s)}
            self._uncopied = {**dict.fromkeys(newer, True), **self._uncopied}
            self._compared = True
        expendable = self._expendable(there, here)
        for step in here:
            if step in there and step not in self._uncopied:
                continue
            if step not in expendable or step == here[-1]:
                self._copy_step(step, there, self._uncopied.get(step, False))
            self._uncopied.pop(step, None)
        self._cleaning.add(self._clean)

    def _copy_step(self, step: int, there: Sequence[int], overwrite: bool) -> None:
        assert self._local is not None
        if step in there:
            if self._root.made(step) == self._local.made(step):
                return  # by a try that was cut short when all was done
            if not overwrite:
                raise CheckpointExists(f"{self._root.path(step)} already holds another checkpoint")
        budget_bytes, timeout_s = self._options.budget_bytes, self._options.timeout_s
        self._root.copy_from(self._local, step, budget_bytes, timeout_s)

    def _clean(self) -> None:
        """Removes the steps that no rule keeps."""
        committed = self._root.committed()
        here = [] if self._local is None else self._local.committed()
        expendable = self._expendable(committed, here)
        for step in here[:-1]:
            copied = step in committed and step not in self._uncopied
            if (copied or step in expendable) and step not in self._in_flight:
                assert self._local is not None
                self._local.remove(step)
        for step in expendable:
            # The newest of the root stays even if the local tier has a newer one.
            if step in committed[:-1] and step not in self._in_flight:
                _log.info("removing %s", self._root.path(step))
                self._root.remove(step)
                self._metrics.pop(step, None)

    def _expendable(self, there: Sequence[int], here: Sequence[int]) -> list[int]:
        """The steps that no rule keeps, of those in the root and in the local tier."""
        tiers = {**dict.fromkeys(here, self._local), **dict.fromkeys(there, self._root)}
        if self._retention.keep_best is not None:
            for step, tier in tiers.items():
                if step not in self._metrics and tier is not None:
                    self._metrics[step] = tier.metrics(step)
        metrics = {step: self._metrics.get(step, {}) for step in tiers}
        # What was just saved stays, even if something that is not of this run has a higher number.
        return self._retention.expendable(metrics, () if self._saved is None else (self._saved,))


def _copy_failed(
    errors: list[Exception],
    failed: Callable[[str, Exception], object],
    root: Location,
    error: Exception,
) -> None:
    errors[:] = [error]
    failed(f"copying a step to {root}", error)
