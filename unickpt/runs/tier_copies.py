"""Copies steps from the local tier to the root; on process 0 only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from unickpt.commit import borrowers
from unickpt.commit.root import Root
from unickpt.commit.version import Version
from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    SaveConflict,
    StorageError,
    UnickptError,
    UnsupportedFormat,
)
from unickpt.format import borrowed, held_files, ocdbt_reader
from unickpt.format.held_files import HeldFiles
from unickpt.format.index import BaseEntry
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.format.refusals import refuse_unknown
from unickpt.options import SaveOptions
from unickpt.runs import attempt_folders, lineage_notes
from unickpt.runs.cleaning import Cleaning, StepsInUse
from unickpt.runs.step_folder import StepFolder, remove_older
from unickpt.runs.tiers import Newer, Tier, Tiers, TierVersions, compare
from unickpt.storage import errors, local_folders, locations, paths
from unickpt.storage.database import Database
from unickpt.storage.errors import Failed
from unickpt.storage.locations import Location
from unickpt.threads import SerialExecutor
from unickpt.tools.copying import VersionCopy

_log = logging.getLogger("unickpt")
_COPIES = 2  # checkpoints that may wait to be copied from the local tier; the next save waits


class Copying:
    """Copies steps in the background; cleans up afterwards.

    Arguments:
        tiers: the folders.
        options: of the saves.
        in_use: which steps are being saved or removed.
        cleaning: of the same steps.
        failed: receives the errors of steps whose copy failed.
        report: called with what could not be copied, and the error.
    """

    def __init__(
        self,
        tiers: Tiers,
        options: SaveOptions,
        in_use: StepsInUse,
        cleaning: Cleaning,
        failed: dict[int, BaseException],
        report: Callable[[str, Exception], object],
    ) -> None:
        self._tiers, self._options, self._in_use = tiers, options, in_use
        self._cleaning, self.failed, self._report = cleaning, failed, report
        self._work = SerialExecutor(
            "unickpt copy", partial(report, f"copying a step to {tiers.root.location}")
        )
        self._refused: set[str] = set()  # versions that cannot be copied, already reported
        self.unseen: set[str] = set()
        """Attempts to replace the root's version, whichever it is."""
        self.session = ""
        """Prefix of the names of this job's attempts."""

    def start(self) -> None:
        """Copies in the background, after what was started before."""
        self._work.add(self.copy)

    def wait(self) -> None:
        """Waits until all steps are copied; raises nothing."""
        self._work.wait()

    def wait_for_room(self) -> None:
        """Waits until another checkpoint may wait to be copied."""
        self._work.wait(_COPIES - 1)

    def copy(self) -> None:
        """Copies the steps that the root lacks from the local tier, unless no rule keeps them."""
        assert self._tiers.local is not None
        self._tiers.root.open(self._in_use.saved, self.session)
        there, here = self._tiers.root.committed(), self._tiers.local.committed()
        expendable = self._cleaning.expendable(there, here)
        due = [step for step in here if step not in expendable or step == here[-1]]
        with self._in_use.copying(due):
            remaining = set(self._tiers.local.committed())  # of those that were being removed
            for step in (step for step in due if step in remaining):
                try:
                    self._copy_step(self._tiers.local, step)
                except Exception as error:
                    self.failed[step] = error
                    self._report(f"copying a step to {self._tiers.root.path(step)}", error)
        self._cleaning.start()

    def _copy_step(self, local: Tier, step: int) -> None:
        """Copies a step if needed, and again if it is replaced during the copy."""
        while True:
            versions = compare(local, self._tiers.root, step)
            version = versions.local
            if version is None:
                raise CheckpointNotFound(
                    f"{local.path(step)} was removed by another process before it was copied to "
                    f"{self._tiers.root.location}"
                )
            if version.name in self._refused or not self._is_due(local, step, version, versions):
                return
            try:
                base = None if versions.root is not None else self._tiers.root.before(step)
                with self._in_use.copying([] if base is None else [base]):
                    arguments = local, step, version, versions.root, base, self._options
                    is_copied = copy_version(self._tiers.root, *arguments)
                if is_copied:
                    self._is_copied(local, step, version)
            except CheckpointCorrupt:
                self._refused.add(version.name)  # otherwise each later save would try it again
                raise

    def _is_copied(self, local: Tier, step: int, version: Version) -> None:
        """Records that a version is complete in the root."""
        self._cleaning.copied.add(version.name)
        try:
            lineage_notes.record_copied(local.at(step), version, fsync=self._options.fsync)
        except StorageError as error:  # the copy is there; a record is missing
            _log.warning("cannot record that %s was copied: %s", local.path(step), error)

    def _is_due(self, local: Tier, step: int, version: Version, versions: TierVersions) -> bool:
        """Whether a version in the local tier must be copied.

        Raises:
            SaveConflict: this run saved it, and it does not supersede what the root has.
        """
        if versions.newer is Newer.LOCAL:
            return True
        if versions.newer is Newer.SAME:
            damage = "" if version.name in self._cleaning.copied else self._tiers.root.damage(step)
            if damage:
                _log.warning("%s; it is copied again", damage)
            elif version.name not in self._cleaning.copied:
                self._is_copied(local, step, version)
            return bool(damage)
        if version.attempt in self.unseen:
            return True
        if version.attempt in self._cleaning.own:
            self._refused.add(version.name)
            raise SaveConflict(
                f"{self._tiers.root.path(step)}: another job saved or removed steps there, or they "
                "could not be read when this job saved the step. The step is not copied; it stays "
                f"in {self._tiers.first.path(step)}: copy it from there if you want it"
            )
        return False


def copy_version(
    root: Tier,
    source: StepFolder,
    step: int,
    version: Version,
    replaced: Version | None,
    base: int | None,
    options: SaveOptions,
) -> bool:
    """Copies one version of a step, completely or not at all.

    The copy is read back and checked against its digests, then appears here atomically. Until
    then, an existing version stays unchanged.

    Arguments:
        root: the tier to copy to.
        source: the tier where it is committed.
        step: its number.
        version: what to copy.
        replaced: the existing version that it may replace, if any.
        base: an earlier step here, which nobody removes meanwhile: files that the step shares
            with it are not sent.
        options: of the saves; their budget, timeout and way to compare apply.

    Returns:
        Whether it was copied; false if the source no longer has this version.

    Raises:
        CheckpointCorrupt: the source is damaged.
        StorageError: a storage failed.
        SaveConflict: another job saved here, or holds the lease.
        UnsupportedFormat: one of the versions needs what this unickpt does not know.
    """
    origin, destination = source.at(step), root.at(step)
    where = f"copying {origin} to {destination}"
    if not version.attempt:
        raise CheckpointCorrupt(f"{where}: its manifest is damaged; nothing was copied")
    try:
        stored = Root(Database(destination, paths.context()))
        found = stored.read()
        if found.digest != (replaced.digest if replaced else ""):
            raise SaveConflict(f"{destination}: another job committed here during the copy")
    except Failed as error:
        raise errors.writing_failed(error, where) from error
    if replaced and replaced.name != version.name:
        refuse_unknown(destination, paths.context())
        if needed := root.borrowers(step):
            raise SaveConflict(
                f"{where}: the version there has chunks of {', '.join(needed[:3])}; remove these "
                "first. Nothing was copied"
            )
    try:
        manifest, bases = _send(root, source.at(step), step, version, base, options)
        borrowers.mark(destination, bases, paths.context())
        is_current = source.version(step) == version
        root.lease.check()
    except Exception as error:
        _undo(root, step, version, replaced)
        if not _is_current(source, step, version):
            return False
        if isinstance(error, CheckpointCorrupt):
            raise CheckpointCorrupt(f"{where}: {error}; nothing was copied") from error
        if isinstance(error, Failed):
            files = local_folders.walk_all(origin.path) if origin.is_local else ()
            room = locations.room_text(destination, error, sum(file.nbytes or 0 for file in files))
            raise errors.writing_failed(error, where, room) from error
        raise
    if not is_current:
        _undo(root, step, version, replaced)
        return False
    root.offered.add(version.name)
    try:
        if not stored.replace(found, manifest, options.timeout_s):
            raise SaveConflict(f"{destination}: another job committed here during the copy")
    except Failed as error:
        raise errors.writing_failed(error, where) from error
    _log.info("copied %s to %s", origin, destination)
    with suppress(Failed):  # remains do no harm
        remove_older(root.at(step))
    return True


def _send(
    root: Tier,
    origin: Location,
    step: int,
    version: Version,
    base: int | None,
    options: SaveOptions,
) -> tuple[bytes, tuple[BaseEntry, ...]]:
    """Copies what the root lacks; see `VersionCopy.run`."""
    reader = _opened(origin, version)
    held = None
    if reader is not None and base is not None and not reader.index.bases:
        held = _held(root, reader, base)
    made = VersionCopy(origin, version, reader, root.at(step), options.working_bytes)
    return made.run(held, check_held=options.reuse == "compare")


def _held(root: Tier, reader: OcdbtReader, step: int) -> HeldFiles | None:
    """What a step of the root, or the one it borrows from, has of the files of a checkpoint."""
    try:
        linked = held_files.linked_chunks(reader)
        base = ocdbt_reader.open(root.at(step)) if linked else None
        if base is not None and base.index.bases:
            base = ocdbt_reader.open(borrowed.sibling(base.location, base.index.bases[0].name))
        if base is None or base.index.bases or base.location.link is not None:
            return None
    except UnickptError as error:  # a damaged step must not prevent copies of later ones
        _log.warning("%s: nothing is shared with earlier steps: %s", reader.location, error)
        return None
    return held_files.held_by(base, linked, reader, paths.context())


def _undo(root: Tier, step: int, version: Version, replaced: Version | None) -> None:
    """Removes what a failed copy wrote, if nothing can need it."""
    if replaced is not None and replaced.attempt == version.attempt:
        return  # it rewrote a damaged version in place
    if version.name in root.offered:
        return  # an earlier try got no answer and may have been committed
    with suppress(Exception):
        root.at(step).child(f"processes/{version.attempt}").remove(paths.context())
        if replaced is None:
            attempt_folders.remove_empty(root.at(step))


def _opened(origin: Location, version: Version) -> OcdbtReader | None:
    """A version of a checkpoint; None if it is damaged, which the check of its copy explains.

    Raises:
        UnsupportedFormat: it needs what this unickpt does not know.
        StorageError: the storage failed.
    """
    pinned = Database(origin, paths.context(), version.manifest)
    try:
        return ocdbt_reader.open_pinned(pinned)
    except (StorageError, UnsupportedFormat):
        raise
    except UnickptError:
        return None


def _is_current(source: StepFolder, step: int, version: Version) -> bool:
    """Whether a version is still committed; true if the storage fails."""
    try:
        return source.version(step) == version
    except UnickptError:
        return True
