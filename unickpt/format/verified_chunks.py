"""Reads and verifies the chunks of a database."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import numpy as np
import tensorstore as ts
import xxhash

from unickpt.arrays import dtypes
from unickpt.arrays.dtypes import Array
from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointReplaced,
    StorageError,
    UnsupportedFormat,
    naming_memory,
)
from unickpt.format import codec_protocol, digest_table
from unickpt.format.chunk_encoding import as_stored, bytes_of, digest, zarr_metadata
from unickpt.format.chunk_grid import Part, chunk_key, chunk_spans
from unickpt.format.codec_protocol import NotDecodable, codec_of
from unickpt.format.index import DIGESTS_KEY, ArrayEntry, Index
from unickpt.format.reader_protocol import Request
from unickpt.storage import ocdbt
from unickpt.storage.database import Database
from unickpt.storage.errors import Damaged, Failed, reading, reading_failed
from unickpt.storage.tensorstore_calls import KvStore, asking

# Opening an array costs TensorStore about 80 us, which dominates for a small chunk. Below this size
# the bytes are written to the database directly, exactly as zarr would write them.
SMALL = 64 << 10
# Memory for larger chunks is allocated only after a stored chunk of that size was found.
BELIEVED = 16 << 20
# No codec of `codec_protocol.ZARR_CODECS` compresses by more than this factor.
_MOST_PER_BYTE = 1 << 16
# Only the index states how much memory a compressed chunk takes, so that is bounded.
COMPRESSED_MOST = 1 << 30


class ChunkStore:
    """The chunks in one OCDBT database.

    Arguments:
        database: the database; all of a checkpoint share one context.
        values: reads the database, if it exists already.
    """

    def __init__(self, database: Database, values: ocdbt.DatabaseReader | None = None) -> None:
        self.database, self.location = database, database.location
        self.values = values or database.reader()  # here, so that threads share one
        self._reads_values = database.location.is_local or bool(database.restorers)
        self._open: dict[str, ts.TensorStore] = {}
        self._backed: set[str] = set()

    def array(self, entry: ArrayEntry, part: Part) -> ts.TensorStore:
        """The zarr array of a part, opened without I/O.

        Raises:
            UnsupportedFormat: its codec is none of Zarr's.
        """
        if entry.codec is not None:
            raise UnsupportedFormat(
                f"{self.location}: TensorStore cannot decode array {entry.name!r}, which is stored "
                f"by the codec {entry.codec!r} ({entry.stored_dtype}); read it by slicing"
            )
        array = self._open.get(part.key)
        if array is None:
            spec = {
                "driver": "zarr3",
                "kvstore": self.database.array_spec(part.key),
                "metadata": zarr_metadata(entry, part),
                # Without these two, all-zero chunks would be left out and missing ones read as 0.
                "store_data_equal_to_fill_value": True,
                "fill_missing_data_reads": False,
            }
            with asking():
                context = self.database.context
                opened = ts.open(spec, context=context, open=True, assume_metadata=True)
                array = opened.result()
            self._open[part.key] = array
        return array

    def _array_with(self, entry: ArrayEntry, part: Part, number: int) -> ts.TensorStore:
        """A zarr array that has a chunk. Raises as `read_whole`."""
        if not self.database.restorers:
            return self.array(entry, part)
        value = self.values.read(chunk_key(part, number))
        if value is None:
            raise Damaged("no bytes stored")
        memory, context = {"driver": "memory"}, ts.Context()
        KvStore.open(memory, context).write(part.chunk_key(number), value).result()
        spec = {"driver": "zarr3", "kvstore": memory, "metadata": zarr_metadata(entry, part)}
        with asking():
            return ts.open(spec, context=context, open=True, assume_metadata=True).result()

    def read(self, requests: Sequence[Request]) -> Sequence[int]:
        """As `Reader.read`."""
        digests = self._read_as_stored(requests)
        if len(digests) < len(requests):
            unread = [position for position in range(len(requests)) if position not in digests]
            values = self._request([requests[position] for position in unread])
            for position in unread:
                digests[position] = self._read_one(requests[position], values)
        return [
            position
            for position, request in enumerate(requests)
            if request.digest is not None and request.digest != digests[position]
        ]

    def _read_as_stored(self, requests: Sequence[Request]) -> dict[int, int | None]:
        """Reads those chunks that are stored exactly as they lie in memory.

        Returns:
            The digests of the chunks that were read, by position; None if none is needed.
        """
        # For 100,000 small arrays, the work here for each takes as long as reading them.
        positions, keys, lengths = list[int](), list[str](), list[int]()
        hashers: dict[int, xxhash.xxh3_64] = {}
        for position, (entry, part, number, out, expected, _) in enumerate(requests):
            nbytes = out.nbytes
            if part.chunk != out.shape:
                nbytes = math.prod(part.chunk) * out.itemsize
                if part.chunk[1:] != out.shape[1:]:
                    continue
            if entry.encoding:
                continue
            positions.append(position)
            keys.append(chunk_key(part, number))
            lengths.append(nbytes)
            # While the CPU's cache has it; small chunks stay there until all are read.
            if expected is not None and nbytes > SMALL:
                hashers[position] = xxhash.xxh3_64()
        if not positions:
            return {}
        memory: list[Any] = [requests[position].out for position in positions]
        looks = [
            hashers[position].update if position in hashers else None for position in positions
        ]
        digests: dict[int, int | None] = {}
        done = self.values.read_into(keys, memory, lengths, looks)
        for position, is_done, out in zip(positions, done, memory, strict=True):
            if is_done and position in hashers:
                digests[position] = hashers[position].intdigest()
            elif is_done:
                hashed = requests[position].digest is not None  # as `digest`, for contiguous memory
                digests[position] = xxhash.xxh3_64_intdigest(out) if hashed else None
        return digests

    def _request(self, requests: Sequence[Request]) -> Mapping[str, Any]:
        """Starts to read small values that have to be decoded, by their keys."""
        return self.values.request_all(
            [
                chunk_key(part, number)
                for entry, part, number, out, _, _ in requests
                if entry.codec is not None and out.nbytes <= SMALL
            ]
        )

    def _read_one(self, request: Request, values: Mapping[str, Any]) -> int | None:
        """Reads a chunk.

        Arguments:
            request: the chunk.
            values: the result of `_request`.

        Returns:
            Its digest; None if that is not needed.

        Raises:
            CheckpointCorrupt: it is missing or cannot be decoded.
            StorageError: the storage failed.
        """
        entry, part, number, out, expected, _ = request
        hashed = expected is not None
        value = values.get(chunk_key(part, number)) if values else None
        try:
            return self.read_whole(entry, part, number, out, value, hashed=hashed)
        except (Failed, NotDecodable) as error:
            raise self.naming(error, entry, part, number) from error

    def naming(self, error: Exception, entry: ArrayEntry, part: Part, number: int) -> Exception:
        """The error for a chunk that cannot be read or decoded."""
        failed = error if isinstance(error, Failed) else Damaged(str(error))
        return self.explained(failed, f"array {entry.name!r} {part.chunk_box(number)}")

    def read_whole(
        self,
        entry: ArrayEntry,
        part: Part,
        number: int,
        out: Array,
        requested: Any = None,
        *,
        hashed: bool = False,
    ) -> int | None:
        """Reads a chunk that is stored whole; as `read`.

        Raises:
            Failed, NotDecodable: it is missing or cannot be decoded.
        """
        if entry.codec is not None:
            data = self.stored_bytes(entry, part, number, requested)
            codec_protocol.decode(entry, data, out)
            return digest(data) if hashed else None
        # Stored just as it lies in memory, but for padding behind it?
        is_as_stored = not entry.encoding and part.chunk[1:] == tuple(out.shape[1:])
        if not (is_as_stored and self._read_value(part, number, out)):
            local = part.chunk_box(number).relative_to(part.box.start)
            target = ts.array(as_stored(out, entry.dtype), context=self.database.context)
            self.check_backed(entry, part, number)
            try:
                self.values.check(part.key)
            except Damaged:  # perhaps in a file that has none of this chunk
                self.values.check(chunk_key(part, number))
            source = self._array_with(entry, part, number)[local.slices]
            with asking():
                target.write(source).result()
        return digest(out) if hashed else None

    def _read_value(self, part: Part, number: int, out: Array) -> bool:
        """Reads a chunk that is stored as it lies in memory; False if TensorStore does it better.

        Raises:
            Failed: it is missing or incomplete, or cannot be read.
        """
        key, length = chunk_key(part, number), math.prod(part.chunk) * out.itemsize
        (is_done,) = self.values.read_into([key], [out], [length], [None])
        if is_done:
            return True
        if not self._reads_values and out.nbytes > SMALL:
            return False
        value = self.values.read(key, length)  # raises the reason
        if value is None:
            raise Damaged(f"no bytes stored, {length} expected")
        bytes_of(out).data[:] = value[: out.nbytes]
        return True

    def stored_bytes(
        self, entry: ArrayEntry, part: Part, number: int, requested: Any = None
    ) -> Array:
        """The stored bytes of a chunk of an array whose codec is none of Zarr's.

        Raises:
            Failed: they are missing, not as many as the codec states, or cannot be read.
        """
        decoder = codec_of(entry)
        assert decoder is not None, "TensorStore reads the others"
        length = decoder.stored_bytes(entry, part.chunk_box(number).shape)
        if requested is None:
            data = self.values.read(chunk_key(part, number), length)
        else:
            read_result = requested.result()
            data = read_result.value if read_result.state == "value" else None
        if data is None or length not in (None, len(data)):
            stored = "no" if data is None else len(data)
            raise Damaged(f"{stored} bytes stored, {length or 'some'} expected")
        return np.frombuffer(data, np.uint8)

    def read_key(self, key: str, length: int | None = None) -> bytes:
        """The bytes of one key of the database.

        Arguments:
            key: of the database.
            length: the number of bytes it must have, if the index states it.

        Raises:
            CheckpointCorrupt: it is missing, unreadable or has a different length.
        """
        try:  # not `naming_key`: every load comes here
            data = self.values.read(key, length)
        except Failed as error:
            raise self.explained(error, f"key {key!r}") from error
        if data is None:
            raise self.damaged(f"key {key!r} is missing")
        return data

    def read_range(
        self, key: str, start: int, length: int, *, may_be_sparse: bool = False
    ) -> bytes:
        """Some bytes of one key; zeros may be holes of a file. Raises as `read_key`."""
        with self.naming_key(key):
            return self.values.read_range(key, start, length, may_be_sparse=may_be_sparse)

    def key_length(self, key: str) -> int | None:
        """The length of a key's value in bytes, without reading it; None if the key is missing.

        Raises:
            CheckpointCorrupt: the database is damaged.
        """
        try:  # as in `read_key`
            return self.values.length(key)
        except Failed as error:
            raise self.explained(error, f"key {key!r}") from error

    def naming_key(self, key: str) -> AbstractContextManager[None]:
        """Within the block, a failure of the storage is an error that names a key."""
        return reading(f"key {key!r}", self.explained)

    def naming_array(self, entry: ArrayEntry) -> AbstractContextManager[None]:
        """Within the block, a failure of the storage is an error that names an array."""
        return reading(f"array {entry.name!r}", self.explained)

    def explained(self, error: Failed, what: str) -> Exception:
        """The error to raise for a failed read: damage, a storage failure, or another save."""
        return unless_replaced(reading_failed(error, f"{self.location}: {what}"), self.database)

    def damaged(self, reason: str) -> Exception:
        """The error for bad stored data: damage, or another job's save."""
        return unless_replaced(CheckpointCorrupt(f"{self.location}: {reason}"), self.database)

    def check_backed(self, entry: ArrayEntry, part: Part, number: int) -> None:
        """Checks that enough data is stored to justify memory for a chunk of the declared shape.

        TensorStore aborts the process if it cannot allocate memory for a chunk, so it must not read
        one whose size only the index claims. Checks one chunk of each part, once.

        Arguments:
            entry: the array.
            part: the part, or the one that holds its full chunks (`chains`).
            number: of a chunk that is stored there.

        Raises:
            Damaged: the stored chunk is smaller than declared.
            OutOfMemory: the chunk is as large as declared, and too large for this machine.
        """
        nbytes = math.prod(part.chunk) * dtypes.from_name(entry.dtype).itemsize
        if nbytes <= BELIEVED or part.key in self._backed:
            return
        decoder = codec_of(entry)
        least = None
        if decoder is not None:
            least = decoder.stored_bytes(entry, part.chunk_box(number).shape)
        if least is None:
            if entry.encoding and nbytes > COMPRESSED_MOST:
                raise Damaged(f"a compressed chunk of {nbytes} bytes is not allowed")
            least = -(-nbytes // _MOST_PER_BYTE) if entry.encoding else nbytes
        if not self.values.has(chunk_key(part, number), least):
            raise Damaged(f"no bytes stored, {least} expected")
        with naming_memory(f"{self.location}: array {entry.name!r}, a chunk"):
            np.empty(nbytes, np.uint8)
        self._backed.add(part.key)


class ChunkDigests:
    """The digests of a checkpoint's chunks.

    Arguments:
        index: of the checkpoint; untrusted.
        chunks: its database.
    """

    def __init__(self, index: Index, chunks: ChunkStore) -> None:
        self._index, self._chunks = index, chunks

    @cached_property
    def spans(self) -> dict[str, slice]:
        """The rows of each array's chunks in the digest table."""
        return chunk_spans(self._index.arrays)

    def rows(self, which: slice | digest_table.Numbers) -> digest_table.Table:
        """Some rows of the digest table.

        Raises:
            CheckpointCorrupt: it is missing, damaged, or does not belong to the index.
        """
        try:
            return self._rows(which)
        except digest_table.Mismatch as error:
            raise self._chunks.damaged(str(error)) from None

    @cached_property
    def _rows(self) -> Callable[[slice | digest_table.Numbers], digest_table.Table]:
        """Returns rows of the digest table, which is read at once if it is short."""
        blocks = self._index.digest_blocks
        if blocks is None:
            return self.read().__getitem__
        self.check_length()
        return digest_table.TableBlocks(blocks, self._index.chunks, self._read_range).rows

    def _read_range(self, offset: int, length: int) -> bytes:
        return self._chunks.read_range(DIGESTS_KEY, offset, length)

    def read(self) -> digest_table.Table:
        """The digest table; its length is checked against the index before it is read. Raises as
        `rows`."""
        nbytes = self.check_length()
        data, index = self._chunks.read_key(DIGESTS_KEY, nbytes), self._index
        if f"{xxhash.xxh3_64_intdigest(data):016x}" != index.digests_xxh3:
            raise self._chunks.damaged("the digest table does not match its digest in the index")
        table, blocks = np.frombuffer(data, digest_table.DTYPE), index.digest_blocks
        if blocks is not None and digest_table.blocks(table, blocks.rows) != blocks:
            raise self._chunks.damaged(
                "the digest table does not match the digests of its blocks in the index"
            )
        return table

    def check_length(self) -> int:
        """Checks the length of the digest table against the index, which on its own may claim any
        number of chunks; returns its bytes.

        Raises:
            CheckpointCorrupt: it is missing, or has another length.
        """
        nbytes = self._chunks.key_length(DIGESTS_KEY)
        if nbytes is None:
            raise self._chunks.damaged(f"key {DIGESTS_KEY!r} is missing")
        total = self.spans[next(reversed(self.spans))].stop if self.spans else 0
        if self._index.chunks != total or nbytes != total * digest_table.DTYPE.itemsize:
            raise self._chunks.damaged(
                f"the arrays have {total} chunks, the index names {self._index.chunks}, and the "
                f"digest table has {nbytes} bytes"
            )
        return nbytes


def unless_replaced(failure: Exception, database: Database) -> Exception:
    """The error of a reader, or CheckpointReplaced if the checkpoint was replaced or removed.

    Called after the error, because only then does an unchanged manifest prove that the data read
    belonged to this checkpoint.
    """
    # If the network failed, another request would fail too, after all its retries.
    asks = CheckpointCorrupt if database.location.is_remote else CheckpointCorrupt | StorageError
    if not isinstance(failure, asks):
        return failure
    try:
        change = database.change()
    except Failed as error:
        return reading_failed(error, str(database))
    if not change:
        return failure
    actor = "another save" if change == "replaced" else "somebody"
    return CheckpointReplaced(
        f"{database}: {actor} {change} this checkpoint while it was being read; open it again"
    )
