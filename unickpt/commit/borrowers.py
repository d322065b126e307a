"""The checkpoints that borrow chunks from one beside them, which must stay as long as they do."""

from __future__ import annotations

from collections.abc import Sequence

import tensorstore as ts

from unickpt.commit import version
from unickpt.errors import CheckpointNotFound, UnickptError
from unickpt.format import borrowed, ocdbt_reader
from unickpt.format.index import BaseEntry
from unickpt.storage.locations import Location


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
        found = version.version_of(borrowed.pinned(location, base, context).manifest or b"")
        at = borrowed.sibling(location, base.name)
        borrowed.mark(at, found.attempt, borrowed.name_of(location), context)
        borrowed.pinned(location, base, context)  # the base may have been removed until the mark


def of(location: Location, context: ts.Context) -> list[str]:
    """The names of the checkpoints that borrow from one.

    Raises:
        Failed: the storage failed.
    """
    found = version.version_at(location)
    if found is None:
        return []
    names = borrowed.marked(location, found.attempt, context)
    return [name for name in sorted(names) if _borrows(location, name)]


def need_retired(location: Location, digest: str, context: ts.Context) -> bool:
    """Whether a checkpoint borrows from one that was retired.

    Arguments:
        location: where it was.
        digest: of its manifest.
        context: for the storage.

    Raises:
        Failed: the storage failed.
    """
    manifest = borrowed.retired_manifest(location, digest, context)
    if manifest is None:
        return False
    names = borrowed.marked(location, version.version_of(manifest).attempt, context)
    # The newest of them is probably there, and the others are not looked at.
    newest_first = sorted(names, key=lambda name: (len(name), name), reverse=True)
    return any(_borrows(location, name, digest) for name in newest_first)


def _borrows(base: Location, name: str, digest: str | None = None) -> bool:
    """Whether a checkpoint that may borrow from another one still does; from the one with this
    manifest, if it is given."""
    try:
        reader = ocdbt_reader.open(borrowed.sibling(base, name))
    except CheckpointNotFound:
        return False
    except UnickptError:
        return True  # it cannot be read now, and may need the other one
    if reader is None:
        return False
    bases = [each for each in reader.index.bases if each.name == borrowed.name_of(base)]
    return any(digest in (None, each.manifest) for each in bases)
