"""The checkpoints that borrow chunks from a sibling checkpoint, which must outlive them."""

from __future__ import annotations

from collections.abc import Sequence

import tensorstore as ts

from unickpt.commit import version
from unickpt.errors import CheckpointNotFound, UnickptError
from unickpt.format import borrowed, ocdbt_reader
from unickpt.format.index import BaseEntry
from unickpt.storage.locations import Location, folders_with
from unickpt.storage.ocdbt import MANIFEST


def mark(location: Location, bases: Sequence[BaseEntry], context: ts.Context) -> None:
    """Notes in each base that a checkpoint is about to borrow from it, and checks that it is there.

    Arguments:
        location: of the checkpoint that is about to be committed.
        bases: from which it borrows.
        context: for the storage.

    Raises:
        Failed: a base is gone, or the storage failed.
    """
    for base in bases:
        base_version = version.version_of(borrowed.pinned(location, base, context).manifest or b"")
        base_location = borrowed.sibling(location, base.name)
        borrowed.mark(base_location, base_version.attempt, borrowed.name_of(location), context)
        borrowed.pinned(location, base, context)  # the base may have been removed before the mark


def list_borrowers(location: Location, context: ts.Context) -> list[str]:
    """The names of the checkpoints that borrow from one.

    Raises:
        Failed: the storage failed.
    """
    base_version = version.version_at(location)
    if base_version is None:
        return []
    marked = borrowed.marked(location, base_version.attempt, context)
    names = [name for name in sorted(marked) if _borrows(location, name)]
    return names or _renamed(location, marked, context)


def need_retired(location: Location, digest: str, context: ts.Context) -> bool:
    """Whether a checkpoint borrows from one that was retired.

    Arguments:
        location: its former place.
        digest: of its manifest.
        context: for the storage.

    Raises:
        Failed: the storage failed.
    """
    manifest = borrowed.retired_manifest(location, digest, context)
    if manifest is None:
        return False
    names = borrowed.marked(location, version.version_of(manifest).attempt, context)
    # The newest of them is probably there, so the others are not read.
    newest_first = sorted(names, key=lambda name: (len(name), name), reverse=True)
    return any(_borrows(location, name, digest) for name in newest_first) or bool(
        _renamed(location, names, context, digest)
    )


def _renamed(
    base: Location, marked: Sequence[str], context: ts.Context, digest: str | None = None
) -> list[str]:
    """The siblings of a checkpoint that borrow from it, but had another name when they were saved:
    on local disks, people rename checkpoints to keep them.

    Arguments:
        base: the other one.
        marked: the names of those that borrowed from it; not read again.
        context: for the storage.
        digest: as for `_borrows`.
    """
    parent = base.parent
    if not marked or not base.is_local or parent is None:
        return []
    candidates = set(folders_with(parent, MANIFEST, context)) - {".", *marked}
    return [name for name in sorted(candidates) if _borrows(base, name, digest)]


def _borrows(base: Location, name: str, digest: str | None = None) -> bool:
    """Whether a checkpoint borrows from a sibling, or cannot be read now.

    Arguments:
        base: the other one.
        name: of the folder of the first.
        digest: of the manifest of the other one, if only that counts.
    """
    try:
        reader = ocdbt_reader.open(borrowed.sibling(base, name))
    except CheckpointNotFound:
        return False
    except UnickptError:
        return True  # it cannot be read now, and may need the other one
    if reader is None:
        return False
    bases = [entry for entry in reader.index.bases if entry.name == borrowed.name_of(base)]
    return any(digest in (None, entry.manifest) for entry in bases)
