"""Signs of life: every process of a save shows that it lives, and watches its two neighbours.

The sign is its progress report, which names its process id. A neighbour on the same machine looks
for that id: so it takes seconds to notice a death, and a process that is stopped, or runs a long
call without Python's threads, is not mistaken for a dead one. A neighbour on another machine can
only see that the report no longer changes, and waits much longer. In either case it reports the
death in place of the dead process, and all others fail.

Each process watches the one before it and the one after it, which are often on the same machine:
whichever processes die, a survivor is the neighbour of one of them, and the work of each does not
grow with their number. Times are measured by the watcher's own clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from unickpt.commit import progress_reports
from unickpt.commit.attempt import Attempt, AttemptState
from unickpt.commit.messages import MORE, OK, REQUEST, REQUESTED, Notes, Verb, end_note, parse_note
from unickpt.commit.progress_reports import Report
from unickpt.commit.progress_writer import Progress, Reporter, phase_of, reports_of
from unickpt.frameworks.os_process_states import DEAD, Identity, state_of
from unickpt.frameworks.process_group import session_of

FIRST_S = {False: 0.05, True: 1.0}
"""Seconds until the first sign; by whether the storage is remote. Shorter saves make none."""
FIRST_PER_S = 1000
"""The largest number of first signs of all processes together."""
SIGN_S = {False: 5.0, True: 10.0}
"""Seconds between signs."""
LOOK_S = 2.0
"""Seconds between looks at the process ids of neighbours."""
READ_S = {False: 2.0, True: 10.0}
"""Seconds between reads of a neighbour's sign."""
SILENT_S = 60.0
"""Without any sign for so long, a process on another machine counts as dead."""
PER_S = 500
"""The largest number of signs, and of reads, per second of all processes together."""
_SILENT_SIGNS = 5  # at least so many signs are missing
Clock = Callable[[], float]


class Liveness:
    """The signs of life of this process in an attempt, and its watch over its neighbours.

    Arguments:
        attempt: of several processes.
        progress: see `progress_writer.Progress`.
        clock: seconds; for tests.
    """

    def __init__(self, attempt: Attempt, progress: Progress, clock: Clock = time.monotonic) -> None:
        self._attempt, self._clock = attempt, clock
        self._reporter = Reporter(attempt, progress)
        count, is_remote = attempt.group.count, attempt.location.is_remote
        self.pauses = pauses(count, is_remote)
        self._sign_s = sign_s(count, is_remote)
        self._signs_phases = not is_remote
        self._signed: tuple[float, str] | None = None
        self._signs = 0
        self._is_left_over = False
        index = attempt.group.index
        numbers = dict.fromkeys([(index - 1) % count, (index + 1) % count])
        self._neighbours = [Neighbour(attempt, number, clock) for number in numbers]

    def tick(self, _: int = 0) -> None:
        """Shows a sign if one is due, and looks at the neighbours. Raises nothing."""
        with suppress(Exception):  # a later one may succeed
            self._sign_if_due()
        for neighbour in self._neighbours:
            with suppress(Exception):
                neighbour.look()

    def _sign_if_due(self) -> None:
        now, phase = self._clock(), phase_of(self._attempt)
        if self._signed is not None:
            signed_at, signed_phase = self._signed
            is_new = self._signs_phases and signed_phase != phase
            if now - signed_at < self._sign_s and not is_new:
                return
        self._signed = now, phase
        states = [pair for neighbour in self._neighbours for pair in neighbour.seen()]
        try:
            self._reporter.report(self._signs, states)
            self._signs += 1
        finally:  # from its record on, the coordinator may remove all reports at any time
            self._is_left_over = phase_of(self._attempt) != progress_reports.WRITE

    def close(self) -> None:
        """Removes, at the end, a sign that came after the coordinator had removed all of them."""
        attempt = self._attempt
        is_committed = attempt.state is AttemptState.COMMITTED
        if self._is_left_over and is_committed and attempt.group.index > 0:
            with suppress(Exception):
                attempt.notes.clear_records()


def pauses(count: int, is_remote: bool) -> tuple[float, float]:
    """Seconds until the first tick of each of some processes, and the longest pause after it."""
    first_s = max(FIRST_S[is_remote], count / FIRST_PER_S)
    return first_s, max(first_s, LOOK_S)


def sign_s(count: int, is_remote: bool) -> float:
    """Seconds between signs of each of some processes."""
    return max(SIGN_S[is_remote], count / PER_S)


def silent_s(count: int, is_remote: bool) -> float:
    """Seconds without a sign after which a process on another machine counts as dead."""
    return max(SILENT_S, _SILENT_SIGNS * sign_s(count, is_remote))


class Neighbour:
    """Another process, as this one sees it.

    Arguments:
        attempt: of both.
        number: of the other process.
        clock: seconds; for tests.
    """

    def __init__(self, attempt: Attempt, number: int, clock: Clock = time.monotonic) -> None:
        self._attempt, self._number, self._clock = attempt, number, clock
        self._reports = reports_of(attempt)
        group, is_remote = attempt.group, attempt.location.is_remote
        self._beyond = (2 * number - group.index) % group.count
        self._most_read_s = max(READ_S[is_remote], group.count / PER_S)
        self._most_silent_s = silent_s(group.count, is_remote)
        session = session_of(group)
        self._peers = {} if session is None else session.peers
        self._data, self._beyond_data = b"", b""
        self._read_at, self._read_s = -float("inf"), FIRST_S[is_remote]
        self._silent_s = 0.0
        self._is_reported = False

    @property
    def _identity(self) -> Identity | None:
        return self._peers.get(self._number)

    def seen(self) -> Sequence[tuple[int, str]]:
        """Its state, if it is alive and on this machine."""
        state = None if self._identity is None else state_of(self._identity, threads=True)
        return () if state is None or state == DEAD else ((self._number, state),)

    def look(self) -> None:
        """Looks for signs of its life; reports its death, if the save needs it.

        Raises:
            Failed: the storage failed.
            ProcessFailed: as `_report`.
        """
        if self._is_reported:
            return
        identity = self._identity
        state = None if identity is None else state_of(identity)
        if state == DEAD:
            watcher = f"process {self._attempt.group.index}, on the same machine,"
            self._report("died", f"{identity} no longer exists, as {watcher} found")
        elif state is None:
            self._read_if_due()

    def _read_if_due(self) -> None:
        now = self._clock()
        if now - self._read_at < self._read_s:
            return
        # However long this process itself was stopped, the other one had no time to show a sign.
        passed = min(now - self._read_at, 2 * self._read_s)
        self._read_at = now
        self._read_s = min(1.5 * self._read_s, self._most_read_s)
        data, report = self._sign_of(self._number)
        if report is None or report.identity is None:
            return  # it has not begun
        self._peers[self._number] = report.identity
        is_new, self._data = data != self._data, data
        self._silent_s = 0.0 if is_new else self._silent_s + passed
        if self._silent_s >= self._most_silent_s / 2 and self._is_vouched_for():
            self._silent_s = 0.0
        if self._silent_s >= self._most_silent_s:
            watcher = f"process {self._attempt.group.index}, on another machine,"
            self._report(
                "is silent",
                f"no sign of life for {self._silent_s:.0f} s, as {watcher} found: "
                f"{report.identity}, or that machine, has died or hangs",
            )

    def _sign_of(self, process: int) -> tuple[bytes, Report | None]:
        data = progress_reports.read_data(self._reports, process)
        return data, progress_reports.decode(data)

    def _is_vouched_for(self) -> bool:
        """Whether its other neighbour, on its machine, has shown since the last look that it sees
        this process alive."""
        if self._beyond in (self._number, self._attempt.group.index):
            return False
        data, report = self._sign_of(self._beyond)
        is_new, self._beyond_data = data != self._beyond_data and self._beyond_data != b"", data
        return is_new and report is not None and self._number in dict(report.neighbours)

    def _report(self, verb: Verb, evidence: str) -> None:
        """Reports its end in its place, if the save still needs it.

        Raises:
            ProcessFailed: the save has already failed, after which processes may end.
        """
        attempt = self._attempt
        attempt.notes.poll()
        if attempt.root.read().digest != attempt.digest_found:
            return  # committed, after which processes may end
        if self._number == 0 or _is_awaited(attempt.notes, self._number):
            attempt.notes.put(*end_note(self._number, verb, evidence))
            self._is_reported = True


def _is_awaited(notes: Notes, process: int) -> bool:
    """Whether the record of a process is missing, or that of chunks that it was asked to write."""
    requested = parse_note(notes.get(REQUEST), REQUESTED) or {}
    if requested.get(process) == {}:
        return False  # others write its part
    if notes.late([process], OK):
        return True
    return process in requested and bool(notes.late([process], MORE))
