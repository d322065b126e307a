"""The processes of a job, and the name that they agree on for each try to save."""

from __future__ import annotations

import itertools
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Group(Protocol):
    """The processes that save together. Process 0 is the coordinator.

    Frameworks' adapters provide one; `ProcessGroup` is for everything else.
    """

    index: int
    count: int

    def next_attempt(self) -> str:
        """A name for the next try, the same on all processes and never used before.

        Called once at the start of every save, by every process, on the calling thread.

        Raises:
            SaveTimeout: the others did not do so in time (see `BoundedGroup`).
        """

    def agree(self, value: int) -> int:
        """The largest of the values that all processes call this with, at the same point.

        Arguments:
            value: at least 0, and less than 2 to the power of 62.

        Raises:
            SaveTimeout: the others did not do so in time (see `BoundedGroup`).
        """

    def exchange(self, data: Bytes, sent: Sequence[int], received: Sequence[int]) -> Bytes:
        """Gives every process its part of the bytes of each, as MPI's `Alltoallv`.

        Called by all processes at the same point, on the calling thread.

        Arguments:
            data: one part for each process after the other.
            sent: how many bytes each process gets.
            received: how many bytes come from each process.

        Returns:
            What came from each process, one after the other.

        Raises:
            RuntimeError: a process has ended.
        """


class BoundedGroup(ABC):
    """A group that does not wait for its processes for ever; those of the adapters are.

    Groups of a user's own need not be: then nobody but they can end their waiting.
    """

    index: int
    count: int

    @abstractmethod
    def within(self, timeout_s: float) -> Group:
        """The same group; `next_attempt` and `agree` raise `SaveTimeout` after so many seconds."""


def within(group: Group, timeout_s: float) -> Group:
    """A group that waits no longer than so many seconds, if it is one that can know that."""
    return group.within(timeout_s) if isinstance(group, BoundedGroup) else group


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
        exchange: gives every process its part of the bytes of each, as MPI's `Alltoallv`; see
            `Group.exchange`. Only `LoadOptions(exchange=True)` needs it.

    Example:
        >>> group = ProcessGroup(0, 4, session="job-8231-restart-2")
        >>> group.next_attempt()
        'job-8231-restart-2-000000'
    """

    def __init__(
        self,
        index: int,
        count: int,
        session: str,
        agree: Callable[[int], int] | None = None,
        exchange: Callable[[Bytes, Sequence[int], Sequence[int]], Bytes] | None = None,
    ) -> None:
        if not 0 <= index < count:
            raise ValueError(f"process index {index} is not among {count} processes")
        if not session or not all(c.isalnum() or c in "-_." for c in session):
            raise ValueError(f"session {session!r} must be of letters, digits and '-', '_', '.'")
        self.index, self.count, self._session = index, count, session
        self._counter = itertools.count()
        self._agree, self._exchange = agree, exchange

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

    def exchange(self, data: Bytes, sent: Sequence[int], received: Sequence[int]) -> Bytes:
        if self._exchange is None:
            raise ValueError(
                "to exchange what they read, the processes need a way: give ProcessGroup(..., "
                "exchange=) what MPI's Alltoallv does"
            )
        return self._exchange(data, sent, received)


def new_session() -> str:
    """A session name that nobody else has."""
    return secrets.token_hex(8)


def alone() -> ProcessGroup:
    """A job of one process."""
    return ProcessGroup(0, 1, new_session())
