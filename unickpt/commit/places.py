"""Where the values are that a process wrote: what its record says, and the root refers to.

A process looks into its own databases once it has written them, and puts into its record where each
value is. So the coordinator reads one object of each process, and no B-tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unickpt.errors import StorageError
from unickpt.storage.btree.builder import INLINE, PLACE_DTYPE
from unickpt.storage.database import Database

ELSEWHERE = -2
"""Instead of a file: the value is in a checkpoint beside this one."""
Rows = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Places:
    """Where values are.

    Arguments:
        files: the paths of the files with the values, below the process's folder.
        rows: one element of `PLACE_DTYPE` for each value.
        inline: the values that the databases' nodes hold themselves, joined.
    """

    files: tuple[str, ...] = ()
    rows: Rows = field(default_factory=lambda: np.zeros(0, PLACE_DTYPE))
    inline: bytes = b""

    def check(self, elsewhere: Rows) -> None:
        """Checks that the rows refer only to what is there, below the process's folder.

        Arguments:
            elsewhere: the numbers of those rows that refer to nothing, ascending.

        Raises:
            ValueError: they do not.
        """
        file, within = self.rows["file"], self.rows[self.rows["file"] == INLINE]
        if not np.array_equal(np.flatnonzero(file == ELSEWHERE), elsewhere):
            raise ValueError("it does not say where each value is")
        if len(file) and (int(file.min()) < ELSEWHERE or int(file.max()) >= len(self.files)):
            raise ValueError("a value is in a file that is not listed")
        if len(within):
            size = np.uint64(len(self.inline))
            offset, length = within["offset"], within["length"]
            if (length > size).any() or (offset > size - length).any():
                raise ValueError("a value ends after all of them")
        for path in self.files:
            if path.startswith("/") or "\0" in path or ".." in path.split("/"):
                raise ValueError(f"{path[:200]!r} is not a file of the process")


def find(keys: Sequence[str | None], databases: Iterable[tuple[str, Database]]) -> Places:
    """Where values are.

    Arguments:
        keys: of the values; None for one that is elsewhere.
        databases: those that have them, each with the path of its folder below the process's.

    Raises:
        StorageError: one is missing.
        Failed: a database cannot be read.
    """
    at = dict[str | None, int]({None: 0})
    columns = [np.array([(ELSEWHERE, 0, 0)], PLACE_DTYPE)]
    files, inline, where = dict[str, int](), list[bytes](), ""
    nbytes = 0
    for folder, database in databases:
        where = where or str(database)
        for leaf in database.reader().tree.leaves():
            numbers = [files.setdefault(folder + path, len(files)) for path, _ in leaf.files]
            apart = leaf.which >= 0
            rows = np.zeros(len(leaf.keys), PLACE_DTYPE)
            rows["file"] = INLINE
            rows["file"][apart] = np.array(numbers, np.int32)[leaf.which[apart]]
            rows["offset"] = leaf.offsets
            rows["offset"][~apart] += np.uint64(nbytes)
            rows["length"] = leaf.lengths
            inline.append(leaf.inline)
            nbytes += len(leaf.inline)
            first = sum(map(len, columns))
            at.update((key.decode(), first + n) for n, key in enumerate(leaf.keys))
            columns.append(rows)
    try:
        chosen = [at[key] for key in keys]
    except KeyError as error:
        raise StorageError(f"{where}: what was written as {error} is not there") from None
    return Places(tuple(files), np.concatenate(columns)[chosen], b"".join(inline))
