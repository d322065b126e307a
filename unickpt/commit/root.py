"""The root database, which makes a checkpoint exist: built next to the old one, then put in place.

OCDBT writes an empty manifest before it commits, and a path with a manifest is a checkpoint. So the
root's B-tree is built with its manifest in memory, and that manifest is then written atomically.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unickpt.commit import root_keys
from unickpt.commit.merge_chunks import Chunks
from unickpt.commit.record import Place
from unickpt.errors import StorageError
from unickpt.format.index import Index
from unickpt.storage.btree import builder
from unickpt.storage.btree.builder import TreeEntries
from unickpt.storage.btree.nodes import DataReference
from unickpt.storage.database import Database, digest_of
from unickpt.storage.errors import Failed
from unickpt.storage.kvstore import Future, KvStore
from unickpt.storage.ocdbt import MANIFEST

_FILE_BYTES = 64 << 20
"""About what a file with nodes has at most; two may be in memory."""


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
    """The database at a checkpoint's path, as one that is replaced.

    Arguments:
        database: it, with the context that all databases of a save share.
    """

    def __init__(self, database: Database) -> None:
        self._database, self._location = database, database.location
        self._store = database.location.store(database.context)
        self._files: Sequence[str] = ()  # to which the manifest from `build` refers

    def read(self) -> State:
        """The current state."""
        read = self._database.read_manifest()
        return State(digest_of(read.value) if read.state == "value" else "", read.stamp.generation)

    def build(self, folder: str, index: Index, chunks: Chunks, extra: Mapping[str, bytes]) -> bytes:
        """Writes a B-tree that refers to the values that processes wrote; it is not visible yet.

        Arguments:
            folder: where its nodes go, relative to the path, ending with `/`; used only once. The
                processes' folders are beside it.
            index: of the checkpoint.
            chunks: all of its chunks.
            extra: additional values, by key.

        Returns:
            The manifest that makes it the database at the path.

        Raises:
            StorageError: the number of keys is not that of the index.
        """
        store = self._location.store(self._database.context)
        out = _DataFiles(store, folder)
        places, inline = out.place_all(extra, chunks)
        beside = folder.rstrip("/").rpartition("/")[0]
        paths = [f"{beside}/{process:05d}/{path}" for process, path in chunks.files]
        paths += out.paths
        self._files = files = sorted(set(paths))
        known = {path: number for number, path in enumerate(files)}
        numbers = np.array([*(known[path] for path in paths), builder.INLINE], np.int32)
        manifest, found = builder.encode(
            (_numbered(run, numbers) for run in root_keys.runs(index, chunks, places)),
            files,
            inline,
            out.place,
        )
        out.close()
        blobs = sum(len(entry.blobs) for entry in index.per_process.values())
        count = index.chunks - index.borrowed + len(chunks.patches) + blobs + len(extra)
        if found != count:
            raise StorageError(
                f"{self._location}: the processes reported {count} values, but {found} were found"
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
            expected: what `read` returned.
            manifest: from `build`.
            timeout_s: how long to wait for another process that does the same.
            begun: called right before the write; earlier nothing can have been put in place.

        Raises:
            StorageError: files to which it refers are gone; nothing has been put in place.
        """
        try:
            with self._location.manifest_locked(timeout_s):
                gone = self._location.missing(self._files, self._database.context)
                if gone and self.read() != expected:
                    return False  # who committed removed them
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
        """Removes what `replace` put in place, if it is still there.

        Arguments:
            manifest, timeout_s: as for `replace`.
        """
        # Without the lock, it could be another job's by the time it is removed.
        with self._location.manifest_locked(timeout_s):
            found = self._store.read(MANIFEST).result()
            if found.value == manifest:
                self._store.write(MANIFEST, None, if_equal=found.stamp.generation).result()


def _numbered(run: TreeEntries, numbers: Any) -> TreeEntries:
    """A run with other numbers of its files; the last is that of `INLINE`."""
    places = run.places.copy()
    places["file"] = numbers[places["file"]]
    return TreeEntries(run.keys, places)


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
        """Writes bytes; returns where they will be."""
        if self._nbytes >= _FILE_BYTES:
            self._write()
            self.paths.append(f"{self._folder}{len(self.paths)}")
        at = DataReference(self.paths[-1], self._nbytes, len(data))
        self._ahead.append(data)
        self._nbytes += len(data)
        return at

    def place_all(
        self, values: Mapping[str, bytes], chunks: Chunks
    ) -> tuple[dict[str, Place], bytes]:
        """Writes values; returns where each will be by its key, and all that nodes hold themselves.

        Arguments:
            values: by their keys.
            chunks: after whose files and values these are numbered.
        """
        inline, nbytes = [chunks.inline], len(chunks.inline)
        placed: dict[bytes, Place] = {}  # arrays of one shape share their metadata
        for value in values.values():
            if value in placed:
                continue
            if len(value) <= builder.MOST_INLINE:
                placed[value] = builder.INLINE, nbytes, len(value)
                inline.append(value)
                nbytes += len(value)
            else:
                at = self.place(value)
                number = len(chunks.files) + len(self.paths) - 1
                placed[value] = number, at.offset, at.length
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
