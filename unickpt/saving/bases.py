"""The base of a save: the earlier checkpoint whose chunks are not written again."""

from __future__ import annotations

import logging

from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    StorageError,
    UnsupportedFormat,
)
from unickpt.reuse.base import FAULTY, Base, How, open_base
from unickpt.saving.describe import Description
from unickpt.saving.options import SaveOptions
from unickpt.storage import paths
from unickpt.storage.locations import Location

_log = logging.getLogger("unickpt")


def open_for(
    description: Description,
    options: SaveOptions,
    location: Location,
    folder: Location,
    budget_bytes: int,
    asked: paths.PathLike | None,
) -> Base | None:
    """Opens the base of a save; None if it has none, or that is damaged, which is logged.

    Arguments:
        description, options, location: of the save.
        folder: in which this process writes.
        budget_bytes: memory to compare with.
        asked: where the base is whose equal chunks are taken; None if only what this save leaves
            out is taken.

    Raises:
        CheckpointNotFound, InvalidPath: there is none where `SaveOptions.base` says.
        StorageError: it is not there, but has what this save does not write.
    """
    selection, unchanged = description.selection, description.unchanged
    base = None if selection is None else selection.base
    path = asked if base is None else base.path
    needed = base is not None or unchanged is not None
    found = None
    if path is not None:
        compare, patch = options.reuse == "compare", options.reuse == "patch"
        how = How(compare, patch, budget_bytes, options.kept_cost, base is not None)
        try:
            found = open_base(
                *(paths.resolve(path), location, folder, description.index.codecs),
                how=how,
                fsync=options.fsync,
                needed=needed,
            )
        except (CheckpointCorrupt, CheckpointNotFound, UnsupportedFormat, StorageError) as error:
            if type(error) is CheckpointNotFound and options.base is not None:
                raise
            # A training job must not stop because an older checkpoint is damaged, or gone.
            _log.warning(FAULTY, path, error)
    if selection is not None:
        selection.check(None if found is None else found.index, location)
    if unchanged is not None:
        unchanged.check_base(None if found is None else found.index, location)
    return found
