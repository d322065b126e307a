"""Lineage notes: the versions that each version of a local step replaced and followed."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from unickpt.commit.messages import parse_note
from unickpt.commit.version import Version, version_at
from unickpt.runs import attempt_folders
from unickpt.storage import errors, paths
from unickpt.storage.locations import Location

_NOTE, _COPIED = "lineage", "copied"


@dataclass(frozen=True)
class Lineage:
    """The versions that a version of a step in the local tier replaced and followed, by name.

    Arguments:
        supersedes: the earlier versions of the same step, oldest first.
        follows: when it was saved, the newest version in the root, and those of later steps in the
            local tier; None if that was not recorded.
        copied: whether its copy to the root was committed.
    """

    supersedes: tuple[str, ...] = ()
    follows: frozenset[str] | None = None
    copied: bool = False


def record(step: Location, attempt: str, lineage: Lineage, *, fsync: bool) -> None:
    """Records the lineage of an attempt, which counts if it is committed.

    Arguments:
        step: its location.
        attempt: its name.
        lineage: the versions that it supersedes and follows.
        fsync: whether the record must survive a power failure.

    Raises:
        StorageError: the storage failed.
    """
    data = {"supersedes": lineage.supersedes, "follows": sorted(lineage.follows or ())}
    with errors.writing(step):
        _write(step, attempt, _NOTE, json.dumps(data).encode(), fsync)


def record_copied(step: Location, version: Version, *, fsync: bool) -> None:
    """Records that the copy of a version to the root is committed, unless it was replaced
    meanwhile. Raises as `record`."""
    with errors.writing(step):
        _write(step, version.attempt, _COPIED, b"", fsync)
        if version_at(step) != version:  # its folder may have been removed before that
            step.child(f"processes/{version.attempt}").remove(paths.context())
            attempt_folders.remove_empty(step)


def read(step: Location, version: Version) -> Lineage:
    """The recorded lineage of a version of a step.

    If its manifest is damaged, so that its attempt is unknown, it counts as superseding the
    versions of all attempts there: reported damage is better than an older version in its place.

    Raises:
        StorageError: the storage failed.
    """
    with errors.writing(step):
        if version.attempt:
            return _recorded(step, version.attempt)
        attempts = sorted(step.child("processes").folders(paths.context()))
        lineages = [_recorded(step, attempt) for attempt in attempts]
        return Lineage(
            tuple(dict.fromkeys(name for lineage in lineages for name in lineage.supersedes))
        )


def _recorded(step: Location, attempt: str) -> Lineage:
    notes = _notes(step, attempt).store(paths.context())
    copied = notes.read(_COPIED).result().state == "value"
    lineage = parse_note(notes.read(_NOTE).result().value, Lineage)
    return replace(lineage or Lineage(), copied=copied)  # damaged is treated as missing


def _write(step: Location, attempt: str, name: str, data: bytes, fsync: bool) -> None:
    notes = _notes(step, attempt)
    notes.store(paths.context(fsync=fsync)).write(name, data).result()
    if fsync:
        notes.sync(step)


def _notes(step: Location, attempt: str) -> Location:
    return step.child(f"processes/{attempt}/notes")
