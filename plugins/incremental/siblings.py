"""Chunks that stay in earlier checkpoints next to the new one, which names them as its bases.

Without patches, only a checkpoint without a base of its own is borrowed from, so that a checkpoint
needs at most one other, and retention can remove all between them. Check-N-Run (arXiv 2010.08679)
calls this a one-shot differential; when too much has changed since, the next checkpoint is whole
again. With patches, it needs those that have the values of its chains.
"""

from __future__ import annotations

from collections.abc import Sequence

from unickpt.extend import (
    LEAST_REUSED,
    MOST_BASES,
    ArrayEntry,
    BaseEntry,
    ChunkValue,
    DataReference,
    OcdbtReader,
    Part,
    base_name,
    written_in_data_file,
)
from unickpt.plugins.incremental.linked_files import LinkedFiles
from unickpt.plugins.incremental.shares import Chunk, Places, ValueSource


class Siblings:
    """A base next to the new checkpoint, and the base's own bases; a `Share`.

    Arguments:
        reader: of the checkpoint before.
        chained: whether values of several checkpoints are taken.
        counted: whether kept bytes are counted by their files.
    """

    def __init__(self, reader: OcdbtReader, *, chained: bool, counted: bool) -> None:
        self._reader, self._chained, self._counted = reader, chained, counted
        self._reader_entry = BaseEntry(base_name(reader.location), reader.manifest_digest)
        self.base = reader.index.bases[0] if reader.index.bases else self._reader_entry

    def is_worthwhile(self) -> bool:
        """Whether enough of the base is still in use. All processes find the same."""
        index = self._reader.index
        if self._chained:
            return len(index.bases) < MOST_BASES
        if not index.bases:
            return True
        if len(index.bases) > 1:
            return False
        arrays = self._reader.base_index(self.base).arrays.values()
        return index.reused >= LEAST_REUSED * sum(entry.nbytes for entry in arrays)

    def find_all(self, chunks: Sequence[Chunk]) -> Sequence[Places | None]:
        """Where each chunk is: in data files, or itself, in the B-tree."""
        return [self._find(*chunk) for chunk in chunks]

    def _find(self, entry: ArrayEntry, part: Part, number: int) -> Places | None:
        places = list[ValueSource]()
        for value in self._reader.chunk_values.values(entry, part, number):
            location = self._reader.chunk_values.place(entry, value, number)
            if location is None:
                return None
            places.append(ValueSource(value, location, self._owner(value)))
        if not self._chained and (len(places) > 1 or places[0].of != self.base):
            return None
        return tuple(places)

    def lender(
        self, entry: ArrayEntry, part: Part, numbers: range
    ) -> tuple[ChunkValue, BaseEntry] | None:
        """The checkpoint that has some chunks, if one has all of them, and none in patches."""
        if entry.composed:
            return None
        if self._reader.index.bases:
            lent = self._reader.borrowed.rows(entry, part, numbers)
            if len(lent) not in (0, len(numbers)) or (lent["base"] != lent["base"][:1]).any():
                return None
        (value,) = self._reader.chunk_values.values(entry, part, numbers.start)  # the same for all
        owner = self._owner(value)
        return None if not self._chained and owner != self.base else (value, owner)

    def _owner(self, value: ChunkValue) -> BaseEntry:
        return self._reader_entry if value.base is None else self._reader.index.bases[value.base]

    def unit_bytes(self, place: ValueSource) -> int:
        """The size of the data file, if its name says it; else at least the value's end. If it is
        not counted, none: `is_worthwhile` decides for all chunks."""
        if not self._counted or not isinstance(place.at, DataReference):
            return 0
        written = written_in_data_file(place.at.path.rpartition("/")[2])
        return place.end if written is None else written[1]

    def check_end(self, entry: ArrayEntry, place: ValueSource, number: int) -> None:
        """Checks that the last byte of a value of a chunk is there."""
        self._reader.chunk_values.check_end(entry, place.value, number)

    def is_older(self, place: ValueSource) -> bool:
        """Whether the base borrowed it, too."""
        return place.of != self._reader_entry

    def take(self, place: ValueSource) -> BaseEntry | None:
        """Borrows a value."""
        return place.of


Share = LinkedFiles | Siblings
"""How a checkpoint refers to chunks of its base. The files that stay alive for them, *units*, stay
whole. Both find where chunks are, say who has all of a run of chunks, how large a unit is and
whether its last value is there, and refer to values."""
