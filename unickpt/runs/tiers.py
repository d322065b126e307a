"""Tiers: folders of steps, each with its lease. Checkpoints are committed to fast storage first,
and copied to the root from there.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from unickpt.commit.lease import Lease
from unickpt.commit.version import Version
from unickpt.errors import (
    CheckpointNotFound,
    UnickptError,
)
from unickpt.runs import lineage_notes, step_folder
from unickpt.runs.roles import Roles
from unickpt.runs.step_folder import Branch, StepFolder
from unickpt.storage import paths
from unickpt.storage.errors import Failed

_log = logging.getLogger("unickpt")


class Tier(StepFolder):
    """A folder of steps, and the lease on it.

    Arguments:
        root: a local path or a URL.
    """

    def __init__(self, root: paths.PathLike) -> None:
        super().__init__(root)
        self.lease = Lease(self.location)
        self._is_clean = False
        self.offered: set[str] = set()
        """Versions whose manifest was, or may have been, written by a copy."""

    def open(self, in_flight: Sequence[int], session: str) -> None:
        """Takes the lease, and removes the remains of crashed jobs once.

        Arguments:
            in_flight, session: see `step_folder.remove_orphans`.

        Raises:
            SaveConflict: another job holds the lease.
            StorageError: the storage failed.
        """
        self.lease.take()
        if self._is_clean or not self.lease.is_settled:
            return
        try:
            step_folder.remove_orphans(self, in_flight, session)
            self._is_clean = True
        except (UnickptError, Failed) as error:
            _log.warning(
                "%s: the remains of failed saves cannot be removed now: %s", self.location, error
            )


class Newer(Enum):
    """Which tier has the current version of a step."""

    SAME = "both have the same one"
    LOCAL = "the local tier"
    ROOT = "the root"


@dataclass(frozen=True)
class TierVersions:
    """The versions of a step in both tiers.

    Arguments:
        local, root: the committed versions, if any.
        newer: which of them is current.
    """

    local: Version | None
    root: Version | None
    newer: Newer

    @property
    def fault(self) -> str:
        """What is wrong with the local version, where that of the root, or none, counts."""
        if self.root is None:
            return "stale: another run removed the step, or went on from an earlier one,"
        is_whole = self.local is not None and self.local.attempt
        return "stale: another run replaced the step" if is_whole else "damaged; it is whole"

    @property
    def is_abandoned(self) -> bool:
        """Whether only the local tier has the step, and it does not count."""
        return self.local is not None and self.root is None and self.newer is Newer.ROOT


def compare(local: StepFolder, root: StepFolder, step: int) -> TierVersions:
    """Finds the current one of two versions of a step by what each superseded.

    The local version is current if it superseded the root's, or if the root's is damaged. Otherwise
    another job replaced the root's version, and the local one is stale. Where the root has none,
    the local one is current unless another job removed it from the root or went on from an earlier
    step there.

    Raises:
        StorageError: a storage failed.
    """
    while True:
        found = _compare(local, root, step)
        # A save may have replaced the local version while its note was read.
        if found.newer is Newer.ROOT and local.version(step) != found.local:
            continue
        # And its copy may have been committed.
        if not found.is_abandoned or root.version(step) is None:
            return found


def _compare(local: StepFolder, root: StepFolder, step: int) -> TierVersions:
    here, there = local.version(step), root.version(step)
    if here is None:
        newer = Newer.ROOT
    elif there is None:
        newer = Newer.ROOT if _is_abandoned(local, root, step, here) else Newer.LOCAL
    elif here.name == there.name:
        newer = Newer.SAME
    elif there.name in lineage_notes.read(local.at(step), here).supersedes:
        newer = Newer.LOCAL
    elif damage := root.damage(step):
        _log.warning("%s; the version in %s replaces it", damage, local.path(step))
        newer = Newer.LOCAL
    else:
        newer = Newer.ROOT
    return TierVersions(here, there, newer)


def _is_abandoned(local: StepFolder, root: StepFolder, step: int, version: Version) -> bool:
    """Whether a version that the root lacks was removed there, or another job left it behind.

    It is not abandoned if it follows the newest step of the root, or if a step that is in both
    tiers follows it. A root without any step says nothing: its storage may be lost, or not mounted.
    """
    lineage = lineage_notes.read(local.at(step), version)
    newest = root.newest()
    if newest is None:
        return False
    if lineage.copied:
        return True
    if lineage.follows is None or newest[1].name in lineage.follows:
        return False
    for later in set(root.committed()) & set(local.committed()):
        own, copy = local.version(later), root.version(later)
        if own is None or copy is None or own.name != copy.name:
            continue
        if version.name in (lineage_notes.read(local.at(later), own).follows or ()):
            return False
    return True


class Tiers:
    """The folders of a run: the root, and in front of it perhaps a local tier.

    The leases are given back when nothing uses this object any more.

    Arguments:
        root: the folder of all kept steps.
        local: where steps are committed first, if not in the root.
        roles: the folders of other roles, without which no step counts, if there are any.

    Raises:
        ValueError: both are the same folder.
    """

    def __init__(self, root: Tier, local: Tier | None, roles: Roles | None = None) -> None:
        if local is not None and local.location.spec == root.location.spec:
            raise ValueError(f"local and root are the same folder: {root.location}")
        self.root, self.local, self.roles = root, local, roles
        self.all = [root] if local is None else [local, root]
        self.first = self.all[0]
        """Where saves go."""
        for tier in self.all:
            weakref.finalize(self, Lease.give_back, tier.lease)

    def close(self) -> None:
        """Releases the folders for other jobs."""
        for tier in self.all:
            tier.lease.give_back()

    def committed(self) -> list[int]:
        """The committed steps, including those that `after` abandons; ascending.

        Raises:
            StorageError: the storage failed.
        """
        return sorted({step for tier in self.all for step in tier.steady()})

    def steps(self, branch: Branch) -> list[int]:
        """The committed steps that count and that a job sees, ascending.

        Raises:
            StorageError: the storage failed.
        """
        found = {tier: set(branch.steps(tier, steady=True)) for tier in self.all}
        if self.local is not None:
            for step in found[self.local] - found[self.root]:
                if compare(self.local, self.root, step).is_abandoned:
                    found[self.local].remove(step)
        return self._complete(set().union(*found.values()))

    def _complete(self, steps: Iterable[int]) -> list[int]:
        """Which of these steps all roles have, ascending."""
        return sorted(steps) if self.roles is None else self.roles.complete(steps)

    def path(self, step: int) -> str:
        """The path of a step, saved or not; in the local tier only if the root lacks this version.

        Raises:
            StorageError: the storage failed.
        """
        if self.local is None:
            return self.root.path(step)
        is_local = compare(self.local, self.root, step).newer is Newer.LOCAL
        return (self.local if is_local else self.root).path(step)

    def holders(self, step: int, branch: Branch) -> list[Tier]:
        """The tiers that have the current version of a step that a job sees, the fastest first."""
        if not self._complete([step]):
            return []
        found = [self.root]
        if self.local is not None:
            versions = compare(self.local, self.root, step)
            if versions.newer is Newer.SAME:
                found = [self.local, self.root]
            elif versions.newer is Newer.LOCAL:
                found = [self.local]
            elif versions.local is not None:
                _log.warning(
                    "%s is %s in %s",
                    *(self.local.path(step), versions.fault, self.root.location),
                )
        return [tier for tier in found if branch.has(tier, step)]

    def newest_last(self, step: int, holders: Sequence[Tier]) -> list[Tier]:
        """The tiers that have a step, that with its current version last: a job that is killed
        while it removes the step from one after the other leaves that version, or none.

        Raises:
            StorageError: a storage failed.
        """
        if self.local is None or len(holders) < 2:
            return list(holders)
        is_local = compare(self.local, self.root, step).newer is Newer.LOCAL
        return [self.root, self.local] if is_local else [self.local, self.root]

    def keep_later(self, removed: int, others: Collection[int], *, fsync: bool) -> None:
        """Records, before the newest step of the root is removed, that the steps that only the
        local tier has stay: they now follow the step before it.

        Arguments:
            removed: the step.
            others: steps that are removed, too.
            fsync: whether the record must survive a power failure.

        Raises:
            StorageError: a storage failed.
        """
        newest, before = self.root.newest(), self.root.before(removed)
        if self.local is None or newest is None or newest[0] != removed or before is None:
            return
        next_newest = self.root.version(before)
        for step in self.local.committed():
            versions = compare(self.local, self.root, step)
            local = versions.local
            if step in others or local is None or versions.root is not None:
                continue
            lineage = lineage_notes.read(self.local.at(step), local)
            if versions.is_abandoned or lineage.follows is None or next_newest is None:
                continue
            kept = replace(lineage, follows=lineage.follows | {next_newest.name})
            lineage_notes.record(self.local.at(step), local.attempt, kept, fsync=fsync)

    def not_found(self, step: int, steps: Sequence[int]) -> CheckpointNotFound:
        """The error that a step is not among those that are committed."""
        have = ", ".join(map(str, steps[-10:])) or "none"
        where = f"is not in {self.root.location}; the committed steps are"
        if self.roles is not None:
            where = f"is not in {self.roles}, or its parts were not saved together; these have all"
        return CheckpointNotFound(f"step {step} {where}: {have}")
