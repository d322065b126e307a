"""A participant is a process other than the coordinator: it waits until process 0 has committed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from unickpt.commit.attempt import Attempt, AttemptState, remove_unneeded
from unickpt.commit.awaited_processes import Waits
from unickpt.commit.messages import JOB_BYTES, MORE, OK, REQUEST, Totals, WriteMore
from unickpt.errors import ProcessFailed, SaveTimeout
from unickpt.frameworks.job_bytes import JobBytes

# After a process gives up, how long the coordinator may take to finish a commit that was in
# progress when it last checked for such a process.
_GRACE_S = 1.0


def wait_committed(attempt: Attempt, write_more: WriteMore) -> Totals:
    """Waits, in all processes but the coordinator, until the checkpoint exists.

    Arguments:
        attempt: the attempt in which this process has published its record.
        write_more: writes more chunks, if the coordinator requests them.

    Raises:
        ProcessFailed: another process gave up.
        SaveTimeout: the coordinator neither committed nor gave up in time.
        SaveConflict: another job committed at this path.
    """
    try:
        totals = _wait(attempt, write_more)
    except (ProcessFailed, SaveTimeout) as error:
        committed_totals = None if attempt.may_remove else _committed_after_all(attempt, error)
        if committed_totals is None:
            raise
        totals = committed_totals
    attempt.become(AttemptState.COMMITTED)
    return totals


def job_bytes(attempt: Attempt, jobs: Sequence[JobBytes]) -> JobBytes | None:
    """The bytes of the job's groups of replicas, if the coordinator announced them.

    Arguments:
        attempt: that is committed.
        jobs: those of earlier saves, which need not be read.
    """
    if not attempt.job_digest:
        return None
    for job in jobs:
        if job.digest == attempt.job_digest:
            return job
    with suppress(Exception):  # then its next save writes chunks that others write, too
        return JobBytes.decode(attempt.notes.get(JOB_BYTES.format(attempt.job_digest)))
    return None


def _wait(attempt: Attempt, write_more: WriteMore) -> Totals:
    waits, everyone = Waits(attempt), range(attempt.group.count)
    totals: Totals | None = None

    def is_committed() -> bool:
        nonlocal totals
        totals = attempt.committed()
        return totals is not None

    notes = waits.until(lambda notes: REQUEST in notes or is_committed(), everyone, OK)
    if REQUEST in notes:
        mine = attempt.notes.requested()
        if mine:
            attempt.become(AttemptState.WRITING)  # nobody can commit without these
            attempt.publish(write_more(mine), MORE)
        waits.until(lambda notes: is_committed(), everyone, OK)
        if mine is None:
            with suppress(Exception):  # no checkpoint refers to them
                remove_unneeded(attempt)
                attempt.notes.clear_records()
    assert totals is not None, "the wait ends with the commit"
    return totals


def _committed_after_all(attempt: Attempt, error: BaseException) -> Totals | None:
    """Reports that this process gives up, then checks whether the coordinator was faster."""
    attempt.publish_error(error)
    time.sleep(_GRACE_S)
    return attempt.committed()
