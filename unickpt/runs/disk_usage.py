"""How many bytes a folder of checkpoints has in its storage."""

from __future__ import annotations

import os
from contextlib import suppress

from unickpt.runs.attempt_folders import FOLDER
from unickpt.storage import data_files, errors, paths
from unickpt.storage.locations import files_by_folder


def bytes_on_disk(root: paths.PathLike) -> int:
    """The bytes of all files in a folder of checkpoints, also of what failed saves left.

    A file that several steps share, which has several names, counts once. Object storage does not
    say the size of each object without a request for it: there, the objects that hold arrays are
    counted, by the sizes in their names.

    Raises:
        StorageError: the storage failed.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://usage/step_1", {"w": np.zeros(1000)})
        >>> bytes_on_disk("memory://usage")
        8000
    """
    location = paths.resolve(root, whole=True)
    if location.is_local:
        return _bytes_below(location.path)
    with errors.reading(location):
        files = files_by_folder(location, FOLDER, paths.context()).values()
    names = (file.name.rpartition("/")[2] for folder_files in files for file in folder_files)
    return sum(
        time_and_bytes[1]
        for name in names
        if (time_and_bytes := data_files.written_in(name)) is not None
    )


def _bytes_below(top: str) -> int:
    """The bytes of the files in a local folder, at any depth; not through links."""
    total, seen = 0, set[tuple[int, int]]()
    for folder, _, names in os.walk(top):
        for name in names:
            with suppress(OSError):  # it was removed meanwhile
                facts = os.lstat(os.path.join(folder, name))
                if facts.st_nlink > 1:
                    if (facts.st_dev, facts.st_ino) in seen:
                        continue
                    seen.add((facts.st_dev, facts.st_ino))
                total += facts.st_size
    return total
