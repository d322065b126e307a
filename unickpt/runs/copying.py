"""Copies steps from the local tier to the root; on process 0 only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from unickpt.commit.version import Version
from unickpt.errors import CheckpointCorrupt, CheckpointNotFound, SaveConflict, StorageError
from unickpt.runs.cleaning import Cleaning
from unickpt.runs.steps_in_use import StepsInUse
from unickpt.saving.options import SaveOptions
from unickpt.steps.tier import Tier
from unickpt.steps.tiers import Newer, Tiers, TierVersions, compare
from unickpt.threads import SerialExecutor

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
                    is_copied = self._tiers.root.copy_from(*arguments)
                if is_copied:
                    self._is_copied(local, step, version)
            except CheckpointCorrupt:
                self._refused.add(version.name)  # otherwise each later save would try it again
                raise

    def _is_copied(self, local: Tier, step: int, version: Version) -> None:
        """Records that a version is complete in the root."""
        self._cleaning.copied.add(version.name)
        try:
            local.record_copied(step, version, fsync=self._options.fsync)
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
