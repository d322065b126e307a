"""Write: staged chunks -> data files, a bounded number of bytes at a time, and a record of them."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import xxhash

from unickpt.commit.attempt import Attempt
from unickpt.commit.messages import CHUNK_DTYPE, ELSEWHERE, PATCH_DTYPE, Record, ValuePlace
from unickpt.errors import StorageError
from unickpt.format import codec, codecs
from unickpt.format.index import BaseEntry
from unickpt.format.links import FULL_LINK
from unickpt.progress import ProgressFunction
from unickpt.reuse.base import Base
from unickpt.saving.describe import Description
from unickpt.saving.write_plan import ChunkSource, StagedChunk, WriteItem
from unickpt.storage import data_files, paths
from unickpt.storage.btree.builder import INLINE, PLACE_DTYPE
from unickpt.storage.btree.nodes import DataReference
from unickpt.storage.data_files import DataFile
from unickpt.threads import Pool, Window, in_batches

_MOST_CHUNKS = 16384  # of a batch
_LOOK_EVERY_S = 0.5
_TELL_EVERY_S = 0.25
_HASHED_FIRST_BYTES = 64 << 10  # of so little, the cache has all when it is written
_LARGE_CHUNK_BYTES = 64 << 20  # is counted piece by piece

# Measured: with more threads than CPUs pieces fall out of the cache; but those that wait for the
# disk are idle, so that durable saves have twice as many.
_THREADS = max(2, min(8, os.cpu_count() or 1))
# In the background of a training loop each keeps a CPU busy, which it may need (measured, too).
_BACKGROUND_THREADS = max(1, min(8, (os.cpu_count() or 1) // 4))
_THREADS_REMOTE = 4  # each waits for its object
_FILE_BYTES = 256 << 20  # of a file at most, unless one chunk is larger
_LEAST_FILE_BYTES, _LEAST_OBJECT_BYTES = 8 << 20, 64 << 20
_FILES_EACH = 8  # so many for each thread, so that they end together
# In the background of a training loop, which needs the GIL, a thread should rarely ask for it.
_BACKGROUND_PIECE = 8 << 20


class ChunkWriter:
    """Stages, encodes, hashes and writes chunks, each batch of them as one file.

    Arguments:
        attempt: the attempt to save that this is part of.
        description: what this process saves.
        budget_bytes: memory to write with.
        source: provides the chunks.
        base: the earlier checkpoint whose chunks are not written again.
        reuses: whether that goes for all chunks that are equal, or only for those of other units.
        told: called with the bytes that are done and those in total; None for nobody.
        encodes: what encodes the chunks of arrays that may be compressed.
    """

    def __init__(
        self,
        attempt: Attempt,
        description: Description,
        budget_bytes: int,
        source: ChunkSource,
        base: Base | None = None,
        reuses: bool = False,
        told: ProgressFunction | None = None,
        encodes: Callable[[WriteItem, Any], codec.Encoded] | None = None,
    ) -> None:
        self._attempt, self._description, self._budget = attempt, description, budget_bytes
        self._source, self._encodes, self._encoders = source, encodes, description.encoders
        self._base, self._looked_in = base, base if reuses else None
        self._folder = attempt.folder_of(attempt.group.index)
        self.is_local = self._folder.is_local
        self.is_stopped = False
        """Whether something has failed, so that no further chunk needs to be written."""
        self.nbytes, self.stored_bytes, self.count, self.patched = 0, 0, 0, 0
        """Of what was written: bytes, bytes before compression, chunks; of these, patches."""
        self._told, self._done, self._total, self.unchanged = told, 0, 0, description.unchanged
        self._counting = threading.Lock()  # threads count what they write
        self._extra: dict[str, dict[int, Any]] = {}

    @property
    def reused_bytes(self) -> int:
        """Logical bytes of the chunks that were taken from the base."""
        return 0 if self._base is None else self._base.nbytes

    @property
    def kept_bytes(self) -> int:
        """Bytes that the checkpoint needs of this process, written or not."""
        return self.stored_bytes + (0 if self._base is None else self._base.kept_bytes)

    @property
    def done_bytes(self) -> int:
        """Logical bytes that are written, or need not be; more may be requested than planned."""
        return min(self._done, self._total)

    def write_all(self, items: Sequence[WriteItem]) -> Record:
        """Writes this process's chunks, its per-process values and its description."""
        started = time.perf_counter()
        self._total = sum(item.nbytes for item in items)
        self.tell()
        description, process = self._description, self._attempt.group.index
        blobs, sources = description.blobs, description.sources
        own = [description.encoded] if process > 0 else []  # the coordinator has its own
        values = [*(each.data for each in blobs.values()), *own]
        done = self._take_or_write(items, values)
        places = dict(zip(blobs, done.others, strict=False))
        return done.record(
            description.digest,
            boxes={
                number: tuple(f.box for f in sources[name].fragments)
                for number, (name, entry) in enumerate(description.index.arrays.items())
                if entry.boxes == ()
            },
            blobs={
                name: (len(b.data), b.digest, b.head, places[name]) for name, b in blobs.items()
            },
            described=done.others[-1] if process > 0 else None,
            statistics={"bytes": self.nbytes, "seconds": time.perf_counter() - started},
            extra=self._extra,
        )

    def write_more(self, items: Sequence[WriteItem]) -> Record:
        """Writes chunks that the coordinator asked for after all had written theirs."""
        before, count, nbytes = self.reused_bytes, self.count, self.nbytes
        self._extra = {}  # the first record has what there was
        stored_bytes, done = self.stored_bytes, self._take_or_write(items, [])
        return done.record(
            self._description.digest,
            statistics={
                "reused_bytes": self.reused_bytes - before,
                "bytes": self.nbytes - nbytes,
                "stored_bytes": self.stored_bytes - stored_bytes,
                "chunks": self.count - count,
            },
            extra=self._extra,
        )

    def _take_or_write(
        self, items: Sequence[WriteItem], values: Sequence[bytes | memoryview]
    ) -> References:
        """Takes from the base what it has, and writes the rest, and some other values."""
        if self._base is None:
            return self.write(items, References(items), values)
        from unickpt.saving import taking  # only where there is one

        for note in taking.notes(self._base, items):
            self._add_note(*note)
        return taking.take_or_write(
            *(self, self._base, items, values),
            noting=References,
            looked_in=self._looked_in,
            in_order=self._source.background,  # staged copies come in the order of the plan
        )

    def write(
        self,
        items: Sequence[WriteItem],
        done: References,
        values: Sequence[bytes | memoryview],
        base: Base | None = None,
        *,
        rows: Sequence[int] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> References:
        """Writes chunks, which are the first rows of `done` or those of these numbers, and values;
        calls `meanwhile` while they are written. Equal chunks may be in `base`."""
        rows, size_of = range(len(items)) if rows is None else rows, attrgetter("nbytes")
        threads = self._threads(items)
        most_bytes = self._batch_bytes(sum(map(size_of, items)))
        # The rest of the budget is for what is needed besides the data.
        window = Window(self._budget - most_bytes, threads + 1)  # so that no thread waits
        looked, first = time.monotonic(), 0
        # Each makes a file: one unit's, so that a later save needs all of it or nothing.
        batches = [
            batch
            for _, run in itertools.groupby(items, attrgetter("unit"))
            for batch in in_batches(run, _MOST_CHUNKS, most_bytes, size_of)
        ] or ([[]] if values else [])
        with Pool(threads, background=self._source.background) as pool, self._stopping():
            for batch in batches:
                while not self._source.ready(batch) and window.wait_oldest():
                    pass  # the chunks staged next may need the memory that this releases
                size = sum(item.nbytes for item in batch)
                window.make_room(size)
                chunks = [self._source.fetch(item) for item in batch]
                # The first batch, which is of no unit, has the other values.
                some, rest = rows[first : first + len(batch)], () if first else values
                work = _Batch(self, done, some, batch, chunks, rest, base)
                held = sum(chunk.nbytes for chunk in chunks) + self._copies * size
                written = pool.submit(work.write)
                window.add(held, partial(self._end_batch, written, work))
                first += len(batch)
                if time.monotonic() - looked > _LOOK_EVERY_S:
                    self._attempt.check_others()
                    looked = time.monotonic()
            meanwhile()
            window.drain()
        return done

    @property
    def _copies(self) -> int:
        """How often an object is in memory while it is written."""
        return 0 if self.is_local else 2

    def _batch_bytes(self, total: int) -> int:
        """How large a batch may be."""
        if self.is_local:
            each = max(total // (self._file_threads * _FILES_EACH), _LEAST_FILE_BYTES)
        else:
            each = max(total // self._file_threads, _LEAST_OBJECT_BYTES)
        return min(each, _FILE_BYTES, max(1, self._budget // (4 + 2 * self._copies)))

    @property
    def _file_threads(self) -> int:
        """How many files are written at once."""
        if not self.is_local:
            return _THREADS_REMOTE
        threads = _BACKGROUND_THREADS if self._source.background else _THREADS
        return 2 * threads if paths.is_durable(self._attempt.context) else threads

    def _threads(self, items: Sequence[WriteItem]) -> int:
        """How many threads write, and so hash, encode and compare."""
        if self._looked_in is None and not any(item.entry.encoding for item in items):
            return self._file_threads
        from unickpt.saving import taking  # only where a thread does more

        background = self._source.background
        return taking.threads(self._looked_in, items, self._file_threads, background=background)

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """A failure is told when what was begun has ended, not all that waits for its turn."""
        try:
            yield
        except BaseException:
            self.is_stopped = True
            raise

    def new_file(self) -> DataFile:
        """A file for a batch."""
        piece = _BACKGROUND_PIECE if self._source.background else data_files.PIECE_BYTES
        return data_files.new_file(self._folder, self._attempt.context, piece)

    def encode(self, item: WriteItem, chunk: Any) -> codec.Encoded:
        """A chunk as it is stored."""
        if item.borrowed and item.entry.codec is not None:  # as the base has it
            return codec.Encoded((memoryview(chunk),))
        if (encoder := self._encoders.get(item.entry.name)) is not None:
            stored = codecs.encode(encoder, item.entry, codec.filled_up(item.part, chunk))
            return codec.Encoded((stored.data.data,), codec.digest(chunk))
        if self._encodes is not None and codec.is_chosen(item.entry):
            return self._encodes(item, chunk)
        return codec.encode(item.entry, item.part, chunk)

    def _end_batch(self, written: Future[None], batch: _Batch) -> None:
        while self._told is not None and not wait([written], _TELL_EVERY_S).done:
            self.tell()  # a slow disk, or a large chunk, takes longer
        written.result()
        for chunk in batch.chunks:
            chunk.release()
        batch.chunks = ()
        self.nbytes, self.count = self.nbytes + batch.nbytes, self.count + batch.count
        self.stored_bytes += batch.stored_bytes
        self.patched += batch.patched
        for note in batch.notes:
            self._add_note(*note)
        self.tell()

    def _add_note(self, array: int, name: str, note: Any) -> None:
        """Adds what a codec says about chunks of an array, by its number."""
        of_arrays = self._extra.setdefault(name, {})
        known = [of_arrays[array]] if array in of_arrays else []
        of_arrays[array] = codecs.merge(name, [*known, note])

    def count_done(self, nbytes: int) -> None:
        """Counts bytes that are written, or need not be; called on any thread."""
        with self._counting:
            self._done += nbytes

    def tell(self) -> None:
        """Says how much is done."""
        if self._told is not None:
            self._told(self.done_bytes, self._total)


class _Batch:
    """Chunks that one thread writes to a file.

    Arguments:
        writer: of the save.
        done: where it notes where they are.
        rows: of the chunks there.
        items, chunks: which they are, and their elements.
        values: what else is written to the file.
        base: where equal chunks may be.
    """

    def __init__(
        self,
        writer: ChunkWriter,
        done: References,
        rows: Sequence[int],
        items: Sequence[WriteItem],
        chunks: Sequence[StagedChunk],
        values: Sequence[bytes | memoryview],
        base: Base | None,
    ) -> None:
        self._writer, self._done, self._at = writer, done, rows
        self._items, self.chunks, self._values, self._base = items, chunks, values, base
        self.nbytes = self.stored_bytes = self.count = self.patched = 0
        self.notes: list[tuple[int, str, Any]] = []
        self._done_bytes = 0  # counted by the writer
        self._rows: list[int] = []  # of each value in the file, and -1 - row for patches
        self._links: list[int] = []  # of each patch
        self._apart: Any = None  # `taking.Apart`, for whole chunks where there are patches

    def write(self) -> None:
        """Writes the file.

        Raises:
            Failed: the storage failed.
            UnsupportedLeaf: the codec of an array cannot store a chunk.
        """
        file = self._writer.new_file()
        try:
            for row, item, chunk in zip(self._at, self._items, self.chunks, strict=True):
                if self._writer.is_stopped:
                    for each in self._both(file):
                        each.abandon()
                    return
                before = self._done_bytes
                self._add(file, row, item, chunk.data)
                if file.is_streamed:
                    self._count(before + item.nbytes - self._done_bytes)
            for value in self._values:
                file.add((memoryview(value),))
            for each in self._both(file):
                each.close()
        except BaseException:
            for each in self._both(file):
                each.abandon()
            raise
        self._count(sum(item.nbytes for item in self._items) - self._done_bytes)
        self._done.add(file, self._rows, len(self._values), self._links)
        if self._apart is not None:
            self._done.add(self._apart.file, self._apart.rows, 0)

    def _both(self, file: DataFile) -> list[DataFile]:
        return [file] if self._apart is None else [file, self._apart.file]

    def _count(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        self._writer.count_done(nbytes)

    def _looking(self, hasher: xxhash.xxh3_64, item: WriteItem) -> Callable[[memoryview], object]:
        """What is called with each piece of a chunk: hashes it, and counts it if all are many."""
        if item.nbytes < _LARGE_CHUNK_BYTES:
            return hasher.update
        end = self._done_bytes + item.nbytes

        def look(piece: memoryview) -> None:
            hasher.update(piece)
            self._count(min(piece.nbytes, end - self._done_bytes))

        return look

    def _add(self, file: DataFile, row: int, item: WriteItem, data: Any) -> None:
        encoded, digest = None, None
        if (name := item.entry.codec) is not None:
            encoded = self._writer.encode(item, data)
            data = np.frombuffer(encoded.value[0], np.uint8)
            if encoded.note is not None:
                self.notes.append((item.array, name, encoded.note))
        if self._base is not None:
            compared = self._base.compare(item.entry, item.part, item.number, data)
            digest = compared.digest
            if (told := self._writer.unchanged) and told.claims(item.entry.name, item.box):
                before = self._base.stored_digest(item.entry, item.part, item.number)
                told.check(item.entry.name, item.box, before, digest)
            if compared.taken:
                from unickpt.saving import taking  # only where there is a base

                taking.note(self._done, {row: compared})
                for link, again in enumerate(compared.taken, FULL_LINK):
                    if isinstance(again, bytes):
                        self._add_patch(file, row, again, link)
                if compared.patch is not None:
                    self._add_patch(file, row, compared.patch, FULL_LINK + len(compared.taken))
                    self.patched += 1
                return
        rows = self._rows
        if self._base is not None and self._base.adds_patches and self._writer.is_local:
            from unickpt.saving import taking

            self._apart = self._apart or taking.Apart(self._writer.new_file())
            file, rows = self._apart.file, self._apart.rows
        value, known, _ = encoded or self._writer.encode(item, data)
        digest = known if digest is None else digest
        if digest is None and len(value[0]) <= _HASHED_FIRST_BYTES:
            digest = xxhash.xxh3_64_intdigest(value[0])
        if digest is None:
            hasher = xxhash.xxh3_64()
            file.add(value, self._looking(hasher, item) if file.is_streamed else hasher.update)
            digest = hasher.intdigest()
        else:
            file.add(value)
        rows.append(row)
        self._done.chunks["digest"][row] = digest
        self.nbytes += item.nbytes
        self.stored_bytes += data.nbytes
        self.count += 1

    def _add_patch(self, file: DataFile, row: int, patch: bytes, link: int) -> None:
        """Adds a patch; `link` says which value of its chunk it is."""
        file.add((memoryview(patch),))
        self._rows.append(-1 - row)
        self._links.append(link)
        self.nbytes += len(patch)
        self.stored_bytes += len(patch)


class References:
    """Where everything is that a process saves: what its record says. Several threads add to it.

    Arguments:
        items: the chunks, in the order of their rows.
    """

    def __init__(self, items: Sequence[WriteItem]) -> None:
        found = [(item.array, item.position, item.count) for item in items]
        array, position, counts = np.array(found, np.int64).reshape(-1, 3).T
        self.chunks, first = np.zeros(counts.sum(), CHUNK_DTYPE), np.cumsum(counts) - counts
        self.chunks["array"] = np.repeat(array, counts)
        self.chunks["chunk"] = np.repeat(position - first, counts) + np.arange(len(self.chunks))
        self.others: list[ValuePlace] = []
        """Where the values are that are no chunks, in their order."""
        self._files = dict[str, int]()
        self._inline, self._nbytes = list[bytes](), 0
        self._patches, self._bases = [np.zeros(0, PATCH_DTYPE)], dict[BaseEntry, int]()
        self._lock = threading.Lock()

    def place(self, taken: DataReference | BaseEntry) -> ValuePlace:
        """Where a value is that was taken, as the record says it."""
        with self._lock:
            if isinstance(taken, BaseEntry):
                return ELSEWHERE, self._bases.setdefault(taken, len(self._bases)), 0
            number = self._files.setdefault(taken.path, len(self._files))
            return number, taken.offset, taken.length

    def add_patches(self, patches: Any) -> None:
        """Notes where some patches are."""
        with self._lock:
            self._patches.append(patches)

    def add(
        self, file: DataFile, rows: Sequence[int], others: int, links: Sequence[int] = ()
    ) -> None:
        """Notes where the values of a file are.

        Arguments:
            file: with these values.
            rows: of those that are chunks; -1 - row for the patches of chunks.
            others: how many values follow.
            links: which values of their chunks the patches are.

        Raises:
            StorageError: it has more or fewer.
        """
        if len(file.lengths) != len(rows) + others:
            raise StorageError(
                f"{file.path}: {len(file.lengths)} values were written, not {len(rows) + others}"
            )
        if not file.lengths:
            return
        places = np.zeros(len(file.lengths), PLACE_DTYPE)
        offsets, places["length"] = np.array(file.offsets, np.int64), file.lengths
        is_inline = offsets < 0
        sizes = places["length"][is_inline].astype(np.int64)
        with self._lock:
            if is_inline.all():
                places["file"] = INLINE
            else:
                number = self._files.setdefault(file.path, len(self._files))
                places["file"] = np.where(is_inline, INLINE, number)
            offsets[is_inline] = self._nbytes + np.cumsum(sizes) - sizes
            self._inline += file.inline
            self._nbytes += int(sizes.sum())
        places["offset"] = offsets
        at = np.array(rows, np.int64)
        own = places[: len(at)]
        for name in PLACE_DTYPE.names or ():
            self.chunks[name][at[at >= 0]] = own[name][at >= 0]
        if (at < 0).any():
            patches = np.zeros(int((at < 0).sum()), PATCH_DTYPE)
            patches["row"], patches["link"] = -1 - at[at < 0], links
            for name in PLACE_DTYPE.names or ():
                patches[name] = own[name][at < 0]
            self.add_patches(patches)
        if others:
            self.others = places[len(at) :].tolist()

    def record(self, description: int, **more: Any) -> Record:
        """The record of all that was noted.

        Arguments:
            description: digest of the process's description.
            more: further fields.
        """
        patches = np.concatenate(self._patches)
        return Record(
            description=description,
            chunks=self.chunks,
            files=tuple(self._files),
            inline=b"".join(self._inline),
            bases=tuple(self._bases),
            patches=patches[np.lexsort((patches["link"], patches["row"]))],
            **more,
        )
