"""What a listing of a storage says about a file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoredFile:
    """A file or object.

    Arguments:
        name: below the folder that was listed. It ends in `/` for a folder that is empty or whose
            files were not needed, and in `?` for anything that is no file: a link, a FIFO, a folder
            that was not listed, an unreadable entry.
        nbytes: its size; None if the listing does not say.
        age_s: seconds since it was written; None if the listing does not say.
    """

    name: str
    nbytes: int | None = None
    age_s: float | None = None
