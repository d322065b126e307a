"""The base of a save: an earlier checkpoint, whose equal chunks are referred to, not written again.

Each process decides this alone, for the chunks that it would write. In one file system the files
with such chunks are hard-linked into the new checkpoint's own folder (`linked_files`). Elsewhere
the new checkpoint borrows them from the one beside it (`siblings`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.errors import CheckpointCorrupt, CheckpointNotFound, StorageError, UnickptError
from unickpt.format import chunk_grid, codec, ocdbt_reader, patches
from unickpt.format.chunk_grid import Part
from unickpt.format.codec import Codecs
from unickpt.format.index import ArrayEntry, BaseEntry, Index
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.format.reader import ChunkId, Request
from unickpt.frameworks.host_memory import Scratch
from unickpt.reuse.linked_files import LinkedFiles
from unickpt.reuse.siblings import Siblings
from unickpt.storage.btree.nodes import DataReference
from unickpt.storage.locations import Location

_log = logging.getLogger("unickpt")
# The share of a chunk that a patch may take.
# Twice that gains up to a third where 10 % to 20 % of the elements change (benchmarks/patches.py).
_MOST_OF_CHUNK = 0.25
# To compare a chunk takes memory for so many of its size: the full chunk, positions, a patch.
_COPIES = 8
FAULTY = (
    "the base of this save, %s, is damaged or cannot be read; what cannot be taken from it is "
    "written again: %s"
)
_NEXT = "Nothing was saved; the next save writes all experts"


Taken = DataReference | BaseEntry
"""Where a chunk is that was taken: in a file, below the folder of the process, or in a checkpoint
beside the new one."""


class Share(Protocol):
    """How a checkpoint refers to chunks of its base. What stays alive for them, a *unit*, stays as
    a whole."""

    takes_full_chunks: bool
    """Whether patches can refer to its chunks."""

    def find(self, entry: ArrayEntry, part: Part, number: int) -> Any:
        """Where a chunk of the base is; None if it cannot be referred to."""

    def unit(self, where: Any) -> Any:
        """What stays alive for a chunk, by where it is."""

    def least_bytes(self, unit: Any) -> float:
        """How many bytes of a unit must be used for it to be kept alive.

        Raises:
            Failed: it is gone.
        """

    def is_older(self, where: Any) -> bool:
        """Whether the base itself took a chunk from an earlier checkpoint."""

    def take(self, where: Any, *, as_full: bool = False) -> Taken | None:
        """Refers to a chunk; None if it has to be written after all.

        Arguments:
            where: of the chunk.
            as_full: whether a patch will refer to it, or to what its own patch refers to.
        """


@dataclass(frozen=True)
class How:
    """What becomes of the chunks of a save that may have a base.

    Arguments:
        compare: whether the bytes of chunks are compared, not only their digests.
        patch: whether the elements that changed are written of a chunk, where they are few.
        budget_bytes: host memory for that.
    """

    compare: bool = False
    patch: bool = False
    budget_bytes: int = 0


def open_base(
    location: Location,
    new: Location,
    folder: Location,
    codecs: Codecs,
    *,
    how: How,
    fsync: bool,
    needed: bool,
) -> Base | None:
    """Opens the base of a save; None if nothing of it can be referred to, which is logged.

    Arguments:
        location: of the base.
        new: of the new checkpoint.
        folder: in which this process writes.
        codecs: the new checkpoint's compression.
        how: what becomes of chunks.
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
            return Base(reader, links, how)
        why = "its files cannot be linked, and it is not beside the new checkpoint"
    else:
        why = "it is not beside the new checkpoint"
    if reader.index.codecs == codecs and _is_beside(location, new):
        beside = Siblings(reader)
        if beside.is_worthwhile():
            if how.patch:
                _log.info("%s: chunks that changed are written whole: patches need links", new)
            return Base(reader, beside, how)
        why = f"less than half of what is in {beside.base.name} is still in use"
    if needed:
        _log.info("%s: what it takes of %s is copied: %s", new, location, why)
        return Base(reader, None, how)
    _log.info("%s: nothing of %s is reused: %s", new, location, why)
    return None


def _is_beside(location: Location, other: Location) -> bool:
    a, b = location.parent, other.parent
    return a is not None and b is not None and a.url == b.url and location.url != other.url


@dataclass(frozen=True)
class _Candidate:
    """A chunk of the base that a chunk of the save may be equal to, or differ little from.

    Arguments:
        part, entry: of the base.
        row: of the chunk, in the base's digest table.
        where: as of `Share`.
        nbytes: of its elements.
        is_patched: whether the base has it as a patch.
    """

    part: Part
    entry: ArrayEntry
    row: Any
    where: Any
    nbytes: int
    is_patched: bool = False

    @property
    def digest(self) -> int:
        return int(self.row["digest"])


@dataclass(frozen=True)
class Compared:
    """A chunk of the save, compared with the base.

    Arguments:
        digest: of the chunk.
        taken: where it is; None if it has to be written.
        patch: what is to be written, as what was taken is a full chunk that differs by so little.
    """

    digest: int
    taken: Taken | None = None
    patch: bytes | None = None


class Base:
    """An earlier checkpoint, for one process of one save.

    Arguments:
        reader: of the base.
        share: how its chunks are referred to; None if they are only copied.
        how: see `open_base`.
    """

    def __init__(self, reader: OcdbtReader, share: Share | None, how: How) -> None:
        self._reader, self.share, self._how = reader, share, how
        self._scratch, self._lock = Scratch(), threading.Lock()
        self._parts: dict[str, dict[str, tuple[int, Part]]] = {}
        self._candidates: dict[tuple[str, int], _Candidate] = {}
        self._is_faulty = False
        self.nbytes = 0
        """Logical bytes of the chunks that were taken, less those of patches."""

    @property
    def index(self) -> Index:
        """Of the base."""
        return self._reader.index

    def offer(self, chunks: Iterable[tuple[ArrayEntry, Part, int]]) -> None:
        """Finds what the base has of the chunks that this process is going to write.

        A unit of which they use too little is left alone: its other bytes would stay on the disk,
        too. A damaged base has nothing: a training job must not stop because of an older
        checkpoint.

        Arguments:
            chunks: array, part and number of each.
        """
        if self.share is None:
            return
        try:
            self._offer(self.share, chunks)
        except UnickptError as error:
            self._warn(error)
            self._candidates.clear()

    def _offer(self, share: Share, chunks: Iterable[tuple[ArrayEntry, Part, int]]) -> None:
        used: dict[Any, int] = {}
        ends: dict[Any, tuple[int, ChunkId]] = {}
        for entry, part, number in chunks:
            found = self._find(entry, part, number)
            if found is not None and found.where is not None:
                nbytes = found.nbytes
                if entry.quantized is not None:
                    nbytes = codec.nbytes_as_stored(entry, part.chunk_box(number).shape)
                self._candidates[part.key, number] = found
                unit = share.unit(found.where)
                used[unit] = used.get(unit, 0) + nbytes
                end, _ = ends.get(unit, (-1, None))
                if (own := _end(found.where)) > end:
                    ends[unit] = own, (found.entry, found.part, number)
        left = {u for u, nbytes in used.items() if not self._serves(share, u, nbytes, ends[u][1])}
        for key in [key for key, c in self._candidates.items() if share.unit(c.where) in left]:
            del self._candidates[key]

    def _serves(self, share: Share, unit: Any, nbytes: int, last: ChunkId) -> bool:
        """Whether enough of a unit is used, and it is there up to the last chunk."""
        try:
            if nbytes < share.least_bytes(unit):
                return False
            self._reader.check_end(*last)
            return True
        except UnickptError as error:
            self._warn(error)
            return False

    def _warn(self, why: object) -> None:
        """Says once what is wrong with the base."""
        if not self._is_faulty:
            self._is_faulty = True
            _log.warning(FAULTY, self._reader.location, why)

    def is_settled(self, part: Part, number: int) -> bool:
        """Whether a chunk was equal in the base and in the checkpoint before it, as frozen ones
        are; after `offer`."""
        found = self._candidates.get((part.key, number))
        return found is not None and self.share is not None and self.share.is_older(found.where)

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
        is_patched = self._reader.is_patched(theirs, part, number)
        if is_patched and not self.patches(theirs):
            where = None  # it is written whole again
        nbytes = part.chunk_box(number).size * theirs.itemsize
        return _Candidate(part, theirs, row, where, nbytes, is_patched)

    def stored_digest(self, entry: ArrayEntry, part: Part, number: int) -> int | None:
        """The digest of a chunk, if the base has one at the same place and of the same kind."""
        found = self._find(entry, part, number)
        return None if found is None else found.digest

    def compare(self, entry: ArrayEntry, part: Part, number: int, chunk: Array) -> Compared:
        """Takes a chunk, or what differs little from it, if the base has that; several threads may
        call it.

        Arguments:
            entry, part, number: which chunk.
            chunk: its elements, or the bytes that would be stored of a quantised one.
        """
        digest = codec.digest(chunk)
        found = self._candidates.get((part.key, number))
        if found is None:
            return Compared(digest)
        if not found.is_patched and digest == found.digest:
            is_equal = not self._how.compare or self._is_equal(found, number, chunk)
            return Compared(digest, self._take(found, number) if is_equal else None)
        patch = self._patch(found, number, chunk) if self.patches(entry) else None
        taken = None if patch is None else self._take(found, number, patch)
        return Compared(digest, taken, None if taken is None else patch)

    def _take(self, found: _Candidate, number: int, patch: bytes | None = None) -> Taken | None:
        if self.share is None:
            return None
        with self._lock:
            taken = self.share.take(found.where, as_full=patch is not None)
            if taken is None:
                self._warn("a file of it can no longer be linked")
                return None
            self.nbytes += found.nbytes - len(patch or b"")
            return taken

    # --- patches ----------------------------------------------------------------------------------

    def patches(self, entry: ArrayEntry) -> bool:
        """Whether chunks of an array may be saved as patches."""
        can = self._how.patch and self.share is not None and self.share.takes_full_chunks
        return can and entry.quantized is None

    def comparable_at_once(self, nbytes: int) -> int:
        """How many chunks of a size the memory allows to compare at the same time."""
        return self._how.budget_bytes // (_COPIES * max(1, nbytes))

    def _patch(self, found: _Candidate, number: int, chunk: Array) -> bytes | None:
        """What differs from the full chunk; None if that is too much, or cannot be told."""
        if self.comparable_at_once(chunk.nbytes) < 1:
            return None
        full = self._scratch.array(chunk.shape, chunk.dtype)
        try:
            of = self._reader.read_full(found.entry, found.part, number, found.row, full)
        except UnickptError as error:  # it is damaged, and must not be referred to
            self._warn(error)
            return None
        # Neither what compression saves nor padding counts. Patches grow from step to step. Once
        # all since the chunk was written whole take as much as it, it is time to write it whole:
        # for steady growth, the best time.
        whole = min(chunk.nbytes, found.where.length)
        most = min(int(_MOST_OF_CHUNK * whole), whole - of.spent)
        return patches.encode(full, chunk, of, most)

    # --- chunks that the save does not have -------------------------------------------------------

    def borrow(self, part: Part, number: int) -> Taken | None:
        """Takes a chunk, whatever it holds; None if it must be copied."""
        found = self._candidates.get((part.key, number))
        return None if found is None or found.is_patched else self._take(found, number)

    def digest(self, entry: ArrayEntry, part: Part, number: int) -> int:
        """The digest of a chunk as the base has it. Raises as `read`."""
        with self._naming(entry, part, number):
            found = self._candidates.get((part.key, number)) or self._find(entry, part, number)
        return codec.digest(self.read(entry, part, number)) if found is None else found.digest

    def read(self, entry: ArrayEntry, part: Part, number: int) -> Array:
        """Reads a chunk of the save from the base, in whatever chunks it has it.

        Raises:
            StorageError: the base lacks it, or it cannot be read, or is damaged.
        """
        box = part.chunk_box(number)
        theirs = self._reader.index.arrays.get(entry.name)
        out = np.empty(box.shape, dtypes.from_name(entry.dtype))
        with self._naming(entry, part, number):
            if theirs is None or (theirs.shape, theirs.dtype) != (entry.shape, entry.dtype):
                raise CheckpointCorrupt("it is not there")
            for first, stored in chunk_grid.numbered_parts(theirs):
                for at in stored.chunks_in(box):
                    self._read_into(out, box, (theirs, stored, at), first)
        return out

    @contextmanager
    def _naming(self, entry: ArrayEntry, part: Part, number: int) -> Iterator[None]:
        try:
            yield
        except UnickptError as error:
            raise StorageError(
                f"array {entry.name!r} {part.chunk_box(number)} of {self._reader.location}, which "
                f"this save keeps, cannot be read: {error}. {_NEXT}"
            ) from error

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
        digest = int(self._reader.digests_of(theirs.name)[first + number]["digest"])
        if self._reader.read([Request(theirs, part, number, data, digest)]):
            raise CheckpointCorrupt("it does not match its digest")
        if data is not out:
            inside = common.relative_to(have.start).slices
            out[common.relative_to(box.start).slices] = data[inside]

    def _is_equal(self, found: _Candidate, number: int, chunk: Array) -> bool:
        try:
            if found.entry.quantized is not None:
                return self._reader.has_bytes(found.entry, found.part, number, chunk)
            out = np.empty(chunk.shape, dtypes.from_name(found.entry.dtype))
            self._reader.read([Request(found.entry, found.part, number, out)])
        except UnickptError as error:  # it is damaged, and must not be referred to
            self._warn(error)
            return False
        return np.array_equal(_bits(out), _bits(chunk))


def _end(where: Any) -> int:
    return where.offset + where.length if isinstance(where, DataReference) else 0


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
