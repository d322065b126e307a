"""Upkeep of a run's steps: copies them between tiers, and removes steps that no rule keeps.

Only process 0 of a job does this work.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

from unickpt.commit.version import Version
from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    LaterStepsExist,
    SaveConflict,
    StorageError,
)
from unickpt.quoting import some
from unickpt.runs.branch import Branch
from unickpt.runs.lease import Lease
from unickpt.runs.lineage import Lineage
from unickpt.runs.retention import Retention
from unickpt.runs.tiers import Newer, Standing, Tier, compare
from unickpt.saving.options import SaveOptions
from unickpt.saving.pending import SaveCallbacks
from unickpt.threads import Chores

_log = logging.getLogger("unickpt")
_COPIES = 2  # checkpoints that may wait to be copied from the local tier; the next save waits


class Upkeep:
    """What happens to steps before and after their saves.

    Arguments:
        root: the folder of all kept steps.
        local: the folder where they are committed first, if not `root`.
        retention: which steps to keep.
        options: of the saves.
        branch: which existing steps belong to this run.
        failed: called with what could not be copied, and the error.
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
        self._tell = failed
        self._copying = Chores(
            "unickpt copy", partial(failed, f"copying a step to {root.location}")
        )
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._session = ""
        self._saved: int | None = None
        self._failed: dict[int, BaseException] = {}  # steps whose last save, or copy, failed
        self._newest: dict[Tier, int] = {}  # as far as this process knows
        self.loaded: int | None = None
        """The step that was loaded last."""
        # Steps that are being saved, that are copied or wait to be copied, and that are being
        # removed. Steps of the first two kinds are not removed, and those of the third are not
        # saved.
        self._changed = threading.Condition()
        self._flights: dict[object, int] = {}  # by the save
        self._held: set[int] = set()
        self._removed: set[int] = set()
        self._lineages: dict[int, tuple[str, Lineage]] = {}  # of saves in flight; see `_check`
        self._own: set[str] = set()  # attempts of this process that were committed
        self._unseen: set[str] = set()  # attempts to replace the root's version, whichever it is
        self._copied: set[str] = set()  # versions that are complete in the root
        self._refused: set[str] = set()  # versions that cannot be copied, already reported
        for tier in {self._first, root}:
            weakref.finalize(self, Lease.give_back, tier.lease)

    def hooks(self, step: int, metrics: Mapping[str, float], overwrite: bool) -> SaveCallbacks:
        """The hooks of a save of a step that begins now, on process 0.

        Arguments:
            metrics: as for `Checkpointer.save`.
            overwrite: whether it may replace a step.
        """
        return replace(
            self.hooks_of_others(step, overwrite),
            prepare=lambda attempt: self._prepare(step, overwrite, attempt),
            check=lambda: self._check(step),
            committed=lambda: self._committed(step, metrics),
        )

    def hooks_of_others(self, step: int, overwrite: bool) -> SaveCallbacks:
        """The hooks on the other processes."""
        save = object()
        return SaveCallbacks(
            begin=lambda: self._begin(save, step, overwrite),
            committed=lambda: self._is_newest(step),
            failed=lambda error: self._failed.__setitem__(step, error),
            ended=lambda: self._ended(save, step),
        )

    def is_in_flight(self, step: int) -> bool:
        """Whether a save of a step has begun and has not ended."""
        return step in self._in_flight

    @property
    def _in_flight(self) -> list[int]:
        with self._changed:
            return list(self._flights.values())

    def remove_abandoned(self) -> None:
        """Removes steps from the local tier that do not count; see `compare`. If the root is away,
        copying finds out later.

        Raises:
            SaveConflict: another job saves here.
            StorageError: the local tier failed.
        """
        if self._local is None:
            return
        for step in self._local.committed():
            try:
                standing = compare(self._local, self._root, step)
            except StorageError as error:
                _log.warning("cannot compare %s with the root: %s", self._local.path(step), error)
                return
            if standing.is_abandoned:
                self._first.lease.take()
                self._log_removal(self._local, step, standing)
                self._local.remove(step)

    def remove(self, steps: Iterable[int]) -> None:
        """Removes steps from both tiers, the newest first; nothing else may be in progress.

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
            self._failed.pop(step, None)
            self._branch.forget(step)
        self._newest.clear()

    def wait(self) -> None:
        """Waits until all steps are copied and old ones removed; raises nothing."""
        self._copying.wait()
        self._cleaning.wait()

    def close(self) -> None:
        """Releases the folders for other jobs."""
        for tier in {self._first, self._root}:
            tier.lease.give_back()

    def _begin(self, save: object, step: int, overwrite: bool) -> None:
        """Runs within the call; makes no request over a network."""
        self._check_order(step, [s for s in self._in_flight if s > step])
        for tier in self._tiers:
            tier.check_no_link(step)
            if not tier.location.is_remote:
                # The root may be unavailable; then copying reports it.
                with nullcontext() if tier is self._first else suppress(StorageError):
                    self._check_newest(step, tier)
        if not self._first.location.is_remote:
            self._check_failed(step, overwrite)
        with self._changed:
            self._flights[save] = step

    def _prepare(self, step: int, overwrite: bool, attempt: str) -> None:
        """Runs before anything of a step is written."""
        self._session = attempt.rpartition("-")[0]
        self._first.check_no_checkpoint()
        is_news = self._first.lease.take()  # until now, another job may have saved here
        if is_news or not self._first.location.is_remote:
            self._newest.pop(self._first, None)
        self._first.open(self._in_flight, self._session)
        with self._changed:
            self._changed.wait_for(lambda: step not in self._removed)
        self._check_newest(step, self._first)
        self._check_failed(step, overwrite)
        if self._local is None:
            return
        self._copying.wait(_COPIES - 1)
        with suppress(StorageError):  # it may be away; then copying finds out
            self._root.check_no_checkpoint()
            self._check_newest(step, self._root)
        follows = self._followed(self._local)
        supersedes = self._superseded(self._local, step, overwrite, attempt)
        self._lineages[step] = attempt, Lineage(tuple(supersedes), frozenset(follows))

    def _check_failed(self, step: int, overwrite: bool) -> None:
        """If the last save of this step failed after its commit, reports that error instead of only
        the existing step.

        Raises:
            CheckpointExists: a save failed after it had committed the step.
        """
        error = self._failed.get(step)
        if error is not None and not overwrite and step in self._first.committed():
            raise CheckpointExists(
                f"step {step} was saved before, and that failed: {error}. It had already been "
                f"committed to {self._first.path(step)} then; pass overwrite=True to save it "
                "again"
            ) from error

    def _check_newest(self, step: int, tier: Tier) -> None:
        if self._newest.get(tier, step + 1) > step:
            found = self._branch.steps(tier)
            self._newest[tier] = max(found, default=-1)
            self._check_order(step, [s for s in found if s > step])

    def _check_order(self, step: int, later: Sequence[int]) -> None:
        """Refuses to save a step below later ones, because a restart would not load it.

        Raises:
            LaterStepsExist: says how to continue.
        """
        if not later:
            return
        there = {s for tier in self._tiers for s in self._branch.steps(tier)}
        below = {s for s in there if s < step}
        base = self.loaded if self.loaded in below else max(below, default=None)
        ways = "remove them with delete(step), or save into another folder"
        if base is not None:
            ways = (
                f"to go on from step {base}, use Checkpointer(..., after={base}), or call "
                f"drop_later_steps({base}) first; both remove the later steps"
            )
        raise LaterStepsExist(
            f"{self._root.location}: step {step} is below existing "
            f"{'step' if len(later) == 1 else 'steps'} {some(later)}. A restart would go on from "
            f"step {max(later)}, not from this one; {ways}"
        )

    def _is_newest(self, step: int) -> None:
        self._saved = step
        self._failed.pop(step, None)
        if self._first in self._newest:
            self._newest[self._first] = max(step, self._newest[self._first])

    def _followed(self, local: Tier) -> set[str]:
        """The versions that a save follows: the newest in the root, and those in the local tier
        that are to be copied after it. If the root cannot be read, the newest local version, and
        those that it follows."""
        # First the local ones: each may become the newest in the root at any time.
        found = {step: local.version(step) for step in local.committed()}
        there = {step: version for step, version in found.items() if version is not None}
        try:
            newest = self._root.newest()
        except StorageError:
            if not there:
                return set()
            last = max(there)
            return {there[last].name, *(local.lineage(last, there[last]).follows or ())}
        if newest is None:
            return {version.name for version in there.values()}
        later = {version.name for step, version in there.items() if step > newest[0]}
        return {newest[1].name, *later}

    def _superseded(self, local: Tier, step: int, overwrite: bool, attempt: str) -> list[str]:
        """The versions of a step that an attempt to save it in the local tier supersedes."""
        here, names = local.version(step), list[str]()
        if here is not None:
            names = [*local.lineage(step, here).supersedes, here.name]
        try:
            there = self._root.version(step)
        except StorageError:  # it may be away; then copying finds out
            if overwrite:
                self._unseen.add(attempt)
            return names
        if there is None:
            return names
        if not overwrite:
            raise CheckpointExists(
                f"{self._root.path(step)} already holds a checkpoint; pass overwrite=True"
            )
        # Versions before the root's no longer exist in either tier.
        known = names.index(there.name) if there.name in names else 0
        return list(dict.fromkeys([there.name, *names[known:]]))

    def _check(self, step: int) -> None:
        """Runs right before its commit."""
        if step in self._lineages:
            attempt, lineage = self._lineages[step]
            self._first.record_lineage(step, attempt, lineage, fsync=self._options.fsync)
        self._first.lease.check()

    def _committed(self, step: int, metrics: Mapping[str, float]) -> None:
        """Runs after its commit."""
        self._is_newest(step)
        self._metrics[step] = metrics
        if self._local is None:
            self._cleaning.add(self._clean)
        else:
            self._own.add(self._lineages[step][0])
            self._copying.add(self._copy)

    def _ended(self, save: object, step: int) -> None:
        """Runs at the end of its save, whether it succeeded or not."""
        self._lineages.pop(step, None)
        with self._changed:
            self._flights.pop(save, None)

    # --- copying -------------------------------------------------------------------------------

    def _copy(self) -> None:
        """Copies the steps that the root lacks from the local tier, unless no rule keeps them."""
        assert self._local is not None
        self._root.open(self._in_flight, self._session)
        there, here = self._root.committed(), self._local.committed()
        expendable = self._expendable(there, here)
        with self._holding([s for s in here if s not in expendable or s == here[-1]]) as steps:
            for step in steps:
                try:
                    self._copy_step(self._local, step)
                except Exception as error:
                    self._failed[step] = error
                    self._tell(f"copying a step to {self._root.path(step)}", error)
        self._cleaning.add(self._clean)

    def _copy_step(self, local: Tier, step: int) -> None:
        """Copies a step if needed, and again if it is replaced during the copy."""
        budget_bytes, timeout_s = self._options.budget_bytes, self._options.timeout_s
        while True:
            standing = compare(local, self._root, step)
            version = standing.local
            if version is None:
                raise CheckpointNotFound(
                    f"{local.path(step)} was removed by another process before it was copied to "
                    f"{self._root.location}"
                )
            if version.name in self._refused or not self._is_due(local, step, version, standing):
                return
            try:
                arguments = local, step, version, standing.root, budget_bytes, timeout_s
                if self._root.copy_from(*arguments):
                    self._is_copied(local, step, version)
            except CheckpointCorrupt:
                self._refused.add(version.name)  # otherwise each later save would try it again
                raise

    def _is_copied(self, local: Tier, step: int, version: Version) -> None:
        """Records that a version is complete in the root."""
        self._copied.add(version.name)
        try:
            local.record_copied(step, version, fsync=self._options.fsync)
        except StorageError as error:  # the copy is there; a record is missing
            _log.warning("cannot record that %s was copied: %s", local.path(step), error)

    def _is_due(self, local: Tier, step: int, version: Version, standing: Standing) -> bool:
        """Whether a version in the local tier must be copied.

        Raises:
            SaveConflict: this run saved it, and it does not supersede what the root has.
        """
        if standing.newer is Newer.LOCAL:
            return True
        if standing.newer is Newer.SAME:
            damage = "" if version.name in self._copied else self._root.damage(step)
            if damage:
                _log.warning("%s; it is copied again", damage)
            elif version.name not in self._copied:
                self._is_copied(local, step, version)
            return bool(damage)
        if version.attempt in self._unseen:
            return True
        if version.attempt in self._own:
            self._refused.add(version.name)
            raise SaveConflict(
                f"{self._root.path(step)}: another job saved or removed steps there, or they could "
                "not be read when this job saved the step. The step is not copied; it stays in "
                f"{self._first.path(step)}: copy it from there if you want it"
            )
        return False

    @contextmanager
    def _holding(self, steps: Sequence[int]) -> Iterator[list[int]]:
        """Prevents removal of steps; yields those that are not being removed already."""
        with self._changed:
            held = [step for step in steps if step not in self._removed]
            self._held.update(held)
        try:
            yield held
        finally:
            with self._changed:
                self._held.difference_update(held)

    # --- cleaning up ---------------------------------------------------------------------------

    def _clean(self) -> None:
        """Removes the steps that no rule keeps, and copied steps from the local tier."""
        there = self._root.committed()
        if self._local is not None:
            self._clean_local(self._local, there)
        # Only by the steps in the root: a step that is not copied yet must not remove another
        # there.
        for step in self._expendable(there, []):
            with self._removing(step) as is_free:
                if is_free:
                    _log.info("removing %s", self._root.path(step))
                    self._root.remove(step)
                    self._metrics.pop(step, None)

    def _clean_local(self, local: Tier, there: Sequence[int]) -> None:
        here = local.committed()
        expendable = self._expendable(there, here)
        for step in here:
            with self._removing(step) as is_free:
                if is_free and self._may_go(local, step, step in expendable, step == here[-1]):
                    local.remove(step)

    def _may_go(self, local: Tier, step: int, is_expendable: bool, is_newest: bool) -> bool:
        """Whether the local tier no longer needs a step."""
        standing = compare(local, self._root, step)
        version = standing.local
        if version is None:
            return False
        if standing.newer is Newer.ROOT and version.attempt not in self._own:
            self._log_removal(local, step, standing)
            return True
        is_copied = standing.newer is Newer.SAME and version.name in self._copied
        return not is_newest and (is_copied or is_expendable)

    def _log_removal(self, local: Tier, step: int, standing: Standing) -> None:
        where = self._root.location
        _log.warning("removing %s, which is %s in %s", local.path(step), standing.fault, where)

    @contextmanager
    def _removing(self, step: int) -> Iterator[bool]:
        """Blocks saves and copies of a step during its removal; yields False if one is in
        progress."""
        with self._changed:
            is_free = step not in self._held and step not in self._in_flight
            if is_free:
                self._removed.add(step)
        try:
            yield is_free
        finally:
            with self._changed:
                if is_free:
                    self._removed.discard(step)
                    self._changed.notify_all()

    def _expendable(self, there: Sequence[int], here: Sequence[int]) -> list[int]:
        """The steps in the root and in the local tier that no rule keeps."""
        tiers = {**dict.fromkeys(here, self._local), **dict.fromkeys(there, self._root)}
        if self._retention.keep_best is not None:
            for step, tier in tiers.items():
                if step not in self._metrics and tier is not None:
                    self._metrics[step] = tier.metrics(step)
        metrics = {step: self._metrics.get(step, {}) for step in tiers}
        # The step just saved stays, even if a step of another run has a higher number.
        return self._retention.expendable(metrics, () if self._saved is None else (self._saved,))
