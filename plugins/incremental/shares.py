"""How a checkpoint refers to values of its base: found values and taken ones."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from unickpt.extend import ArrayEntry, BaseEntry, ChunkValue, DataReference, Part


@dataclass(frozen=True)
class ValueSource:
    """Where a value of a chunk is.

    Arguments:
        value: which, in the base or in one of its own bases.
        at: the file and the bytes; or the bytes of a value in the B-tree.
        of: the checkpoint next to the new one that has it, as the new one will name it.
    """

    value: ChunkValue
    at: DataReference | bytes
    of: BaseEntry | None = None

    @property
    def unit(self) -> Hashable:
        """The unit that stays alive for it: a file, or the content of a B-tree's nodes."""
        return self.of, self.at.path if isinstance(self.at, DataReference) else ""

    @property
    def nbytes(self) -> int:
        """Of the value."""
        return self.at.length if isinstance(self.at, DataReference) else len(self.at)

    @property
    def end(self) -> int:
        """After its last byte in the file."""
        return self.at.offset + self.at.length if isinstance(self.at, DataReference) else 0


Chunk = tuple[ArrayEntry, Part, int]
"""The array, the part, and the chunk's number in it."""
Places = tuple[ValueSource, ...]
"""Of a whole chunk, or of the full chunk and the patches of a patched one."""
