"""Copies steps from the local tier to the root; on process 0 only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from unickpt.commit import borrowers
from unickpt.commit.root import Root
from unickpt.commit.version import Version
from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    SaveConflict,
    StorageError,
    UnickptError,
    UnsupportedFormat,
)
from unickpt.format import borrowed, held_files, ocdbt_reader
from unickpt.format.index import BaseEntry
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.format.refusals import refuse_unknown
from unickpt.frameworks.leaves import job_group
from unickpt.options import SaveOptions
from unickpt.quoting import error_text
from unickpt.run_event import RunEvent, send_event
from unickpt.runs import attempt_folders, lineage_notes, save_leftovers
from unickpt.runs.background_removal import Cleaning
from unickpt.runs.current_steps import Newer, Steps, TierVersions
from unickpt.runs.step_folder import StepFolder, step_before
from unickpt.saving.background import BackgroundErrors
from unickpt.storage import errors, local_folders, locations, paths
from unickpt.storage.database import Database
from unickpt.storage.disk_space import room_text
from unickpt.threads import SerialExecutor
from unickpt.tools.copying import VersionCopy

_log = logging.getLogger("unickpt")
IN_ROOT = "all but the loss of the root"
IN_LOCAL = "all but the loss of the local tier"
Send = Callable[
    [int, VersionCopy, held_files.HeldFiles | None], tuple[bytes, tuple[BaseEntry, ...]]
]
_COPIES = 2  # checkpoints that may wait to be copied from the local tier; the next save waits


class Copying:
    """Copies steps in the background; cleans up afterwards.

    Arguments:
        steps: of a run with a local tier.
        cleaning: of the same steps.
        errors: gets the errors of steps that could not be copied.
        options: of the saves.
    """

    by_all: ClassVar[bool] = False
    """Whether each process copies its own part; else process 0 copies all."""
    survives_at_commit: ClassVar[str] = IN_LOCAL
    """What a step survives once it is committed, in the local tier."""

    def __init__(
        self,
        steps: Steps,
        cleaning: Cleaning,
        errors: BackgroundErrors,
        options: SaveOptions,
    ) -> None:
        assert steps.local is not None
        self._steps, self._local, self._root = steps, steps.local, steps.root
        self._cleaning, self.options, self._errors = cleaning, options, errors
        failed = partial(self.failed, None, f"copying a step to {steps.root.location}")
        self._work = SerialExecutor("unickpt copy", failed)
        self._refused: set[str] = set()  # versions that cannot be copied, already reported
        self._unseen: set[str] = set()  # attempts to replace the root's version, whichever it is
        self._session = ""  # prefix of the names of this job's attempts

    def start(self) -> None:
        """Copies in the background, after earlier work."""
        self._work.add(self.copy)

    def wait(self) -> None:
        """Waits until all steps are copied; raises nothing."""
        self._work.wait()

    def survives(self, step: int) -> str:
        """What a step survives; see `Checkpointer.survives`."""
        versions = self._steps.versions(step)
        return IN_LOCAL if versions.newer is Newer.LOCAL else IN_ROOT

    def close(self) -> None:
        """Ends the use of the local tier; nothing waits to be copied."""

    def wait_for_turn(self) -> None:
        """Waits until another checkpoint may wait to be copied; raises nothing."""
        self._work.wait(_COPIES - 1)

    def follow(self, step: int, attempt: str, *, overwrite: bool) -> lineage_notes.Lineage:
        """The lineage of a save in the local tier.

        Arguments:
            step: that is saved.
            attempt: the name of the save.
            overwrite: whether it may replace a step.

        Raises:
            CheckpointExists: the root has the step; or it is a checkpoint itself.
            LaterStepsExist: the root has later steps.
            StorageError: the local tier failed.
        """
        self._session = attempt.rpartition("-")[0]
        with suppress(StorageError):  # if it is unreachable, copying reports it
            self._root.check_no_checkpoint()
            self._steps.check_newest(step, self._root)
        follows = self._followed()
        superseded = self._superseded(step, attempt, overwrite)
        return lineage_notes.Lineage(tuple(superseded), frozenset(follows))

    def _followed(self) -> set[str]:
        """The versions that a save follows: the newest in the root, and those in the local tier
        that are to be copied after it. If the root cannot be read, the newest local version, and
        those that it follows."""
        # First the local ones: each may become the newest in the root at any time.
        versions = ((step, self._local.version(step)) for step in self._local.committed())
        local_versions = {step: version for step, version in versions if version is not None}
        try:
            newest = self._root.newest()
        except StorageError:
            if not local_versions:
                return set()
            last = max(local_versions)
            lineage = lineage_notes.read(self._local.location_of(last), local_versions[last])
            return {local_versions[last].name, *(lineage.follows or ())}
        if newest is None:
            return {version.name for version in local_versions.values()}
        later = {version.name for step, version in local_versions.items() if step >= newest[0]}
        return {newest[1].name, *later}

    def _superseded(self, step: int, attempt: str, overwrite: bool) -> list[str]:
        """The versions of its step that a save in the local tier supersedes."""
        local_version, names = self._local.version(step), list[str]()
        if local_version is not None:
            lineage = lineage_notes.read(self._local.location_of(step), local_version)
            names = [*lineage.supersedes, local_version.name]
        try:
            root_version = self._root.version(step)
        except StorageError:  # if it is unreachable, copying reports it
            if overwrite:
                self._unseen.add(attempt)
            return names
        if root_version is None:
            return names
        if not overwrite:
            raise CheckpointExists(
                f"{self._root.path(step)} already holds a checkpoint; pass overwrite=True"
            )
        # Versions before the root's no longer exist in either tier.
        start = names.index(root_version.name) if root_version.name in names else 0
        return list(dict.fromkeys([root_version.name, *names[start:]]))

    def copy(self) -> None:
        """Copies the steps that the root lacks from the local tier, unless no rule keeps them."""
        steps, root, local = self._steps, self._root, self._local
        root.open(self.in_flight, self._session)
        root_steps, local_steps = root.committed(), local.committed()
        expendable = steps.expendable([*root_steps, *local_steps])
        due = [step for step in local_steps if step not in expendable or step == local_steps[-1]]
        due = self.chosen(due)
        with steps.in_use.copying(due):
            remaining = set(local.committed())  # of those that were being removed
            for step in (step for step in due if step in remaining):
                try:
                    self._copy_step(step)
                except Exception as error:
                    steps.failed[step] = error
                    self.failed(step, f"copying a step to {root.path(step)}", error)
        self._cleaning.start()

    def failed(self, step: int | None, what: str, error: BaseException) -> None:
        """Keeps an error, and sends it to `SaveOptions.metrics`.

        Arguments:
            step: that was not copied; None if it is not known.
            what, error: see `Failure`.
        """
        self.keep_error(what, error)
        location = self._local.location if step is None else self._local.location_of(step)
        group, text = job_group(self.options.group), error_text(error)
        event = RunEvent("copy failed", location.url, step, group.index, group.count, text)
        send_event(self.options.metrics, event)

    def keep_error(self, what: str, error: BaseException) -> None:
        """Keeps an error until `Checkpointer.wait` or the next save raises it."""
        self._errors.add(what, error)

    def in_flight(self) -> list[int]:
        """The steps whose folders in the root may have files of saves or copies in progress."""
        return self._steps.in_use.saved()

    def chosen(self, steps: Sequence[int]) -> list[int]:
        """Those of the steps to copy that are copied now."""
        return list(steps)

    def _copy_step(self, step: int) -> None:
        """Copies a step if needed, and again if it is replaced during the copy."""
        root, local = self._root, self._local
        while True:
            versions = self._steps.versions(step)
            version = versions.local
            if version is None:
                raise CheckpointNotFound(
                    f"{local.path(step)} was removed by another process before it was copied to "
                    f"{root.location}"
                )
            if version.name in self._refused or not self._is_due(step, version, versions):
                return
            try:
                base = None if versions.root is not None else step_before(root, step)
                with self._steps.in_use.copying([] if base is None else [base]):
                    arguments = local, step, version, versions.root, base, self.options
                    is_copied = copy_version(root, *arguments, self.send, self.by_all)
                if is_copied:
                    self._is_copied(step, version)
            except CheckpointCorrupt:
                self._refused.add(version.name)  # else each later save would retry it
                raise

    def send(
        self, step: int, sent: VersionCopy, base_files: held_files.HeldFiles | None
    ) -> tuple[bytes, tuple[BaseEntry, ...]]:
        """Sends the files of a version; its arguments and result are those of `VersionCopy.run`."""
        return sent.run(base_files, check_held=self.options.reuse == "compare")

    def _is_copied(self, step: int, version: Version) -> None:
        """Records that a version is complete in the root."""
        self._steps.copied_versions.add(version.name)
        location = self._local.location_of(step)
        try:
            lineage_notes.record_copied(location, version, fsync=self.options.fsync)
        except StorageError as error:  # the copy is there; a record is missing
            _log.warning("cannot record that %s was copied: %s", location, error)

    def _is_due(self, step: int, version: Version, versions: TierVersions) -> bool:
        """Whether a version in the local tier must be copied.

        Raises:
            SaveConflict: this run saved it, and it does not supersede the root's version.
        """
        if versions.newer is Newer.LOCAL:
            return True
        if versions.newer is Newer.SAME:
            damage = "" if version.name in self._steps.copied_versions else self._root.damage(step)
            if damage:
                _log.warning("%s; it is copied again", damage)
            elif version.name not in self._steps.copied_versions:
                self._is_copied(step, version)
            return bool(damage)
        if version.attempt in self._unseen:
            return True
        if version.attempt in self._steps.own_attempts:
            self._refused.add(version.name)
            raise SaveConflict(
                f"{self._root.path(step)}: another job saved or removed steps there, or they "
                "could not be read when this job saved the step. The step is not copied; it stays "
                f"in {self._local.path(step)}: copy it from there if you want it"
            )
        return False


@dataclass(frozen=True)
class Tier:
    """A tier in front of the root, of a run that does not begin yet.

    Arguments:
        folder: its steps.
        copying: copies them to the root.
        takes_all: whether each save writes all units, and only its copy leaves some out.
    """

    folder: StepFolder
    copying: Callable[[Steps, Cleaning, BackgroundErrors, SaveOptions], Copying]
    takes_all: bool = False


def copy_version(
    root: StepFolder,
    source: StepFolder,
    step: int,
    version: Version,
    replaced: Version | None,
    base: int | None,
    options: SaveOptions,
    send: Send,
    stays: bool = False,
) -> bool:
    """Copies one version of a step, completely or not at all.

    The copy is read back and checked against its digests, then appears here atomically. Until
    then, an existing version stays unchanged.

    Arguments:
        root: the folder to copy to.
        source: the folder where it is committed.
        step: its number.
        version: the version to copy.
        replaced: the existing version that it may replace, if any.
        base: an earlier step here that is not removed during the copy: files that the step shares
            with it are not sent.
        options: of the saves; their budget and timeout apply.
        send: as `Copying.send`.
        stays: whether what was sent stays after a failure: other processes may still send, and the
            next try goes on from there.

    Returns:
        Whether it was copied; false if the source no longer has this version.

    Raises:
        CheckpointCorrupt: the source is damaged.
        StorageError: a storage failed.
        SaveConflict: another job saved here, or holds the lease.
        UnsupportedFormat: one of the versions needs features that this unickpt does not know.
    """
    origin, destination = source.location_of(step), root.location_of(step)
    where = f"copying {origin} to {destination}"
    if not version.attempt:
        raise CheckpointCorrupt(f"{where}: its manifest is damaged; nothing was copied")
    with errors.writing(where):
        stored = Root(Database(destination, paths.context()))
        current_root = stored.read()
        if current_root.digest != (replaced.digest if replaced else ""):
            raise SaveConflict(f"{destination}: another job committed here during the copy")
    if replaced and replaced.name != version.name:
        refuse_unknown(destination, paths.context())
        if needed := root.borrowers(step):
            raise SaveConflict(
                f"{where}: the version there has chunks of {', '.join(needed[:3])}; remove these "
                "first. Nothing was copied"
            )
    try:
        reader, base_files = _opened(origin, version), None
        if reader is not None and base is not None and not reader.index.bases:
            base_files = _base_files(root, reader, base)
        sent = VersionCopy(origin, version, reader, destination, options.working_bytes)
        manifest, bases = send(step, sent, base_files)
        borrowers.mark(destination, bases, paths.context())
        is_current = source.version(step) == version
        root.lease.check()
    except Exception as error:
        if not stays:
            _undo(root, step, version, replaced)
        with suppress(UnickptError):  # if the storage fails, that is reported
            if source.version(step) != version:
                return False
        if isinstance(error, CheckpointCorrupt):
            raise CheckpointCorrupt(f"{where}: {error}; nothing was copied") from error
        if isinstance(error, errors.Failed):
            files = local_folders.walk_all(origin.path) if origin.is_local else ()
            room = room_text(destination, error, sum(file.nbytes or 0 for file in files))
            raise errors.writing_failed(error, where, room) from error
        raise
    if not is_current:
        _undo(root, step, version, replaced)
        return False
    root.offered.add(version.name)
    with errors.writing(where):
        if not stored.replace(current_root, manifest, options.timeout_s):
            raise SaveConflict(f"{destination}: another job committed here during the copy")
    _log.info("copied %s to %s", origin, destination)
    with suppress(StorageError):  # remains do no harm
        save_leftovers.remove_crashed(destination, None)
    return True


def _base_files(root: StepFolder, reader: OcdbtReader, step: int) -> held_files.HeldFiles | None:
    """The files of a checkpoint that a step of the root, or the one it borrows from, has."""
    try:
        linked = held_files.linked_chunks(reader)
        base = ocdbt_reader.open(root.location_of(step)) if linked else None
        if base is not None and base.index.bases:
            base = ocdbt_reader.open(borrowed.sibling(base.location, base.index.bases[0].name))
        if base is None or base.index.bases or base.location.link is not None:
            return None
    except UnickptError as error:  # a damaged step must not prevent copies of later ones
        _log.warning("%s: nothing is shared with earlier steps: %s", reader.location, error)
        return None
    return held_files.held_by(base, linked, reader, paths.context())


def _undo(root: StepFolder, step: int, version: Version, replaced: Version | None) -> None:
    """Removes the output of a failed copy, if nothing can need it."""
    if replaced is not None and replaced.attempt == version.attempt:
        return  # it rewrote a damaged version in place
    if version.name in root.offered:
        return  # an earlier try got no answer and may have been committed
    location = root.location_of(step)
    with suppress(Exception):
        location.child(f"processes/{version.attempt}").remove(paths.context())
        if replaced is None:
            attempt_folders.remove_empty(location)


def _opened(origin: locations.Location, version: Version) -> OcdbtReader | None:
    """A version of a checkpoint; None if it is damaged, which the check of its copy explains.

    Raises:
        UnsupportedFormat: it needs features that this unickpt does not know.
        StorageError: the storage failed.
    """
    pinned = Database(origin, paths.context(), version.manifest)
    try:
        return ocdbt_reader.open_pinned(pinned)
    except (StorageError, UnsupportedFormat):
        raise
    except UnickptError:
        return None
