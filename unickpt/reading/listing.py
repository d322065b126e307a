"""Listing: the checkpoints directly below a folder, in any storage."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import quote

from unickpt.errors import CheckpointNotFound, StorageError
from unickpt.storage import contexts, errors, locations
from unickpt.storage.kvstore import Failed
from unickpt.storage.locations import Location
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


def checkpoints_below(root: locations.Path) -> list[Listed]:
    """The committed checkpoints in a folder, and the folder itself if it is one.

    Only looks at names; use `unickpt.open` or `verify` to check a checkpoint.

    Arguments:
        root: a local path or a URL (file, memory, s3, gs), or a whole bucket.

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
    location = locations.resolve(root, whole=True)
    names = _local_names(location) if location.is_local else _stored_names(location)
    return [Listed(name, _path(location, name)) for name in sorted(names, key=natural)]


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that compares numbers within names as numbers.

    Example:
        >>> sorted(["step_10", "step_9", "best"], key=natural)
        ['best', 'step_9', 'step_10']
    """
    pieces = re.split(r"([0-9]{1,18})", text)
    return tuple((0, int(p), p) if p.isdigit() and p.isascii() else (1, 0, p) for p in pieces)


def _local_names(location: Location) -> list[str]:
    folder = location.spec["path"]
    names = []
    try:
        if _holds_manifest(folder):
            names.append(".")
        with os.scandir(folder) as entries:
            names += [e.name for e in entries if e.is_dir() and _holds_manifest(e.path)]
    except FileNotFoundError:
        raise CheckpointNotFound(f"no directory at {location}") from None
    except OSError as error:
        raise StorageError(f"{location}: the storage failed: {error}") from error
    return names


def _holds_manifest(folder: str) -> bool:
    return os.path.lexists(os.path.join(folder, MANIFEST))


def _stored_names(location: Location) -> list[str]:
    try:
        listed = location.store(contexts.context()).list().result()
    except Failed as error:
        raise errors.translate(error, str(location)) from error
    names = []
    for key in listed:
        folder, _, file = key.decode(errors="replace").rpartition("/")
        if file == MANIFEST and "/" not in folder:
            names.append(folder or ".")
    return names


def _path(location: Location, name: str) -> str:
    if name == ".":
        return str(location)
    if location.is_remote:
        name = quote(name)  # `resolve` unquotes URLs, but not paths and memory://
    return f"{location}/{name}" if location.is_local else f"{location.url}{name}"
