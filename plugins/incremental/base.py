"""The base of a save: an earlier checkpoint. Equal chunks refer to it and are not written again.

Each process decides this alone, for the chunks that it would write. In one file system the files
with such chunks are hard-linked into the new checkpoint's own folder (`linked_files`). Elsewhere
the new checkpoint borrows them from the one next to it (`siblings`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from unickpt.errors import CheckpointCorrupt, CheckpointNotFound, StorageError, UnickptError
from unickpt.extend import (
    Array,
    ArrayEntry,
    Compared,
    Index,
    Location,
    OcdbtReader,
    Part,
    Request,
    SaveEncoder,
    ScratchMemory,
    Taken,
    WriteItem,
    WritingSave,
    chunk_digest,
    common_codec,
    dtype_from_name,
    has_fixed_size,
    numbered_parts,
    open_own,
    parts_of_array,
    stored_chunk_bytes,
)
from unickpt.plugins.incremental import patches
from unickpt.plugins.incremental.candidates import Candidate, Candidates
from unickpt.plugins.incremental.chains import KnownChunk, most_of_patch, read_parent
from unickpt.plugins.incremental.full_rewrites import Growth
from unickpt.plugins.incremental.linked_files import LinkedFiles
from unickpt.plugins.incremental.shares import Chunk, ValueSource
from unickpt.plugins.incremental.siblings import Share, Siblings
from unickpt.plugins.incremental.spans import Span, Spans
from unickpt.types import Box

_log = logging.getLogger("unickpt")
# Comparing a chunk takes memory for so many times its size: two earlier states, positions, gaps,
# values, patches.
_COPIES = 17
FAULTY = (
    "the base of this save, %s, is damaged or cannot be read; data that cannot be reused from it "
    "is written again: %s"
)
_NEXT = "Nothing was saved; the next save writes all data"


@dataclass(frozen=True)
class How:
    """How a save with a base handles chunks.

    Arguments:
        compare: whether the bytes of chunks are compared, not only their digests.
        patch: whether only changed elements of a chunk are written, where they are few.
        budget_bytes: host memory for that.
        kept_cost: the cost of keeping a byte, see `Growth`.
        chained: whether chunks may be borrowed from several checkpoints, those of experts that take
            turns; with patches they are in any case.
        encoder: chooses how arrays of the save are stored, if that is not decided before.
    """

    compare: bool = False
    patch: bool = False
    budget_bytes: int = 0
    kept_cost: float = 0.0
    chained: bool = False
    encoder: SaveEncoder | None = None


def open_base(location: Location, save: WritingSave, how: How, *, needed: bool) -> Base | None:
    """Opens the base of a save; None if nothing of it can be referred to, which is logged.

    Arguments:
        location: of the base.
        save: facts about it.
        how: the handling of chunks.
        needed: whether the save needs it in any case: chunks that cannot be shared are copied then.

    Raises:
        CheckpointNotFound: there is no checkpoint.
        CheckpointCorrupt, StorageError: it cannot be read.
    """
    reader = open_own(location)
    if reader is None:
        raise CheckpointNotFound(f"no checkpoint of unickpt's own format at {location}")
    if how.encoder is not None:
        how.encoder.follow(reader.index)
    files = location.regular_files()
    is_alike = common_codec(reader.index.compression) == common_codec(save.compression)
    if not is_alike:
        why = "it has another compression"
    elif files is not None and save.folder.is_local:
        links = LinkedFiles(reader, files, save.folder, fsync=save.fsync)
        if links.are_possible():
            return Base(reader, links, how)
        why = "its files cannot be linked, and it is not next to the new checkpoint"
    else:
        why = "it is not next to the new checkpoint"
    if is_alike and _is_beside(location, save.location):
        patched = how.patch and not how.chained
        beside = Siblings(reader, chained=patched or how.chained, counted=patched)
        if beside.is_worthwhile():
            return Base(reader, beside, how)
        why = f"less than half of the data in {beside.base.name} is still in use"
    if needed:
        _log.info("%s: data reused from %s is copied: %s", save.location, location, why)
        return Base(reader, None, how)
    _log.info("%s: nothing of %s is reused: %s", save.location, location, why)
    return None


def _is_beside(location: Location, other: Location) -> bool:
    a, b = location.parent, other.parent
    return a is not None and b is not None and a.url == b.url and location.url != other.url


class Base:
    """An earlier checkpoint, for one process of one save.

    Arguments:
        reader: of the base.
        share: how its chunks are referred to; None if they are only copied.
        how: see `open_base`.
    """

    def __init__(self, reader: OcdbtReader, share: Share | None, how: How) -> None:
        self._reader, self.share, self._how = reader, share, how
        self._scratch, self._lock = ScratchMemory(), threading.Lock()
        self._is_faulty = False
        growth = None
        if how.patch:
            growth = Growth.of(reader.index.extra) or Growth(0, _full_bytes(reader.index))
        # All processes find the same.
        self._starts_anew = growth is not None and growth.predicts_full(how.kept_cost)
        self.growth = None if self._starts_anew else growth
        """How checkpoints grew up to the base, if this one continues from it."""
        self._candidates = Candidates(
            reader, share, patches=self._may_patch, encoder=how.encoder, warn=self._warn
        )
        self._units = dict[Any, int]()
        self.nbytes = 0
        """Logical bytes of the chunks that were taken, less those of patches."""

    @property
    def index(self) -> Index:
        """Of the base."""
        return self._reader.index

    def offer(self, chunks: Iterable[Chunk], requested: Sequence[Span] = ()) -> Spans:
        """Finds the base's chunks for those that this process is going to write.

        A unit that they use too little of is not used: its other bytes would stay on the disk, too.
        Patches in it are written again, unchanged. A damaged base counts as empty: a training job
        must not stop because of an older checkpoint.

        Arguments:
            chunks: array, part and number of each.
            requested: others, which are taken whatever they hold.

        Returns:
            Those of `requested` that `take_spans` takes; chunks of the others count as if they were
            in `chunks`.
        """
        if self.share is None:
            return Spans.none()
        return self._candidates.offer(chunks, requested, starts_anew=self._starts_anew)

    def _warn(self, why: object) -> None:
        """Warns once about a problem of the base."""
        if not self._is_faulty:
            self._is_faulty = True
            _log.warning(FAULTY, self._reader.location, why)

    def is_settled(self, part: Part, number: int) -> bool:
        """Whether a chunk was equal in the base and in the checkpoint before it, as frozen ones
        are; after `offer`."""
        candidate = self._candidates.get(part, number)
        if candidate is None or candidate.places is None or self.share is None:
            return False
        return self.share.is_older(candidate.places[-1])

    def stored_digest(self, item: WriteItem) -> int | None:
        """The digest of a chunk, if the base has one at the same place and of the same kind."""
        candidate = self._same_chunk(item)
        return None if candidate is None else candidate.digest

    def _same_chunk(self, item: WriteItem) -> Candidate | None:
        return next(self._candidates.find([(item.entry, item.part, item.number)]))

    def compare(self, item: WriteItem, chunk: Array) -> Compared:
        """Takes a chunk, or an earlier state that differs little from it, if the base has one;
        several threads may call it.

        Arguments:
            item: the chunk.
            chunk: its elements, or the bytes that its codec stores if that is none of Zarr's.
        """
        digest = chunk_digest(chunk)
        candidate = self._candidates.get(item.part, item.number)
        if candidate is None:
            return Compared(digest)
        places = candidate.places or ()
        if digest == candidate.digest and len(places) == 1:
            is_equal = not self._how.compare or self._is_equal(candidate, chunk)
            return Compared(digest, self._take(candidate, places) if is_equal else ())
        if not self.patches(item.entry) or self._starts_anew:
            return Compared(digest)
        patch, merged, used = self._patch(candidate, chunk, digest)
        references = self._take(candidate, used, patch, merged) if used else ()
        return Compared(digest, references, patch if references else None)

    def _take(
        self,
        candidate: Candidate,
        places: Sequence[ValueSource],
        patch: bytes | None = None,
        merged: bytes | None = None,
        *,
        rewrites: bool = True,
    ) -> Sequence[Taken]:
        """Takes values of a chunk; nothing if one of them cannot be referred to any longer.

        Arguments:
            candidate: the chunk.
            places: of the values.
            patch: to write in addition.
            merged: a patch to write before that.
            rewrites: whether patches may be written again.
        """
        if self.share is None:
            return ()
        entry, number, read = (
            candidate.entry,
            candidate.number,
            self._reader.chunk_values.read_value,
        )
        try:
            copied = {
                position: read(entry, place.value, number)
                for position, place in enumerate(places)
                if rewrites and position and place.unit in self._candidates.sparse
            }
        except UnickptError as error:
            self._warn(error)
            return ()
        with self._lock:
            references = list[Taken]()
            for position, place in enumerate(places):
                reference = copied.get(position) or self._take_of_unit(self.share, place)
                if reference is None:
                    return ()
                references.append(reference)
            if merged is not None:
                references.append(merged)
            rewritten = [patch or b"", *(x for x in references if isinstance(x, bytes))]
            self.nbytes += candidate.elements - sum(map(len, rewritten))
            return references

    def _take_of_unit(self, share: Share, place: ValueSource) -> Taken | None:
        """Takes a value, and counts the files that stay alive for it; None if that is no longer
        possible."""
        reference = share.take(place)
        if reference is None:
            self._warn("one of its files can no longer be linked")
            return None
        counted_bytes = self._units.get(place.unit, 0)
        if not counted_bytes or place.of is not None:
            self._units[place.unit] = max(counted_bytes, share.unit_bytes(place))
        return reference

    def take_spans(self, spans: Spans) -> dict[int, Taken | None]:
        """Takes the spans that `offer` found.

        Returns:
            By the units (of `spans`), where their content is now, at the offsets and lengths of the
            chunks; None if it must be copied.
        """
        if self.share is None:
            return {}
        with self._lock:
            references = {
                unit: self._take_of_unit(self.share, place)
                for unit, (place, _) in spans.last().items()
            }
            is_taken = [references.get(unit) is not None for unit in range(len(spans.units))]
            if references:
                self.nbytes += int(spans.elements[np.array(is_taken)[spans.unit]].sum())
        return references

    @property
    def kept_bytes(self) -> int:
        """The bytes of all files that stay alive for the taken chunks."""
        return sum(self._units.values())

    # --- patches ----------------------------------------------------------------------------------

    def patches(self, entry: ArrayEntry) -> bool:
        """Whether chunks of an array may be saved as patches."""
        return self._may_patch and has_fixed_size(entry)

    @property
    def adds_patches(self) -> bool:
        """Whether patches are added to those of the base; not if everything is written again."""
        return self._may_patch and self.growth is not None

    @property
    def _may_patch(self) -> bool:
        return self._how.patch and self.share is not None

    def comparable_at_once(self, nbytes: int) -> int:
        """How many chunks of a size the memory allows to compare at the same time."""
        return self._how.budget_bytes // (_COPIES * max(1, nbytes))

    def _patch(
        self, candidate: Candidate, chunk: Array, digest: int
    ) -> tuple[bytes | None, bytes | None, Sequence[ValueSource]]:
        """The patch against the state before, if anything differs; the merged one to write before
        it; and the values before these, none if patches are too large or cannot be computed."""
        places = candidate.places or ()
        if self.comparable_at_once(chunk.nbytes) < 1 or not places or self.growth is None:
            return None, None, ()
        (before,) = self._scratch.arrays([(chunk.shape, chunk.dtype)])
        generation = self.growth.saves + 1
        known_chunk = KnownChunk(candidate.digest, digest, generation)
        # Neither savings of compression nor padding count.
        whole = min(chunk.nbytes, places[0].nbytes)
        try:
            parent = read_parent(self._reader, candidate, known_chunk, before, whole)
        except UnickptError as error:  # it is damaged, and must not be referred to
            self._warn(error)
            return None, None, ()
        if parent is None:
            return None, None, ()
        used = places[: parent.values]
        if parent.state.digest == digest:
            return None, parent.merged, used
        earlier = sum(place.nbytes for place in used[1:]) + len(parent.merged or b"")
        patch = patches.encode(
            before, chunk, parent.state, generation, most_of_patch(whole, earlier)
        )
        return patch, parent.merged, () if patch is None else used

    # --- chunks that the save does not have -------------------------------------------------------

    def may_lend(self, part: Part, number: int) -> bool:
        """Whether a chunk can be borrowed, as far as is known; after `offer`."""
        candidate = self._candidates.get(part, number)
        places = () if candidate is None else candidate.places or ()
        # Patches in the nodes of a B-tree that is not next to the checkpoint have to be written
        # again.
        return bool(places) and not any(isinstance(p.at, bytes) and p.of is None for p in places)

    def borrow(self, part: Part, number: int) -> Compared | None:
        """Takes a chunk that may be borrowed, without a comparison; None if it must be copied."""
        candidate = self._candidates.get(part, number)
        assert candidate is not None, "only chunks that may be borrowed are borrowed"
        references = self._take(candidate, candidate.places or (), rewrites=False)
        return Compared(candidate.digest, references) if references else None

    def digest(self, item: WriteItem) -> int:
        """The digest of a chunk as the base has it. Raises as `read`."""
        with self._naming(item):
            digest = self.stored_digest(item)
        return chunk_digest(self.read(item)) if digest is None else digest

    def read_stored(self, item: WriteItem) -> Array:
        """Reads the bytes that are stored of a chunk whose codec is none of Zarr's: its elements
        would be encoded again, with another loss.

        Raises:
            StorageError: the base lacks it, or has it in another form, or it cannot be read, or is
                damaged.
        """
        with self._naming(item):
            candidate = self._same_chunk(item)
            if candidate is None:
                raise CheckpointCorrupt(
                    "it is not there in the same chunks, and its codec does not encode elements "
                    "a second time"
                )
            data = self._encoded_bytes(candidate)
            if chunk_digest(data) != candidate.digest:
                raise CheckpointCorrupt("it does not match its digest")
            return data

    def _encoded_bytes(self, candidate: Candidate) -> Array:
        entry, part, number = candidate.entry, candidate.part, candidate.number
        return self._reader.chunk_values.encoded_bytes(entry, part, number)

    def read(self, item: WriteItem) -> Array:
        """Reads a chunk of the save from the base, which may have other chunks.

        Raises:
            StorageError: the base lacks it, or it cannot be read, or is damaged.
        """
        entry, box = item.entry, item.box
        theirs = self._reader.index.arrays.get(entry.name)
        out = np.empty(box.shape, dtype_from_name(entry.dtype))
        with self._naming(item):
            if theirs is None or (theirs.shape, theirs.dtype) != (entry.shape, entry.dtype):
                raise CheckpointCorrupt("it is not there")
            for first, stored in numbered_parts(theirs):
                for chunk_number in stored.chunks_in(box):
                    self._read_into(out, box, (theirs, stored, chunk_number), first)
        return out

    @contextmanager
    def _naming(self, item: WriteItem) -> Iterator[None]:
        try:
            yield
        except UnickptError as error:
            raise StorageError(
                f"array {item.entry.name!r} {item.box} of {self._reader.location}, which "
                f"this save keeps, cannot be read: {error}. {_NEXT}"
            ) from error

    def _read_into(
        self, out: Array, box: Box, chunk: tuple[ArrayEntry, Part, int], first: int
    ) -> None:
        """Reads a box from a chunk of the base.

        Arguments:
            out: the elements of the box.
            box: in the array.
            chunk: the array of the base, the part, and the chunk's number in it.
            first: the row of the part's first chunk.
        """
        theirs, part, number = chunk
        have = part.chunk_box(number)
        common = have.intersect(box)
        assert common is not None, "only chunks that intersect the box are requested"
        data = out if have == box else np.empty(have.shape, out.dtype)
        digest = int(self._reader.digests_of(theirs.name)[first + number]["digest"])
        if self._reader.read([Request(theirs, part, number, data, digest)]):
            raise CheckpointCorrupt("it does not match its digest")
        if data is not out:
            inside = common.relative_to(have.start).slices
            out[common.relative_to(box.start).slices] = data[inside]

    def _is_equal(self, candidate: Candidate, chunk: Array) -> bool:
        try:
            if candidate.entry.codec is not None:
                return np.array_equal(self._encoded_bytes(candidate), chunk)
            out = np.empty(chunk.shape, dtype_from_name(candidate.entry.dtype))
            self._reader.read([Request(candidate.entry, candidate.part, candidate.number, out)])
        except UnickptError as error:  # it is damaged, and must not be referred to
            self._warn(error)
            return False
        return np.array_equal(_bits(out), _bits(chunk))


def _full_bytes(index: Index) -> int:
    """About the size of all arrays without patches, before compression."""
    return sum(
        stored_chunk_bytes(entry, part.box.shape)
        for entry in index.arrays.values()
        for part in parts_of_array(entry)
    )


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
