"""Single arrays of NumPy, .npy files, read in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from unickpt.backends._files import file_choice
from unickpt.backends._files.file_choice import open_kind
from unickpt.backends.numpy.npz import MOST_HEADER, parsed
from unickpt.extend import ArrayTable, Files, RangeReader, Reader, name_component

_MOST = MOST_HEADER + 12  # bytes before the elements

HINTS: Collection[str] = ()


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens a file of one array, whose name is the file's; None if there is none.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: it has a dtype that unickpt lacks, such as objects.
        StorageError: the storage failed.
    """

    return open_kind(files, file_choice.NPY, lambda chosen: NpyReader(files, chosen.names[0]))


class NpyReader(RangeReader):
    """The array of a file.

    Arguments:
        files: of the checkpoint.
        file: the name of the file.
    """

    format = "npy"

    def __init__(self, files: Files, file: str) -> None:
        size = files.size(file)
        data = files.whole(file) if size is None else files.read(file, 0, min(size, _MOST))
        header = parsed(data, f"{files.location}: {file}")
        source = header.source(file)
        expected_size = header.length + source.nbytes
        actual_size = len(data) if size is None else size
        if expected_size != actual_size:
            raise files.damaged(f"{file} has {actual_size} bytes, {expected_size} expected")
        table = ArrayTable()
        table.add(name_component(file.removesuffix(".npy")), source)
        super().__init__(files, table.index(), table.boxes)
