"""Communication between the processes of one attempt, only through small objects in the storage.

Each process ends its part with a record. Errors and announcements are notes, which are stored apart
from the records, because every process lists them often.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

import tensorstore as ts

from unickpt.commit.record import Record
from unickpt.errors import ProcessFailed, StorageError
from unickpt.frameworks.process_group import Group
from unickpt.storage.kvstore import Future, KvStore
from unickpt.storage.locations import Location

OK, MORE = ".ok", ".more"
REQUEST = "request"
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
        """Whether a process that gave up reported that no process can commit any more."""

    # --- this process --------------------------------------------------------------------------

    def check_reachable(self) -> None:
        """Lists the notes, which do not exist yet; raises the storage's error."""
        self._notes.list().result()

    def was_used(self) -> bool:
        """Whether this process, or the coordinator, has published anything here before."""
        notes = _list(self._notes)
        if not notes.isdisjoint((_COMMIT, f"{_ERROR}{self._group.index:05d}")):
            return True
        return bool(self._records.read(self._own(OK)).result().state == "value")

    def publish(self, record: Record, kind: str) -> None:
        """Writes this process's record, which ends its part."""
        self._records.write(self._own(kind), record.encode()).result()

    def publish_error(self, error: BaseException, *, settles: bool, refused: bool) -> None:
        """Reports to the others why this process gives up; `retry_error` retries.

        Arguments:
            error: what happened.
            settles: whether it is certain that no process can commit any more.
            refused: whether this process did not start, because of an earlier error.
        """
        message = str(error) or type(error).__name__
        note = {"message": message, "hopeless": settles, "refused": refused}
        self._unwritten = json.dumps(note).encode()
        self.retry_error()

    def retry_error(self) -> None:
        """Writes an error that could not be written before."""
        with suppress(Exception):  # the storage itself may be what failed
            if self._unwritten:
                self._notes.write(f"{_ERROR}{self._group.index:05d}", self._unwritten).result()
                self._unwritten = b""

    def leave(self, made: int) -> tuple[set[int], int]:
        """Reports that this process, which gave up, neither writes nor reads here any more.

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

    def _own(self, kind: str) -> str:
        return f"{self._group.index:05d}{kind}"

    # --- the others ----------------------------------------------------------------------------

    @property
    def pause_s(self) -> float:
        """The longest pause between two polls; the more processes, the less often each polls."""
        count = self._group.count
        return max(1.0, count / 1000) if self._folder.is_remote else max(0.1, count / 4000)

    def poll_now_and_then(self) -> None:
        """As `poll`, but not more often than all processes together should."""
        if self._group.count > 1 and time.monotonic() - self._polled > self.pause_s:
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
            found = [_error_note(r.result().value) for r in read]
            self.settled = self.settled or any(note.settles for note in found)
            error = ProcessFailed(f"process {errors[0]} failed: {found[0].message}")
            error.refused = all(note.refused for note in found)
            raise error
        return notes

    def wait(self, ready: Callable[[set[str]], bool]) -> set[str]:
        """Polls until `ready` returns True; returns the names of the notes.

        Raises:
            ProcessFailed: as `poll`.
            TimeoutError: it took too long.
        """
        deadline, pause = time.monotonic() + self._timeout_s, 0.002
        while not ready(notes := self.poll()):
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(pause)
            pause = min(pause * 1.5, self.pause_s)
        return notes

    def late(self, processes: Iterable[int], kind: str) -> list[int]:
        """The processes, among the given ones, whose records are missing."""
        there = _list(self._records)
        return [process for process in processes if f"{process:05d}{kind}" not in there]

    def records(self, processes: Iterable[int], kind: str) -> list[tuple[int, Record]]:
        """The records of some processes, which must exist.

        Raises:
            StorageError: one cannot be decoded.
        """
        reads = [(process, self._records.read(f"{process:05d}{kind}")) for process in processes]
        return [(process, self._decode(process, read)) for process, read in reads]

    def _decode(self, process: int, read: Future[ts.KvStore.ReadResult]) -> Record:
        try:
            return Record.decode(read.result().value)
        except ValueError as error:
            raise StorageError(f"{self._folder}: process {process}: {error}") from None

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
        self._notes.write(REQUEST, json.dumps(requests).encode()).result()

    def requested(self) -> dict[str, list[int]]:
        """The chunks that the coordinator requests from this process.

        Raises:
            StorageError: the request cannot be decoded.
        """
        requests = _object(self._notes.read(REQUEST).result().value)
        if requests is None:
            raise StorageError(f"{self._folder}: the note {REQUEST!r} of process 0 is damaged")
        mine: dict[str, list[int]] = requests.get(str(self._group.index), {})
        return mine

    def announce(self, announcement: Announcement) -> None:
        """Announces what is about to be committed."""
        self._notes.write(_COMMIT, json.dumps(asdict(announcement)).encode()).result()

    def announced(self) -> Announcement | None:
        """What was announced; None if that is not visible yet, or cannot be decoded."""
        return _announcement(self._notes.read(_COMMIT).result().value)

    def clear_records(self) -> None:
        """Removes the records, which are not needed after the commit."""
        self._folder.child("records").remove(self._context)


def _list(store: KvStore) -> set[str]:
    return {key.decode(errors="replace") for key in store.list().result()}


@dataclass(frozen=True)
class Announcement:
    """What the coordinator is about to commit.

    Arguments:
        root: the digest of the root's manifest.
        totals: of the checkpoint.
        replaced: the totals of the last checkpoints that it replaces, by the names of their
            attempts.
    """

    root: str
    totals: Mapping[str, int]
    replaced: Mapping[str, Mapping[str, int]]


def _announcement(data: bytes) -> Announcement | None:
    note = _object(data) or {}
    root, totals, replaced = note.get("root"), note.get("totals"), note.get("replaced", {})
    if not isinstance(root, str) or not _is_totals(totals) or not isinstance(replaced, dict):
        return None
    known = {name: found for name, found in replaced.items() if _is_totals(found)}
    return Announcement(root, totals, known)


def _is_totals(found: object) -> TypeGuard[dict[str, int]]:
    return isinstance(found, dict) and found.keys() == {"arrays", "nbytes"}


def _object(data: bytes) -> dict[str, Any] | None:
    """A JSON object; None if the bytes are not one, as those of a missing note."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True)
class _ErrorNote:
    """The note of a process that gave up; see `Notes.publish_error`."""

    message: str
    settles: bool = False
    refused: bool = False


def _error_note(data: bytes) -> _ErrorNote:
    note = _object(data) or {}
    message = str(note.get("message", "its error message cannot be read"))
    return _ErrorNote(message, note.get("hopeless") is True, note.get("refused") is True)
