"""The chunks of all processes -> one digest table, the place of each, and the missing ones.

Checks that each chunk is written exactly once. Nothing here does I/O.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unickpt.arrays.box import Box
from unickpt.commit.messages import (
    ADDITION_DTYPE,
    ELSEWHERE,
    PLACE_NAMES,
    Names,
    Record,
    Records,
    ValuePlace,
)
from unickpt.errors import CoverageError
from unickpt.format import chunk_grid, digest_table
from unickpt.format.index import ArrayEntry, BaseEntry, Index
from unickpt.quoting import first_few
from unickpt.storage.btree.builder import INLINE, PLACE_DTYPE

_NOBODY = np.uint32(0xFFFFFFFF)
WHOLE, COMPOSED, BORROWED, MISSING = range(4)
"""How a chunk is stored. If two processes wrote it, the first of these counts."""

Requests = dict[int, dict[str, list[int]]]
"""For each process the positions of chunks by array name."""
Column = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Chunks:
    """The recorded facts of all chunks, each by its row in the digest table.

    Arguments:
        table: the digests and writers.
        kinds: how each is stored: `WHOLE`, `COMPOSED`, `BORROWED` or `MISSING`.
        places: where each is (of a composed one, the full chunk); the number of its file is a
            position in `files`.
        additions: likewise where the additions are that this checkpoint has, with the rows of their
            chunks.
        blobs: likewise where each per-process value is, by its key.
        files: processes, and the paths of files below their folders.
        inline: the values that are in no file, joined.
        counts: how many additions each chunk has, wherever they are.
        borrowed: the values that are in other checkpoints.
        bases: these checkpoints.
        contested: the assumed arrays for which two processes wrote different data for a chunk, with
            those two.
    """

    table: digest_table.Table
    kinds: Column
    places: Column
    additions: Column
    blobs: Mapping[str, ValuePlace]
    files: Sequence[tuple[int, str]]
    inline: bytes
    counts: Column
    borrowed: Column
    bases: tuple[BaseEntry, ...]
    contested: Mapping[str, list[int]]

    def composed(self, arrays: Mapping[str, ArrayEntry]) -> dict[str, tuple[int, int]]:
        """The numbers of chunks with additions and of additions by array, for arrays that have
        some."""
        if not (self.kinds == COMPOSED).any():
            return {}
        counts = {}
        for name, span in chunk_grid.chunk_spans(arrays).items():
            chunk_counts = self.counts[span]
            if chunk_counts.any():
                counts[name] = int(np.count_nonzero(chunk_counts)), int(chunk_counts.sum())
        return counts


def merged_chunks(
    index: Index,
    records: Records,
    names: Names,
    assumed: Collection[str] = (),
    winners: Mapping[str, int] | None = None,
) -> Chunks:
    """All chunks in the records; no chunk has two writers.

    Replicas that do not know of each other may both write a chunk, one of them with additions, or
    both with another full chunk. All stored values of a chunk come from one process.

    Arguments:
        index: of all processes.
        records: of their output.
        names: for each process the arrays that it has.
        assumed: arrays whose replication is only assumed.
        winners: arrays for which only the chunks of one process count, with that process.

    Raises:
        CoverageError: two processes wrote different data for a chunk of another array.
    """
    listed = _ListedChunks(index, records, names, winners or {})
    # If an index occurs twice, NumPy keeps the last assignment: the first process's.
    chosen = np.full(chunk_grid.total_chunks(index.arrays), -1, np.int64)
    for kind in (BORROWED, COMPOSED, WHOLE):
        rows = np.flatnonzero(listed.kind == kind)[::-1]
        chosen[listed.where[rows]] = rows
    missing = chosen < 0
    contested = _contested(index, listed, chosen, assumed)
    # A missing chunk first gets the facts of the last one.
    table = np.zeros(len(chosen), digest_table.DTYPE)
    kinds, places = np.full(len(chosen), MISSING, np.uint8), np.zeros(len(chosen), PLACE_DTYPE)
    if len(listed.where):
        table["digest"], table["process"] = listed.digest[chosen], listed.process[chosen]
        kinds, places = listed.kind[chosen], listed.place[chosen]
    table["digest"][missing], table["process"][missing], kinds[missing] = 0, _NOBODY, MISSING
    additions = listed.additions_of(chosen)
    counts = np.bincount(additions["row"].astype(np.int64), minlength=len(chosen))
    lent_table, bases = _borrowed(listed, kinds, places, additions)
    return Chunks(
        table,
        kinds,
        places,
        additions[additions["file"] != ELSEWHERE],
        listed.blobs,
        listed.files,
        b"".join(listed.inline),
        counts,
        lent_table,
        bases,
        contested,
    )


def _borrowed(
    listed: _ListedChunks, kinds: Column, places: Column, additions: Column
) -> tuple[Column, tuple[BaseEntry, ...]]:
    """The values that are in other checkpoints, and these."""
    if not listed.bases:
        return np.zeros(0, np.uint8), ()
    from unickpt.format import borrowed

    rows = np.flatnonzero((places["file"] == ELSEWHERE) & (kinds != MISSING))
    table = np.zeros(len(rows), borrowed.DTYPE)
    table["row"], table["base"] = rows, places["offset"][rows]
    table["link"] = np.where(kinds[rows] == COMPOSED, chunk_grid.FULL_LINK, chunk_grid.WHOLE_LINK)
    lent_additions = additions[additions["file"] == ELSEWHERE][["row", "offset", "link"]]
    both = np.concatenate([table, lent_additions.astype(borrowed.DTYPE)])
    borrowed_table: Column = both[np.lexsort((both["link"], both["row"]))]
    used, numbers = np.unique(borrowed_table["base"], return_inverse=True)
    borrowed_table["base"] = numbers
    return borrowed_table, tuple(list(listed.bases)[number] for number in used.tolist())


class _ListedChunks:
    """The chunks of all records in sequence; some perhaps twice.

    Arguments:
        index, records, names, winners: as for `merged_chunks`.

    Raises:
        CoverageError: a process lists a chunk that does not exist.
    """

    def __init__(
        self, index: Index, records: Records, names: Names, winners: Mapping[str, int]
    ) -> None:
        count = sum(len(record.chunks) for _, record in records)
        self.where, self.digest = np.zeros(count, np.int64), np.zeros(count, np.uint64)
        """Each one's row in the digest table, and its digest."""
        self.process, self.kind = np.zeros(count, np.uint32), np.full(count, WHOLE, np.uint8)
        self.place = np.zeros(count, PLACE_DTYPE)
        self.number, self._count = np.arange(count), count
        """Its position among all chunks."""
        self.additions, self.blobs = [np.zeros(0, ADDITION_DTYPE)], dict[str, ValuePlace]()
        """All additions; their rows are the numbers of their chunks."""
        self.files, self.inline = list[tuple[int, str]](), list[bytes]()
        self.bases: dict[BaseEntry, int] = {}
        self._nbytes = 0
        positions, start = _RowNumbers(index), 0
        for process, record in records:
            rows = slice(start, start + len(record.chunks))
            start = rows.stop
            self.process[rows], self.digest[rows] = process, record.chunks["digest"]
            self.where[rows] = positions.find_rows(names[process], process, record)
            self._place(rows, process, record)
            if winners:
                array_names = enumerate(names[process])
                lost = [n for n, name in array_names if winners.get(name, process) != process]
                self.where[rows][np.isin(record.chunks["array"], lost)] = -1
        if winners:
            counts = self.where >= 0
            for name in ("where", "digest", "process", "kind", "place", "number"):
                setattr(self, name, getattr(self, name)[counts])

    def additions_of(self, chosen: Column) -> Column:
        """The additions of the chunks that were chosen, with their rows in the digest table.

        Arguments:
            chosen: for each row of the table which of the listed chunks it is; -1 for none.
        """
        additions = np.concatenate(self.additions)
        if not len(additions):
            return additions
        rows = np.flatnonzero(chosen >= 0)
        row_of = np.full(self._count, -1)
        row_of[self.number[chosen[rows]]] = rows
        digest_rows = row_of[additions["row"].astype(np.int64)]
        chosen_additions = additions[digest_rows >= 0]
        chosen_additions["row"] = digest_rows[digest_rows >= 0]
        return chosen_additions[np.lexsort((chosen_additions["link"], chosen_additions["row"]))]

    def _place(self, rows: slice, process: int, record: Record) -> None:
        """Fills in how and where a record's chunks are stored."""

        def numbered(table: Column) -> Column:
            """The places of values, with file numbers after those of earlier records."""
            places = table[PLACE_NAMES].astype(PLACE_DTYPE)
            is_lent = places["file"] == ELSEWHERE
            places["offset"][is_lent] = bases[places["offset"][is_lent].astype(np.int64)]
            places["offset"][places["file"] == INLINE] += np.uint64(self._nbytes)
            places["file"][places["file"] >= 0] += len(self.files)
            return places

        base_numbers = [self.bases.setdefault(base, len(self.bases)) for base in record.bases]
        bases = np.array(base_numbers, np.uint64)
        self.place[rows] = numbered(record.chunks)
        self.kind[rows][record.chunks["file"] == ELSEWHERE] = BORROWED
        if len(record.additions):
            additions, places = record.additions.copy(), numbered(record.additions)
            self.kind[rows][additions["row"].astype(np.int64)] = COMPOSED
            additions["row"] += np.uint64(rows.start)
            additions[PLACE_NAMES] = places
            self.additions.append(additions)
        if record.blobs:
            from unickpt.frameworks.per_process import blob_key

            places = np.array([place for _, _, _, place in record.blobs.values()], PLACE_DTYPE)
            for name, place in zip(record.blobs, numbered(places).tolist(), strict=True):
                self.blobs[blob_key(name, process)] = place
        self.files += [(process, path) for path in record.files]
        if record.inline:
            self.inline.append(record.inline)
            self._nbytes += len(record.inline)


class _RowNumbers:
    """The rows of chunks in the digest table.

    Arguments:
        index: of all processes.
    """

    def __init__(self, index: Index) -> None:
        self._index, spans = index, chunk_grid.chunk_spans(index.arrays)
        self._starts = {name: span.start for name, span in spans.items()}
        self._stops = {name: span.stop for name, span in spans.items()}
        self._known: dict[int, tuple[Column, Column]] = {}

    def find_rows(self, names: Sequence[str], process: int, record: Record) -> Column:
        """The rows of a record's chunks. Boxes must be passed in the order of the processes.

        Raises:
            CoverageError: there is no such chunk.
        """
        if record.description not in self._known:
            self._known[record.description] = (
                np.array([self._starts[name] for name in names], np.int64),
                np.array([self._stops[name] for name in names], np.int64),
            )
        starts, stops = self._known[record.description]
        if record.boxes:
            starts = starts.copy()
        for number, boxes in record.boxes.items():
            name = names[number]
            starts[number] = self._starts[name]
            entry = self._index.arrays[name]
            self._starts[name] += sum(chunk_grid.box_part(entry, box).count for box in boxes)
        numbers, chunks = record.chunks["array"], record.chunks["chunk"]
        if len(numbers) and int(numbers.max()) < len(names):
            first = starts[numbers]
            if (chunks < (stops[numbers] - first).astype(np.uint64)).all():
                positions: Column = first + chunks.astype(np.int64)
                return positions
        elif not len(numbers):
            return np.zeros(0, np.int64)
        raise CoverageError(f"process {process} lists chunks that do not exist")


def _contested(
    index: Index, listed: _ListedChunks, chosen: Column, assumed: Collection[str]
) -> dict[str, list[int]]:
    """The assumed arrays for which two processes wrote different data for a chunk, with those two.

    Raises:
        CoverageError: it is another array, or a process lists a chunk twice.
    """
    is_other = np.ones(len(listed.where), np.bool_)
    is_other[chosen[chosen >= 0]] = False
    again = np.flatnonzero(is_other)
    where, process = listed.where[again], listed.process[again]
    chosen_chunks = chosen[where]
    pairs = set(zip(where.tolist(), process.tolist(), strict=True))
    if len(pairs) < len(again) or (process == listed.process[chosen_chunks]).any():
        raise CoverageError("a process lists a chunk twice")
    processes_by_array = dict[str, list[int]]()
    differs = listed.digest[again] != listed.digest[chosen_chunks]
    for row, other in zip(again[differs].tolist(), chosen_chunks[differs].tolist(), strict=True):
        name, box = chunk_at(index, int(listed.where[row]))
        both = sorted(int(listed.process[number]) for number in (row, other))
        if name not in assumed:  # two may write the same, as replicas that were not declared
            raise CoverageError(
                f"array {name!r}: processes {both[0]} and {both[1]} hold different data for {box}"
            )
        processes_by_array.setdefault(name, both)
    return processes_by_array


def chunk_at(index: Index, position: int) -> tuple[str, Box]:
    """Array name and box of the chunk at a position of the digest table."""
    for name, entry in index.arrays.items():
        for part in chunk_grid.parts(entry):
            if position < part.count:
                return name, part.chunk_box(position)
            position -= part.count
    raise IndexError(position)


def requests(
    index: Index,
    table: digest_table.Table,
    names: Names,
    winners: Mapping[str, int] | None = None,
    written: Mapping[int, float] | None = None,
) -> Requests:
    """For chunks that no process wrote: the processes that hold them and have to write them.

    A plain tensor is assumed to be on all processes. If only some have it (pipeline stages), its
    planned writer may lack it, which is known only here, from the records of all processes.

    Arguments:
        index: of all processes.
        table: of the chunks that they wrote.
        names: for each process the arrays that it has.
        winners: arrays that one process must write whole, with that process.
        written: the bytes that each process wrote.

    Returns:
        For each process the positions of chunks by array name.

    Raises:
        CoverageError: no process holds a chunk.
    """
    holes = np.flatnonzero(table["process"] == _NOBODY)
    requested: Requests = {}
    if not holes.size:
        return requested
    from unickpt.commit import chunk_owners

    having: dict[str, list[int]] = {}
    for process, array_names in enumerate(names):
        for name in array_names:
            having.setdefault(name, []).append(process)
    having |= {name: [process] for name, process in (winners or {}).items()}
    loads: dict[tuple[int, ...], list[tuple[float, int]]] = {}
    first = 0
    for name, entry in index.arrays.items():
        start = first
        for part in chunk_grid.parts(entry):
            low, high = np.searchsorted(holes, (first, first + part.count))
            for position in holes[low:high].tolist():
                box, processes = part.chunk_box(position - first), having.get(name, [])
                load: list[tuple[float, int]] = [(0, process) for process in processes]
                # Spread over the processes that have it, but small arrays come from the first.
                if not chunk_owners.is_little(entry.nbytes):
                    so_far = sorted(((written or {}).get(p, 0), p) for p in processes)
                    load = loads.setdefault(tuple(processes), so_far)
                chosen = _holder(entry, box, load)
                requested.setdefault(chosen, {}).setdefault(name, []).append(position - start)
            first += part.count
    return requested


def _holder(entry: ArrayEntry, box: Box, load: list[tuple[float, int]]) -> int:
    """The process that holds a box and has the least to write.

    Arguments:
        entry, box: of the array.
        load: the bytes that each process writes, a heap; the box's are added.
    """
    loads = []
    try:
        while load:
            nbytes, process = heapq.heappop(load)
            if _holds(entry, process, box):
                loads.append((nbytes + box.size * entry.itemsize, process))
                return process
            loads.append((nbytes, process))
    finally:
        for other in loads:
            heapq.heappush(load, other)
    raise CoverageError(
        f"array {entry.name!r} of shape {list(entry.shape)}: no process holds {box}. Its layout is "
        f"{entry.layout}; processes {first_few(sorted(p for _, p in load))} have it in their tree"
    )


def _holds(entry: ArrayEntry, process: int, box: Box) -> bool:
    if entry.layout is not None:
        return any(b.contains(box) for b in entry.layout.local(entry.shape, process))
    return any(process in holders and b.contains(box) for b, holders in entry.boxes or ())
