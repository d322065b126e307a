"""The awaited processes, by name and phase: logged while a save is late, named when it fails.

The coordinator lists the records anyway. While it waits, it writes from time to time which
processes are late. The others read that one object; they list records themselves only if it is
missing or out of date.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import msgspec

from unickpt import quoting
from unickpt.commit import liveness, progress_reports
from unickpt.commit.attempt import Attempt
from unickpt.commit.messages import OK, parse_note
from unickpt.commit.progress_reports import (
    ACTIVITIES,
    COMMIT,
    NOT_BEGUN,
    WORDS,
    WRITE,
    Report,
)
from unickpt.errors import SaveTimeout
from unickpt.frameworks.members import legend
from unickpt.frameworks.os_process_states import CAUSES, LOCKED, RUNS, STOPPED, state_of
from unickpt.frameworks.process_group import members_of
from unickpt.storage.tensorstore_calls import KvStore

_log = logging.getLogger("unickpt")
_FIRST_S = 30.0
"""A process that waits for less than this logs nothing, unless another one is stopped."""
_STOPPED_S, _SOONER = 6.0, 3
"""A process that waits for so long logs whether another one is stopped, or waits for a disk; if one
is, it looks again so many times sooner."""
_GROWTH, _LONGEST_S = 2.0, 600.0
_LOOKS_PER_S = 100
"""The most of all processes of a job together."""
_NAMED = 8
_LATE = "late"
_BYTES = 1024


@dataclass(frozen=True)
class Late:
    """The awaited processes.

    Arguments:
        count: how many.
        phases: the activity of some of them, in words.
    """

    count: int
    phases: Mapping[int, str]

    @property
    def is_explained(self) -> bool:
        """Whether it is known why one of them makes no progress."""
        return any(phase in CAUSES for phase in self.phases.values())

    def __str__(self) -> str:
        """As "processes 17, 203 (writing), 5 (not begun)"."""
        by_phase: dict[str, list[int]] = {}
        for process, phase in self.phases.items():
            by_phase.setdefault(phase, []).append(process)
        shown = [
            f"{quoting.first_few(processes)} ({phase})" for phase, processes in by_phase.items()
        ]
        more = self.count - len(self.phases)
        suffix = f" and {more} more" if more > 0 else ""
        return f"process{'es' * (self.count > 1)} {', '.join(shown)}{suffix}"


class Waits:
    """Waits for other processes of an attempt, and logs from time to time for which ones.

    Arguments:
        attempt: the attempt.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt, self._group = attempt, attempt.group
        least_s = self._group.count / _LOOKS_PER_S
        self._stopped_s, self._least_s = max(_STOPPED_S, least_s), max(_FIRST_S, least_s)
        self._note_data, self._note_at = b"", time.monotonic()
        self.seconds = 0.0
        """How long it had waited at the last look."""
        self.reports: Mapping[int, Report] = {}
        """What some of the missing processes have reported, as of the last look."""
        self.stopped = Counter[int]()
        """At how many looks in sequence each of these was stopped."""
        self._signs: dict[int, tuple[Report, float]] = {}
        """The last report of each process, and when it was first seen."""

    @cached_property
    def _records(self) -> KvStore:  # most saves need none
        return self._attempt.folder.child("records").store(self._attempt.context)

    def until(
        self,
        ready: Callable[[set[str]], bool],
        processes: Sequence[int],
        kind: str,
        late: Sequence[int] = (),
    ) -> set[str]:
        """Waits until `ready`; returns the names of the notes.

        Arguments:
            ready: whether the wait is over.
            processes, kind: the processes and the kind of their records.
            late: for the coordinator, the processes whose records `ready` has found missing.

        Raises:
            ProcessFailed: another process gave up.
            SaveTimeout: it took too long; names the processes whose records are missing.
        """
        notes = self._attempt.notes
        try:
            return notes.wait(self.patiently(ready, late))
        except TimeoutError:
            missing = notes.late(processes, kind)
        raise self._timeout(missing)

    def patiently(
        self, ready: Callable[[set[str]], bool], late: Sequence[int]
    ) -> Callable[[set[str]], bool]:
        """`ready`, for `Notes.wait`, which also logs from time to time the awaited processes, and
        soon those that are stopped or wait for a disk.

        Arguments:
            ready: whether the wait is over.
            late: for the coordinator, the processes whose records are missing; `ready` changes it.
        """
        began, pause = time.monotonic(), self._least_s
        next_s, logged = min(self._stopped_s, self._least_s), Late(0, {})

        def looked(notes: set[str]) -> bool:
            nonlocal pause, next_s, logged
            if ready(notes):
                return True
            waited = time.monotonic() - began
            if waited >= next_s:
                is_early, again_s, self.seconds = waited < self._least_s, self._stopped_s, waited
                if not is_early:
                    pause = min(pause * _GROWTH, max(_LONGEST_S, self._least_s))
                with suppress(Exception):  # what fails here, fails the wait itself if it matters
                    status = self._whom(late, pause)
                    if status.is_explained:
                        again_s /= _SOONER
                    if not is_early or (status.is_explained and status != logged):
                        logged, location = status, self._attempt.location
                        whom = f"{status}{legend(members_of(self._group))}"
                        _log.warning("%s: waiting %.0f s for %s", location, waited, whom)
                next_s = time.monotonic() - began + (again_s if is_early else pause)
                if is_early:
                    next_s = min(next_s, self._least_s)
            return False

        return looked

    def _whom(self, late: Sequence[int], again_s: float) -> Late:
        if self._group.index > 0:
            return self.as_told()
        status = self.describe(late)
        note = _LateNote(status.count, [*status.phases.items()], again_s, time.monotonic())
        data = progress_reports.padded(msgspec.json.encode(note), _BYTES)
        self._records.write(_LATE, data).result()
        return status

    def _timeout(self, late: Sequence[int]) -> SaveTimeout:
        """The error of a wait that took too long.

        Arguments:
            late: the processes whose records are missing; if there are none, process 0 is late.
        """
        whom, done = (self.describe(late), "finish") if late else (self._coordinator(), "commit")
        may = "may have died"
        if progress_reports.NOT_BEGUN in whom.phases.values():
            may += ", or never called save: all processes must, with the same path"
        return SaveTimeout(
            f"{self._attempt.location}: {whom} did not {done} within {self._attempt.timeout_s:g} s "
            f"(SaveOptions.timeout_s) after process {self._group.index} of {self._group.count} was "
            f"done; it {may}. No checkpoint was written."
        )

    def describe(self, late: Sequence[int]) -> Late:
        """The activity of some processes whose records are missing.

        Raises:
            Failed: the storage failed.
        """
        named = list(late[:_NAMED])
        reports = progress_reports.read(self._records, named)
        phases = {p: reports[p].words if p in reports else self._seen(p) for p in named}
        causes = self._causes(reports)
        self.reports = reports
        stopped = [p for p, cause in causes.items() if cause == STOPPED]
        self.stopped = Counter({p: self.stopped[p] + 1 for p in stopped})
        return Late(len(late), phases | causes)

    def _causes(self, reports: Mapping[int, Report]) -> dict[int, str]:
        """Why processes make no progress: as this one sees, or as their neighbours have reported.

        Arguments:
            reports: of the processes.
        """
        states = {
            process: state_of(report.identity, threads=True)
            for process, report in reports.items()
            if report.identity is not None
        }
        unseen = [process for process, state in states.items() if state is None]
        beside = {(process + step) % self._group.count for process in unseen for step in (-1, 1)}
        witnesses = progress_reports.read(self._records, sorted(beside))
        reported = progress_reports.seen(witnesses)
        states |= {process: reported.get(process) for process in unseen}
        states |= {p: LOCKED for p in self._silent(reports) if states.get(p) == RUNS}
        return {process: state for process, state in states.items() if state in CAUSES}

    def _silent(self, reports: Mapping[int, Report]) -> list[int]:
        """The processes that have missed a report, although they need no network to write one."""
        now, location, before = time.monotonic(), self._attempt.location, self._signs
        self._signs = {
            p: before[p] if p in before and before[p][0] == report else (report, now)
            for p, report in reports.items()
        }
        most_s = 2 * liveness.sign_s(self._group.count, location.is_remote)
        is_known = location.is_local
        return [p for p, (_, since) in self._signs.items() if is_known and now - since > most_s]

    def _coordinator(self) -> Late:
        """The activity of the coordinator; if it waits, also for which processes."""
        names = {key.decode(errors="replace") for key in self._records.list().result()}
        if f"00000{OK}" not in names:
            return self.describe([0])
        late = [p for p in range(self._group.count) if f"{p:05d}{OK}" not in names]
        return self.describe(late) if late else Late(1, {0: WORDS[COMMIT]})

    def _seen(self, process: int) -> str:
        """The activity of a process that has not reported it, from whether it has files."""
        files = self._attempt.folder.child(f"{process:05d}").names(self._attempt.context)
        return WORDS[WRITE] if files else NOT_BEGUN

    def as_told(self) -> Late:
        """The coordinator's report; if that is out of date, what this process finds itself.

        Raises:
            Failed: the storage failed.
        """
        note_data = progress_reports.reading(self._records, _LATE, _BYTES)()
        now = time.monotonic()
        if note_data != self._note_data:
            self._note_data, self._note_at = note_data, now
        late_note = _late(note_data)
        if late_note is None or now - self._note_at > late_note[1] + self._least_s:
            return self._coordinator()
        return late_note[0]


@dataclass(frozen=True)
class _LateNote:
    """The coordinator's report about a `Late`, with the times of this and of the next report."""

    count: int
    phases: list[tuple[int, str]]
    again_s: float
    at: float = 0.0


def _late(data: bytes) -> tuple[Late, float] | None:
    """The coordinator's report, and the time of the next one; None if it cannot be read."""
    note = parse_note(data, _LateNote)
    if note is None or not 0 < len(note.phases) <= note.count:
        return None
    late = Late(note.count, dict(note.phases))
    words = {NOT_BEGUN, *WORDS.values(), *ACTIVITIES.values(), *CAUSES}
    is_known = words.issuperset(late.phases.values())
    return (late, note.again_s) if is_known else None
