"""The base of a save: the earlier checkpoint whose chunks are not written again."""

from __future__ import annotations

import logging
from collections.abc import Callable

from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    StorageError,
    UnsupportedFormat,
)
from unickpt.format.index import Index
from unickpt.options import SaveOptions
from unickpt.reuse.base import FAULTY, Base, How, open_base
from unickpt.saving.describe import Description
from unickpt.storage import paths
from unickpt.storage.locations import Location
from unickpt.write_filter import Selection

_log = logging.getLogger("unickpt")


def open_for(
    description: Description,
    options: SaveOptions,
    location: Location,
    folder: Location,
    budget_bytes: int,
    asked: paths.PathLike | None,
    read: Callable[[Index | None], None] | None = None,
) -> tuple[Base | None, Selection | None]:
    """Opens the base of a save; None if it has none, or that is damaged, which is logged.

    Arguments:
        description, options, location: of the save.
        folder: in which this process writes.
        budget_bytes: memory to compare with.
        asked: where the base is whose equal chunks are taken; None if only what this save leaves
            out is taken.
        read: called with the index of the base, or with None if it cannot be read.

    Returns:
        Also which units the save writes, with the checkpoint that has the others.

    Raises:
        CheckpointNotFound, InvalidPath: there is none where `SaveOptions.base` says.
        StorageError: it is not there, but has what this save does not write.
    """
    selection, unchanged = description.selection, description.unchanged
    bases = [] if selection is None else selection.earlier
    compare, patch = options.reuse == "compare", options.reuse == "patch"
    how = How(compare, patch, budget_bytes, options.kept_cost, chained=bool(bases))
    paths_of: list[paths.PathLike] = [base.path for base in bases]
    found = None
    for path in paths_of or ([] if asked is None else [asked]):
        try:
            found = open_base(
                *(paths.resolve(path), location, folder, description.index.compression),
                how=how,
                fsync=options.fsync,
                needed=bool(bases) or unchanged is not None,
                read=read,
            )
        except (CheckpointCorrupt, CheckpointNotFound, UnsupportedFormat, StorageError) as error:
            if type(error) is CheckpointNotFound and options.base is not None:
                raise
            # A training job must not stop because an older checkpoint is damaged, or gone.
            _log.warning(FAULTY, path, error)
            if read is not None:
                read(None)
        if selection is None or found is None:
            continue
        same = selection.on(found.index.attempt)
        if same is not None:  # if the save before has failed, of the one before that
            selection = same
            break
    if selection is not None:
        selection.check(None if found is None else found.index, location)
    if unchanged is not None:
        unchanged.check_base(None if found is None else found.index, location)
    return found, selection
