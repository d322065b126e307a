"""A tier: a folder of steps with its lease; copies steps from another tier."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from unickpt.commit.root import Root
from unickpt.commit.version import Version
from unickpt.errors import (
    CheckpointCorrupt,
    SaveConflict,
    UnickptError,
)
from unickpt.steps.lease import Lease
from unickpt.steps.step_folder import Steps
from unickpt.storage import contexts, errors, paths
from unickpt.storage.database import Database
from unickpt.storage.errors import Failed
from unickpt.tools import copying

_log = logging.getLogger("unickpt")


class Tier(Steps):
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
            in_flight, session: see `Steps.remove_remnants`.

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
        source: Steps,
        step: int,
        version: Version,
        replaced: Version | None,
        budget_bytes: int,
        timeout_s: float,
    ) -> bool:
        """Copies one version of a step, completely or not at all.

        The copy is read back and checked against its digests, then appears here atomically. Until
        then, an existing version stays unchanged.

        Arguments:
            source: the tier where it is committed.
            step: its number.
            version: what to copy.
            replaced: the existing version that it may replace, if any.
            budget_bytes: host memory to use; at least the size of the largest file.
            timeout_s: how long to wait for another process that writes here.

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
            if found.digest != (replaced.name if replaced else ""):
                raise SaveConflict(f"{destination}: another job committed here during the copy")
        except Failed as error:
            raise errors.writing_failed(error, where) from error
        try:
            copying.copy_files(origin, destination, version.attempt, budget_bytes)
            copying.check_copy(origin, destination, version.manifest)
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
            if not root.replace(found, version.manifest, timeout_s):
                raise SaveConflict(f"{destination}: another job committed here during the copy")
        except Failed as error:
            raise errors.writing_failed(error, where) from error
        _log.info("copied %s to %s", origin, destination)
        with suppress(Failed):  # remains do no harm
            self.remove_older(step)
        return True

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


def _is_current(source: Steps, step: int, version: Version) -> bool:
    """Whether a version is still committed; true if the storage fails."""
    try:
        return source.version(step) == version
    except UnickptError:
        return True
