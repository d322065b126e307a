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
    CHUNK_DTYPE,
    ELSEWHERE,
    Names,
    Record,
    Records,
    ValuePlace,
)
from unickpt.errors import CoverageError
from unickpt.format import chunk_grid, digest_table
from unickpt.format.index import ArrayEntry, BaseEntry, Index
from unickpt.quoting import first_few
from unickpt.storage.btree.builder import INLINE, PLACE_BYTES, PLACE_DTYPE

_NOBODY = np.uint32(0xFFFFFFFF)
WHOLE, COMPOSED, BORROWED, MISSING = range(4)
"""How a chunk is stored. If two processes wrote it, the first of these counts."""

Requests = dict[int, dict[str, list[int]]]
"""For each process the positions of chunks by array name."""
Column = np.ndarray[Any, Any]
_BLOCK = 1 << 13
"""So many rows at once need only memory that is used again."""
_CHUNK_BYTES = np.dtype((np.void, CHUNK_DTYPE.itemsize))
_CHUNK_PLACE = np.dtype(
    {
        "names": ["place"],
        "formats": [PLACE_BYTES],
        "offsets": [CHUNK_DTYPE.itemsize - PLACE_DTYPE.itemsize],
        "itemsize": CHUNK_DTYPE.itemsize,
    }
)
"""A row of a record's chunks, of which only the place is looked at."""


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
    chosen = listed.choose(chunk_grid.total_chunks(index.arrays))
    # Columns are written in the order of the records: what consecutive processes wrote lies close
    # together in the tables, so that it stays in the cache of the processor.
    rows: Any = slice(None)
    contested: Mapping[str, list[int]] = {}
    if len(listed.where) != len(chosen) or chosen.min(initial=0) < 0:  # else each is listed once
        is_chosen = chosen[listed.where] == np.arange(len(listed.where))
        if not is_chosen.all():
            contested = _contested(index, listed, chosen, ~is_chosen, assumed)
            rows = np.flatnonzero(is_chosen)
    where = listed.where[rows]
    table = np.zeros(len(chosen), digest_table.DTYPE)
    table["process"] = _NOBODY
    kinds, places = np.full(len(chosen), MISSING, np.uint8), np.zeros(len(chosen), PLACE_DTYPE)
    table["digest"][where], table["process"][where] = listed.digest[rows], listed.process[rows]
    kinds[where] = listed.kind[rows]
    places.view(PLACE_BYTES)[where] = listed.place_bytes[rows]
    additions = listed.additions_of(chosen)
    counts = np.zeros(len(chosen), np.int64)  # memory that nothing touches, but for additions
    if len(additions):
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
        counts = [len(record.chunks) for _, record in records]
        tables = [record.chunks.view(_CHUNK_BYTES) for _, record in records]
        rows = np.concatenate(tables).view(CHUNK_DTYPE)
        processes = np.array([process for process, _ in records], np.uint32)
        self.digest, self.process = rows["digest"], np.repeat(processes, counts)
        self.place_bytes = rows.view(_CHUNK_PLACE)["place"]
        """Of each one its `PLACE_DTYPE`."""
        self.where = _find_rows(index, names, records, rows, counts)
        """Each one's row in the digest table."""
        self.number: Column | None = None
        """Its position among all chunks, if some were dropped."""
        self._count = len(rows)
        self.additions, self.blobs = [np.zeros(0, ADDITION_DTYPE)], dict[str, ValuePlace]()
        """All additions; their rows are the numbers of their chunks."""
        self.files, self.inline = list[tuple[int, str]](), list[bytes]()
        self.bases: dict[BaseEntry, int] = {}
        self._nbytes = 0
        self.kind = np.where(rows["file"] == ELSEWHERE, np.uint8(BORROWED), np.uint8(WHOLE))
        starts, first_files, first_bytes = np.cumsum([0, *counts[:-1]]), list[int](), list[int]()
        for (process, record), start in zip(records, starts.tolist(), strict=True):
            first_files.append(len(self.files))
            first_bytes.append(self._nbytes)
            self._place(process, record, rows[start : start + len(record.chunks)], start)
        if len(records) > 1:
            _shift(rows, _of_each(first_files, counts), _of_each(first_bytes, counts))
        if winners:
            self._drop_losers(records, names, rows, starts.tolist(), winners)

    def choose(self, total: int) -> Column:
        """For each row of the digest table which of these chunks it is; -1 for none.

        Arguments:
            total: the number of rows.
        """
        # If an index occurs twice, NumPy keeps the last assignment: the first process's.
        chosen, numbers = np.full(total, -1, np.int64), np.arange(len(self.where))
        for kind in (BORROWED, COMPOSED, WHOLE):
            is_of_kind = self.kind == kind
            rows: Any = slice(None) if is_of_kind.all() else np.flatnonzero(is_of_kind)
            chosen[self.where[rows][::-1]] = numbers[rows][::-1]
        return chosen

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
        listed = chosen[rows] if self.number is None else self.number[chosen[rows]]
        row_of[listed] = rows
        digest_rows = row_of[additions["row"].astype(np.int64)]
        chosen_additions = additions[digest_rows >= 0]
        chosen_additions["row"] = digest_rows[digest_rows >= 0]
        return chosen_additions[np.lexsort((chosen_additions["link"], chosen_additions["row"]))]

    def _place(self, process: int, record: Record, rows: Column, start: int) -> None:
        """Adds what a record has beside plain chunks, and how its chunks are stored.

        Arguments:
            process, record: of the process.
            rows: of its chunks; those that are elsewhere get the numbers of all bases.
            start: the number of the first of them.
        """
        if record.bases:
            base_numbers = [self.bases.setdefault(base, len(self.bases)) for base in record.bases]
            _renumber_bases(rows, base_numbers)
        if len(record.additions):
            additions = record.additions.copy()
            self.kind[start + additions["row"].astype(np.int64)] = COMPOSED
            additions["row"] += np.uint64(start)
            if record.bases:
                _renumber_bases(additions, base_numbers)
            _shift(additions, len(self.files), self._nbytes)
            self.additions.append(additions)
        if record.blobs:
            from unickpt.frameworks.per_process import blob_key

            places = np.array([place for _, _, _, place in record.blobs.values()], PLACE_DTYPE)
            _shift(places, len(self.files), self._nbytes)
            for name, place in zip(record.blobs, places.tolist(), strict=True):
                self.blobs[blob_key(name, process)] = place
        self.files += [(process, path) for path in record.files]
        if record.inline:
            self.inline.append(record.inline)
            self._nbytes += len(record.inline)

    def _drop_losers(
        self,
        records: Records,
        names: Names,
        rows: Column,
        starts: Sequence[int],
        winners: Mapping[str, int],
    ) -> None:
        """Drops the chunks of arrays for which only those of another process count."""
        is_kept = np.ones(len(rows), np.bool_)
        for (process, record), start in zip(records, starts, strict=True):
            arrays, stop = enumerate(names[process]), start + len(record.chunks)
            lost = [n for n, name in arrays if winners.get(name, process) != process]
            is_kept[start:stop] = ~np.isin(rows["array"][start:stop], lost)
        self.number = np.flatnonzero(is_kept)
        for column in ("where", "digest", "process", "kind", "place_bytes"):
            setattr(self, column, getattr(self, column)[is_kept])


def _renumber_bases(table: Column, numbers: Sequence[int]) -> None:
    """Changes the numbers of bases in places that are elsewhere."""
    is_elsewhere = table["file"] == ELSEWHERE
    bases = table["offset"][is_elsewhere].astype(np.int64)
    table["offset"][is_elsewhere] = np.array(numbers, np.uint64)[bases]


def _shift(table: Column, files: Any, nbytes: Any) -> None:
    """Numbers files after those of earlier records, and likewise the bytes of values in no file.

    Arguments:
        table: with places.
        files, nbytes: those of earlier records, for all rows or each.
    """
    file = table["file"]
    if not len(file) or file.min() >= 0:
        file += files
        return
    is_inline = file == INLINE
    if is_inline.any():
        table["offset"] += np.where(is_inline, nbytes, 0).astype(np.uint64)
    file += np.where(file >= 0, files, 0).astype(file.dtype)


def _of_each(values: Sequence[int], counts: Sequence[int]) -> Any:
    """The value of each row, from those of the records that have so many; one number if all are
    equal."""
    if len(set(values)) == 1:
        return values[0]
    return np.repeat(np.array(values, np.int64), counts)


def _find_rows(
    index: Index, names: Names, records: Records, chunks: Column, counts: Sequence[int]
) -> Column:
    """The rows of all records' chunks in the digest table.

    Raises:
        CoverageError: there is no such chunk.
    """
    spans = chunk_grid.chunk_spans(index.arrays)
    next_starts = {name: span.start for name, span in spans.items()}
    starts, stops, bounds = list[int](), list[int](), list[tuple[int, int]]()
    first_and_count: dict[int, tuple[int, int]] = {}
    for process, record in records:
        array_names = names[process]
        if not record.boxes and record.description in first_and_count:
            bounds.append(first_and_count[record.description])
            continue
        first = len(starts)
        bounds.append((first, len(array_names)))
        starts += [next_starts[name] for name in array_names]
        stops += [spans[name].stop for name in array_names]
        if not record.boxes:
            first_and_count[record.description] = bounds[-1]
        for number, boxes in record.boxes.items():  # in the order of the processes
            name = array_names[number]
            entry = index.arrays[name]
            next_starts[name] += sum(chunk_grid.box_part(entry, box).count for box in boxes)
    if not len(chunks):
        return np.zeros(0, np.int64)
    firsts, lengths = zip(*bounds, strict=True)
    first_rows = np.array([*starts, 0], np.int64)
    room = np.array([*stops, 0], np.int64) - first_rows
    rows, count = np.empty(len(chunks), np.int64), len(chunks)
    first_of = np.broadcast_to(_of_each(firsts, counts), count)
    length_of = np.broadcast_to(_of_each(lengths, counts), count)
    for start in range(0, count, _BLOCK):
        block = slice(start, start + _BLOCK)
        arrays, numbers = chunks["array"][block], chunks["chunk"][block]
        exists = arrays < length_of[block]
        arrays = np.where(exists, arrays + first_of[block], -1)
        exists &= numbers < room[arrays].astype(np.uint64)
        if not exists.all():
            ends = np.cumsum(counts)
            wrong = int(np.searchsorted(ends, start + int(np.argmin(exists)), side="right"))
            raise CoverageError(f"process {records[wrong][0]} lists chunks that do not exist")
        np.add(first_rows[arrays], numbers.astype(np.int64), out=rows[block])
    return rows


def _contested(
    index: Index,
    listed: _ListedChunks,
    chosen: Column,
    is_other: Column,
    assumed: Collection[str],
) -> dict[str, list[int]]:
    """The assumed arrays for which two processes wrote different data for a chunk, with those two.

    Arguments:
        index: of all processes.
        listed: all chunks.
        chosen: for each row of the digest table which of them it is.
        is_other: for each of them whether it is not.
        assumed: as for `merged_chunks`.

    Raises:
        CoverageError: it is another array, or a process lists a chunk twice.
    """
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
    from unickpt.commit import writer_choice

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
                if not writer_choice.is_little(entry.nbytes):
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
