"""Where copies of chunks go: into memory, within a budget; into files; or nowhere yet."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto

from unickpt.frameworks.budget import MOST_WORKING, share
from unickpt.saving.chunk_source import Staged
from unickpt.saving.save_job import SaveJob
from unickpt.saving.staging.host_area import HostArea
from unickpt.saving.staging.spill import Spill
from unickpt.saving.write_plan import WriteItem
from unickpt.storage.local_locations import LocalLocation
from unickpt.storage.spill_files import Slot, SpillFiles

_log = logging.getLogger("unickpt")
_WARN_S = 0.1


class NoSlot(Enum):
    """Where a copy goes that is not in a file."""

    MEMORY = auto()
    NOWHERE = auto()


Place = Slot | NoSlot


class Places:
    """The places for the copies of one save.

    Arguments:
        job: the save.
        area: memory for copies.
        waited_s: for how long this save has already waited for an earlier one's memory.
        abandoned: whether the save was abandoned.
        writes: called before waiting for memory, which only writing makes free.
    """

    def __init__(
        self,
        job: SaveJob,
        area: HostArea,
        waited_s: float,
        abandoned: Callable[[], bool],
        writes: Callable[[], None],
    ) -> None:
        self._area, self._abandoned, self._writes = area, abandoned, writes
        options = job.options
        default = area.node_bytes if options.budget_bytes is None else None
        total = share(options.budget_bytes, job.on_node, default)
        self.working_bytes = max(1, min(total // 4, MOST_WORKING))
        """Memory to write with, in bytes."""
        self.budget = total - self.working_bytes
        """Memory for copies, in bytes."""
        self.spill: Spill | None = None
        if options.spill is not None:
            folder = os.path.abspath(options.spill)
            self.spill = Spill(_files(folder, job), self.working_bytes)
        self.calling = True
        """Whether the caller of the save waits for the copies."""
        self._lock = threading.Lock()
        self._staged = Staged(budget_wait_s=waited_s)
        self._since: float | None = None

    @property
    def room(self) -> int:
        """How many bytes of copies fit into memory now."""
        return self._area.room(self.budget)

    @property
    def can_spill(self) -> bool:
        """Whether there are files for copies."""
        return self.spill is not None and self.spill.files.usable

    def find(self, item: WriteItem, *, in_memory: bool = True, counted: bool = False) -> Place:
        """A place for a copy; waits until there is one.

        Arguments:
            item: what to copy.
            in_memory: whether memory is a place for it; if not, there may be none.
            counted: whether it is counted as drained already.

        Raises:
            Abandoned: the save was abandoned meanwhile.
        """
        if in_memory and self._area.reserve(item.nbytes, self.budget):
            return NoSlot.MEMORY
        slot = None if self.spill is None else self.spill.files.reserve(item.nbytes)
        if slot is not None:
            return slot
        if not in_memory:
            return NoSlot.NOWHERE
        self._writes()
        began = time.perf_counter()
        self._area.wait_and_reserve(item.nbytes, self.budget, self._abandoned)
        if self.calling:
            self.count(waited_s=time.perf_counter() - began)
        elif not counted:
            self.count(drained=item.nbytes)
        return NoSlot.MEMORY

    def count(
        self, *, copied: int = 0, drained: int = 0, spilled: int = 0, waited_s: float = 0.0
    ) -> None:
        """Counts bytes that were copied to memory, were put off, or were copied to files."""
        with self._lock:
            known = self._staged
            self._staged = Staged(
                known.staged_bytes + copied,
                known.drained_bytes + drained,
                known.spilled_bytes + spilled,
                known.budget_wait_s + waited_s,
            )

    def returns(self, *, waits_for_commit: bool) -> None:
        """The call has copied what it must; it returns, or waits for the commit."""
        self.calling = False
        if waits_for_commit:
            self._since = time.perf_counter()
        elif (waited_s := self._staged.budget_wait_s) > _WARN_S:
            _log.warning(
                "staging blocked the caller for %.2f s, because the copies exceed this process's "
                "share of SaveOptions.budget_bytes (%.3g GB), so that it waited for the storage; "
                "raise it, or name a local folder in SaveOptions.spill",
                *(waited_s, self.budget / 1e9),
            )

    @property
    def facts(self) -> Staged:
        """What became of the copies."""
        if self._since is None:
            return self._staged
        waited_s = time.perf_counter() - self._since
        return replace(self._staged, budget_wait_s=self._staged.budget_wait_s + waited_s)

    def close(self) -> None:
        """Gives the files up; called when nothing is in them that is needed."""
        if self.spill is not None:
            self.spill.files.close()


def _files(folder: str, job: SaveJob) -> SpillFiles:
    beside = None
    if isinstance(job.location, LocalLocation):
        arrays = job.description.index.arrays.values()
        beside = job.location.path, sum(entry.nbytes for entry in arrays)
    return SpillFiles(folder, beside)
