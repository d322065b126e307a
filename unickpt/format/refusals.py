"""Refuses to replace or remove a checkpoint that needs features this program does not know."""

from __future__ import annotations

from contextlib import suppress

import tensorstore as ts

from unickpt.errors import CheckpointCorrupt
from unickpt.format import index_json
from unickpt.format.index import INDEX_KEY
from unickpt.storage import errors
from unickpt.storage.database import Database
from unickpt.storage.locations import Location


def refuse_unknown(location: Location, context: ts.Context, manifest: bytes | None = None) -> None:
    """Refuses a checkpoint with a format or a feature that this program does not know.

    Does nothing if there is no checkpoint, or one that is too damaged to name its features.

    Arguments:
        location: of the checkpoint.
        context: for the storage.
        manifest: of the checkpoint, if it is not at its place, as for a retired one.

    Raises:
        UnsupportedFormat: names the unknown features, and says what to do.
        StorageError: the storage failed.
    """
    data = None
    with suppress(CheckpointCorrupt), errors.reading(location):
        pinned = Database(location, context, manifest)
        database = pinned if manifest is not None else pinned.pinned()
        data = None if database is None else database.reader().read(INDEX_KEY)
    if data is not None:
        index_json.check_known(bytes(data), str(location))
