"""The root database, which makes a checkpoint exist: built next to the old one, then put in place.

OCDBT writes an empty manifest before it commits, and a path with a manifest is a checkpoint. So the
root's B-tree is built with its manifest in memory, and that manifest is then written atomically.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tensorstore as ts

from unickpt.errors import StorageError
from unickpt.format import patches
from unickpt.format.zarr_metadata import join_key
from unickpt.storage.btree import nodes
from unickpt.storage.database import Database, digest_of
from unickpt.storage.errors import Failed
from unickpt.storage.kvstore import commit
from unickpt.storage.ocdbt import MANIFEST

Range = tuple[str, str]
"""The first of some keys, and the first one after them."""


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

    def read(self) -> State:
        """The current state."""
        read = self._database.read_manifest()
        return State(digest_of(read.value) if read.state == "value" else "", read.stamp.generation)

    def build(
        self,
        folder: str,
        parts: Sequence[Database],
        extra: Mapping[str, bytes],
        count: int,
        without: Mapping[int, Sequence[Range]] | None = None,
    ) -> bytes:
        """Writes a B-tree that refers to the values of other databases; it is not visible yet.

        Arguments:
            folder: where its nodes go, relative to the path, ending with `/`; used only once.
            parts: the databases.
            extra: additional values, by key.
            count: how many keys the databases must have in total.
            without: keys that are not taken from a database, by its number in `parts`.

        Returns:
            The manifest that makes it the database at the path.

        Raises:
            StorageError: the number of keys differs.
        """
        draft, held = self._database.draft(folder)
        transaction = ts.Transaction(atomic=True)
        root = draft.with_transaction(transaction)
        work = [
            part.store().experimental_copy_range_to(root, keys)
            for number, part in enumerate(parts)
            for keys in _all_but((without or {}).get(number, ()))
        ]
        for copied in work:
            copied.result()
        for write in [root.write(key, value) for key, value in extra.items()]:
            write.result()
        commit(transaction).result()
        manifest: bytes = held.read(MANIFEST).result().value
        found = nodes.manifest(manifest).keys - len(extra)
        if found != count:
            raise StorageError(
                f"{self._location}: the processes reported {count} keys, but wrote {found}"
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
        """
        try:
            with self._location.manifest_locked(timeout_s):
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


def ranges_of_chunks(array: str) -> list[Range]:
    """The keys of all that is stored of the chunks of a single-part array."""
    firsts = [join_key(array, below) for below in ("c", patches.FULL, patches.PATCH)]
    return [(first, first + "0") for first in firsts]  # "0" follows the "/" of a chunk's key


def range_of(key: str) -> Range:
    """One key."""
    return key, key + "\0"


def _all_but(ranges: Sequence[Range]) -> list[ts.KvStore.KeyRange]:
    """The keys before, between and after some, which do not overlap."""
    bounds = ["", *(bound for each in sorted(ranges) for bound in each), ""]
    return [ts.KvStore.KeyRange(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True)]
