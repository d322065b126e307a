"""The chunks that one process of a save takes from its base: a `ReferenceSource`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unickpt.extend import (
    Array,
    BaseEntry,
    Claim,
    Compared,
    ReferenceSource,
    Taken,
    ValuePlaces,
    WriteItem,
)
from unickpt.plugins.incremental.base import Base
from unickpt.plugins.incremental.spans import Span, Spans
from unickpt.plugins.incremental.unchanged import UnchangedArrays


class BaseChunks(ReferenceSource):
    """The chunks of a base, for one process of one save.

    Arguments:
        base: has them.
        unchanged: the arrays that the program declares unchanged.
        compares: whether chunks that are written are compared with it.
    """

    def __init__(self, base: Base, unchanged: UnchangedArrays | None, *, compares: bool) -> None:
        self._base, self._unchanged, self.compares = base, unchanged, compares
        self.adds = compares and base.adds_patches
        self.note = None if base.growth is None else base.growth.stored

    @property
    def nbytes(self) -> int:
        """Logical bytes of the chunks that were taken, less those of patches."""
        return self._base.nbytes

    @property
    def kept_bytes(self) -> int:
        """The bytes of all files that stay alive for the taken chunks."""
        return self._base.kept_bytes

    def claim(self, items: Sequence[WriteItem], *, in_order: bool) -> Claimed:
        """Reuses the chunks that are not hashed; the others are written, if they differ."""
        requested = [item for item in items if item.borrowed]
        comparable_items = [item for item in items if not item.borrowed] if self.compares else ()
        spans = self._base.offer(
            ((item.entry, item.part, item.number) for item in comparable_items),
            [Span(item.entry, item.part, item.numbers) for item in requested],
        )
        together = [requested[number] for number in spans.which.tolist()]
        written, lent, span_ids = list[WriteItem](), list[WriteItem](), set(map(id, together))
        for item in items:
            if id(item) not in span_ids:
                for chunk in item.chunks():
                    is_lent = chunk.borrowed and self._base.may_lend(chunk.part, chunk.number)
                    (lent if is_lent else written).append(chunk)
        if not in_order:
            written.sort(key=self._is_unlikely)
        return Claimed(self._base, written, lent, together, requested, spans)

    def compare(self, item: WriteItem, data: Array) -> Compared:
        """Takes a chunk that is as in the base, or differs little; see `ReferenceSource`."""
        compared, unchanged = self._base.compare(item, data), self._unchanged
        if unchanged is not None and unchanged.claims(item.entry.name, item.box):
            before = self._base.stored_digest(item)
            unchanged.check(item.entry.name, item.box, before, compared.digest)
        return compared

    def most_at_once(self, items: Sequence[WriteItem]) -> int | None:
        """How many chunks may be compared at once to make patches of them; None without patches."""
        sizes = [item.nbytes for item in items if self._base.patches(item.entry)]
        return self._base.comparable_at_once(max(sizes)) if sizes else None

    def read(self, item: WriteItem) -> Array:
        """A chunk of the base, to be written again."""
        is_plain = item.entry.codec is None
        return self._base.read(item) if is_plain else self._base.read_stored(item)

    def digest(self, item: WriteItem) -> int:
        """The digest of a chunk as the base has it."""
        return self._base.digest(item)

    def _is_unlikely(self, item: WriteItem) -> tuple[Any, bool]:
        """Chunks that are probably written come first: the disk works on them while the CPUs hash
        the rest. Units stay together."""
        unchanged = self._unchanged
        is_looked_at = unchanged is not None and unchanged.claims(item.entry.name, item.box)
        is_settled = is_looked_at or self._base.is_settled(item.part, item.number)
        return item.unit or ("", -1), is_settled


class Claimed(Claim):
    """How a process saves some chunks.

    Arguments:
        base: of the save.
        written: the chunks that are written, unless they are equal there.
        lent: those that are taken one by one.
        together: those that are taken span by span.
        requested: all that are reused without being hashed.
        spans: where `together` are.
    """

    def __init__(
        self,
        base: Base,
        written: Sequence[WriteItem],
        lent: Sequence[WriteItem],
        together: Sequence[WriteItem],
        requested: Sequence[WriteItem],
        spans: Spans,
    ) -> None:
        self._base, self._lent, self._requested, self._spans = base, lent, requested, spans
        self.written = written
        self.reused: Sequence[WriteItem] = [*lent, *together]
        self.notes: Sequence[tuple[int, str, Any]] = [
            (array, entry.codec, theirs.extra[entry.codec])
            for array, entry in {item.array: item.entry for item in requested}.items()
            if entry.codec is not None
            and (theirs := base.index.arrays.get(entry.name)) is not None
            and entry.codec in theirs.extra
        ]

    def take(self, places: ValuePlaces, first: int) -> Mapping[int, WriteItem]:
        """Takes the chosen chunks; returns those that have to be written after all."""
        compared, left = dict[int, Compared](), dict[int, WriteItem]()
        for row, item in enumerate(self._lent, first):
            comparison = self._base.borrow(item.part, item.number)
            if comparison is None:  # its file can no longer be linked
                left[row] = item
            else:
                compared[row] = comparison
        places.note(compared)
        first += len(self._lent)
        for row in _note_spans(places, first, self._spans, self._base.take_spans(self._spans)):
            number, (_, _, chunk) = self._spans.chunk(row)
            offset = chunk - self._requested[number].number
            left[first + row] = self._requested[number].select(range(offset, offset + 1))
        return left


def _note_spans(
    places: ValuePlaces, first: int, spans: Spans, references: Mapping[int, Taken | None]
) -> Sequence[int]:
    """Records the places of chunks that were taken together.

    Arguments:
        places: the records.
        first: row of the first of them there.
        spans: the taken ones.
        references: where each unit is; see `Base.take_spans`.

    Returns:
        Those that were not taken, as rows of `spans`.
    """
    if not len(spans.unit):
        return ()
    file, offset = np.zeros(len(spans.units), np.int64), np.zeros(len(spans.units), np.int64)
    is_apart, is_taken = np.zeros(len(file), np.bool_), np.zeros(len(file), np.bool_)
    for unit, reference in references.items():
        if reference is not None:
            assert not isinstance(reference, bytes), "values in files are not written again"
            file[unit], offset[unit], _ = places.place(reference)
            is_taken[unit], is_apart[unit] = True, isinstance(reference, BaseEntry)
    rows = slice(first, first + len(spans.unit))
    apart = is_apart[spans.unit]
    places.chunks["digest"][rows] = spans.digest
    places.chunks["file"][rows] = file[spans.unit]
    places.chunks["offset"][rows] = np.where(apart, offset[spans.unit], spans.offset)
    places.chunks["length"][rows] = np.where(apart, 0, spans.length)
    return np.flatnonzero(~is_taken[spans.unit]).tolist()
