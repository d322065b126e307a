"""Merge: the descriptions and records of all processes -> one index and one digest table.

Checks that a checkpoint is complete and consistent. Nothing here does I/O.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import xxhash

from unickpt.arrays.box import Box
from unickpt.commit.merge_chunks import Chunks, Column, Requests, merged_chunks, requests
from unickpt.commit.messages import ELSEWHERE, Names, Records
from unickpt.errors import CoverageError
from unickpt.format import chunk_grid, codec_protocol, digest_table
from unickpt.format.index import RESERVED, ArrayEntry, Index, PerProcessEntry
from unickpt.trees import tree, tree_json

if TYPE_CHECKING:
    from unickpt.commit.differing_replicas import ReplicaDifference
    from unickpt.format.encoder_protocol import EncodingPolicy

Merging = Callable[[Mapping[int, Any], Sequence[Mapping[str, float]]], Any]
"""Merges notes about a save, by process, with the statistics of all processes."""


@dataclass(frozen=True)
class MergePolicies:
    """The policies by which process 0 merges the output of all processes.

    Arguments:
        merging: returns the function that merges the notes of a name.
        encoding: settles how arrays are stored.
    """

    merging: Callable[[str], Merging | None] = lambda name: None
    encoding: EncodingPolicy | None = None


@dataclass(frozen=True)
class Merged:
    """The output of all processes as one checkpoint.

    Arguments:
        index: of the checkpoint.
        chunks: all of its chunks.
        differences: the arrays that were assumed to be replicas but differ.
    """

    index: Index
    chunks: Chunks
    differences: Sequence[ReplicaDifference]

    @property
    def bases(self) -> tuple[str, ...]:
        """The names of the checkpoints that have some of its chunks."""
        return tuple(base.name for base in self.index.bases)

    @property
    def extra(self) -> dict[str, dict[str, Any]]:
        """The codecs' notes about arrays, by codec and array."""
        notes = dict[str, dict[str, Any]]()
        for name, entry in self.index.arrays.items():
            for codec, note in entry.extra.items():
                notes.setdefault(codec, {})[name] = note
        return notes


class StillNeeded(Exception):
    """Nobody else can write the part of a process that makes no progress."""


def merge_all(
    records: Records,
    described: Mapping[int, Index],
    request: Callable[[Requests], Records],
    policies: MergePolicies,
    replaced: Collection[int] = (),
) -> Merged:
    """Merges the output of all processes.

    Arguments:
        records: of all processes, in order.
        described: their descriptions, by the digests in their records.
        request: makes processes write chunks that their planned writers do not hold; returns the
            records of these.
        policies: decide how notes are merged, and how arrays are stored.
        replaced: the processes whose part others write.

    Raises:
        CoverageError: the processes contradict each other, or leave out a part of an array.
        StillNeeded: not all of that part can be written by others.
    """
    arrays = {digest: list(index.arrays) for digest, index in described.items()}
    names = [arrays[record.description] for _, record in records]
    index = with_boxes(unite(records, described), records, names)
    replicas = None
    if len(records) > 1:
        from unickpt.commit.differing_replicas import Replicas

        replicas = Replicas(records, names)
    assumed, winners = set[str]() if replicas is None else replicas.names, dict[str, int]()
    chunks = merged_chunks(index, records, names, assumed)
    differences = [] if replicas is None else replicas.differences(chunks.contested)
    if differences:
        winners = {difference.name: difference.stored for difference in differences}
        chunks = merged_chunks(index, records, names, assumed, winners)
    wrote = {process: record.statistics.get("bytes", 0) for process, record in records}
    if replaced:
        missing = _of_replaced(index, chunks, names, assumed, winners, wrote, replaced)
    else:
        missing = requests(index, chunks.table, names, winners, wrote)
    written = records
    if missing or replaced:
        written = [*records, *request(missing)]
        chunks = merged_chunks(index, written, names, assumed, winners)
        requests(index, chunks.table, [])
    if policies.encoding is not None:
        index, chunks = _settled(index, chunks, records, names, policies.encoding)
    merged_arrays = with_notes(index, written, names, winners)
    for name, (composed, additions) in chunks.composed(index.arrays).items():
        merged_arrays[name] = replace(merged_arrays[name], composed=composed, additions=additions)
    lent = chunks.borrowed.tobytes() if chunks.bases else b""
    is_long = len(chunks.table) > digest_table.BLOCK_ROWS
    index = replace(
        index,
        arrays=merged_arrays,
        metadata=_metadata(index, records),
        per_process=per_process(index, records),
        chunks=len(chunks.table),
        reused=int(sum(record.statistics.get("reused_bytes", 0) for _, record in written)),
        digests_xxh3=f"{xxhash.xxh3_64_intdigest(chunks.table.tobytes()):016x}",
        digest_blocks=digest_table.blocks(chunks.table) if is_long else None,
        bases=chunks.bases,
        borrowed=len(chunks.borrowed),
        borrowed_xxh3=f"{xxhash.xxh3_64_intdigest(lent):016x}" if chunks.bases else "",
        extra={**index.extra, **_merged_notes(written, policies)},
    )
    return Merged(index, chunks, differences)


def _of_replaced(
    index: Index,
    chunks: Chunks,
    names: Names,
    assumed: Collection[str],
    winners: Mapping[str, int],
    wrote: Mapping[int, float],
    replaced: Collection[int],
) -> Requests:
    """As `requests`, without some processes.

    Raises:
        StillNeeded: other processes do not hold what they have not written, or do not keep it.
    """
    names = [
        () if process in replaced else array_names for process, array_names in enumerate(names)
    ]
    try:
        missing = requests(index, chunks.table, names, winners, wrote)
    except CoverageError as error:
        raise StillNeeded from error
    # Until the commit, processes keep those chunks of others that are only assumed to be equal.
    if any(name not in assumed for positions in missing.values() for name in positions):
        raise StillNeeded
    return missing


def _merged_notes(records: Records, policies: MergePolicies) -> dict[str, Any]:
    """The contents of the index that come from notes of features.

    Raises:
        CoverageError: process 0 lacks the feature of a note.
    """
    notes = dict[str, dict[int, Any]]()
    for process, record in records:
        for name, note in record.notes.items():
            notes.setdefault(name, {})[process] = note
    statistics, merged_notes = [record.statistics for _, record in records], dict[str, Any]()
    if policies.encoding is not None:  # it has seen them
        notes.pop(policies.encoding.name, None)
    for name, by_process in notes.items():
        merge = policies.merging(name)
        if merge is None:
            raise CoverageError(
                f"process {min(by_process)} saves with {name!r}, and process 0 does not. All must "
                "save with the same options"
            )
        if (merged := merge(by_process, statistics)) is not None:
            merged_notes[name] = merged
    return merged_notes


def _settled(
    index: Index, chunks: Chunks, records: Records, names: Names, policy: EncodingPolicy
) -> tuple[Index, Chunks]:
    """The index with the codec of each array, and the places of its encoded chunks."""
    spans, places = chunk_grid.chunk_spans(index.arrays), chunks.places.copy()

    def stored(name: str) -> tuple[Column, Column]:
        array_places = places[spans[name].start : spans[name].stop]
        return array_places["length"], array_places["file"] == ELSEWHERE

    notes = [
        (array_names, record.notes[policy.name])
        for array_names, (_, record) in zip(names, records, strict=True)
    ]
    arrays = dict(index.arrays)
    for name, (encoding, skipped) in policy.settle(index.arrays, stored, notes).items():
        array_places = places[spans[name].start : spans[name].stop]
        array_places["offset"] += skipped.astype(array_places["offset"].dtype)
        array_places["length"] -= skipped.astype(array_places["length"].dtype)
        arrays[name] = replace(arrays[name], encoding=encoding)
    return replace(index, arrays=arrays), replace(chunks, places=places)


def _metadata(index: Index, records: Records) -> Mapping[str, Any]:
    """The metadata, with the steps of units, if some may be left out of a save."""
    steps = [(process, record.units) for process, record in records if record.units]
    if not steps:
        return index.metadata
    from unickpt.format import unit_steps

    return unit_steps.merged(index.metadata, steps)


# The tables of an index that are joined by name.
_SINGULAR = {
    "arrays": "array",
    "aliases": "alias",
    "values": "value",
    "per_process": "PerProcess leaf",
}


# --- descriptions -------------------------------------------------------------------------------


def unite(records: Records, described: Mapping[int, Index]) -> Index:
    """Joins the descriptions of processes that hold different parts of one tree.

    Arguments:
        records: of all processes; each has the digest of its process's description.
        described: the descriptions by their digests.

    Raises:
        CoverageError: two contradict each other; names the leaf and what each process has.
    """
    first: dict[int, int] = {}
    for process, record in records:
        first.setdefault(record.description, process)
    distinct = [(process, described[digest]) for digest, process in first.items()]
    ours = distinct[0][1]
    if len(distinct) == 1:
        return ours
    for process, theirs in distinct[1:]:
        _check_settings(ours, theirs, process)
    tables: dict[str, Any] = _facts(distinct)
    structure = _trees([(process, index.tree) for process, index in distinct])
    names = {leaf.name for leaf in tree.leaves(tree_json.from_json(structure))}
    unnamed = sorted(names ^ {name for table in tables.values() for name in table})
    if unnamed:
        raise CoverageError(
            f"the processes' trees differ at {unnamed[0]!r}: a key is a str on some processes and "
            "an int on others"
        )
    return replace(ours, tree=structure, **tables)


def _check_settings(ours: Index, theirs: Index, process: int) -> None:
    for what in ("processes", "compression", "metadata"):
        mine, other = getattr(ours, what), getattr(theirs, what)
        if what == "metadata":
            mine, other = map(_shared, (mine, other))
        if mine != other:
            raise CoverageError(
                f"the processes save with different {what}: process 0 with {str(mine)[:80]}, "
                f"process {process} with {str(other)[:80]}"
            )


def _shared(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that all processes must share: without those that process 0 alone decides for
    its step, but with the record of merges."""
    library_metadata = metadata.get(RESERVED)
    merge = library_metadata.get("merge") if isinstance(library_metadata, dict) else None
    return {**{k: v for k, v in metadata.items() if k != RESERVED}, "unickpt merge": merge}


def _facts(distinct: Sequence[tuple[int, Index]]) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {kind: {} for kind in _SINGULAR}
    first: dict[str, tuple[int, str, Any]] = {}
    for process, index in distinct:
        for kind in _SINGULAR:
            for name, fact in getattr(index, kind).items():
                first_fact = first.setdefault(name, (process, kind, fact))
                if first_fact[1] != kind or not _agree(first_fact[2], fact):
                    raise _disagreement(name, first_fact, (process, kind, fact))
                tables[kind][name] = first_fact[2]
    return tables


def _disagreement(
    name: str, first: tuple[int, str, Any], second: tuple[int, str, Any]
) -> CoverageError:
    both = [f"process {process} has {_show(kind, fact)}" for process, kind, fact in (first, second)]
    what = f"{_SINGULAR[first[1]]} " if first[1] == second[1] else ""
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
        return f"{fact.stored_dtype}{list(fact.shape)} {laid_out} in chunks of {list(fact.chunk)}"
    if kind == "per_process":
        return "a PerProcess"
    return ("an alias of " if kind == "aliases" else "the value ") + repr(fact)[:80]


def _trees(items: list[tuple[int, Any]]) -> Any:
    """Joins trees pairwise, so that large ones are not walked once per process."""
    while len(items) > 1:
        pairs = zip(items[::2], items[1::2], strict=False)
        items = [*itertools.starmap(_joined, pairs), *items[len(items) // 2 * 2 :]]
    return items[0][1]


def _joined(pair: tuple[int, Any], other: tuple[int, Any]) -> tuple[int, Any]:
    (first, ours), (second, theirs) = pair, other
    try:
        return first, tree_json.merge(ours, theirs)
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
    declared: dict[str, list[tuple[Box, tuple[int, ...]]]] = {}
    for process, record in records:
        for number, boxes in record.boxes.items():
            array_boxes = declared.setdefault(names[process][number], [])
            array_boxes += [(box, (process,)) for box in boxes]
    arrays = dict(index.arrays)
    for name, entry in index.arrays.items():
        if entry.boxes == ():
            from unickpt.format.coverage import check_boxes

            boxes_of_all = tuple(declared.get(name, ()))
            check_boxes(entry, boxes_of_all)
            arrays[name] = replace(entry, boxes=boxes_of_all)
    return replace(index, arrays=arrays)


# --- codecs ---------------------------------------------------------------------------------------


def with_notes(
    index: Index, records: Records, names: Names, winners: Mapping[str, int]
) -> dict[str, ArrayEntry]:
    """The arrays, with what codecs say about those that they store.

    Arguments:
        index: of all processes.
        records: of their output.
        names: for each process the arrays that it has.
        winners: arrays for which only the chunks of one process count, with that process.
    """
    arrays, notes = dict(index.arrays), dict[str, list[Any]]()
    for process, record in records:
        for of_arrays in record.extra.values():  # an array has one codec
            for number, note in of_arrays.items():
                name = names[process][number]
                if winners.get(name, process) == process:
                    notes.setdefault(name, []).append(note)
    for name, entry in index.arrays.items():
        if (codec := entry.codec) is not None:
            extra = {codec: codec_protocol.merge(codec, notes.get(name, []))}
            arrays[name] = replace(entry, extra=extra)
    return arrays


# --- per-process values ---------------------------------------------------------------------------


def per_process(index: Index, records: Records) -> dict[str, PerProcessEntry]:
    """Size and digest of every process's value of each per-process leaf.

    Raises:
        CoverageError: a process has none, or all leave it to others.
    """
    for process, record in records:
        missing = sorted(index.per_process.keys() - record.blobs.keys())
        if missing:
            raise CoverageError(
                f"process {process} has no value for the PerProcess leaf {missing[0]!r}; every "
                "process must save one"
            )
    entries = {}
    for name in index.per_process:
        heads = tuple(record.blobs[name][2] for _, record in records)
        blobs = tuple(record.blobs[name][:2] for _, record in records)
        if not any(size for size, _ in blobs):
            raise CoverageError(
                f"no process has a value for the PerProcess leaf {name!r}: of the processes with "
                "equal values, one must save it (`Ranks.writes` of unickpt.data)"
            )
        entries[name] = PerProcessEntry(blobs, heads if any(heads) else ())
    return entries
