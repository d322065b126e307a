"""Lack of room on a disk, in words: how much a save needed, and how much was free."""

from __future__ import annotations

import errno
from contextlib import suppress

from unickpt.quoting import size_text
from unickpt.storage import local_folders
from unickpt.storage.errors import Failed
from unickpt.storage.locations import Location


def room_text(location: Location, error: Failed, needed: int, partial: str = "") -> str:
    """For errors: how much room was needed and free, if a lack of room is the cause.

    Arguments:
        location: the folder that was being written.
        error: the failure.
        needed: bytes to write.
        partial: the path of a folder with partial output, which is removed after a failure.
    """
    if not location.is_local or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    with suppress(OSError):
        free = size_text(local_folders.free_bytes(location.path, partial))
        text = f"; this process has {size_text(needed)} to write, and {free} were free before"
        if error.errno == errno.EDQUOT:
            text += ", but the quota of this user or project is used up"
        return f"{text}. Remove files that you do not need, or write to another disk"
    return ""
