"""Chunks in hard-linked files of an earlier checkpoint: the new one is complete in itself."""

from __future__ import annotations

import os
from dataclasses import replace

from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.storage.btree.nodes import DataReference
from unickpt.storage.local_files import RegularFiles
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST

FOLDER = "reused"
"""In the folder of a process: the linked files."""
# Of a data file's bytes, the share that a process must use of it to link it.
_LEAST_USED = 0.5
_PROBE = "probe"


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
        self._names: dict[str, str | None] = {}

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

    def take(self, where: DataReference, *, as_full: bool = False) -> DataReference | None:
        """Refers to a chunk; None if its file cannot be linked."""
        name = self._linked(where.path)
        return None if name is None else replace(where, path=f"{FOLDER}/{name}")

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
