"""Stand-ins: what a process that is stopped, or far too slow, has not written is written by others.

Only chunks of assumed replicas (plain tensors that all processes have) can be: a process keeps
those of others unchanged until the commit, because it may have to write them anyway
(`merge_chunks.requests`). All else that a process contributes must be known without it: its
description, from the digest in its report; no values, notes or boxes of its own.

The process may go on at any moment, and finds a commit that does not need it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

from unickpt.commit.awaited_processes import Waits
from unickpt.commit.merge import StillNeeded
from unickpt.commit.messages import NO_CHUNKS, Record, Records
from unickpt.commit.progress_reports import WRITE, Report
from unickpt.quoting import first_few
from unickpt.storage import local_folders
from unickpt.storage.locations import Location

_log = logging.getLogger("unickpt")

_SLOWER = 10
"""A process that takes so many times as long as process 0 is replaced."""
_LEAST_S = 10.0
"""Nobody is replaced for being slow earlier."""
_STOPPED_LOOKS = 2
"""A process is replaced if it is stopped at so many looks: profilers stop one for a moment, too."""


def are_replaceable(late: Sequence[int], waits: Waits, own_s: float, folder: Location) -> bool:
    """Whether all processes that are late make no progress, what they have is known, and there is
    room to write it again.

    Arguments:
        late: the processes whose records are missing.
        waits: has looked at them.
        own_s: seconds that process 0 took for its own part.
        folder: in which it wrote.
    """
    if not all(p in waits.reports and _is_replaceable(p, waits, own_s) for p in late):
        return False
    with suppress(OSError):  # the file system does not report it
        if folder.is_local:
            needed = sum(waits.reports[p].total for p in late)
            return local_folders.free_bytes(folder.path, "") >= needed
    return True


def records_of(
    reports: Mapping[int, Report], records: Records, digest_found: str
) -> dict[int, Record]:
    """The empty records of the processes for which others shall write.

    Arguments:
        reports: of these processes.
        records: of the others.
        digest_found: of the root that process 0 found.

    Raises:
        StillNeeded: one of them may have something that no other has.
    """
    descriptions = {record.description for _, record in records}
    if any(report.description not in descriptions for report in reports.values()):
        raise StillNeeded
    if any(_contributes_more(record) for _, record in records):
        raise StillNeeded
    statistics = {"bytes": 0, "chunks": 0}
    return {
        process: Record(report.description, NO_CHUNKS, statistics=statistics, replaces=digest_found)
        for process, report in reports.items()
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
