"""Housekeeping of a run's steps: what happens before and after their saves.

Only process 0 of a job copies and removes steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace

from unickpt.errors import CheckpointExists, SaveConflict, StorageError
from unickpt.runs.cleaning import Cleaning, StepOrder, StepsInUse
from unickpt.runs.retention import Retention
from unickpt.runs.step_folder import Branch, Lineage
from unickpt.runs.tier_copies import Copying
from unickpt.runs.tiers import Tier, Tiers
from unickpt.saving.background import SaveCallbacks
from unickpt.saving.options import SaveOptions

_log = logging.getLogger("unickpt")


class Housekeeping:
    """What happens to steps before and after their saves.

    Arguments:
        tiers: the folders.
        retention: which steps to keep.
        options: of the saves.
        branch: which existing steps belong to this run.
        report: called with what could not be copied, and the error.
    """

    def __init__(
        self,
        tiers: Tiers,
        retention: Retention,
        options: SaveOptions,
        branch: Branch,
        report: Callable[[str, Exception], object],
    ) -> None:
        self._tiers, self._options, self._branch = tiers, options, branch
        self._order, self._in_use = StepOrder(tiers, branch), StepsInUse()
        self._cleaning = Cleaning(tiers, retention, self._in_use)
        self._copying = Copying(
            tiers, options, self._in_use, self._cleaning, self._order.failed, report
        )
        self.recent: int | None = None
        """The step that this process saved or loaded last."""
        self._lineages: dict[int, tuple[str, Lineage]] = {}  # of saves in flight; see `_check`

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
            failed=lambda error: self._order.failed.__setitem__(step, error),
            ended=lambda: self._ended(save, step),
        )

    def is_in_flight(self, step: int) -> bool:
        """Whether a save of a step has begun and has not ended."""
        return step in self._in_use.saved

    def loaded(self, step: int) -> None:
        """Records that a step was loaded."""
        self._order.loaded = self.recent = step

    def remove_abandoned(self) -> None:
        """See `Cleaning.remove_abandoned`."""
        self._cleaning.remove_abandoned()

    def remove(self, steps: Iterable[int]) -> None:
        """Removes steps from both tiers, the newest first; nothing else may be in progress.

        Raises:
            SaveConflict: another job saves here, or another step has chunks in one of them.
            StorageError: a storage failed.
        """
        for tier in self._tiers.all:
            tier.lease.take()
        there = {tier: tier.committed() for tier in self._tiers.all}
        for step in sorted(steps, reverse=True):
            holders = [tier for tier in self._tiers.all if step in there[tier]]
            for tier in holders:
                self._check_not_needed(tier, step)
            for tier in holders:
                _log.info("removing %s", tier.path(step))
                tier.remove(step)
            self._cleaning.forget(step)
            self._order.failed.pop(step, None)
            self._branch.forget(step)
        self._order.forget_all()

    def _check_not_needed(self, tier: Tier, step: int) -> None:
        needed = tier.borrowers(step)
        if needed:
            raise SaveConflict(
                f"{tier.path(step)} has chunks of {', '.join(needed[:3])}, which did not write "
                "them again; remove these first"
            )

    def wait(self) -> None:
        """Waits until all steps are copied and old ones removed; raises nothing."""
        self._copying.wait()
        self._cleaning.wait()

    def close(self) -> None:
        """Releases the folders for other jobs."""
        self._tiers.close()

    def _begin(self, save: object, step: int, overwrite: bool) -> None:
        """Runs within the call; makes no request over a network."""
        self._order.check_order(step, [s for s in self._in_use.saved if s > step])
        for tier in self._tiers.all:
            tier.check_no_link(step)
            if not tier.location.is_remote:
                # The root may be unavailable; then copying reports it.
                with nullcontext() if tier is self._tiers.first else suppress(StorageError):
                    self._order.check_newest(step, tier)
        if not self._tiers.first.location.is_remote:
            self._order.check_failed(step, overwrite)
        self._in_use.begin(save, step)

    def _prepare(self, step: int, overwrite: bool, attempt: str) -> None:
        """Runs before anything of a step is written."""
        self._copying.session = attempt.rpartition("-")[0]
        self._tiers.first.check_no_checkpoint()
        is_new = self._tiers.first.lease.take()  # until now, another job may have saved here
        if is_new or not self._tiers.first.location.is_remote:
            self._order.forget(self._tiers.first)
        self._tiers.first.open(self._in_use.saved, self._copying.session)
        self._in_use.wait_for_removal(step)
        self._order.check_newest(step, self._tiers.first)
        self._order.check_failed(step, overwrite)
        if self._tiers.local is None:
            return
        self._copying.wait_for_room()
        with suppress(StorageError):  # it may be away; then copying finds out
            self._tiers.root.check_no_checkpoint()
            self._order.check_newest(step, self._tiers.root)
        follows = self._followed(self._tiers.local)
        supersedes = self._superseded(self._tiers.local, step, overwrite, attempt)
        self._lineages[step] = attempt, Lineage(tuple(supersedes), frozenset(follows))

    def _followed(self, local: Tier) -> set[str]:
        """The versions that a save follows: the newest in the root, and those in the local tier
        that are to be copied after it. If the root cannot be read, the newest local version, and
        those that it follows."""
        # First the local ones: each may become the newest in the root at any time.
        found = {step: local.version(step) for step in local.committed()}
        there = {step: version for step, version in found.items() if version is not None}
        try:
            newest = self._tiers.root.newest()
        except StorageError:
            if not there:
                return set()
            last = max(there)
            return {there[last].name, *(local.lineage(last, there[last]).follows or ())}
        if newest is None:
            return {version.name for version in there.values()}
        later = {version.name for step, version in there.items() if step >= newest[0]}
        return {newest[1].name, *later}

    def _superseded(self, local: Tier, step: int, overwrite: bool, attempt: str) -> list[str]:
        """The versions of a step that an attempt to save it in the local tier supersedes."""
        here, names = local.version(step), list[str]()
        if here is not None:
            names = [*local.lineage(step, here).supersedes, here.name]
        try:
            there = self._tiers.root.version(step)
        except StorageError:  # it may be away; then copying finds out
            if overwrite:
                self._copying.unseen.add(attempt)
            return names
        if there is None:
            return names
        if not overwrite:
            raise CheckpointExists(
                f"{self._tiers.root.path(step)} already holds a checkpoint; pass overwrite=True"
            )
        # Versions before the root's no longer exist in either tier.
        known = names.index(there.name) if there.name in names else 0
        return list(dict.fromkeys([there.name, *names[known:]]))

    def _is_newest(self, step: int) -> None:
        self._cleaning.newest = self.recent = step
        self._order.committed(step)

    def _check(self, step: int) -> None:
        """Runs right before its commit."""
        if step in self._lineages:
            attempt, lineage = self._lineages[step]
            self._tiers.first.record_lineage(step, attempt, lineage, fsync=self._options.fsync)
        self._tiers.first.lease.check()

    def _committed(self, step: int, metrics: Mapping[str, float]) -> None:
        """Runs after its commit."""
        self._is_newest(step)
        self._cleaning.committed(step, metrics)
        if self._tiers.local is None:
            self._cleaning.start()
        else:
            self._cleaning.own.add(self._lineages[step][0])
            self._copying.start()

    def _ended(self, save: object, step: int) -> None:
        """Runs at the end of its save, whether it succeeded or not."""
        self._lineages.pop(step, None)
        self._in_use.end(save)
