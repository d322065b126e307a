"""Lineage: which versions of a step a save replaced. It does not depend on clocks.

A version of a step is one commit of it. Its name is the digest of its manifest, which is the same
in every copy of the step. Before its commit, a save into the local tier records which versions it
supersedes. The record is in the attempt's folder, so it is removed with that version.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property

import tensorstore as ts

from unickpt import backends, root
from unickpt.backends import Location
from unickpt.backends.kvstore import Failed
from unickpt.backends.ocdbt import MANIFEST

_NOTE = "supersedes"


@dataclass(frozen=True)
class Version:
    """One commit of a step.

    Arguments:
        manifest: its bytes.
        attempt: the name of the attempt that made it; empty if the manifest is damaged.
    """

    manifest: bytes
    attempt: str

    @cached_property
    def name(self) -> str:
        return root.digest(self.manifest)


def version_at(place: Location) -> Version | None:
    """The version that is committed at a location now, if any; costs one small read.

    Raises:
        Failed: the storage failed.
    """
    context = backends.context()
    read = place.store(context).read(MANIFEST).result()
    if read.state != "value":
        return None
    return Version(read.value, _attempt(place.with_manifest(read.value, context), context))


def _attempt(place: Location, context: ts.Context) -> str:
    """The attempt whose `processes/<attempt>/root/` holds the root of the B-tree."""
    try:
        root_node = place.database_facts(context).root
    except Failed:
        return ""
    parts = root_node.path.split("/") if root_node is not None else []
    is_own = len(parts) == 4 and (parts[0], parts[2]) == ("processes", "root")
    return parts[1] if is_own else ""


def supersede(place: Location, attempt: str, names: list[str], *, fsync: bool) -> None:
    """Records which versions of a step an attempt supersedes, if it is committed.

    Arguments:
        place: of the step.
        attempt: its name.
        names: of the versions, oldest first.
        fsync: whether the record must survive a power failure.

    Raises:
        Failed: the storage failed.
    """
    notes = place.child(f"processes/{attempt}/notes")
    data = json.dumps({"versions": names}).encode()
    notes.store(backends.context(fsync=fsync)).write(_NOTE, data).result()
    if fsync:
        notes.sync(place)


def superseded(place: Location, attempt: str) -> list[str]:
    """The versions of a step that an attempt superseded, oldest first; empty without a record.

    Raises:
        Failed: the storage failed.
    """
    notes = place.child(f"processes/{attempt}/notes").store(backends.context())
    read = notes.read(_NOTE).result()
    if read.state != "value":
        return []
    try:
        return [name for name in json.loads(read.value)["versions"] if isinstance(name, str)]
    except (ValueError, KeyError, TypeError):
        return []  # damaged: treated as missing
