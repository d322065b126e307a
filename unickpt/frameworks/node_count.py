"""How many processes of a job share the memory of this node: from the launcher, else counted."""

from __future__ import annotations

import os
from typing import Protocol

from unickpt.frameworks import node_memory

_PATIENCE_S = 1.0
_LAUNCHERS = (
    ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("MPI_LOCALNRANKS", "PMI_SIZE"),
)


class Counters(Protocol):
    """The key-value store of a job."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, which begins at 0; returns what it is then."""

    def announce(self, key: str) -> None:
        """Ends `wait` on all processes."""

    def wait(self, key: str, seconds: float) -> None:
        """Waits until a key is announced, at most so long; raises nothing."""


def launched_on_node(count: int | None = None) -> int | None:
    """How many processes the launcher started on this node, as torchrun and MPI say.

    Arguments:
        count: number of processes of the job; of one that is alone among those of the launcher, 1;
            None for any.

    Returns:
        None if that is not known, or if it is said of another job.
    """
    for here, everywhere in _LAUNCHERS:
        local, world = _number(here), _number(everywhere)
        if local and (count is None or (local <= world and count in (1, world))):
            return local
    return None


def _number(name: str) -> int:
    """An environment variable that is a number; 0 if it is not."""
    told = os.environ.get(name, "")
    return int(told) if told.isascii() and told.isdigit() else 0


class NodeCount:
    """Counts the processes of a job on this node, by its key-value store.

    Arguments:
        counters: the store.
        count: number of processes of the job.
        session: a name that the job has used for nothing else.
    """

    def __init__(self, counters: Counters, count: int, session: str) -> None:
        self._counters, self._count = counters, count
        self._all = f"unickpt/nodes/{session}"
        self._here = f"{self._all}/{node_memory.find().name}"
        self._ready = f"{self._all}/ready"
        self._exact = 0

    def arrive(self) -> None:
        """Counts this process; waits a moment for the others, which are about to arrive."""
        self._counters.add(self._here, 1)
        if self._counters.add(self._all, 1) == self._count:
            self._counters.announce(self._ready)
        else:
            self._counters.wait(self._ready, _PATIENCE_S)

    def at_most(self) -> int:
        """The number of processes on this node; those that have not arrived count as well."""
        if self._exact:
            return self._exact
        arrived = self._counters.add(self._all, 0)
        # In this order: who arrives meanwhile counts twice rather than never.
        here = self._counters.add(self._here, 0)
        if arrived == self._count:
            self._exact = here
        return here + self._count - arrived
