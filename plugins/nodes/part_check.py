"""Compares the data files of a process with the digests of what is in them, before they are
uploaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import xxhash

from unickpt.errors import CheckpointCorrupt
from unickpt.extend import (
    Damaged,
    DataReference,
    OcdbtReader,
    Request,
    blob_key,
    dtype_from_name,
    numbered_parts,
)


class PartCheck:
    """Compares the data files of a process with the digests of what is in them: chunks, and its
    per-process values.

    Arguments:
        reader: of the step, whose B-tree is sound.
        process: whose files.
        part: the path of their folder, below that of the step; ends with `/`.
    """

    def __init__(self, reader: OcdbtReader, process: int, part: str) -> None:
        self._memory, self._process, self._part = _OneFile(), process, part
        database = replace(reader.chunks.database, restorers=[self._memory])
        self._reader = OcdbtReader(database, reader.index, database.reader())
        self._values = dict[str, list[str]]()
        self._chunks = dict[str, list[tuple[int, Request]]]()
        for name, offset, request in self._requests():
            self._chunks.setdefault(name, []).append((offset, request))
        for leaf in reader.index.per_process:
            place = reader.chunks.values.tree.find(blob_key(leaf, process))
            if isinstance(place, DataReference) and place.path.startswith(part):
                self._values.setdefault(place.path.removeprefix(part), []).append(leaf)
        self.names = {*self._chunks, *self._values}
        """The files that have something; by their paths in the folder."""

    def _requests(self) -> Iterator[tuple[str, int, Request]]:
        """The chunks in the files: the name of the file, the offset in it, and the request, whose
        memory comes later."""
        none = np.empty(0, np.uint8)
        for entry in self._reader.index.arrays.values():
            table = self._reader.digests_of(entry.name)
            for first, part in numbered_parts(entry):
                rows = table[first : first + part.count]
                numbers = np.flatnonzero(rows["process"] == self._process).tolist()
                chunks = [(entry, part, number) for number in numbers]
                places = self._reader.chunk_values.whole_places(chunks)
                for number, place in zip(numbers, places, strict=True):
                    if isinstance(place, DataReference) and place.path.startswith(self._part):
                        name, digest = place.path.removeprefix(self._part), rows[number]["digest"]
                        yield name, place.offset, Request(entry, part, number, none, int(digest))

    def damage(self, name: str, data: bytes) -> str:
        """What in a file does not match its digest, such as the box of an array; empty if all does.

        Arguments:
            name: of the file.
            data: its bytes.
        """
        self._memory.path, self._memory.data = self._part + name, memoryview(data)
        for offset, request in self._chunks.get(name, ()):
            if not self._is_sound(offset, request):
                box = request.part.chunk_box(request.number)
                return f"array {request.entry.name!r} {box}"
        for leaf in self._values.get(name, ()):
            try:
                self._reader.per_process(leaf, [self._process])[0].check()
            except CheckpointCorrupt:
                return f"the value of process {self._process} for {leaf!r}"
        return ""

    def _is_sound(self, offset: int, request: Request) -> bool:
        entry, part = request.entry, request.part
        shape = part.chunk_box(request.number).shape
        if not entry.encoding and part.chunk[1:] == shape[1:]:  # as it lies in memory: no copy
            nbytes = math.prod(shape) * entry.itemsize
            stored = self._memory.data[offset : offset + nbytes]
            return len(stored) == nbytes and xxhash.xxh3_64_intdigest(stored) == request.digest
        out = np.empty(shape, dtype_from_name(entry.dtype))
        try:
            return not self._reader.read([request._replace(out=out)])
        except CheckpointCorrupt:  # it is too short, or cannot be decoded
            return False


class _OneFile:
    """A `Restorer`, of a file in memory."""

    path, data = "", memoryview(b"")

    def read(self, path: str, offset: int, length: int) -> bytes | None:
        if path != self.path:
            return None
        if offset + length > len(self.data):
            raise Damaged(f"{path} has {len(self.data)} bytes, {offset + length} expected")
        return bytes(self.data[offset : offset + length])

    def damage(self) -> Iterator[str]:
        yield from ()
