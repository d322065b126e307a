"""The attempts to save in a checkpoint's folder: which made the checkpoint, and which are remains.

Each attempt has a folder of its own, `processes/<attempt>/`.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorstore as ts

from unickpt.errors import UnickptError
from unickpt.reading import checkpoint
from unickpt.storage import errors
from unickpt.storage.errors import Failed
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST

FOLDER = "processes"


def holds_checkpoint_parts(location: Location, context: ts.Context) -> bool:
    """Whether a folder belongs to a single checkpoint, committed or not."""
    return not location.names(context).isdisjoint({MANIFEST, FOLDER})


def is_unfinished(location: Location, context: ts.Context) -> bool:
    """Whether a folder without a checkpoint contains only what a save puts there."""
    return location.holds_only(FOLDER, context)


def attempts_of_checkpoint(location: Location, context: ts.Context) -> list[str]:
    """The attempt that made a checkpoint; all attempts if it is too damaged to tell."""
    try:
        return [checkpoint.open(str(location)).index.attempt]
    except UnickptError:
        return location.child(FOLDER).folders(context)


def remove_attempts(location: Location, attempts: Iterable[str], context: ts.Context) -> None:
    """Removes attempts, and the folder if nothing else is in it.

    Does not touch another attempt, which may begin at the same time.
    """
    for attempt in attempts:
        location.child(f"{FOLDER}/{attempt}").remove(context)
    location.remove_empty()


def remove_checkpoint(location: Location, context: ts.Context) -> None:
    """Removes a checkpoint: first its manifest, atomically, then its files.

    Does not touch other attempts to save there, which may be in progress. Does not follow symbolic
    links: only removes the link itself.

    Raises:
        StorageError: it could not be removed; what remains has no manifest.
    """
    try:
        if location.link is not None:
            location.unlink()
            return
        attempts = attempts_of_checkpoint(location, context)
        location.store(context).write(MANIFEST, None).result()
        location.sync(location)
        _remove_data(location.child(FOLDER), attempts, context)
        location.remove_empty()
    except Failed as error:
        raise errors.writing_failed(error, str(location)) from error


def _remove_data(folder: Location, attempts: Iterable[str], context: ts.Context) -> None:
    """Removes attempts, or the symbolic links in their place."""
    if folder.link is not None:
        folder.unlink()
        return
    for name in folder.links():
        folder.child(name).unlink()
    for attempt in attempts:
        if "/" not in attempt and attempt not in ("", ".", ".."):  # an index is untrusted
            folder.child(attempt).remove(context)
