"""The reader of unickpt's own format: an OCDBT database with an index, digests and Zarr arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np
import tensorstore as ts

from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    StorageError,
    UnickptError,
    UnsupportedFormat,
)
from unickpt.format import chunk_grid, digest_table, index_json, verified_chunks
from unickpt.format.chunk_grid import Part
from unickpt.format.index import FORMAT as NUMBER
from unickpt.format.index import INDEX_KEY, ArrayEntry, BaseEntry, Index
from unickpt.format.reader_protocol import ParallelMap, Reader, Request
from unickpt.format.verified_chunks import ChunkDigests, ChunkStore
from unickpt.storage import errors, ocdbt, paths
from unickpt.storage.database import Database
from unickpt.storage.errors import Failed
from unickpt.storage.locations import Location

if TYPE_CHECKING:
    from unickpt.format.borrowed_chunks import BorrowedChunks
    from unickpt.format.chunk_values import ChunkValues
    from unickpt.format.timing import Timing
    from unickpt.frameworks.sections import StoredValue

_MAY_BE_DAMAGE = CheckpointCorrupt, StorageError
_MOST_SPARSE = 1 << 28  # bytes of a section with holes, in which some file systems store zeros
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
        CheckpointReplaced: a save replaced it.
        CheckpointCorrupt: its index is damaged.
        UnsupportedFormat: it needs features that this unickpt does not know; names them.
        StorageError: the storage failed.
    """
    try:  # not `errors.reading`: every load comes here
        pinned = Database(location, context or paths.context()).pinned()
    except Failed as error:
        raise errors.reading_failed(error, str(location)) from error
    return None if pinned is None else open_pinned(pinned)


def open_pinned(database: Database) -> OcdbtReader:
    """As `open`, for a database with a pinned manifest; see `Database.pinned`."""
    try:
        contents = database.reader()
        reader = OcdbtReader(database, _read_index(database.location, contents), contents)
        if reader.index.bases:
            reader.borrowed.open()
        return reader
    except UnickptError as error:
        failure = verified_chunks.unless_replaced(error, database)
        if isinstance(failure, CheckpointCorrupt) and (restored := _open_restored(database)):
            return restored
        if failure is error:
            raise
        raise failure from error


def _open_restored(database: Database) -> OcdbtReader | None:
    """The checkpoint, read with restorers; None if there are none, or the storage fails."""
    with suppress(Failed):
        restored = database.restored()
        return None if restored is None else open_pinned(restored)
    return None


def _read_index(location: Location, contents: ocdbt.DatabaseReader) -> Index:
    try:
        index_bytes = contents.read(INDEX_KEY)
    except Failed as error:
        raise errors.reading_failed(error, str(location)) from error
    if index_bytes is None:
        raise CheckpointNotFound(
            f"no checkpoint at {location}: the database there has no unickpt index"
        )
    return index_json.decode(index_bytes, str(location))


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
        self.chunks = ChunkStore(database, contents)
        self._digests = ChunkDigests(index, self.chunks)
        self.restored: list[OcdbtReader | None] = []
        """The reader with restorers, once something could not be read."""

    @cached_property
    def borrowed(self) -> BorrowedChunks:
        """The chunks in sibling checkpoints."""
        from unickpt.format.borrowed_chunks import BorrowedChunks

        return BorrowedChunks(self.index, self.chunks, self._digests)

    @cached_property
    def chunk_values(self) -> ChunkValues:
        """The stored values of all chunks."""
        from unickpt.format.chunk_values import ChunkValues

        return ChunkValues(self.chunks, self.borrowed)

    @property
    def manifest_digest(self) -> str:
        """The digest of its manifest, by which borrowing checkpoints identify it."""
        return self.chunks.database.manifest_digest()

    def base_index(self, base: BaseEntry) -> Index:
        """The index of a base.

        Raises:
            CheckpointCorrupt, StorageError: it cannot be read.
        """
        store = self.borrowed.bases[self.index.bases.index(base)]
        return _read_index(store.location, store.values)

    def file_damage(self) -> Iterator[str]:
        restored = self if self.chunks.database.restorers else _restored(self)
        for restorer in restored.chunks.database.restorers if restored is not None else ():
            yield from restorer.damage()

    def read(self, requests: Sequence[Request]) -> Sequence[int]:
        try:
            if not self.index.bases and not self._has_composed:
                differ = self.chunks.read(requests)
            else:
                differ = self.chunk_values.read(requests)
        except _MAY_BE_DAMAGE as error:
            instead = _instead_of(self, error)
            if len(requests) == 1:
                return instead.read(requests)
            # Each by itself: what is sound is not read elsewhere.
            alone = ((position, self.read([request])) for position, request in enumerate(requests))
            return [position for position, differ in alone if differ]
        if not differ or (restored := _restored(self)) is None:
            return differ
        again = restored.read([requests[position] for position in differ])
        return [differ[position] for position in again]

    def reads_boxes(self, entry: ArrayEntry) -> bool:
        return False  # the digest is of a whole chunk

    def first_digests(self, entries: Sequence[ArrayEntry]) -> digest_table.Table:
        spans = self._digests.spans
        first = [spans[entry.name].start for entry in entries]
        try:
            return self._digests.rows(np.array(first, np.int64))
        except _MAY_BE_DAMAGE as error:
            return _instead_of(self, error).first_digests(entries)

    def digests_of(self, name: str) -> digest_table.Table:
        try:
            return self._digests.rows(self._digests.spans[name])
        except _MAY_BE_DAMAGE as error:
            return _instead_of(self, error).digests_of(name)

    @cached_property
    def _has_composed(self) -> bool:
        return any(entry.composed for entry in self.index.arrays.values())

    def timing(self) -> Timing | None:
        from unickpt.format import timing

        nbytes = self.chunks.key_length(timing.TIMING_KEY)
        if nbytes is None:
            return None
        processes = self.index.processes
        if nbytes > timing.most_bytes(processes):
            raise self.damaged(f"key {timing.TIMING_KEY!r} has {nbytes} bytes")
        try:
            return timing.decode(self.chunks.read_key(timing.TIMING_KEY, nbytes), processes)
        except ValueError as error:
            raise self.damaged(f"key {timing.TIMING_KEY!r} is damaged: {error}") from None

    def check_backed(self, entry: ArrayEntry) -> None:
        self.digests_of(entry.name)
        if math.prod(entry.chunk) * entry.itemsize <= verified_chunks.BELIEVED:
            return
        with self.chunks.naming_array(entry):
            for part in chunk_grid.parts(entry)[:1]:
                value = self.chunk_values.values(entry, part, 0)[0]
                value.store.check_backed(entry, value.part, 0)

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
        if entry.composed:
            raise UnsupportedFormat(
                f"{self.location}: {entry.composed} chunks of array {entry.name!r} are stored as "
                "patches (SaveOptions.reuse), which TensorStore does not know; read it by slicing"
            )
        with self.chunks.naming_array(entry):
            self.chunks.values.check(part.key)
            return self.chunks.array(entry, part)

    def per_process(
        self, name: str, processes: Sequence[int] | None = None
    ) -> tuple[StoredValue, ...]:
        every = range(len(self.index.per_process[name].blobs))
        selected = every if processes is None else processes
        return tuple(self._value_of(name, process) for process in selected)

    def _value_of(self, name: str, process: int) -> StoredValue:
        """The value of a process for a leaf: read whole, or by ranges."""
        from unickpt.frameworks.per_process import blob_key  # only where there are some
        from unickpt.frameworks.sections import StoredValue

        entry, key = self.index.per_process[name], blob_key(name, process)
        size, digest, head = entry.value_facts(process)

        def read(start: int, length: int) -> bytes:
            try:
                if length == size:
                    return self.chunks.read_key(key, size)
                sparse = start >= head and length <= _MOST_SPARSE
                return self.chunks.read_range(key, start, length, may_be_sparse=sparse)
            except _MAY_BE_DAMAGE as error:
                return _instead_of(self, error)._value_of(name, process).read(start, length)

        def read_restored(start: int, length: int) -> bytes:
            restored = _restored(self)
            return restored._value_of(name, process).read(start, length) if restored else b""

        def damaged(reason: str) -> Exception:
            return self.damaged(f"the value of process {process} for {name!r} {reason}")

        return StoredValue(size, digest, head, read, damaged, entry.is_binary, read_restored)

    def damaged(self, reason: str) -> Exception:
        return self.chunks.damaged(reason)

    def check_unchanged(self) -> None:
        error = self.damaged("")
        if not isinstance(error, CheckpointCorrupt):
            raise error

    def check_structure(self, run: ParallelMap) -> Iterator[tuple[str, str]]:
        from unickpt.format.structure_checks import KeyChecks  # only for `verify`

        self._digests.read()  # on its own, the index may claim any number of chunks
        borrowed = len(self.borrowed.table) if self.index.bases else 0
        return KeyChecks(self, self.chunks).check(borrowed, run)


def _restored(reader: OcdbtReader) -> OcdbtReader | None:
    """The same checkpoint, read with restorers; None if there are none."""
    if not reader.restored:
        reader.restored.append(_open_restored(reader.chunks.database))
    return reader.restored[0]


def _instead_of(reader: OcdbtReader, error: Exception) -> OcdbtReader:
    """The reader with restorers, after the error of another reader, which it raises if there are
    no restorers, or the error is no damage."""
    is_damage = reader.location.is_local or isinstance(error, CheckpointCorrupt)
    restored = _restored(reader) if is_damage else None
    if restored is None:
        raise error
    return restored
