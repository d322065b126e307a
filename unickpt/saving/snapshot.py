"""The state that one save keeps: copied in time, and provided to the writer."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from unickpt.arrays.dtypes import Array
from unickpt.errors import CoverageError, StorageError
from unickpt.format import codec
from unickpt.frameworks.host_memory import stage
from unickpt.frameworks.protocol import ArraySource, Fragment
from unickpt.saving.plan_cache import CachedPlan, SameTree
from unickpt.saving.snapshot_policy import (
    BACKGROUND,
    Changes,
    OrderedCopy,
    SnapshotMethod,
    SnapshotPolicy,
)
from unickpt.saving.staging_memory import CopyPlace, HostMemoryPool, NoSlot, Places, SpilledChunk
from unickpt.saving.task import SaveEvent, SaveState, SaveTask
from unickpt.saving.write_plan import DirectSource, Staged, StagedChunk, WriteItem, WritePlan
from unickpt.storage.spill_files import Slot

ChunkKey = tuple[int, int]
"""Of a chunk: its array, and its position there."""
_COPIES = {SnapshotMethod.COPY_NOW, SnapshotMethod.COPY_LATER}


def _none() -> dict[SnapshotMethod, list[WriteItem]]:
    return {method: [] for method in SnapshotMethod}


@dataclass(frozen=True)
class StagedPlan:
    """The chunks of one save.

    Arguments:
        writes: what this process holds and writes.
        items: the chunks by how they are kept, in the order in which they are copied.
        deferred: those to be copied later because they do not fit.
        never_in_memory: those whose copies may only be in files.
        waits_for_commit: whether the state may change only after the commit.
    """

    writes: WritePlan = field(default_factory=lambda: WritePlan((), ()))
    items: dict[SnapshotMethod, list[WriteItem]] = field(default_factory=_none)
    deferred: Sequence[WriteItem] = ()
    never_in_memory: frozenset[ChunkKey] = frozenset()
    waits_for_commit: bool = False


def plan_staging(writes: WritePlan, capture: SnapshotPolicy, places: Places) -> StagedPlan:
    """Plans how the chunks of a save are staged.

    Arguments:
        writes: what this process holds and writes.
        capture: decides how fragments are kept.
        places: for copies.
    """
    own = {key(item) for item in writes.own}
    spare = [item for item in kept(writes.held) if item.assumed and key(item) not in own]
    held_back = _held_back(spare, writes.own, capture, places)
    waits_for_commit = bool(held_back) and not places.can_spill
    room = places.room
    if not waits_for_commit:
        room -= sum(item.nbytes for item in spare if key(item) not in held_back)
    planned, deferred = _deferring(writes.own, capture, room)
    planned.sort(key=lambda item: capture.methods[item.fragment].value)
    items = _none()
    for item in kept(planned):
        items[capture.methods[item.fragment]].append(item)
    for item in spare:
        method = capture.methods[item.fragment]
        copy = method in _COPIES and not waits_for_commit
        items[method if copy else SnapshotMethod.REFERENCE].append(item)
    writes = WritePlan(writes.held, planned)
    return StagedPlan(writes, items, deferred, held_back, waits_for_commit)


def _held_back(
    spare: Sequence[WriteItem], own: Sequence[WriteItem], capture: SnapshotPolicy, places: Places
) -> frozenset[ChunkKey]:
    """Of chunks that another process should write, those that have no room in memory.

    If that process lacks them, this one must write them; so they are held until the commit. They
    may have up to half of the memory. If the others find no place in a file, nothing is copied, and
    the caller waits for the commit.
    """
    room = places.budget // 2 - max((item.nbytes for item in kept(own)), default=0)
    found = set()
    for item in spare:
        if capture.methods[item.fragment] in _COPIES:
            room -= item.nbytes
            if room < 0:
                found.add(key(item))
    return frozenset(found)


def _deferring(
    own: Sequence[WriteItem], capture: SnapshotPolicy, room: int
) -> tuple[list[WriteItem], list[WriteItem]]:
    """What this process writes, and of that what is copied later, because it does not fit.

    Arguments:
        own: what it writes.
        capture: knows of which chunks that is safe.
        room: bytes of copies that fit.
    """
    found, deferred = [], []
    for item in own:
        if not item.borrowed and capture.methods[item.fragment] is SnapshotMethod.COPY_NOW:
            room -= item.nbytes
            later = capture.deferred(item.fragment) if room < 0 else None
            if later is not None:
                item = replace(item, fragment=later)
                deferred.append(item)
        found.append(item)
    return found, deferred


def key(item: WriteItem) -> ChunkKey:
    """By which a chunk is found."""
    return item.array, item.position


def kept(items: Iterable[WriteItem]) -> list[WriteItem]:
    """Those whose own data are saved."""
    return [item for item in items if not item.borrowed]


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
        self._places = Places(task, area, waited_s, lambda: self._abandoned, writes)
        self._budget, self.working_bytes = self._places.budget, self._places.working_bytes
        self._direct = DirectSource(self.working_bytes)
        self._plan: StagedPlan | None = None
        self._changes = Changes(self._direct)
        self._copying: dict[SnapshotMethod, OrderedCopy[CopyPlace]] = {}
        self._staged: dict[ChunkKey, StagedChunk | SpilledChunk] = {}
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
            self.sources, self.cached = same.keep(capture), same.plan
        self.methods: Mapping[Fragment, SnapshotMethod] = capture.methods
        """How each fragment of them is kept."""
        self._places.count(copied=capture.copied_bytes)
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
        return self._places.facts

    def prepare(self) -> None:
        """Determines what is copied while the caller waits, and what of it is put off."""
        if self.has_now:
            deferred = self._planned().deferred
            self._changes.remember(deferred)
            self._places.count(drained=sum(item.nbytes for item in deferred))

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
                self._plan = plan = plan_staging(writes, self._capture, self._places)
                self._wait_for_commit = plan.waits_for_commit
                self._references = {key(i): i for i in plan.items[SnapshotMethod.REFERENCE]}
                self._changes.watch(plan.items[SnapshotMethod.COPY_LATER])
            return self._plan

    def _writes(self) -> WritePlan:
        if self.cached is None:
            return self._task.plan()
        self.cached.plan = self._task.plan(self.cached.plan)
        return self.cached.plan

    # --- staging -------------------------------------------------------------------------------

    def stage_now(self) -> None:
        """Copies what must be copied while the caller waits."""
        if self.has_now:
            with self.failing():
                self._transfer()
                self._copies(SnapshotMethod.COPY_NOW).run()
        self._places.returns(waits_for_commit=self._wait_for_commit and not self.has_later)
        if not self.has_later:
            self._end()
        elif not self.is_fenced and not self._wait_for_commit:
            self._events.happened(SaveEvent.SAFE)

    def _transfer(self) -> None:
        """Has devices copy to the host what they can, without waiting for it."""
        plan = self._planned()
        now, never = plan.items[SnapshotMethod.COPY_NOW], plan.never_in_memory
        arriving = self._places.transfer([item for item in now if key(item) not in never])
        if arriving:
            with self._changed:
                self._references |= {key(item): item for item in arriving}
            now[:] = [item for item in now if key(item) not in self._references]

    def stage_later(self) -> None:
        """Copies the rest; errors are raised by `fetch`."""
        with suppress(BaseException), self.failing():
            if self._error is not None:
                raise self._error
            self._copies(SnapshotMethod.COPY_LATER).run(alone=True)
            if not self._wait_for_commit:
                self._events.happened(SaveEvent.SAFE)
            self._copies(SnapshotMethod.CLONE).run(alone=True)
        self._end()

    def _end(self) -> None:
        if not self._wait_for_commit:
            self._events.happened(SaveEvent.SAFE)
        self._events.happened(SaveEvent.STAGED)

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

    def _copies(self, method: SnapshotMethod) -> OrderedCopy[CopyPlace]:
        """What makes the copies of a kind."""
        with self._changed:
            if method not in self._copying:
                plan = self._planned()
                deferred = frozenset(plan.deferred)

                def find_place(item: WriteItem) -> CopyPlace:
                    in_memory = key(item) not in plan.never_in_memory
                    return self._places.find(item, in_memory=in_memory, counted=item in deferred)

                stopped = lambda: self._error is not None  # noqa: E731
                items = plan.items[method]
                self._copying[method] = OrderedCopy(items, find_place, self._keep, stopped)
            return self._copying[method]

    def _keep(self, item: WriteItem, place: CopyPlace) -> None:
        if isinstance(place, Slot):
            if (spilled := self._spill(item, place)) is not None:
                self._has(item, spilled)
                self._places.count(spilled=item.nbytes)
                return
            # The file could not be written. Waiting for memory might last forever: chunks that are
            # written after this one may have it.
            place = self._find_other(item)
        if place is NoSlot.NOWHERE:
            self._refer(item)
        else:
            self._has(item, self._copied(item))
            self._places.count(copied=item.nbytes)

    def _find_other(self, item: WriteItem) -> CopyPlace:
        """A place for a chunk for which there is none in a file."""
        if key(item) in self._planned().never_in_memory:
            return NoSlot.NOWHERE
        self._area.reserve_anyway(item.nbytes)
        return NoSlot.MEMORY

    def _refer(self, item: WriteItem) -> None:
        """Keeps a spare chunk without a copy: the state may change only after the commit."""
        self._wait_for_commit = True
        with self._changed:
            self._references[key(item)] = item
            self._changed.notify_all()

    def _has(self, item: WriteItem, found: StagedChunk | SpilledChunk) -> None:
        with self._changed:
            self._staged[key(item)] = found
            self._changed.notify_all()

    def _spill(self, item: WriteItem, slot: Slot) -> SpilledChunk | None:
        spill = self._places.spill
        assert spill is not None, "it has the slot"
        return spill.write(item, slot, self._changes)

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
        if self.is_fenced and SaveEvent.SAFE not in self._events:
            self._copies(SnapshotMethod.COPY_LATER).hurry()
        if not self._events.wait(SaveEvent.SAFE, timeout):
            return False
        self.settle()
        return True

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
        if key(item) in self._references:
            return self._fetch_reference(self._references[key(item)])
        found, release = self._fetch_copy(item), partial(self._release, key(item))
        if isinstance(found, SpilledChunk):
            return self._read_back(found, release)
        return replace(found, release=release)

    def digest(self, item: WriteItem) -> int:
        if key(item) in self._references:
            staged = self._fetch_reference(self._references[key(item)])
        else:
            found = self._fetch_copy(item)
            if not isinstance(found, SpilledChunk):
                return codec.digest_as_stored(item.entry, found.data)
            staged = self._read_back(found, lambda: None)
        try:
            return codec.digest_as_stored(item.entry, staged.data)
        finally:
            staged.release()

    def _read_back(self, found: SpilledChunk, release: Callable[[], None]) -> StagedChunk:
        try:
            return found.fetch(release)
        except StorageError as error:
            raise StorageError(
                f"array {found.item.entry.name!r} {found.item.box}: {error}. The checkpoint was "
                "not saved; use another folder"
            ) from error

    def _fetch_copy(self, item: WriteItem) -> StagedChunk | SpilledChunk:
        of = key(item)
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    of in self._staged
                    or self._error is not None
                    or SaveEvent.STAGED in self._events
                )
            )
            found = self._staged.get(of)
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
        self._places.close()
        if self.cached is not None and self._task.state is SaveState.COMMITTED:
            self.cached.give_back()
        self._plan = self.cached = None
        self.sources, self.methods = {}, {}
        self._references = {}
        self._copying = {}
        self._changes.forget()
        del self._task, self._capture
        self._events.happened(SaveEvent.SAFE)
