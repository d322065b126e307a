"""The state that one save keeps: copied in time, or referenced, and provided to the writer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from unickpt.arrays.dtypes import Array
from unickpt.errors import CoverageError
from unickpt.format import chunk_encoding
from unickpt.frameworks.host_memory import stage
from unickpt.references.value_places import WriteItem
from unickpt.saving.plan_cache import DescribedTree
from unickpt.saving.snapshot_policy import (
    BACKGROUND,
    Changes,
    OrderedCopy,
    SnapshotMethod,
    SnapshotPolicy,
)
from unickpt.saving.staging_memory import (
    ChunkKey,
    CopyMemory,
    HostMemoryPool,
    StagedPlan,
    key,
    plan_staging,
)
from unickpt.saving.task import SaveEvent, SaveState, SaveTask
from unickpt.saving.write_plan import DirectSource, Staged, StagedChunk, WritePlan
from unickpt.threads import Events


class KeptChunks:
    """The chunks that one save keeps; a `ChunkSource`.

    Arguments:
        area: memory for copies.
        memory: this save's share of it.
        changes: the chunks that must not change before they are copied.
        direct: reads chunks in place.
        events: of the save.
    """

    background = True

    def __init__(
        self,
        area: HostMemoryPool,
        memory: CopyMemory,
        changes: Changes,
        direct: DirectSource,
        events: Events[SaveEvent],
    ) -> None:
        self._area, self._memory, self._changes = area, memory, changes
        self._direct, self._events, self._changed = direct, events, events.changed
        self._copies: dict[ChunkKey, StagedChunk] = {}
        self._references: dict[ChunkKey, WriteItem] = {}
        self.error: BaseException | None = None
        """The error because of which not all can be kept."""

    @property
    def staged(self) -> Staged:
        return self._memory.facts

    def refer(self, items: Sequence[WriteItem]) -> None:
        """Has these chunks read in place; nothing changes them before the save has ended."""
        with self._changed:
            self._references |= {key(item): item for item in items}
            self._changed.notify_all()

    def refers(self, item: WriteItem) -> bool:
        """Whether a chunk is read in place."""
        return key(item) in self._references

    def fail(self, error: BaseException) -> None:
        """Fails the save with an error, and wakes threads that wait for chunks."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def check(self) -> None:
        """Raises the error, if there is one."""
        if self.error is not None:
            raise self.error

    def clear(self) -> None:
        """Releases the copies, and drops all references."""
        for chunk_key in list(self._copies):
            self._release(chunk_key)
        self._references = {}

    def copy(self, item: WriteItem, _: None) -> None:
        """Copies a chunk into reserved memory."""
        copied = self._copied(item)
        with self._changed:
            self._copies[key(item)] = copied
            self._changed.notify_all()
        self._memory.count(copied=item.nbytes)

    def _copied(self, item: WriteItem) -> StagedChunk:
        """A copy in reserved memory."""
        memory, buffers = item.fragment.memory, list[Array]()

        def take(nbytes: int) -> Array:
            buffers.append(self._area.take(nbytes, self._memory.budget, memory))
            return buffers[0]

        def release() -> None:
            for buffer in buffers:
                self._area.give(buffer, memory)
            buffers.clear()
            self._area.unreserve(item.nbytes)

        try:
            with self._changes.noticed(item) as compare:
                data = stage(item.fragment, item.box, item.dtype, take, copied=not memory.on_device)
                compare(data)
        except BaseException:
            release()
            raise
        return StagedChunk(data, 0, release)

    def ready(self, items: Sequence[WriteItem]) -> bool:
        with self._changed:
            return self.error is not None or all(
                key(item) in self._copies or key(item) in self._references for item in items
            )

    def fetch(self, item: WriteItem) -> StagedChunk:
        kept_chunk = self._find(item)
        if isinstance(kept_chunk, WriteItem):
            return self._fetch_reference(kept_chunk)
        return replace(kept_chunk, release=partial(self._release, key(item)))

    def digest(self, item: WriteItem) -> int:
        kept_chunk = self._find(item)
        if isinstance(kept_chunk, StagedChunk):
            return chunk_encoding.digest_as_stored(item.entry, kept_chunk.data)
        staged = self._fetch_reference(kept_chunk)
        try:
            return chunk_encoding.digest_as_stored(item.entry, staged.data)
        finally:
            staged.release()

    def _find(self, item: WriteItem) -> StagedChunk | WriteItem:
        """Waits until a chunk is kept: as a copy, or where this item reads it."""
        chunk_key = key(item)
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    chunk_key in self._copies
                    or chunk_key in self._references
                    or self.error is not None
                    or SaveEvent.STAGED in self._events
                )
            )
            kept_chunk = self._references.get(chunk_key) or self._copies.get(chunk_key)
            if kept_chunk is not None:
                return kept_chunk
            self.check()
        raise CoverageError(
            f"array {item.entry.name!r} {item.box}: by its layout another process holds this "
            "chunk, but that process lacks the array in its tree, and this one staged only its own "
            "share. "
            "Give all processes of a mesh the same arrays, or use unickpt.save, without staging"
        )

    def _fetch_reference(self, item: WriteItem) -> StagedChunk:
        staged = self._direct.fetch(item)
        if not item.fragment.memory.mutable:
            return staged

        def release() -> None:
            staged.release()
            self._changes.check(item)  # in case the caller did not wait

        return replace(staged, release=release)

    def _release(self, chunk_key: ChunkKey) -> None:
        with self._changed:
            staged = self._copies.pop(chunk_key, None)
        if staged is not None:
            staged.release()


class Snapshot:
    """The state that one save keeps, until `chunks` holds everything to write.

    Arguments:
        task: the save.
        described: its tree.
        area: memory for copies.
        owners: the memory of the optimizers whose steps wait for this; None if no steps wait.
        waited_s: for how long this save has already waited for an earlier one's memory.
    """

    def __init__(
        self,
        task: SaveTask,
        described: DescribedTree,
        area: HostMemoryPool,
        owners: set[Hashable] | None,
        waited_s: float = 0.0,
    ) -> None:
        self._task, self._tree, self._area = task, described, area
        self._abandoned = self._is_rehearsed = False
        self.waits_for_commit = False
        """Whether the state may change only after the commit."""
        self._events = task.events
        self._changed = self._events.changed
        writes = partial(self._events.happened, SaveEvent.WRITABLE)
        self._memory = CopyMemory(task, area, waited_s, lambda: self._abandoned, writes)
        self._budget, self.working_bytes = self._memory.budget, self._memory.working_bytes
        direct = DirectSource(self.working_bytes)
        self._plan: StagedPlan | None = None
        self._changes = Changes(direct)
        self._copying: dict[SnapshotMethod, OrderedCopy[None]] = {}
        self.chunks = KeptChunks(area, self._memory, self._changes, direct, self._events)
        """Provides the chunks to the writer."""
        self._capture = capture = SnapshotPolicy(
            task.options, owners, described.described, self._budget
        )
        self.sources = described.keep(capture)
        """The arrays of the save, as they are kept."""
        self._memory.count(copied=capture.copied_bytes)
        self._used = capture.used
        self.has_now = SnapshotMethod.COPY_NOW in self._used

    @property
    def has_later(self) -> bool:
        """Whether something is copied in the background; known after `prepare`."""
        return not BACKGROUND.isdisjoint(self._used)

    @property
    def is_fenced(self) -> bool:
        """Whether something is copied in the background that must not change before."""
        return SnapshotMethod.COPY_LATER in self._used

    def prepare(self) -> None:
        """Determines which chunks are copied while the caller waits, and which are deferred."""
        if self.has_now:
            deferred = self._planned().deferred
            self._changes.remember(deferred)
            self._memory.count(drained=sum(item.nbytes for item in deferred))

    def plan(self) -> WritePlan:
        """Determines the chunks and the order in which they are staged and written."""
        return self._planned().writes

    def _planned(self) -> StagedPlan:
        """The plan, which is made once."""
        with self._changed:
            if self._abandoned:
                return StagedPlan()
            if self._plan is None:
                self._plan = plan = plan_staging(self._tree.plan(), self._capture, self._memory)
                self.waits_for_commit = plan.waits_for_commit
                self.chunks.refer(plan.items[SnapshotMethod.REFERENCE])
                self._changes.watch(plan.items[SnapshotMethod.COPY_LATER])
            return self._plan

    # --- staging -------------------------------------------------------------------------------

    def stage_now(self) -> None:
        """Copies what must be copied while the caller waits."""
        if self.has_now:
            with self.failing():
                self._transfer(SnapshotMethod.COPY_NOW)
                self._memory.go_first()
                self._copies(SnapshotMethod.COPY_NOW).run()
        self._memory.returns(waits_for_commit=self.waits_for_commit and not self.has_later)
        if not self.has_later:
            self._end()
        elif not self.is_fenced and not self.waits_for_commit:
            self._events.happened(SaveEvent.SAFE)

    def _transfer(self, method: SnapshotMethod) -> None:
        """Has devices copy to the host what they can, without waiting for it."""
        plan = self._planned()
        items = plan.items[method]
        try:
            arriving = self._memory.transfer(items, plan.spare_bytes)
        except BaseException:
            for item in items:
                self._changes.check(item)  # a clearer error than that of reading a deleted array
            raise
        if arriving:
            self.chunks.refer(arriving)
            items[:] = [item for item in items if not self.chunks.refers(item)]

    def stage_later(self) -> None:
        """Copies the rest; errors are raised by `fetch`."""
        with suppress(BaseException), self.failing():
            self.chunks.check()
            self._transfer(SnapshotMethod.COPY_LATER)
            self._events.happened(SaveEvent.TRANSFERRING)
            self._copies(SnapshotMethod.COPY_LATER).run(alone=True)
            self._memory.wait_transferred()
            if not self.waits_for_commit:
                self._events.happened(SaveEvent.SAFE)
            self._copies(SnapshotMethod.CLONE).run(alone=True)
        self._end()

    def rehearse(self) -> int:
        """Copies what fits into memory now, as `stage_now` and `stage_later` do, for nobody: later
        copies find memory that was written to before, or is page-locked.

        Returns:
            How many bytes.
        """
        with self.failing():
            items, room = self._planned().items, self._memory.room
            for method in (
                SnapshotMethod.COPY_NOW,
                SnapshotMethod.COPY_LATER,
                SnapshotMethod.CLONE,
            ):
                ends = itertools.accumulate(item.nbytes for item in items[method])
                items[method][:] = items[method][: sum(end <= room for end in ends)]
                room -= sum(item.nbytes for item in items[method])
                self._transfer(method)
                self._copies(method).run()
            self._is_rehearsed = True
        self._end()
        return self._memory.facts.staged_bytes

    def _end(self) -> None:
        if not self.waits_for_commit:
            self._events.happened(SaveEvent.SAFE)
        self._events.happened(SaveEvent.TRANSFERRING, SaveEvent.STAGED)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Fails the save on an error, and wakes threads that wait for staging."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Fails the save with an error, and wakes threads that wait for staging."""
        self.chunks.fail(error)
        self._end()

    def settle(self) -> None:
        """Checks that lazily copied arrays have not changed since they were described.

        Called by the caller when it waits for the fence, because none of its operations is in
        progress then; and before the commit, if it never waited. Later changes are allowed.

        Raises:
            StateChanged: names the array.
        """
        try:
            self.chunks.check()
            self._changes.settle()
        except BaseException as error:
            self.chunks.fail(error)  # staging may still be copying; it stops by itself
            raise

    def _copies(self, method: SnapshotMethod) -> OrderedCopy[None]:
        """The `OrderedCopy` that makes the copies of a kind."""
        with self._changed:
            if method not in self._copying:
                plan = self._planned()
                deferred = frozenset(plan.deferred)

                def reserve(item: WriteItem) -> None:
                    self._memory.reserve(item, item in deferred)

                chunks, items = self.chunks, plan.items[method]
                stopped = lambda: chunks.error is not None  # noqa: E731
                self._copying[method] = OrderedCopy(items, reserve, chunks.copy, stopped)
            return self._copying[method]

    # --- for the caller ------------------------------------------------------------------------

    def wait_safe(self, timeout: float | None = None) -> bool:
        """Waits until the state may change; False if that takes too long.

        Raises:
            StateChanged: it has already changed.
        """
        began = time.perf_counter()
        if self.is_fenced and SaveEvent.SAFE not in self._events:
            if not self._events.wait(SaveEvent.TRANSFERRING, timeout):
                return False
            if timeout is not None:
                timeout = max(0.0, timeout - (time.perf_counter() - began))
            if not self._all_transferring():
                self._copies(SnapshotMethod.COPY_LATER).hurry()
                if not self._events.wait(SaveEvent.SAFE, timeout):
                    return False
        elif not self._events.wait(SaveEvent.SAFE, timeout):
            return False
        self._memory.go_first()  # this thread's work may be queued elsewhere than the caller's
        self.settle()
        return True

    def _all_transferring(self) -> bool:
        """Whether devices copy all that must not change before it is copied."""
        with self._changed:
            plan = self._plan
        done = plan is not None and not plan.items[SnapshotMethod.COPY_LATER]
        return done and not self.waits_for_commit

    def wait_fence(self) -> None:
        """As `wait_safe`; errors are raised by `PendingSave.result` instead."""
        with suppress(Exception):
            self.wait_safe()

    def wait_complete(self) -> float:
        """Waits until staging needs no more memory.

        Returns:
            For how many seconds, if that is because not all copies fit into memory.
        """
        began = time.perf_counter()
        self._events.wait(SaveEvent.STAGED)
        return time.perf_counter() - began if self._memory.facts.drained_bytes else 0.0

    def close(self) -> None:
        """Ends the save, written or not, and releases everything it keeps."""
        self._abandoned = True
        self._area.wake()
        self._events.wait(SaveEvent.STAGED)
        self.chunks.clear()
        self._memory.close()
        if self._is_rehearsed or self._task.state is SaveState.COMMITTED:
            self._tree.give_back()
        self._plan, self.sources, self._copying = None, {}, {}
        self._changes.forget()
        del self._task, self._tree, self._capture
        self._events.happened(SaveEvent.SAFE)
