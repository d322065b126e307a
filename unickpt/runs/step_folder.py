"""Steps: the checkpoints `step_<n>` in one folder, and which of them a job sees."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping

import tensorstore as ts

from unickpt.commit import borrowers, version
from unickpt.commit.version import Version
from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    CheckpointReplaced,
    StorageError,
    UnickptError,
    UnsupportedFormat,
)
from unickpt.format import borrowed
from unickpt.format.index import RESERVED
from unickpt.reading import checkpoint
from unickpt.reading.listing import checkpoints_below
from unickpt.runs import attempt_folders, orphans
from unickpt.storage import errors, paths
from unickpt.storage.errors import Failed
from unickpt.storage.locations import Location, folders_below
from unickpt.storage.ocdbt import RETIRED

_log = logging.getLogger("unickpt")
_LISTINGS = 50
PROBE = ".unickpt-"
"""Prefix of files by which the processes of a job find out that they see the same folder."""
_NAME = re.compile(r"step_(0|[1-9][0-9]{0,17})")


class StepFolder:
    """The steps in a folder of any storage.

    Arguments:
        root: a local path or a URL.
    """

    def __init__(self, root: paths.PathLike) -> None:
        self.location = paths.resolve(root)

    def path(self, step: int) -> str:
        """The path of a step, saved or not."""
        return str(self.at(step))

    def at(self, step: int) -> Location:
        return self.location.child(f"step_{step}")

    def committed(self) -> list[int]:
        """All steps that exist, ascending.

        Raises:
            StorageError: the storage failed.
        """
        try:
            names = [listed.name for listed in checkpoints_below(self.location)]
        except CheckpointNotFound:
            return []
        return sorted(_numbers(names))

    def steady(self) -> list[int]:
        """As `committed`, while another job may commit and remove steps.

        During one listing, a step can be removed and the next one committed, so that the listing
        has neither. The listing is therefore repeated until nothing changes.
        """
        before: tuple[list[int], set[str]] | None = None
        for _ in range(_LISTINGS):
            now = self.committed(), set[str]()
            if not self.location.is_remote:  # includes folders without a manifest
                now = now[0], set(self.location.folders(paths.context()))
            if now == before:
                break
            before = now
        return now[0]

    def after(self, step: int) -> int | None:
        """The step after which the job that saved a step continued; None if after the newest.

        Raises:
            CheckpointNotFound, CheckpointCorrupt, UnsupportedFormat: it cannot be opened.
            StorageError: the storage failed.
        """
        own = checkpoint.open(self.path(step)).metadata.get(RESERVED)
        found = own.get("after") if isinstance(own, dict) else None
        return found if type(found) is int else None

    def version(self, step: int) -> Version | None:
        """The committed version of a step, if any. Costs one small read.

        Raises:
            StorageError: the storage failed.
        """
        try:
            return version.version_at(self.at(step))
        except Failed as error:
            raise errors.writing_failed(error, self.path(step)) from error

    def damage(self, step: int) -> str:
        """How a committed step is damaged; empty if it is not.

        Raises:
            StorageError: the storage failed.
        """
        try:
            checkpoint.open(self.path(step))
        except (CheckpointReplaced, UnsupportedFormat):  # a newer unickpt can open the latter
            return ""
        except CheckpointCorrupt as error:
            return str(error)
        except CheckpointNotFound as error:
            return "" if self.version(step) is None else str(error)
        return ""

    def before(self, step: int) -> int | None:
        """The newest committed step below another one.

        Raises:
            StorageError: the storage failed.
        """
        return max((each for each in self.committed() if each < step), default=None)

    def newest(self) -> tuple[int, Version] | None:
        """The newest step and its version, if there is any step.

        Raises:
            StorageError: the storage failed.
        """
        while True:
            committed = self.committed()
            if not committed:
                return None
            version = self.version(committed[-1])
            if version is not None:  # otherwise it was removed meanwhile
                return committed[-1], version

    def metrics(self, step: int) -> Mapping[str, float]:
        """The metrics that a step was saved with; empty if it has none, or is damaged.

        Raises:
            StorageError: the storage failed; the step may be one of the best.
        """
        try:
            found = checkpoint.open(self.path(step)).metadata[RESERVED]["metrics"]
            return {str(name): float(value) for name, value in found.items()}
        except StorageError:
            raise
        except (UnickptError, KeyError, TypeError, ValueError, AttributeError) as error:
            _log.warning("%s: its metrics cannot be read: %s", self.path(step), error)
            return {}

    def remove(self, step: int) -> None:
        """Removes a step: first its manifest, atomically, then its files.

        Does not touch other attempts to save this step, which may be in progress. Does not follow
        symbolic links: only removes the link itself.

        Raises:
            UnsupportedFormat: it needs what this unickpt does not know; nothing was removed.
            Needed: other steps borrow from it; nothing was removed.
            Unremoved: files are left; `remove_orphans` recognises them, too.
            StorageError: it could not be removed.
        """
        attempt_folders.remove_checkpoint(self.at(step), paths.context())

    def borrowers(self, step: int) -> list[str]:
        """The names of the steps that have chunks in this one, and so need it.

        Raises:
            StorageError: the storage failed.
        """
        with errors.writing(self.path(step)):
            return borrowers.of(self.at(step), paths.context())

    def retire(self, step: int) -> str | None:
        """Makes a step one that only those see that have chunks in it.

        Returns:
            The digest of its manifest; None if it is gone.

        Raises:
            StorageError: the storage failed.
        """
        with errors.writing(self.path(step)):
            return borrowed.retire(self.at(step), paths.context())

    def retired(self) -> set[tuple[int, str]]:
        """All steps that were retired, each with the digest of its manifest; lists all files.

        Raises:
            StorageError: the storage failed.
        """
        found = folders_below(self.location, RETIRED, paths.context())
        return {
            (step, digest)
            for folder, digests in found.items()
            for step in _numbers([folder] if digests else [])
            for digest in digests
        }

    def remove_retired(self, step: int, digest: str) -> bool:
        """Removes what is left of a retired step, unless a step needs it; says whether it is gone.

        Raises:
            UnsupportedFormat: it needs what this unickpt does not know; nothing was removed.
            StorageError: the storage failed.
        """
        with errors.writing(self.path(step)):
            if borrowers.need_retired(self.at(step), digest, paths.context()):
                return False
            _log.info("removing what was left of %s", self.path(step))
            attempt_folders.remove_retired(self.at(step), digest, paths.context())
            return True

    def check_no_checkpoint(self) -> None:
        """Refuses to save steps into a folder that is a checkpoint itself.

        Raises:
            CheckpointExists: names it.
            StorageError: the storage failed.
        """
        try:
            is_one = version.version_at(self.location) is not None
        except Failed as error:
            raise errors.writing_failed(error, str(self.location)) from error
        if is_one:
            raise CheckpointExists(
                f"{self.location} is a checkpoint, not a folder of steps; pass the folder above it "
                "to Checkpointer, or load it by unickpt.load"
            )

    def check_no_link(self, step: int) -> None:
        """Refuses to save a step through a symbolic link.

        Raises:
            CheckpointExists: the step is a link; names its target.
        """
        target = self.at(step).link
        if target is not None:
            raise CheckpointExists(
                f"{self.path(step)} is a symbolic link to {target}; a run saves only into its own "
                "folders: remove the link, or save another step"
            )


def remove_orphans(folder: StepFolder, in_flight: Iterable[int], session: str) -> None:
    """Removes the remains of crashed saves and deletions.

    Only for the job that holds the lease. A step's folder without a manifest is an orphan if it
    contains only what a save puts there; in a committed step, so is every attempt except the
    committed one.

    Arguments:
        folder: the folder of the steps.
        in_flight: steps that this process is saving.
        session: prefix of the names of this job's attempts. Another process of the job may
            already save a step that is not in flight here.
    """
    context = paths.context()
    committed, protected = set(folder.committed()), set(in_flight)
    for step, attempts in sorted(_attempts_by_step(folder, context).items()):
        if step in protected:
            continue
        if step in committed:
            if len(attempts) > 1:  # a single one must be the committed one
                remove_older(folder.at(step), session)
            for lock in orphans.locks_of_marks(folder.at(step), attempts, context):
                if not lock.is_recent:
                    folder.at(step).remove_file(lock.name, context)
            continue
        location = folder.at(step)
        ours = attempt_folders.is_unfinished(location, context)
        if ours and not any(_is_of(name, session) for name in attempts):
            _log.info("removing %s, the remains of a crashed save", location)
            attempt_folders.remove_attempts(location, attempts, context)
    for name in folder.location.files(context):
        if name.startswith(PROBE):  # of a job that was killed while it looked for it
            folder.location.remove_file(name, context)


def _attempts_by_step(folder: StepFolder, context: ts.Context) -> dict[int, set[str]]:
    """The names of all attempts in all folders of steps, also of steps without any."""
    found = folders_below(folder.location, "processes", context)
    return {step: names for name, names in found.items() for step in _numbers([name])}


def remove_older(step: Location, session: str = "") -> None:
    """Removes all attempts to save a step except the committed one and those of `session`; see
    `remove_orphans`. Does nothing if the step is a symbolic link."""
    if step.link is not None:
        return
    context, folder = paths.context(), step.child("processes")
    kept = attempt_folders.attempts_in_use(step, context)
    for attempt in folder.folders(context):
        if attempt not in kept and not _is_of(attempt, session):
            folder.child(attempt).remove(context)


def _is_of(attempt: str, session: str) -> bool:
    return bool(session) and attempt.rpartition("-")[0] == session


def _numbers(names: Iterable[str]) -> set[int]:
    matches = (_NAME.fullmatch(name) for name in names)
    return {int(match[1]) for match in matches if match}


_log = logging.getLogger("unickpt")


class Branch:
    """The steps that a job sees: all, or those up to `after` and its own later ones.

    Arguments:
        after: the step after which the job continues; None for the newest.
    """

    def __init__(self, after: int | None) -> None:
        self.after = after
        self.recorded = after
        """The `after` in the metadata of its steps: `after`, or that of the loaded step."""
        self._own: set[tuple[StepFolder, int]] = set()

    def steps(self, tier: StepFolder, *, steady: bool = False) -> list[int]:
        """The committed steps in a folder that this job sees, ascending.

        Arguments:
            tier: the folder.
            steady: see `StepFolder.steady`; for a job that does not hold the lease.

        Raises:
            StorageError: the storage failed.
        """
        found = tier.steady() if steady else tier.committed()
        return [step for step in found if self.has(tier, step)]

    def abandoned(self, tier: StepFolder) -> list[int]:
        """The committed steps that the job does not see, ascending. Raises as `steps`."""
        return [step for step in tier.committed() if not self.has(tier, step)]

    def has(self, tier: StepFolder, step: int) -> bool:
        """Whether this job sees a step, if it exists."""
        if self.after is None or step <= self.after or (tier, step) in self._own:
            return True
        try:
            own = tier.after(step) == self.after
        except CheckpointNotFound:
            return False  # another job has removed it
        except (CheckpointCorrupt, UnsupportedFormat) as error:
            # Keep it: an error on loading is better than silently removing the job's own step.
            _log.warning("%s: cannot tell which job saved this step: %s", tier.path(step), error)
            return True
        if own:
            self._own.add((tier, step))
        return own

    def continue_from(self, tier: StepFolder, step: int) -> None:
        """Records that a step was loaded. Without `after`, later saves belong to its branch."""
        if self.after is None:
            try:
                self.recorded = tier.after(step)
            except (CheckpointNotFound, CheckpointCorrupt, UnsupportedFormat):
                self.recorded = None

    def forget(self, step: int) -> None:
        """Records that a step was removed."""
        self._own = {(tier, own) for tier, own in self._own if own != step}
