"""The root database, which makes a checkpoint exist: built next to the old one, then installed.

OCDBT writes an empty manifest before it commits, and a path with a manifest is a checkpoint. So the
root's B-tree is built with its manifest in memory, and that manifest is then written atomically.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, product
from operator import attrgetter
from typing import Any

import numpy as np
import tensorstore as ts

from unickpt.commit.merge_chunks import COMPOSED, WHOLE, Chunks, Column
from unickpt.commit.messages import ELSEWHERE, PLACE_NAMES, ValuePlace
from unickpt.errors import CheckpointExists, StorageError
from unickpt.format import chunk_grid
from unickpt.format.chunk_grid import Part, join_key
from unickpt.format.index import ArrayEntry, Index
from unickpt.frameworks.process_group import saved_apart
from unickpt.storage import locations
from unickpt.storage.btree import builder
from unickpt.storage.btree.builder import PLACE_DTYPE, SortedKeys, TreeEntries
from unickpt.storage.btree.nodes import DataReference
from unickpt.storage.database import Database, digest_of
from unickpt.storage.errors import Failed
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST
from unickpt.storage.tensorstore_calls import Future, KvStore

_FILE_BYTES = 64 << 20
"""The approximate limit of bytes in a file with nodes; two may be in memory."""


@dataclass(frozen=True)
class State:
    """The root manifest at one moment.

    Arguments:
        digest: of its bytes; empty if there is none.
        generation: the storage's identifier of this version of it.
    """

    digest: str
    generation: bytes


class Root:
    """The database at a checkpoint's path, for replacing it.

    Arguments:
        database: the database, with the context that all databases of a save share.
    """

    def __init__(self, database: Database) -> None:
        self._database, self._location = database, database.location
        self._store = database.location.store(database.context)
        self._files: Sequence[str] = ()  # to which the manifest from `build` refers

    def read(self) -> State:
        """The current state."""
        read = self._store.read(MANIFEST).result()
        return State(digest_of(read.value) if read.state == "value" else "", read.stamp.generation)

    def build(self, folder: str, index: Index, chunks: Chunks, extra: Mapping[str, bytes]) -> bytes:
        """Writes a B-tree that refers to the values that processes wrote; it is not visible yet.

        Arguments:
            folder: for its nodes, relative to the path, ending with `/`; used only once. The
                processes' folders are next to it.
            index: of the checkpoint.
            chunks: all of its chunks.
            extra: additional values, by key.

        Returns:
            The manifest that makes it the database at the path.

        Raises:
            StorageError: the number of keys is not that of the index.
        """
        out = _DataFiles(self._store, folder)
        places, inline = out.place_all(extra, chunks)
        beside = folder.rstrip("/").rpartition("/")[0]
        paths = [f"{beside}/{process:05d}/{path}" for process, path in chunks.files]
        paths += out.paths
        self._files = files = sorted(set(paths))
        numbers_by_path = {path: number for number, path in enumerate(files)}
        # Values in no file of this checkpoint have numbers below 0, which stay.
        numbers = np.array(
            [*map(numbers_by_path.__getitem__, paths), ELSEWHERE, builder.INLINE], np.int32
        )
        _renumber(chunks, numbers)
        entries = runs(index, chunks, _renumbered({**places, **chunks.blobs}, numbers))
        manifest, value_count = builder.encode(entries, files, inline, out.place)
        out.close()
        blobs = sum([len(entry.blobs) for entry in index.per_process.values()])
        additions = sum([entry.additions for entry in index.arrays.values()])
        count = index.chunks + additions - index.borrowed + blobs + len(extra)
        if value_count != count:
            raise StorageError(
                f"{self._location}: the processes reported {count} values, but {value_count} were "
                "found"
            )
        return manifest

    def replace(
        self,
        expected: State,
        manifest: bytes,
        timeout_s: float,
        begun: Callable[[], None] = lambda: None,
    ) -> bool:
        """Puts a manifest in place; False if the current one is not the expected one.

        Arguments:
            expected: the result of `read`.
            manifest: from `build`.
            timeout_s: how long to wait for another process that does the same.
            begun: called right before the write; before that, nothing can have been put in place.

        Raises:
            StorageError: files to which it refers are gone; nothing has been put in place.
        """
        try:
            with locations.manifest_locked(self._location, timeout_s):
                gone = locations.missing_files(self._location, self._files, self._database.context)
                if gone and self.read() != expected:
                    return False  # the process that committed removed them
                if gone:
                    raise StorageError(
                        f"{self._location}: {len(gone)} files written for this checkpoint are gone "
                        f"({gone[0]}, ...): they were removed during the save, which is not "
                        "committed; save again"
                    )
                begun()
                written = self._store.write(MANIFEST, manifest, if_equal=expected.generation)
                try:
                    stamp = written.result()
                except KeyboardInterrupt:
                    written.result()  # it continues, and must end before the lock is released
                    raise
                if stamp.generation:
                    return True
        except Failed:
            if self.read().digest != digest_of(manifest):
                raise
        # Refused, or no answer. A retry is also refused after a success whose answer was lost.
        return self.read().digest == digest_of(manifest)

    def retract(self, manifest: bytes, timeout_s: float) -> None:
        """Removes the manifest that `replace` put in place, if it is still there.

        Arguments:
            manifest, timeout_s: as for `replace`.
        """
        # Without the lock, it could be another job's by the time it is removed.
        with locations.manifest_locked(self._location, timeout_s):
            stored = self._store.read(MANIFEST).result()
            if stored.value == manifest:
                self._store.write(MANIFEST, None, if_equal=stored.stamp.generation).result()


def refuse_other_files(location: Location) -> None:
    """Refuses a folder with files that no save has written.

    Raises:
        CheckpointExists: names some of them.
    """
    foreign = location.foreign_files()
    if foreign:
        raise CheckpointExists(
            f"{location} holds other files ({', '.join(foreign[:3])}, ...); choose a "
            "new or empty directory"
        )


def refuse_checkpoint(location: Location, context: ts.Context, *, overwrite: bool) -> None:
    """Refuses to replace a checkpoint unless that is allowed, this program knows all its features,
    and no other checkpoint needs it.

    Raises:
        UnsupportedFormat: names the unknown features.
        CheckpointExists: says what to do.
    """
    if not overwrite:
        raise CheckpointExists(
            f"{location} already holds a checkpoint; pass overwrite=True "
            "(--overwrite on the command line) to replace it, "
            f"or save to another path{saved_apart()}"
        )
    from unickpt.commit import borrowers
    from unickpt.format.refusals import refuse_unknown

    refuse_unknown(location, context)
    if needed := borrowers.list_borrowers(location, context):
        raise CheckpointExists(
            f"{location} has chunks of {', '.join(needed[:3])}, which did not write them "
            "again; save to another path, or remove these first"
        )


def _renumber(chunks: Chunks, numbers: Column) -> None:
    """Gives the files of chunks other numbers, in place."""
    for table in chunks.places, chunks.additions:
        table["file"] = numbers[table["file"]]


def _renumbered(places: Mapping[str, ValuePlace], numbers: Column) -> dict[str, ValuePlace]:
    return {key: (int(numbers[n]), offset, size) for key, (n, offset, size) in places.items()}


class _DataFiles:
    """Writes values and nodes to files, one file at a time.

    Arguments:
        store: the key-value store of the checkpoint's folder.
        folder: of the files, relative to it, ending with `/`.
    """

    def __init__(self, store: KvStore, folder: str) -> None:
        self._store, self._folder = store, folder
        self._ahead, self._nbytes = list[bytes](), 0
        self._writing: Future[Any] | None = None
        self.paths = [f"{folder}0"]

    def place(self, data: bytes) -> DataReference:
        """Writes bytes; returns their future place."""
        if self._nbytes >= _FILE_BYTES:
            self._write()
            self.paths.append(f"{self._folder}{len(self.paths)}")
        reference = DataReference(self.paths[-1], self._nbytes, len(data))
        self._ahead.append(data)
        self._nbytes += len(data)
        return reference

    def place_all(
        self, values: Mapping[str, bytes], chunks: Chunks
    ) -> tuple[dict[str, ValuePlace], bytes]:
        """Writes values; returns the future place of each by its key, and the values that nodes
        hold themselves: those that are small and used once.

        Arguments:
            values: by their keys.
            chunks: these are numbered after its files and values.
        """
        inline, nbytes = [chunks.inline], len(chunks.inline)
        placed: dict[bytes, ValuePlace] = {}  # arrays of one shape share their metadata
        for value, uses in Counter(values.values()).items():
            if uses == 1 and len(value) <= builder.MOST_INLINE:
                placed[value] = builder.INLINE, nbytes, len(value)
                inline.append(value)
                nbytes += len(value)
            else:
                reference = self.place(value)
                number = len(chunks.files) + len(self.paths) - 1
                placed[value] = number, reference.offset, reference.length
        return {key: placed[value] for key, value in values.items()}, b"".join(inline)

    def close(self) -> None:
        """Writes the last file, and waits for all."""
        if self._ahead:
            self._write()
        if self._writing is not None:
            self._writing.result()

    def _write(self) -> None:
        if self._writing is not None:
            self._writing.result()
        self._writing = self._store.write(self.paths[-1], b"".join(self._ahead))
        self._ahead, self._nbytes = [], 0


def runs(
    index: Index, chunks: Chunks, other_places: Mapping[str, ValuePlace]
) -> Iterator[TreeEntries]:
    """All entries of the root database of a checkpoint.

    Arguments:
        index: of the checkpoint.
        chunks: all of its chunks.
        other_places: of all other values, by key.
    """
    keys, rows, grids = [key.encode() for key in other_places], list[int](), list[_ChunkEntries]()
    first = 0
    for entry in index.arrays.values():
        is_whole = not entry.composed and not index.bases
        for part in chunk_grid.parts(entry):
            count = part.count
            if count == 1 and is_whole:
                keys.append(chunk_grid.chunk_key(part, 0).encode())
                rows.append(first)
            else:
                grids += _grids(part, entry, chunks, slice(first, first + count))
            first += count
    places = np.array(list(other_places.values()), PLACE_DTYPE)
    places = np.concatenate([places, chunks.places[np.array(rows, np.int64)]])
    order = sorted(range(len(keys)), key=keys.__getitem__)
    yield from _ordered([keys[position] for position in order], places[order], grids)


def _grids(part: Part, entry: ArrayEntry, chunks: Chunks, rows: slice) -> Iterator[_ChunkEntries]:
    """The chunks of a part, and the full chunk and additions of each chunk of several values."""
    kinds, places = chunks.kinds[rows], chunks.places[rows]
    yield _ChunkEntries(part, places, kinds == WHOLE)
    if entry.composed:
        is_own = places["file"] != ELSEWHERE
        full = part.linked(chunk_grid.FULL_LINK)
        yield _ChunkEntries(full, places, (kinds == COMPOSED) & is_own)
        low, high = np.searchsorted(chunks.additions["row"], (rows.start, rows.stop))
        additions = chunks.additions[low:high]
        for link in np.unique(additions["link"]).tolist():
            link_additions = additions[additions["link"] == link]
            numbers = link_additions["row"].astype(np.int64) - rows.start
            link_places, has = np.zeros(len(kinds), PLACE_DTYPE), np.zeros(len(kinds), np.bool_)
            link_places[numbers] = link_additions[PLACE_NAMES]
            has[numbers] = True
            yield _ChunkEntries(part.linked(link), link_places, has)


@dataclass(frozen=True, eq=False)
class _ChunkEntries:
    """Some chunks of a part.

    Arguments:
        part: the part.
        places: of all its chunks, by their numbers.
        chosen: for each of all its chunks whether it is one of these.
    """

    part: Part
    places: Column
    chosen: Column

    @property
    def prefix(self) -> bytes:
        """The prefix of the keys of these chunks, and of no other key."""
        return join_key(self.part.key, "c").encode()

    def run(self, sort_keys: Callable[[tuple[int, ...]], _Order]) -> TreeEntries:
        """Their entries, by the order of the chunks of a grid."""
        tails, numbers = sort_keys(self.part.grid)
        chosen = self.chosen[numbers]
        if not chosen.all():
            texts, numbers = list(compress(tails.texts, chosen.tolist())), numbers[chosen]
            tails = SortedKeys.from_texts(texts)
        places = self.places.view(builder.PLACE_BYTES).take(numbers).view(PLACE_DTYPE)
        return TreeEntries(tails, places, self.prefix)


_Order = tuple[SortedKeys, Column]
"""How the keys of the chunks of a grid end, ascending, and the chunks' numbers."""
_MOST_GRIDS = 16  # of the arrays of a layer


def _sort_keys(grid: tuple[int, ...]) -> _Order:
    # "/" and the end of a key come before all digits: the order is that of the components.
    along = [sorted((b"/%d" % n, n) for n in range(extent)) for extent in grid]
    tails = [b"".join(parts) for parts in product(*([t for t, _ in d] for d in along))]
    every = np.arange(math.prod(grid)).reshape(grid)
    numbers = every[np.ix_(*([n for _, n in d] for d in along))].reshape(-1)
    return SortedKeys.from_texts(tails), numbers


def _ordered(
    keys: Sequence[bytes], places: Column, grids: Sequence[_ChunkEntries]
) -> Iterator[TreeEntries]:
    """Entries, merged in order with those of grids."""
    start, sort_keys = 0, lru_cache(_MOST_GRIDS)(_sort_keys)
    for grid in sorted(grids, key=attrgetter("prefix")):
        end = bisect_left(keys, grid.prefix, start)
        if end > start:
            yield TreeEntries(SortedKeys.from_texts(keys[start:end]), places[start:end])
        start = end
        yield grid.run(sort_keys)
    if start < len(keys):
        yield TreeEntries(SortedKeys.from_texts(keys[start:]), places[start:])
