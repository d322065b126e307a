"""The storage's failures as errors of unickpt."""

from __future__ import annotations

from unickpt.errors import CheckpointCorrupt, StorageError
from unickpt.storage.kvstore import Failed, without_status


def translate(error: Failed, where: str, *, reading: bool = True) -> Exception:
    """Turns a storage failure into CheckpointCorrupt or StorageError.

    Arguments:
        error: the failure.
        where: the path and the item in it, for the message.
        reading: whether the storage was asked for data of a checkpoint; an error while writing
            never means damaged data.
    """
    if reading and error.is_of_data:
        detail = without_status(str(error))
        return CheckpointCorrupt(f"{where}: stored data is damaged or missing: {detail}")
    return StorageError(f"{where}: the storage failed: {error}")
