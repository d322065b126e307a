"""Steps: the checkpoints `step_<n>` in one folder, which of them a job sees, and what each version
of one replaced and followed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

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
from unickpt.format.refusals import refuse_unknown
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


_NOTE, _COPIED = "lineage", "copied"


@dataclass(frozen=True)
class Lineage:
    """What a version of a step in the local tier replaced and followed, by the names of versions.

    Arguments:
        supersedes: the earlier versions of the same step, oldest first.
        follows: when it was saved, the newest version in the root, and those of later steps in the
            local tier; None if that was not recorded.
        copied: whether its copy to the root was committed.
    """

    supersedes: tuple[str, ...] = ()
    follows: frozenset[str] | None = None
    copied: bool = False


def record(location: Location, attempt: str, lineage: Lineage, *, fsync: bool) -> None:
    """Records the lineage of an attempt, which counts if it is committed.

    Arguments:
        location: of the step.
        attempt: its name.
        lineage: what it supersedes and follows.
        fsync: whether the record must survive a power failure.

    Raises:
        Failed: the storage failed.
    """
    data = {"supersedes": lineage.supersedes, "follows": sorted(lineage.follows or ())}
    _write(location, attempt, _NOTE, json.dumps(data).encode(), fsync)


def record_copied(location: Location, attempt: str, *, fsync: bool) -> None:
    """Records that the copy of an attempt to the root is committed. Raises as `record`."""
    _write(location, attempt, _COPIED, b"", fsync)


def recorded(location: Location, attempt: str) -> Lineage:
    """The lineage of an attempt, as far as it was recorded.

    Raises:
        Failed: the storage failed.
    """
    notes = _notes(location, attempt).store(paths.context())
    copied = notes.read(_COPIED).result().state == "value"
    read = notes.read(_NOTE).result()
    try:
        found = json.loads(read.value) if read.state == "value" else {}
        return Lineage(tuple(map(str, found["supersedes"])), frozenset(found["follows"]), copied)
    except (ValueError, KeyError, TypeError, RecursionError):
        return Lineage(copied=copied)  # missing, or damaged and treated as missing


def _write(location: Location, attempt: str, name: str, data: bytes, fsync: bool) -> None:
    notes = _notes(location, attempt)
    notes.store(paths.context(fsync=fsync)).write(name, data).result()
    if fsync:
        notes.sync(location)


def _notes(location: Location, attempt: str) -> Location:
    return location.child(f"processes/{attempt}/notes")


class StepFolder:
    """The steps in a folder of any storage.

    Arguments:
        root: a local path or a URL.
    """

    def __init__(self, root: paths.PathLike) -> None:
        self.location = paths.resolve(root)

    @property
    def _context(self) -> ts.Context:
        """A new one, with the storage's present credentials: a run may outlive them."""
        return paths.context()

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
                now = now[0], set(self.location.folders(self._context))
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
        with self._asking(step):
            return version.version_at(self.at(step))

    def lineage(self, step: int, version: Version) -> Lineage:
        """What a version of a step superseded and followed.

        Where its manifest is damaged, so that nothing tells which attempt made it, it superseded
        what any attempt that is there did: better damage that is told than an older version in its
        place.

        Raises:
            StorageError: the storage failed.
        """
        with self._asking(step):
            location = self.at(step)
            if version.attempt:
                return recorded(location, version.attempt)
            attempts = sorted(location.child("processes").folders(self._context))
            found = [recorded(location, attempt) for attempt in attempts]
            return Lineage(tuple(dict.fromkeys(name for one in found for name in one.supersedes)))

    def record_lineage(self, step: int, attempt: str, found: Lineage, *, fsync: bool) -> None:
        """Records the lineage of an attempt; see `record`.

        Raises:
            StorageError: the storage failed.
        """
        with self._asking(step):
            record(self.at(step), attempt, found, fsync=fsync)

    def record_copied(self, step: int, version: Version, *, fsync: bool) -> None:
        """Records that the copy of a version is committed, unless it was replaced meanwhile.

        Raises:
            StorageError: the storage failed.
        """
        with self._asking(step):
            record_copied(self.at(step), version.attempt, fsync=fsync)
            if self.version(step) != version:  # its folder may have been removed before that
                self.at(step).child(f"processes/{version.attempt}").remove(self._context)
                attempt_folders.remove_empty(self.at(step))

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
            Unremoved: files are left, for `remove_rest`; `remove_orphans` recognises them, too.
            StorageError: it could not be removed.
        """
        attempt_folders.remove_checkpoint(self.at(step), self._context)

    def check_known(self, step: int) -> None:
        """Checks that a step needs nothing that this unickpt does not know.

        Raises:
            UnsupportedFormat: names what.
            StorageError: the storage failed.
        """
        refuse_unknown(self.at(step), self._context)

    def check_unneeded(self, step: int) -> None:
        """Checks that a step may be removed, and that no other step here borrows from it.

        Raises:
            UnsupportedFormat: it needs what this unickpt does not know.
            Needed: names those that do.
            StorageError: the storage failed.
        """
        attempt_folders.check_unneeded(self.at(step), self._context)

    def remove_rest(self, step: int, attempts: Sequence[str]) -> None:
        """Removes what `remove` could not.

        Raises:
            Unremoved: something is still left.
        """
        attempt_folders.remove_attempts(self.at(step), attempts, self._context)
        attempt_folders.check_removed(self.at(step), attempts, self._context)

    def borrowers(self, step: int) -> list[str]:
        """The names of the steps that have chunks in this one, and so need it.

        Raises:
            StorageError: the storage failed.
        """
        with self._asking(step):
            return borrowers.of(self.at(step), self._context)

    def retire(self, step: int) -> str | None:
        """Makes a step one that only those see that have chunks in it.

        Returns:
            The digest of its manifest; None if it is gone.

        Raises:
            StorageError: the storage failed.
        """
        with self._asking(step):
            return borrowed.retire(self.at(step), self._context)

    def retired(self) -> set[tuple[int, str]]:
        """All steps that were retired, each with the digest of its manifest; lists all files.

        Raises:
            StorageError: the storage failed.
        """
        found = folders_below(self.location, RETIRED, self._context)
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
        with self._asking(step):
            if borrowers.need_retired(self.at(step), digest, self._context):
                return False
            _log.info("removing what was left of %s", self.path(step))
            attempt_folders.remove_retired(self.at(step), digest, self._context)
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

    def remove_orphans(self, in_flight: Iterable[int], session: str) -> None:
        """Removes the remains of crashed saves and deletions.

        Only for the job that holds the lease. A step's folder without a manifest is an orphan if it
        contains only what a save puts there; in a committed step, so is every attempt except the
        committed one.

        Arguments:
            in_flight: steps that this process is saving.
            session: prefix of the names of this job's attempts. Another process of the job may
                already save a step that is not in flight here.
        """
        committed, protected = set(self.committed()), set(in_flight)
        for step, attempts in sorted(self._attempts_by_step().items()):
            if step in protected:
                continue
            if step in committed:
                if len(attempts) > 1:  # a single one must be the committed one
                    self.remove_older(step, session)
                for lock in orphans.locks_of_marks(self.at(step), attempts, self._context):
                    if not lock.is_recent:
                        self.at(step).remove_file(lock.name, self._context)
                continue
            location = self.at(step)
            ours = attempt_folders.is_unfinished(location, self._context)
            if ours and not any(_is_of(name, session) for name in attempts):
                _log.info("removing %s, the remains of a crashed save", location)
                attempt_folders.remove_attempts(location, attempts, self._context)
        for name in self.location.files(self._context):
            if name.startswith(PROBE):  # of a job that was killed while it looked for it
                self.location.remove_file(name, self._context)

    def _attempts_by_step(self) -> dict[int, set[str]]:
        """The names of all attempts in all folders of steps, also of steps without any."""
        found = folders_below(self.location, "processes", self._context)
        return {step: names for folder, names in found.items() for step in _numbers([folder])}

    @contextmanager
    def _asking(self, step: int) -> Iterator[None]:
        try:
            yield
        except Failed as error:
            raise errors.writing_failed(error, self.path(step)) from error

    def remove_older(self, step: int, session: str = "") -> None:
        """Removes all attempts to save a step except the committed one and those of `session`; see
        `remove_orphans`. Does nothing if the step is a symbolic link."""
        if self.at(step).link is not None:
            return
        folder = self.at(step).child("processes")
        kept = attempt_folders.attempts_in_use(self.at(step), self._context)
        for attempt in folder.folders(self._context):
            if attempt not in kept and not _is_of(attempt, session):
                folder.child(attempt).remove(self._context)


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
