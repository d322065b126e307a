"""Unchanged consecutive chunks of the base, which are reused in bulk without being hashed.

Nearly all chunks of a state that changes little are such chunks. To decide for each of them, and to
keep an object for each, took most of the time of a save that writes little. Here each *span* is one
work item, and the facts of its chunks are columns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from unickpt.extend import (
    ArrayEntry,
    BaseEntry,
    ChunkStore,
    ChunkValue,
    DataReference,
    Part,
    chunk_keys,
)
from unickpt.plugins.incremental.shares import Chunk, ValueSource
from unickpt.plugins.incremental.siblings import Share

Column = np.ndarray[Any, Any]
_NOWHERE = -1


class Span(NamedTuple):
    """Consecutive chunks of a save.

    Arguments:
        entry, part: the array and its part.
        numbers: of the chunks in the part.
    """

    entry: ArrayEntry
    part: Part
    numbers: range

    def chunks(self) -> list[Chunk]:
        """Each of them."""
        return [(self.entry, self.part, number) for number in self.numbers]


class EqualSpan(NamedTuple):
    """The base's chunks for those of a span.

    Arguments:
        entry: of the base.
        digest: of each chunk.
        elements: bytes of each in memory.
        nbytes: of each as it is stored, before compression.
    """

    entry: ArrayEntry
    digest: Column
    elements: Column
    nbytes: Column


@dataclass(frozen=True)
class Spans:
    """Where the chunks of some spans are in the base: whole, in files, and all chunks of a span in
    one checkpoint.

    Arguments:
        asked: all requested spans.
        which: the numbers of these, in the order of the columns.
        span: for each chunk, the position of its span in `which`.
        digest, elements, nbytes: of each chunk, as of `EqualSpan`.
        unit: for each chunk, which of `units` it is in.
        offset, length: its bytes there.
        units: the files, and the checkpoints next to the new one that have them.
        values: by the numbers of the requested spans, their chunks there.
    """

    asked: Sequence[Span]

    which: Column
    span: Column
    digest: Column
    elements: Column
    nbytes: Column
    unit: Column
    offset: Column
    length: Column
    units: Sequence[tuple[BaseEntry | None, str]]
    values: Sequence[ChunkValue | None]

    @classmethod
    def none(cls) -> Spans:
        """No span at all."""
        no = np.zeros(0, np.int64)
        return cls((), no, no, no.astype(np.uint64), no, no, no, no, no, (), ())

    def without(self, units: Collection[Hashable]) -> Spans:
        """The spans without a chunk in some units."""
        lost = np.array([unit in units for unit in self.units], np.bool_)
        if not lost.any():
            return self
        keeps = np.ones(len(self.which), np.bool_)
        keeps[self.span[lost[self.unit]]] = False
        return self._only(keeps)

    def _only(self, keeps: Column) -> Spans:
        """Some of the spans."""
        rows, number = keeps[self.span], np.cumsum(keeps) - 1
        columns = "digest", "elements", "nbytes", "unit", "offset", "length"
        selection = {name: getattr(self, name)[rows] for name in columns}
        return replace(self, which=self.which[keeps], span=number[self.span[rows]], **selection)

    def used(self) -> dict[int, int]:
        """By used unit, how many of its bytes are used."""
        nbytes = np.bincount(self.unit, self.nbytes, len(self.units))
        return {unit: int(nbytes[unit]) for unit in self._used_units()}

    def _used_units(self) -> list[int]:
        """The used units, ascending."""
        used: list[int] = np.flatnonzero(np.bincount(self.unit)).tolist()
        return used

    def last(self) -> dict[int, tuple[ValueSource, Chunk]]:
        """By unit, the place that ends last among those used, and its chunk."""
        ends = {}
        order = np.argsort(self.offset + self.length, kind="stable")
        row = np.zeros(len(self.units), np.int64)
        row[self.unit[order]] = order  # the last one stays
        for unit in self._used_units():
            last_row, (owner, path) = int(row[unit]), self.units[unit]
            number, chunk = self.chunk(last_row)
            value = self.values[number]
            assert value is not None, "it was found there"
            reference = DataReference(path, int(self.offset[last_row]), int(self.length[last_row]))
            ends[unit] = ValueSource(value, reference, owner), chunk
        return ends

    def chunk(self, row: int) -> tuple[int, Chunk]:
        """The number of the requested span that a row of the columns is in, and the row's chunk."""
        position = int(self.span[row])
        number, first = int(self.which[position]), int(np.searchsorted(self.span, position))
        span = self.asked[number]
        return number, (span.entry, span.part, span.numbers[row - first])


def find(
    spans: Sequence[Span], same: Callable[[Span], EqualSpan | None], share: Share | None
) -> Spans:
    """Finds spans in the base; leaves out those with a chunk that is missing, has patches, or is so
    small that the B-tree holds it itself, and those that several checkpoints have.

    Arguments:
        spans: of the save.
        same: the base's chunks for those of one; None if they are others.
        share: how its chunks are referred to; None if they are not.

    Raises:
        CheckpointCorrupt, StorageError: the base cannot be read.
    """
    values: list[ChunkValue | None] = [None] * len(spans)
    matches = dict[int, EqualSpan]()
    lenders = dict[ChunkStore, tuple[BaseEntry | None, list[int]]]()
    for number, span in enumerate(spans):
        match = None if share is None else same(span)
        lender = match and share and share.lender(match.entry, span.part, span.numbers)
        if match is not None and lender:
            matches[number], values[number] = match, lender[0]
            lenders.setdefault(lender[0].store, (lender[1], []))[1].append(number)
    if not matches:
        return Spans.none()
    order = [number for _, numbers in lenders.values() for number in numbers]
    counts = [len(spans[number].numbers) for number in order]
    unit, offset, length, units = _places(spans, lenders, sum(counts))
    result = Spans(
        asked=spans,
        which=np.array(order),
        span=np.repeat(np.arange(len(order)), counts),
        digest=np.concatenate([matches[number].digest for number in order]),
        elements=np.concatenate([matches[number].elements for number in order]),
        nbytes=np.concatenate([matches[number].nbytes for number in order]),
        unit=unit,
        offset=offset,
        length=length,
        units=units,
        values=values,
    )
    keeps = np.ones(len(order), np.bool_)
    keeps[result.span[unit == _NOWHERE]] = False
    return result if keeps.all() else result._only(keeps)


def _places(
    spans: Sequence[Span],
    lenders: dict[ChunkStore, tuple[BaseEntry | None, list[int]]],
    count: int,
) -> tuple[Column, Column, Column, Sequence[tuple[BaseEntry | None, str]]]:
    """Where chunks are: units, or `_NOWHERE`, offsets and lengths; and the files of units."""
    units = dict[tuple[BaseEntry | None, str], int]()
    unit, first = np.full(count, _NOWHERE), 0
    offset, length = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for store, (owner, numbers) in lenders.items():
        keys = [key for n in numbers for key in chunk_keys(*spans[n][1:])]
        for leaf, which, positions in store.values.tree.find_all(keys):
            files = [units.setdefault((owner, path), len(units)) for path, _ in leaf.files]
            rows, leaf_rows = first + np.array(which), np.array(positions)
            file = leaf.which[leaf_rows]
            is_apart = file >= 0
            rows, leaf_rows = rows[is_apart], leaf_rows[is_apart]
            unit[rows] = np.array(files, np.int64)[file[is_apart]]
            offset[rows], length[rows] = leaf.offsets[leaf_rows], leaf.lengths[leaf_rows]
        first += len(keys)
    return unit, offset, length, list(units)
