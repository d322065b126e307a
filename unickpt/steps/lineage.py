"""Lineage: which versions a save into the local tier replaced and followed. It needs no clocks.

A version of a step is one commit of it. Its name is the digest of its manifest, which is the same
in every copy of the step. Before its commit, a save into the local tier records which versions of
its step it supersedes and which versions of other steps it follows; after its copy to the root is
committed, that is recorded as well. The records are in the attempt's folder, so they are removed
with that version.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from unickpt.storage import database
from unickpt.storage.locations import Location

_NOTE, _COPIED = "lineage", "copied"


@dataclass(frozen=True)
class Lineage:
    """What a version of a step in the local tier replaced and followed, by the names of versions.

    Arguments:
        supersedes: the earlier versions of the same step, oldest first.
        follows: when it was saved, the newest version in the root, and those of later steps in the
            local tier; None if that was not recorded.
        copied: whether its copy to the root was committed.
    """

    supersedes: tuple[str, ...] = ()
    follows: frozenset[str] | None = None
    copied: bool = False


def record(location: Location, attempt: str, lineage: Lineage, *, fsync: bool) -> None:
    """Records the lineage of an attempt, which counts if it is committed.

    Arguments:
        location: of the step.
        attempt: its name.
        lineage: what it supersedes and follows.
        fsync: whether the record must survive a power failure.

    Raises:
        Failed: the storage failed.
    """
    data = {"supersedes": lineage.supersedes, "follows": sorted(lineage.follows or ())}
    _write(location, attempt, _NOTE, json.dumps(data).encode(), fsync)


def record_copied(location: Location, attempt: str, *, fsync: bool) -> None:
    """Records that the copy of an attempt to the root is committed. Raises as `record`."""
    _write(location, attempt, _COPIED, b"", fsync)


def recorded(location: Location, attempt: str) -> Lineage:
    """The lineage of an attempt, as far as it was recorded.

    Raises:
        Failed: the storage failed.
    """
    notes = _notes(location, attempt).store(database.context())
    copied = notes.read(_COPIED).result().state == "value"
    read = notes.read(_NOTE).result()
    try:
        found = json.loads(read.value) if read.state == "value" else {}
        return Lineage(tuple(map(str, found["supersedes"])), frozenset(found["follows"]), copied)
    except (ValueError, KeyError, TypeError, RecursionError):
        return Lineage(copied=copied)  # missing, or damaged and treated as missing


def _write(location: Location, attempt: str, name: str, data: bytes, fsync: bool) -> None:
    notes = _notes(location, attempt)
    notes.store(database.context(fsync=fsync)).write(name, data).result()
    if fsync:
        notes.sync(location)


def _notes(location: Location, attempt: str) -> Location:
    return location.child(f"processes/{attempt}/notes")
