"""The reader of unickpt's own format: an OCDBT database with an index, digests and Zarr arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
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
    chains,
    chunk_grid,
    chunk_store,
    digest_table,
    index_json,
    links,
    timing,
)
from unickpt.format.chains import Chains, KnownChunk, Parent, Value
from unickpt.format.chunk_grid import Part
from unickpt.format.chunk_store import ChunkStore
from unickpt.format.index import (
    BORROWED_KEY,
    DIGESTS_KEY,
    INDEX_KEY,
    ArrayEntry,
    BaseEntry,
    Index,
)
from unickpt.format.index import FORMAT as NUMBER
from unickpt.format.reader import ParallelMap, Reader, Request
from unickpt.format.timing import TIMING_KEY, Timing
from unickpt.frameworks.sections import StoredValue
from unickpt.storage import errors, ocdbt, paths
from unickpt.storage.btree.nodes import DataReference
from unickpt.storage.database import Database
from unickpt.storage.errors import Damaged, Failed
from unickpt.storage.locations import Location

FORMAT = "unickpt"
"""The name of this format."""


def open(location: Location, context: ts.Context | None = None) -> OcdbtReader | None:
    """Opens the checkpoint at a location; None if there is no manifest.

    Arguments:
        location: of the checkpoint.
        context: has its own cache, so another save at this path does not affect it; by default a
            new one.

    Raises:
        CheckpointNotFound: the database there is not a checkpoint.
        CheckpointReplaced: a save replaced it meanwhile.
        CheckpointCorrupt: its index is damaged.
        UnsupportedFormat: it needs what this unickpt does not know; says what.
        StorageError: the storage failed.
    """
    try:
        pinned = Database(location, context or paths.context()).pinned()
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
    version = str(NUMBER)

    def __init__(self, database: Database, index: Index, contents: ocdbt.DatabaseReader) -> None:
        self.location, self.index = database.location, index
        self._chunks = ChunkStore(database, contents)
        self._bases: list[ChunkStore] = []
        self._parts: dict[str, dict[str, int]] = {}

    @cached_property
    def _chains(self) -> Chains:
        return Chains(self._chunks, self._bases, self.borrowed_links)

    # --- chunks ---------------------------------------------------------------------------------

    def open_bases(self) -> None:
        """Opens the checkpoints beside this one that have some of its chunks.

        Raises:
            CheckpointCorrupt: one is missing, or was replaced.
            StorageError: the storage failed.
        """
        for number, base in enumerate(self.index.bases):
            try:
                database = borrowed.pinned(self.location, base, self._chunks.database.context)
            except Damaged as error:
                names = list[str]()
                with suppress(UnickptError):
                    names = borrowed.names(self._borrowed, self._spans, number)
                raise chains.lost(self.location, names, error) from error
            except Failed as error:
                raise errors.reading_failed(error, str(self.location)) from error
            self._bases.append(ChunkStore(database))

    def _store_of(self, entry: ArrayEntry, part: Part, number: int) -> ChunkStore:
        """Where a chunk is: here, or in a base."""
        base = self.borrowed_links(entry, part, number).get(links.WHOLE_LINK)
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

    def borrowed_values(self) -> Iterator[tuple[str, bytes]]:
        """The keys and the stored bytes of all values that are in checkpoints beside this one.

        Raises:
            CheckpointCorrupt: one is missing.
            StorageError: the storage failed.
        """
        from unickpt.format.borrowed_values import BorrowedValues  # only for copies

        return iter(BorrowedValues(self, self._bases))

    def borrowed_links(self, entry: ArrayEntry, part: Part, number: int) -> dict[int, int]:
        """The values of a chunk that bases have: by their links, the bases' positions."""
        if not self.index.bases:
            return {}
        some = self.borrowed_of(entry, part, range(number, number + 1))
        return dict(zip(some["link"].tolist(), some["base"].tolist(), strict=True))

    def borrowed_of(self, entry: ArrayEntry, part: Part, numbers: range) -> borrowed.BorrowedTable:
        """The same of chunks that follow each other, as rows of the table."""
        first = self._spans[entry.name].start + self._first_rows(entry)[part.key]
        rows = first + numbers.start, first + numbers.stop
        low, high = np.searchsorted(self._borrowed["row"], rows)
        return self._borrowed[low:high]

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
        if not self._bases and not self._has_patches:
            return self._chunks.read(requests)
        of_store: dict[ChunkStore, list[int]] = {}
        wrong = list[int]()
        for at, request in enumerate(requests):
            chunk = request.entry, request.part, request.number
            if chain := self.chain(*chunk):
                digest = self._chains.read(request, chain)
                wrong += [at] * (digest != request.digest)
                continue
            of_store.setdefault(self._store_of(*chunk), []).append(at)
        for store, positions in of_store.items():
            found = store.read([requests[position] for position in positions])
            wrong += [positions[at] for at in found]
        return sorted(wrong)

    def chain(self, entry: ArrayEntry, part: Part, number: int) -> Sequence[Value]:
        """The full chunk and the patches of a chunk, in order; nothing if it is stored whole.

        Raises:
            CheckpointCorrupt: a database is damaged.
        """
        if not entry.patched:
            return ()
        try:
            return self._chains.of(entry, part, number)
        except Failed as error:
            raise self._explained(error, entry) from error

    def values_of(self, entry: ArrayEntry, part: Part, number: int) -> Sequence[Value]:
        """Where all values of a chunk are: that of a whole one, or its full chunk and patches.

        Raises:
            CheckpointCorrupt: a database is damaged.
        """
        if chain := self.chain(entry, part, number):
            return chain
        base = self.borrowed_links(entry, part, number).get(links.WHOLE_LINK)
        store = self._chunks if base is None else self._bases[base]
        return (Value(store, part, base),)

    def reads_boxes(self, entry: ArrayEntry) -> bool:
        return False  # the digest is of a whole chunk

    def first_digests(self, entries: Sequence[ArrayEntry]) -> digest_table.Table:
        spans = self._spans
        return self._rows(np.array([spans[entry.name].start for entry in entries], np.int64))

    def encoded_bytes(self, entry: ArrayEntry, part: Part, number: int) -> Array:
        """The stored bytes of a chunk whose codec is none of Zarr's, whether it has patches or not.

        Raises:
            CheckpointCorrupt, StorageError: as `read`.
        """
        values = self.values_of(entry, part, number)
        return self._chains.stored_bytes(entry, part, number, values)

    def where(self, entry: ArrayEntry, part: Part, number: int) -> DataReference | None:
        """The file and the bytes in which a whole chunk is stored, or the full chunk of a patched
        one; None if it is not in a file of this checkpoint, but missing, borrowed, or so small that
        it is stored in the B-tree.

        Raises:
            CheckpointCorrupt: the database is damaged.
        """
        value = self.values_of(entry, part, number)[0]
        found = None if value.base is not None else self.place(entry, value, number)
        return found if isinstance(found, DataReference) else None

    def place(self, entry: ArrayEntry, value: Value, number: int) -> bytes | DataReference | None:
        """The file and the bytes of a value of a chunk; of one in the B-tree, its bytes. Raises as
        `chain`."""
        try:
            return value.store.values.tree.find(chunk_grid.chunk_key(value.part, number))
        except Failed as error:
            raise self._explained(error, entry) from error

    def whole_places(
        self, chunks: Sequence[tuple[ArrayEntry, Part, int]]
    ) -> Sequence[bytes | DataReference | None]:
        """As `place`, for many chunks that are whole and in this checkpoint."""
        found: list[bytes | DataReference | None] = [None] * len(chunks)
        keys = [chunk_grid.chunk_key(part, number) for _, part, number in chunks]
        try:
            for leaf, which, positions in self._chunks.values.tree.find_all(keys):
                for at, position in zip(which, positions, strict=True):
                    found[at] = leaf.find(position)
        except Failed as error:
            raise self._explained(error, chunks[0][0]) from error
        return found

    def read_value(self, entry: ArrayEntry, value: Value, number: int) -> bytes:
        """The stored bytes of a value of a chunk.

        Raises:
            CheckpointCorrupt: it is missing, or damaged.
            StorageError: it cannot be read.
        """
        key = chunk_grid.chunk_key(value.part, number)
        try:
            found = value.store.values.read(key)
        except Failed as error:
            raise self._explained(error, entry) from error
        if found is None:
            raise self.damaged(f"key {key!r} is missing in {value.store.location}")
        return bytes(found)

    def check_end(self, entry: ArrayEntry, value: Value, number: int) -> None:
        """Checks that the last byte of a value of a chunk is there. Raises as `read_value`."""
        values, key = value.store.values, chunk_grid.chunk_key(value.part, number)
        try:
            values.has(key, values.length(key) or 0)
        except Failed as error:
            raise self._explained(error, entry) from error

    def read_parent(
        self, entry: ArrayEntry, part: Part, number: int, known: KnownChunk, out: Array
    ) -> Parent:
        """Reads the state of a chunk to which its next patch refers, into contiguous memory.

        Arguments:
            entry, part, number: which chunk.
            known: what the writer knows of it.
            out: receives the elements, or what is stored if its codec is none of Zarr's.

        Raises:
            CheckpointCorrupt: it does not match its digest, or as `read`.
            StorageError: the storage failed.
        """
        values = self.values_of(entry, part, number)
        return self._chains.read_parent(entry, part, number, values, known, out)

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
    def _has_patches(self) -> bool:
        return any(entry.patched for entry in self.index.arrays.values())

    @cached_property
    def _spans(self) -> dict[str, slice]:
        """The rows of each array's chunks in the digest table."""
        return chunk_grid.chunk_spans(self.index.arrays)

    @property
    def _chunk_count(self) -> int:
        """How many chunks the arrays of the index have."""
        return self._spans[next(reversed(self._spans))].stop if self._spans else 0

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
                value = self.values_of(entry, part, 0)[0]
                value.store.check_backed(entry, value.part, 0)
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
        from unickpt.format.process_values import stored_value  # only where there are some

        every = range(len(self.index.per_process[name].blobs))
        return tuple(stored_value(self, name, process) for process in (every if of is None else of))

    def read_range(
        self, key: str, start: int, length: int, *, may_be_sparse: bool = False
    ) -> bytes:
        """Some bytes of one key, of which zeros may be holes of a file. Raises as `read_key`."""
        try:
            values = self._chunks.values
            return values.read_range(key, start, length, may_be_sparse=may_be_sparse)
        except Failed as error:
            raise self._chunks.explained(error, f"{self.location}: key {key!r}") from error

    def read_key(self, key: str, length: int | None = None) -> bytes:
        """The bytes of one key of the database.

        Arguments:
            key: of the database.
            length: the number of bytes it must have, if the index says.

        Raises:
            CheckpointCorrupt: it is missing, unreadable or has a different length.
        """
        try:
            data = self._chunks.values.read(key, length)
        except Failed as error:
            raise self._chunks.explained(error, f"{self.location}: key {key!r}") from error
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
