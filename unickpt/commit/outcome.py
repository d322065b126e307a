"""Outcomes: what became of an attempt, for a process that has not seen it; and the errors of those
that cannot succeed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import tensorstore as ts

from unickpt.commit.messages import Notes, Totals
from unickpt.errors import SaveConflict, StorageError
from unickpt.format import index_json
from unickpt.format.index import INDEX_KEY
from unickpt.frameworks.process_group import saved_apart
from unickpt.storage.database import Database
from unickpt.storage.locations import Location

_MOST_REPLACED = 16


NotesOf = Callable[[str], Notes]
"""The notes of an attempt at the same location, by its name."""


def committed(
    location: Location, context: ts.Context, root: str, name: str, notes_of: NotesOf
) -> Totals | None:
    """What an attempt committed; None if the root is that of another job.

    Arguments:
        location: the checkpoint's folder.
        context: the TensorStore context of this save.
        root: the digest of the root's manifest, which is not that of before the attempt.
        name: of the attempt.
        notes_of: see `NotesOf`.
    """
    note = notes_of(name).announced()
    if note is not None and note.root == root:
        return note.totals
    # A network file system may not show the note yet. The root itself is conclusive.
    data = Database(location, context).reader().read(INDEX_KEY)
    index = index_json.decode(data or b"", str(location))
    if index.attempt == name:
        return Totals.from_index(index)
    note = notes_of(index.attempt).announced()
    if note is not None and name in note.replaced:  # another job has replaced it since
        return note.replaced[name]
    return None


def replaced(location: Location, root: str, notes_of: NotesOf) -> dict[str, Totals]:
    """The totals of the last commits here, by attempt, for processes that have not seen theirs.

    Only of those that were announced; in the others no process waits.

    Arguments:
        location, notes_of: as for `committed`.
        root: the digest of the root's manifest that is about to be replaced.
    """
    from unickpt.commit import version

    with suppress(Exception):  # without it, such a process reports a conflict
        root_version = version.version_at(location)
        if root_version is not None and root_version.digest == root and root_version.attempt:
            note = notes_of(root_version.attempt).announced()
            if note is not None:
                totals_by_attempt = {**note.replaced, root_version.attempt: note.totals}
                return dict(list(totals_by_attempt.items())[-_MOST_REPLACED:])
    return {}


def conflict(location: Location, when: str) -> SaveConflict:
    """The error that another job has committed at the same path.

    Arguments:
        location: the checkpoint's folder.
        when: as "during this save".
    """
    return SaveConflict(f"{location}: another job committed here {when}{saved_apart()}")


def gone(location: Location) -> StorageError:
    """The error that the files of an attempt are gone."""
    return StorageError(
        f"{location}: the files written for this checkpoint are gone; the folder was removed "
        f"during the save{saved_apart()}"
    )
