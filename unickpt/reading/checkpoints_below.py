"""The checkpoints directly below a folder, in any storage."""

from __future__ import annotations

from dataclasses import dataclass

from unickpt.arrays.names import natural
from unickpt.errors import CheckpointNotFound
from unickpt.storage import errors, paths
from unickpt.storage.errors import Failed, MissingFolder
from unickpt.storage.locations import Location, folders_with
from unickpt.storage.ocdbt import MANIFEST


@dataclass(frozen=True)
class Listed:
    """A committed checkpoint in a folder.

    Arguments:
        name: its name within the folder; "." for the folder itself.
        path: what `unickpt.open` takes.
    """

    name: str
    path: str


def checkpoints_below(root: paths.PathLike | Location) -> list[Listed]:
    """The committed checkpoints in a folder, and the folder itself if it is one.

    Checks only names; use `unickpt.open` or `verify` to check a checkpoint.

    Arguments:
        root: a local path or a URL (file, memory, s3, gs), or a whole bucket; or its location.

    Returns:
        In natural order, "step_2" before "step_10".

    Raises:
        CheckpointNotFound: the folder does not exist.
        StorageError: the storage failed.

    Example:
        >>> import unickpt
        >>> for step in (10, 2):
        ...     _ = unickpt.save(f"memory://below/step_{step}", {"step": step})
        >>> [listed.name for listed in checkpoints_below("memory://below")]
        ['step_2', 'step_10']
    """
    location = paths.resolve(root, whole=True)
    try:
        names = folders_with(location, MANIFEST, paths.context())
    except MissingFolder:
        raise CheckpointNotFound(f"no directory at {location}") from None
    except Failed as error:
        paths.resolve(location.url, whole=True)  # InvalidPath, if a file is in its place by now
        raise errors.reading_failed(error, str(location)) from error
    return [Listed(name, _path(location, name)) for name in sorted(names, key=natural)]


def other_folders(root: paths.PathLike) -> list[Listed]:
    """The folders in a folder, and the folder itself, that `checkpoints_below` does not list: they
    may be checkpoints of other systems.

    Raises:
        StorageError: the storage failed.
    """
    location = paths.resolve(root, whole=True)
    context = paths.context()
    try:
        checkpoints = set(folders_with(location, MANIFEST, context))
        names = {".", *location.folders(context)} - checkpoints
    except Failed as error:
        raise errors.reading_failed(error, str(location)) from error
    return [Listed(name, _path(location, name)) for name in sorted(names, key=natural)]


def _path(location: Location, name: str) -> str:
    return str(location) if name == "." else location.name_for_users(name)
