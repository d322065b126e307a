"""Roles: parts of one job that save separately, each into its own folder; a step counts only once
all of them have it.

The parts of a step must also belong together. A step that only some roles saved before a restart
belongs to another course of the training than the step that the others save later under the same
number. So when a role starts, it excludes the versions that others have beyond the newest step that
all have, and records them before its own first save: no such version ever counts. Nothing is
communicated, and no role changes another's folder.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence

from unickpt.errors import StorageError
from unickpt.runs.retention import Metrics, Retention
from unickpt.runs.step_folder import StepFolder
from unickpt.storage import errors, paths

NAME = ".unickpt.apart"
_MOST_BYTES = 16 << 20


class Roles:
    """The folders of all roles, seen from one of them.

    Arguments:
        folder: of this role.
        other_folders: of the other roles.

    Raises:
        StorageError: the storage failed.
    """

    def __init__(self, folder: StepFolder, other_folders: Sequence[StepFolder]) -> None:
        self._own, self._others = folder, other_folders
        self.apart: set[str] = set()
        """Names of versions that match no step of this role."""
        self.behind: list[int] = []
        """This role's steps that the next ones replace, because not all roles have them."""
        newest = max(self.complete(folder.steady()), default=-1)
        self.behind = [step for step in folder.steady() if step > newest]
        self.set_apart(newest)

    def set_apart(self, after: int) -> None:
        """Excludes the versions that the others currently have after a step.

        Raises:
            StorageError: the storage failed.
        """
        for other in self._others:
            versions = (other.version(step) for step in other.steady() if step > after)
            self.apart |= {version.name for version in versions if version is not None}

    def record(self, *, fsync: bool) -> None:
        """Records the excluded versions; only with the lease of this role's folder.

        Raises:
            StorageError: the storage failed.
        """
        recorded_names = _written(self._own)
        if self.apart <= recorded_names:
            return
        data = json.dumps(sorted(self.apart | recorded_names)).encode()
        with errors.writing(self._own.location):
            self._own.location.make(durable=fsync)
            self._own.location.store(paths.context(fsync=fsync)).write(NAME, data).result()

    def complete(self, steps: Iterable[int]) -> list[int]:
        """This role's steps that all others have, too, ascending.

        Raises:
            StorageError: the storage failed.
        """
        complete = set(steps) - set(self.behind)
        for other in self._others:
            complete &= set(other.steady())
        folders = (self._own, *self._others)
        apart = self.apart.union(*map(_written, folders))
        if apart:
            complete = {step for step in complete if _belongs_together(step, folders, apart)}
        return sorted(complete)

    def expendable(
        self, retention: Retention, steps: Mapping[int, Metrics], protected: Collection[int]
    ) -> list[int]:
        """As `Retention.expendable`, for the steps that all roles have. Later steps are kept,
        because the others may be about to save them; for earlier ones, a role failed to save its
        part.

        Raises:
            StorageError: the storage failed.
        """
        complete = self.complete(steps)
        if retention.keeps_all or not complete:
            return []
        gone = retention.expendable({step: steps[step] for step in complete}, protected)
        parts = {step for step in steps if step < complete[-1]} - {*complete, *protected}
        return sorted({*gone, *parts})

    def __str__(self) -> str:
        return "all of " + ", ".join(str(folder.location) for folder in (self._own, *self._others))


def _belongs_together(step: int, folders: Sequence[StepFolder], apart: set[str]) -> bool:
    versions = [folder.version(step) for folder in folders]
    return all(version is not None and version.name not in apart for version in versions)


def _written(folder: StepFolder) -> set[str]:
    """The versions that a role has excluded.

    Raises:
        StorageError: they cannot be read.
    """
    with errors.writing(folder.location):
        read = folder.location.store(paths.context()).read(NAME).result()
    if read.state != "value":
        return set()
    try:
        return set(map(str, json.loads(read.value[:_MOST_BYTES])))
    except (ValueError, TypeError, RecursionError) as error:
        raise StorageError(
            f"{folder.location}/{NAME}: cannot determine which steps belong together: {error}"
        ) from None
