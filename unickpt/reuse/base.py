"""The base of a save: an earlier checkpoint, whose equal chunks are referred to, not written again.

Each process decides this alone, for the chunks that it would write. In one file system the files
with such chunks are hard-linked into the new checkpoint's own folder (`linked_files`). Elsewhere
the new checkpoint borrows them from the one beside it (`siblings`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tensorstore as ts

from unickpt.arrays import dtypes
from unickpt.arrays.dtypes import Array
from unickpt.errors import CheckpointNotFound, UnickptError
from unickpt.format import chunk_grid, chunk_store, ocdbt_reader
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry, BaseEntry
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.format.zarr_metadata import Codecs
from unickpt.reuse.linked_files import LinkedFiles
from unickpt.reuse.siblings import Siblings
from unickpt.storage.locations import Location

_log = logging.getLogger("unickpt")


class Share(Protocol):
    """How a checkpoint refers to chunks of its base. What stays alive for them, a *unit*, stays as
    a whole."""

    @property
    def linked(self) -> int:
        """The number of chunks that were taken in linked files."""

    @property
    def borrowed(self) -> Mapping[BaseEntry, set[tuple[str, int]]]:
        """The chunks that were taken of checkpoints beside this one: part's key, and number."""

    def unit(self, entry: ArrayEntry, part: Part, number: int) -> Any:
        """What stays alive for a chunk of the base; None if the chunk cannot be referred to."""

    def least_bytes(self, unit: Any) -> float:
        """How many bytes of a unit must be used for it to be kept alive."""

    def take(self, unit: Any, part: Part, number: int) -> bool:
        """Refers to a chunk; False if it has to be written after all."""

    def publish(self, context: ts.Context) -> None:
        """Writes what is needed to find the chunks that were taken."""


def open_base(
    location: Location,
    new: Location,
    folder: Location,
    codecs: Codecs,
    *,
    compare: bool,
    fsync: bool,
) -> Base | None:
    """Opens the base of a save; None if nothing of it can be referred to, which is logged.

    Arguments:
        location: of the base.
        new: of the new checkpoint.
        folder: in which this process writes.
        codecs: the new checkpoint's compression.
        compare: whether the bytes of chunks are compared, not only their digests.
        fsync: whether linked files are flushed to disk.

    Raises:
        CheckpointNotFound: there is no checkpoint.
        CheckpointCorrupt, StorageError: it cannot be read.
    """
    reader = ocdbt_reader.open(location)
    if reader is None:
        raise CheckpointNotFound(f"no checkpoint of unickpt's own format at {location}")
    files = location.regular_files()
    if reader.index.codecs != codecs:
        why = "it has another compression"
    elif files is not None and folder.is_local:
        links = LinkedFiles(reader, files, folder, fsync=fsync)
        if links.are_possible():
            return Base(reader, links, compare=compare)
        why = "its files cannot be linked, and it is not beside the new checkpoint"
    else:
        why = "it is not beside the new checkpoint"
    if reader.index.codecs == codecs and _is_beside(location, new):
        beside = Siblings(reader)
        if beside.is_worthwhile():
            return Base(reader, beside, compare=compare)
        why = f"less than half of what is in {beside.base.name} is still in use"
    _log.info("%s: nothing of %s is reused: %s", new, location, why)
    return None


def _is_beside(location: Location, other: Location) -> bool:
    a, b = location.parent, other.parent
    return a is not None and b is not None and a.url == b.url and location.url != other.url


@dataclass(frozen=True)
class _Candidate:
    """A chunk of the base that a chunk of the save may be equal to."""

    part: Part
    entry: ArrayEntry
    digest: int
    unit: Any


class Base:
    """An earlier checkpoint, for one process of one save.

    Arguments:
        reader: of the base.
        share: how its chunks are referred to.
        compare: see `open_base`.
    """

    def __init__(self, reader: OcdbtReader, share: Share, *, compare: bool) -> None:
        self._reader, self.share, self._compare = reader, share, compare
        self._parts: dict[str, dict[str, tuple[int, Part]]] = {}
        self._candidates: dict[tuple[str, int], _Candidate] = {}
        self.nbytes = 0
        """Logical bytes of the chunks that were taken."""

    def offer(self, chunks: Iterable[tuple[ArrayEntry, Part, int]]) -> None:
        """Finds what the base has of the chunks that this process is going to write.

        A unit of which they use too little is left alone: its other bytes would stay on the disk,
        too.

        Arguments:
            chunks: array, part and number of each.
        """
        used: dict[Any, int] = {}
        for entry, part, number in chunks:
            found = self._find(entry, part, number)
            if found is not None:
                nbytes = chunk_store.nbytes_as_stored(entry, part.chunk_box(number).shape)
                self._candidates[part.key, number] = found
                used[found.unit] = used.get(found.unit, 0) + nbytes
        left = {unit for unit, nbytes in used.items() if nbytes < self.share.least_bytes(unit)}
        for key in [key for key, found in self._candidates.items() if found.unit in left]:
            del self._candidates[key]

    def _find(self, entry: ArrayEntry, part: Part, number: int) -> _Candidate | None:
        theirs = self._reader.index.arrays.get(entry.name)
        if theirs is None or (theirs.shape, theirs.dtype) != (entry.shape, entry.dtype):
            return None
        if theirs.quantized != entry.quantized:
            return None
        if entry.name not in self._parts:
            numbered = chunk_grid.numbered_parts(theirs)
            self._parts[entry.name] = {each.key: (first, each) for first, each in numbered}
        first, same = self._parts[entry.name].get(part.key, (0, None))
        if same != part:
            return None
        unit = self.share.unit(theirs, part, number)
        if unit is None:
            return None
        row = self._reader.digests_of(entry.name)[first + number]
        return _Candidate(part, theirs, int(row["digest"]), unit)

    def takes(self, part: Part, number: int, digest: Callable[[], int], chunk: Array) -> bool:
        """Whether the base has a chunk, which is then not to be written.

        Arguments:
            part, number: of the chunk.
            digest: returns its digest.
            chunk: its elements, or the bytes that would be stored of a quantised one.
        """
        found = self._candidates.get((part.key, number))
        if found is None or digest() != found.digest:
            return False
        if self._compare and not self._is_equal(found, number, chunk):
            return False
        if not self.share.take(found.unit, part, number):
            return False
        self.nbytes += part.chunk_box(number).size * found.entry.itemsize
        return True

    def _is_equal(self, found: _Candidate, number: int, chunk: Array) -> bool:
        try:
            if found.entry.quantized is not None:
                return self._reader.has_bytes(found.entry, found.part, number, chunk)
            out = np.empty(chunk.shape, dtypes.from_name(found.entry.dtype))
            self._reader.read_chunk(found.entry, found.part, number, None, out)
        except UnickptError:
            return False  # it is damaged, and must not be referred to
        return np.array_equal(_bits(out), _bits(chunk))


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
