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
        at = borrowed.sibling(location, base.name)
        found = version.version_at(at)
        if found is not None:
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


def _borrows(base: Location, name: str) -> bool:
    """Whether a checkpoint that may borrow from another one still does."""
    try:
        reader = ocdbt_reader.open(borrowed.sibling(base, name))
    except CheckpointNotFound:
        return False
    except UnickptError:
        return True  # it cannot be read now, and may need the other one
    if reader is None:
        return False
    return any(entry.name == borrowed.name_of(base) for entry in reader.index.bases)
