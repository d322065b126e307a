"""Finds and removes what failed and killed saves left in a folder of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import tensorstore as ts

from unickpt.commit.lease import Lease, holder
from unickpt.reading.listing import natural
from unickpt.steps import attempt_folders
from unickpt.steps.remnants import EXPORT, LOCK, REPLACED, Remnant, search
from unickpt.storage import contexts, errors, local_folders, local_locks, paths
from unickpt.storage.errors import Failed
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST
from unickpt.tools import destinations

_LOCK_S = 60.0


@dataclass(frozen=True)
class RemnantSearch:
    """What a folder contains besides committed checkpoints.

    Arguments:
        remnants: what may be removed.
        under_way: what a save may be writing now: everything written less than `RECENT_S` ago, or
            everything while a job holds the lease.
        unknown: remnants whose time of writing is unknown.
        holder: a description of the job that holds the lease on the folder, if any.
    """

    remnants: tuple[Remnant, ...]
    under_way: tuple[Remnant, ...]
    unknown: tuple[Remnant, ...]
    holder: str | None


def find(root: paths.Path) -> RemnantSearch:
    """Searches a folder of checkpoints, or one checkpoint's own folder; changes nothing.

    Arguments:
        root: a local path or a URL, or a whole bucket.

    Raises:
        StorageError: the storage failed.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://remnants/step_1", {"w": np.zeros(3)})
        >>> find("memory://remnants").remnants
        ()
    """
    location = paths.resolve(root, whole=True)
    context = contexts.context()
    try:
        found = sorted(search(location, context), key=lambda remnant: natural(remnant.name))
        owner = holder(_lease_location(location))
    except Failed as error:
        raise errors.reading_failed(error, str(location)) from error
    still = [r for r in found if owner is None and not r.is_recent]
    return RemnantSearch(
        remnants=tuple(r for r in still if r.age_s is not None),
        under_way=tuple(r for r in found if owner is not None or r.is_recent),
        unknown=tuple(r for r in still if r.age_s is None),
        holder=owner,
    )


def clean(root: paths.Path, remnants: Sequence[Remnant]) -> list[Remnant]:
    """Removes remnants that `find` found, if they have not changed since.

    Raises:
        SaveConflict: a job saves into this folder.
        StorageError: the storage failed.

    Returns:
        What was removed.
    """
    location = paths.resolve(root, whole=True)
    lease = Lease(_lease_location(location))
    lease.take()
    removed = []
    try:
        lease.check()
        context = contexts.context()
        now = {remnant.name: remnant for remnant in search(location, context)}
        for remnant in remnants:
            there = now.get(remnant.name)
            if there is None or there.is_recent or not _is_same(there, remnant):
                continue
            if _remove(location, remnant, context):
                removed.append(remnant)
    except Failed as error:
        raise errors.writing_failed(error, str(location)) from error
    finally:
        lease.give_back()
    return removed


def _is_same(a: Remnant, b: Remnant) -> bool:
    return (a.kind, a.files, a.nbytes, a.attempts) == (b.kind, b.files, b.nbytes, b.attempts)


def _lease_location(location: Location) -> Location:
    """The folder whose lease covers this one: for a step, the run's folder."""
    parent = location.parent
    if parent is not None and Lease.was_taken(parent):
        context = contexts.context()
        if attempt_folders.holds_checkpoint_parts(location, context):
            return parent
    return location


def _remove(location: Location, remnant: Remnant, context: ts.Context) -> bool:
    """Removes a remnant; False if it has become a checkpoint meanwhile."""
    if remnant.kind == LOCK:
        location.remove_file(remnant.name, context)
        return True
    if remnant.kind in (EXPORT, REPLACED):
        _remove_of_export(str(location.spec["path"]), remnant)
        return True
    folder = remnant.attempts[0].partition(f"{attempt_folders.FOLDER}/")[0]
    names = [path.rpartition("/")[2] for path in remnant.attempts]
    at = location.child(folder) if folder else location
    with at.manifest_locked(_LOCK_S):  # under which saves commit, after a look at their files
        if at.has_file(MANIFEST, context) and not set(names).isdisjoint(
            attempt_folders.attempts_of_checkpoint(at, context)
        ):
            return False
        for name in names:
            at.child(f"{attempt_folders.FOLDER}/{name}").remove(context)
    at.remove_empty()
    return True


def _remove_of_export(folder: str, remnant: Remnant) -> None:
    """Removes what a killed export wrote, or puts back what it was about to replace."""
    (of,) = remnant.attempts
    with local_locks.locked(folder, f".{of}", _LOCK_S):  # under which exports commit
        if remnant.kind == EXPORT:
            local_folders.remove(os.path.join(folder, remnant.name))
        else:
            destinations.restore(folder, of)
