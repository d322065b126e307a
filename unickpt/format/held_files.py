"""Files that a copy of a checkpoint need not send: another one at the destination has them.

A save that reuses chunks of an earlier checkpoint has their files as hard links. If that earlier
checkpoint was copied to the same destination, so were these files, under the same names, which are
random numbers of 128 bits: no bytes have to be compared.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import tensorstore as ts

from unickpt.errors import UnickptError
from unickpt.format import borrowed, chunk_grid
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry, BaseEntry
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.storage import data_files
from unickpt.storage.btree.nodes import DataReference
from unickpt.storage.errors import Failed

_log = logging.getLogger("unickpt")


@dataclass(frozen=True)
class LinkedChunk:
    """A chunk in a linked file.

    Arguments:
        entry, part, number: which it is.
        place: the file and the bytes.
        row: its row in the digest table.
        digest: its digest.
    """

    entry: ArrayEntry
    part: Part
    number: int
    place: DataReference
    row: int
    digest: int


Linked = Mapping[str, Sequence[LinkedChunk]]
"""The chunks in linked files, by the files' paths below the checkpoint's folder."""


@dataclass(frozen=True)
class HeldFiles:
    """Linked files of a checkpoint whose chunks are all in another checkpoint.

    Arguments:
        base: the other checkpoint.
        chunks: those in these files.
        paths: for each file its path below the folder of the base.
    """

    base: OcdbtReader
    chunks: Linked
    paths: Mapping[str, str]

    @cached_property
    def nbytes(self) -> int:
        """Logical bytes of the chunks."""
        return sum(
            chunk.part.chunk_box(chunk.number).size * chunk.entry.itemsize
            for chunks in self.chunks.values()
            for chunk in chunks
        )

    @property
    def is_worthwhile(self) -> bool:
        """Whether enough of the base is in use to keep it for them."""
        entries = self.base.index.arrays.values()
        return self.nbytes >= borrowed.LEAST_USED * sum(entry.nbytes for entry in entries)

    @property
    def entry(self) -> BaseEntry:
        """The base, as the index of a borrowing checkpoint names it."""
        return BaseEntry(borrowed.name_of(self.base.location), self.base.manifest_digest)

    @property
    def table(self) -> borrowed.BorrowedTable:
        """The chunks, as borrowed from the base, the only one."""
        rows = sorted(chunk.row for chunks in self.chunks.values() for chunk in chunks)
        table = np.zeros(len(rows), borrowed.DTYPE)  # whole chunks
        table["row"] = rows
        return table


def linked_chunks(reader: OcdbtReader) -> Linked:
    """The chunks of a checkpoint that are in linked files. Leaves out files with values of
    composed chunks: no digest in the table covers these.

    Raises:
        CheckpointCorrupt, StorageError: it cannot be read.
    """
    chunks_by_path: dict[str, list[LinkedChunk]] = {}
    composed = set[str]()
    before = 0
    for name, entry in reader.index.arrays.items():
        rows = reader.digests_of(name)
        for first, part in chunk_grid.numbered_parts(entry):
            for number in range(part.count):
                reference = reader.chunk_values.where(entry, part, number)
                if reference is not None and f"/{data_files.LINKED_FOLDER}/" in reference.path:
                    if reader.chunk_values.chain(entry, part, number):
                        composed.add(reference.path)
                    row = first + number
                    digest = int(rows["digest"][row])
                    chunk = LinkedChunk(entry, part, number, reference, before + row, digest)
                    chunks_by_path.setdefault(reference.path, []).append(chunk)
        before += len(rows)
    return {path: chunks for path, chunks in chunks_by_path.items() if path not in composed}


def held_by(
    base: OcdbtReader, linked: Linked, reader: OcdbtReader, context: ts.Context
) -> HeldFiles:
    """The linked files of a checkpoint that another one has.

    Arguments:
        base: the other one, which borrows no chunks itself.
        linked: from `linked_chunks`.
        reader: of the checkpoint.
        context: for the storage of the base.
    """
    try:
        parts = _HeldParts(base)
        base_paths = {path: _path_in(parts, base, chunks) for path, chunks in linked.items()}
        paths = {path: base_path for path, base_path in base_paths.items() if base_path is not None}
        lost = _incomplete(base, {p: linked[p] for p in paths}, paths, context)
    except UnickptError as error:  # then all is sent
        _log.warning("%s: nothing is shared with it: %s", base.location, error)
        return HeldFiles(base, {}, {})
    paths = {path: base_path for path, base_path in paths.items() if path not in lost}
    return HeldFiles(base, {path: linked[path] for path in paths}, paths)


class _HeldParts:
    """The digests of the chunks of a checkpoint, by arrays and parts."""

    def __init__(self, reader: OcdbtReader) -> None:
        self._reader = reader
        self._numbered: dict[str, dict[str, tuple[int, Part]]] = {}

    def digest(self, chunk: LinkedChunk) -> int | None:
        """The digest of a chunk, if the checkpoint has one at the same place and of its kind."""
        entry, name = self._reader.index.arrays.get(chunk.entry.name), chunk.entry.name
        if entry is None or _kind(entry) != _kind(chunk.entry):
            return None
        if name not in self._numbered:
            numbered = chunk_grid.numbered_parts(entry)
            self._numbered[name] = {part.key: (first, part) for first, part in numbered}
        first, part = self._numbered[name].get(chunk.part.key, (0, None))
        if part != chunk.part:
            return None
        return int(self._reader.digests_of(name)["digest"][first + chunk.number])


def _kind(entry: ArrayEntry) -> object:
    return entry.shape, entry.dtype, entry.encoding or None


def _path_in(parts: _HeldParts, base: OcdbtReader, chunks: Sequence[LinkedChunk]) -> str | None:
    """The base's path of the file with these chunks; None if it lacks one of them there."""
    paths = set[str]()
    for chunk in chunks:
        if parts.digest(chunk) != chunk.digest:
            return None
        if base.chunk_values.chain(chunk.entry, chunk.part, chunk.number):
            return None
        reference = base.chunk_values.where(chunk.entry, chunk.part, chunk.number)
        if reference is None or _identity(reference) != _identity(chunk.place):
            return None
        paths.add(reference.path)
    return paths.pop() if len(paths) == 1 else None


def _identity(reference: DataReference) -> tuple[str, int, int]:
    return reference.path.rpartition("/")[2], reference.offset, reference.length


def _incomplete(
    base: OcdbtReader, chunks: Linked, paths: Mapping[str, str], context: ts.Context
) -> set[str]:
    """The files that are missing or too short in the base's folder, whatever its B-tree says."""
    store = base.location.store(context)
    reads = {}
    for path, file_chunks in chunks.items():
        end = max(chunk.place.offset + chunk.place.length for chunk in file_chunks)
        reads[path] = store.read(paths[path], byte_range=slice(end - 1, end))
    lost = set(reads)
    for path, read in reads.items():
        with suppress(Failed):
            lost -= {path} if len(read.result().value) == 1 else set()
    return lost
