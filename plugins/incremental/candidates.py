"""Finds the base's chunks that equal those of a save, or differ little from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from unickpt.errors import UnickptError
from unickpt.extend import (
    ArrayEntry,
    OcdbtReader,
    Part,
    SaveEncoder,
    numbered_parts,
    stored_chunk_bytes,
)
from unickpt.plugins.incremental import spans
from unickpt.plugins.incremental.shares import Chunk, Places, ValueSource
from unickpt.plugins.incremental.siblings import Share
from unickpt.plugins.incremental.spans import Span, Spans

# The share of a data file's bytes that a process must use to link it, if kept bytes are not
# predicted.
_LEAST_USED = 0.5


@dataclass(slots=True, eq=False)  # not frozen: see `adapter_protocol`
class Candidate:
    """A chunk of the base; never modified.

    Arguments:
        entry, part, number: of the base.
        digest: of the chunk.
        nbytes: as it is stored, before compression.
        places: of its values; None if they cannot be referred to.
    """

    entry: ArrayEntry
    part: Part
    number: int
    digest: int
    nbytes: int
    places: Places | None

    @property
    def elements(self) -> int:
        """Bytes of its elements in memory."""
        if self.entry.codec is None:
            return self.nbytes
        return self.part.chunk_box(self.number).size * self.entry.itemsize


@dataclass(frozen=True)
class _EqualChunks:
    """A part that the base has as the save has it.

    Arguments:
        entry: of the base.
        part: of the base and the save.
        digests: of its chunks.
    """

    entry: ArrayEntry
    part: Part
    digests: Any

    @cached_property
    def nbytes(self) -> int | None:
        """Of each chunk as it is stored; None if they differ."""
        part = self.part
        is_even = all(n % c == 0 for n, c in zip(part.box.shape, part.chunk, strict=True))
        return stored_chunk_bytes(self.entry, part.chunk) if is_even else None

    def bytes_of(self, number: int) -> int:
        if self.nbytes is not None:
            return self.nbytes
        return stored_chunk_bytes(self.entry, self.part.chunk_box(number).shape)

    def span(self, numbers: range) -> spans.EqualSpan:
        """Chunks that follow each other."""
        rows = slice(numbers.start, numbers.stop)
        elements = nbytes = self.part.sizes()[rows] * self.entry.itemsize
        if self.entry.codec is not None:
            nbytes = np.array([self.bytes_of(number) for number in numbers], np.int64)
        return spans.EqualSpan(self.entry, self.digests[rows], elements, nbytes)


class Candidates:
    """The base's chunks for those of one process.

    Arguments:
        reader: of the base.
        share: how its chunks are referred to; None if they are not.
        patches: whether chunks with patches may be referred to.
        encoder: chooses how arrays of the save are stored, if that is not decided before.
        warn: called with a problem of the base.
    """

    def __init__(
        self,
        reader: OcdbtReader,
        share: Share | None,
        *,
        patches: bool,
        encoder: SaveEncoder | None,
        warn: Callable[[object], None],
    ) -> None:
        self._encoder = encoder
        self._reader, self._share, self._patches, self._warn = reader, share, patches, warn
        self._numbered: dict[str, dict[str, tuple[int, Part]]] = {}
        self._parts: dict[str, _EqualChunks | None] = {}
        self._candidates: dict[tuple[str, int], Candidate] = {}
        self.sparse = set[Any]()
        """The units that are used too little: patches in them are written again."""

    def get(self, part: Part, number: int) -> Candidate | None:
        """The candidate for a chunk, if it may be taken."""
        return self._candidates.get((part.key, number))

    def offer(
        self, chunks: Iterable[Chunk], requested: Sequence[Span] = (), *, starts_anew: bool
    ) -> Spans:
        """Finds the base's candidates for some chunks; see `Base.offer`.

        Arguments:
            chunks: which.
            requested: others, which are reused without being hashed.
            starts_anew: whether none with patches is taken.
        """
        try:
            return self._offer(list(chunks), requested, starts_anew)
        except UnickptError as error:
            self._warn(error)
            self._candidates.clear()
            return Spans.none()

    def _offer(self, chunks: list[Chunk], requested: Sequence[Span], starts_anew: bool) -> Spans:
        together = spans.find(requested, self._same_span, self._share)
        apart = set(range(len(requested))) - set(together.which.tolist())
        chunks += [chunk for number in sorted(apart) for chunk in requested[number].chunks()]
        used: dict[Any, int] = {}
        ends: dict[Any, tuple[ValueSource, ArrayEntry, int]] = {}
        wholes, last_of = set[Any](), together.last()
        for number, nbytes in together.used().items():
            place, (entry, _, last_number) = last_of[number]
            used[place.unit], ends[place.unit] = nbytes, (place, entry, last_number)
            wholes.add(place.unit)
        for candidate in self.find(chunks):
            if candidate is None or candidate.places is None:
                continue
            if starts_anew and len(candidate.places) > 1:
                continue
            self._candidates[candidate.part.key, candidate.number] = candidate
            # Neither what compression saves nor padding counts.
            for position, place in enumerate(candidate.places):
                unit = place.unit
                used[unit] = used.get(unit, 0) + (place.nbytes if position else candidate.nbytes)
                if not position:
                    wholes.add(unit)
                last = ends.get(unit)
                if last is None or place.end > last[0].end:
                    ends[unit] = place, candidate.entry, candidate.number
        left, self.sparse = set[Any](), set[Any]()
        for unit, nbytes in used.items():
            is_used = self._serves(nbytes, *ends[unit])
            if is_used is None:
                left.add(unit)
            elif not is_used:
                self.sparse.add(unit)
                left |= {unit} & wholes
        return self._without(left, together, requested) if left else together

    def _without(self, left: set[Any], together: Spans, requested: Sequence[Span]) -> Spans:
        """Withdraws chunks in some units; spans with chunks there are decided chunk by chunk."""
        remaining_spans = together.without(left)
        lost = set(together.which.tolist()) - set(remaining_spans.which.tolist())
        chunks = [chunk for n in sorted(lost) for chunk in requested[n].chunks()]
        for candidate in self.find(chunks):
            if candidate is not None:  # some of its chunks may be elsewhere
                self._candidates[candidate.part.key, candidate.number] = candidate
        for key, candidate in list(self._candidates.items()):
            if not left.isdisjoint(place.unit for place in candidate.places or ()):
                del self._candidates[key]
        return remaining_spans

    def _serves(
        self, nbytes: int, place: ValueSource, entry: ArrayEntry, number: int
    ) -> bool | None:
        """Whether enough of a unit is used; None if it is not there up to its last value."""
        assert self._share is not None, "else no chunk has places"
        try:
            is_used = nbytes >= _LEAST_USED * self._share.unit_bytes(place)
            if is_used:
                self._share.check_end(entry, place, number)
            return is_used
        except UnickptError as error:
            self._warn(error)
            return None

    def find(self, chunks: Sequence[Chunk]) -> Iterator[Candidate | None]:
        """For each of some chunks, the base's chunk at its place and of its kind.

        Raises:
            CheckpointCorrupt, StorageError: the base cannot be read.
        """
        same = [(self._same(entry, part), number) for entry, part, number in chunks]
        base_chunks = [(x.entry, x.part, number) for x, number in same if x is not None]
        places = iter(self._share.find_all(base_chunks) if self._share is not None else ())
        for base_part, number in same:
            if base_part is None:
                yield None
                continue
            chunk_places = next(places, None)
            if chunk_places is not None and len(chunk_places) > 1 and not self._patches:
                chunk_places = None  # it is written whole again
            digest, nbytes = int(base_part.digests[number]), base_part.bytes_of(number)
            entry, part = base_part.entry, base_part.part
            yield Candidate(entry, part, number, digest, nbytes, chunk_places)

    def _same_span(self, span: Span) -> spans.EqualSpan | None:
        same = self._same(span.entry, span.part)
        return None if same is None else same.span(span.numbers)

    def _same(self, entry: ArrayEntry, part: Part) -> _EqualChunks | None:
        if part.key not in self._parts:
            self._parts[part.key] = self._find_part(entry, part)
        same = self._parts[part.key]
        # Called for each chunk, mostly with the same objects.
        return same if same is None or same.part is part or same.part == part else None

    def _find_part(self, entry: ArrayEntry, part: Part) -> _EqualChunks | None:
        theirs = self._reader.index.arrays.get(entry.name)
        if theirs is None or (theirs.shape, theirs.dtype) != (entry.shape, entry.dtype):
            return None
        # The stored bytes must be those of the save: encoded alike, or not encoded.
        if self._encoder is not None and self._encoder.is_undecided(entry):
            if theirs.encoding not in ((), entry.encoding):
                return None
        elif (theirs.encoding or None) != (entry.encoding or None):
            return None
        if entry.name not in self._numbered:
            self._numbered[entry.name] = {x.key: (first, x) for first, x in numbered_parts(theirs)}
        first, base_part = self._numbered[entry.name].get(part.key, (0, None))
        if base_part != part:
            return None
        digests = self._reader.digests_of(entry.name)["digest"][first : first + part.count]
        return _EqualChunks(theirs, part, digests)
