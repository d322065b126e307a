"""When the coordinator saw that each process was done, and the timing of a save from that."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unickpt.commit.record import Records
from unickpt.format import timing
from unickpt.format.timing import PHASES, Timing

# The columns of a timing, and the statistics of a record that they are.
_STATISTICS: Mapping[str, str] = {
    "blocked": "blocked_s",
    **{f"{phase}_at": f"{phase}_at" for phase in PHASES},
    **{f"{phase}_s": f"{phase}_s" for phase in PHASES},
    "written": "bytes",
    "stored": "stored_bytes",
    "reused": "reused_bytes",
    "staged": "staged_bytes",
    "chunks": "chunks",
}

_MOST: Mapping[str, float] = {"<f4": 1e8, "<f8": 1e12, "<u8": 2.0**62}


class Arrivals:
    """Which records were there whenever the coordinator looked.

    Arguments:
        count: number of processes.
        clock: seconds; for tests.
    """

    def __init__(self, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._late = set(range(count))
        self._looked = -math.inf
        self._published = math.nan
        self.collected = math.nan
        """When all were there."""
        self._not_before = np.full(count, -math.inf)
        self._seen = np.full(count, math.inf)

    @property
    def waiting(self) -> bool:
        """Whether some records were missing when the coordinator last looked."""
        return bool(self._late)

    def published(self) -> None:
        """The coordinator has published its own record."""
        self._published = self._clock()

    def looked(self, late: Collection[int]) -> None:
        """The coordinator has looked, and the records of some processes were missing."""
        if not self._late:
            return  # of further records, which the coordinator has requested
        now = self._clock()
        for process in self._late.difference(late):
            self._not_before[process], self._seen[process] = self._looked, now
        self._late.intersection_update(late)
        self._looked = now
        if not self._late:
            self.collected = now

    def timing(self, records: Records) -> Timing:
        """The timing of the save that is merged now.

        Arguments:
            records: of all processes, in order.
        """
        count = len(records)
        columns = {
            column: _values(records, name, timing.dtype_of(column))
            for column, name in _STATISTICS.items()
        }
        took = columns["write_at"].astype(float) + columns["write_s"]
        walls = _values(records, "began", np.dtype(float))
        began = walls - walls[0]
        start = self._published - took[0]  # of the coordinator, by its own clock
        # A record is published before it is seen, and after it was missing. For this, no clock but
        # the coordinator's is needed; so it corrects what the hosts' clocks say.
        began = np.clip(began, self._not_before - start - took, self._seen - start - took)
        columns["began"] = np.clip(began, -_MOST["<f4"], _MOST["<f4"]).astype(np.float32)
        columns["began"][0] = 0
        collected, merged = self.collected - start, self._clock() - start
        return timing.from_columns(collected, merged, columns, count)


def _values(records: Records, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A statistic of all processes; one that cannot be must not make the save fail."""
    found = [float(record.statistics.get(name, 0)) for _, record in records]
    clipped: NDArray[Any] = np.clip(np.nan_to_num(np.array(found)), 0, _MOST[dtype.str])
    return clipped.astype(dtype)
