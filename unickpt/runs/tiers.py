"""Two tiers: checkpoints are committed to fast storage first, and copied from there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from unickpt.commit.root import Root
from unickpt.commit.version import Version
from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    SaveConflict,
    StorageError,
    UnickptError,
)
from unickpt.format import ocdbt_reader
from unickpt.runs.lease import Lease
from unickpt.runs.step_folder import Steps
from unickpt.storage import contexts, errors, paths
from unickpt.storage.errors import Failed
from unickpt.storage.kvstore import Future, KvStore
from unickpt.storage.locations import Location
from unickpt.threads import Window
from unickpt.tools.verification import verify_opened

_log = logging.getLogger("unickpt")
_AT_ONCE = 4
# Messages between the processes of a save, next to the databases of an attempt.
_TALK = (b"records/", b"notes/")


class Newer(Enum):
    """Which tier has the current version of a step."""

    SAME = "both have the same one"
    LOCAL = "the local tier"
    ROOT = "the root"


@dataclass(frozen=True)
class Standing:
    """The versions of a step in both tiers.

    Arguments:
        local, root: the committed versions, if any.
        newer: which of them is current.
    """

    local: Version | None
    root: Version | None
    newer: Newer

    @property
    def fault(self) -> str:
        """What is wrong with the local version, where that of the root, or none, counts."""
        if self.root is None:
            return "stale: another run removed the step, or went on from an earlier one,"
        is_whole = self.local is not None and self.local.attempt
        return "stale: another run replaced the step" if is_whole else "damaged; it is whole"

    @property
    def is_abandoned(self) -> bool:
        """Whether only the local tier has the step, and it does not count."""
        return self.local is not None and self.root is None and self.newer is Newer.ROOT


def compare(local: Steps, root: Steps, step: int) -> Standing:
    """Finds the current one of two versions of a step by what each superseded.

    The local version is current if it superseded the root's, or if the root's is damaged. Otherwise
    another job replaced the root's version, and the local one is stale. Where the root has none,
    the local one is current unless another job removed it from the root or went on from an earlier
    step there.

    Raises:
        StorageError: a storage failed.
    """
    while True:
        found = _compare(local, root, step)
        # A save may have replaced the local version while its note was read.
        if found.newer is Newer.ROOT and local.version(step) != found.local:
            continue
        # And its copy may have been committed.
        if not found.is_abandoned or root.version(step) is None:
            return found


def _compare(local: Steps, root: Steps, step: int) -> Standing:
    here, there = local.version(step), root.version(step)
    if here is None:
        newer = Newer.ROOT
    elif there is None:
        newer = Newer.ROOT if _is_abandoned(local, root, step, here) else Newer.LOCAL
    elif here.name == there.name:
        newer = Newer.SAME
    elif there.name in local.lineage(step, here).supersedes:
        newer = Newer.LOCAL
    elif damage := root.damage(step):
        _log.warning("%s; the version in %s replaces it", damage, local.path(step))
        newer = Newer.LOCAL
    else:
        newer = Newer.ROOT
    return Standing(here, there, newer)


def _is_abandoned(local: Steps, root: Steps, step: int, version: Version) -> bool:
    """Whether a version that the root lacks was removed there, or another job left it behind.

    It is not abandoned if it follows the newest step of the root, or if a step that is in both
    tiers follows it. A root without any step says nothing: its storage may be lost, or not mounted.
    """
    lineage = local.lineage(step, version)
    newest = root.newest()
    if newest is None:
        return False
    if lineage.copied:
        return True
    if lineage.follows is None or newest[1].name in lineage.follows:
        return False
    for later in set(root.committed()) & set(local.committed()):
        own = local.version(later)
        if own is None or own != root.version(later):
            continue
        if version.name in (local.lineage(later, own).follows or ()):
            return False
    return True


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
            in_flight, session: see `Steps.remove_debris`.

        Raises:
            SaveConflict: another job holds the lease.
            StorageError: the storage failed.
        """
        self.lease.take()
        if self._is_clean or not self.lease.is_settled:
            return
        try:
            self.remove_debris(in_flight, session)
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
            root = Root(destination, contexts.context())
            found = root.read()
            if found.digest != (replaced.name if replaced else ""):
                raise SaveConflict(f"{destination}: another job committed here during the copy")
        except Failed as error:
            raise errors.writing_failed(error, where) from error
        try:
            _copy_attempt(origin, destination, version.attempt, budget_bytes)
            _check_copy(origin, destination, version.manifest)
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


def _copy_attempt(origin: Location, destination: Location, name: str, budget_bytes: int) -> None:
    """Copies the databases of an attempt."""
    context = contexts.context()
    source, copied = (place.child(f"processes/{name}") for place in (origin, destination))
    reader, writer = source.store(context), copied.store(context)
    keys = sorted(key.decode() for key in reader.list().result() if not key.startswith(_TALK))
    _copy(keys, reader, writer, budget_bytes)
    for folder in sorted({key.rpartition("/")[0] for key in keys}):
        copied.child(folder).sync(destination)


def _copy(keys: list[str], reader: KvStore, writer: KvStore, budget_bytes: int) -> None:
    window = Window(budget_bytes, _AT_ONCE)
    try:
        for key in keys:
            read = reader.read(key).result()
            if read.state != "value":
                raise CheckpointCorrupt(f"its file {key!r} is missing")
            window.make_room(len(read.value))
            window.add(len(read.value), partial(_wait, writer.write(key, read.value)))
        window.drain()
    finally:
        _settle(window)


def _settle(window: Window) -> None:
    """Waits for pending writes after an error, which could otherwise overwrite later ones."""
    while True:
        with suppress(Failed):
            if not window.wait_oldest():
                return


def _wait(written: Future[Any]) -> None:
    written.result()


def _check_copy(origin: Location, destination: Location, manifest: bytes) -> None:
    """Reads a copy, whose manifest is not written yet, and checks it against its digests."""
    damage = _damage(destination, manifest)
    if damage:
        at_origin = _damage(origin, manifest)
        if at_origin:
            raise CheckpointCorrupt(f"it is damaged: {at_origin}")
        raise StorageError(f"{destination}: what was written reads differently: {damage}")


def _damage(place: Location, manifest: bytes) -> str:
    """The damage of the data at a location to which a manifest refers; empty if none."""
    context = contexts.context()
    draft = place.with_manifest(manifest, context)
    try:
        opened = partial(ocdbt_reader.open_pinned, draft, context)
        report = verify_opened(place.url, opened, behind=True)
    except CheckpointNotFound as error:
        return str(error)
    return "; ".join(map(str, report.damage[:3]))
