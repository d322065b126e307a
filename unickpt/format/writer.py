"""The protocol that every format fulfils into which checkpoints are exported."""

from __future__ import annotations

from typing import Protocol

from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.format.index import ArrayEntry, Index


class Writer(Protocol):
    """Writes one checkpoint of another format. Its methods are called one after another."""

    def begin(self, index: Index) -> None:
        """Prepares the destination.

        Arguments:
            index: all that is going to be written; its layouts and chunks are those of the source.

        Raises:
            UnsupportedLeaf: the format cannot hold something; nothing was written.
            CheckpointExists: the destination is in use.
        """

    def write(self, entry: ArrayEntry, box: Box, data: Array) -> None:
        """Writes a box of an array. The boxes of an array come in row-major order, cover it exactly
        once, and are as large as the budget of the export allows."""

    def finish(self) -> None:
        """Completes the checkpoint; until then, a reader must not take it for one."""

    def discard(self) -> None:
        """Removes what was written, after an error."""
