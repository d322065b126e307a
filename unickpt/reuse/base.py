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
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.errors import CheckpointCorrupt, CheckpointNotFound, StorageError, UnickptError
from unickpt.format import chunk_grid, chunk_store, ocdbt_reader
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry, BaseEntry, Index
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.format.zarr_metadata import Codecs
from unickpt.reuse.linked_files import LinkedFiles
from unickpt.reuse.siblings import Siblings
from unickpt.storage.locations import Location

_log = logging.getLogger("unickpt")
_NEXT = "Nothing was saved; the next save writes all experts"


class Share(Protocol):
    """How a checkpoint refers to chunks of its base. What stays alive for them, a *unit*, stays as
    a whole."""

    @property
    def linked(self) -> int:
        """The number of chunks that were taken in linked files."""

    @property
    def borrowed(self) -> Mapping[BaseEntry, set[tuple[str, int]]]:
        """The chunks that were taken of checkpoints beside this one: part's key, and number."""

    def find(self, entry: ArrayEntry, part: Part, number: int) -> Any:
        """Where a chunk of the base is; None if it cannot be referred to."""

    def unit(self, where: Any) -> Any:
        """What stays alive for a chunk, by where it is."""

    def least_bytes(self, unit: Any) -> float:
        """How many bytes of a unit must be used for it to be kept alive."""

    def take(self, where: Any, part: Part, number: int) -> bool:
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
    needed: bool,
) -> Base | None:
    """Opens the base of a save; None if nothing of it can be referred to, which is logged.

    Arguments:
        location: of the base.
        new: of the new checkpoint.
        folder: in which this process writes.
        codecs: the new checkpoint's compression.
        compare: whether the bytes of chunks are compared, not only their digests.
        fsync: whether linked files are flushed to disk.
        needed: whether the save needs it in any case: what cannot be shared is copied then.

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
    if needed:
        _log.info("%s: what it takes of %s is copied: %s", new, location, why)
        return Base(reader, None, compare=compare)
    _log.info("%s: nothing of %s is reused: %s", new, location, why)
    return None


def _is_beside(location: Location, other: Location) -> bool:
    a, b = location.parent, other.parent
    return a is not None and b is not None and a.url == b.url and location.url != other.url


@dataclass(frozen=True)
class _Candidate:
    """A chunk of the base that a chunk of the save may be equal to; `where` as of `Share`."""

    part: Part
    entry: ArrayEntry
    digest: int
    where: Any


class Base:
    """An earlier checkpoint, for one process of one save.

    Arguments:
        reader: of the base.
        share: how its chunks are referred to; None if they are only copied.
        compare: see `open_base`.
    """

    def __init__(self, reader: OcdbtReader, share: Share | None, *, compare: bool) -> None:
        self._reader, self.share, self._compare = reader, share, compare
        self._parts: dict[str, dict[str, tuple[int, Part]]] = {}
        self._candidates: dict[tuple[str, int], _Candidate] = {}
        self.nbytes = 0
        """Logical bytes of the chunks that were taken."""

    @property
    def index(self) -> Index:
        """Of the base."""
        return self._reader.index

    def offer(self, chunks: Iterable[tuple[ArrayEntry, Part, int]]) -> None:
        """Finds what the base has of the chunks that this process is going to write.

        A unit of which they use too little is left alone: its other bytes would stay on the disk,
        too.

        Arguments:
            chunks: array, part and number of each.
        """
        share = self.share
        if share is None:
            return
        used: dict[Any, int] = {}
        for entry, part, number in chunks:
            found = self._find(entry, part, number)
            if found is not None and found.where is not None:
                nbytes = chunk_store.nbytes_as_stored(entry, part.chunk_box(number).shape)
                self._candidates[part.key, number] = found
                unit = share.unit(found.where)
                used[unit] = used.get(unit, 0) + nbytes
        left = {unit for unit, nbytes in used.items() if nbytes < share.least_bytes(unit)}
        for key in [key for key, c in self._candidates.items() if share.unit(c.where) in left]:
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
        where = None if self.share is None else self.share.find(theirs, part, number)
        row = self._reader.digests_of(entry.name)[first + number]
        return _Candidate(part, theirs, int(row["digest"]), where)

    def stored_digest(self, entry: ArrayEntry, part: Part, number: int) -> int | None:
        """The digest of a chunk, if the base has one at the same place and of the same kind."""
        found = self._find(entry, part, number)
        return None if found is None else found.digest

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
        return self._take(found, number)

    def _take(self, found: _Candidate, number: int) -> bool:
        if self.share is None or not self.share.take(found.where, found.part, number):
            return False
        self.nbytes += found.part.chunk_box(number).size * found.entry.itemsize
        return True

    # --- chunks that the save does not have -------------------------------------------------------

    def borrow(self, part: Part, number: int) -> bool:
        """Takes a chunk, whatever it holds; False if it must be copied."""
        found = self._candidates.get((part.key, number))
        return found is not None and self._take(found, number)

    def digest(self, entry: ArrayEntry, part: Part, number: int) -> int:
        """The digest of a chunk as the base has it. Raises as `read`."""
        found = self._candidates.get((part.key, number)) or self._find(entry, part, number)
        return chunk_store.digest(self.read(entry, part, number)) if found is None else found.digest

    def read(self, entry: ArrayEntry, part: Part, number: int) -> Array:
        """Reads a chunk of the save from the base, in whatever chunks it has it.

        Raises:
            StorageError: the base lacks it, or it cannot be read, or is damaged.
        """
        box = part.chunk_box(number)
        where = f"array {entry.name!r} {box} of {self._reader.location}, which this save keeps"
        theirs = self._reader.index.arrays.get(entry.name)
        if theirs is None or (theirs.shape, theirs.dtype) != (entry.shape, entry.dtype):
            raise StorageError(f"{where}, is not there. {_NEXT}")
        out = np.empty(box.shape, dtypes.from_name(entry.dtype))
        try:
            for first, stored in chunk_grid.numbered_parts(theirs):
                for at in stored.chunks_in(box):
                    self._read_into(out, box, (theirs, stored, at), first)
        except UnickptError as error:
            raise StorageError(f"{where}, cannot be read: {error}. {_NEXT}") from error
        return out

    def _read_into(
        self, out: Array, box: Box, chunk: tuple[ArrayEntry, Part, int], first: int
    ) -> None:
        """Reads what a chunk of the base has of a box.

        Arguments:
            out: the elements of the box.
            box: in the array.
            chunk: the array of the base, the part, and the chunk's number in it.
            first: the row of the part's first chunk.
        """
        theirs, part, number = chunk
        have = part.chunk_box(number)
        common = have.intersect(box)
        assert common is not None, "only chunks that intersect the box are asked for"
        data = out if have == box else np.empty(have.shape, out.dtype)
        row = self._reader.digests_of(theirs.name)[first + number]
        if not self._reader.read_chunk(theirs, part, number, row, data):
            raise CheckpointCorrupt("it does not match its digest")
        if data is not out:
            inside = common.relative_to(have.start).slices
            out[common.relative_to(box.start).slices] = data[inside]

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
