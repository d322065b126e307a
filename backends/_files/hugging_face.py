"""The index of Hugging Face folders: which file has which tensor."""

from __future__ import annotations

import msgspec

from unickpt.extend import Files, quoted

_MOST_INDEX = 100_000_000


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


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
    names = files.decoded(index, _Index, _MOST_INDEX).weight_map
    for file in names.values():
        if "/" in file or not file.endswith(suffixes):
            raise files.damaged(f"{index} names the file {quoted(file)}")
    return names
