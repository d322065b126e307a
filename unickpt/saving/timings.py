"""How long the phases of a save take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timings:
    """Seconds of one save, from its creation on; see `SaveReport.phases`.

    `lap` is for the thread of the caller, `phase` for the thread that saves. Both write a phase
    once, so they may be used at the same time.
    """

    def __init__(self) -> None:
        self._started, self._asked = time.perf_counter(), time.time()
        self._lap_ended = 0.0
        self.phases: dict[str, float] = {}
        self._began: dict[str, float] = {}
        self.blocked_s = 0.0
        """For how long the call blocked the caller; 0 if it returns only after the save."""

    @property
    def elapsed(self) -> float:
        """Seconds since the save was requested."""
        return time.perf_counter() - self._started

    def lap(self, phase: str) -> None:
        """Ends a phase of the call, which began when the one before it ended."""
        ended = self.elapsed
        self._began[phase] = self._lap_ended
        self.phases[phase], self._lap_ended = ended - self._lap_ended, ended

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """A phase of the thread that saves; not recorded if it fails."""
        began = self._began[phase] = self.elapsed
        yield
        self.phases[phase] = self.elapsed - began

    @property
    def statistics(self) -> dict[str, float]:
        """Of all phases until now, for the record: when each began, and how long it took, or has
        taken so far; and `began`, when the save was requested, by this host's clock."""
        now, found = self.elapsed, {"began": self._asked, "blocked_s": self.blocked_s}
        for phase, began in list(self._began.items()):  # the caller's thread may add one
            found[f"{phase}_at"] = began
            found[f"{phase}_s"] = self.phases.get(phase, now - began)
        return found

    def unblock(self) -> None:
        """Records that the call returns now, before the save has ended."""
        self.blocked_s = self.elapsed
