"""Chunks in hard-linked files of an earlier checkpoint: the new one is complete in itself."""

from __future__ import annotations

import os
from collections.abc import Mapping

import tensorstore as ts

from unickpt.format import chunk_store, patches
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry, BaseEntry
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.storage.btree import builder
from unickpt.storage.btree.nodes import DataReference
from unickpt.storage.database import Database
from unickpt.storage.local_files import RegularFiles
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST

FOLDER = "reused"
"""In the folder of a process: the linked files, and the database that refers to their chunks."""
# Of a data file's bytes, the share that a process must use of it to link it.
_LEAST_USED = 0.5
_NODES, _PROBE = "nodes", "probe"


def database(folder: Location, context: ts.Context) -> Database:
    """The database that refers to the chunks in files that a process linked.

    Arguments:
        folder: in which the process writes.
        context: the TensorStore context of the save.
    """
    return Database(folder.child(FOLDER), context)


class LinkedFiles:
    """Data files of a base, linked into the folder of a process; a `base.Share`.

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
        self.takes_full_chunks = True
        self._folder, self._fsync = folder.child(FOLDER), fsync
        self.borrowed: Mapping[BaseEntry, set[tuple[str, int]]] = {}
        self._names: dict[str, str | None] = {}
        self._taken: list[tuple[bytes, DataReference]] = []

    @property
    def linked(self) -> int:
        """The number of chunks that were taken."""
        return len(self._taken)

    def are_possible(self) -> bool:
        """Whether both checkpoints are in one file system, and it has links."""
        self._folder.make()
        probe = f"{self._folder.spec['path']}{_PROBE}"
        is_linked = self._files.link(MANIFEST, probe, fsync=False)
        if is_linked:
            os.unlink(probe)
        os.rmdir(str(self._folder.spec["path"]))
        return is_linked

    def find(self, entry: ArrayEntry, part: Part, number: int) -> DataReference | None:
        """Where a chunk is in a data file, or the full chunk that its patch refers to."""
        return self._reader.where(entry, part, number)

    def unit(self, where: DataReference) -> str:
        """The data file."""
        return where.path

    def least_bytes(self, unit: str) -> float:
        """Half of the size of a data file. Raises Failed."""
        return _LEAST_USED * self._files.size(unit)

    def is_older(self, where: DataReference) -> bool:
        """Whether the data file was linked already."""
        return f"/{FOLDER}/" in where.path

    def take(self, where: DataReference, part: Part, number: int, *, as_full: bool = False) -> bool:
        """Refers to a chunk; False if its file cannot be linked."""
        name = self._linked(where.path)
        if name is None:
            return False
        linked = DataReference(name, where.offset, where.length)
        new = patches.full_of(part) if as_full else part
        self._taken.append((chunk_store.key_of(new, number).encode(), linked))
        return True

    def _linked(self, path: str) -> str | None:
        """The name of a file of the base in this process's folder; None if it cannot be linked."""
        if path not in self._names:
            self._folder.make()
            name = path.rpartition("/")[2]
            if name in self._names.values():
                name = f"{len(self._names)}-{name}"
            at = f"{self._folder.spec['path']}{name}"
            self._names[path] = name if self._files.link(path, at, fsync=self._fsync) else None
        return self._names[path]

    def publish(self, context: ts.Context) -> None:
        """Writes the database that refers to the chunks that were taken.

        Arguments:
            context: the TensorStore context of the save.
        """
        if self._taken:
            manifest, nodes = builder.build(self._taken, _NODES)
            store = self._folder.store(context)
            # At once: nobody looks for either before the record is published.
            for written in [store.write(_NODES, nodes), store.write(MANIFEST, manifest)]:
                written.result()
