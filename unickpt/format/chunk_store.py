"""The chunks of a database: how each is read and verified."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from unickpt.format import patches
from unickpt.format.chunk_grid import Part
from unickpt.format.codec import bytes_of, digest
from unickpt.format.compression import as_stored
from unickpt.format.index import ArrayEntry
from unickpt.format.reader import ChunkId
from unickpt.format.zarr_metadata import Codecs, chunk_key, zarr_metadata
from unickpt.quantized import values
from unickpt.quantized.blocks import stored_bytes
from unickpt.storage import ocdbt
from unickpt.storage.database import Database
from unickpt.storage.errors import Damaged, Failed, reading_failed
from unickpt.storage.kvstore import asking
from unickpt.storage.local_database import LocalDatabaseReader

# Opening an array costs TensorStore about 80 us, which dominates for a small chunk. Below this size
# the bytes are written to the database directly, exactly as zarr would write them.
SMALL = 64 << 10
# Memory for larger chunks is allocated only after a stored chunk of that size was found.
BELIEVED = 16 << 20
# No codec of `index.CODECS` compresses by more than this factor.
_MOST_PER_BYTE = 1 << 16
# Only the index says how much memory a compressed chunk takes, so that is bounded.
COMPRESSED_MOST = 1 << 30


class ChunkStore:
    """The chunks in one OCDBT database.

    Arguments:
        database: the database; all of a checkpoint share one context.
        codecs: the checkpoint's compression.
        values: reads the database, if it exists already.
    """

    def __init__(
        self, database: Database, codecs: Codecs, values: ocdbt.DatabaseReader | None = None
    ) -> None:
        self.database, self.location, self.codecs = database, database.location, codecs
        self.values = values or database.reader()  # here, so that threads share one
        self._local = self.values if isinstance(self.values, LocalDatabaseReader) else None
        self._open: dict[str, ts.TensorStore] = {}
        self._backed: set[str] = set()

    def array(self, entry: ArrayEntry, part: Part) -> ts.TensorStore:
        """The zarr array of a part, opened without I/O.

        Raises:
            UnsupportedFormat: its elements are quantised.
        """
        if entry.quantized is not None:
            raise UnsupportedFormat(
                f"{self.location}: TensorStore cannot decode array {entry.name!r}, which is stored "
                f"as {entry.quantized} codes (SaveOptions.quantize); read it by slicing"
            )
        found = self._open.get(part.key)
        if found is None:
            spec = {
                "driver": "zarr3",
                "kvstore": self.database.array_spec(part.key),
                "metadata": zarr_metadata(entry, part, self.codecs),
                # Without these two, all-zero chunks would be left out and missing ones read as 0.
                "store_data_equal_to_fill_value": True,
                "fill_missing_data_reads": False,
            }
            with asking():
                context = self.database.context
                opened = ts.open(spec, context=context, open=True, assume_metadata=True)
                found = opened.result()
            self._open[part.key] = found
        return found

    def request(self, chunks: Sequence[ChunkId]) -> Sequence[Any]:
        """Starts to read the small ones among chunks, whose bytes TensorStore need not decode; None
        for the others, and for those of which `read` will say what is wrong."""
        keys = [
            chunk_key(part, number) if self._is_small(entry, part, number) else None
            for entry, part, number in chunks
        ]
        found = self.values.request_all([key for key in keys if key is not None])
        return [None if key is None else found.get(key) for key in keys]

    def _is_small(self, entry: ArrayEntry, part: Part, number: int) -> bool:
        if entry.patched:  # it may be two values
            return False
        if math.prod(part.chunk) * entry.itemsize > SMALL:
            return False
        shape = part.chunk_box(number).shape
        if entry.quantized is not None:
            return math.prod(shape) * entry.itemsize <= SMALL
        return self._is_raw(part, shape, entry)

    def request_key(self, key: str) -> Any:
        """Likewise for any key."""
        return self.values.request(key) if self._local is None else None

    def read_key(self, key: str, length: int | None = None, requested: Any = None) -> bytes | None:
        """The bytes of a key; None where there is none.

        Arguments:
            key: of the database.
            length: how many bytes it must have, where that is known.
            requested: what `request_key` gave for it.

        Raises:
            Failed: it has another length, or cannot be read.
        """
        if requested is None:
            return self.values.read(key, length)
        found = requested.result()
        if found.state != "value":
            return None
        if length is not None and len(found.value) != length:
            raise Damaged(f"{len(found.value)} bytes stored, {length} expected")
        value: bytes = found.value
        return value

    def read(
        self,
        entry: ArrayEntry,
        part: Part,
        number: int,
        out: Array,
        requested: Any = None,
        *,
        hashed: bool = False,
    ) -> int | None:
        """Reads a chunk into contiguous memory of its shape.

        Arguments:
            entry: the array.
            part: the part of the array.
            number: the chunk's row-major number in the part.
            out: where the chunk goes.
            requested: what `request` gave for it.
            hashed: return the digest of what was read.

        Raises:
            CheckpointCorrupt: it is missing or cannot be decoded.
            StorageError: the storage failed.
        """
        try:
            patch = self._patch(entry, part, number)
            if patch is None:
                return self._read(entry, part, number, out, requested, hashed=hashed)
            self._read(entry, patches.full_of(part), number, out)
            patches.apply(patch, out)
        except (Failed, values.NotDecodable, patches.BadPatch) as error:
            raise self._naming(error, entry, part, number) from error
        return digest(out) if hashed else None

    def read_each(
        self, chunks: Sequence[ChunkId], out: Sequence[Array], *, hashed: bool
    ) -> Sequence[int | None]:
        """Reads chunks one after the other; arguments, result and errors as `read` for each."""
        plain = [
            at
            for at, ((entry, part, _), to) in enumerate(zip(chunks, out, strict=True))
            if not entry.patched and self._is_plain(entry, part, to)
        ]
        digests: dict[int, int] = {}
        if self._local is not None and plain:
            hashers = [xxhash.xxh3_64() for _ in plain]
            done = self._local.read_each(
                [chunk_key(*chunks[at][1:]) for at in plain],
                [bytes_of(out[at]).data for at in plain],
                [math.prod(chunks[at][1].chunk) * out[at].itemsize for at in plain],
                [hasher.update for hasher in hashers] if hashed else None,
            )
            digests = {
                at: hasher.intdigest()
                for at, hasher, is_done in zip(plain, hashers, done, strict=True)
                if is_done
            }
        return [
            digests[at] if at in digests else self.read(*chunk, to, hashed=hashed)
            for at, (chunk, to) in enumerate(zip(chunks, out, strict=True))
        ]

    def read_full(
        self, entry: ArrayEntry, part: Part, number: int, out: Array
    ) -> tuple[int | None, patches.FullChunk | None]:
        """Reads a chunk, or the full chunk that its patch refers to.

        Arguments:
            entry, part, number, out: as for `read`.

        Returns:
            The digest of what was read, and what the patch says of it; None if there is no patch.

        Raises:
            CheckpointCorrupt, StorageError: as `read`.
        """
        try:
            patch = self._patch(entry, part, number)
            of = None if patch is None else patches.of_patch(patch)
            stored = part if patch is None else patches.full_of(part)
            return self._read(entry, stored, number, out, hashed=True), of
        except (Failed, values.NotDecodable, patches.BadPatch) as error:
            raise self._naming(error, entry, part, number) from error

    def _naming(self, error: Exception, entry: ArrayEntry, part: Part, number: int) -> Exception:
        """The error for a chunk that cannot be read or decoded."""
        failed = error if isinstance(error, Failed) else Damaged(str(error))
        where = f"{self.location}: array {entry.name!r} {part.chunk_box(number)}"
        return self.explained(failed, where)

    def _patch(self, entry: ArrayEntry, part: Part, number: int) -> bytes | None:
        """The patch of a chunk; None if it is stored whole.

        Raises:
            Failed: the patch is longer than a chunk, or cannot be read.
        """
        if not entry.patched:
            return None
        key = chunk_key(patches.patch_of(part), number)
        length, most = self.values.length(key), part.chunk_box(number).size * entry.itemsize
        if length is None:
            return None
        if length > most:
            raise Damaged(f"a patch of {length} bytes for a chunk of {most}")
        return self.values.read(key, length)

    def is_patched(self, entry: ArrayEntry, part: Part, number: int) -> bool:
        """Whether a chunk is stored as a patch.

        Raises:
            Failed: the database is damaged.
        """
        if not entry.patched:
            return False
        return self.values.length(chunk_key(patches.patch_of(part), number)) is not None

    def stored_part(self, entry: ArrayEntry, part: Part, number: int) -> Part:
        """Where a whole chunk is: the chunk, or the full chunk that its patch refers to.

        Raises:
            Failed: the database is damaged.
        """
        return patches.full_of(part) if self.is_patched(entry, part, number) else part

    def _read(
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
        if requested is None and self._local is None:
            (requested,) = self.request([(entry, part, number)])
        if entry.quantized is not None:
            data = self._quantized(entry, part, number, requested)
            values.decode(data, out, entry.quantized)
            return digest(data) if hashed else None
        if self._local is not None and requested is None and self._is_plain(entry, part, out):
            whole = math.prod(part.chunk) * out.itemsize
            hasher, key = xxhash.xxh3_64(), chunk_key(part, number)
            look = hasher.update if hashed else None
            self._local.read_into(key, bytes_of(out).data, whole, look)
            return hasher.intdigest() if hashed else None
        if requested is not None:
            result = requested.result()
            if result.state != "value" or len(result.value) != out.nbytes:
                found = len(result.value) if result.state == "value" else "no"
                raise Damaged(f"{found} bytes stored, {out.nbytes} expected")
            # Unlike NumPy, this keeps the GIL, for which other threads would compete.
            bytes_of(out).data[:] = result.value
        else:
            local = part.chunk_box(number).relative_to(part.box.start)
            target = ts.array(as_stored(out, entry.dtype), context=self.database.context)
            self.check_backed(entry, part, number)
            self.values.check(part.key)
            source = self.array(entry, part)[local.slices]
            with asking():
                target.write(source).result()
        return digest(out) if hashed else None

    def _quantized(
        self, entry: ArrayEntry, part: Part, number: int, requested: Any = None
    ) -> Array:
        """The stored bytes of a chunk of a quantised array.

        Raises:
            Failed: they are missing, not as many as the chunk's shape says, or cannot be read.
        """
        assert entry.quantized is not None
        shape = part.chunk_box(number).shape
        length = stored_bytes(shape, entry.dtype, entry.quantized)
        data = self.read_key(chunk_key(part, number), length, requested)
        if data is None:
            raise Damaged(f"no bytes stored, {length} expected")
        return np.frombuffer(data, np.uint8)

    def has_bytes(self, entry: ArrayEntry, part: Part, number: int, stored: Array) -> bool:
        """Whether a chunk of a quantised array is stored as these bytes.

        Raises:
            Failed: as `_quantized`.
        """
        return np.array_equal(self._quantized(entry, part, number), stored)

    def explained(self, error: Failed, where: str) -> Exception:
        """What to raise for a failure to read: damage, the storage's fault, or another's save."""
        return self.unless_replaced(reading_failed(error, where))

    def unless_replaced(self, found: Exception) -> Exception:
        """See the function of this name."""
        return unless_replaced(found, self.database)

    def check_backed(self, entry: ArrayEntry, part: Part, number: int) -> None:
        """Checks that enough data is stored to justify memory for a chunk of the declared shape.

        TensorStore aborts the process if it cannot allocate memory for a chunk, so it must not read
        one whose size only the index claims. Checks one chunk of each part, once.

        Arguments:
            entry: the array.
            part: the part, as `stored_part` says.
            number: of a chunk that is stored there.

        Raises:
            Damaged: the stored chunk is smaller than declared.
            OutOfMemory: the chunk is as large as declared, and too large for this machine.
        """
        nbytes = math.prod(part.chunk) * dtypes.from_name(entry.dtype).itemsize
        if nbytes <= BELIEVED or part.key in self._backed:
            return
        if entry.quantized is not None:
            least = stored_bytes(part.chunk_box(number).shape, entry.dtype, entry.quantized)
        elif self.codecs and nbytes > COMPRESSED_MOST:
            raise Damaged(f"a compressed chunk of {nbytes} bytes is not allowed")
        else:
            least = -(-nbytes // _MOST_PER_BYTE) if self.codecs else nbytes
        if not self.values.has(chunk_key(part, number), least):
            raise Damaged(f"no bytes stored, {least} expected")
        with naming_memory(f"{self.location}: array {entry.name!r}, a chunk"):
            np.empty(nbytes, np.uint8)
        self._backed.add(part.key)

    def _is_plain(self, entry: ArrayEntry, part: Part, out: Array) -> bool:
        """Whether a chunk is stored just as it lies in memory, but for padding behind it."""
        if self.codecs or entry.quantized is not None:
            return False
        return part.chunk[1:] == tuple(out.shape[1:])

    def _is_raw(self, part: Part, shape: tuple[int, ...], entry: ArrayEntry) -> bool:
        if self.codecs or shape != part.chunk:
            return False
        return math.prod(shape) * dtypes.from_name(entry.dtype).itemsize <= SMALL


def unless_replaced(found: Exception, database: Database) -> Exception:
    """The error of a reader, or CheckpointReplaced if the checkpoint was replaced or removed.

    Called after the error, because only then does an unchanged manifest prove that the data read
    belonged to this checkpoint.
    """
    # If the network failed, another request would fail too, after all its retries.
    asks = CheckpointCorrupt if database.location.is_remote else CheckpointCorrupt | StorageError
    if not isinstance(found, asks):
        return found
    try:
        change = database.change()
    except Failed as error:
        return reading_failed(error, str(database))
    if not change:
        return found
    by = "another save" if change == "replaced" else "somebody"
    return CheckpointReplaced(
        f"{database}: {by} {change} this checkpoint while it was being read; open it again"
    )
