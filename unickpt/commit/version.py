"""Versions: which commit a location holds, known by the digest of its manifest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from unickpt.storage import contexts
from unickpt.storage.database import Database, digest_of
from unickpt.storage.errors import Failed
from unickpt.storage.locations import Location


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
        return digest_of(self.manifest)


def version_at(location: Location) -> Version | None:
    """The version that is committed at a location now, if any; costs one small read.

    Raises:
        Failed: the storage failed.
    """
    database = Database(location, contexts.context())
    read = database.read_manifest()
    if read.state != "value":
        return None
    return Version(read.value, _attempt(database.with_manifest(read.value)))


def _attempt(database: Database) -> str:
    """The attempt whose `processes/<attempt>/root/` holds the root of the B-tree."""
    try:
        root_node = database.facts().root
    except Failed:
        return ""
    parts = root_node.path.split("/") if root_node is not None else []
    is_own = len(parts) == 4 and (parts[0], parts[2]) == ("processes", "root")
    return parts[1] if is_own else ""
