"""Steps: the checkpoints `step_<n>` in one folder, and what crashed jobs left among them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from unickpt import backends, checkpoint, chunks, lineage, remnants
from unickpt.backends import Location
from unickpt.backends.kvstore import Failed
from unickpt.backends.ocdbt import MANIFEST
from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    CheckpointReplaced,
    UnickptError,
)
from unickpt.index import RESERVED
from unickpt.lineage import Version
from unickpt.listing import checkpoints_below

_log = logging.getLogger("unickpt")
_LISTINGS = 50
_NAME = re.compile(r"step_(0|[1-9][0-9]{0,17})")


class Steps:
    """The steps in a folder of any storage.

    Arguments:
        root: a local path or a URL.
    """

    def __init__(self, root: backends.Path) -> None:
        self._root = root
        self.location = backends.resolve(root)
        self._context = backends.context()

    def path(self, step: int) -> str:
        """Where a step is, or will be."""
        return str(self.at(step))

    def at(self, step: int) -> Location:
        return self.location.child(f"step_{step}")

    def committed(self) -> list[int]:
        """All steps that exist, ascending.

        Raises:
            StorageError: the storage failed.
        """
        try:
            names = [listed.name for listed in checkpoints_below(self._root)]
        except CheckpointNotFound:
            return []
        return sorted(_numbers(names))

    def steady(self) -> list[int]:
        """As `committed`, beside another job that commits and removes steps.

        A step can be removed and the next one committed between two looks of one listing, which
        then has neither. So it is made until nothing has changed meanwhile.
        """
        before: tuple[list[int], set[str]] | None = None
        for _ in range(_LISTINGS):
            now = self.committed(), set[str]()
            if self.location.is_local:  # also the folders whose manifests are gone
                now = now[0], set(self.location.folders(self._context))
            if now == before:
                break
            before = now
        return now[0]

    def after(self, step: int) -> int | None:
        """After which step the job went on that saved a step; None if after the newest.

        Raises:
            CheckpointNotFound, CheckpointCorrupt, UnsupportedFormat: it cannot be opened.
            StorageError: the storage failed.
        """
        own = checkpoint.open(self.path(step)).metadata.get(RESERVED)
        found = own.get("after") if isinstance(own, dict) else None
        return found if type(found) is int else None

    def version(self, step: int) -> Version | None:
        """Which version of a step is committed; None where there is none. Costs one small read.

        Raises:
            StorageError: the storage failed.
        """
        with self._asking(step):
            return lineage.version_at(self.at(step))

    def superseded(self, step: int, version: Version) -> list[str]:
        """The names of the versions of a step that one of them superseded, oldest first.

        Raises:
            StorageError: the storage failed.
        """
        with self._asking(step):
            return lineage.superseded(self.at(step), version.attempt)

    def supersede(self, step: int, attempt: str, names: list[str], *, fsync: bool) -> None:
        """Notes which versions of a step an attempt supersedes; see `lineage.supersede`.

        Raises:
            StorageError: the storage failed.
        """
        with self._asking(step):
            lineage.supersede(self.at(step), attempt, names, fsync=fsync)

    def damage(self, step: int) -> str:
        """Why a step that is committed cannot be opened; empty where it can.

        Raises:
            StorageError: the storage failed.
        """
        try:
            checkpoint.open(self.path(step))
        except CheckpointReplaced:
            return ""
        except CheckpointCorrupt as error:
            return str(error)
        except CheckpointNotFound as error:
            return "" if self.version(step) is None else str(error)
        return ""

    def metrics(self, step: int) -> Mapping[str, float]:
        """The metrics that a step was saved with; none where they cannot be read."""
        try:
            found = checkpoint.open(self.path(step)).metadata[RESERVED]["metrics"]
            return {str(name): float(value) for name, value in found.items()}
        except (UnickptError, KeyError, TypeError, ValueError, AttributeError) as error:
            _log.warning("%s: its metrics cannot be read: %s", self.path(step), error)
            return {}

    def remove(self, step: int) -> None:
        """Removes a step: first it is no checkpoint any more, at one stroke, then its files go.

        Another attempt to save this step, which may be under way, is left alone. Symbolic links are
        not followed: of a step that is one, or has one in it, the link alone is removed.

        Raises:
            StorageError: it could not be removed; what is left, `remove_debris` recognises.
        """
        place = self.at(step)
        try:
            if place.link is not None:
                place.unlink()
                return
            attempts = self._attempts(step)
            place.store(self._context).write(MANIFEST, None).result()
            if place.is_local:
                place.sync(place)
            self._remove_attempts(place.child("processes"), attempts)
            place.remove_empty()
        except Failed as error:
            raise chunks.translate(error, str(place), reading=False) from error

    def _remove_attempts(self, folder: Location, attempts: Iterable[str]) -> None:
        """Removes attempts, and symbolic links in place of some, or of all."""
        if folder.link is not None:
            folder.unlink()
            return
        for name in folder.links():
            folder.child(name).unlink()
        for attempt in attempts:
            if "/" not in attempt and attempt not in ("", ".", ".."):  # an index can say anything
                folder.child(attempt).remove(self._context)

    def _attempts(self, step: int) -> list[str]:
        """The attempt that made a step; all attempts, where it is too damaged to tell."""
        return remnants.attempts_of_checkpoint(self.at(step), self._context)

    def check_no_link(self, step: int) -> None:
        """Refuses to save a step where a symbolic link leads elsewhere.

        Raises:
            CheckpointExists: names the link, and where it leads.
        """
        leads = self.at(step).link
        if leads is not None:
            raise CheckpointExists(
                f"{self.path(step)} is a symbolic link to {leads}; a run saves only into its own "
                "folders: remove the link, or save another step"
            )

    def remove_debris(self, in_flight: Iterable[int], session: str) -> None:
        """Removes what crashed saves and deletions left behind.

        Only for the job that has the lease. A step's folder without a manifest is debris, if it
        holds nothing but what a save puts there; in the newest step, so is every attempt but the
        one that was committed.

        Arguments:
            in_flight: steps that this process is saving.
            session: how the names of this job's attempts begin. Another process of the job may be
                further than this one, with a step that is not in flight here.
        """
        committed, spared = self.committed(), set(in_flight)
        names = self.location.folders(self._context)
        for step in sorted(_numbers(names) - set(committed) - spared):
            place = self.at(step)
            attempts = place.child("processes").folders(self._context)
            ours = remnants.is_unfinished(place, self._context)
            if ours and not any(_is_of(name, session) for name in attempts):
                _log.info("removing %s, which a crashed save left behind", place)
                remnants.remove_attempts(place, attempts, self._context)
        if committed and committed[-1] not in spared:
            self.remove_older(committed[-1], session)

    @contextmanager
    def _asking(self, step: int) -> Iterator[None]:
        try:
            yield
        except Failed as error:
            raise chunks.translate(error, self.path(step), reading=False) from error

    def remove_older(self, step: int, session: str = "") -> None:
        """Removes all attempts to save a step but the one that was committed, and those of a
        session; see `remove_debris`. Not in a step that is a symbolic link."""
        if self.at(step).link is not None:
            return
        folder, kept = self.at(step).child("processes"), self._attempts(step)
        for attempt in folder.folders(self._context):
            if attempt not in kept and not _is_of(attempt, session):
                folder.child(attempt).remove(self._context)


def _is_of(attempt: str, session: str) -> bool:
    return bool(session) and attempt.rpartition("-")[0] == session


def _numbers(names: Iterable[str]) -> set[int]:
    matches = (_NAME.fullmatch(name) for name in names)
    return {int(match[1]) for match in matches if match}
