"""Host memory for staged chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from unickpt.arrays.dtypes import Array
from unickpt.arrays.host_memory import HostBuffers
from unickpt.frameworks import budget
from unickpt.frameworks.protocol import Memory


class HostArea:
    """Host memory for staged chunks of all saves in flight: bounded, and reused."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._held = 0
        self._node_bytes: int | None = None
        self._pools: dict[object, HostBuffers] = {}

    @property
    def node_bytes(self) -> int:
        """What all processes of the node stage by default; as it was when this was first asked."""
        with self._changed:  # later, what is held here is in use
            if self._node_bytes is None:
                self._node_bytes = budget.node_bytes()
            return self._node_bytes

    def room(self, budget_bytes: int) -> int:
        """How many bytes fit into the budget now."""
        with self._changed:
            return max(0, budget_bytes - self._held)

    def reserve_anyway(self, nbytes: int) -> None:
        """Reserves `nbytes` even if they do not fit."""
        with self._changed:
            self._held += nbytes

    def reserve(self, nbytes: int, budget_bytes: int) -> bool:
        """Reserves `nbytes` if they fit into the budget, or if nothing else is held."""
        with self._changed:
            fits = not self._held or self._held + nbytes <= budget_bytes
            self._held += nbytes if fits else 0
            return fits

    def wait_and_reserve(
        self, nbytes: int, budget_bytes: int, abandoned: Callable[[], bool]
    ) -> None:
        """As `reserve`, but waits until it succeeds.

        Raises:
            Abandoned: the save that needs them was abandoned meanwhile.
        """
        with self._changed:
            while not self.reserve(nbytes, budget_bytes):
                if abandoned():
                    raise Abandoned
                self._changed.wait()

    def unreserve(self, nbytes: int) -> None:
        with self._changed:
            self._held -= nbytes
            self._changed.notify_all()

    def wake(self) -> None:
        """Wakes the waiting threads, to check whether their save was abandoned."""
        with self._changed:
            self._changed.notify_all()

    def take(self, nbytes: int, budget_bytes: int, memory: Memory) -> Array:
        with self._changed:
            pool = self._pools.setdefault(memory.allocate, HostBuffers(0, memory.allocate))
            pool.most_bytes = max(pool.most_bytes, budget_bytes)
            return pool.take(nbytes)

    def give(self, buffer: Array, memory: Memory) -> None:
        with self._changed:
            self._pools[memory.allocate].give(buffer)


class Abandoned(Exception):
    """The save has failed already; its error is reported elsewhere."""
