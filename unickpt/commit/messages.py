"""Communication between the processes of one attempt, only through small objects in the storage.

Each process ends its part with a record. Errors and announcements are notes, which are stored apart
from the records, because every process lists them often.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeVar

import msgspec
import numpy as np
import tensorstore as ts
import xxhash

from unickpt.arrays.box import Box
from unickpt.errors import ProcessFailed, StorageError
from unickpt.format.chunk_grid import FULL_LINK
from unickpt.format.index import BaseEntry, Index, nbytes_of
from unickpt.frameworks.job_bytes import GroupBytes
from unickpt.frameworks.process_group import Group
from unickpt.quoting import error_message
from unickpt.storage import paths
from unickpt.storage.btree.builder import INLINE, PLACE_DTYPE, PLACE_FIELDS
from unickpt.storage.locations import Location
from unickpt.storage.tensorstore_calls import KvStore

T = TypeVar("T")

# `array` is the number of the array in the process's own description, `chunk` that of the chunk in
# the array's parts, in order (for arrays with boxes instead of a layout: in this process's boxes).
CHUNK_DTYPE = np.dtype([("array", "<u4"), ("chunk", "<u8"), ("digest", "<u8"), *PLACE_FIELDS])
# The place of a value that is added to a chunk: `row` is the position of the chunk in the record,
# `link` the position of the value in the chunk (`format.chunk_grid`).
ADDITION_DTYPE = np.dtype([("row", "<u8"), ("link", "<u4"), *PLACE_FIELDS])
ELSEWHERE = -2
"""Instead of a file: the value is in a sibling checkpoint; the offset says in which."""
# A fingerprint of an array that is assumed to be equal on all processes that have it.
REPLICA_DTYPE = np.dtype([("array", "<u4"), ("fingerprint", "<u8")])
_TABLES = CHUNK_DTYPE, ADDITION_DTYPE, REPLICA_DTYPE
NO_CHUNKS = np.zeros(0, CHUNK_DTYPE)
_SEAL_BYTES = 8
PLACE_NAMES = [name for name, _ in PLACE_FIELDS]
ValuePlace = tuple[int, int, int]
"""The place of a value: the number of its file, offset and length; see `PLACE_DTYPE`."""


@dataclass(frozen=True)
class Record:
    """The record of a process's output.

    Arguments:
        description: xxh3-64 of the process's encoded description.
        chunks: one element of `CHUNK_DTYPE` per chunk, with its place; for a chunk of several
            values, the place of the full chunk.
        files: the paths of the files with values, below the process's folder.
        inline: the values that are too small for a file, joined.
        boxes: for arrays that no layout describes, this process's boxes by array number.
        blobs: per-process values by name: size in bytes, xxh3-64, bytes of the head, and place.
        described: the place of the description; None for the coordinator's own, and for one that
            is a note, because the coordinator cannot read the process's data files.
        statistics: bytes and seconds, for the report.
        replaces: xxh3-64 of the root manifest that the process found, empty if it found none.
        replicas: one element of `REPLICA_DTYPE` for each array whose replication is assumed.
        checked: whether `replicas` cover every byte; else only a sample.
        bases: the sibling checkpoints from which values are borrowed.
        additions: one element of `ADDITION_DTYPE` for each value that is added to a chunk,
            ascending.
        extra: the codecs' notes about arrays, by codec and array number (`codec_protocol.Extra`).
        notes: the features' notes about the save of this process, by feature name.
        units: the step of each of its units, by key, if a save may leave some out.
        group_bytes: of the groups of replicas in which the process is the first (`JobBytes`).
        job: the digest of the `JobBytes` by which it shared out chunks; empty for none.
    """

    description: int
    chunks: np.ndarray[Any, Any]
    files: tuple[str, ...] = ()
    inline: bytes = b""
    boxes: Mapping[int, tuple[Box, ...]] = field(default_factory=dict)
    blobs: Mapping[str, tuple[int, int, int, ValuePlace]] = field(default_factory=dict)
    described: ValuePlace | None = None
    statistics: Mapping[str, int | float] = field(default_factory=dict)
    replaces: str = ""
    replicas: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0, REPLICA_DTYPE))
    checked: bool = False
    bases: tuple[BaseEntry, ...] = ()
    additions: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0, ADDITION_DTYPE))
    extra: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    units: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    group_bytes: tuple[GroupBytes, ...] = ()
    job: str = ""

    def with_statistics(self, more: Mapping[str, float]) -> Record:
        """The same with more statistics."""
        return replace(self, statistics={**self.statistics, **more})

    def encode(self) -> bytes:
        """The record as msgpack, and its xxh3-64."""
        body = msgspec.msgpack.encode(self, enc_hook=_as_bytes)
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(_SEAL_BYTES, "little")

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """Decodes a record; raises ValueError if the bytes are not one."""
        body, seal = memoryview(data)[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
        if xxhash.xxh3_64_intdigest(body).to_bytes(_SEAL_BYTES, "little") != seal:
            raise ValueError("the record does not match its checksum")
        try:
            record = msgspec.msgpack.decode(body, type=cls, ext_hook=_as_table)
            record._check()
        except (msgspec.MsgspecError, IndexError, OverflowError, RecursionError) as error:
            raise ValueError(f"the record is malformed: {error}") from None
        return record

    def _check(self) -> None:
        """Checks that all references are valid and below the process's folder.

        Raises:
            ValueError: one is not.
        """
        tables = self.chunks, self.additions, self.replicas
        if tuple(table.dtype for table in tables) != _TABLES:
            raise ValueError("a table has other columns")
        self._check_places(self.chunks, ELSEWHERE)
        self._check_places(self.additions, ELSEWHERE)
        places = [place for _, _, _, place in self.blobs.values()]
        places += [self.described] if self.described else []
        if any(min(place) < 0 or place[0] >= len(self.files) for place in places):
            self._check_places(np.array(places, PLACE_DTYPE), INLINE)
        for path in self.files:
            if path.startswith("/") or "\0" in path or ".." in path.split("/"):
                raise ValueError(f"{path[:200]!r} is not a file of the process")
        if not len(self.additions):
            return
        rows, links = self.additions["row"], self.additions["link"].astype(np.int64)
        is_next = (rows[1:] == rows[:-1]) & (links[1:] == links[:-1] + 1)
        is_first = (rows[1:] > rows[:-1]) & (links[1:] == FULL_LINK + 1)
        if (
            int(rows.max()) >= len(self.chunks)
            or int(links[0]) != FULL_LINK + 1
            or not (is_next | is_first).all()
        ):
            raise ValueError("the added values do not match its chunks")

    def _check_places(self, table: np.ndarray[Any, Any], least: int) -> None:
        """Checks a table with places.

        Arguments:
            table: the table.
            least: the lowest file that a place may have.

        Raises:
            ValueError: a place is not valid.
        """
        if not len(table):
            return
        file = table["file"]
        first = int(file.min())
        if first < least or int(file.max()) >= len(self.files):
            raise ValueError("a value is in a file that is not listed")
        if first >= 0:
            return
        size = np.uint64(len(self.inline))
        offset, length = (table[column][file == INLINE] for column in ("offset", "length"))
        if (length > size).any() or (offset > size - np.minimum(length, size)).any():
            raise ValueError("a value ends after all of them")
        if (table["offset"][file == ELSEWHERE] >= len(self.bases)).any():
            raise ValueError("it does not say where each value is")


def _as_bytes(table: np.ndarray[Any, Any]) -> msgspec.msgpack.Ext:
    """A table of a record: which of `_TABLES`, and its rows."""
    return msgspec.msgpack.Ext(_TABLES.index(table.dtype), table.tobytes())


def _as_table(which: int, rows: memoryview) -> np.ndarray[Any, Any]:
    """The same memory as a table."""
    return np.frombuffer(rows, _TABLES[which])


Records = Sequence[tuple[int, Record]]
"""Processes, and their records."""
Names = Sequence[Sequence[str]]
"""For each process the arrays that it has."""


def statistics_of(records: Records, more: Records) -> tuple[Mapping[str, float], ...]:
    """The statistics of each process, including its later writes."""
    statistics = [dict(record.statistics) for _, record in records]
    for process, record in more:
        for name, value in record.statistics.items():
            statistics[process][name] = statistics[process].get(name, 0) + value
    return tuple(statistics)


OK, MORE = ".ok", ".more"
FAILED: Final = "failed"
Verb = Literal["failed", "died", "is silent"]
"""How a process has ended: as it said itself; or as others see, as its id, or its signs of life,
are gone."""
REQUEST, DESCRIPTION, JOB_BYTES = "request", "description-{:016x}", "job-{}"
REQUESTED = dict[int, dict[str, list[int]]]
"""A request: for each process, arrays and the positions of their chunks; nothing for a process
whose part others write (`stand_ins`)."""
_PAUSE_PER_POLL = 4
"""How many times as long as the last poll the longest pause may be; the coordinator's lists the
records of all processes."""
_COMMIT, _ERROR, _LEFT = "commit", "error-", "left-"
_ERROR_NAME = re.compile(_ERROR + r"(\d{5,9})")
_LEFT_NAME = re.compile(_LEFT + r"(\d{5,9})-(\d{1,4})")


class Notes:
    """Records and notes of one attempt.

    Arguments:
        folder: the attempt's folder.
        group: the processes.
        context: the TensorStore context of this save.
        timeout_s: how long to wait for other processes.
    """

    def __init__(
        self, folder: Location, group: Group, context: ts.Context, timeout_s: float
    ) -> None:
        self._folder, self._group, self._context = folder, group, context
        self._timeout_s = timeout_s
        self._records = folder.child("records").store(context)
        self._notes = folder.child("notes").store(context)
        self._unwritten = b""
        self._polled = time.monotonic()
        self.settled = False
        """Whether a process that gave up reported that no process can commit."""

    # --- this process --------------------------------------------------------------------------

    def check_reachable(self) -> None:
        """Lists the notes, which do not exist yet; raises the storage's error."""
        self._notes.list().result()

    def was_used(self) -> bool:
        """Whether this process, or the coordinator, has already published anything here."""
        notes = _list(self._notes)
        if not notes.isdisjoint((_COMMIT, f"{_ERROR}{self._group.index:05d}")):
            return True
        own_record = self._records.read(f"{self._group.index:05d}{OK}")
        return bool(own_record.result().state == "value")

    def publish(self, record: Record, kind: str) -> None:
        """Writes this process's record, which ends its part."""
        self._records.write(f"{self._group.index:05d}{kind}", record.encode()).result()

    def publish_error(self, error: BaseException, *, settles: bool, refused: bool) -> None:
        """Reports to the others why this process gives up; `retry_error` retries.

        Arguments:
            error: what happened.
            settles: whether it is certain that no process can commit.
            refused: whether this process did not start, because of an earlier error.
        """
        self._unwritten = msgspec.json.encode(_ErrorNote(error_message(error), settles, refused))
        self.retry_error()

    def retry_error(self) -> None:
        """Writes an error that could not be written before."""
        with suppress(Exception):  # the storage itself may be what failed
            if self._unwritten:
                self._notes.write(f"{_ERROR}{self._group.index:05d}", self._unwritten).result()
                self._unwritten = b""

    def leave(self, made: int) -> tuple[set[int], int]:
        """Reports that this process, which gave up, no longer writes or reads here.

        Arguments:
            made: how many folders did not exist when this process started.

        Returns:
            The processes that have left so far, this one included, and the largest such number.
        """
        self._notes.write(f"{_LEFT}{self._group.index:05d}-{made}", b"").result()
        with suppress(ProcessFailed):  # it updates `settled`
            self.poll()
        matches = [match for name in _list(self._notes) if (match := _LEFT_NAME.fullmatch(name))]
        return {int(match[1]) for match in matches}, max(int(match[2]) for match in matches)

    # --- the others ----------------------------------------------------------------------------

    @property
    def pause_s(self) -> float:
        """The longest pause between two quick polls; for all but the coordinator, it grows with the
        number of processes."""
        count = self._group.count if self._group.index else 1
        return max(1.0, count / 1000) if self._folder.is_remote else max(0.1, count / 4000)

    def poll_now_and_then(self) -> None:
        """As `poll`, but limits the rate of all processes together."""
        if time.monotonic() - self._polled > self.pause_s:
            self.poll()

    def poll(self) -> set[str]:
        """The names of all notes.

        Raises:
            ProcessFailed: with the message of a process that gave up.
        """
        self._polled = time.monotonic()
        notes = _list(self._notes)
        matches = (_ERROR_NAME.fullmatch(name) for name in notes)
        errors = sorted({int(match[1]) for match in matches if match} - {self._group.index})
        if errors:
            read = [self._notes.read(f"{_ERROR}{process:05d}") for process in errors[:8]]
            error_notes = [parse_note(r.result().value, _ErrorNote) or _ErrorNote() for r in read]
            if any(note.settles for note in error_notes):
                replaced = replaced_in(self._folder.store(self._context))
                pairs = zip(errors, error_notes, strict=False)
                self.settled |= any(note.settles and p not in replaced for p, note in pairs)
            # Of a process that died, rather than of those that have learned of it.
            process, note = next(
                (pair for pair in zip(errors, error_notes, strict=False) if pair[1].verb != FAILED),
                (errors[0], error_notes[0]),
            )
            error = ProcessFailed(f"process {process} {note.verb}: {note.message}")
            error.refused = all(note.refused for note in error_notes)
            raise error
        return notes

    def wait(self, ready: Callable[[set[str]], bool]) -> set[str]:
        """Polls until `ready` returns True; returns the names of the notes.

        Raises:
            ProcessFailed: as `poll`.
            TimeoutError: it took too long.
        """
        began, pause = time.monotonic(), 0.002
        deadline = began + self._timeout_s
        while not ready(notes := self.poll()):
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError
            time.sleep(pause)
            pause = min(pause * 1.5, max(self.pause_s, _PAUSE_PER_POLL * (now - began)))
            began = time.monotonic()
        return notes

    def late(self, processes: Iterable[int], kind: str) -> list[int]:
        """The processes, among the given ones, whose records are missing."""
        record_names = _list(self._records)
        return [process for process in processes if f"{process:05d}{kind}" not in record_names]

    def records(self, processes: Iterable[int], kind: str) -> list[tuple[int, Record]]:
        """The records of some processes, which must exist.

        Raises:
            StorageError: one cannot be decoded.
        """
        context = paths.for_small_objects(self._context)
        store = self._folder.child("records").store(context)
        reads = [(process, store.read(f"{process:05d}{kind}")) for process in processes]
        records = []
        for process, read in reads:
            try:
                records.append((process, Record.decode(read.result().value)))
            except ValueError as error:
                raise StorageError(f"{self._folder}: process {process}: {error}") from None
        return records

    def put(self, name: str, value: bytes) -> None:
        """Writes a note of another kind; its name is none of those above."""
        self._notes.write(name, value).result()

    def get(self, name: str) -> bytes:
        """The value of a note that exists."""
        value: bytes = self._notes.read(name).result().value
        return value

    # --- announcements of the coordinator ------------------------------------------------------

    def request(self, requests: Mapping[int, Mapping[str, list[int]]]) -> None:
        """Requests chunks: for each process, arrays and the positions of their chunks."""
        self._notes.write(REQUEST, msgspec.json.encode(requests)).result()

    def requested(self) -> dict[str, list[int]] | None:
        """The chunks that the coordinator requests from this process; None if it does not need
        what this process has written.

        Raises:
            StorageError: the request cannot be decoded.
        """
        data = self._notes.read(REQUEST).result().value
        request = parse_note(data, REQUESTED)
        if request is None:
            raise StorageError(f"{self._folder}: the note {REQUEST!r} of process 0 is damaged")
        ours = request.get(self._group.index)
        if ours == {}:
            return None
        return ours or {}

    def announce(self, announcement: Announcement) -> None:
        """Announces the commit that is about to happen."""
        self._notes.write(_COMMIT, msgspec.json.encode(announcement)).result()

    def announced(self) -> Announcement | None:
        """The announcement; None if it is not visible yet, or cannot be decoded."""
        return parse_note(self._notes.read(_COMMIT).result().value, Announcement)

    def clear_records(self) -> None:
        """Removes the records, which are not needed after the commit."""
        self._folder.child("records").remove(self._context)


def end_note(process: int, verb: Verb, evidence: str) -> tuple[str, bytes]:
    """The name and the value of a note about a process that has ended without one. It settles
    nothing: the last request of the process may still arrive.

    Arguments:
        process: which one.
        verb, evidence: how its end was found.
    """
    return f"{_ERROR}{process:05d}", msgspec.json.encode(_ErrorNote(evidence, verb=verb))


def replaced_in(attempt: KvStore) -> set[int]:
    """The processes whose part others write, as far as the coordinator has requested that.

    Arguments:
        attempt: the store of the attempt's folder.
    """
    request = parse_note(attempt.read(f"notes/{REQUEST}").result().value, REQUESTED) or {}
    return {process for process, chunks in request.items() if not chunks}


def _list(store: KvStore) -> set[str]:
    return {key.decode(errors="replace") for key in store.list().result()}


@dataclass(frozen=True)
class Totals:
    """Number of arrays of a checkpoint, and their logical bytes."""

    arrays: int
    nbytes: int

    @classmethod
    def from_index(cls, index: Index) -> Totals:
        """The totals of an index."""
        nbytes = sum(nbytes_of(entry.shape, entry.dtype) for entry in index.arrays.values())
        return cls(len(index.arrays), nbytes)


@dataclass(frozen=True)
class Announcement:
    """The commit that the coordinator is about to make.

    Arguments:
        root: the digest of the root's manifest.
        totals: of the checkpoint.
        replaced: the totals of the last checkpoints that it replaces, by the names of their
            attempts.
        job: the digest of the job's `JobBytes`, for the next saves; empty if they do not matter.
    """

    root: str
    totals: Totals
    replaced: Mapping[str, Totals]
    job: str = ""


@dataclass(frozen=True)
class _ErrorNote:
    """The note of a process that gave up, or died; see `Notes.publish_error`."""

    message: str = "its error message cannot be read"
    settles: bool = False
    refused: bool = False
    verb: Verb = FAILED


def parse_note(data: bytes | str, kind: type[T]) -> T | None:
    """A note, which is untrusted; None if the bytes are not one, as those of a note that is
    missing."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


WriteMore = Callable[[Mapping[str, list[int]]], Record]
"""Writes the chunks at some positions of arrays; returns the record of these."""
