"""The base of a save: an earlier checkpoint, whose equal chunks are referred to, not written again.

Each process decides this alone, for the chunks that it would write. The files with such chunks are
hard-linked into the new checkpoint's own folder, which is then complete in itself: neither
checkpoint needs the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import tensorstore as ts

from unickpt.arrays import dtypes
from unickpt.arrays.dtypes import Array
from unickpt.errors import CheckpointNotFound, UnickptError
from unickpt.format import chunk_grid, chunk_store, ocdbt_reader
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.format.zarr_metadata import Codecs
from unickpt.storage.btree import builder
from unickpt.storage.btree.nodes import DataReference
from unickpt.storage.database import Database
from unickpt.storage.errors import Failed
from unickpt.storage.local_files import RegularFiles
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST

_log = logging.getLogger("unickpt")
FOLDER = "reused"
"""In the folder of a process: the linked files, and the database that refers to their chunks."""
_NODES = "nodes"
# A file is kept alive as a whole. Measured by `benchmarks/less.py`.
_LEAST_USED = 0.5


def database(folder: Location, context: ts.Context) -> Database:
    """The database that refers to the chunks that a process took from a base.

    Arguments:
        folder: in which the process writes.
        context: the TensorStore context of the save.
    """
    return Database(folder.child(FOLDER), context)


def open_base(
    location: Location,
    folder: Location,
    codecs: Codecs,
    *,
    compare: bool,
    fsync: bool,
) -> Base | None:
    """Opens the base of a save; None if nothing of it can be linked, which is logged.

    Arguments:
        location: of the base.
        folder: in which this process writes.
        codecs: the new checkpoint's compression.
        compare: whether the bytes of chunks are compared, not only their digests.
        fsync: whether linked files are flushed to disk.

    Raises:
        CheckpointNotFound: there is no checkpoint.
        CheckpointCorrupt, StorageError: it cannot be read.
    """
    reader = ocdbt_reader.open(location)
    if reader is None:
        raise CheckpointNotFound(f"no checkpoint of unickpt's own format at {location}")
    files = location.regular_files()
    if files is None or not folder.is_local:
        why = "only checkpoints in a file system share files"
    elif reader.index.codecs != codecs:
        why = "it has another compression"
    else:
        return Base(reader, files, folder, compare=compare, fsync=fsync)
    _log.info("%s: nothing is reused of %s: %s", folder, location, why)
    return None


@dataclass(frozen=True)
class _Candidate:
    """A chunk of the base that a chunk of the save may be equal to."""

    part: Part
    entry: ArrayEntry
    digest: int
    where: DataReference


class Base:
    """An earlier checkpoint on the same file system, for one process of one save.

    Arguments:
        reader: of the base.
        files: of the base's folder.
        folder, compare, fsync: see `open_base`.
    """

    def __init__(
        self,
        reader: OcdbtReader,
        files: RegularFiles,
        folder: Location,
        *,
        compare: bool,
        fsync: bool,
    ) -> None:
        self._reader, self._files = reader, files
        self._folder = folder.child(FOLDER)
        self._compare, self._fsync = compare, fsync
        self._parts: dict[str, dict[str, tuple[int, Part]]] = {}
        self._candidates: dict[tuple[str, int], _Candidate] = {}
        self._names: dict[str, str | None] = {}
        self._taken: list[tuple[bytes, DataReference]] = []
        self.nbytes = 0
        """Logical bytes of the chunks that were taken."""

    @property
    def count(self) -> int:
        """The number of chunks that were taken."""
        return len(self._taken)

    def offer(self, chunks: Iterable[tuple[ArrayEntry, Part, int]]) -> None:
        """Finds what the base has of the chunks that this process is going to write.

        A file of the base of which they use less than half is left alone: its other bytes would
        stay on the disk, too.

        Arguments:
            chunks: array, part and number of each.
        """
        used: dict[str, int] = {}
        for entry, part, number in chunks:
            found = self._find(entry, part, number)
            if found is not None:
                self._candidates[part.key, number] = found
                used[found.where.path] = used.get(found.where.path, 0) + found.where.length
        for path, nbytes in used.items():
            try:
                if nbytes < _LEAST_USED * self._files.size(path):
                    self._names[path] = None
            except Failed:
                self._names[path] = None

    def _find(self, entry: ArrayEntry, part: Part, number: int) -> _Candidate | None:
        theirs = self._reader.index.arrays.get(entry.name)
        if theirs is None or (theirs.shape, theirs.dtype) != (entry.shape, entry.dtype):
            return None
        if entry.name not in self._parts:
            numbered = chunk_grid.numbered_parts(theirs)
            self._parts[entry.name] = {each.key: (first, each) for first, each in numbered}
        first, same = self._parts[entry.name].get(part.key, (0, None))
        if same != part:
            return None
        where = self._reader.where(part, number)
        if where is None:
            return None
        row = self._reader.digests_of(entry.name)[first + number]
        return _Candidate(part, theirs, int(row["digest"]), where)

    def takes(self, part: Part, number: int, digest: Callable[[], int], chunk: Array) -> bool:
        """Whether the base has a chunk, which is then not to be written.

        Arguments:
            part, number: of the chunk.
            digest: returns its digest.
            chunk: its elements.
        """
        found = self._candidates.get((part.key, number))
        if found is None or self._names.get(found.where.path, "") is None:
            return False
        if digest() != found.digest or (self._compare and not self._is_equal(found, number, chunk)):
            return False
        name = self._linked(found.where.path)
        if name is None:
            return False
        where = DataReference(name, found.where.offset, found.where.length)
        self._taken.append((chunk_store.key_of(part, number).encode(), where))
        self.nbytes += chunk.nbytes
        return True

    def _is_equal(self, found: _Candidate, number: int, chunk: Array) -> bool:
        out = np.empty(chunk.shape, dtypes.from_name(found.entry.dtype))
        try:
            self._reader.read_chunk(found.entry, found.part, number, None, out)
        except UnickptError:
            return False  # it is damaged, and must not be referred to
        return np.array_equal(_bits(out), _bits(chunk))

    def _linked(self, path: str) -> str | None:
        """The name of a file of the base in this process's folder; None if it cannot be linked."""
        if path not in self._names:
            if not any(self._names.values()):
                self._folder.make()
            name = path.rpartition("/")[2]
            if name in self._names.values():
                name = f"{len(self._names)}-{name}"
            at = f"{self._folder.spec['path']}{name}"
            is_linked = self._files.link(path, at, fsync=self._fsync)
            self._names[path] = name if is_linked else None
            if not is_linked:
                _log.info("%s: %s cannot be linked; it is written again", self._folder, path)
        return self._names[path]

    def publish(self, context: ts.Context) -> None:
        """Writes the database that refers to the chunks that were taken.

        Arguments:
            context: the TensorStore context of the save.
        """
        if not self._taken:
            return
        manifest, nodes = builder.build(self._taken, _NODES)
        store = self._folder.store(context)
        store.write(_NODES, nodes).result()
        store.write(MANIFEST, manifest).result()


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
