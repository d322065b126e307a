"""The processes of a job, and the name that they agree on for each try to save."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from typing import Protocol


class Group(Protocol):
    """The processes that save together. Process 0 is the coordinator.

    Frameworks' adapters provide one; `ProcessGroup` is for everything else.
    """

    index: int
    count: int

    def next_attempt(self) -> str:
        """A name for the next try, the same on all processes and never used before.

        Called once at the start of every save, by every process, on the calling thread.
        """

    def agree(self, value: int) -> int:
        """The largest of the values that all processes call this with, at the same point.

        Arguments:
            value: at least 0, and less than 2 to the power of 62.
        """


class ProcessGroup:
    """A group of processes that know each other by other means (MPI, a scheduler, ssh).

    Arguments:
        index: index of this process, 0 to `count - 1`.
        count: number of processes.
        session: a text that all processes of this run share and that no other run uses, such as
            the scheduler's job id with its restart count.
        agree: gives every process the largest of the values that all of them call it with, as
            MPI's `allreduce(value, MAX)`. Only what processes must decide alike needs it:
            `Checkpointer`'s saving by time, preemption, and falling back to an older step.

    Example:
        >>> group = ProcessGroup(0, 4, session="job-8231-restart-2")
        >>> group.next_attempt()
        'job-8231-restart-2-000000'
    """

    def __init__(
        self, index: int, count: int, session: str, agree: Callable[[int], int] | None = None
    ) -> None:
        if not 0 <= index < count:
            raise ValueError(f"process index {index} is not among {count} processes")
        if not session or not all(c.isalnum() or c in "-_." for c in session):
            raise ValueError(f"session {session!r} must be of letters, digits and '-', '_', '.'")
        self.index, self.count, self._session = index, count, session
        self._counter = itertools.count()
        self._agree = agree

    def next_attempt(self) -> str:
        return f"{self._session}-{next(self._counter):06d}"

    def agree(self, value: int) -> int:
        if self.count == 1:
            return value
        if self._agree is None:
            raise ValueError(
                "the processes must decide this alike: give ProcessGroup(..., agree=) what takes "
                "the largest of their values, as MPI's allreduce(value, MAX) does"
            )
        return self._agree(value)


def new_session() -> str:
    """A session name that nobody else has."""
    return secrets.token_hex(8)


def alone() -> ProcessGroup:
    """A job of one process."""
    return ProcessGroup(0, 1, new_session())
