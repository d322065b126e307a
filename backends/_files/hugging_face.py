"""The index of Hugging Face folders: which file has which tensor."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from unickpt.extend import Files, quoted

T = TypeVar("T")
_MOST_INDEX = 100_000_000


class _WeightIndex(msgspec.Struct):
    weight_map: dict[str, str]


def decoded(files: Files, file: str, kind: type[T], most: int) -> T:
    """What a file of JSON says, of at most so many bytes.

    Raises:
        CheckpointCorrupt: it is damaged, too large, or not of the kind.
        Failed: the storage failed.
    """
    data = files.tail(file, most + 1)
    if len(data) > most:
        raise files.damaged(f"{file} has more than {most} bytes, too many")
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise files.damaged(f"{file} is damaged: {error}") from error


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
    names = decoded(files, index, _WeightIndex, _MOST_INDEX).weight_map
    for file in names.values():
        if "/" in file or not file.endswith(suffixes):
            raise files.damaged(f"{index} names the file {quoted(file)}")
    return names
