"""Chunks in hard-linked files of an earlier checkpoint: the new one is complete in itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from unickpt.extend import (
    LINKED_FOLDER,
    MANIFEST,
    ArrayEntry,
    ChunkValue,
    Damaged,
    DataReference,
    Failed,
    Location,
    OcdbtReader,
    Part,
    RegularFiles,
)
from unickpt.plugins.incremental.shares import Chunk, Places, ValueSource

_PROBE = "probe"


class LinkedFiles:
    """Data files of a base, linked into the folder of a process; a `Share`.

    Arguments:
        reader: of the base.
        files: of the base's folder.
        folder: in which the process writes.
        fsync: whether linked files are flushed to disk.
    """

    def __init__(
        self, reader: OcdbtReader, files: RegularFiles, folder: Location, *, fsync: bool
    ) -> None:
        self._reader, self._files = reader, files
        self._folder, self._fsync = folder.child(LINKED_FOLDER), fsync
        self._names: dict[str, str | None] = {}
        self._used_names = set[str]()
        self._sizes: dict[str, int] = {}

    def are_possible(self) -> bool:
        """Whether both checkpoints are in one file system, and it has links."""
        try:
            self._folder.make()
        except Failed:
            return False
        probe = f"{self._folder.path}{_PROBE}"
        is_linked = self._files.link(MANIFEST, probe, fsync=False)
        with suppress(OSError):  # a file left here is in no checkpoint
            if is_linked:
                os.unlink(probe)
            else:  # if links work, the folder is about to be used
                os.rmdir(self._folder.path)
        return is_linked

    def find_all(self, chunks: Sequence[Chunk]) -> Sequence[Places | None]:
        """Where each chunk is, if it is in data files, except for short patches."""
        if self._reader.index.bases or any(entry.composed for entry, _, _ in chunks):
            return [self._find(*chunk) for chunk in chunks]
        places = list[Places | None]()
        value = None
        for chunk, location in zip(
            chunks, self._reader.chunk_values.whole_places(chunks), strict=True
        ):
            if not isinstance(location, DataReference):
                places.append(None)
                continue
            if value is None or value.part is not chunk[1]:
                (value,) = self._reader.chunk_values.values(*chunk)  # the same for all of a part
            places.append((ValueSource(value, location),))
        return places

    def _find(self, entry: ArrayEntry, part: Part, number: int) -> Places | None:
        places, values = list[ValueSource](), self._reader.chunk_values
        for value in values.values(entry, part, number):
            location = None if value.base is not None else values.place(entry, value, number)
            if location is None or (not places and isinstance(location, bytes)):
                return None
            places.append(ValueSource(value, location))
        return tuple(places)

    def lender(
        self, entry: ArrayEntry, part: Part, numbers: range
    ) -> tuple[ChunkValue, None] | None:
        """This base, if it borrows none of some chunks itself, and has none of them in patches."""
        if entry.composed:
            return None
        if self._reader.index.bases and len(self._reader.borrowed.rows(entry, part, numbers)):
            return None
        (value,) = self._reader.chunk_values.values(entry, part, numbers.start)  # the same for all
        return value, None

    def unit_bytes(self, place: ValueSource) -> int:
        """The size of the data file. Raises Failed."""
        if not isinstance(place.at, DataReference):
            return 0
        path = place.at.path
        if path not in self._sizes:  # used before and when a file is linked
            self._sizes[path] = self._files.size(path)
        return self._sizes[path]

    def check_end(self, entry: ArrayEntry, place: ValueSource, number: int) -> None:
        """Checks that the data file has the last byte of a value of a chunk. Raises Damaged."""
        size = self.unit_bytes(place)
        if size < place.end:
            name = f"a file of {self._reader.location}"
            raise Damaged(f"{name} has {size} bytes, and array {entry.name!r} ends at {place.end}")

    def is_older(self, place: ValueSource) -> bool:
        """Whether the data file was linked already."""
        return isinstance(place.at, DataReference) and f"/{LINKED_FOLDER}/" in place.at.path

    def take(self, place: ValueSource) -> DataReference | bytes | None:
        """Refers to a value; None if its file cannot be linked."""
        if not isinstance(place.at, DataReference):
            return place.at
        name = self._linked(place.at.path)
        if name is None:
            return None
        return DataReference(f"{LINKED_FOLDER}/{name}", place.at.offset, place.at.length)

    def _linked(self, path: str) -> str | None:
        """The name of a file of the base in this process's folder; None if it cannot be linked."""
        if path not in self._names:
            if not self._names:
                self._folder.make()
            name = path.rpartition("/")[2]
            if name in self._used_names:
                name = f"{len(self._names)}-{name}"
            self._used_names.add(name)
            link_path = f"{self._folder.path}{name}"
            self._names[path] = (
                name if self._files.link(path, link_path, fsync=self._fsync) else None
            )
        return self._names[path]
