"""The reader of unickpt's own format: an OCDBT database with an index, digests and Zarr arrays."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import quote

import numpy as np
import tensorstore as ts

from unickpt.arrays.dtypes import Array
from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    UnickptError,
    UnsupportedFormat,
)
from unickpt.format import (
    borrowed,
    chunk_grid,
    chunk_store,
    digest_table,
    index_json,
    timing,
)
from unickpt.format.chunk_grid import Part
from unickpt.format.chunk_store import ChunkStore
from unickpt.format.index import (
    BORROWED_KEY,
    DIGESTS_KEY,
    INDEX_KEY,
    ArrayEntry,
    BaseEntry,
    Index,
    PerProcessEntry,
)
from unickpt.format.patches import FullChunk
from unickpt.format.reader import ParallelMap, Reader, Request
from unickpt.format.timing import TIMING_KEY, Timing
from unickpt.frameworks.per_process import blob_key
from unickpt.frameworks.sections import StoredValue
from unickpt.storage import errors, ocdbt, paths
from unickpt.storage.btree.nodes import DataReference
from unickpt.storage.database import Database
from unickpt.storage.errors import Failed
from unickpt.storage.locations import Location

FORMAT = "unickpt"
"""The name of this format."""

_MOST_SPARSE = 1 << 28  # bytes of a section with holes, in which some file systems store zeros


def open(location: Location) -> OcdbtReader | None:
    """Opens the checkpoint at a location; None if there is no manifest.

    Raises:
        CheckpointNotFound: the database there is not a checkpoint.
        CheckpointReplaced: a save replaced it meanwhile.
        CheckpointCorrupt: its index is damaged.
        UnsupportedFormat: it was written by a newer unickpt.
        StorageError: the storage failed.
    """
    # Its own context has its own cache, so another save at this path does not affect it.
    context = paths.context()
    try:
        pinned = Database(location, context).pinned()
    except Failed as error:
        raise errors.reading_failed(error, str(location)) from error
    return None if pinned is None else open_pinned(pinned)


def open_pinned(database: Database) -> OcdbtReader:
    """As `open`, for a database with a pinned manifest; see `Database.pinned`."""
    try:
        contents = database.reader()
        reader = OcdbtReader(database, _read_index(database.location, contents), contents)
        reader.open_bases()
        return reader
    except UnickptError as error:
        found = chunk_store.unless_replaced(error, database)
        if found is error:
            raise
        raise found from error


def _read_index(location: Location, contents: ocdbt.DatabaseReader) -> Index:
    try:
        found = contents.read(INDEX_KEY)
    except Failed as error:
        raise errors.reading_failed(error, str(location)) from error
    if found is None:
        raise CheckpointNotFound(
            f"no checkpoint at {location}: the database there has no unickpt index"
        )
    return index_json.decode(found, str(location))


class OcdbtReader(Reader):
    """A committed checkpoint of unickpt's own format.

    Arguments:
        database: its database, pinned.
        index: its index.
        contents: the values of its database.
    """

    format = FORMAT

    def __init__(self, database: Database, index: Index, contents: ocdbt.DatabaseReader) -> None:
        self.location, self.index = database.location, index
        self._chunks = ChunkStore(database, index.codecs, contents)
        self._bases: list[ChunkStore] = []
        self._parts: dict[str, dict[str, int]] = {}

    @property
    def version(self) -> str:  # type: ignore[override]  # read only when it is asked for
        return str(json.loads(self.read_key(INDEX_KEY))["format"])

    # --- chunks ---------------------------------------------------------------------------------

    def open_bases(self) -> None:
        """Opens the checkpoints beside this one that have some of its chunks.

        Raises:
            CheckpointCorrupt: one is missing, or was replaced.
            StorageError: the storage failed.
        """
        try:
            for base in self.index.bases:
                database = borrowed.pinned(self.location, base, self._chunks.database.context)
                self._bases.append(ChunkStore(database, self.index.codecs))
        except Failed as error:
            raise errors.reading_failed(error, str(self.location)) from error

    def _store_of(self, entry: ArrayEntry, part: Part, number: int) -> ChunkStore:
        """Where a chunk is: here, or in a base."""
        base = self._base_of(entry, part, number)
        return self._chunks if base is None else self._bases[base]

    @property
    def manifest_digest(self) -> str:
        """The digest of its manifest, by which checkpoints that borrow from it know it."""
        return self._chunks.database.manifest_digest()

    def base_index(self, base: BaseEntry) -> Index:
        """The index of a base.

        Raises:
            CheckpointCorrupt, StorageError: it cannot be read.
        """
        store = self._bases[self.index.bases.index(base)]
        return _read_index(store.location, store.values)

    def is_borrowed(self, entry: ArrayEntry, part: Part, number: int) -> bool:
        """Whether a chunk is in a checkpoint beside this one."""
        return self._base_of(entry, part, number) is not None

    def borrowed_values(self) -> Iterator[tuple[str, bytes]]:
        """The keys and the stored bytes of all chunks that are in checkpoints beside this one.

        Raises:
            CheckpointCorrupt: one is missing.
            StorageError: the storage failed.
        """
        for entry in self.index.arrays.values() if self.index.bases else ():
            for part in chunk_grid.parts(entry):
                for number in range(part.count):
                    base = self._base_of(entry, part, number)
                    if base is not None:
                        yield self._borrowed_value(base, chunk_grid.chunk_key(part, number))

    def _borrowed_value(self, base: int, key: str) -> tuple[str, bytes]:
        store = self._bases[base]
        try:
            value = store.values.read(key)
        except Failed as error:
            raise store.explained(error, f"{store.location}: key {key!r}") from error
        if value is None:
            raise self.damaged(f"key {key!r} is missing in {store.location}")
        return key, value

    def _base_of(self, entry: ArrayEntry, part: Part, number: int) -> int | None:
        """The position in the index of the base that has a chunk; None if it is here."""
        if not self.index.bases:
            return None
        first = self._first_rows(entry)[part.key]
        table, row = self._borrowed, self._spans[entry.name].start + first + number
        at = int(np.searchsorted(table["row"], row))
        is_borrowed = at < len(table) and table["row"][at] == row
        return int(table["base"][at]) if is_borrowed else None

    def _first_rows(self, entry: ArrayEntry) -> dict[str, int]:
        """By the key of each part of an array, the row of its first chunk among the array's."""
        if entry.name not in self._parts:
            numbered = chunk_grid.numbered_parts(entry)
            self._parts[entry.name] = {part.key: first for first, part in numbered}
        return self._parts[entry.name]

    @cached_property
    def _borrowed(self) -> borrowed.BorrowedTable:
        nbytes = self.index.borrowed * borrowed.DTYPE.itemsize
        self._check_digests()  # on its own, the index may claim any number of chunks
        if self.key_length(BORROWED_KEY) != nbytes:
            raise self.damaged(f"key {BORROWED_KEY!r} is missing, or has not {nbytes} bytes")
        try:
            return borrowed.decode(self.read_key(BORROWED_KEY, nbytes), self.index)
        except ValueError as error:
            raise self.damaged(str(error)) from None

    def read(self, requests: Sequence[Request]) -> Sequence[int]:
        if not self._bases:
            return self._chunks.read(requests)
        of_store: dict[ChunkStore, list[int]] = {}
        for at, request in enumerate(requests):
            store = self._store_of(request.entry, request.part, request.number)
            of_store.setdefault(store, []).append(at)
        return sorted(
            positions[at]
            for store, positions in of_store.items()
            for at in store.read([requests[position] for position in positions])
        )

    def reads_boxes(self, entry: ArrayEntry) -> bool:
        return False  # the digest is of a whole chunk

    def first_digests(self, entries: Sequence[ArrayEntry]) -> digest_table.Table:
        spans = self._spans
        return self._rows(np.array([spans[entry.name].start for entry in entries], np.int64))

    def has_bytes(self, entry: ArrayEntry, part: Part, number: int, stored: Array) -> bool:
        """Whether a chunk of a quantised array is stored as these bytes.

        Raises:
            CheckpointCorrupt, StorageError: as `read_chunk`.
        """
        try:
            return self._store_of(entry, part, number).has_bytes(entry, part, number, stored)
        except Failed as error:
            raise self._explained(error, entry) from error

    def where(self, entry: ArrayEntry, part: Part, number: int) -> DataReference | None:
        """The file and the bytes in which a chunk is stored, or the full chunk that its patch
        refers to; None if it is not in a file of this checkpoint, but missing, borrowed, or so
        small that it is stored in the B-tree.

        Raises:
            CheckpointCorrupt: the database is damaged.
        """
        is_own = self._base_of(entry, part, number) is None
        found = self.stored(entry, part, number) if is_own else None
        return found if isinstance(found, DataReference) else None

    def stored(self, entry: ArrayEntry, part: Part, number: int) -> bytes | DataReference | None:
        """As `where`, also of a chunk in a base; of one in the B-tree, its bytes.

        Raises:
            CheckpointCorrupt: the database is damaged.
        """
        store = self._store_of(entry, part, number)
        try:
            there = store.stored_part(entry, part, number)
            return store.values.tree.find(chunk_grid.chunk_key(there, number))
        except Failed as error:
            raise self._explained(error, entry) from error

    def check_end(self, entry: ArrayEntry, part: Part, number: int) -> None:
        """Checks that the last byte of what `stored` says is there.

        Raises:
            CheckpointCorrupt: it is not.
            StorageError: it cannot be read.
        """
        store = self._store_of(entry, part, number)
        try:
            key = chunk_grid.chunk_key(store.stored_part(entry, part, number), number)
            store.values.has(key, store.values.length(key) or 0)
        except Failed as error:
            raise self._explained(error, entry) from error

    def is_patched(self, entry: ArrayEntry, part: Part, number: int) -> bool:
        """Whether a chunk is stored as a patch.

        Raises:
            CheckpointCorrupt: the database is damaged.
        """
        try:
            return self._store_of(entry, part, number).is_patched(entry, part, number)
        except Failed as error:
            raise self._explained(error, entry) from error

    def read_full(
        self, entry: ArrayEntry, part: Part, number: int, row: Any, out: Array
    ) -> FullChunk:
        """Reads a chunk, or the full chunk that its patch refers to, into contiguous memory.

        Arguments:
            entry, part, number, row, out: as for `read_chunk`.

        Raises:
            CheckpointCorrupt: it does not match its digest, or as `read_chunk`.
            StorageError: the storage failed.
        """
        store = self._store_of(entry, part, number)
        digest, full = store.read_full(entry, part, number, out)
        full = full or FullChunk(int(row["digest"]))
        if digest != full.digest:
            box = part.chunk_box(number)
            raise self.damaged(f"array {entry.name!r} {box} does not match its digest")
        return full

    def _explained(self, error: Failed, entry: ArrayEntry) -> Exception:
        return self._chunks.explained(error, f"{self.location}: array {entry.name!r}")

    def digests_of(self, name: str) -> digest_table.Table:
        return self._rows(self._spans[name])

    def _rows(self, which: slice | digest_table.Numbers) -> digest_table.Table:
        try:
            return self._digests(which)
        except digest_table.Mismatch as error:
            raise self.damaged(str(error)) from None

    @cached_property
    def _spans(self) -> dict[str, slice]:
        """The rows of each array's chunks in the digest table."""
        return chunk_grid.chunk_spans(self.index.arrays)

    @property
    def _chunk_count(self) -> int:
        """How many chunks the arrays of the index have."""
        return next((rows.stop for rows in reversed(self._spans.values())), 0)

    @cached_property
    def _digests(self) -> Callable[[slice | digest_table.Numbers], digest_table.Table]:
        """Returns rows of the digest table, which is read at once if it is short."""
        blocks = self.index.digest_blocks
        if blocks is None:
            return self.read_digests().__getitem__
        self._check_digests()
        return digest_table.TableBlocks(blocks, self.index.chunks, self._read_digest_rows).rows

    def _read_digest_rows(self, offset: int, length: int) -> bytes:
        try:
            return self._chunks.values.read_range(DIGESTS_KEY, offset, length)
        except Failed as error:
            raise self._chunks.explained(error, f"{self.location}: the digest table") from error

    def read_digests(self) -> digest_table.Table:
        """The digest table; its length is checked against the index before it is read.

        Raises:
            CheckpointCorrupt: it is missing, or does not belong to the index.
        """
        nbytes = self._check_digests()
        try:
            return digest_table.decode(self.read_key(DIGESTS_KEY, nbytes), self.index)
        except digest_table.Mismatch as error:
            raise self.damaged(str(error)) from None

    def _check_digests(self) -> int:
        """Checks the length of the digest table against the index; returns its bytes.

        Raises:
            CheckpointCorrupt: it is missing, or has another length.
        """
        nbytes = self.key_length(DIGESTS_KEY)
        if nbytes is None:
            raise self.damaged(f"key {DIGESTS_KEY!r} is missing")
        try:
            digest_table.check(nbytes, self.index, self._chunk_count)
        except digest_table.Mismatch as error:
            raise self.damaged(str(error)) from None
        return nbytes

    def timing(self) -> Timing | None:
        nbytes = self.key_length(TIMING_KEY)
        if nbytes is None:
            return None
        processes = self.index.processes
        if nbytes > timing.most_bytes(processes):
            raise self.damaged(f"key {TIMING_KEY!r} has {nbytes} bytes")
        try:
            return timing.decode(self.read_key(TIMING_KEY, nbytes), processes)
        except ValueError as error:
            raise self.damaged(f"key {TIMING_KEY!r} is damaged: {error}") from None

    def check_backed(self, entry: ArrayEntry) -> None:
        self.digests_of(entry.name)
        if math.prod(entry.chunk) * entry.itemsize <= chunk_store.BELIEVED:
            return
        try:
            for part in chunk_grid.parts(entry)[:1]:
                store = self._store_of(entry, part, 0)
                store.check_backed(entry, store.stored_part(entry, part, 0), 0)
        except Failed as error:
            raise self._explained(error, entry) from error

    def part_url(self, part: Part) -> str:
        if self.index.bases:
            return ""
        url = f"{self.location.url}|ocdbt:"
        return f"{url}{quote(part.key)}/" if part.key else url

    def open_part(self, entry: ArrayEntry, part: Part) -> ts.TensorStore:
        if self.index.bases:
            raise UnsupportedFormat(
                f"{self.location}: some of its chunks are in {self.index.bases[0].name}, where "
                "TensorStore does not look; read the array by slicing, or make a whole checkpoint "
                "with `unickpt copy`"
            )
        if entry.patched:
            raise UnsupportedFormat(
                f"{self.location}: {entry.patched} chunks of array {entry.name!r} are stored as "
                "patches (SaveOptions.reuse), which TensorStore does not know; read it by slicing"
            )
        try:
            self._chunks.values.check(part.key)
            return self._chunks.array(entry, part)
        except Failed as error:
            raise self._explained(error, entry) from error

    # --- keys -----------------------------------------------------------------------------------

    def per_process(self, name: str, of: Sequence[int] | None = None) -> tuple[StoredValue, ...]:
        entry = self.index.per_process[name]
        processes = range(len(entry.blobs)) if of is None else of
        return tuple(self._stored_value(name, entry, process) for process in processes)

    def _stored_value(self, name: str, entry: PerProcessEntry, process: int) -> StoredValue:
        size, digest, head = entry.of(process)
        key = blob_key(name, process)

        def read(start: int, length: int) -> bytes:
            if length == size:
                return self.read_key(key, size)
            try:
                sparse = start >= head and length <= _MOST_SPARSE
                return self._chunks.values.read_range(key, start, length, may_be_sparse=sparse)
            except Failed as error:
                raise self._chunks.explained(error, f"{self.location}: key {key!r}") from error

        def damaged(reason: str) -> Exception:
            return self.damaged(f"the value of process {process} for {name!r} {reason}")

        return StoredValue(size, digest, head, read, damaged, entry.is_binary)

    def read_key(self, key: str, length: int | None = None) -> bytes:
        """The bytes of one key of the database.

        Arguments:
            key: of the database.
            length: the number of bytes it must have, if the index says.

        Raises:
            CheckpointCorrupt: it is missing, unreadable or has a different length.
        """
        where = f"{self.location}: key {key!r}"
        try:
            data = self._chunks.values.read(key, length)
        except Failed as error:
            raise self._chunks.explained(error, where) from error
        if data is None:
            raise self.damaged(f"key {key!r} is missing")
        return data

    def key_length(self, key: str) -> int | None:
        """The length of a key's value in bytes, without reading it; None if the key is missing.

        Raises:
            CheckpointCorrupt: the database is damaged.
        """
        try:
            return self._chunks.values.length(key)
        except Failed as error:
            raise self._chunks.explained(error, f"{self.location}: key {key!r}") from error

    # --- damage ---------------------------------------------------------------------------------

    def damaged(self, reason: str) -> Exception:
        return self._chunks.unless_replaced(CheckpointCorrupt(f"{self.location}: {reason}"))

    def check_unchanged(self) -> None:
        found = self.damaged("")
        if not isinstance(found, CheckpointCorrupt):
            raise found

    def check_structure(self, run: ParallelMap) -> Iterator[tuple[str, str]]:
        from unickpt.format.structure import KeyChecks  # only for `verify`

        self.read_digests()  # on its own, the index may claim any number of chunks
        borrowed = len(self._borrowed) if self.index.bases else 0
        return KeyChecks(self, self._chunks, self.key_length, self.read_key).check(borrowed, run)
