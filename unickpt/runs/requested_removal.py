"""Removal of steps on request of a program, and before its first save; coordinates the processes of
a job."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from unickpt.errors import (
    CheckpointNotFound,
    CoverageError,
    InvalidPath,
    ProcessFailed,
    SaveConflict,
)
from unickpt.frameworks.members import named
from unickpt.frameworks.process_group import Group, members_of
from unickpt.quoting import counted, first_few
from unickpt.runs import attempt_folders, lineage_notes
from unickpt.runs.background_removal import Cleaning
from unickpt.runs.current_steps import Steps
from unickpt.runs.roles import Roles
from unickpt.runs.run_features import RunFeatures
from unickpt.runs.step_folder import PROBE, StepFolder, step_before
from unickpt.saving.background import SaveQueue
from unickpt.storage import paths
from unickpt.storage.locations import Location

_log = logging.getLogger("unickpt")


class Removal:
    """Removes steps: all processes of a job call it, process 0 removes, and the others wait.

    `background_removal` removes steps that rules such as `keep_last` no longer keep.

    Arguments:
        steps, cleaning, features, queue: of the run.
        fsync: whether records must survive a power failure.
    """

    def __init__(
        self,
        steps: Steps,
        cleaning: Cleaning,
        features: RunFeatures,
        queue: SaveQueue,
        *,
        fsync: bool,
    ) -> None:
        self._steps, self._cleaning, self._features = steps, cleaning, features
        self._queue, self._fsync = queue, fsync
        self._where = steps.root.location
        self._has_removed_abandoned = False
        self.is_due = True
        """Whether `before_save` must be called."""

    def drop_later(self, last_step: int, group: Group, drain: Callable[[], None]) -> list[int]:
        """Removes all steps after one; see `Checkpointer.drop_later_steps`.

        Arguments:
            last_step: the last step that stays.
            group: the processes of the job.
            drain: waits for saves and copies in flight.
        """
        check_same_step(group, self._where, "drop_later_steps", last_step)
        committed_steps = self._settled(last_step, group, drain)
        later = [step for step in committed_steps if step > last_step]
        self._remove(later, f"remove the steps after {last_step}", group)
        if self._steps.roles is not None:
            self._steps.roles.behind = []
            self._steps.roles.set_apart(last_step)
            self.is_due = True
        self._removed(later, newest=last_step)
        return later

    def delete(self, step: int, group: Group, drain: Callable[[], None]) -> None:
        """Removes one step; see `Checkpointer.delete`. Arguments as for `drop_later`."""
        check_same_step(group, self._where, "delete", step)
        # A save does not end at one moment on all of them.
        if agreed(group, int(self.is_in_flight(step))):
            raise SaveConflict(f"{self._steps.path(step)} is being saved; call wait() first")
        self._settled(step, group, drain)
        self._remove([step], f"remove step {step}", group)
        self._removed([step])

    def is_in_flight(self, step: int) -> bool:
        """Whether a save of a step is in progress."""
        return step in self._steps.in_use.saved()

    def _settled(self, step: int, group: Group, drain: Callable[[], None]) -> list[int]:
        """The committed steps, including `step`, once no process saves and stale ones are
        removed."""
        drain()
        self._remove_abandoned(group)
        barrier(group)
        committed_steps = self._steps.committed()
        if step not in committed_steps:
            raise self._steps.not_found(step, committed_steps)
        return committed_steps

    def _removed(self, steps: Sequence[int], newest: int | None = None) -> None:
        """Records that no later save references removed steps, but only `newest`, if given."""
        self._features.removed(steps)
        if self._steps.recent in steps:
            self._steps.recent = newest
            self._queue.forget()

    def before_save(self, group: Group) -> None:
        """Removes, before the first save, steps that the steps of this run must not follow: those
        that another run abandoned, that `after` abandons, or that other roles lack."""
        steps, roles = self._steps, self._steps.roles
        if steps.local is not None and group.count > 1:
            check_shared(group, steps.local)
        self._remove_abandoned(group)
        if steps.after is not None:
            self.check_after()
            unseen = {s for f in steps.all for s in f.committed() if not steps.sees(f, s)}
            self._remove(unseen, f"remove the steps after {steps.after}", group)
        if roles is not None:
            is_needed = group.index == 0 and bool(roles.behind or roles.apart)
            if agreed(group, int(is_needed)):
                what = "remove the steps that other roles lack"
                on_process_0(group, self._where, what, partial(self._part_from, roles))
            roles.behind = []
        self.is_due = False

    def _part_from(self, roles: Roles) -> None:
        """Removes this role's steps that the others lack, and records the others' steps that never
        match later ones: those beyond the newest step that all have."""
        _log.warning(
            "%s: going on from the newest step that all roles have: removing %s; %s of the others, "
            "which they have beyond it, will not count",
            *(self._where, first_few(roles.behind) or "nothing", counted(len(roles.apart), "step")),
        )
        self._remove_now(roles.behind)
        roles.record(fsync=self._fsync)

    def check_load(self, fallback: bool) -> None:
        """Checks a load.

        Raises:
            ValueError: it would fall back to an older step than other roles load.
            CheckpointNotFound: as `check_after`.
        """
        if fallback and self._steps.roles is not None:
            raise ValueError(
                "fallback=True could load another step than other roles, which do not know of "
                "the damage here; load the same older step in all roles: load(step=...)"
            )
        self.check_after()

    def check_after(self) -> None:
        """Raises CheckpointNotFound if the step `after` does not exist."""
        after = self._steps.after
        if after is not None and not any(step >= after for step in self._steps.counting()):
            raise CheckpointNotFound(
                f"after={after}: {self._steps.not_found(after, self._steps.committed())}"
            )

    def _remove_abandoned(self, group: Group) -> None:
        """Removes steps of the local tier that another run abandoned, before the first change."""
        if self._steps.local is None or self._has_removed_abandoned:
            return
        what = f"remove stale steps from {self._steps.local.location}"
        on_process_0(group, self._where, what, self._cleaning.remove_abandoned)
        self._has_removed_abandoned = True

    def _remove(self, steps: Collection[int], what: str, group: Group) -> None:
        on_process_0(group, self._where, what, partial(self._remove_now, steps))

    def _remove_now(self, steps: Collection[int]) -> None:
        """Removes steps from all folders, the newest first; nothing else may be in progress.

        Raises:
            SaveConflict: another job saves here, or another step has chunks in one of them.
            StorageError: a storage failed.
        """
        for folder in self._steps.all:
            folder.lease.take()
        steps_by_folder = {folder: folder.committed() for folder in self._steps.all}
        for step in sorted(steps, reverse=True):
            holders = [folder for folder, existing in steps_by_folder.items() if step in existing]
            for folder in holders:  # from all of them, or from none
                attempt_folders.check_unneeded(folder.location_of(step), paths.context())
            self._keep_later(step, steps)
            for folder in self._steps.newest_last(step, steps_by_folder):
                _log.info("removing %s", folder.path(step))
                folder.remove(step)
            self._steps.removed(step)
        self._steps.newest.clear()

    def _keep_later(self, removed: int, removed_steps: Collection[int]) -> None:
        """Records, before the newest step of the root is removed, that steps only in the local tier
        stay: they now follow the step before it.

        Arguments:
            removed: the step.
            removed_steps: steps that are removed, too.
        """
        local, root = self._steps.local, self._steps.root
        if local is None:
            return
        newest, before = root.newest(), step_before(root, removed)
        if newest is None or newest[0] != removed or before is None:
            return
        next_newest = root.version(before)
        for step in local.committed():
            versions = self._steps.versions(step)
            if step in removed_steps or versions.local is None or versions.root is not None:
                continue
            lineage = lineage_notes.read(local.location_of(step), versions.local)
            if versions.is_abandoned or lineage.follows is None or next_newest is None:
                continue
            new_lineage = replace(lineage, follows=lineage.follows | {next_newest.name})
            place = local.location_of(step), versions.local.attempt
            lineage_notes.record(*place, new_lineage, fsync=self._fsync)


def agreed(group: Group, value: int) -> int:
    """The maximum of the values of all processes, which all call this; that of one alone."""
    return group.agree(value) if group.count > 1 else value


def barrier(group: Group) -> None:
    """Waits until all processes call this."""
    agreed(group, 0)


def check_same_step(group: Group, where: Location, call: str, step: int) -> None:
    """Checks that all processes call a method with the same step.

    Raises:
        CoverageError: on all processes, if they do not.
    """
    highest = agreed(group, step)
    if agreed(group, int(step != highest)):
        other = f"another with {highest}" if step != highest else "another with an earlier one"
        me = named(members_of(group), [group.index])
        raise CoverageError(
            f"{where}: the processes call {call} with different steps: {me} with {step}, {other}. "
            "Nothing was removed"
        )


def on_process_0(group: Group, where: Location, what: str, work: Callable[[], object]) -> None:
    """Calls `work` on process 0, while the others wait for it.

    Raises:
        ProcessFailed: on the others, if `work` raises an error; names `where` and `what`.
    """
    barrier(group)
    error: Exception | None = None
    if group.index == 0:
        try:
            work()
        except Exception as raised:
            error = raised
    if agreed(group, int(error is not None)):
        first = named(members_of(group), [0])
        raise error or ProcessFailed(f"{where}: {first} could not {what}; see the error of {first}")


def check_shared(group: Group, local: StepFolder) -> None:
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
