"""Writes the progress reports of one process of an attempt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unickpt.commit import progress_reports
from unickpt.commit.attempt import Attempt, AttemptState
from unickpt.commit.progress_reports import Report
from unickpt.frameworks.os_process_states import own_identity
from unickpt.storage import paths
from unickpt.storage.tensorstore_calls import KvStore

Progress = Callable[[], tuple[float, int, str]]
"""Returns the seconds since the save was requested, the bytes that are done, and what the process
does while it writes (`progress_reports.ACTIVITIES`)."""


class Reporter:
    """Reports the progress of this process.

    Arguments:
        attempt: in which it saves.
        progress: see `Progress`.
    """

    def __init__(self, attempt: Attempt, progress: Progress) -> None:
        self._attempt, self._progress = attempt, progress

    def report(self, number: int, neighbours: Sequence[tuple[int, str]] = ()) -> None:
        """Writes a report.

        Arguments:
            number, neighbours: see `Report`.

        Raises:
            Failed: the storage failed.
        """
        attempt = self._attempt
        attempt.has_reports = True
        seconds, done_bytes, activity = self._progress()
        phase = phase_of(attempt)
        report = Report(
            phase,
            seconds,
            done_bytes,
            attempt.planned_bytes,
            attempt.group.count,
            number,
            None if attempt.is_alone else own_identity(),
            tuple(neighbours),
            attempt.description,
            activity if phase == progress_reports.WRITE else "",
        )
        progress_reports.write(reports_of(attempt), attempt.group.index, report)


def phase_of(attempt: Attempt) -> str:
    """The phase of this process in an attempt, for its report."""
    if attempt.state in (AttemptState.OPEN, AttemptState.WRITING):
        return progress_reports.WRITE
    return progress_reports.WAIT if attempt.awaits_records else progress_reports.COMMIT


def reports_of(attempt: Attempt) -> KvStore:
    """The folder of the reports, which need not survive a crash of the machine."""
    is_flushed = attempt.location.is_local and attempt.is_durable
    context = paths.context(fsync=False) if is_flushed else attempt.context
    return attempt.folder.child("records").store(context)
