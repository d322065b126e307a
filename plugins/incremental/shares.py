"""How a checkpoint refers to values of its base: what is found there, and what was taken."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from unickpt.extend import ArrayEntry, BaseEntry, ChunkValue, DataReference, Part, Taken


@dataclass(frozen=True)
class ValueSource:
    """Where a value of a chunk is.

    Arguments:
        value: which, in the base or in one of its own bases.
        at: the file and the bytes; or the bytes of a value in the B-tree.
        of: the checkpoint beside the new one that has it, as the new one will name it.
    """

    value: ChunkValue
    at: DataReference | bytes
    of: BaseEntry | None = None

    @property
    def unit(self) -> Hashable:
        """What stays alive for it: a file, or what the nodes of a B-tree hold."""
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


class Share(Protocol):
    """How a checkpoint refers to chunks of its base. What stays alive for them, a *unit*, stays as
    a whole."""

    def find_all(self, chunks: Sequence[Chunk]) -> Sequence[Places | None]:
        """Where each of some chunks of the base is; None if it cannot be referred to."""

    def lender(
        self, entry: ArrayEntry, part: Part, numbers: range
    ) -> tuple[ChunkValue, BaseEntry | None] | None:
        """The one checkpoint that has chunks of the base that follow each other, whole, as what
        they are there; and its name, as the new one will name it. None if there is none."""

    def unit_bytes(self, place: ValueSource) -> int:
        """How many bytes stay alive for a value, with all others of its unit.

        Raises:
            Failed: it is gone.
        """

    def check_end(self, entry: ArrayEntry, place: ValueSource, number: int) -> None:
        """Checks that the last byte of a value of a chunk is there. Raises as `unit_bytes`, or
        CheckpointCorrupt, StorageError."""

    def is_older(self, place: ValueSource) -> bool:
        """Whether the base itself took a value from an earlier checkpoint."""

    def take(self, place: ValueSource) -> Taken | None:
        """Refers to a value; None if the chunk has to be written after all."""
