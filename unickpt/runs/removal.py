"""Removes the steps that a program asks to remove: deleted, dropped, or abandoned by `after`; what
the processes of a job do together for that.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from functools import partial

from unickpt.errors import (
    CheckpointNotFound,
    CoverageError,
    InvalidPath,
    ProcessFailed,
    SaveConflict,
)
from unickpt.frameworks.process_group import Group
from unickpt.runs.housekeeping import Housekeeping
from unickpt.runs.step_folder import PROBE, Branch
from unickpt.runs.tiers import Tier, Tiers
from unickpt.storage import paths
from unickpt.storage.locations import Location


class Removal:
    """Removes steps: all processes of a job call it, process 0 removes, and the others wait.

    What rules such as `keep_last` no longer keep is removed by `cleaning`.

    Arguments:
        tiers: of the run.
        branch: the steps that count.
        housekeeping: knows what is being saved, has the lease, and removes.
    """

    def __init__(self, tiers: Tiers, branch: Branch, housekeeping: Housekeeping) -> None:
        self._tiers, self._branch, self._housekeeping = tiers, branch, housekeeping
        self._has_removed_steps_after = self._has_removed_abandoned = False

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

    def before_save(self, group: Group) -> None:
        """Removes, before the first save, what no step of this run may come after."""
        self._remove_abandoned(group)
        self._remove_steps_after(group)

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
        raise CoverageError(
            f"{where}: the processes call {call} with different steps: process "
            f"{group.index} with {step}, {other}. Nothing was removed"
        )


def on_process_0(group: Group, where: Location, what: str, work: Callable[[], object]) -> None:
    """Calls `work` on process 0, while the others wait for it."""
    barrier(group)
    error: Exception | None = None
    if group.index == 0:
        try:
            work()
        except Exception as raised:
            error = raised
    failed = group.agree(int(error is not None)) if group.count > 1 else error is not None
    if failed:
        raise error or ProcessFailed(
            f"{where}: process 0 could not {what}; see the error of process 0"
        )


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
