"""The steps of a run: which exist, which of them count, which are in use, and which may go.

Checkpoints are in the root; with a local tier, they are committed there first and copied.
"""

from __future__ import annotations

import logging
import operator
import threading
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum

from unickpt.commit.lease import Lease
from unickpt.commit.version import Version
from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    LaterStepsExist,
    StorageError,
    UnsupportedFormat,
)
from unickpt.quoting import first_few, quoted
from unickpt.runs import lineage_notes
from unickpt.runs.retention import Metrics, Retention
from unickpt.runs.roles import Roles
from unickpt.runs.step_folder import StepFolder, check_no_link

_log = logging.getLogger("unickpt")
_STEPS_END = 10**18  # the folders of later steps are not recognised


def step_number(step: object, what: str = "step ") -> int:
    """A step as an int, from any integer type, including NumPy's.

    Raises:
        ValueError: a Checkpointer would not recognise its folder.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{what}{quoted(step)} must be an integer, at least 0")
    if number >= _STEPS_END:
        raise ValueError(f"{what}{step!r} must be less than 10**18")
    return number


class Newer(Enum):
    """The tier that has the current version of a step."""

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
        """The damage of the local version, if that of the root, or none, counts."""
        if self.root is None:
            return "stale: another run removed the step, or went on from an earlier one,"
        is_whole = self.local is not None and self.local.attempt
        return "stale: another run replaced the step" if is_whole else "damaged; it is whole"

    @property
    def is_abandoned(self) -> bool:
        """Whether only the local tier has the step, and it does not count."""
        return self.local is not None and self.root is None and self.newer is Newer.ROOT


class StepsInUse:
    """Steps in use: a step that is being saved or copied is not removed, and vice versa."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._saves: dict[object, int] = {}  # the step of each save
        self._copied = Counter[int]()  # or waiting to be copied, or needed for that
        self._removed: set[int] = set()

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
    def copying(self, steps: Collection[int]) -> Iterator[None]:
        """Prevents removal of steps, after waiting until none of them is being removed."""
        with self._changed:
            # Not skipped instead: a step also counts as being removed during the decision on it.
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


class Steps:
    """The steps of a run, in the root and perhaps in a local tier in front of it.

    The leases are released when this object is no longer in use.

    Arguments:
        root: the folder of all kept steps.
        retention: which these are.
        local: where steps are committed first, if not in the root.
        roles: the folders of other roles, without which no step counts, if there are any.
        after: the step after which the job continues; of later steps it sees only its own. None for
            the newest.

    Raises:
        ValueError: both are the same folder.
    """

    def __init__(
        self,
        root: StepFolder,
        retention: Retention,
        local: StepFolder | None = None,
        roles: Roles | None = None,
        after: int | None = None,
    ) -> None:
        if local is not None and local.location.spec == root.location.spec:
            raise ValueError(f"local and root are the same folder: {root.location}")
        self.root, self.local, self.roles, self.after = root, local, roles, after
        self.all = [root] if local is None else [local, root]
        self.first = self.all[0]
        """The folder of new saves."""
        for folder in self.all:
            weakref.finalize(self, Lease.give_back, folder.lease)
        self.in_use = StepsInUse()
        self.recorded = after
        """The `after` in the metadata of its steps: `after`, or that of the loaded step."""
        self.loaded: int | None = None
        """The step that was loaded last."""
        self.recent: int | None = None
        """The step that this process saved or loaded last."""
        self.failed: dict[int, BaseException] = {}
        """Steps whose last save, or copy, failed."""
        self.newest: dict[StepFolder, int] = {}
        """The newest step in each folder, as far as this process knows."""
        self._own: set[tuple[StepFolder, int]] = set()  # later ones than `after`, as known so far
        self._retention, self._is_rated = retention, False
        self.known_metrics: dict[int, Metrics] = {}
        """Of steps, as far as rules needed them; until another job may have replaced these."""
        self._saved: int | None = None  # the step that was saved last
        self.own_attempts: set[str] = set()
        """Attempts of this process that were committed in the local tier."""
        self.attempts_in_progress: set[str] = set()
        """Attempts of this process that have begun and not ended."""
        self.copied_versions: set[str] = set()
        """Versions of the local tier that are complete in the root."""

    def close(self) -> None:
        """Releases the folders for other jobs, which may save later steps."""
        self.newest.clear()
        for folder in self.all:
            folder.lease.give_back()

    # --- which exist, and which count ----------------------------------------------------------

    def committed(self) -> list[int]:
        """The committed steps, including those that `after` abandons; ascending.

        Raises:
            StorageError: the storage failed.
        """
        return sorted({step for folder in self.all for step in folder.steady()})

    def seen(self, folder: StepFolder, *, steady: bool = False) -> list[int]:
        """The committed steps in a folder that this job sees, ascending.

        Arguments:
            folder: the folder.
            steady: see `StepFolder.steady`; for a job that does not hold the lease.

        Raises:
            StorageError: the storage failed.
        """
        steps = folder.steady() if steady else folder.committed()
        return steps if self.after is None else [s for s in steps if self.sees(folder, s)]

    def sees(self, folder: StepFolder, step: int) -> bool:
        """Whether this job sees a step, if it exists."""
        if self.after is None or step <= self.after or (folder, step) in self._own:
            return True
        try:
            is_own = folder.after(step) == self.after
        except CheckpointNotFound:
            return False  # another job has removed it
        except (CheckpointCorrupt, UnsupportedFormat) as error:
            # Keep it: an error on loading is better than silently removing the job's own step.
            _log.warning(
                "%s: cannot determine which job saved this step: %s", folder.path(step), error
            )
            return True
        if is_own:
            self._own.add((folder, step))
        return is_own

    def counting(self) -> list[int]:
        """The committed steps that count and that the job sees, ascending.

        Raises:
            StorageError: the storage failed.
        """
        steps_by_folder = {folder: set(self.seen(folder, steady=True)) for folder in self.all}
        if self.local is not None:
            for step in steps_by_folder[self.local] - steps_by_folder[self.root]:
                if self.versions(step).is_abandoned:
                    steps_by_folder[self.local].remove(step)
        steps = set[int]().union(*steps_by_folder.values())
        return sorted(steps) if self.roles is None else self.roles.complete(steps)

    def path(self, step: int) -> str:
        """The path of a step, saved or not; in the local tier only if the root lacks this version.

        Raises:
            StorageError: the storage failed.
        """
        return self.current_folder(step).path(step)

    def current_folder(self, step: int) -> StepFolder:
        """The folder that has the current version of a step; the root if both have it, or none.

        Raises:
            StorageError: a storage failed.
        """
        is_local = self.local is not None and self.versions(step).newer is Newer.LOCAL
        return self.first if is_local else self.root

    def holders(self, step: int) -> list[StepFolder]:
        """The folders that have the current version of a step that the job sees, the fastest
        first."""
        if self.roles is not None and not self.roles.complete([step]):
            return []
        folders = [self.root]
        if self.local is not None:
            versions = self.versions(step)
            if versions.newer is Newer.SAME:
                folders = [self.local, self.root]
            elif versions.newer is Newer.LOCAL:
                folders = [self.local]
            elif versions.local is not None:
                where, fault = self.local.path(step), versions.fault
                _log.warning("%s is %s in %s", where, fault, self.root.location)
        return [folder for folder in folders if self.sees(folder, step)]

    def versions(self, step: int) -> TierVersions:
        """The versions of a step in both tiers, and which of them is current: by what each
        superseded.

        The local version is current if it superseded the root's, or if the root's is damaged. Else
        another job replaced the root's version, and the local one is stale. If the root has none,
        the local one is current unless another job removed it from the root or continued from an
        earlier step there.

        Raises:
            StorageError: a storage failed.
        """
        assert self.local is not None
        while True:
            versions = _compare(self.local, self.root, step)
            # A save may have replaced the local version while its note was read.
            if versions.newer is Newer.ROOT and self.local.version(step) != versions.local:
                continue
            # And its copy may have been committed.
            if not versions.is_abandoned or self.root.version(step) is None:
                return versions

    def not_found(self, step: int, steps: Sequence[int]) -> CheckpointNotFound:
        """The error that a step is not committed."""
        have = ", ".join(map(str, steps[-10:])) or "none"
        where = f"is not in {self.root.location}; the committed steps are"
        if self.roles is not None:
            where = f"is not in {self.roles}, or its parts were not saved together; these have all"
        return CheckpointNotFound(f"step {step} {where}: {have}")

    # --- which may be saved --------------------------------------------------------------------

    def check_begin(self, step: int) -> None:
        """Checks within a call that saves a step whether it may; makes no request over a network.

        Raises:
            CheckpointExists: the step is a link.
            LaterStepsExist: says how to continue.
        """
        if later := [s for s in self.in_use.saved() if s > step]:
            raise _later_exist(self, step, later)
        for folder in self.all:
            check_no_link(folder, step)
            if folder.location.is_remote:
                continue
            try:
                self.check_newest(step, folder)
            except StorageError:
                if folder is self.first:  # if the root is unreachable, copying reports it
                    raise

    def check_newest(self, step: int, folder: StepFolder) -> None:
        """Checks that a folder has no later steps.

        Raises:
            LaterStepsExist: says how to continue.
        """
        if self.newest.get(folder, step + 1) > step:
            steps = self.seen(folder)
            self.newest[folder] = steps[-1] if steps else -1
            if later := [s for s in steps if s > step]:
                raise _later_exist(self, step, later)

    def check_rated(self, metrics: Metrics) -> None:
        """Refuses the first save of a run without the metric by which the best steps are kept:
        without it in any, none would be.

        Raises:
            ValueError: says how to give it.
        """
        if not self._is_rated and not self._retention.rates(metrics):
            is_first = True
            with suppress(StorageError):  # the save will find out
                is_first = not any(folder.committed() for folder in self.all)
            if is_first:
                raise ValueError(self._retention.how_to_rate(metrics))
        self._is_rated = True

    # --- which may go --------------------------------------------------------------------------

    def expendable(self, steps: Collection[int]) -> list[int]:
        """Those of some committed steps, all of the root or of both tiers, that no rule keeps."""
        metrics = self.metrics(steps)
        # The step just saved stays, even if a step of another run has a higher number.
        protected = () if self._saved is None else (self._saved,)
        if self.roles is not None:
            return self.roles.expendable(self._retention, metrics, protected)
        return self._retention.expendable(metrics, protected)

    def metrics(self, steps: Collection[int]) -> dict[int, Metrics]:
        """The metrics of committed steps, as far as rules need them."""
        for step in set(steps) - self.known_metrics.keys() if self._retention.keep_best else ():
            folder = self.root
            if self.local is not None:  # from the current version, or the only one
                versions = self.versions(step)
                is_local = versions.newer is Newer.LOCAL or versions.root is None
                folder = self.first if is_local else self.root
            self.known_metrics[step] = folder.metrics(step)
        return {step: self.known_metrics.get(step, {}) for step in steps}

    def newest_last(
        self, step: int, steps_by_folder: Mapping[StepFolder, Collection[int]]
    ) -> list[StepFolder]:
        """The folders that have a step, the one with its current version last: a job that is killed
        while it removes the step from each leaves that version, or none.

        Arguments:
            step: its number.
            steps_by_folder: all that each folder has.

        Raises:
            StorageError: a storage failed.
        """
        holders = [folder for folder, steps in steps_by_folder.items() if step in steps]
        is_in_order = len(holders) < 2 or self.current_folder(step) is self.root
        return holders if is_in_order else holders[::-1]

    # --- what happened to them -----------------------------------------------------------------

    def resume_from(self, step: int, *, is_coordinator: bool) -> None:
        """Records that a step was loaded. Without `after`, later saves belong to its branch."""
        self.loaded = self.recent = step
        if not is_coordinator or self.after is not None:
            return
        for folder in self.holders(step)[:1]:
            try:
                self.recorded = folder.after(step)
            except (CheckpointNotFound, CheckpointCorrupt, UnsupportedFormat):
                self.recorded = None

    def committed_now(self, step: int, metrics: Metrics) -> None:
        """Records that a step was saved, with its metrics; only process 0 has some."""
        self.recent = self._saved = step
        self.known_metrics.pop(step, None)
        if metrics:
            self.known_metrics[step] = metrics
        self.failed.pop(step, None)
        if self.first in self.newest:
            self.newest[self.first] = max(step, self.newest[self.first])

    def removed(self, step: int) -> None:
        """Records that a step was removed from all folders."""
        self.failed.pop(step, None)
        self.known_metrics.pop(step, None)
        self._own = {(folder, own_step) for folder, own_step in self._own if own_step != step}


def _later_exist(steps: Steps, step: int, later: Sequence[int]) -> LaterStepsExist:
    """Why a step is not saved below later ones: a restart would not load it."""
    below = {s for folder in steps.all for s in steps.seen(folder) if s < step}
    base = steps.loaded if steps.loaded in below else max(below, default=None)
    ways = "remove them with delete(step), or save into another folder"
    if base is not None and steps.roles is not None:
        ways = f"to resume from step {base}, call drop_later_steps({base}) in each role first"
    elif base is not None:
        ways = (
            f"to resume from step {base}, use Checkpointer(..., after={base}), or call "
            f"drop_later_steps({base}) first; both remove the later steps"
        )
    return LaterStepsExist(
        f"{steps.root.location}: step {step} is below existing "
        f"{'step' if len(later) == 1 else 'steps'} {first_few(later)}. A restart would resume "
        f"from step {max(later)}, not from this one; {ways}"
    )


def _compare(local: StepFolder, root: StepFolder, step: int) -> TierVersions:
    local_version, root_version = local.version(step), root.version(step)
    if local_version is None:
        newer = Newer.ROOT
    elif root_version is None:
        newer = Newer.ROOT if _is_abandoned(local, root, step, local_version) else Newer.LOCAL
    elif local_version.name == root_version.name:
        newer = Newer.SAME
    elif root_version.name in lineage_notes.read(local.location_of(step), local_version).supersedes:
        newer = Newer.LOCAL
    elif damage := root.damage(step):
        _log.warning("%s; the version in %s replaces it", damage, local.path(step))
        newer = Newer.LOCAL
    else:
        newer = Newer.ROOT
    return TierVersions(local_version, root_version, newer)


def _is_abandoned(local: StepFolder, root: StepFolder, step: int, version: Version) -> bool:
    """Whether a version that the root lacks was removed there, or another job left it behind.

    It is not abandoned if it follows the newest step of the root, or if a step that is in both
    tiers follows it. A root without steps proves nothing: its storage may be lost, or not mounted.
    """
    lineage = lineage_notes.read(local.location_of(step), version)
    newest = root.newest()
    if newest is None:
        return False
    if lineage.copied:
        return True
    if lineage.follows is None or newest[1].name in lineage.follows:
        return False
    for later in set(root.committed()) & set(local.committed()):
        local_version, copy = local.version(later), root.version(later)
        if local_version is None or copy is None or local_version.name != copy.name:
            continue
        following = lineage_notes.read(local.location_of(later), local_version)
        if version.name in (following.follows or ()):
            return False
    return True
