"""Housekeeping of a run's steps: before and after their saves, and when a program removes some.

Only process 0 of a job copies and removes steps.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

from unickpt.errors import (
    CheckpointExists,
    CheckpointNotFound,
    CoverageError,
    InvalidPath,
    ProcessFailed,
    SaveConflict,
    StorageError,
)
from unickpt.frameworks.members import named
from unickpt.frameworks.process_group import Group, members_of
from unickpt.options import SaveOptions
from unickpt.quoting import counted, some
from unickpt.runs import attempt_folders, lineage_notes
from unickpt.runs.cleaning import Cleaning, StepOrder, StepsInUse
from unickpt.runs.lineage_notes import Lineage
from unickpt.runs.retention import Retention
from unickpt.runs.roles import Roles
from unickpt.runs.run_features import RunFeatures
from unickpt.runs.step_folder import PROBE, Branch
from unickpt.runs.tier_copies import Copying
from unickpt.runs.tiers import Tier, Tiers
from unickpt.saving.background import SaveCallbacks
from unickpt.storage import paths
from unickpt.storage.locations import Location

_log = logging.getLogger("unickpt")


@dataclass(eq=False)
class _Save:
    """A save that has begun, on one process.

    Arguments:
        step: its step; another save of the same step may have begun.
        overwrite: whether it may replace a step.
        attempt: its name, once it is its turn.
        lineage: what it replaces and follows, if it is to be copied.
    """

    step: int
    overwrite: bool
    attempt: str = ""
    lineage: Lineage | None = None


class Housekeeping:
    """What happens to steps before and after their saves.

    Arguments:
        tiers: the folders.
        retention: which steps to keep.
        options: of the saves.
        branch: which existing steps belong to this run.
        report: called with what could not be copied, and the error.
        retires: see `Cleaning`.
    """

    def __init__(
        self,
        tiers: Tiers,
        retention: Retention,
        options: SaveOptions,
        branch: Branch,
        report: Callable[[str, Exception], object],
        *,
        retires: bool = False,
    ) -> None:
        self._tiers, self._options, self._branch = tiers, options, branch
        self._order, self._in_use = StepOrder(tiers, branch), StepsInUse()
        self._retention, self._is_rated = retention, False
        self._cleaning = Cleaning(tiers, retention, self._in_use, retires=retires)
        self._copying: Copying | None = None
        if tiers.local is not None:
            self._copying = Copying(
                tiers, options, self._in_use, self._cleaning, self._order.failed, report
            )
        self.recent: int | None = None
        """The step that this process saved or loaded last."""

    def hooks(self, step: int, metrics: Mapping[str, float], overwrite: bool) -> SaveCallbacks:
        """The hooks of a save of a step that begins now, on process 0.

        Arguments:
            metrics: as for `Checkpointer.save`.
            overwrite: whether it may replace a step.
        """
        save = _Save(step, overwrite)

        def begin() -> None:
            self._check_rated(metrics)
            self._begin(save)

        return replace(
            self._hooks(save),
            begin=begin,
            prepare=lambda attempt: self._prepare(save, attempt),
            check=lambda: self._check(save),
            committed=lambda: self._committed(save, metrics),
        )

    def _check_rated(self, metrics: Mapping[str, float]) -> None:
        """Refuses the first save of a run without the metric by which the best steps are kept:
        without it in any, none would be.

        Raises:
            ValueError: says how to give it.
        """
        if not self._is_rated and not self._retention.rates(metrics):
            there = False
            with suppress(StorageError):  # the save will find out
                there = any(tier.committed() for tier in self._tiers.all)
            if not there:
                raise ValueError(self._retention.how_to_rate(metrics))
        self._is_rated = True

    def hooks_of_others(self, step: int, overwrite: bool) -> SaveCallbacks:
        """The hooks on the other processes."""
        return self._hooks(_Save(step, overwrite))

    def _hooks(self, save: _Save) -> SaveCallbacks:
        return SaveCallbacks(
            begin=lambda: self._begin(save),
            committed=lambda: self._is_newest(save.step),
            failed=lambda error: self._order.failed.__setitem__(save.step, error),
            ended=lambda: self._in_use.end(save),
        )

    def find_base(self, reuses: bool) -> str | None:
        """The checkpoint to which the next save refers.

        Arguments:
            reuses: whether it shall.
        """
        first = self._tiers.first
        if self.recent is None or not reuses:
            return None
        if self._tiers.local is not None and not first.location.is_local:
            return None  # what is copied to the root must not need another step
        return first.path(self.recent)

    def is_in_flight(self, step: int) -> bool:
        """Whether a save of a step has begun and has not ended."""
        return step in self._in_use.saved

    def loaded(self, step: int, group: Group) -> None:
        """Records that a step was loaded, by the processes of a job."""
        self._order.loaded = self.recent = step
        if group.index == 0:
            for tier in self._tiers.holders(step, self._branch)[:1]:
                self._branch.continue_from(tier, step)

    def remove_abandoned(self) -> None:
        """See `Cleaning.remove_abandoned`."""
        self._cleaning.remove_abandoned()

    def remove(self, steps: Collection[int]) -> None:
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
            for tier in holders:  # from all of them, or from none
                attempt_folders.check_unneeded(tier.at(step), paths.context())
            self._tiers.keep_later(step, steps, fsync=self._options.fsync)
            for tier in self._tiers.newest_last(step, holders):
                _log.info("removing %s", tier.path(step))
                tier.remove(step)
            self._cleaning.forget(step)
            self._order.failed.pop(step, None)
            self._branch.forget(step)
        self._order.forget_all()

    def part_from(self, roles: Roles) -> None:
        """Removes this role's steps that the others lack, and records with which steps of these
        no later ones belong together. Raises as `remove`."""
        _log.warning(
            "%s: going on from the newest step that all roles have: removing %s; %s of the others, "
            "which they have beyond it, will not count",
            *(self._tiers.root.location, some(roles.behind) or "nothing"),
            counted(len(roles.apart), "step"),
        )
        self.remove(roles.behind)
        roles.record(fsync=self._options.fsync)

    def wait(self) -> None:
        """Waits until all steps are copied and old ones removed; raises nothing."""
        if self._copying is not None:
            self._copying.wait()
        self._cleaning.wait()

    def close(self) -> None:
        """Releases the folders for other jobs."""
        self._tiers.close()

    def _begin(self, save: _Save) -> None:
        """Runs within the call; makes no request over a network."""
        step = save.step
        self._order.check_order(step, [s for s in self._in_use.saved if s > step])
        for tier in self._tiers.all:
            tier.check_no_link(step)
            if not tier.location.is_remote:
                # The root may be unavailable; then copying reports it.
                with nullcontext() if tier is self._tiers.first else suppress(StorageError):
                    self._order.check_newest(step, tier)
        if not self._tiers.first.location.is_remote:
            self._order.check_failed(step, save.overwrite)
        self._in_use.begin(save, step)

    def _prepare(self, save: _Save, attempt: str) -> None:
        """Runs before anything of a step is written."""
        step, save.attempt = save.step, attempt
        session = attempt.rpartition("-")[0]
        self._tiers.first.check_no_checkpoint()
        is_new = self._tiers.first.lease.take()  # until now, another job may have saved here
        if is_new or not self._tiers.first.location.is_remote:
            self._order.forget(self._tiers.first)
        if is_new:
            self._cleaning.forget_metrics()
        self._tiers.first.open(self._in_use.saved, session)
        self._in_use.wait_for_removal(step)
        self._order.check_newest(step, self._tiers.first)
        self._order.check_failed(step, save.overwrite)
        if self._tiers.local is None or self._copying is None:
            return
        self._copying.session = session
        self._copying.wait_for_room()
        with suppress(StorageError):  # it may be away; then copying finds out
            self._tiers.root.check_no_checkpoint()
            self._order.check_newest(step, self._tiers.root)
        follows = self._followed(self._tiers.local)
        supersedes = self._superseded(self._tiers.local, self._copying, save)
        save.lineage = Lineage(tuple(supersedes), frozenset(follows))

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
            lineage = lineage_notes.read(local.at(last), there[last])
            return {there[last].name, *(lineage.follows or ())}
        if newest is None:
            return {version.name for version in there.values()}
        later = {version.name for step, version in there.items() if step >= newest[0]}
        return {newest[1].name, *later}

    def _superseded(self, local: Tier, copying: Copying, save: _Save) -> list[str]:
        """The versions of its step that a save in the local tier supersedes."""
        step = save.step
        here, names = local.version(step), list[str]()
        if here is not None:
            names = [*lineage_notes.read(local.at(step), here).supersedes, here.name]
        try:
            there = self._tiers.root.version(step)
        except StorageError:  # it may be away; then copying finds out
            if save.overwrite:
                copying.unseen.add(save.attempt)
            return names
        if there is None:
            return names
        if not save.overwrite:
            raise CheckpointExists(
                f"{self._tiers.root.path(step)} already holds a checkpoint; pass overwrite=True"
            )
        # Versions before the root's no longer exist in either tier.
        known = names.index(there.name) if there.name in names else 0
        return list(dict.fromkeys([there.name, *names[known:]]))

    def _is_newest(self, step: int) -> None:
        self._cleaning.newest = self.recent = step
        self._order.committed(step)

    def _check(self, save: _Save) -> None:
        """Runs right before its commit."""
        if save.lineage is not None:
            step = self._tiers.first.at(save.step)
            lineage_notes.record(step, save.attempt, save.lineage, fsync=self._options.fsync)
        self._tiers.first.lease.check()

    def _committed(self, save: _Save, metrics: Mapping[str, float]) -> None:
        """Runs after its commit."""
        self._is_newest(save.step)
        self._cleaning.committed(save.step, metrics)
        if self._copying is None:
            self._cleaning.start()
        else:
            self._cleaning.own.add(save.attempt)
            self._copying.start()


class Removal:
    """Removes steps: all processes of a job call it, process 0 removes, and the others wait.

    What rules such as `keep_last` no longer keep is removed by `cleaning`.

    Arguments:
        tiers: of the run.
        branch: the steps that count.
        housekeeping: knows what is being saved, has the lease, and removes.
        features: of the run.
        forget: called if the step that was saved or loaded last is removed.
    """

    def __init__(
        self,
        tiers: Tiers,
        branch: Branch,
        housekeeping: Housekeeping,
        features: RunFeatures,
        forget: Callable[[], None],
    ) -> None:
        self._tiers, self._branch, self._housekeeping = tiers, branch, housekeeping
        self._features, self._forget = features, forget
        self._has_removed_steps_after = self._has_removed_abandoned = self._has_parted = False

    def drop_later(self, kept: int, group: Group, drain: Callable[[], None]) -> list[int]:
        """Removes all steps after one; see `Checkpointer.drop_later_steps`.

        Arguments:
            kept: the last step that stays.
            group: the processes of the job.
            drain: waits for saves and copies in flight.
        """
        check_same_step(group, self._tiers.root.location, "drop_later_steps", kept)
        there = self._settled(group, drain)
        later = [step for step in there if step > kept]
        if kept not in there:
            raise self._tiers.not_found(kept, there)
        self._remove(later, f"remove the steps after {kept}", group)
        if self._tiers.roles is not None:
            self._tiers.roles.behind = []
            self._tiers.roles.set_apart(kept)
            self._has_parted = False
        self._removed(later, newest=kept)
        return later

    def delete(self, step: int, group: Group, drain: Callable[[], None]) -> None:
        """Removes one step; see `Checkpointer.delete`. Arguments as for `drop_later`."""
        check_same_step(group, self._tiers.root.location, "delete", step)
        is_in_flight = self._housekeeping.is_in_flight(step)
        if group.count > 1:  # a save does not end at one moment on all of them
            is_in_flight = group.agree(int(is_in_flight)) > 0
        if is_in_flight:
            raise SaveConflict(f"{self._tiers.path(step)} is being saved; call wait() first")
        there = self._settled(group, drain)
        if step not in there:
            raise self._tiers.not_found(step, there)
        self._remove([step], f"remove step {step}", group)
        self._removed([step])

    def _removed(self, steps: Sequence[int], newest: int | None = None) -> None:
        """Records that no later save refers to steps that were removed, but to `newest`."""
        self._features.removed(steps)
        if self._housekeeping.recent in steps:
            self._housekeeping.recent = newest
            self._forget()

    def before_save(self, group: Group) -> None:
        """Removes, before the first save, what no step of this run may come after."""
        self._remove_abandoned(group)
        self._remove_steps_after(group)
        self._part_from_roles(group)

    def _part_from_roles(self, group: Group) -> None:
        """Removes, before the first save, steps that other roles lack, and sets apart what these
        have beyond the newest step of all."""
        roles = self._tiers.roles
        if roles is None or self._has_parted:
            return
        is_needed = group.index == 0 and bool(roles.behind or roles.apart)
        if group.count > 1:
            is_needed = group.agree(int(is_needed)) > 0
        if is_needed:
            what = "remove the steps that other roles lack"
            work = partial(self._housekeeping.part_from, roles)
            on_process_0(group, self._tiers.root.location, what, work)
        roles.behind = []
        self._has_parted = True

    def check_load(self, fallback: bool) -> None:
        """Checks a load.

        Raises:
            ValueError: it would fall back to an older step than other roles load.
            CheckpointNotFound: as `check_after`.
        """
        if fallback and self._tiers.roles is not None:
            raise ValueError(
                "fallback=True could load another step than other roles do, which do not know what "
                "is damaged here; load the same older step in all roles: load(step=...)"
            )
        self.check_after()

    def check_after(self) -> None:
        """Raises CheckpointNotFound if the step `after` does not exist."""
        after = self._branch.after
        if after is not None and not any(s >= after for s in self._tiers.steps(self._branch)):
            raise CheckpointNotFound(
                f"after={after}: {self._tiers.not_found(after, self._tiers.committed())}"
            )

    def _settled(self, group: Group, drain: Callable[[], None]) -> list[int]:
        """The committed steps, when no process saves and what is stale is removed."""
        drain()
        self._remove_abandoned(group)
        barrier(group)
        return self._tiers.committed()

    def _remove_abandoned(self, group: Group) -> None:
        """Removes steps of the local tier that another run abandoned, before the first change."""
        if self._tiers.local is None or self._has_removed_abandoned:
            return
        on_process_0(
            group,
            self._tiers.root.location,
            f"remove stale steps from {self._tiers.local.location}",
            self._housekeeping.remove_abandoned,
        )
        self._has_removed_abandoned = True

    def _remove_steps_after(self, group: Group) -> None:
        """Removes the steps that `after` abandons, before the first save."""
        if self._branch.after is None or self._has_removed_steps_after:
            return
        self.check_after()
        gone = {step for tier in self._tiers.all for step in self._branch.abandoned(tier)}
        self._remove(gone, f"remove the steps after {self._branch.after}", group)
        self._has_removed_steps_after = True

    def _remove(self, steps: Collection[int], what: str, group: Group) -> None:
        on_process_0(
            group, self._tiers.root.location, what, partial(self._housekeeping.remove, steps)
        )


def barrier(group: Group) -> None:
    """Waits until all processes call this."""
    if group.count > 1:
        group.agree(0)


def check_same_step(group: Group, where: Location, call: str, step: int) -> None:
    """Checks that all processes call a method with the same step.

    Raises:
        CoverageError: on all processes, if they do not.
    """
    if group.count == 1:
        return
    highest = group.agree(step)
    if group.agree(int(step != highest)):
        other = f"another with {highest}" if step != highest else "another with an earlier one"
        me = named(members_of(group), [group.index])
        raise CoverageError(
            f"{where}: the processes call {call} with different steps: {me} with {step}, {other}. "
            "Nothing was removed"
        )


def on_process_0(group: Group, where: Location, what: str, work: Callable[[], object]) -> None:
    """Calls `work` on process 0, while the others wait for it.

    Raises:
        ProcessFailed: on the others, if `work` raises an error; `where` and `what` say of what.
    """
    barrier(group)
    error: Exception | None = None
    if group.index == 0:
        try:
            work()
        except Exception as raised:
            error = raised
    failed = group.agree(int(error is not None)) if group.count > 1 else error is not None
    if failed:
        first = named(members_of(group), [0])
        raise error or ProcessFailed(f"{where}: {first} could not {what}; see the error of {first}")


def check_shared(group: Group, local: Tier) -> None:
    """Checks that all of several processes see the same local tier.

    Raises:
        InvalidPath: they do not.
    """
    store = local.location.store(paths.context(fsync=False))
    token = group.agree(secrets.randbits(60) + 1 if group.index == 0 else 0)
    name = f"{PROBE}{token:x}"
    if group.index == 0:
        local.location.make(durable=True)
        store.write(name, b"").result()
    group.agree(0)
    seen = store.read(name).result().state == "value"
    alone = group.agree(int(not seen))
    if group.index == 0:
        store.write(name, None).result()
    if alone:
        raise InvalidPath(
            f"local={str(local.location)!r} is not the same storage on all processes; "
            "give a path that they share, or omit local="
        )
