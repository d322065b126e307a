"""Memory for copies of chunks, within a budget, and which chunks are copied when."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from unickpt.arrays.dtypes import Array
from unickpt.errors import StateChanged
from unickpt.frameworks import host_memory
from unickpt.frameworks.adapter_protocol import Memory, Transfer
from unickpt.frameworks.host_memory import MOST_WORKING, HostBuffers, share
from unickpt.references.value_places import WriteItem
from unickpt.saving.snapshot_policy import BACKGROUND, SnapshotMethod, SnapshotPolicy
from unickpt.saving.task import SaveTask
from unickpt.saving.write_plan import Staged, WritePlan, naming


class HostMemoryPool:
    """Host memory for staged chunks of all saves in flight: bounded, and reused."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._held = 0
        self._node_bytes: int | None = None
        self._pools: dict[object, HostBuffers] = {}

    @property
    def node_bytes(self) -> int:
        """The default staging budget of all processes of the node, determined on first use."""
        with self._changed:  # later, memory held here would count as in use
            if self._node_bytes is None:
                self._node_bytes = host_memory.node_bytes()
            return self._node_bytes

    def room(self, budget_bytes: int) -> int:
        """How many bytes fit into the budget now."""
        with self._changed:
            return max(0, budget_bytes - self._held)

    def reserve(self, nbytes: int, budget_bytes: int) -> bool:
        """Reserves `nbytes` if they fit into the budget, or if nothing else is reserved."""
        with self._changed:
            fits = not self._held or self._held + nbytes <= budget_bytes
            self._held += nbytes if fits else 0
            return fits

    def wait_and_reserve(
        self, nbytes: int, budget_bytes: int, abandoned: Callable[[], bool]
    ) -> None:
        """As `reserve`, but waits until it succeeds.

        Raises:
            Abandoned: the save that needs them was abandoned.
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
    """The save has already failed; its error is reported elsewhere."""


_log = logging.getLogger("unickpt")
_WARN_S = 0.1


class CopyMemory:
    """The memory for the copies of one save.

    Arguments:
        job: the save.
        area: memory for copies.
        waited_s: for how long this save has already waited for an earlier one's memory.
        abandoned: whether the save was abandoned.
        writes: called before waiting for memory, which only writing frees.
    """

    def __init__(
        self,
        job: SaveTask,
        area: HostMemoryPool,
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
        self.calling = True
        """Whether the caller of the save waits for the copies."""
        self._lock = threading.Lock()
        self._transferred, self._transfers = 0, list[Transfer]()
        self._staged = Staged(budget_wait_s=waited_s)
        self._since: float | None = None

    @property
    def room(self) -> int:
        """How many bytes of copies fit into memory now."""
        return self._area.room(self.budget)

    def reserve(self, item: WriteItem, counted: bool) -> None:
        """Reserves memory for a copy; waits until it is free.

        Arguments:
            item: the chunk to copy.
            counted: whether it is already counted as drained.

        Raises:
            Abandoned: the save was abandoned.
        """
        if self._area.reserve(item.nbytes, self.budget):
            return
        self._writes()
        began = time.perf_counter()
        self._area.wait_and_reserve(item.nbytes, self.budget, self._abandoned)
        if self.calling:
            self.count(waited_s=time.perf_counter() - began)
        elif not counted:
            self.count(drained=item.nbytes)

    def transfer(self, items: Sequence[WriteItem], spare_bytes: int) -> list[WriteItem]:
        """Has devices copy chunks to the host where they can and it fits, without waiting for them.

        Arguments:
            items: the chunks.
            spare_bytes: memory to leave for all other copies, because that of transfers is released
                when the save ends.

        Returns:
            These chunks, as they are read where they arrive.

        Raises:
            StateChanged: an array was freed.
        """
        items_by_memory: dict[Memory, list[WriteItem]] = {}
        for item in items:
            if item.fragment.memory.transfer is not None:
                items_by_memory.setdefault(item.fragment.memory, []).append(item)
        arriving: list[WriteItem] = []
        for memory, chunks in items_by_memory.items():
            nbytes = sum(item.nbytes for item in chunks)
            if self._transferred + nbytes + spare_bytes > self.budget:
                continue
            if not self._area.reserve(nbytes, self.budget):
                continue
            assert memory.transfer is not None, "only such are among them"
            self._transferred += nbytes
            try:
                transfer = memory.transfer([item.box for item in chunks])
            except StateChanged as error:
                raise naming(error, chunks[0]) from None
            if transfer is None:
                self._transferred -= nbytes
                self._area.unreserve(nbytes)
                continue
            self._transfers.append(transfer)
            self.count(copied=nbytes)
            host = Memory(mutable=False)
            for item in chunks:
                fragment = replace(item.fragment, read=transfer.read, memory=host, sample=None)
                arriving.append(replace(item, fragment=fragment))
        return arriving

    def go_first(self) -> None:
        """Makes later device work of this thread wait for the transfers."""
        for transfer in self._transfers:
            if transfer.go_first is not None:
                transfer.go_first()

    def wait_transferred(self) -> None:
        """Waits until the arrays that devices copy may change."""
        for transfer in self._transfers:
            if transfer.wait is not None:
                transfer.wait()

    def count(self, *, copied: int = 0, drained: int = 0, waited_s: float = 0.0) -> None:
        """Counts bytes that were copied, or whose copies were put off, and seconds of waiting."""
        with self._lock:
            before = self._staged
            self._staged = Staged(
                before.staged_bytes + copied,
                before.drained_bytes + drained,
                before.budget_wait_s + waited_s,
            )

    def returns(self, *, waits_for_commit: bool) -> None:
        """Records that the call has made its copies, and returns or waits for the commit."""
        self.calling = False
        if waits_for_commit:
            self._since = time.perf_counter()
        elif (waited_s := self._staged.budget_wait_s) > _WARN_S:
            _log.warning(
                "staging blocked the caller for %.2f s, because the copies exceed this process's "
                "share of SaveOptions.budget_bytes (%.3g GB), so that it waited for the storage; "
                "raise it",
                *(waited_s, self.budget / 1e9),
            )

    @property
    def facts(self) -> Staged:
        """The statistics of the copies."""
        if self._since is None:
            return self._staged
        waited_s = time.perf_counter() - self._since
        return replace(self._staged, budget_wait_s=self._staged.budget_wait_s + waited_s)

    def close(self) -> None:
        """Releases the memory of transfers; called when it is no longer needed."""
        with suppress(Exception):  # a device that failed cannot be waited for
            self.wait_transferred()
        self._transfers = []
        self._area.unreserve(self._transferred)


ChunkKey = tuple[int, int]
"""A chunk's array, and its position in it."""
_COPIES = {SnapshotMethod.COPY_NOW, SnapshotMethod.COPY_LATER}


def _none() -> dict[SnapshotMethod, list[WriteItem]]:
    return {method: [] for method in SnapshotMethod}


@dataclass(frozen=True)
class StagedPlan:
    """The chunks of one save.

    Arguments:
        writes: what this process holds and writes.
        items: the chunks by how they are kept, in the order in which they are copied.
        deferred: the chunks to copy later because they do not fit.
        spare_bytes: memory that transfers leave for all other copies.
        waits_for_commit: whether the state may change only after the commit.
    """

    writes: WritePlan = field(default_factory=lambda: WritePlan((), ()))
    items: dict[SnapshotMethod, list[WriteItem]] = field(default_factory=_none)
    deferred: Sequence[WriteItem] = ()
    spare_bytes: int = 0
    waits_for_commit: bool = False


def plan_staging(writes: WritePlan, capture: SnapshotPolicy, memory: CopyMemory) -> StagedPlan:
    """Plans how the chunks of a save are staged.

    Arguments:
        writes: what this process holds and writes.
        capture: decides how fragments are kept.
        memory: for copies.
    """
    spare = [item for item in writes.held_items if item.assumed and not item.borrowed]
    if spare:
        own_keys = set(map(key, writes.own_items))
        spare = [item for item in spare if key(item) not in own_keys]
    copied_spare = [item for item in spare if capture.methods[item.fragment] in _COPIES]
    spare_bytes = sum(item.nbytes for item in copied_spare)
    waits_for_commit = spare_bytes > 0 and spare_bytes > _spare_room(writes.own_items, memory)
    room = memory.room
    if not waits_for_commit:
        room -= sum(item.nbytes for item in spare)
    planned, deferred = _deferring(writes.own_items, capture, room)
    planned.sort(key=lambda item: capture.methods[item.fragment].value)
    items = _none()
    for item in _without_borrowed(planned):
        items[capture.methods[item.fragment]].append(item)
    for item in spare:
        method = capture.methods[item.fragment]
        copy = method in _COPIES and not waits_for_commit
        items[method if copy else SnapshotMethod.REFERENCE].append(item)
    writes = replace(writes, own_items=planned)
    copies = [item.nbytes for method in _COPIES | BACKGROUND for item in items[method]]
    left = 0
    if sum(copies) > memory.budget:  # else none has to wait for another
        left = max(copies) + (0 if waits_for_commit else spare_bytes)
    return StagedPlan(writes, items, deferred, left, waits_for_commit)


def _spare_room(own_items: Sequence[WriteItem], memory: CopyMemory) -> int:
    """Bytes for copies of chunks that another process should write.

    If that process lacks them, this one must write them, so they are held until the commit. They
    may take up to half of the memory. If they do not fit, none of them is copied, and the caller
    waits for the commit.
    """
    return memory.budget // 2 - max(
        (item.nbytes for item in _without_borrowed(own_items)), default=0
    )


def _deferring(
    own_items: Sequence[WriteItem], capture: SnapshotPolicy, room: int
) -> tuple[list[WriteItem], list[WriteItem]]:
    """The items of this process, and those of them that are copied later because they do not fit.

    Arguments:
        own_items: the items that it writes.
        capture: knows for which chunks deferring is safe.
        room: bytes of copies that fit.
    """
    planned_items, deferred = [], []
    for item in own_items:
        if not item.borrowed and capture.methods[item.fragment] is SnapshotMethod.COPY_NOW:
            room -= item.nbytes
            later = capture.deferred(item.fragment) if room < 0 else None
            if later is not None:
                item = replace(item, fragment=later)
                deferred.append(item)
        planned_items.append(item)
    return planned_items, deferred


def key(item: WriteItem) -> ChunkKey:
    """The key of a chunk."""
    return item.array, item.position


def _without_borrowed(items: Iterable[WriteItem]) -> list[WriteItem]:
    """The items whose own data are saved."""
    return [item for item in items if not item.borrowed]
