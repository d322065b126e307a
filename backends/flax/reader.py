"""Files of Flax: msgpack with arrays as extensions, read in place.

Sources: flax/serialization.py, and flax/training/checkpoints.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from unickpt.backends._files import file_choice
from unickpt.backends._files.file_choice import FoundFiles, open_kind, weight_map
from unickpt.backends._files.msgpack_files import Elsewhere, scan
from unickpt.backends._files.tree_tables import table_of_tree
from unickpt.extend import (
    ArrayTable,
    Files,
    Leaf,
    RangeReader,
    Reader,
    TensorSource,
    put_nested,
    quoted,
)

HINTS: Collection[str] = ()


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens a file of Flax; None if there is none.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: it contains values that unickpt lacks, or refers to arrays elsewhere.
        StorageError: the storage failed.
    """

    def make(selection: FoundFiles) -> FlaxReader:
        if selection.index is not None:
            return FlaxReader(files, selection.index, _joined(files, selection.index))
        return FlaxReader(files, selection.names[0], scan(files, selection.names[0]))

    return open_kind(files, file_choice.FLAX, make)


def _joined(files: Files, index: str) -> dict[str, Any]:
    """The content of the files that an index names, each leaf from its file."""
    where = weight_map(files, index, file_choice.FLAX.suffixes)
    opened = {file: scan(files, file) for file in sorted({*where.values()})}
    root: dict[str, Any] = {}
    for name, file in where.items():
        keys = name.split("/")
        node = opened[file]
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        if not isinstance(node, TensorSource) or not put_nested(root, keys, node):
            raise files.incomplete(
                f"{index} says that {quoted(name)} is an array in {file}, which does not contain it"
            )
    return root


class FlaxReader(RangeReader):
    """The arrays and plain values of one file.

    Arguments:
        files: of the checkpoint.
        file: the name of the file.
        root: its content, from `scan`.

    Raises:
        UnsupportedFormat: it refers to arrays elsewhere, or has names that unickpt cannot have.
    """

    format = "flax"

    def __init__(self, files: Files, file: str, root: Any) -> None:
        def put(table: ArrayTable, leaf: Leaf) -> None:
            if isinstance(leaf.value, TensorSource):
                table.add(leaf.name, leaf.value)
                return
            raise files.unsupported(
                f"{file}: {quoted(leaf.name)} is not in this file, but elsewhere: "
                f"{quoted(leaf.value.found)}; give the path of the folder that contains both"
            )

        table = table_of_tree(files, root, (TensorSource, Elsewhere), put)
        super().__init__(files, table.index(), table.boxes)
