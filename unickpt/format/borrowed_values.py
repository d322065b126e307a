"""What copies take of checkpoints from which one borrows: the stored values themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from unickpt.format import chunk_grid, links
from unickpt.format.chains import Value
from unickpt.format.chunk_grid import Part
from unickpt.format.chunk_store import ChunkStore
from unickpt.format.index import ArrayEntry, Index


class Chunks(Protocol):
    """What is needed of a reader."""

    index: Index

    def borrowed_links(self, entry: ArrayEntry, part: Part, number: int) -> dict[int, int]: ...

    def chain(self, entry: ArrayEntry, part: Part, number: int) -> Sequence[Value]: ...

    def read_value(self, entry: ArrayEntry, value: Value, number: int) -> bytes: ...


class BorrowedValues:
    """The values that are in checkpoints beside one.

    Arguments:
        reader: of the checkpoint.
        bases: where these values are, by the bases' numbers.
    """

    def __init__(self, reader: Chunks, bases: Sequence[ChunkStore]) -> None:
        self._reader, self._bases = reader, bases

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        index = self._reader.index
        for entry in index.arrays.values() if index.bases else ():
            for part in chunk_grid.parts(entry):
                for number in range(part.count):
                    found = self._reader.borrowed_links(entry, part, number)
                    for link, base in found.items():
                        yield self._value(entry, part, number, link, base)

    def _value(
        self, entry: ArrayEntry, part: Part, number: int, link: int, base: int
    ) -> tuple[str, bytes]:
        """Its key and bytes.

        Raises:
            CheckpointCorrupt: it is missing.
            StorageError: the storage failed.
        """
        there, at = Value(self._bases[base], part), part
        if link != links.WHOLE_LINK:
            there = self._reader.chain(entry, part, number)[link - links.FULL_LINK]
            at = links.part_of(part, link)
        value = self._reader.read_value(entry, there, number)
        return chunk_grid.chunk_key(at, number), value
