"""A tier: a folder of steps with its lease; copies steps from another tier."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from unickpt.commit import borrowers
from unickpt.commit.lease import Lease
from unickpt.commit.root import Root
from unickpt.commit.version import Version
from unickpt.errors import (
    CheckpointCorrupt,
    SaveConflict,
    StorageError,
    UnickptError,
)
from unickpt.format import borrowed, ocdbt_reader
from unickpt.format.index import BaseEntry
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.reuse import held_files
from unickpt.reuse.held_files import HeldFiles
from unickpt.saving.options import SaveOptions
from unickpt.steps.step_folder import StepFolder
from unickpt.storage import contexts, errors, paths
from unickpt.storage.database import Database
from unickpt.storage.errors import Failed
from unickpt.storage.locations import Location
from unickpt.tools import copying

_log = logging.getLogger("unickpt")


class Tier(StepFolder):
    """A folder of steps, and the lease on it.

    Arguments:
        root: a local path or a URL.
    """

    def __init__(self, root: paths.Path) -> None:
        super().__init__(root)
        self.lease = Lease(self.location)
        self._is_clean = False
        self._offered: set[str] = set()  # versions whose manifest was or may have been written

    def open(self, in_flight: Sequence[int], session: str) -> None:
        """Takes the lease, and removes the remains of crashed jobs once.

        Arguments:
            in_flight, session: see `StepFolder.remove_remnants`.

        Raises:
            SaveConflict: another job holds the lease.
            StorageError: the storage failed.
        """
        self.lease.take()
        if self._is_clean or not self.lease.is_settled:
            return
        try:
            self.remove_remnants(in_flight, session)
            self._is_clean = True
        except (UnickptError, Failed) as error:
            _log.warning(
                "%s: the remains of failed saves cannot be removed now: %s", self.location, error
            )

    def copy_from(
        self,
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
        """
        origin, destination = source.at(step), self.at(step)
        where = f"copying {origin} to {destination}"
        if not version.attempt:
            raise CheckpointCorrupt(f"{where}: its manifest is damaged; nothing was copied")
        try:
            root = Root(Database(destination, contexts.context()))
            found = root.read()
            if found.digest != (replaced.digest if replaced else ""):
                raise SaveConflict(f"{destination}: another job committed here during the copy")
        except Failed as error:
            raise errors.writing_failed(error, where) from error
        if replaced and replaced.name != version.name and (needed := self.borrowers(step)):
            raise SaveConflict(
                f"{where}: the version there has chunks of {', '.join(needed[:3])}; remove these "
                "first. Nothing was copied"
            )
        try:
            manifest, bases = self._send(source.at(step), step, version, base, options)
            borrowers.mark(destination, bases, contexts.context())
            is_current = source.version(step) == version
            self.lease.check()
        except Exception as error:
            self._undo(step, version, replaced)
            if not _is_current(source, step, version):
                return False
            if isinstance(error, CheckpointCorrupt):
                raise CheckpointCorrupt(f"{where}: {error}; nothing was copied") from error
            if isinstance(error, Failed):
                raise errors.writing_failed(error, where) from error
            raise
        if not is_current:
            self._undo(step, version, replaced)
            return False
        self._offered.add(version.name)
        try:
            if not root.replace(found, manifest, options.timeout_s):
                raise SaveConflict(f"{destination}: another job committed here during the copy")
        except Failed as error:
            raise errors.writing_failed(error, where) from error
        _log.info("copied %s to %s", origin, destination)
        with suppress(Failed):  # remains do no harm
            self.remove_older(step)
        return True

    def _send(
        self, origin: Location, step: int, version: Version, base: int | None, options: SaveOptions
    ) -> tuple[bytes, tuple[BaseEntry, ...]]:
        """Copies what this tier lacks; see `VersionCopy.run`."""
        reader = _opened(origin, version)
        held = None
        if reader is not None and base is not None and not reader.index.bases:
            held = self._held(reader, base)
        made = copying.VersionCopy(origin, version, reader, self.at(step), options.working_bytes)
        return made.run(held, check_held=options.reuse == "compare")

    def _held(self, reader: OcdbtReader, step: int) -> HeldFiles | None:
        """What a step here, or the one that it borrows from, has of the files of a checkpoint."""
        try:
            linked = held_files.linked_chunks(reader)
            base = ocdbt_reader.open(self.at(step)) if linked else None
            if base is not None and base.index.bases:
                base = ocdbt_reader.open(borrowed.sibling(base.location, base.index.bases[0].name))
            if base is None or base.index.bases or base.location.link is not None:
                return None
        except UnickptError as error:  # a damaged step must not prevent copies of later ones
            _log.warning("%s: nothing is shared with earlier steps: %s", reader.location, error)
            return None
        return held_files.held_by(base, linked, reader, contexts.context())

    def _undo(self, step: int, version: Version, replaced: Version | None) -> None:
        """Removes what a failed copy wrote, if nothing can need it."""
        if replaced is not None and replaced.attempt == version.attempt:
            return  # it rewrote a damaged version in place
        if version.name in self._offered:
            return  # an earlier try got no answer and may have been committed
        with suppress(Exception):
            self.at(step).child(f"processes/{version.attempt}").remove(contexts.context())
            if replaced is None:
                self.at(step).remove_empty()


def _opened(origin: Location, version: Version) -> OcdbtReader | None:
    """A version of a checkpoint; None if it is damaged, which the check of its copy explains.

    Raises:
        StorageError: the storage failed.
    """
    pinned = Database(origin, contexts.context()).with_manifest(version.manifest)
    try:
        return ocdbt_reader.open_pinned(pinned)
    except StorageError:
        raise
    except UnickptError:
        return None


def _is_current(source: StepFolder, step: int, version: Version) -> bool:
    """Whether a version is still committed; true if the storage fails."""
    try:
        return source.version(step) == version
    except UnickptError:
        return True
