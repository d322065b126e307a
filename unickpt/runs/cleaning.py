"""Which steps are in use, and the removal of those that no rule keeps; on process 0 only."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from unickpt.errors import (
    CheckpointExists,
    LaterStepsExist,
    StorageError,
    UnsupportedFormat,
)
from unickpt.quoting import some
from unickpt.runs import attempt_folders
from unickpt.runs.attempt_folders import Needed, Unremoved
from unickpt.runs.retention import Retention
from unickpt.runs.step_folder import Branch
from unickpt.runs.tiers import Newer, Tier, Tiers, TierVersions, compare
from unickpt.storage import paths
from unickpt.threads import SerialExecutor


class StepOrder:
    """What a process knows of the newest steps.

    Arguments:
        tiers: the folders.
        branch: which existing steps belong to this run.
    """

    def __init__(self, tiers: Tiers, branch: Branch) -> None:
        self._tiers, self._branch = tiers, branch
        self._newest: dict[Tier, int] = {}  # as far as this process knows
        self.failed: dict[int, BaseException] = {}
        """Steps whose last save, or copy, failed."""
        self.loaded: int | None = None
        """The step that was loaded last."""

    def forget(self, tier: Tier) -> None:
        """Records that another job may have saved here."""
        self._newest.pop(tier, None)

    def forget_all(self) -> None:
        """Records that steps were removed."""
        self._newest.clear()

    def check_failed(self, step: int, overwrite: bool) -> None:
        """If the last save of this step failed after its commit, reports that error instead of only
        the existing step.

        Raises:
            CheckpointExists: a save failed after it had committed the step.
        """
        error = self.failed.get(step)
        if error is not None and not overwrite and step in self._tiers.first.committed():
            raise CheckpointExists(
                f"step {step} was saved before, and that failed: {error}. It had already been "
                f"committed to {self._tiers.first.path(step)} then; pass overwrite=True to save it "
                "again"
            ) from error

    def check_newest(self, step: int, tier: Tier) -> None:
        """Checks that a tier has no later steps.

        Raises:
            LaterStepsExist: says how to continue.
        """
        if self._newest.get(tier, step + 1) > step:
            found = self._branch.steps(tier)
            self._newest[tier] = max(found, default=-1)
            self.check_order(step, [s for s in found if s > step])

    def check_order(self, step: int, later: Sequence[int]) -> None:
        """Refuses to save a step below later ones, because a restart would not load it.

        Raises:
            LaterStepsExist: says how to continue.
        """
        if not later:
            return
        there = {s for tier in self._tiers.all for s in self._branch.steps(tier)}
        below = {s for s in there if s < step}
        base = self.loaded if self.loaded in below else max(below, default=None)
        ways = "remove them with delete(step), or save into another folder"
        if base is not None and self._tiers.roles is not None:
            ways = f"to go on from step {base}, call drop_later_steps({base}) in each role first"
        elif base is not None:
            ways = (
                f"to go on from step {base}, use Checkpointer(..., after={base}), or call "
                f"drop_later_steps({base}) first; both remove the later steps"
            )
        raise LaterStepsExist(
            f"{self._tiers.root.location}: step {step} is below existing "
            f"{'step' if len(later) == 1 else 'steps'} {some(later)}. A restart would go on from "
            f"step {max(later)}, not from this one; {ways}"
        )

    def committed(self, step: int) -> None:
        """Records that a step was saved."""
        self.failed.pop(step, None)
        if self._tiers.first in self._newest:
            self._newest[self._tiers.first] = max(step, self._newest[self._tiers.first])


class StepsInUse:
    """Steps that are being saved or copied are not removed; those being removed are neither."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._saves: dict[object, int] = {}  # the step of each save
        self._copied = Counter[int]()  # or waiting to be copied, or needed for that
        self._removed: set[int] = set()

    @property
    def saved(self) -> list[int]:
        """The steps whose saves have begun and have not ended."""
        with self._changed:
            return list(self._saves.values())

    def begin(self, save: object, step: int) -> None:
        """Records that a save of a step begins."""
        with self._changed:
            self._saves[save] = step

    def end(self, save: object) -> None:
        """Records that a save ended."""
        with self._changed:
            self._saves.pop(save, None)

    def wait_for_removal(self, step: int) -> None:
        """Waits until a step is no longer being removed."""
        with self._changed:
            self._changed.wait_for(lambda: step not in self._removed)

    @contextmanager
    def copying(self, steps: Sequence[int]) -> Iterator[None]:
        """Prevents removal of steps, after waiting until none of them is being removed."""
        with self._changed:
            # Not skipped instead: a step also counts as being removed while it is decided whether.
            self._changed.wait_for(lambda: self._removed.isdisjoint(steps))
            self._copied.update(steps)
        try:
            yield
        finally:
            with self._changed:
                self._copied.subtract(steps)

    @contextmanager
    def removing(self, step: int) -> Iterator[bool]:
        """Blocks saves and copies of a step during its removal; yields False if one is in
        progress."""
        with self._changed:
            is_free = not self._copied[step] and step not in self._saves.values()
            if is_free:
                self._removed.add(step)
        try:
            yield is_free
        finally:
            with self._changed:
                if is_free:
                    self._removed.discard(step)
                    self._changed.notify_all()


_log = logging.getLogger("unickpt")


class Cleaning:
    """Removes steps in the background.

    Arguments:
        tiers: the folders.
        retention: which steps to keep.
        in_use: which steps are being saved or copied.
        retires: whether a step that others borrow from is removed as well, all but its files.
    """

    def __init__(
        self, tiers: Tiers, retention: Retention, in_use: StepsInUse, *, retires: bool = False
    ) -> None:
        self._tiers, self._retention, self._in_use = tiers, retention, in_use
        self._retires = retires
        self._retired: dict[Tier, set[tuple[int, str]]] = {}  # after a first look, of each tier
        self._work = SerialExecutor(
            "unickpt clean", lambda error: _log.warning("cleaning up: %s", error)
        )
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._left: dict[tuple[Tier, int], Sequence[str]] = {}  # attempts of removed steps
        self._told: set[tuple[Tier, int]] = set()
        self.newest: int | None = None
        """The step that was saved last."""
        self.own: set[str] = set()
        """Attempts of this process that were committed in the local tier."""
        self.copied: set[str] = set()
        """Versions that are complete in the root."""

    def start(self) -> None:
        """Cleans in the background, after what was started before."""
        self._work.add(self.clean)

    def wait(self) -> None:
        """Waits until nothing is left to clean; raises nothing."""
        self._work.wait()

    def committed(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a step that was saved."""
        self._metrics[step] = metrics

    def forget(self, step: int) -> None:
        """Records that a step was removed."""
        self._metrics.pop(step, None)

    def forget_metrics(self) -> None:
        """Records that another job may have replaced steps."""
        self._metrics.clear()

    def clean(self) -> None:
        """Removes the steps that no rule keeps, and copied steps from the local tier."""
        self._remove_left()
        there = self._tiers.root.committed()
        # Only by the steps in the root: a step that is not copied yet must not remove another
        # there.
        expendable = set(self.expendable(there, []))
        if self._tiers.local is not None:
            self._clean_local(self._tiers.local, there, expendable)
        # The newest first, because it may be the only one that borrows from the others.
        for step in sorted(expendable, reverse=True):
            with self._in_use.removing(step) as is_free:
                if is_free and self._remove(self._tiers.root, step, retires=self._retires):
                    self.forget(step)
        for tier in self._tiers.all:
            self._remove_retired(tier)

    def remove(self, steps: Collection[int]) -> None:
        """Removes steps from both tiers, also those that rules keep; but no step that is in use or
        that others borrow from, unless it can be retired."""
        there = {tier: set(tier.committed()) for tier in self._tiers.all}
        for step in sorted(steps, reverse=True):
            holders = [tier for tier in self._tiers.all if step in there[tier]]
            with self._in_use.removing(step) as is_free:
                # Each version that does not count first; if one stays, so do the others.
                if is_free and all(
                    self._remove(tier, step, retires=self._retires)
                    for tier in self._tiers.newest_last(step, holders)
                ):
                    self.forget(step)
        for tier in self._tiers.all:
            self._remove_retired(tier)

    def _remove(self, tier: Tier, step: int, *, retires: bool) -> bool:
        """Removes a step from a tier, unless another step there borrows from it; the only place
        that removes steps in the background.

        Arguments:
            retires: whether a step that others borrow from is removed for all but these. Otherwise
                it stays.

        Returns:
            Whether it is not there any more. A failure is told once, and tried again after the next
            save.
        """
        try:
            tier.remove(step)
            _log.info("removed %s", tier.path(step))
            return True
        except Needed:
            if not retires:
                return False
            digest = tier.retire(step)
            if digest is not None and tier in self._retired:
                self._retired[tier].add((step, digest))
            _log.info("removed %s, but for what others borrow", tier.path(step))
            return True
        except (StorageError, UnsupportedFormat) as error:
            self._tell(tier, step, error)
            if isinstance(error, Unremoved):
                self._left[tier, step] = error.attempts
            return isinstance(error, Unremoved)

    def _tell(self, tier: Tier, step: int, error: Exception) -> None:
        """Says once that a step cannot be removed."""
        if (tier, step) not in self._told:
            _log.warning("cleaning up: %s; tried again after each save", error)
        self._told.add((tier, step))

    def _remove_retired(self, tier: Tier) -> None:
        """Removes what is left of retired steps that no step needs any more; those of earlier jobs
        too, which may have saved with other arguments."""
        if tier not in self._retired:
            self._retired[tier] = tier.retired()
        for step, digest in sorted(self._retired[tier]):
            try:
                if tier.remove_retired(step, digest):
                    self._retired[tier].discard((step, digest))
            except UnsupportedFormat as error:
                self._tell(tier, step, error)

    def _remove_left(self) -> None:
        """Removes what earlier removals have left."""
        context = paths.context()
        for (tier, step), attempts in list(self._left.items()):
            with self._in_use.removing(step) as is_free, suppress(Unremoved):
                if is_free:
                    attempt_folders.remove_attempts(tier.at(step), attempts, context)
                    attempt_folders.check_removed(tier.at(step), attempts, context)
                    del self._left[tier, step]

    def _clean_local(self, local: Tier, there: Sequence[int], in_root: set[int]) -> None:
        """Removes the steps that the local tier no longer needs.

        Arguments:
            there: the steps in the root.
            in_root: those of them that no rule keeps there; those that are removed, or have to
                stay, are taken out.
        """
        here = local.committed()
        expendable = set(self.expendable(there, here))
        for step in reversed(here):
            with self._in_use.removing(step) as is_free:
                if is_free:
                    is_expendable = step in expendable and step != here[-1]
                    self._clean_step(local, step, is_expendable, step == here[-1], in_root)

    def _clean_step(
        self, local: Tier, step: int, is_expendable: bool, is_newest: bool, in_root: set[int]
    ) -> None:
        """Removes a step from the local tier if that no longer needs it."""
        versions = compare(local, self._tiers.root, step)
        version = versions.local
        if version is None:
            return
        if versions.newer is Newer.ROOT and version.attempt not in self.own:
            self._remove_stale(local, step, versions)
            return
        is_copied = versions.newer is Newer.SAME and version.name in self.copied
        if versions.newer is Newer.LOCAL and versions.root is not None:
            # First the version that it replaces, which would count again.
            is_expendable = is_expendable and step in in_root
            in_root.discard(step)
            if is_expendable:
                is_expendable = self._remove(self._tiers.root, step, retires=self._retires)
        if is_expendable or (is_copied and not is_newest):
            self._remove(local, step, retires=self._retires)

    def remove_abandoned(self) -> None:
        """Removes steps from the local tier that do not count; see `compare`. If the root is away,
        copying finds out later.

        Raises:
            SaveConflict: another job saves here.
            StorageError: the local tier failed.
        """
        if self._tiers.local is None:
            return
        for step in reversed(self._tiers.local.committed()):
            try:
                versions = compare(self._tiers.local, self._tiers.root, step)
            except StorageError as error:
                _log.warning(
                    "cannot compare %s with the root: %s", self._tiers.local.path(step), error
                )
                return
            if versions.is_abandoned:
                self._tiers.local.lease.take()
                self._remove_stale(self._tiers.local, step, versions)

    def _remove_stale(self, local: Tier, step: int, versions: TierVersions) -> None:
        """Removes a step that does not count from the local tier; steps that count may borrow from
        it."""
        where = self._tiers.root.location
        _log.warning("removing %s, which is %s in %s", local.path(step), versions.fault, where)
        self._remove(local, step, retires=True)

    def expendable(self, there: Sequence[int], here: Sequence[int]) -> list[int]:
        """The steps in the root and in the local tier that no rule keeps."""
        metrics = self.metrics(there, here)
        # The step just saved stays, even if a step of another run has a higher number.
        kept = () if self.newest is None else (self.newest,)
        if self._tiers.roles is not None:
            return self._tiers.roles.expendable(self._retention, metrics, kept)
        return self._retention.expendable(metrics, kept)

    def metrics(self, there: Sequence[int], here: Sequence[int]) -> dict[int, Mapping[str, float]]:
        """The metrics of the steps in the root and in the local tier, as far as rules need them."""
        steps = {*there, *here}
        if self._retention.keep_best is not None:
            for step in steps - self._metrics.keys():
                self._metrics[step] = self._current_tier(step, there, here).metrics(step)
        return {step: self._metrics.get(step, {}) for step in steps}

    def _current_tier(self, step: int, there: Sequence[int], here: Sequence[int]) -> Tier:
        """The tier that has the current version of a step; `there`, `here`: as for `expendable`."""
        root, local = self._tiers.root, self._tiers.local
        if local is None or step not in here:
            return root
        if step not in there or compare(local, root, step).newer is Newer.LOCAL:
            return local
        return root
