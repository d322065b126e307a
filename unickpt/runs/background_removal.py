"""The removal of steps that no rule keeps, in the background; on process 0 only."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from unickpt.errors import StorageError, UnsupportedFormat
from unickpt.quoting import error_text
from unickpt.runs import attempt_folders
from unickpt.runs.current_steps import Newer, Steps, TierVersions
from unickpt.runs.step_folder import StepFolder
from unickpt.storage import paths
from unickpt.threads import SerialExecutor

_log = logging.getLogger("unickpt")


def _failed(error: BaseException) -> None:
    notes = getattr(error, "__notes__", ())
    _log.warning("cleaning up: %s", "; ".join([error_text(error), *notes]))


class Cleaning:
    """Removes steps in the background.

    Arguments:
        steps: of the run.
        retires: whether a step that others borrow from is also removed, except for its files.
    """

    def __init__(self, steps: Steps, *, retires: bool = False) -> None:
        self._steps, self._retires = steps, retires
        self._retired: dict[StepFolder, set[tuple[int, str]]] = {}  # of each, after a first look
        self._work = SerialExecutor("unickpt clean", _failed)
        self._left: dict[tuple[StepFolder, int], Sequence[str]] = {}  # attempts of removed steps
        self._reported: set[tuple[StepFolder, int]] = set()

    def start(self) -> None:
        """Cleans in the background, after earlier work."""
        self._work.add(self.clean)

    def wait(self, most: int = 0) -> None:
        """Waits until nothing is left to clean; raises nothing. See `SerialExecutor.wait`.

        Arguments:
            most: how many may remain; each save starts one.
        """
        self._work.wait(most)

    def clean(self) -> None:
        """Removes the steps that no rule keeps, and copied steps from the local tier."""
        if self._left:
            self._remove_left()
        root = self._steps.root
        root_steps = root.committed()
        # Only by the steps in the root: a step that is not copied yet must not cause a removal
        # there.
        expendable = set(self._steps.expendable(root_steps))
        if self._steps.local is not None:
            self._clean_local(self._steps.local, root_steps, expendable)
        self._remove_from(dict.fromkeys(expendable, (root,)))

    def remove(self, steps: Collection[int]) -> None:
        """Removes steps from both tiers, even those that rules keep, but no step that is in use or
        that others borrow from, unless it can be retired. If a version stays, which does not count,
        so do the others."""
        steps_by_folder = {folder: set(folder.committed()) for folder in self._steps.all}
        self._remove_from({step: self._steps.newest_last(step, steps_by_folder) for step in steps})

    def _remove_from(self, folders: Mapping[int, Sequence[StepFolder]]) -> None:
        """Removes steps, each from some folders; and remains of retired steps."""
        # The newest first, because it may be the only one that borrows from the others.
        for step in sorted(folders, reverse=True):
            with self._steps.in_use.removing(step) as is_free:
                if is_free and all(self._remove(folder, step) for folder in folders[step]):
                    self._steps.known_metrics.pop(step, None)
        for folder in self._steps.all:
            self._remove_retired(folder)

    def _remove(self, folder: StepFolder, step: int, *, retires: bool = False) -> bool:
        """Removes a step from a folder, unless another step there borrows from it; the only place
        that removes steps in the background.

        Arguments:
            retires: whether a step that others borrow from is hidden from all but these even if the
                run keeps such steps.

        Returns:
            Whether it is gone. A failure is logged once, and retried after the next save.
        """
        try:
            folder.remove(step)
            _log.info("removed %s", folder.path(step))
            return True
        except attempt_folders.Needed:
            if not (retires or self._retires):
                return False
            digest = folder.retire(step)
            if digest is not None and folder in self._retired:
                self._retired[folder].add((step, digest))
            _log.info("removed %s, but for what others borrow", folder.path(step))
            return True
        except (StorageError, UnsupportedFormat) as error:
            self._tell(folder, step, error)
            if isinstance(error, attempt_folders.Unremoved):
                self._left[folder, step] = error.attempts
            return isinstance(error, attempt_folders.Unremoved)

    def _tell(self, folder: StepFolder, step: int, error: Exception) -> None:
        """Logs once that a step cannot be removed."""
        if (folder, step) not in self._reported:
            _log.warning("cleaning up: %s; tried again after each save", error)
        self._reported.add((folder, step))

    def _remove_retired(self, folder: StepFolder) -> None:
        """Removes the remains of retired steps that no step needs, including those of earlier jobs,
        which may have saved with other arguments."""
        if folder not in self._retired:
            self._retired[folder] = folder.retired()
        for step, digest in sorted(self._retired[folder]):
            try:
                if folder.remove_retired(step, digest):
                    self._retired[folder].discard((step, digest))
            except UnsupportedFormat as error:
                self._tell(folder, step, error)

    def _remove_left(self) -> None:
        """Removes the remains of earlier removals."""
        context = paths.context()
        for (folder, step), attempts in list(self._left.items()):
            with self._steps.in_use.removing(step) as is_free, suppress(attempt_folders.Unremoved):
                if is_free:
                    attempt_folders.remove_attempts(folder.location_of(step), attempts, context)
                    attempt_folders.check_removed(folder.location_of(step), attempts, context)
                    del self._left[folder, step]

    def _clean_local(self, local: StepFolder, root_steps: Sequence[int], in_root: set[int]) -> None:
        """Removes the steps that the local tier no longer needs.

        Arguments:
            root_steps: the steps in the root.
            in_root: those of them that no rule keeps there; removed steps, and those that have to
                stay, are removed from it.
        """
        local_steps = local.committed()
        expendable = set(self._steps.expendable([*root_steps, *local_steps]))
        needed = {*local.needed(local_steps)}
        for step in reversed(local_steps):
            with self._steps.in_use.removing(step) as is_free:
                if is_free:
                    is_expendable, is_needed = step in expendable - needed, step in needed
                    self._clean_step(local, step, is_expendable, is_needed, in_root)

    def _clean_step(
        self, local: StepFolder, step: int, is_expendable: bool, is_needed: bool, in_root: set[int]
    ) -> None:
        """Removes a step from the local tier if that no longer needs it."""
        versions = self._steps.versions(step)
        version = versions.local
        if version is None:
            return
        if versions.newer is Newer.ROOT and version.attempt not in self._steps.own_attempts:
            self._remove_stale(local, step, versions)
            return
        is_copied = versions.newer is Newer.SAME and version.name in self._steps.copied_versions
        if versions.newer is Newer.LOCAL and versions.root is not None:
            # First the version that it replaces, which else would count again.
            is_expendable = is_expendable and step in in_root
            in_root.discard(step)
            if is_expendable:
                is_expendable = self._remove(self._steps.root, step)
        if is_expendable or (is_copied and not is_needed):
            self._remove(local, step)

    def remove_abandoned(self) -> None:
        """Removes steps from the local tier that do not count; see `Steps.versions`. If the root is
        unreachable, copying reports it later.

        Raises:
            SaveConflict: another job saves here.
            StorageError: the local tier failed.
        """
        local = self._steps.local
        if local is None:
            return
        local.remove_lost()
        for step in reversed(local.committed()):
            try:
                versions = self._steps.versions(step)
            except StorageError as error:
                _log.warning("cannot compare %s with the root: %s", local.path(step), error)
                return
            if versions.is_abandoned:
                local.lease.take()
                self._remove_stale(local, step, versions)

    def _remove_stale(self, local: StepFolder, step: int, versions: TierVersions) -> None:
        """Removes a step that does not count from the local tier; steps that count may borrow from
        it."""
        where = self._steps.root.location
        _log.warning("removing %s, which is %s in %s", local.path(step), versions.fault, where)
        self._remove(local, step, retires=True)
