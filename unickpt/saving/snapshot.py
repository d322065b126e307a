"""The state that one save keeps: copied in time, and provided to the writer."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from unickpt.arrays.dtypes import Array
from unickpt.errors import CoverageError
from unickpt.format import codec
from unickpt.frameworks.host_memory import stage
from unickpt.frameworks.protocol import ArraySource, Fragment
from unickpt.references.chunks import WriteItem
from unickpt.saving.plan_cache import CachedPlan, SameTree
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


class Snapshot:
    """The state that one save keeps; a `ChunkSource`.

    Arguments:
        task: the save.
        area: memory for copies.
        owners: what the optimizers own whose steps wait for this; None if no steps wait.
        waited_s: for how long this save has already waited for an earlier one's memory.
        same: its tree, if a plan for it is known.
    """

    background = True
    cached: CachedPlan | None = None
    """What may be known of the tree in the next save of it."""

    def __init__(
        self,
        task: SaveTask,
        area: HostMemoryPool,
        owners: set[Hashable] | None,
        waited_s: float = 0.0,
        same: SameTree | None = None,
    ) -> None:
        self._task, self._area = task, area
        self._abandoned = self._wait_for_commit = False
        self._events = task.events
        self._changed = self._events.changed
        writes = partial(self._events.happened, SaveEvent.WRITABLE)
        self._memory = CopyMemory(task, area, waited_s, lambda: self._abandoned, writes)
        self._budget, self.working_bytes = self._memory.budget, self._memory.working_bytes
        self._direct = DirectSource(self.working_bytes)
        self._plan: StagedPlan | None = None
        self._changes = Changes(self._direct)
        self._copying: dict[SnapshotMethod, OrderedCopy[None]] = {}
        self._staged: dict[ChunkKey, StagedChunk] = {}
        self._references: dict[ChunkKey, WriteItem] = {}
        self._error: BaseException | None = None
        described = task.description
        sources = described.sources.values() if same is None else same.others
        self._capture = capture = SnapshotPolicy(task.options, owners, sources, self._budget)
        self.sources: Mapping[str, ArraySource]
        """The arrays of the save, as they are kept."""
        if same is None:
            self.sources = {
                name: capture.keep(source, partial(described.borrows, name))
                for name, source in described.sources.items()
            }
        else:
            self.sources, self.cached = same.keep(capture, described), same.plan
        self.methods: Mapping[Fragment, SnapshotMethod] = capture.methods
        """How each fragment of them is kept."""
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

    @property
    def staged(self) -> Staged:
        return self._memory.facts

    def prepare(self) -> None:
        """Determines what is copied while the caller waits, and what of it is put off."""
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
                writes = self._writes()
                self._plan = plan = plan_staging(writes, self._capture, self._memory)
                self._wait_for_commit = plan.waits_for_commit
                self._references = {key(i): i for i in plan.items[SnapshotMethod.REFERENCE]}
                self._changes.watch(plan.items[SnapshotMethod.COPY_LATER])
            return self._plan

    def _writes(self) -> WritePlan:
        return self._task.plan() if self.cached is None else self.cached.planned(self._task)

    # --- staging -------------------------------------------------------------------------------

    def stage_now(self) -> None:
        """Copies what must be copied while the caller waits."""
        if self.has_now:
            with self.failing():
                self._transfer(SnapshotMethod.COPY_NOW)
                self._memory.go_first()
                self._copies(SnapshotMethod.COPY_NOW).run()
        self._memory.returns(waits_for_commit=self._wait_for_commit and not self.has_later)
        if not self.has_later:
            self._end()
        elif not self.is_fenced and not self._wait_for_commit:
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
            with self._changed:
                self._references |= {key(item): item for item in arriving}
                self._changed.notify_all()
            items[:] = [item for item in items if key(item) not in self._references]

    def stage_later(self) -> None:
        """Copies the rest; errors are raised by `fetch`."""
        with suppress(BaseException), self.failing():
            if self._error is not None:
                raise self._error
            self._transfer(SnapshotMethod.COPY_LATER)
            self._events.happened(SaveEvent.TRANSFERRING)
            self._copies(SnapshotMethod.COPY_LATER).run(alone=True)
            self._memory.wait_transferred()
            if not self._wait_for_commit:
                self._events.happened(SaveEvent.SAFE)
            self._copies(SnapshotMethod.CLONE).run(alone=True)
        self._end()

    def _end(self) -> None:
        if not self._wait_for_commit:
            self._events.happened(SaveEvent.SAFE)
        self._events.happened(SaveEvent.TRANSFERRING, SaveEvent.STAGED)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """An error here fails the save, and wakes threads that wait for staging."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            self._end()
            raise

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def settle(self) -> None:
        """Checks that lazily copied arrays are as they were when they were described.

        Called by the caller when it waits for the fence, because none of its operations is in
        progress then; and before the commit, if it never waited. Later changes are allowed.

        Raises:
            StateChanged: names the array.
        """
        try:
            if self._error is not None:
                raise self._error
            self._changes.settle()
        except BaseException as error:
            self._fail(error)  # staging may still be copying; it ends itself
            raise

    def _copies(self, method: SnapshotMethod) -> OrderedCopy[None]:
        """What makes the copies of a kind."""
        with self._changed:
            if method not in self._copying:
                plan = self._planned()
                deferred = frozenset(plan.deferred)

                def reserve(item: WriteItem) -> None:
                    self._memory.reserve(item, item in deferred)

                stopped = lambda: self._error is not None  # noqa: E731
                items = plan.items[method]
                self._copying[method] = OrderedCopy(items, reserve, self._keep, stopped)
            return self._copying[method]

    def _keep(self, item: WriteItem, _: None) -> None:
        copied = self._copied(item)
        with self._changed:
            self._staged[key(item)] = copied
            self._changed.notify_all()
        self._memory.count(copied=item.nbytes)

    def _copied(self, item: WriteItem) -> StagedChunk:
        """A copy in memory, which is reserved."""
        memory, taken = item.fragment.memory, list[Array]()

        def take(nbytes: int) -> Array:
            taken.append(self._area.take(nbytes, self._budget, memory))
            return taken[0]

        def release() -> None:
            for buffer in taken:
                self._area.give(buffer, memory)
            taken.clear()
            self._area.unreserve(item.nbytes)

        try:
            with self._changes.noticed(item) as compare:
                data = stage(item.fragment, item.box, item.dtype, take, copied=not memory.on_device)
                compare(data)
        except BaseException:
            release()
            raise
        return StagedChunk(data, 0, release)

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
        return done and not self._wait_for_commit

    def wait_fence(self) -> None:
        """As `wait_safe`; errors are raised by `PendingSave.result` instead."""
        with suppress(Exception):
            self.wait_safe()

    @property
    def waits_for_commit(self) -> bool:
        """Whether the state may change only after the commit."""
        return self._wait_for_commit

    def wait_complete(self) -> float:
        """Waits until staging needs no more memory.

        Returns:
            For how many seconds, if that is because not all copies fit into memory.
        """
        began = time.perf_counter()
        self._events.wait(SaveEvent.STAGED)
        return time.perf_counter() - began if self.staged.drained_bytes else 0.0

    # --- for the writer ------------------------------------------------------------------------

    def ready(self, items: Sequence[WriteItem]) -> bool:
        with self._changed:
            return self._error is not None or all(
                key(item) in self._staged or key(item) in self._references for item in items
            )

    def fetch(self, item: WriteItem) -> StagedChunk:
        found = self._find(item)
        if isinstance(found, WriteItem):
            return self._fetch_reference(found)
        return replace(found, release=partial(self._release, key(item)))

    def digest(self, item: WriteItem) -> int:
        found = self._find(item)
        if isinstance(found, StagedChunk):
            return codec.digest_as_stored(item.entry, found.data)
        staged = self._fetch_reference(found)
        try:
            return codec.digest_as_stored(item.entry, staged.data)
        finally:
            staged.release()

    def _find(self, item: WriteItem) -> StagedChunk | WriteItem:
        """Waits until a chunk is kept: in a copy, or where this item reads it."""
        of = key(item)
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    of in self._staged
                    or of in self._references
                    or self._error is not None
                    or SaveEvent.STAGED in self._events
                )
            )
            found = self._references.get(of) or self._staged.get(of)
            if found is not None:
                return found
            if self._error is not None:
                raise self._error
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

    def _release(self, of: ChunkKey) -> None:
        with self._changed:
            staged = self._staged.pop(of, None)
        if staged is not None:
            staged.release()

    def close(self) -> None:
        """Ends the save, written or not, and releases all that it keeps."""
        self._abandoned = True
        self._area.wake()
        self._events.wait(SaveEvent.STAGED)
        for of in list(self._staged):
            self._release(of)
        self._memory.close()
        if self.cached is not None and self._task.state is SaveState.COMMITTED:
            self.cached.give_back()
        self._plan = self.cached = None
        self.sources, self.methods = {}, {}
        self._references = {}
        self._copying = {}
        self._changes.forget()
        del self._task, self._capture
        self._events.happened(SaveEvent.SAFE)
