"""The index of Hugging Face folders: which file has which tensor."""

from __future__ import annotations

import json

from unickpt.foreign.files import Files
from unickpt.quoting import quoted

_MOST_INDEX = 100_000_000


def weight_map(files: Files, index: str, suffixes: tuple[str, ...]) -> dict[str, str]:
    """The file of each tensor, by its name.

    Arguments:
        files: the folder.
        index: the file that says it.
        suffixes: of the files that it may name, which are in the same folder.

    Raises:
        CheckpointCorrupt: it is damaged.
        Failed: the storage failed.
    """
    size = files.size(index)
    if size is not None and size > _MOST_INDEX:
        raise files.damaged(f"{index} has {size} bytes, too many")
    try:
        found = json.loads(files.tail(index, _MOST_INDEX))["weight_map"]
        names = {str(name): str(file) for name, file in found.items()}
        for name in (*names, *names.values()):
            name.encode()  # JSON can hold half a character, which is no text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise files.damaged(f"{index} is damaged: {error!r}") from error
    for file in names.values():
        if "/" in file or not file.endswith(suffixes):
            raise files.damaged(f"{index} names the file {quoted(file)}")
    return names
