"""Arrays of NumPy one after the other, as Equinox writes the leaves of a tree (`.eqx`).

Sources: equinox/_serialisation.py (`tree_serialise_leaves`), and jax.numpy.save, which writes
bfloat16 as two bytes of no type. Equinox's documentation puts a line of JSON before the arrays.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from unickpt.backends._files import file_choice
from unickpt.backends._files.file_choice import open_kind
from unickpt.backends._files.headers import Cursor, size_of
from unickpt.backends._files.tree_tables import table_of_tree
from unickpt.backends.numpy.npz import MAGIC, MOST_HEADER, parsed
from unickpt.extend import Files, RangeReader, Reader, TensorSource, reading

_SUFFIX = ".eqx"
_MOST_LINE = 16 << 20

HINTS: Collection[str] = ()


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens a file of arrays without names; None if there is none.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: a leaf is no array, or of a dtype that unickpt lacks.
        StorageError: the storage failed.
    """

    if files.single is not None:
        with reading(files.location):
            return _open(files, files.single)
    return open_kind(files, file_choice.EQUINOX, lambda chosen: _open(files, chosen.names[0]))


class EquinoxReader(RangeReader):
    """The leaves of a file, a list."""

    format = "equinox"


def _open(files: Files, name: str) -> Reader | None:
    head, is_named = files.head(name), name.endswith(_SUFFIX)
    has_line = head[:6] != MAGIC and (is_named or b"\n" + MAGIC in head)
    if not (has_line or head[:6] == MAGIC):
        return None
    cursor = Cursor(files, name)
    metadata = _hyperparameters(cursor) if has_line else {}
    leaves: list[TensorSource] = []
    size = size_of(files, name)
    while cursor.at < size:
        begin = cursor.at
        start = cursor.take(min(size - begin, MOST_HEADER + 12))
        if len(leaves) == 1 and not (is_named or has_line) and start[:6] != MAGIC:
            return None  # a single array, and whatever is behind it
        label = f"{files.location}: {name}: leaf {len(leaves)} at byte {begin}"
        header = parsed(start, label, void="bfloat16")
        leaves.append(header.source(name, begin))
        cursor.at = begin + header.length + leaves[-1].nbytes
    if len(leaves) == 1 and not (is_named or has_line):
        return None
    if cursor.at > size:
        raise cursor.damaged(
            f"ends at byte {size}, within its leaf {len(leaves) - 1}, which ends at {cursor.at}"
        )
    table = table_of_tree(
        files, leaves, TensorSource, lambda table, leaf: table.add(leaf.name, leaf.value)
    )
    return EquinoxReader(files, table.index(metadata), table.boxes)


def _hyperparameters(cursor: Cursor) -> Mapping[str, Any]:
    """The line of JSON before the arrays."""
    line = cursor.line(_MOST_LINE)
    try:
        return {"hyperparameters": json.loads(line, parse_constant=str)}
    except (ValueError, RecursionError) as error:
        raise cursor.damaged(
            f"begins neither with an array of NumPy nor with a line of JSON: {error}"
        ) from error
