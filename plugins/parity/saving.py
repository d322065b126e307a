"""Writes parity files, while data files are written."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from unickpt.extend import (
    ADDED_FOLDER,
    LINKED_FOLDER,
    FileObserver,
    FileView,
    Location,
    SaveFeature,
    quoted,
    storage_context,
    sync_folder,
)
from unickpt.plugins.parity.codes import MOST_FILES, MOST_SUMS, PIECE_BYTES, ParitySums, solve
from unickpt.plugins.parity.files import FolderFiles, digest
from unickpt.plugins.parity.tables import LIST, GroupTable, encode


@dataclass(frozen=True)
class Parity(SaveFeature):
    """Writes parity files; `SaveOptions(parity=(8, 1))` is short for it.

    Arguments:
        counts: how many data files are in a group, and how many parity files: 1 or 2.

    Raises:
        TypeError, ValueError: they are not two such numbers.
    """

    counts: tuple[int, int]
    name = "parity"

    def __post_init__(self) -> None:
        counts: Any = self.counts
        if not isinstance(counts, tuple | list) or [type(n) for n in counts] != [int, int]:
            raise TypeError(f"parity={quoted(counts)} must be two numbers, such as (8, 1)")
        if not (1 <= counts[0] <= MOST_FILES and 1 <= counts[1] <= MOST_SUMS):
            raise ValueError(
                f"parity={quoted(counts)}: a group has 1 to {MOST_FILES} data files, and 1 to "
                f"{MOST_SUMS} parity files"
            )

    def file_observer(self, folder: Location, *, fsync: bool) -> FileObserver:
        """Writes the parity files of a folder."""
        return ParityWriter(folder, *self.counts, fsync=fsync)

    def encode(self, pieces: Sequence[bytes]) -> list[bytes]:
        """The sums of some pieces, each as long as the longest; others count as filled with zeros.

        Arguments:
            pieces: at most as many as `counts` has.
        """
        sums = ParitySums(self.counts[1])
        for piece in pieces:
            sums.add([memoryview(piece)], len(piece))
        return [np.concatenate(parts).tobytes() for parts in sums.sums()]

    def decode(self, pieces: Sequence[bytes | None], sums: Mapping[int, bytes]) -> dict[int, bytes]:
        """The pieces that are None, by their numbers, each as long as the sums.

        Arguments:
            pieces: as for `encode`.
            sums: what `encode` returned, by number; at least as many as pieces are None.
        """
        lost = [number for number, piece in enumerate(pieces) if piece is None]
        length = max(map(len, sums.values()))
        padded = [(piece or b"").ljust(length, b"\0") for piece in pieces]
        differences = {
            number: np.frombuffer(total, np.uint8) ^ np.frombuffer(sums[number], np.uint8)
            for number, total in enumerate(self.encode(padded))
            if number in sums
        }
        solved = solve(lost, len(pieces), differences)
        return {number: data.tobytes() for number, data in solved.items()}


@dataclass
class _OpenGroup:
    """Files that are being added.

    Arguments:
        sums: of the files.
        expected: how many files were assigned to it.
        files: path, bytes and digest of each, in the order in which they were added.
        added: how many were added completely.
    """

    sums: ParitySums
    expected: int = 0
    files: list[list[Any]] = field(default_factory=list)
    added: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, path: str, parts: Iterable[memoryview], nbytes: int) -> int:
        """Adds a file, which several threads may do; returns how many were added."""
        hasher = xxhash.xxh3_128()

        def hashed() -> Iterator[memoryview]:
            for part in parts:
                for start in range(0, len(part), PIECE_BYTES):
                    piece = part[start : start + PIECE_BYTES]
                    hasher.update(piece)
                    yield piece

        facts = [path, nbytes, ""]
        self.sums.add(hashed(), nbytes, begin=lambda: self.files.append(facts))
        facts[2] = hasher.hexdigest()
        with self.lock:
            self.added += 1
            return self.added

    def note(self, path: str, nbytes: int, digest: str) -> int:
        """Notes a file whose pieces were added to the single sum; returns how many were added."""
        with self.lock:
            self.files.append([path, nbytes, digest])
            self.sums.nbytes = max(self.sums.nbytes, nbytes)
            self.added += 1
            return self.added


class _ParityView:
    """Adds a file to a group: to a single sum while it is written, as its bytes are in the CPU's
    cache; to two sums afterwards, since these need the files in an order.

    Arguments:
        writer: has the groups.
    """

    def __init__(self, writer: ParityWriter) -> None:
        self._writer, self._hasher = writer, xxhash.xxh3_128()
        self._group: _OpenGroup | None = None
        self._nbytes = 0

    def add(self, piece: memoryview) -> None:
        """Adds a piece to a single sum."""
        if self._writer.buffers > 1:
            return
        if self._group is None:
            self._group = self._writer.join()
        self._hasher.update(piece)
        self._group.sums.add_piece(self._nbytes, piece)
        self._nbytes += len(piece)

    def complete(self, path: str, parts: Sequence[memoryview]) -> None:
        """Adds the file; writes the parity files of a group that is complete."""
        if self._group is None:
            group = self._writer.join()
            count = group.add(path, parts, sum(map(len, parts)))
        else:
            group = self._group
            count = group.note(path, self._nbytes, self._hasher.hexdigest())
        self._writer.added(path, group, count)


class ParityWriter:
    """Adds up the files of a folder in groups, and writes their parity files.

    Arguments:
        folder: of a process, or of the B-tree.
        multiple: files in a group.
        buffers: parity files of a group.
        fsync: whether the list of groups is flushed to disk. Parity files are not waited for: what
            a power failure leaves of them is found by their digests, and `repair` rewrites them.
    """

    def __init__(self, folder: Location, multiple: int, buffers: int, *, fsync: bool) -> None:
        self.multiple, self.buffers = multiple, buffers
        self._files, self._fsync = FolderFiles(folder, storage_context()), fsync
        self._spare = list[Any]()
        self._seen, self._open = set[str](), self._new_group()
        self._lock, self._tables = threading.Lock(), list[GroupTable]()

    def _new_group(self) -> _OpenGroup:
        return _OpenGroup(ParitySums(self.buffers, self._spare))

    def begin(self) -> FileView:
        """Adds a data file."""
        return _ParityView(self)

    def join(self) -> _OpenGroup:
        """The group of a file."""
        with self._lock:
            group = self._open
            group.expected += 1
            if group.expected == self.multiple:
                self._open = self._new_group()
            return group

    def added(self, path: str, group: _OpenGroup, count: int) -> None:
        """Writes the parity files of a group to which so many files were added, the last of which
        is this, if that is all."""
        with self._lock:
            self._seen.add(path)
        if count == self.multiple:
            self._write(group)

    def end(self, paths: Sequence[str]) -> None:
        """Writes the parity files of the last group, and of files that were linked."""
        group, self._open = self._open, self._new_group()
        if group.files:
            self._write(group)
        # Apart: a copy of the checkpoint may have linked files elsewhere.
        for is_linked in (False, True):
            unseen = [path for path in paths if path not in self._seen]
            unseen = [p for p in unseen if p.startswith(f"{LINKED_FOLDER}/") == is_linked]
            sizes = {path: self._files.size(path) for path in unseen}
            unseen.sort(key=sizes.__getitem__, reverse=True)  # equal ones share a group
            for first in range(0, len(unseen), self.multiple):
                group = self._new_group()
                for path in unseen[first : first + self.multiple]:
                    group.add(path, self._files.pieces(path, sizes[path]), sizes[path])
                self._write(group)
            self._seen.update(unseen)
        if self._tables:
            self._files.replace(f"{ADDED_FOLDER}/{LIST}", [encode(self._tables)], fsync=self._fsync)
        location = self._files.location
        if self._fsync and location.is_local and self._tables:
            sync_folder(location.path)

    def _write(self, group: _OpenGroup) -> None:
        sums = group.sums.sums()
        names = [_new_name(group.sums.nbytes, self._files.location.is_local) for _ in sums]
        parity = [
            (name, digest(part.data for part in total))
            for name, total in zip(names, sums, strict=True)
        ]
        table = GroupTable([(path, nbytes, d) for path, nbytes, d in group.files], parity)
        self._tables.append(table)
        end = encode([table])
        for name, total in zip(names, sums, strict=True):
            views: list[memoryview] = [part.data for part in total]
            self._files.write(name, [*views, end])
        group.sums.release()


def _new_name(nbytes: int, is_local: bool) -> str:
    """The path of a new file; in object storage with its time and bytes, as for data files."""
    name = f"{ADDED_FOLDER}/{os.urandom(16).hex()}"
    return name if is_local else f"{name}-{time.time_ns() // 1_000_000:x}-{nbytes:x}"
