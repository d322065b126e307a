"""Write: staged chunks -> data files, a bounded number of bytes at a time, and a record of them."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from unickpt.commit.attempt import Attempt
from unickpt.commit.messages import DESCRIPTION, Record
from unickpt.errors import StorageError
from unickpt.format import chunk_encoding, codec_protocol
from unickpt.format.chunk_grid import FULL_LINK
from unickpt.references.value_places import Compared, ValuePlaces, WriteItem
from unickpt.saving.describe import Description
from unickpt.saving.write_plan import ChunkSource, StagedChunk
from unickpt.storage import data_files
from unickpt.storage.data_files import DataFile, Flushes
from unickpt.storage.locations import Location
from unickpt.threads import Pool, Window, in_batches

if TYPE_CHECKING:
    from unickpt.features import FileObserver
    from unickpt.format.encoder_protocol import SaveEncoder
    from unickpt.progress import ProgressFunction
    from unickpt.references.policy import ReferenceSource

_MOST_CHUNKS = 16384  # of a batch
_LOOK_EVERY_S = 0.5
_TELL_EVERY_S = 0.25
_HASHED_FIRST_BYTES = 64 << 10  # so little is still in the CPU's cache when it is written
_LARGE_CHUNK_BYTES = 64 << 20  # is counted piece by piece

# Measured: with more threads than CPUs, pieces fall out of the cache; but threads that wait for the
# disk are idle, so durable saves have twice as many.
_THREADS = max(2, min(8, os.cpu_count() or 1))
# In the background of a training loop, each keeps a CPU busy that the loop may need (measured).
_BACKGROUND_THREADS = max(1, min(8, (os.cpu_count() or 1) // 4))
_MOST_THREADS = 16  # that write and also encode, or compare with the base
_THREADS_REMOTE = 4  # each waits for its object
_FILE_BYTES = 256 << 20  # of a file at most, unless one chunk is larger
_LEAST_FILE_BYTES, _LEAST_OBJECT_BYTES = 8 << 20, 64 << 20
_FILES_EACH = 8  # so many for each thread, so that they end together
_NBYTES, _ENCODING = attrgetter("nbytes"), attrgetter("entry.encoding")
# In the background of a training loop, which needs the GIL, a thread should rarely take it.
_BACKGROUND_PIECE = 8 << 20


class ChunkWriter:
    """Stages, encodes, hashes and writes chunks, each batch of them as one file.

    Arguments:
        attempt: the attempt to which this belongs.
        description: the arrays and values that this process saves.
        budget_bytes: memory to write with.
        source: provides the chunks.
        base: the chunks that the save references instead of writing.
        progress: called with the bytes that are done and those in total, if given.
        encoder: encodes the chunks of arrays whose encoding is not decided yet.
        observers: of the files.
    """

    def __init__(
        self,
        attempt: Attempt,
        description: Description,
        budget_bytes: int,
        source: ChunkSource,
        base: ReferenceSource | None = None,
        progress: ProgressFunction | None = None,
        encoder: SaveEncoder | None = None,
        observers: Sequence[FileObserver] = (),
    ) -> None:
        self._attempt, self._description, self._budget = attempt, description, budget_bytes
        self._source, self._encoder, self._encoders = source, encoder, description.encoders
        self._base = base
        self.location, self._folder = attempt.location, attempt.own
        self.is_local = self._folder.is_local
        self._flushes: Flushes | None = None
        self._copies = 0 if self.is_local else 2
        """How many copies of an object are in memory while it is written."""
        self.observers = observers
        self._buffers = sum(observer.buffers for observer in observers)
        self._file_threads = self._files_at_once()
        self.fetching: WriteItem | None = None
        """The chunk for which it waits."""
        self.is_sending = False
        """Whether it waits for the storage."""
        self.is_stopped = False
        """Whether something has failed, so that no further chunk needs to be written."""
        self.nbytes, self.stored_bytes, self.count, self.extended = 0, 0, 0, 0
        """Written bytes, bytes before compression and chunks; and chunks to which values were
        added."""
        self._progress, self._done, self._total = progress, 0, 0
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
        """Logical bytes written or reused; more may be requested than planned."""
        return min(self._done, self._total)

    def write_all(self, items: Sequence[WriteItem]) -> Record:
        """Writes this process's chunks, its per-process values and its description."""
        started = time.perf_counter()
        self._total = self._attempt.planned_bytes
        self.tell()
        description, process = self._description, self._attempt.group.index
        blobs, sources = description.blobs, description.sources
        descriptions = [description.encoded] if process > 0 else []  # the coordinator has its own
        # A process that writes no chunks makes no file for it.
        if descriptions and not (items and self._attempt.location.shares_data):
            self._attempt.notes.put(DESCRIPTION.format(description.digest), descriptions.pop())
        values = [*(blob.data for blob in blobs.values()), *descriptions]
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
            described=done.others[-1] if descriptions else None,
            statistics={"bytes": self.nbytes, "seconds": time.perf_counter() - started},
            extra=self._extra,
        )

    def write_more(self, items: Sequence[WriteItem]) -> Record:
        """Writes chunks that the coordinator requested after all processes had written theirs."""
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
    ) -> ValuePlaces:
        """Reuses the chunks that the base has; writes the rest, and some other values."""
        if self._base is None:
            return self._write(items, ValuePlaces(items), values)
        # Staged copies come in the order of the plan.
        claim = self._base.claim(items, in_order=self._source.background)
        for note in claim.notes:
            self._add_note(*note)
        done, left = ValuePlaces([*claim.written, *claim.reused]), dict[int, WriteItem]()

        def take() -> None:
            left.update(claim.take(done, len(claim.written)))
            nbytes = sum(item.nbytes for item in claim.reused)
            self.count_done(nbytes - sum(item.nbytes for item in left.values()))
            self.tell()

        compares = self._base if self._base.compares else None
        self._write(claim.written, done, values, compares, meanwhile=take)
        if left:
            self._write(list(left.values()), done, (), rows=list(left))
        return done

    def _write(
        self,
        items: Sequence[WriteItem],
        done: ValuePlaces,
        values: Sequence[bytes | memoryview],
        base: ReferenceSource | None = None,
        *,
        rows: Sequence[int] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> ValuePlaces:
        """Writes chunks, which are the first rows of `done` or those of these numbers, and values;
        calls `meanwhile` while they are written. Equal chunks may be in `base`."""
        rows = range(len(items)) if rows is None else rows
        threads = self._threads(items, base)
        most_bytes = self._batch_bytes(items)
        # The rest of the budget is for memory besides the data.
        free_bytes = self._budget - most_bytes * (1 + self._buffers)
        window = Window(free_bytes, threads + 1)  # so that no thread waits
        looked, first = time.monotonic(), 0
        # Each batch becomes a file: one unit's, so that a later save needs all of it or nothing.
        batches = [
            batch
            for _, run in itertools.groupby(items, attrgetter("unit"))
            for batch in in_batches(run, _MOST_CHUNKS, most_bytes, _NBYTES)
        ] or ([[]] if values else [])
        if len(batches) == 1 and self._progress is None and not self._source.background:
            # So little is not worth starting a thread.
            self._flushes = None
            chunks = [self._fetch(item) for item in batches[0]]
            work = _Batch(self, done, rows, batches[0], chunks, values, base)
            self.is_sending = True
            work.write()
            self.is_sending = False
            self._count(work)
            meanwhile()
            return done
        pool = Pool(threads, background=self._source.background)
        flushes = Flushes() if self.is_local and self._attempt.is_durable else None
        self._flushes = flushes
        with flushes or nullcontext(), pool, self._stopping():
            for batch in batches:
                while not self._source.ready(batch) and window.wait_oldest():
                    pass  # the chunks staged next may need the memory that this releases
                size = sum(map(_NBYTES, batch))
                window.make_room(size)
                chunks = [self._fetch(item) for item in batch]
                # The first batch, which has no unit, has the other values.
                batch_rows, batch_values = rows[first : first + len(batch)], () if first else values
                work = _Batch(self, done, batch_rows, batch, chunks, batch_values, base)
                memory_bytes = sum(map(_NBYTES, chunks)) + self._copies * size
                written = pool.submit(work.write)
                window.add(memory_bytes, partial(self._end, written, work))
                first += len(batch)
                if time.monotonic() - looked > _LOOK_EVERY_S:
                    self._attempt.check_others()
                    looked = time.monotonic()
            meanwhile()
            window.drain()
            for flushed in [pool.submit(flush) for flush in flushes.take()] if flushes else ():
                self._end(flushed)
        return done

    def _fetch(self, item: WriteItem) -> StagedChunk:
        self.fetching = item
        chunk = self._source.fetch(item)
        self.fetching = None
        if self._encoder is not None and self._encoder.is_undecided(item.entry):
            self._encoder.look(item.array, item.entry, chunk.data)
        return chunk

    def _batch_bytes(self, items: Sequence[WriteItem]) -> int:
        """How large a batch may be."""
        sizes: list[int] = list(map(_NBYTES, items))
        total = sum(sizes)
        if self.is_local:
            batch_bytes = max(total // (self._file_threads * _FILES_EACH), _LEAST_FILE_BYTES)
        else:
            batch_bytes = max(total // self._file_threads, _LEAST_OBJECT_BYTES)
        copies = self._copies + self._buffers
        batch_bytes = min(batch_bytes, _FILE_BYTES, self._folder.most_object_bytes)
        batch_bytes = min(batch_bytes, max(1, self._budget // (4 + 2 * copies)))
        if not self.observers or not total:
            return batch_bytes
        multiple = max(observer.multiple for observer in self.observers)
        count = math.ceil(total / batch_bytes / multiple) * multiple
        # Half a chunk more: else there would be more files, as none of them would be full.
        return min(batch_bytes, total // count + max(sizes) // 2 + 1)

    def _files_at_once(self) -> int:
        """How many files are written at once."""
        if not self.is_local:
            return _THREADS_REMOTE
        threads = _BACKGROUND_THREADS if self._source.background else _THREADS
        return 2 * threads if self._attempt.is_durable else threads

    def _threads(self, items: Sequence[WriteItem], base: ReferenceSource | None) -> int:
        """How many threads write, and so hash, encode and compare with the base."""
        most = None if base is None else base.most_at_once(items)
        if most is None and not any(map(_ENCODING, items)):
            return self._file_threads
        cpus = os.cpu_count() or 1
        thread_count = cpus // 4 if self._source.background else min(cpus, _MOST_THREADS)
        thread_count = max(self._file_threads, thread_count)
        return thread_count if most is None else min(thread_count, max(1, most))

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """On failure, finishes running batches and drops queued ones."""
        try:
            yield
        except BaseException:
            self.is_stopped = True
            raise

    def new_file(self) -> DataFile:
        """A file for a batch."""
        background = self._source.background
        piece = _BACKGROUND_PIECE if background else data_files.PIECE_BYTES
        file = data_files.new_file(
            self._folder, self._attempt.context, piece, self._flushes, direct=background
        )
        file.views = [observer.begin() for observer in self.observers]
        return file

    def encode(self, item: WriteItem, chunk: Any) -> chunk_encoding.Encoded:
        """A chunk as it is stored."""
        if item.borrowed and item.entry.codec is not None:  # as stored in the base
            return chunk_encoding.Encoded((memoryview(chunk),))
        if (encoder := self._encoders.get(item.entry.name)) is not None:
            stored = codec_protocol.encode(
                encoder, item.entry, chunk_encoding.filled_up(item.part, chunk)
            )
            return chunk_encoding.Encoded((stored.data.data,), chunk_encoding.digest(chunk))
        if self._encoder is not None and self._encoder.is_undecided(item.entry):
            return self._encoder.encode(item.array, item.entry, item.part, chunk)
        return chunk_encoding.encode(item.entry, item.part, chunk)

    def _end(self, done: Future[None], batch: _Batch | None = None) -> None:
        """Waits until a batch is written, or a file flushed."""
        self.is_sending = True
        while self._progress is not None and not wait([done], _TELL_EVERY_S).done:
            self.tell()  # a slow disk, or a large chunk, takes longer
        done.result()
        self.is_sending = False
        if batch is not None:
            self._count(batch)
        self.tell()

    def _count(self, batch: _Batch) -> None:
        """Counts written bytes, and releases their memory."""
        for chunk in batch.chunks:
            chunk.release()
        batch.chunks = ()
        self.nbytes, self.count = self.nbytes + batch.nbytes, self.count + batch.count
        self.stored_bytes += batch.stored_bytes
        self.extended += batch.extended
        for note in batch.notes:
            self._add_note(*note)

    def _add_note(self, array: int, name: str, note: Any) -> None:
        """Adds what a codec says about chunks of an array, by its number."""
        of_arrays = self._extra.setdefault(name, {})
        notes = [of_arrays[array]] if array in of_arrays else []
        of_arrays[array] = codec_protocol.merge(name, [*notes, note])

    def count_done(self, nbytes: int) -> None:
        """Counts written or reused bytes; called on any thread."""
        with self._counting:
            self._done += nbytes

    def tell(self) -> None:
        """Reports the progress."""
        if self._progress is not None:
            self._progress(self.done_bytes, self._total)


class _Batch:
    """Chunks that one thread writes to a file.

    Arguments:
        writer: of the save.
        done: the record in which it notes their places.
        rows: of the chunks there.
        items, chunks: the items, and their elements.
        values: other values to write to the file.
        base: may have equal chunks.
    """

    def __init__(
        self,
        writer: ChunkWriter,
        done: ValuePlaces,
        rows: Sequence[int],
        items: Sequence[WriteItem],
        chunks: Sequence[StagedChunk],
        values: Sequence[bytes | memoryview],
        base: ReferenceSource | None,
    ) -> None:
        self._writer, self._done, self._at = writer, done, rows
        self._items, self.chunks, self._values, self._base = items, chunks, values, base
        self.nbytes = self.stored_bytes = self.count = self.extended = 0
        self.notes: list[tuple[int, str, Any]] = []
        self._done_bytes = 0  # counted by the writer
        self._rows: list[int] = []  # of each value in the file; -1 - row for an added value
        self._links: list[int] = []  # for an added value: its position among its chunk's values
        self._apart: _Apart | None = None

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
                    for data_file in self._both(file):
                        data_file.abandon()
                    return
                before = self._done_bytes
                self._add(file, row, item, chunk.data)
                if file.is_streamed:
                    self._count(before + item.nbytes - self._done_bytes)
            for value in self._values:
                if not file.is_streamed:
                    _check_size(
                        self._writer.location, file, (memoryview(value),), "a value of this process"
                    )
                file.add((memoryview(value),))
            for data_file in self._both(file):
                data_file.close()
        except BaseException:
            for data_file in self._both(file):
                data_file.abandon()
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
        """A function for each piece of a chunk: hashes it, and counts it if the chunk is large."""
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
            compared = self._base.compare(item, data)
            digest = compared.digest
            if compared.reused:
                self._refer(file, row, compared)
                return
        rows = self._rows
        if self._base is not None and self._base.adds and self._writer.is_local:
            self._apart = self._apart or _Apart(self._writer.new_file())
            file, rows = self._apart.file, self._apart.rows
        value, encoded_digest, _ = encoded or self._writer.encode(item, data)
        if not file.is_streamed:
            _check_size(
                self._writer.location,
                file,
                value,
                f"array {item.entry.name!r}: the chunk {item.box}",
            )
        digest = encoded_digest if digest is None else digest
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

    def _refer(self, file: DataFile, row: int, compared: Compared) -> None:
        """References values of the base, and writes the values that are added to them."""
        self._done.note({row: compared})
        for link, again in enumerate(compared.reused, FULL_LINK):
            if isinstance(again, bytes):
                self._add_value(file, row, again, link)
        if compared.added is not None:
            self._add_value(file, row, compared.added, FULL_LINK + len(compared.reused))
            self.extended += 1

    def _add_value(self, file: DataFile, row: int, value: bytes, link: int) -> None:
        """Adds a value to a reused chunk; `link` is its position among the chunk's values."""
        file.add((memoryview(value),))
        self._rows.append(-1 - row)
        self._links.append(link)
        self.nbytes += len(value)
        self.stored_bytes += len(value)


def _check_size(location: Location, file: DataFile, value: Sequence[memoryview], what: str) -> None:
    """Refuses a value with which an object would be larger than the storage takes.

    Raises:
        StorageError: names the value.
    """
    nbytes, most = sum(map(len, value)), location.most_object_bytes
    if sum(file.lengths) + nbytes > most:
        raise StorageError(
            f"{location}: {what} has {nbytes} bytes, but this storage takes at most {most} for an "
            "object. Nothing was saved. Lower SaveOptions(chunk_bytes=), or divide the value"
        )


@dataclass(frozen=True)
class _Apart:
    """A separate file for the whole chunks of a batch that also adds values to other chunks. Later
    saves link the file of added values; a whole chunk in it would stay on disk after it changed.

    Arguments:
        file: the file.
        rows: of its chunks.
    """

    file: DataFile
    rows: list[int] = field(default_factory=list)
