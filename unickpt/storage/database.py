"""The OCDBT database in a folder: opened, pinned, read, and built without being visible."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorstore as ts
import xxhash

from unickpt.arrays.dtypes import Array
from unickpt.storage import ocdbt
from unickpt.storage.btree import nodes
from unickpt.storage.btree.nodes import NodeColumn
from unickpt.storage.errors import Damaged, Failed
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import DatabaseReader, ReadyResult
from unickpt.storage.regular_files import RegularFiles, system_calls
from unickpt.storage.tensorstore_calls import KvStore

if TYPE_CHECKING:
    from unickpt.storage.restorers import Restorer

# Values that are read together; larger ones are read into their destination.
_MOST_BYTES = 128 << 10
_GAP_BYTES = 4 << 10  # such as zarr metadata
_MOST_TOGETHER = 512  # the system takes 1,024 pieces of memory at once; half may be gaps
_PIECE_BYTES = 512 << 10  # the cache of a core holds it until it is hashed; from a disk faster, too
_MOST_AT_ONCE = 1 << 30  # a system call reads less than 2 GiB


class LocalDatabaseReader(ocdbt.DatabaseReader):
    """Reads values into existing memory.

    TensorStore reads a value into new memory or maps it, and then copies it: two thirds of this
    speed, as measured; and if a mapped file is truncated, the process is killed.

    Arguments:
        tree: the database's B-tree.
        files: of the folder.
    """

    def __init__(self, tree: ocdbt.Tree, files: RegularFiles) -> None:
        super().__init__(tree)
        self._files = files

    def _check_file(self, path: str) -> None:
        self._files.check(path)

    def request_all(self, keys: Sequence[str]) -> dict[str, ocdbt.Result]:
        """Reads neighbouring values of a file together."""
        lengths: dict[str, int] = {}
        with suppress(Failed):
            for leaf, numbers, positions in self.tree.find_all(keys):
                names = [keys[number] for number in numbers]
                lengths |= zip(names, leaf.lengths[positions].tolist(), strict=True)
        small = {key: length for key, length in lengths.items() if length <= _MOST_BYTES}
        out = [np.empty(length, np.uint8) for length in small.values()]
        done = self.read_into([*small], out, [*small.values()], [None] * len(small))
        read = zip(small, out, done, strict=True)
        return {key: ReadyResult(buffer.data) for key, buffer, is_done in read if is_done}

    def read_into(
        self,
        keys: Sequence[str],
        out: Sequence[Array],
        lengths: Sequence[int],
        looks: Sequence[ocdbt.OnRead | None],
    ) -> Sequence[bool]:
        """As `DatabaseReader.read_into`, for any size: neighbouring small values of a file
        together, large ones in pieces.

        Hardly any Python runs between these: with a cold processor cache it takes many times as
        long, while other threads wait for the GIL.
        """
        done, expected = np.zeros(len(keys), bool), np.array(lengths, np.int64)
        nbytes = np.array([buffer.nbytes for buffer in out], np.int64)
        with suppress(Failed):
            for leaf, numbers, leaf_positions in self.tree.find_all(keys):
                indices = np.array(numbers)
                fits = leaf.lengths[leaf_positions] == expected[indices]
                files, offsets = (
                    leaf.which[leaf_positions],
                    leaf.offsets[leaf_positions].astype(np.int64),
                )
                for position in np.flatnonzero(fits & (files < 0)).tolist():
                    number, offset = numbers[position], int(offsets[position])
                    memory = _bytes_of(out[number])
                    memory[:] = leaf.inline[offset : offset + len(memory)]
                    done[number] = True
                    _show(looks[number], memory)
                is_small = nbytes[indices] <= _MOST_BYTES
                for file in sorted(set(files[fits & (files >= 0)].tolist())):
                    in_file = fits & (files == file)
                    rows = np.stack([indices, offsets, nbytes[indices]])
                    path = leaf.files[file][0]
                    with self._files.opened(path) as handle:
                        if (small := in_file & is_small).any():
                            _read_beside(handle, rows[:, small], out, done, looks)
                        if (large := in_file & ~is_small).any():
                            _read_large(handle, rows[:, large], out, done, looks)
        return done.tolist()


def _read_beside(
    handle: int,
    rows: NodeColumn,
    out: Sequence[Array],
    done: NodeColumn,
    looks: Sequence[ocdbt.OnRead | None],
) -> None:
    """Reads small values of a file.

    Arguments:
        handle: of the file.
        rows: for each value its number, its offset, and how much of it is read.
        out, done, looks: by number, its memory, whether it was read, and the function to call with
            it.
    """
    numbers, begins, lengths = rows[:, np.argsort(rows[1], kind="stable")]
    gaps = np.concatenate([[0], begins[1:] - begins[:-1] - lengths[:-1]])
    cuts = np.flatnonzero((gaps < 0) | (gaps > _GAP_BYTES)).tolist()  # shared bytes, or far
    gap = np.empty(_GAP_BYTES, np.uint8)
    for first, stop in zip([0, *cuts], [*cuts, len(numbers)], strict=True):
        for start in range(first, stop, _MOST_TOGETHER):
            run = slice(start, min(start + _MOST_TOGETHER, stop))
            buffers: list[Any] = []
            for number, skipped in zip(numbers[run].tolist(), gaps[run].tolist(), strict=True):
                if skipped and buffers:
                    buffers.append(gap[:skipped])
                buffers.append(out[number])
            with system_calls():
                count = os.preadv(handle, buffers, int(begins[start]))
            done[numbers[run]] = begins[run] + lengths[run] <= begins[start] + count
    for number in numbers.tolist():
        if done[number] and looks[number] is not None:
            _show(looks[number], _bytes_of(out[number]))


def _read_large(
    handle: int,
    rows: NodeColumn,
    out: Sequence[Array],
    done: NodeColumn,
    looks: Sequence[ocdbt.OnRead | None],
) -> None:
    """Reads large values of a file, piece by piece; arguments as for `_read_beside`."""
    values = []
    for number, begin, _ in rows.T.tolist():
        memory, most = _bytes_of(out[number]), _PIECE_BYTES if looks[number] else _MOST_AT_ONCE
        pieces = [(memory[a : a + most], begin + a) for a in range(0, len(memory), most)]
        values.append((number, looks[number], pieces))
    with system_calls():
        for number, look, pieces in values:
            for piece, offset in pieces:
                count = os.preadv(handle, [piece], offset)
                while 0 < count < len(piece):
                    count += (more := os.preadv(handle, [piece[count:]], offset + count))
                    if not more:
                        break
                if count < len(piece):
                    break
                if look is not None:
                    look(piece)
            else:
                done[number] = True


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _show(look: ocdbt.OnRead | None, memory: memoryview) -> None:
    if look is not None:
        look(memory)


@dataclass(frozen=True)
class Database:
    """The database in a folder; it need not exist.

    Arguments:
        location: the folder.
        context: the TensorStore context; databases from which data is copied must share it.
        manifest: the database's manifest, if it is not read from the folder.
        generation: the storage's name for the version of that manifest in the folder; empty if it
            is not (yet) in the folder.
        restorers: supply the bytes of damaged and missing files; of several, the first.
    """

    location: Location
    context: ts.Context
    manifest: bytes | None = None
    generation: bytes = b""
    restorers: Sequence[Restorer] = ()

    def store(self) -> KvStore:
        """Its keys and values, as TensorStore reads and writes them."""
        return KvStore.open(self.array_spec(""), self.context)

    def array_spec(self, prefix: str) -> dict[str, Any]:
        """The key-value store of one array inside this database."""
        database = ocdbt.spec(self.location.spec, manifest=self._manifest_store)
        return {**database, "path": prefix + "/" if prefix else ""}

    def reader(self) -> DatabaseReader:
        """Reads its values, which are untrusted."""
        if self.restorers:
            from unickpt.storage.restorers import restoring

            fetch: Callable[..., bytes] = partial(ocdbt.fetch, self._store)
            fetch = fetch if self._files is None else self._files.read
            return DatabaseReader(ocdbt.Tree(self._manifest, restoring(self.restorers[0], fetch)))
        if self._files is not None:
            return LocalDatabaseReader(ocdbt.Tree(self._manifest, self._files.read), self._files)
        store = self._store
        remote = self.location.is_remote
        fetch = ocdbt.AheadFetch(store) if remote else partial(ocdbt.fetch, store)
        return DatabaseReader(ocdbt.Tree(self._manifest, fetch), store)

    @cached_property
    def _files(self) -> RegularFiles | None:
        return self.location.regular_files()

    @cached_property
    def _store(self) -> KvStore:
        return self.location.store(self.context)

    def _read_manifest(self) -> tuple[bytes, bytes] | None:
        """The manifest in the folder, and the storage's name for its version; None if it is
        missing."""
        if self._files is not None:
            return self._files.read_manifest()
        read = self._store.read(ocdbt.MANIFEST).result()
        return (read.value, read.stamp.generation) if read.state == "value" else None

    def facts(self) -> nodes.Manifest:
        """The content of its manifest; reads nothing else.

        Raises:
            Failed: the manifest is missing or damaged.
        """
        manifest = self._manifest()
        if manifest is None:
            raise Damaged("the manifest is missing")
        return nodes.manifest(manifest)

    def pinned(self) -> Database | None:
        """The current database, with a copy of its manifest in memory; None if there is none.

        Later reads are consistent even if another checkpoint replaces this one, and no chunk costs
        a second request that checks for a newer manifest.
        """
        read = self._read_manifest()
        if read is None:
            return None
        pinned = replace(self, manifest=read[0], generation=read[1])
        pinned.__dict__.update(_files=self._files)  # not looked up again
        return pinned

    @cached_property
    def _manifest_store(self) -> Mapping[str, Any] | None:
        """The place of a manifest that TensorStore does not read from the folder: in memory, kept
        by the context."""
        if self.manifest is None:
            return None
        manifest_spec = ocdbt.manifest_in_memory(f"{digest_of(self.manifest)}/{self.location.url}")
        KvStore.open(manifest_spec, self.context).write(ocdbt.MANIFEST, self.manifest).result()
        return manifest_spec

    def restored(self) -> Database | None:
        """The same database with restorers, or without the first, which was not enough; None if
        there are no others.

        Raises:
            Failed: the storage failed.
        """
        from unickpt.storage.restorers import restorers_at  # only where something is damaged

        restorers = self.restorers[1:]
        if not self.restorers:
            restorers = restorers_at(self.location, self.context)
        return replace(self, restorers=restorers) if restorers else None

    def manifest_digest(self) -> str:
        """The digest of the pinned manifest, or else of the one in the folder; see `digest_of`."""
        return digest_of(self._manifest() or b"")

    def change(self) -> str:
        """What happened to a database since it was pinned: "" (nothing), "replaced", or "removed".

        Call it after finding missing or wrong data: replacing or removing a checkpoint changes the
        manifest first and the other files later.
        """
        if not self.generation:
            return ""
        now = self._read_manifest()
        if now is None:
            return "removed"
        # Not the bytes: those are the same after a copy was removed and made again.
        return "replaced" if now[1] != self.generation else ""

    def draft(self, data: str) -> tuple[KvStore, KvStore]:
        """A new database that is not visible yet: its data is in the folder, its manifest in
        memory.

        Writing that manifest into the folder atomically makes it the folder's database.

        Arguments:
            data: folder for nodes and values below this one, ending with `/`; used only once.

        Returns:
            The database, and the key-value store that holds its manifest.
        """
        manifest_spec = ocdbt.manifest_in_memory(data)
        database = ocdbt.spec(self.location.spec, manifest=manifest_spec, data=data)
        return KvStore.open(database, self.context), KvStore.open(manifest_spec, self.context)

    def _manifest(self) -> bytes | None:
        """The pinned manifest, or else the one in the folder."""
        if self.manifest is not None:
            return self.manifest
        read = self._read_manifest()
        return None if read is None else read[0]

    def __str__(self) -> str:
        return str(self.location)


def digest_of(manifest: bytes) -> str:
    """The digest of a manifest, which identifies a commit: 16 hexadecimal digits."""
    return f"{xxhash.xxh3_64_intdigest(manifest):016x}"
