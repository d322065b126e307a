"""Versions: the commit that a location holds, identified by the digest of its manifest."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from unickpt.storage.btree import nodes
from unickpt.storage.database import digest_of
from unickpt.storage.errors import Failed
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST
from unickpt.storage.paths import context

_ROOT = re.compile(r"processes/([^/]+)/root/(?:([0-9a-f]{16})/)?[^/]+", re.DOTALL)
"""The file with the root of the B-tree: the attempt, and the version that it is a copy of."""


@dataclass(frozen=True)
class Version:
    """One commit of a step.

    Arguments:
        manifest: its bytes.
        attempt: the name of the attempt that made it; empty if the manifest is damaged.
        copied: the name of the original version, if this is a copy in other files with its own
            manifest; else empty.
    """

    manifest: bytes
    attempt: str
    copied: str = ""

    @cached_property
    def digest(self) -> str:
        """The digest of its manifest."""
        return digest_of(self.manifest)

    @property
    def name(self) -> str:
        """The name, which all copies of a version share, in whichever files."""
        return self.copied or self.digest


def version_at(location: Location) -> Version | None:
    """The version that is committed at a location now, if any; costs one small read.

    Raises:
        Failed: the storage failed.
    """
    read = location.store(context()).read(MANIFEST).result()
    return version_of(read.value) if read.state == "value" else None


def version_of(manifest: bytes) -> Version:
    """The version of a manifest."""
    try:
        root_node = nodes.manifest(manifest).root
    except Failed:
        return Version(manifest, "")
    match = _ROOT.fullmatch(root_node.path) if root_node is not None else None
    return Version(manifest, match[1], match[2] or "") if match else Version(manifest, "")


def copied_folder(attempt: str, name: str) -> str:
    """The folder for the B-tree of a copy in other files, ending with `/`; it identifies the copy.

    Arguments:
        attempt: that made the version.
        name: of the version.
    """
    return f"processes/{attempt}/root/{name}/"
