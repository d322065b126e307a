"""Staging for asynchronous saves: copies the state in time, and provides it to the writer."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from unickpt.arrays.dtypes import Array
from unickpt.errors import CoverageError, StateChanged
from unickpt.format import chunk_store
from unickpt.frameworks.host_copy import stage
from unickpt.frameworks.protocol import ArraySource, Fragment
from unickpt.saving.capture import BACKGROUND, Capture, CaptureMethod
from unickpt.saving.chunk_source import DirectSource, StagedChunk, naming
from unickpt.saving.save_job import SaveJob
from unickpt.saving.staging_memory import HostArea
from unickpt.saving.write_plan import WriteItem, WritePlan

_log = logging.getLogger("unickpt")
_THREADS = 4  # at most, for copying
_ALONE_BYTES = 16 << 20  # below this, starting threads costs more than it gains
_WARN_S = 0.1

_Key = tuple[int, int]  # of a chunk: its array, and its position there


class Staging:
    """The state that one save keeps; a `ChunkSource`.

    Arguments:
        job: the save.
        area: memory for copies.
        owners: what the optimizers own whose steps wait for this; None if no steps wait.
    """

    behind = True

    def __init__(self, job: SaveJob, area: HostArea, owners: set[Hashable] | None) -> None:
        self._job, self._area, self._budget = job, area, job.options.budget_bytes
        self._direct = DirectSource(self._budget)
        self._changed = threading.Condition()
        self._planning, self._settling = threading.Lock(), threading.Lock()
        self._plan: WritePlan | None = None
        self._staged: dict[_Key, StagedChunk] = {}
        self._references: dict[_Key, WriteItem] = {}
        self._items = _nothing_planned()
        self._error: BaseException | None = None
        self._watched: dict[Fragment, WriteItem] = {}
        self._abandoned = self._wait_for_commit = False
        self.may_write = threading.Event()
        """Set when writing would not slow the caller down, or when the caller waits for it."""
        self._safe, self._complete = threading.Event(), threading.Event()
        capture = Capture(job.options, owners, job.description.sources.values())
        described = job.description
        self.sources: Mapping[str, ArraySource] = {
            name: capture.keep(source, partial(described.borrows, name))
            for name, source in described.sources.items()
        }
        """The arrays of the save, as they are kept."""
        self._methods, self.staged_bytes = capture.methods, capture.copied_bytes
        used = set(self._methods.values())
        self.has_now = CaptureMethod.COPY_NOW in used
        self.has_later = not used.isdisjoint(BACKGROUND)
        self._fenced = CaptureMethod.COPY_LATER in used

    def plan(self) -> WritePlan:
        """Determines the chunks and the order in which they are staged and written; once."""
        with self._planning:
            if self._abandoned:
                return WritePlan((), ())
            if self._plan is None:
                self._plan = self._make_plan()
            return self._plan

    def _make_plan(self) -> WritePlan:
        plan = self._job.plan(order=lambda item: self._method(item).value)
        items = _nothing_planned()
        for item in _kept(plan.own):
            items[self._method(item)].append(item)
        self._plan_spare(plan, items)
        self._references = {_key(item): item for item in items[CaptureMethod.REFERENCE]}
        later = [i for i in items[CaptureMethod.COPY_LATER] if i.fragment.memory.mutable]
        self._watched = {item.fragment: item for item in later}
        self._items = items
        return plan

    def _plan_spare(self, plan: WritePlan, items: dict[CaptureMethod, list[WriteItem]]) -> None:
        """Adds chunks that another process should write; if it lacks them, this one must."""
        own = {_key(item) for item in plan.own}
        spare = [item for item in _kept(plan.held) if item.assumed and _key(item) not in own]
        own_copies = {CaptureMethod.COPY_NOW, CaptureMethod.COPY_LATER}
        copied = [item for item in spare if self._method(item) in own_copies]
        # They are held until the commit. If they are too large, the caller waits for the commit.
        held = sum(item.nbytes for item in copied)
        largest = max((item.nbytes for item in _kept(plan.own)), default=0)
        self._wait_for_commit = held > 0 and held + largest > self._budget // 2
        for item in spare:
            method = self._method(item)
            copy = method in own_copies and not self._wait_for_commit
            items[method if copy else CaptureMethod.REFERENCE].append(item)

    def _method(self, item: WriteItem) -> CaptureMethod:
        return self._methods[item.fragment]

    # --- staging -------------------------------------------------------------------------------

    def stage_now(self) -> None:
        """Copies what must be copied while the caller waits."""
        if self.has_now:
            began = time.perf_counter()
            with self.failing():
                self.plan()
                self._copy(self._items[CaptureMethod.COPY_NOW])
            self._warn_of_waiting(time.perf_counter() - began)
        if not self.has_later:
            self._end()
        elif not self._fenced and not self._wait_for_commit:
            self._safe.set()

    def _warn_of_waiting(self, waited: float) -> None:
        total = sum(item.nbytes for item in self._items[CaptureMethod.COPY_NOW])
        if total > self._budget and waited > _WARN_S:
            _log.warning(
                "staging %.3g GB blocked the caller for %.2f s, because it exceeds SaveOptions."
                "budget_bytes (%.3g GB), so that staging waits for the storage",
                *(total / 1e9, waited, self._budget / 1e9),
            )

    def stage_later(self) -> None:
        """Copies the rest; errors are raised by `fetch`."""
        with suppress(BaseException), self.failing():
            if self._error is not None:
                raise self._error
            self.plan()
            self._copy(self._items[CaptureMethod.COPY_LATER], threads=1)
            if not self._wait_for_commit:
                self._safe.set()
            self._copy(self._items[CaptureMethod.CLONE], threads=1)
        self._end()

    def _end(self) -> None:
        if not self._wait_for_commit:
            self._safe.set()
        with self._changed:
            self._complete.set()
            self._changed.notify_all()

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
            with self._settling:
                if self._error is not None:
                    raise self._error
                for item in self._watched.values():
                    self._check(item)
                self._watched = {}
        except BaseException as error:
            self._fail(error)  # staging may still be copying; it ends itself
            raise

    def _check(self, item: WriteItem) -> None:
        memory = item.fragment.memory
        if memory.changed is not None and memory.changed():
            raise StateChanged(
                f"array {item.entry.name!r} was changed in place, donated or deleted after the "
                "save was requested and before it was staged. Call PendingSave.wait_staged() "
                "before the update (Checkpointer(optimizers=[...]) does that automatically), or "
                'save with SaveOptions(staging="copy"). The checkpoint was not saved.'
            )

    def _copy(self, items: Sequence[WriteItem], threads: int = _THREADS) -> None:
        if sum(item.nbytes for item in items) < _ALONE_BYTES:
            threads = 1
        rest, order, errors = iter(items), threading.Lock(), list[BaseException]()
        helpers = [
            threading.Thread(target=self._copy_some, args=(rest, order, errors))
            for _ in range(min(threads, os.cpu_count() or 1) - 1)
        ]
        for helper in helpers:
            helper.start()
        self._copy_some(rest, order, errors)
        for helper in helpers:
            helper.join()
        if errors:
            raise errors[0]

    def _copy_some(
        self, rest: Iterator[WriteItem], order: threading.Lock, errors: list[BaseException]
    ) -> None:
        try:
            while not errors and self._error is None:
                with order:  # memory goes to chunks in the order in which they are written
                    item = next(rest, None)
                    if item is None:
                        return
                    self._reserve(item.nbytes)
                self._keep(item)
        except BaseException as error:
            errors.append(error)

    def _reserve(self, nbytes: int) -> None:
        if not self._area.reserve(nbytes, self._budget):
            self.may_write.set()
            self._area.wait_and_reserve(nbytes, self._budget, lambda: self._abandoned)

    def _keep(self, item: WriteItem) -> None:
        memory, taken = item.fragment.memory, list[Array]()

        def take(nbytes: int) -> Array:
            taken.append(self._area.take(nbytes, self._budget, memory))
            return taken[0]

        def release() -> None:
            for buffer in taken:
                self._area.give(buffer, memory)
            taken.clear()
            self._area.unreserve(item.nbytes)

        lazy = memory.mutable and self._method(item) is CaptureMethod.COPY_LATER
        try:
            if lazy:
                self._check(item)
            try:
                data = stage(item.fragment, item.box, item.dtype, take, copied=not memory.on_device)
            except StateChanged as error:
                raise naming(error, item) from None
            if lazy:  # it may have changed temporarily, as for evaluating averaged weights
                self._check(item)
        except BaseException as error:
            release()
            self._check(item)  # a clearer error than that of reading a deleted array
            error.add_note(f"unickpt: while array {item.entry.name!r} was being staged")
            raise
        with self._changed:
            self._staged[_key(item)] = StagedChunk(data, 0, release)
            self.staged_bytes += item.nbytes
            self._changed.notify_all()

    # --- for the caller ------------------------------------------------------------------------

    def wait_safe(self, timeout: float | None = None) -> bool:
        """Waits until the state may change; False if that takes too long.

        Raises:
            StateChanged: it has already changed.
        """
        if not self._safe.wait(timeout):
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

    def wait_complete(self) -> None:
        """Waits until staging needs no more memory."""
        self._complete.wait()

    # --- for the writer ------------------------------------------------------------------------

    def ready(self, items: Sequence[WriteItem]) -> bool:
        with self._changed:
            return self._error is not None or all(
                _key(item) in self._staged or _key(item) in self._references for item in items
            )

    def fetch(self, item: WriteItem) -> StagedChunk:
        key = _key(item)
        if key in self._references:
            return self._fetch_reference(self._references[key])
        return replace(self._fetch_copy(item), release=partial(self._release, key))

    def digest(self, item: WriteItem) -> int:
        if _key(item) not in self._references:
            return chunk_store.digest_as_stored(item.entry, self._fetch_copy(item).data)
        staged = self._fetch_reference(self._references[_key(item)])
        try:
            return chunk_store.digest_as_stored(item.entry, staged.data)
        finally:
            staged.release()

    def _fetch_copy(self, item: WriteItem) -> StagedChunk:
        key = _key(item)
        with self._changed:
            while key not in self._staged and self._error is None and not self._complete.is_set():
                self._changed.wait()
            found = self._staged.get(key)
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
            self._check(item)  # in case the caller did not wait

        return replace(staged, release=release)

    def _release(self, key: _Key) -> None:
        with self._changed:
            staged = self._staged.pop(key, None)
        if staged is not None:
            staged.release()

    def close(self) -> None:
        """Ends the save, written or not, and releases all that it keeps."""
        self._abandoned = True
        self._area.wake()
        self._complete.wait()
        for key in list(self._staged):
            self._release(key)
        self._plan, self._items = None, _nothing_planned()
        self.sources, self._methods = {}, {}
        self._references, self._watched = {}, {}
        del self._job
        self._safe.set()


def _key(item: WriteItem) -> _Key:
    return item.array, item.position


def _kept(items: Iterable[WriteItem]) -> list[WriteItem]:
    return [item for item in items if not item.borrowed]


def _nothing_planned() -> dict[CaptureMethod, list[WriteItem]]:
    return {method: [] for method in CaptureMethod}
