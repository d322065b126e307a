"""Reads the values of a database in a local folder directly into existing memory."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

import numpy as np

from unickpt.arrays.dtypes import Array
from unickpt.storage import ocdbt
from unickpt.storage.btree.nodes import DataReference, NodeColumn
from unickpt.storage.errors import Damaged, Failed, system_calls
from unickpt.storage.kvstore import Future, KvStore
from unickpt.storage.local_files import RegularFiles
from unickpt.storage.ocdbt import ReadyResult

# Values that are read together; larger ones are read into their destination.
_MOST_BYTES = 128 << 10
_RUN_BYTES = 2 << 20
_GAP_BYTES = 4 << 10  # such as zarr metadata
_MOST_TOGETHER = 512  # the system takes 1,024 pieces of memory at once; half may be gaps
_PIECE_BYTES = 512 << 10  # which the cache of a core holds until it is hashed
_MOST_AT_ONCE = 1 << 30  # a system call reads less than 2 GiB


_Stored = tuple[int, int, str]  # where a value is in its file: offset, length; its key


class LocalDatabaseReader(ocdbt.DatabaseReader):
    """Reads values into existing memory.

    TensorStore reads a value into new memory or maps it, and then copies it: two thirds of this
    speed, as measured; and if a mapped file is truncated, the process is killed.

    Arguments:
        store: the key-value store of the folder.
        files: the files of the folder.
        tree: the database's B-tree.
    """

    def __init__(self, store: KvStore, files: RegularFiles, tree: ocdbt.Tree) -> None:
        super().__init__(store, tree)
        self._files = files

    def _bytes(self, reference: DataReference) -> bytes:
        return self._files.read(reference)

    def _check_file(self, path: str) -> None:
        self._files.check(path)

    def request_all(self, keys: Sequence[str]) -> dict[str, Future[Any] | ReadyResult]:
        """Reads values that lie beside each other in a file together."""
        found: dict[str, Future[Any] | ReadyResult] = {}
        with suppress(Failed):
            there: dict[str, list[_Stored]] = {}
            for leaf, numbers, at in self.tree.find_all(keys):
                names = [keys[number] for number in numbers]
                which, offsets = leaf.which[at].tolist(), leaf.offsets[at].tolist()
                lengths = leaf.lengths[at].tolist()
                for key, file, offset, length in zip(names, which, offsets, lengths, strict=True):
                    if file < 0:
                        found[key] = ReadyResult(leaf.inline[offset : offset + length])
                    elif length <= _MOST_BYTES:
                        there.setdefault(leaf.files[file][0], []).append((offset, length, key))
            for path, values in there.items():
                values.sort()
                for run in _runs(values):
                    found |= self._read_run(path, run)
        return found

    def _read_run(self, path: str, run: Sequence[_Stored]) -> dict[str, ReadyResult]:
        first = run[0][0]
        end = max(offset + length for offset, length, _ in run)
        data = memoryview(self._files.read(DataReference(path, first, end - first)))
        return {
            key: ReadyResult(data[offset - first : offset - first + length])
            for offset, length, key in run
        }

    def read_all(self, keys: Sequence[str], out: Sequence[Array]) -> Sequence[bool]:
        """Reads values that lie beside each other in a file together, each to where it belongs."""
        done = np.zeros(len(keys), bool)
        nbytes = np.array([to.nbytes for to in out], np.int64)
        with suppress(Failed):
            for leaf, numbers, at in self.tree.find_all(keys):
                there = np.array(numbers)
                fits = leaf.lengths[at] == nbytes[there]
                files, offsets = leaf.which[at], leaf.offsets[at].astype(np.int64)
                for position in np.flatnonzero(fits & (files < 0)).tolist():
                    number, offset = numbers[position], int(offsets[position])
                    value = leaf.inline[offset : offset + out[number].nbytes]
                    out[number].reshape(-1).view(np.uint8).data[:] = value
                    done[number] = True
                for file in sorted(set(files[fits & (files >= 0)].tolist())):
                    here = fits & (files == file)
                    rows = np.stack([there[here], offsets[here], nbytes[there[here]]])
                    self._read_beside(leaf.files[file][0], rows, out, done)
        return done.tolist()

    def _read_beside(
        self, path: str, rows: NodeColumn, out: Sequence[Array], done: NodeColumn
    ) -> None:
        """Reads values of a file.

        Arguments:
            path: the file.
            rows: of each value: its number, its offset, its length.
            out, done: by number, its memory and whether it was read.
        """
        numbers, begins, lengths = rows[:, np.argsort(rows[1], kind="stable")]
        gaps = np.concatenate([[0], begins[1:] - begins[:-1] - lengths[:-1]])
        cuts = np.flatnonzero((gaps < 0) | (gaps > _GAP_BYTES)).tolist()  # shared bytes, or far
        gap = np.empty(_GAP_BYTES, np.uint8)
        with self._files.opened(path) as handle:
            for first, stop in zip([0, *cuts], [*cuts, len(numbers)], strict=True):
                for at in range(first, stop, _MOST_TOGETHER):
                    run = slice(at, min(at + _MOST_TOGETHER, stop))
                    buffers: list[Any] = []
                    for number, skipped in zip(
                        numbers[run].tolist(), gaps[run].tolist(), strict=True
                    ):
                        if skipped and buffers:
                            buffers.append(gap[:skipped])
                        buffers.append(out[number])
                    with system_calls():
                        count = os.preadv(handle, buffers, int(begins[at]))
                    done[numbers[run]] = begins[run] + lengths[run] <= begins[at] + count

    def read_into(
        self,
        key: str,
        out: memoryview,
        length: int,
        look: Callable[[memoryview], object] | None = None,
    ) -> None:
        """Reads the first bytes of a value, as many as `out` takes.

        Arguments:
            key: of the value.
            out: contiguous bytes.
            length: of the value, in bytes.
            look: called with each piece that was read, while it is in the processor's cache.

        Raises:
            Damaged: the value is missing or incomplete, or the database is damaged.
            Failed: the storage failed.
        """
        found = self.tree.find(key)
        if found is None:
            raise Damaged(f"no bytes stored, {length} expected")
        if ocdbt.length_of(found) != length:
            raise Damaged(f"{ocdbt.length_of(found)} bytes stored, {length} expected")
        if isinstance(found, DataReference):
            self._read_into(found, out, look)
        else:
            out[:] = found[: len(out)]
            if look is not None:
                look(out)

    def read_each(
        self,
        keys: Sequence[str],
        out: Sequence[memoryview],
        lengths: Sequence[int],
        looks: Sequence[Callable[[memoryview], object]] | None = None,
    ) -> Sequence[bool]:
        """Reads large values one after the other, each as `read_into`.

        Between the pieces, next to no Python runs: what the processor's cache has lost since it ran
        last takes many times as long, and other threads wait for the GIL meanwhile.

        Returns:
            For each whether it was read; for the others, `read_into` says why not.
        """
        done = [False] * len(keys)
        values: list[tuple[str, int, list[tuple[memoryview, int]]]] = []
        most = _PIECE_BYTES if looks is not None else _MOST_AT_ONCE
        with suppress(Failed):
            for leaf, numbers, at in self.tree.find_all(keys):
                for number, entry in zip(numbers, at, strict=True):
                    found = leaf.find(entry)
                    if isinstance(found, DataReference) and found.length == lengths[number]:
                        to, begin = out[number], found.offset
                        pieces = [(to[a : a + most], begin + a) for a in range(0, len(to), most)]
                        values.append((found.path, number, pieces))
            for path, here in itertools.groupby(values, key=itemgetter(0)):
                with self._files.opened(path) as handle, system_calls():
                    for _, number, pieces in here:
                        look = None if looks is None else looks[number]
                        for piece, offset in pieces:
                            if os.preadv(handle, [piece], offset) != len(piece):
                                break
                            if look is not None:
                                look(piece)
                        else:
                            done[number] = True
        return done

    def _read_into(
        self,
        reference: DataReference,
        out: memoryview,
        look: Callable[[memoryview], object] | None,
    ) -> None:
        # Between the pieces, a thread needs the GIL: the less it does then, the less others wait.
        offset, most = reference.offset, _PIECE_BYTES if look is not None else len(out)
        with self._files.opened(reference.path) as handle, system_calls():
            while out:
                piece = out[:most]
                count = os.preadv(handle, [piece], offset)
                if look is not None:
                    look(piece if count == len(piece) else piece[:count])
                if count == 0:
                    path = self._files.folder + reference.path
                    raise Damaged(f"{path} ends at byte {offset}")
                offset, out = offset + count, out[count:]


def _runs(there: Sequence[_Stored]) -> Iterator[Sequence[_Stored]]:
    """Splits values of a file, in the order of their offsets, where a gap ends a run."""
    first = end = 0
    for at, (offset, length, _) in enumerate(there):
        far = offset - end > _GAP_BYTES or offset + length > there[first][0] + _RUN_BYTES
        if at > first and far:
            yield there[first:at]
            first, end = at, 0
        end = max(end, offset + length)
    if there:
        yield there[first:]
