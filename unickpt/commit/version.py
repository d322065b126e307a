"""Versions: which commit a location holds, known by the digest of its manifest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import tensorstore as ts

from unickpt.commit import root
from unickpt.storage import contexts
from unickpt.storage.errors import Failed
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST


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
    context = contexts.context()
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
