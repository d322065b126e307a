"""The attempts in a checkpoint's folder: the one that made the checkpoint, and remains.

Each attempt has a folder of its own, `processes/<attempt>/`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress

import tensorstore as ts

from unickpt.commit import borrowers, version
from unickpt.errors import SaveConflict, StorageError, UnickptError
from unickpt.format import borrowed
from unickpt.format.refusals import refuse_unknown
from unickpt.quoting import first_few
from unickpt.reading import checkpoint
from unickpt.storage import errors, local_folders
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST, RETIRED

_log = logging.getLogger("unickpt")
FOLDER = "processes"


class Needed(SaveConflict):
    """A checkpoint was not removed, because others borrow from it.

    Arguments:
        location: of the checkpoint.
        borrowers: the names of the others.
    """

    def __init__(self, location: Location, borrowers: Sequence[str]) -> None:
        super().__init__(
            f"{location} has chunks of {first_few(borrowers)}, which did not write them again; "
            "remove these first"
        )


class Unremoved(StorageError):
    """A checkpoint was removed, but some of its files could not be removed.

    Arguments:
        location: of the checkpoint.
        attempts: the folders that are left.
    """

    def __init__(self, location: Location, attempts: Sequence[str]) -> None:
        super().__init__(
            f"{location}: removed, but files are left in {FOLDER}/{attempts[0]} that could not be"
        )
        self.attempts = attempts


def holds_checkpoint_parts(location: Location, context: ts.Context) -> bool:
    """Whether a folder belongs to a single checkpoint, committed or not."""
    return not location.names(context).isdisjoint({MANIFEST, FOLDER})


def attempts_of_checkpoint(location: Location, context: ts.Context) -> list[str]:
    """The attempt that made a checkpoint; all attempts if it is too damaged to tell."""
    try:
        return [checkpoint.open(str(location)).index.attempt]
    except UnickptError:
        return location.child(FOLDER).folders(context)


def attempts_in_use(location: Location, context: ts.Context) -> list[str]:
    """The same, and attempts of retired checkpoints that have chunks of others.

    Raises:
        Failed: the storage failed.
    """
    return [*attempts_of_checkpoint(location, context), *_retired_attempts(location, context)]


def _retired_attempts(location: Location, context: ts.Context) -> list[str]:
    digests = location.child(RETIRED).folders(context)
    manifests = (borrowed.retired_manifest(location, digest, context) for digest in digests)
    return [version.version_of(manifest).attempt for manifest in manifests if manifest is not None]


def remove_retired(location: Location, digest: str, context: ts.Context) -> bool:
    """Removes a retired checkpoint, unless another one needs it: first its manifest, atomically,
    then its files.

    Returns:
        Whether it is gone.

    Raises:
        UnsupportedFormat: it needs features that this program does not know; nothing was removed.
        Failed: it could not be removed.
    """
    if borrowers.need_retired(location, digest, context):
        return False
    _log.info("removing the remains of %s", location)
    manifest = borrowed.retired_manifest(location, digest, context)
    if manifest is not None:
        refuse_unknown(location, context, manifest)
    location.child(f"{RETIRED}/{digest}").remove(context)
    remove_empty(location.child(RETIRED))
    attempt = "" if manifest is None else version.version_of(manifest).attempt
    used = _retired_attempts(location, context)
    if location.has_file(MANIFEST, context):
        used += attempts_of_checkpoint(location, context)
    remove_attempts(location, [attempt] if attempt and attempt not in used else [], context)
    return True


def remove_attempts(location: Location, attempts: Iterable[str], context: ts.Context) -> None:
    """Removes attempts, and the folder if nothing else is in it.

    Does not touch another attempt, which may begin at the same time.
    """
    for attempt in attempts:
        location.child(f"{FOLDER}/{attempt}").remove(context)
    remove_empty(location)


def remove_empty(location: Location) -> None:
    """Removes the empty folders of a checkpoint without files; object storage has none."""
    for name in (FOLDER, RETIRED, "") if location.is_local else ():
        folder = os.path.join(location.path, name)
        with suppress(OSError):
            if os.path.islink(folder.rstrip("/")):
                break  # the target is not ours
            for entry in os.listdir(folder):
                if entry.endswith(local_folders.LOCK_SUFFIX):
                    os.unlink(os.path.join(folder, entry))
            os.rmdir(folder)


def check_unneeded(location: Location, context: ts.Context) -> None:
    """Checks that a checkpoint may be removed: that this program knows all its features, and that
    no sibling checkpoint borrows from it.

    Raises:
        UnsupportedFormat: names the unknown features.
        Needed: names the borrowers.
        StorageError: the storage failed.
    """
    refuse_unknown(location, context)
    with errors.writing(location):
        names = borrowers.list_borrowers(location, context)
    if names:
        raise Needed(location, names)


def remove_checkpoint(location: Location, context: ts.Context) -> None:
    """Removes a checkpoint: first its manifest, atomically, then its files.

    Does not touch other attempts to save there, which may be in progress. Does not follow symbolic
    links: only removes the link itself.

    Raises:
        UnsupportedFormat: it needs what this program does not know; nothing was removed.
        Needed: others borrow from it; nothing was removed.
        Unremoved: files are left, but no manifest.
        StorageError: it could not be removed.
    """
    check_unneeded(location, context)
    with errors.writing(location):
        if location.link is not None:
            local_folders.unlink(location.path)
            return
        attempt_names = attempts_of_checkpoint(location, context)
        # An index is untrusted.
        attempts = [a for a in attempt_names if "/" not in a and a not in ("", ".", "..")]
        location.store(context).write(MANIFEST, None).result()
        location.sync(location)
        _remove_data(location.child(FOLDER), attempts, context)
        remove_empty(location)
        check_removed(location, attempts, context)


def check_removed(location: Location, attempts: Iterable[str], context: ts.Context) -> None:
    """Checks that nothing is left of attempts, for removals that do not raise their errors.

    Raises:
        Unremoved: something is.
    """
    if location.is_local:
        folder = location.child(FOLDER)
        left = [attempt for attempt in attempts if folder.child(attempt).exists()]
        if left:
            raise Unremoved(location, left)


def _remove_data(folder: Location, attempts: Iterable[str], context: ts.Context) -> None:
    """Removes attempts, or the symbolic links in their place."""
    if folder.link is not None:
        local_folders.unlink(folder.path)
        return
    for entry in local_folders.entries(folder.path) if folder.is_local else ():
        if entry.is_symlink():
            local_folders.unlink(entry.path)
    for attempt in attempts:
        folder.child(attempt).remove(context)
