"""One export, by all processes of a job: each writes its part, the first one completes it."""

from __future__ import annotations

import functools
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from operator import attrgetter

import numpy as np

from unickpt import LoadOptions, errors
from unickpt.extend import (
    Array,
    Buffered,
    Failed,
    HostBuffers,
    MemoryBudget,
    Notes,
    Plan,
    PlannedFile,
    SlabReads,
    View,
    check_rest,
    check_same_source,
    combined_crc32,
    dtype_from_name,
    in_batches,
    read_boxes,
    room_text,
    system_calls,
    writing_failed,
)
from unickpt.plugins.export.destinations import ExportDestination, Write
from unickpt.plugins.export.file_pieces import FilePiece, FileShare, FileSplitter
from unickpt.types import Group

# Shares of the budget: a slab that is written, one that is read ahead, and the memory of reading
# it.
_SLABS = 6
_COPIED_AT_ONCE = 8 << 20
Sums = dict[str, dict[int, tuple[int, int]]]
"""By file and number of its data: CRC-32 and length, in bytes, of a process's part of it."""


class ExportJob:
    """Writes the files of a plan.

    Arguments:
        view: the source.
        plan: the files, the same on all processes.
        destination: where they go.
        group: the processes.
        budget_bytes: of memory, for each process.
        timeout_s: how long to wait for other processes.
        progress: called with this process's bytes written so far and in total.
    """

    def __init__(
        self,
        view: View,
        plan: Plan,
        destination: ExportDestination,
        group: Group,
        budget_bytes: int,
        timeout_s: float,
        progress: Callable[[int, int], None],
    ) -> None:
        self._view, self._plan, self._to, self._group = view, plan, destination, group
        self._slab_bytes = max(1, budget_bytes // _SLABS)
        self._reading = LoadOptions(budget_bytes=MemoryBudget(self._slab_bytes, "process"))
        self._buffers = HostBuffers(2 * self._slab_bytes)
        self._timeout_s, self._progress = timeout_s, progress
        self._entries = {
            name: replace(entry, dtype=plan.casts.get(name, entry.dtype))
            for name, entry in view.index.arrays.items()
        }
        itemsizes = {n: dtype_from_name(e.dtype).itemsize for n, e in self._entries.items()}
        self._pieces = FileSplitter(itemsizes)
        self._notes: Notes | None = None
        self.written_bytes = self.count = 0
        """Bytes of arrays that this process wrote, and in how many pieces."""

    def check(self, most: int, requested: MemoryBudget) -> None:
        """Checks that the destination can take the files.

        Arguments:
            most: bytes of a file that it takes.
            requested: the budget that `most` follows from.

        Raises:
            UnsupportedLeaf: a file is too large.
        """
        for file in self._plan.files:
            if file.size > most:
                least = -(-file.size * requested.bytes // most)
                raise errors.UnsupportedLeaf(
                    f"{self._to.name}: {file.name} has {file.size} bytes, but object storage "
                    f"receives each file as a whole, at most {most} bytes here; use "
                    f"budget_bytes={least}, smaller files, or a local path"
                )

    def run(self, overwrite: bool, verify: Callable[[], None]) -> None:
        """Writes everything; returns when the checkpoint exists.

        Arguments:
            overwrite: whether to replace an existing checkpoint.
            verify: checks this process's part of the written files, before they replace anything
                where that is possible. If it raises, none of them remains.

        Raises:
            CheckpointExists: the destination is in use.
            CheckpointReplaced: the processes opened different sources.
            SaveConflict: the group's session was used before, or another export is under way.
            ProcessFailed, SaveTimeout: another process failed, or is late.
            StorageError: the storage failed.
        """
        if self._group.count > 1:
            self._notes = Notes(self._to.notes, self._group, self._to.context, self._timeout_s)
        is_first = self._group.index == 0
        with self._translating(), self._together():
            if is_first:
                self._check_new()
                self._to.check(overwrite)
            self._after_first("begin")
            source = self._view.checkpoint
            own_part = source.identity, source.label, self._write_own()
            every = self._from_all("done", json.dumps(own_part).encode())
            if is_first:
                parts = list(map(json.loads, every))
                check_same_source({n: (part[0], part[1]) for n, part in enumerate(parts)})
                self._complete([_sums(sums) for _, _, sums in parts])
            self._after_first("written")
            try:
                verify()
            except errors.CheckpointCorrupt:
                if self._notes is not None:
                    self._notes.poll()  # or did another fail, and remove its files?
                raise
            self._from_all("verified", b"")
            if is_first:
                self._to.commit(self._plan.files)
            self._after_first("committed")

    # --- the other processes -------------------------------------------------------------------

    def _after_first(self, note: str) -> None:
        """Continues when the first process is here."""
        if self._notes is None:
            return
        if self._group.index == 0:
            self._notes.put(note, b"")
        else:
            self._wait(self._notes, lambda notes: note in notes)

    def _from_all(self, note: str, data: bytes) -> Iterable[bytes]:
        """The messages of all processes, for the first one, which waits for all; read on use."""
        if self._notes is None:
            return [data]
        names = [f"{note}-{process:05d}" for process in range(self._group.count)]
        self._notes.put(names[self._group.index], data)
        if self._group.index > 0:
            return []
        self._wait(self._notes, lambda notes: notes.issuperset(names))
        return map(self._notes.get, names)

    def _check_others(self) -> None:
        """Raises if another process has failed."""
        if self._notes is not None:
            self._notes.poll_now_and_then()

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except Failed as error:
            nbytes = sum(map(self._pieces.nbytes, self._plan.files))
            room = room_text(self._to.folder, error, nbytes, self._to.partial)
            raise writing_failed(error, f"exporting to {self._to.name}", room) from error

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Reports an error to the others; the last process that leaves removes the remains."""
        notes, failed = self._notes, True
        try:
            yield
            failed = False
        except BaseException as error:
            if notes is not None and not isinstance(error, errors.ProcessFailed):
                notes.publish_error(error, settles=True, refused=False)
            with suppress(Exception):
                self._to.discard()
            raise
        finally:
            with suppress(Exception):
                left = 1 if notes is None else len(notes.leave(0)[0])
                if left == self._group.count and failed:
                    self._to.discard_all()
                if left == self._group.count and notes is not None:
                    self._to.notes.remove(self._to.context)
            self._to.close()

    def _check_new(self) -> None:
        """Refuses the name of an attempt that was used before, whose notes would count as new."""
        if self._notes is not None and self._notes.poll():
            raise errors.SaveConflict(
                f"{self._to.name}: this attempt to export was made before; the session of a "
                "ProcessGroup must be new for every run of the job"
            )

    def _wait(self, notes: Notes, ready: Callable[[set[str]], bool]) -> None:
        try:
            notes.wait(ready)
        except TimeoutError:
            raise errors.SaveTimeout(
                f"{self._to.name}: other processes did not finish within {self._timeout_s:g} s; "
                "all must call convert in the same way (see SaveOptions.timeout_s)"
            ) from None

    # --- this process's part -------------------------------------------------------------------

    def _write_own(self) -> Sums:
        """Writes this process's part of all files but those that one process writes at the end."""
        index, count = self._group.index, self._group.count
        files = [file for file in self._plan.files if not self._is_left(file)]
        with_data = [file for file in files if file.data]
        shares = self._pieces.shares(with_data, index, count, self._to.whole_files)
        left = sum(s.end - s.begin for s in shares)
        if index == 0:
            left += sum(map(self._pieces.nbytes, filter(self._is_left, self._plan.files)))
        self._total = left
        sums: Sums = {}
        for share in shares:
            with self._to.opened(share.file) as write:
                share_sums = self._write_share(share, write)
                if self._to.whole_files:
                    self._write_texts(share.file, [share_sums], write)
                elif share.file.ending is not None:
                    sums[share.file.name] = share_sums
        for file in [file for file in files if not file.data][index::count]:
            self._write_dataless(file)
            self._check_others()
        check_rest(self._view.checkpoint, self._group)
        return sums

    def _is_left(self, file: PlannedFile) -> bool:
        """Whether a file is written by one process, after all others."""
        return file.last and (self._to.whole_files or not file.data)

    def _write_share(self, share: FileShare, write: Write) -> dict[int, tuple[int, int]]:
        sums: dict[int, tuple[int, int]] = {}
        pieces = list(self._pieces.cut(share, self._slab_bytes))
        slabs = in_batches(pieces, None, self._slab_bytes, attrgetter("nbytes"))
        with closing(SlabReads(slabs, self._read_slab)) as read:
            for piece in pieces:
                array, memory = read.take(piece)
                data = _bytes_of(array)
                write(piece.offset, data)
                if share.file.ending is not None:
                    crc, length = sums.get(piece.data, (0, 0))
                    sums[piece.data] = zlib.crc32(data, crc), length + piece.nbytes
                del data, array
                self._buffers.give(memory)
                self.written_bytes += piece.nbytes
                self.count += 1
                self._progress(self.written_bytes, self._total)
                self._check_others()
        return sums

    def _read_slab(self, slab: Sequence[FilePiece]) -> list[Buffered]:
        boxes = [(self._entries[piece.array], piece.box) for piece in slab]
        return read_boxes(self._view, boxes, self._reading, self._buffers)

    # --- files as a whole ----------------------------------------------------------------------

    def _complete(self, sums: Sequence[Sums]) -> None:
        """Writes the bytes that all processes' parts lack; only for the first process."""
        for file in self._plan.files:
            if file.data and not self._to.whole_files:
                of_file = [of_process.get(file.name, {}) for of_process in sums]
                with self._to.opened(file) as write:
                    self._write_texts(file, of_file, write)
        self._to.check_ours()
        for file in filter(self._is_left, self._plan.files):
            if not file.data:
                self._write_dataless(file)
                continue
            with self._to.opened(file) as write:
                share = FileShare(file, 0, self._pieces.nbytes(file))
                self._write_texts(file, [self._write_share(share, write)], write)
        check_rest(self._view.checkpoint, self._group)

    def _write_dataless(self, file: PlannedFile) -> None:
        with self._to.opened(file) as write:
            if file.copied is None:
                self._write_texts(file, [], write)
                return
            offset = 0
            with system_calls(), open(file.copied, "rb") as source:
                while part := source.read(_COPIED_AT_ONCE):
                    write(offset, memoryview(part))
                    offset += len(part)
            if offset != file.size:
                raise errors.StorageError(f"{file.copied} changed while it was copied")

    def _write_texts(
        self, file: PlannedFile, sums: Sequence[Mapping[int, tuple[int, int]]], write: Write
    ) -> None:
        for offset, text in file.texts.items():
            write(offset, memoryview(text))
        if file.ending is not None:
            every = []
            for number in range(len(file.data)):  # the processes' parts, one after the other
                parts = (of_process[number] for of_process in sums if number in of_process)
                every.append(functools.reduce(lambda crc, x: combined_crc32(crc, *x), parts, 0))
            for offset, text in file.ending(every).items():
                write(offset, memoryview(text))


def _bytes_of(array: Array) -> memoryview:
    little = array if sys.byteorder == "little" else array.byteswap()
    return np.ascontiguousarray(little).reshape(-1).view(np.uint8).data


def _sums(decoded: Mapping[str, Mapping[str, Sequence[int]]]) -> Sums:
    return {
        name: {int(n): (int(crc), int(length)) for n, (crc, length) in of_file.items()}
        for name, of_file in decoded.items()
    }
