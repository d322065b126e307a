"""A folder of steps: the checkpoints `step_<n>` in it, the lease to write there, and its size."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import ClassVar, Protocol, runtime_checkable

from unickpt.commit import borrowers, version
from unickpt.commit.lease import Lease
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
from unickpt.runs import attempt_folders, save_leftovers
from unickpt.storage import data_files, errors, paths
from unickpt.storage.locations import Location, files_by_folder, folders_below, folders_with
from unickpt.storage.ocdbt import MANIFEST, RETIRED

_log = logging.getLogger("unickpt")
_LISTINGS = 50
PROBE = ".unickpt-"
"""Prefix of files by which the processes of a job check that they see the same folder."""
_NAME = re.compile(r"step_(0|[1-9][0-9]{0,17})")


@runtime_checkable
class ReadsElsewhere(Protocol):
    """A folder of steps whose load, when it is tried again, may read other copies."""

    def reading_failed(self, step: int, error: StorageError) -> StorageError:
        """The error that a step cannot be read: that of the storage, if trying again may help."""


class StepFolder:
    """The steps in a folder of any storage, and the lease on it.

    Arguments:
        root: a local path or a URL.
    """

    copies_differ: ClassVar[bool] = False
    """Whether the copies of its steps in the root may have older units than these."""

    def __init__(self, root: paths.PathLike) -> None:
        self.location = paths.resolve(root)
        self.lease = Lease(self.location)
        self._is_clean = False
        self.offered: set[str] = set()
        """Versions whose manifest was, or may have been, written by a copy."""

    def open(self, in_flight: Callable[[], Iterable[int]], session: str) -> bool:
        """Takes the lease, and removes the remains of crashed jobs once.

        Arguments:
            in_flight: returns the steps that this process is saving.
            session: prefix of the names of this job's attempts.

        Returns:
            Whether this job did not hold the lease, so that another one may have saved here.

        Raises:
            SaveConflict: another job holds the lease.
            StorageError: the storage failed.
        """
        is_new = self.lease.take()
        if not self._is_clean and self.lease.is_settled:
            try:
                self._remove_orphans(in_flight(), session)
                self._is_clean = True
            except (UnickptError, errors.Failed) as error:
                where, failed = self.location, "the remains of failed saves cannot be removed now"
                _log.warning("%s: %s: %s", where, failed, error)
        return is_new

    def _remove_orphans(self, in_flight: Iterable[int], session: str) -> None:
        """Removes the remains of crashed saves and deletions; only with the lease.

        Arguments:
            in_flight: steps that this process is saving.
            session: prefix of the names of this job's attempts. Another process of the job may
                already save a step that is not in flight here.
        """
        context, committed = paths.context(), set(self.committed())
        folders = folders_below(self.location, attempt_folders.FOLDER, context)
        for step in sorted({*_numbers(folders)}.difference(in_flight)):
            attempts = folders[f"step_{step}"]
            is_whole = step in committed and len(attempts) == 1  # it must be the committed one
            save_leftovers.remove_crashed(
                self.location_of(step), attempts if is_whole else None, session
            )
        for name in self.location.files(context):
            if name.startswith(PROBE):  # of a job that was killed while it searched for it
                self.location.remove_file(name, context)

    def path(self, step: int) -> str:
        """The path of a step, saved or not."""
        return str(self.location_of(step))

    def location_of(self, step: int) -> Location:
        return self.location.child(f"step_{step}")

    def committed(self) -> list[int]:
        """All steps that exist, ascending.

        Raises:
            StorageError: the storage failed.
        """
        try:
            return _numbers(folders_with(self.location, MANIFEST, paths.context()))
        except errors.MissingFolder:
            return []
        except errors.Failed as error:
            paths.resolve(self.location.url, whole=True)  # InvalidPath, if a file is there by now
            raise errors.reading_failed(error, str(self.location)) from error

    def steady(self) -> list[int]:
        """As `committed`, while another job may commit and remove steps.

        During one listing, a step can be removed and the next one committed, so that the listing
        has neither. The listing is therefore repeated until nothing changes.
        """
        before: tuple[list[int], set[str]] | None = None
        for _ in range(_LISTINGS):
            now = self.committed(), set[str]()
            if not self.location.is_remote:  # includes folders without a manifest
                now[1].update(self.location.folders(paths.context()))
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
        library_metadata = checkpoint.open(self.path(step)).metadata.get(RESERVED)
        resumed_step = library_metadata.get("after") if isinstance(library_metadata, dict) else None
        return resumed_step if type(resumed_step) is int else None

    def version(self, step: int) -> Version | None:
        """The committed version of a step, if any. Costs one small read.

        Raises:
            StorageError: the storage failed.
        """
        with errors.writing(self.path(step)):
            return version.version_at(self.location_of(step))

    def damage(self, step: int) -> str:
        """How a committed step is damaged; empty if it is not.

        Raises:
            StorageError: the storage failed.
        """
        try:
            checkpoint.open(self.path(step))
        except (CheckpointReplaced, UnsupportedFormat):  # a newer unickpt can open the latter
            pass
        except CheckpointCorrupt as error:
            return str(error)
        except CheckpointNotFound as error:
            return "" if self.version(step) is None else str(error)
        return ""

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
            if version is not None:  # else it was just removed
                return committed[-1], version

    def metrics(self, step: int) -> Mapping[str, float]:
        """The metrics that a step was saved with; empty if it has none, or is damaged.

        Raises:
            StorageError: the storage failed; the step may be one of the best.
        """
        try:
            metrics = checkpoint.open(self.path(step)).metadata[RESERVED]["metrics"]
            return {str(name): float(value) for name, value in metrics.items()}
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
            UnsupportedFormat: it needs features that this unickpt does not know; nothing was
                removed.
            Needed: other steps borrow from it; nothing was removed.
            Unremoved: files are left; the next job recognises them, too.
            StorageError: it could not be removed.
        """
        attempt_folders.remove_checkpoint(self.location_of(step), paths.context())

    def borrowers(self, step: int) -> list[str]:
        """The names of the steps that have chunks in this one, and so need it.

        Raises:
            StorageError: the storage failed.
        """
        with errors.writing(self.path(step)):
            return borrowers.list_borrowers(self.location_of(step), paths.context())

    def retire(self, step: int) -> str | None:
        """Retires a step: hides it from all steps but those that have chunks in it.

        Returns:
            The digest of its manifest; None if it is gone.

        Raises:
            StorageError: the storage failed.
        """
        with errors.writing(self.path(step)):
            return borrowed.retire(self.location_of(step), paths.context())

    def retired(self) -> set[tuple[int, str]]:
        """All steps that were retired, each with the digest of its manifest; lists all files.

        Raises:
            StorageError: the storage failed.
        """
        digests_by_folder = folders_below(self.location, RETIRED, paths.context())
        return {
            (step, digest)
            for folder, digests in digests_by_folder.items()
            for step in _numbers([folder])
            for digest in digests
        }

    def remove_retired(self, step: int, digest: str) -> bool:
        """Removes the remains of a retired step, unless a step needs it; returns whether it is
        gone.

        Raises:
            UnsupportedFormat: it needs what this unickpt does not know; nothing was removed.
            StorageError: the storage failed.
        """
        with errors.writing(self.path(step)):
            return attempt_folders.remove_retired(self.location_of(step), digest, paths.context())

    def needed(self, steps: Sequence[int]) -> Sequence[int]:
        """Those of the committed steps of a local tier that stay even if no rule keeps them."""
        return steps[-1:]

    def remove_lost(self) -> None:
        """Removes committed steps that nobody can read any more; only with the lease."""

    def check_no_checkpoint(self) -> None:
        """Refuses to save steps into a folder that is a checkpoint itself.

        Raises:
            CheckpointExists: names it.
            StorageError: the storage failed.
        """
        try:
            is_one = self.location.has_file(MANIFEST, paths.context())
        except errors.Failed as error:
            raise errors.writing_failed(error, str(self.location)) from error
        if is_one:
            raise CheckpointExists(
                f"{self.location} is a checkpoint, not a folder of steps; pass the folder above it "
                "to Checkpointer, or load it by unickpt.load"
            )


def step_before(folder: StepFolder, step: int) -> int | None:
    """The newest committed step of a folder below another one.

    Raises:
        StorageError: the storage failed.
    """
    return max((earlier for earlier in folder.committed() if earlier < step), default=None)


def check_no_link(folder: StepFolder, step: int) -> None:
    """Refuses to save a step through a symbolic link, or in place of a file.

    Raises:
        CheckpointExists: the step is a link; names its target.
        InvalidPath: it is a file.
    """
    location = folder.location_of(step)
    if (target := location.link) is not None:
        raise CheckpointExists(
            f"{folder.path(step)} is a symbolic link to {target}; a run saves only into its own "
            "folders: remove the link, or save another step"
        )
    name = location.path.rstrip("/")
    if location.is_local and os.path.lexists(name) and not os.path.isdir(name):
        paths.resolve(name)  # raises InvalidPath


def _numbers(names: Iterable[str]) -> list[int]:
    """The steps among the names of folders, ascending."""
    return sorted([int(match[1]) for match in map(_NAME.fullmatch, names) if match])


def bytes_on_disk(root: paths.PathLike) -> int:
    """The bytes of all files in a folder of checkpoints, also of what failed saves left.

    A file that several steps share, which has several names, counts once. Object storage does not
    say the size of each object without a request for it: there, the objects that hold arrays are
    counted, by the sizes in their names.

    Raises:
        StorageError: the storage failed.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://usage/step_1", {"w": np.zeros(1000)})
        >>> bytes_on_disk("memory://usage")
        8000
    """
    location = paths.resolve(root, whole=True)
    if location.is_local:
        return _bytes_below(location.path)
    with errors.reading(location):
        files = files_by_folder(location, attempt_folders.FOLDER, paths.context()).values()
    names = (file.name.rpartition("/")[2] for folder_files in files for file in folder_files)
    return sum(nbytes for _, nbytes in filter(None, map(data_files.written_in, names)))


def _bytes_below(top: str) -> int:
    """The bytes of the files in a local folder, at any depth; not through links."""
    sizes = dict[object, int]()
    for folder, _, names in os.walk(top):
        for path in (os.path.join(folder, name) for name in names):
            with suppress(OSError):  # it was removed meanwhile
                facts = os.lstat(path)
                has_names = facts.st_nlink > 1
                sizes[(facts.st_dev, facts.st_ino) if has_names else path] = facts.st_size
    return sum(sizes.values())
