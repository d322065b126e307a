"""Merge: the descriptions and records of all processes -> one index and one digest table.

Checks that a checkpoint is complete and consistent. Nothing here does I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from unickpt.arrays.box import Box
from unickpt.commit import chunk_owners
from unickpt.commit.record import Record
from unickpt.errors import CoverageError
from unickpt.format import chunk_grid, digest_table
from unickpt.format.coverage import check_boxes
from unickpt.format.index import RESERVED, ArrayEntry, Index, PerProcessEntry
from unickpt.quoting import some
from unickpt.trees import tree

_NOBODY = np.uint32(0xFFFFFFFF)
# The tables of an index that are joined by name.
SINGULAR = {
    "arrays": "array",
    "aliases": "alias",
    "values": "value",
    "per_process": "PerProcess leaf",
}

Records = Sequence[tuple[int, Record]]
Names = Sequence[Sequence[str]]
Requests = dict[int, dict[str, list[int]]]


# --- descriptions -------------------------------------------------------------------------------


def unite(described: Sequence[Index]) -> Index:
    """Joins the descriptions of processes that hold different parts of one tree.

    Arguments:
        described: for each process its description; the same object where they are equal.

    Raises:
        CoverageError: two contradict each other; names the leaf and what each process has.
    """
    first: dict[int, int] = {}
    for process, index in enumerate(described):
        first.setdefault(id(index), process)
    distinct = [(process, described[process]) for process in first.values()]
    if len(distinct) == 1:
        return described[0]
    for process, theirs in distinct[1:]:
        _check_settings(described[0], theirs, process)
    tables: dict[str, Any] = _facts(distinct)
    structure = _trees([(process, index.tree) for process, index in distinct])
    names = {leaf.name for leaf in tree.leaves(tree.from_json(structure))}
    unnamed = sorted(names ^ {name for table in tables.values() for name in table})
    if unnamed:
        raise CoverageError(
            f"the processes' trees differ at {unnamed[0]!r}: a key is a str on some processes and "
            "an int on others"
        )
    return replace(described[0], tree=structure, **tables)


def _check_settings(ours: Index, theirs: Index, process: int) -> None:
    for what in ("processes", "codecs", "metadata"):
        mine, other = getattr(ours, what), getattr(theirs, what)
        if what == "metadata":
            mine, other = ({k: v for k, v in m.items() if k != RESERVED} for m in (mine, other))
        if mine != other:
            raise CoverageError(
                f"the processes save with different {what}: process 0 with {str(mine)[:80]}, "
                f"process {process} with {str(other)[:80]}"
            )


def _facts(distinct: Sequence[tuple[int, Index]]) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {kind: {} for kind in SINGULAR}
    first: dict[str, tuple[int, str, Any]] = {}
    for process, index in distinct:
        for kind in SINGULAR:
            for name, fact in getattr(index, kind).items():
                known = first.setdefault(name, (process, kind, fact))
                if known[1] != kind or not _agree(known[2], fact):
                    raise _disagreement(name, known, (process, kind, fact))
                tables[kind][name] = known[2]
    return tables


def _disagreement(
    name: str, first: tuple[int, str, Any], second: tuple[int, str, Any]
) -> CoverageError:
    both = [f"process {process} has {_show(kind, fact)}" for process, kind, fact in (first, second)]
    what = f"{SINGULAR[first[1]]} " if first[1] == second[1] else ""
    advice = ""
    if what == "value ":
        advice = ". Values that differ by process belong in unickpt.PerProcess"
    return CoverageError(f"the processes disagree about {what}{name!r}: {', '.join(both)}{advice}")


def _agree(mine: Any, other: Any) -> bool:
    if mine is other:
        return True
    if isinstance(mine, ArrayEntry) and isinstance(other, ArrayEntry):
        return mine == other or _agree_but_for_processes(mine, other)
    if type(mine) is float and type(other) is float:
        return struct.pack("<d", mine) == struct.pack("<d", other)
    return type(mine) is type(other) and bool(mine == other)


def _agree_but_for_processes(mine: ArrayEntry, other: ArrayEntry) -> bool:
    """Whether two arrays differ only in the processes of their meshes (one mesh per replica)."""
    a, b = mine.layout, other.layout
    if a is None or b is None or replace(mine, layout=b) != other:
        return False
    return (a.mesh.axes, a.mesh.shape, a.dims) == (b.mesh.axes, b.mesh.shape, b.dims)


def _show(kind: str, fact: Any) -> str:
    if isinstance(fact, ArrayEntry):
        laid_out = "in boxes" if fact.layout is None else f"laid out {fact.layout}"
        return f"{fact.dtype_and_shape} {laid_out} in chunks of {list(fact.chunk)}"
    if kind == "per_process":
        return "a PerProcess"
    return ("an alias of " if kind == "aliases" else "the value ") + repr(fact)[:80]


def _trees(items: list[tuple[int, Any]]) -> Any:
    """Joins trees pairwise, so that large ones are not walked once per process."""
    while len(items) > 1:
        items = [_pair(items[i : i + 2]) for i in range(0, len(items), 2)]
    return items[0][1]


def _pair(items: Sequence[tuple[int, Any]]) -> tuple[int, Any]:
    if len(items) == 1:
        return items[0]
    (first, ours), (second, theirs) = items
    try:
        return first, tree.merge(ours, theirs)
    except ValueError as error:
        raise CoverageError(
            f"process {first} and process {second} save different trees: {error}"
        ) from None


# --- boxes --------------------------------------------------------------------------------------


def with_boxes(index: Index, records: Records, names: Names) -> Index:
    """The index with the boxes of arrays whose fragments each process declares itself.

    Raises:
        CoverageError: they do not cover an array exactly once.
    """
    told: dict[str, list[tuple[Box, tuple[int, ...]]]] = {}
    for process, record in records:
        for number, boxes in record.boxes.items():
            at = told.setdefault(names[process][number], [])
            at += [(box, (process,)) for box in boxes]
    arrays = dict(index.arrays)
    for name, entry in index.arrays.items():
        if entry.boxes == ():
            boxes_of_all = tuple(told.get(name, ()))
            check_boxes(entry, boxes_of_all)
            arrays[name] = replace(entry, boxes=boxes_of_all)
    return replace(index, arrays=arrays)


# --- chunks -------------------------------------------------------------------------------------


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
    told = {name: span.start for name, span in spans.items()}
    for process, record in records:
        if not len(record.chunks):
            continue
        where = positions_of(index, told, names[process], record)
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


def _lost_rows(
    record: Record, names: Sequence[str], process: int, winners: Mapping[str, int]
) -> Any:
    lost = [n for n, name in enumerate(names) if winners.get(name, process) != process]
    return np.isin(record.chunks["array"], lost)


def losers(records: Records, names: Names, winners: Mapping[str, int]) -> dict[int, list[str]]:
    """For each process, the arrays that it wrote chunks of, but another process's data counts."""
    found: dict[int, list[str]] = {}
    for process, record in records:
        lost = _lost_rows(record, names[process], process, winners)
        for number in np.unique(record.chunks["array"][lost]).tolist():
            found.setdefault(process, []).append(names[process][number])
    return found


def positions_of(index: Index, told: dict[str, int], names: Sequence[str], record: Record) -> Any:
    """The positions of a record's chunks in the table; advances `told` past this process's boxes,
    which are in the order of the processes."""
    numbers = record.chunks["array"]
    base = np.zeros(len(names), np.int64)
    for number in np.unique(numbers).tolist():
        name = names[number]
        base[number] = told[name]
        if number in record.boxes:
            entry = index.arrays[name]
            told[name] += sum(chunk_grid.box_part(entry, box).count for box in record.boxes[number])
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
    index: Index, table: digest_table.Table, names: Names, winners: Mapping[str, int] | None = None
) -> Requests:
    """For chunks that no process wrote: which processes hold them, and so have to write them.

    A plain tensor is assumed to be on all processes. If only some have it (pipeline stages), its
    planned writer may lack it, which is known only here, from the records of all processes.

    Arguments:
        index: of all processes.
        table: what they wrote.
        names: for each process the arrays that it has.
        winners: arrays that one process must write whole, with that process.

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
    first = 0
    for name, entry in index.arrays.items():
        start = first
        for part in chunk_grid.parts(entry):
            low, high = np.searchsorted(holes, (first, first + part.count))
            for position in holes[low:high].tolist():
                box = part.chunk_box(position - first)
                # Spread over the processes that have it; but small arrays come from the first.
                turn = 0 if chunk_owners.is_little(entry.nbytes) else position
                chosen = _holder(entry, box, having.get(name, []), turn)
                found.setdefault(chosen, {}).setdefault(name, []).append(position - start)
            first += part.count
    return found


def _holder(entry: ArrayEntry, box: Box, having: Sequence[int], turn: int) -> int:
    """A process that holds a box: that of this turn, or the next one that does."""
    turn %= max(1, len(having))
    for process in [*having[turn:], *having[:turn]]:
        if _holds(entry, process, box):
            return process
    raise CoverageError(
        f"array {entry.name!r} of shape {list(entry.shape)}: no process holds {box}. Its layout is "
        f"{entry.layout}; processes {some(having)} have it in their tree"
    )


def _holds(entry: ArrayEntry, process: int, box: Box) -> bool:
    if entry.layout is not None:
        return any(b.contains(box) for b in entry.layout.local(entry.shape, process))
    return any(process in holders and b.contains(box) for b, holders in entry.boxes or ())


def per_process(index: Index, records: Records) -> dict[str, PerProcessEntry]:
    """Size and digest of every process's value of each per-process leaf.

    Raises:
        CoverageError: a process has none.
    """
    for process, record in records:
        missing = sorted(index.per_process.keys() - record.blobs.keys())
        if missing:
            raise CoverageError(
                f"process {process} has no value for the PerProcess leaf {missing[0]!r}; every "
                "process must save one"
            )
    return {
        name: PerProcessEntry(tuple(record.blobs[name] for _, record in records))
        for name in index.per_process
    }
