"""The chunks of all processes -> one digest table; and which chunks are still to be written.

Checks that each chunk is written exactly once. Nothing here does I/O.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unickpt.arrays.box import Box
from unickpt.commit import chunk_owners
from unickpt.commit.record import Names, Record, Records
from unickpt.errors import CoverageError
from unickpt.format import borrowed, chunk_grid, chunk_store, digest_table, patches
from unickpt.format.index import ArrayEntry, BaseEntry, Index
from unickpt.quoting import some

_NOBODY = np.uint32(0xFFFFFFFF)

Requests = dict[int, dict[str, list[int]]]
"""For each process the positions of chunks by array name."""


def merged_digests(
    index: Index,
    records: Records,
    names: Names,
    assumed: Collection[str] = (),
    winners: Mapping[str, int] | None = None,
) -> tuple[digest_table.Table, dict[str, list[int]]]:
    """The digest table, as far as the records fill it; no chunk has two writers.

    Arguments:
        index: of all processes.
        records: what they wrote.
        names: for each process the arrays that it has.
        assumed: arrays whose replication is only assumed.
        winners: arrays of which only the chunks of one process count, with that process.

    Returns:
        The table, and the assumed arrays for which two processes wrote different data for a chunk,
        with those two.

    Raises:
        CoverageError: two processes wrote different data for a chunk of another array.
    """
    contested: dict[str, list[int]] = {}
    spans = digest_table.spans(index.arrays)
    table = np.zeros(max((span.stop for span in spans.values()), default=0), digest_table.DTYPE)
    table["process"] = _NOBODY
    starts = {name: span.start for name, span in spans.items()}
    for process, record in records:
        if not len(record.chunks):
            continue
        where = positions_of(index, starts, names[process], record)
        rows = record.chunks
        lost = _lost_rows(record, names[process], process, winners or {})
        if lost.any():
            where, rows = where[~lost], rows[~lost]
        if not len(rows):
            continue
        if where.max() >= len(table) or len(np.unique(where)) != len(where):
            raise CoverageError(f"process {process} lists chunks that do not exist, or one twice")
        taken = table["process"][where] != _NOBODY
        if taken.any():
            again, other = where[taken], rows["digest"][taken]
            for position in again[table["digest"][again] != other].tolist():
                name, box = chunk_at(index, position)
                first = int(table["process"][position])
                if name not in assumed:
                    raise _two_writers(name, box, first, process)
                contested.setdefault(name, [first, process])
        fresh = where[~taken]
        table["digest"][fresh] = rows["digest"][~taken]
        table["process"][fresh] = process
    return table, contested


def merged_borrowed(
    index: Index, records: Records, names: Names, winners: Mapping[str, int]
) -> tuple[tuple[BaseEntry, ...], borrowed.Table]:
    """The chunks that no process wrote, because a checkpoint beside this one has them.

    Arguments:
        index, records, names, winners: as for `merged_digests`.

    Returns:
        These checkpoints, and the table of the chunks.
    """
    bases: dict[BaseEntry, int] = {}
    rows: dict[int, int] = {}
    written: set[int] = set()
    starts = {name: span.start for name, span in digest_table.spans(index.arrays).items()}
    for process, record in records:
        if not len(record.chunks):
            continue
        where = positions_of(index, starts, names[process], record)
        taken = np.zeros(len(where), np.bool_) if record.base is None else record.borrowed
        kept = ~_lost_rows(record, names[process], process, winners)
        written.update(where[kept & ~taken].tolist())
        if record.base is not None:
            number = bases.setdefault(record.base, len(bases))
            rows.update(dict.fromkeys(where[kept & taken].tolist(), number))
    left = sorted((row, base) for row, base in rows.items() if row not in written)
    used = sorted({base for _, base in left})
    table = np.array([(row, used.index(base)) for row, base in left], borrowed.DTYPE)
    every = list(bases)
    return tuple(every[base] for base in used), table


@dataclass(frozen=True)
class Patched:
    """The chunks that are stored as patches.

    Arguments:
        counts: how many each array has; only of those that have some.
        unused: for each process the keys of the patches and full chunks that are not taken from it,
            because another process wrote these chunks, too.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    unused: Mapping[int, Sequence[str]] = field(default_factory=dict)


def merged_patched(
    index: Index, records: Records, names: Names, winners: Mapping[str, int]
) -> Patched:
    """The chunks that are stored as patches, each from one process.

    Replicas that do not know of each other may both write a chunk, one of them as a patch, or both
    with another full chunk. Their values must not be mixed.

    Arguments:
        index, records, names, winners: as for `merged_digests`.
    """
    if not any(record.patched.any() for _, record in records):
        return Patched()
    starts = {name: span.start for name, span in digest_table.spans(index.arrays).items()}
    whole: list[Any] = []
    found: list[tuple[int, Any]] = []
    for process, record in records:
        if not len(record.chunks):
            continue
        where = positions_of(index, starts, names[process], record)
        written = ~_lost_rows(record, names[process], process, winners)
        if record.base is not None:
            written &= ~record.borrowed
        is_patch = record.patched if len(record.patched) else np.zeros(len(where), np.bool_)
        whole.append(where[written & ~is_patch])
        found.append((process, where[written & is_patch]))
    taken = np.unique(np.concatenate(whole))
    unused = dict[int, list[str]]()
    used = list[Any]()
    for process, where in found:
        is_left = np.isin(where, taken)
        unused.setdefault(process, []).extend(_keys(index, np.sort(where[is_left])))
        used.append(where[~is_left])
        taken = np.union1d(taken, where)
    every = np.concatenate(used)
    counts = {
        name: int(count)
        for name, span in digest_table.spans(index.arrays).items()
        if (count := ((every >= span.start) & (every < span.stop)).sum())
    }
    return Patched(counts, unused)


def _keys(index: Index, positions: Any) -> Iterator[str]:
    """The keys of the full chunks and of the patches at positions of the digest table, which
    ascend."""
    first = 0
    for entry in index.arrays.values() if len(positions) else ():
        for part in chunk_grid.parts(entry):
            low, high = np.searchsorted(positions, (first, first + part.count))
            for number in (positions[low:high] - first).tolist():
                yield chunk_store.key_of(patches.full_of(part), number)
                yield chunk_store.key_of(patches.patch_of(part), number)
            first += part.count


def _lost_rows(
    record: Record, names: Sequence[str], process: int, winners: Mapping[str, int]
) -> Any:
    lost = [n for n, name in enumerate(names) if winners.get(name, process) != process]
    return np.isin(record.chunks["array"], lost)


def lost_arrays(records: Records, names: Names, winners: Mapping[str, int]) -> dict[int, list[str]]:
    """For each process, the arrays that it wrote chunks of, but another process's data counts."""
    found: dict[int, list[str]] = {}
    for process, record in records:
        lost = _lost_rows(record, names[process], process, winners)
        for number in np.unique(record.chunks["array"][lost]).tolist():
            found.setdefault(process, []).append(names[process][number])
    return found


def positions_of(index: Index, starts: dict[str, int], names: Sequence[str], record: Record) -> Any:
    """The positions of a record's chunks in the table; advances `starts` past this process's boxes,
    which are in the order of the processes."""
    numbers = record.chunks["array"]
    base = np.zeros(len(names), np.int64)
    for number in np.unique(numbers).tolist():
        name = names[number]
        base[number] = starts[name]
        if number in record.boxes:
            entry = index.arrays[name]
            starts[name] += sum(
                chunk_grid.box_part(entry, box).count for box in record.boxes[number]
            )
    return base[numbers] + record.chunks["chunk"].astype(np.int64)


def _two_writers(name: str, box: Box, first: int, second: int) -> CoverageError:
    """Allowed only if they wrote the same, as replicas that were not declared may."""
    return CoverageError(
        f"array {name!r}: processes {first} and {second} hold different data for {box}"
    )


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
    """For chunks that no process wrote: which processes hold them, and so have to write them.

    A plain tensor is assumed to be on all processes. If only some have it (pipeline stages), its
    planned writer may lack it, which is known only here, from the records of all processes.

    Arguments:
        index: of all processes.
        table: what they wrote.
        names: for each process the arrays that it has.
        winners: arrays that one process must write whole, with that process.
        written: the bytes that each process wrote.

    Returns:
        For each process the positions of chunks by array name.

    Raises:
        CoverageError: no process holds a chunk.
    """
    holes = np.flatnonzero(table["process"] == _NOBODY)
    found: Requests = {}
    if not holes.size:
        return found
    having: dict[str, list[int]] = {}
    for process, own in enumerate(names):
        for name in own:
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
                # Spread over the processes that have it; but small arrays come from the first.
                if not chunk_owners.is_little(entry.nbytes):
                    so_far = sorted(((written or {}).get(p, 0), p) for p in processes)
                    load = loads.setdefault(tuple(processes), so_far)
                chosen = _holder(entry, box, load)
                found.setdefault(chosen, {}).setdefault(name, []).append(position - start)
            first += part.count
    return found


def _holder(entry: ArrayEntry, box: Box, load: list[tuple[float, int]]) -> int:
    """The process that holds a box, and has the least to write.

    Arguments:
        entry, box: of the array.
        load: the bytes that each process writes, a heap; the box's are added.
    """
    others = []
    try:
        while load:
            nbytes, process = heapq.heappop(load)
            if _holds(entry, process, box):
                others.append((nbytes + box.size * entry.itemsize, process))
                return process
            others.append((nbytes, process))
    finally:
        for other in others:
            heapq.heappush(load, other)
    raise CoverageError(
        f"array {entry.name!r} of shape {list(entry.shape)}: no process holds {box}. Its layout is "
        f"{entry.layout}; processes {some(sorted(p for _, p in load))} have it in their tree"
    )


def _holds(entry: ArrayEntry, process: int, box: Box) -> bool:
    if entry.layout is not None:
        return any(b.contains(box) for b in entry.layout.local(entry.shape, process))
    return any(process in holders and b.contains(box) for b, holders in entry.boxes or ())
