"""Batches of chunks on their way into this process's database; each makes a file.

Files of a local disk are written by unickpt itself, everything else by TensorStore.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import tensorstore as ts
import xxhash

from unickpt.format import chunk_store
from unickpt.format.chunk_store import ChunkStore
from unickpt.saving.chunk_source import StagedChunk
from unickpt.saving.write_plan import WriteItem
from unickpt.storage.kvstore import Future, commit
from unickpt.storage.local_database_writer import PIECE_BYTES, LocalDatabaseWriter, Value
from unickpt.threads import Workers

Digest = Callable[[], int]


class Batch(Protocol):
    """Values that are written together.

    `held` is the memory that it holds until its end, beyond the state itself.
    """

    held: int

    def put(self, key: str, value: bytes) -> None:
        """Adds a value."""

    def put_chunk(self, item: WriteItem, chunk: StagedChunk, digest: Digest | None) -> Digest:
        """Adds a chunk, which must stay unchanged until the end.

        Arguments:
            item: which chunk.
            chunk: its elements; if the array is quantised, the bytes to store.
            digest: if it is known.

        Returns:
            The digest, once the batch has ended.
        """

    def end(self) -> Callable[[], None]:
        """Writes what was added; returns what waits for it.

        Raises:
            Failed: the storage failed; what is returned raises it, too.
        """


class Batches(Protocol):
    """Makes batches, of which several may be under way, and then a database of them.

    `at_once` says how many there should be, `threads` how many threads they need.
    """

    at_once: int
    threads: int

    def most_bytes(self, total: int) -> int:
        """How large a batch should be.

        Arguments:
            total: what is written, in bytes.
        """

    def begin(self, pool: Workers, *, last: bool) -> Batch:
        """Begins a batch.

        Arguments:
            pool: hashes and writes.
            last: whether `finish` comes next.
        """

    def finish(self) -> None:
        """Makes what was written readable, once all batches have ended.

        Raises:
            Failed: the storage failed.
        """

    def stop(self) -> None:
        """After a failure: what has not begun does not begin."""

    def settle(self) -> None:
        """Waits, after a failure, until all writes in progress have ended."""


def batches_for(store: ChunkStore, *, behind: bool) -> Batches:
    """How the chunks of a database are written.

    Arguments:
        store: the database.
        behind: whether that is done in the background of a training loop.
    """
    writer = None if store.codecs else store.database.local_writer()
    if writer is None:
        return _Transactions(store, behind)
    return _Files(writer, behind)


# --- files of a local disk -------------------------------------------------------------------

# Measured: with more threads than CPUs pieces fall out of the cache; but those that wait for the
# disk are idle, so that durable saves have twice as many.
_THREADS = max(2, min(8, os.cpu_count() or 1))
# In the background of a training loop each keeps a CPU busy, which it may need (measured, too).
_THREADS_BEHIND = max(1, min(8, (os.cpu_count() or 1) // 4))
_FILE_BYTES = 256 << 20  # of a file at most, unless one chunk is larger
_LEAST_FILE_BYTES = 8 << 20
_FILES_EACH = 8  # so many for each thread, so that they end together
# In the background of a training loop, which needs the GIL, a thread should rarely ask for it.
_PIECE_BEHIND = 8 << 20


class _Files:
    """Each batch is a file, written by one thread."""

    def __init__(self, writer: LocalDatabaseWriter, behind: bool) -> None:
        self.writer = writer
        self.piece_bytes = _PIECE_BEHIND if behind else PIECE_BYTES
        self.threads = _THREADS_BEHIND if behind else _THREADS
        if writer.is_durable:
            self.threads *= 2
        self.at_once = self.threads + 1  # so that none waits while the next batch is staged
        self.is_stopped = False

    def most_bytes(self, total: int) -> int:
        each = total // (self.threads * _FILES_EACH)
        return min(max(each, _LEAST_FILE_BYTES), _FILE_BYTES)

    def begin(self, pool: Workers, *, last: bool) -> Batch:
        return _FileBatch(self, pool, last)

    def finish(self) -> None:
        self.writer.finish()

    def stop(self) -> None:
        self.is_stopped = True

    def settle(self) -> None:  # the threads have ended with the pool
        self.writer.abandon()


class _FileBatch:
    def __init__(self, batches: _Files, pool: Workers, last: bool) -> None:
        self._batches, self._pool, self._last = batches, pool, last
        self._values: list[tuple[str, Value, bool]] = []  # and whether it is to be hashed
        self._digests: list[int] = []
        self._hashed = 0
        self.held = 0

    def put(self, key: str, value: bytes) -> None:
        self._values.append((key, (memoryview(value),), False))

    def put_chunk(self, item: WriteItem, chunk: StagedChunk, digest: Digest | None) -> Digest:
        self.held += chunk.nbytes
        key = chunk_store.key_of(item.part, item.number)
        value = chunk_store.stored(item.entry, item.part, chunk.data)
        if digest is None and len(value) > 1:  # with what fills the chunk up
            digest = self._pool.submit(partial(chunk_store.digest, chunk.data))
        self._values.append((key, value, digest is None))
        if digest is not None:
            return digest
        self._hashed += 1
        return partial(self._digests.__getitem__, self._hashed - 1)

    def end(self) -> Callable[[], None]:
        return self._pool.submit(self._write) if self._values else _nothing

    def _write(self) -> None:
        writer = self._batches.writer
        file = writer.new_file(self._batches.piece_bytes)
        try:
            for key, value, is_hashed in self._values:
                if self._batches.is_stopped:
                    break
                if is_hashed:
                    hasher = xxhash.xxh3_64()
                    file.add(key, value, hasher.update)
                    self._digests.append(hasher.intdigest())
                else:
                    file.add(key, value)
            writer.add(file, last=self._last)
        except BaseException:
            file.abandon()
            raise


def _nothing() -> None:
    """Nothing was added."""


# --- TensorStore's transactions --------------------------------------------------------------

# Measured: smaller transactions cost an fsync each, larger ones leave too little overlap.
_TRANSACTION_BYTES = 256 << 20
_TRANSACTIONS = 4  # at once
# In the background of a training loop (measured too): each keeps a CPU busy, which it may need.
_TRANSACTIONS_BEHIND = max(1, min(_TRANSACTIONS, (os.cpu_count() or 1) // 4))
_HASH_THREADS = 2
_HASH_HERE_BYTES = 256 << 10  # handing less to a thread costs more than hashing it


class _Transactions:
    """Each batch is a transaction, which makes a file or an object."""

    def __init__(self, store: ChunkStore, behind: bool) -> None:
        self.store, self.threads = store, _HASH_THREADS
        beside = behind and store.location.is_local
        self.at_once = _TRANSACTIONS_BEHIND if beside else _TRANSACTIONS
        self.committing: list[Future[None]] = []

    def most_bytes(self, total: int) -> int:
        return _TRANSACTION_BYTES

    def begin(self, pool: Workers, *, last: bool) -> Batch:
        return _TransactionBatch(self, pool)

    def finish(self) -> None:
        """Each transaction has made its values readable."""

    def stop(self) -> None:
        """TensorStore has begun everything."""

    def settle(self) -> None:
        for committed in self.committing:
            with suppress(Exception):
                committed.result()


class _TransactionBatch:
    def __init__(self, batches: _Transactions, pool: Workers) -> None:
        self._batches, self._pool = batches, pool
        self._transaction = ts.Transaction(atomic=True)
        self._store = batches.store.store.with_transaction(self._transaction)
        self._writes: list[Future[Any]] = []
        self.held = 0

    def put(self, key: str, value: bytes) -> None:
        self._writes.append(self._store.write(key, value))

    def put_chunk(self, item: WriteItem, chunk: StagedChunk, digest: Digest | None) -> Digest:
        host, store = chunk.data, self._batches.store
        if digest is None and host.nbytes > _HASH_HERE_BYTES:
            digest = self._pool.submit(partial(chunk_store.digest, host))
        elif digest is None:
            digest = partial(int, chunk_store.digest(host))
        # Files are written from staged memory and views of the user's memory, without a copy.
        by_reference = store.location.is_local and not store.codecs
        copied = not by_reference or host.nbytes <= chunk_store.SMALL
        self.held += host.nbytes if copied else chunk.nbytes
        written = store.write(item.entry, item.part, item.number, host, self._transaction)
        self._writes.append(written)
        return digest

    def end(self) -> Callable[[], None]:
        for write in self._writes:
            write.result()
        committed = commit(self._transaction)
        self._batches.committing.append(committed)

        def wait() -> None:
            committed.result()
            self._batches.committing.remove(committed)

        return wait
