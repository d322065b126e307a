"""Copies of a checkpoint that leave out units (`write_filter`), which other checkpoints next to the
copy have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from unickpt.arrays.box import Box
from unickpt.commit.root import Root
from unickpt.commit.version import Version
from unickpt.format import borrowed, chunk_grid, codec_protocol, digest_table
from unickpt.format.chunk_grid import WHOLE_LINK, Part
from unickpt.format.index import BORROWED_KEY, DIGESTS_KEY, ArrayEntry, BaseEntry, Index
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.storage import paths
from unickpt.storage.database import Database
from unickpt.tools.copying import VersionCopy
from unickpt.write_filter import Selection


@dataclass(frozen=True)
class PartialCopy:
    """A copy that borrows units.

    Arguments:
        index: of the copy.
        changed: the values of its database that differ from the original's, besides the index; None
            for a key that it lacks.
        left_out: the original's data files of which the copy needs nothing.
    """

    index: Index
    changed: Mapping[str, bytes | None]
    left_out: frozenset[str]


def leaving_out(reader: OcdbtReader, base: OcdbtReader, selection: Selection) -> PartialCopy | None:
    """A copy of a checkpoint in which some units are those of another checkpoint.

    Arguments:
        reader: of the original.
        base: next to the copy; has the units, or borrows them itself.
        selection: says which units are left out, and has the metadata of the copy.

    Returns:
        The copy; None if the base has other chunks, or the copy would borrow from too many
        checkpoints.

    Raises:
        CheckpointCorrupt, StorageError: one of the two cannot be read.
    """
    units = selection.units
    if reader.index.processes != base.index.processes or not all(
        _are_alike(reader.index.arrays[name], base.index.arrays.get(name)) for name in units
    ):
        return None
    bases: dict[BaseEntry, int] = {}
    tables, rows = [np.zeros(0, digest_table.DTYPE)], list[tuple[int, int, int]]()
    changed: dict[str, bytes | None] = {}
    needed, unneeded, nbytes, before = set[str](), set[str](), 0, 0
    arrays = dict(reader.index.arrays)
    for name, entry in reader.index.arrays.items():
        table = reader.digests_of(name)
        if name in units:
            table, base_table = table.copy(), base.digests_of(name)
        for first, part in chunk_grid.numbered_parts(entry):
            chunks = [(entry, part, number) for number in range(part.count)]
            for number, place in enumerate(reader.chunk_values.whole_places(chunks)):
                path = getattr(place, "path", "")
                box = part.chunk_box(number)
                row, is_left_out = first + number, selection.borrows(name, box)
                owner = _owner(base if is_left_out else reader, entry, part, number)
                if is_left_out:
                    owner = owner or _itself(base)
                    table[row] = base_table[row]
                    arrays[name] = _noted(entry, base.index.arrays[name])
                    changed[chunk_grid.chunk_key(part, number)] = None
                    nbytes += box.size * entry.itemsize
                (unneeded if is_left_out else needed).add(path)
                if owner is not None:
                    rows.append((before + row, bases.setdefault(owner, len(bases)), WHOLE_LINK))
        tables.append(table)
        before += len(table)
    if len(bases) > borrowed.MOST_BASES:
        return None
    digests, references = np.concatenate(tables), np.array(rows, borrowed.DTYPE).tobytes()
    changed |= {DIGESTS_KEY: digests.tobytes(), BORROWED_KEY: references}
    is_long = reader.index.digest_blocks is not None
    index = replace(
        reader.index,
        arrays=arrays,
        metadata=selection.metadata,
        digests_xxh3=f"{xxhash.xxh3_64_intdigest(digests.tobytes()):016x}",
        digest_blocks=digest_table.blocks(digests) if is_long else None,
        bases=tuple(bases),
        borrowed=len(rows),
        borrowed_xxh3=f"{xxhash.xxh3_64_intdigest(references):016x}",
        reused=reader.index.reused + nbytes,
    )
    return PartialCopy(index, changed, frozenset(unneeded - needed - {""}))


def replace_in_place(
    reader: OcdbtReader, version: Version, part: PartialCopy, timeout_s: float
) -> bool:
    """Replaces a checkpoint by a copy of it that borrows units; writes only a B-tree.

    Arguments:
        reader: of the checkpoint; the copy has its files.
        version: of the checkpoint.
        part: the copy.
        timeout_s: how long to wait for another process that writes there.

    Returns:
        Whether it was replaced; false if another save has replaced it.

    Raises:
        Failed: the storage failed.
    """
    location, context = reader.location, paths.context()
    root = Root(Database(location, context))
    before = root.read()
    copy = VersionCopy(location, version, reader, location, 0)
    manifest = copy.rewritten(part.index, part.changed, context)
    return before.digest == version.digest and root.replace(before, manifest, timeout_s)


def lost_boxes(
    reader: OcdbtReader, copy: OcdbtReader, processes: Sequence[int]
) -> Iterator[tuple[str, Box]]:
    """The chunks of a checkpoint that are lost with the files of some processes, because a partial
    copy left them out: the names of their arrays, and their boxes.

    Arguments:
        reader: of the checkpoint.
        copy: of it.
        processes: whose files are lost.

    Raises:
        CheckpointCorrupt, StorageError: one of the two cannot be read.
    """
    left_out = np.setdiff1d(_borrowed_rows(copy), _borrowed_rows(reader))
    before = 0
    for name, entry in reader.index.arrays.items() if len(left_out) else ():
        numbered = list(chunk_grid.numbered_parts(entry))
        count = sum(part.count for _, part in numbered)
        first, last = np.searchsorted(left_out, (before, before + count))
        rows = left_out[first:last] - before
        lost = rows[np.isin(reader.digests_of(name)["process"][rows], processes)].tolist()
        for start, part in numbered if lost else ():
            for row in lost:
                if start <= row < start + part.count:
                    yield name, part.chunk_box(row - start)
        before += count


def _borrowed_rows(reader: OcdbtReader) -> np.ndarray[Any, Any]:
    rows: np.ndarray[Any, Any] = np.zeros(0, np.int64)
    return reader.borrowed.table["row"].astype(np.int64) if reader.index.bases else rows


def _owner(reader: OcdbtReader, entry: ArrayEntry, part: Part, number: int) -> BaseEntry | None:
    """The checkpoint from which a checkpoint borrows a chunk; None if it has it itself."""
    links = reader.borrowed.links(entry, part, number) if reader.index.bases else {}
    return reader.index.bases[links[WHOLE_LINK]] if links else None


def _itself(reader: OcdbtReader) -> BaseEntry:
    return BaseEntry(borrowed.name_of(reader.location), reader.manifest_digest)


def _noted(entry: ArrayEntry, base: ArrayEntry) -> ArrayEntry:
    """An entry with the notes of its codec about the chunks of both arrays."""
    if (name := entry.codec) is None:
        return entry
    note = codec_protocol.merge(name, [entry.extra[name], base.extra[name]])
    return replace(entry, extra={**entry.extra, name: note})


def _are_alike(entry: ArrayEntry, base: ArrayEntry | None) -> bool:
    """Whether two arrays have the same chunks, each stored as one value."""
    if base is None or entry.composed or base.composed:
        return False
    facts = [
        (e.shape, e.dtype, e.encoding, e.chunk, e.cut, e.boxes, e.layout) for e in (entry, base)
    ]
    return facts[0] == facts[1]
