"""Stand-ins: what a process that is stopped, or far too slow, has not written is written by others.

Only chunks of assumed replicas (plain tensors that all processes have) can be: a process keeps
those of others unchanged until the commit, because it may have to write them anyway
(`merge_chunks.requests`). All else that a process contributes must be known without it: its
description, from the digest in its report; no values, notes or boxes of its own.

The process may go on at any moment, and finds a commit that does not need it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from unickpt.commit.attempt import Attempt
from unickpt.commit.awaited_processes import Waits
from unickpt.commit.messages import NO_CHUNKS, OK, Record
from unickpt.commit.progress_reports import WRITE
from unickpt.quoting import first_few
from unickpt.storage.locations import Location

_log = logging.getLogger("unickpt")

_SLOWER = 10
"""A process that takes so many times as long as process 0 is replaced."""
_LEAST_S = 10.0
"""Nobody is replaced for being slow earlier."""
_STOPPED_LOOKS = 2
"""A process is replaced if it is stopped at so many looks: profilers stop one for a moment, too."""


def records_of(
    attempt: Attempt, waits: Waits, late: Sequence[int], own_s: float
) -> dict[int, Record]:
    """The empty records of the processes for which others shall write; none if one of those that
    are late is still needed.

    Arguments:
        attempt: in which they save.
        waits: has looked at them.
        late: the processes whose records are missing.
        own_s: seconds that process 0 took for its own part.
    """
    reports = waits.reports
    if not all(process in reports and _is_replaceable(process, waits, own_s) for process in late):
        return {}
    arrived = [process for process in range(attempt.group.count) if process not in late]
    records = attempt.notes.records(arrived, OK)
    if any(_contributes_more(record) for _, record in records):
        return {}
    descriptions = {record.description for _, record in records}
    if any(reports[process].description not in descriptions for process in late):
        return {}
    statistics = {"bytes": 0, "chunks": 0}
    return {
        process: Record(
            reports[process].description,
            NO_CHUNKS,
            statistics=statistics,
            replaces=attempt.digest_found,
        )
        for process in late
    }


def warn(location: Location, processes: Sequence[int]) -> None:
    """Warns, after the commit, that processes did not write their part."""
    _log.warning(
        "%s: process%s %s made no progress. Processes that hold the same wrote in their place; the "
        "checkpoint is complete",
        *(location, "es" * (len(processes) > 1), first_few(processes)),
    )


def _is_replaceable(process: int, waits: Waits, own_s: float) -> bool:
    report = waits.reports[process]
    if process == 0 or report.phase != WRITE or not report.description:
        return False
    is_stopped = waits.stopped[process] >= _STOPPED_LOOKS
    return is_stopped or waits.seconds >= max(_LEAST_S, (_SLOWER - 1) * own_s)


def _contributes_more(record: Record) -> bool:
    """Whether a process writes more than the chunks that other processes hold, too; or its replicas
    are to be compared byte by byte."""
    parts = record.notes, record.units, record.bases, record.boxes, record.blobs
    return record.checked or any(parts)
