"""Staging for asynchronous saves: copies the state in time, and provides it to the writer."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from unickpt.arrays.dtypes import Array
from unickpt.errors import CoverageError, StateChanged
from unickpt.format import chunk_store
from unickpt.frameworks.host_copy import stage
from unickpt.saving.capture import BACKGROUND, Keeping, Way
from unickpt.saving.chunk_source import Direct, Staged, named
from unickpt.saving.save_job import Saving
from unickpt.saving.staging_memory import HostArea
from unickpt.saving.write_plan import ChunkJob

_log = logging.getLogger("unickpt")
_THREADS = 4  # at most, for copying
_ALONE_BYTES = 16 << 20  # below this, starting threads costs more than it gains
_TOLD_S = 0.1


class Staging:
    """The state that one save keeps; a `Supply`.

    Arguments:
        saving: the save. Its description is replaced by that of the kept state.
        area: memory for copies.
        owners: what the optimizers own whose steps wait for this; None if no steps wait.
    """

    behind = True

    def __init__(self, saving: Saving, area: HostArea, owners: set[Hashable] | None) -> None:
        self._saving, self._area, self._budget = saving, area, saving.options.budget_bytes
        self._direct = Direct(self._budget)
        self._told = threading.Condition()
        self._planning, self._settling = threading.Lock(), threading.Lock()
        self._staged: dict[tuple[int, int], Staged] = {}
        self._references: dict[tuple[int, int], ChunkJob] = {}
        self._jobs: dict[Way, list[ChunkJob]] = {way: [] for way in Way}
        self._error: BaseException | None = None
        self._watched: dict[int, ChunkJob] = {}
        self._planned = self._abandoned = self._wait_for_commit = False
        self.may_write = threading.Event()
        """Set when writing would not slow the caller down, or when the caller waits for it."""
        self._safe, self._complete = threading.Event(), threading.Event()
        described = saving.description.sources
        keeping = Keeping(saving.options, owners, described.values())
        sources = {name: keeping.keep(source) for name, source in described.items()}
        saving.description = replace(saving.description, sources=sources)
        self._ways, self.nbytes = keeping.ways, keeping.copied_bytes
        """Bytes that were copied to host memory."""
        used = set(self._ways.values())
        self.has_now, self.has_later = Way.NOW in used, not used.isdisjoint(BACKGROUND)
        self._fenced = Way.LATER in used

    def plan(self) -> None:
        """Determines the chunks and the order in which they are staged, if not done before."""
        with self._planning:
            if self._planned or self._abandoned:
                return
            self._saving.plan()
            jobs: dict[Way, list[ChunkJob]] = {way: [] for way in Way}
            for job in self._saving.share:
                jobs[self._ways[id(job.fragment)]].append(job)
            self._saving.share = [job for way in Way for job in jobs[way]]
            self._plan_spare(jobs)
            self._references = {_key(job): job for job in jobs[Way.REFERENCE]}
            later = [job for job in jobs[Way.LATER] if job.fragment.memory.mutable]
            self._watched = {id(job.fragment): job for job in later}
            self._jobs, self._planned = jobs, True

    def _plan_spare(self, jobs: dict[Way, list[ChunkJob]]) -> None:
        """Adds chunks that another process should write; if it lacks them, this one must."""
        own = {_key(job) for job in self._saving.share}
        spare = [job for job in self._saving.held if job.assumed and _key(job) not in own]
        own_copies = {Way.NOW, Way.LATER}
        copied = [job for job in spare if self._ways[id(job.fragment)] in own_copies]
        # They are held until the commit. If they are too large, the caller waits for the commit.
        held = sum(job.nbytes for job in copied)
        largest = max((job.nbytes for job in self._saving.share), default=0)
        self._wait_for_commit = held > 0 and held + largest > self._budget // 2
        for job in spare:
            way = self._ways[id(job.fragment)]
            copy = way in own_copies and not self._wait_for_commit
            jobs[way if copy else Way.REFERENCE].append(job)

    # --- staging -------------------------------------------------------------------------------

    def stage_now(self) -> None:
        """Copies what must be copied while the caller waits."""
        if self.has_now:
            began = time.perf_counter()
            with self.failing():
                self.plan()
                self._copy(self._jobs[Way.NOW])
            self._tell_of_waiting(time.perf_counter() - began)
        if not self.has_later:
            self._end()
        elif not self._fenced and not self._wait_for_commit:
            self._safe.set()

    def _tell_of_waiting(self, waited: float) -> None:
        total = sum(job.nbytes for job in self._jobs[Way.NOW])
        if total > self._budget and waited > _TOLD_S:
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
            self._copy(self._jobs[Way.LATER], threads=1)
            if not self._wait_for_commit:
                self._safe.set()
            self._copy(self._jobs[Way.BEHIND], threads=1)
        self._end()

    def _end(self) -> None:
        if not self._wait_for_commit:
            self._safe.set()
        with self._told:
            self._complete.set()
            self._told.notify_all()

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
        with self._told:
            self._error = self._error or error
            self._told.notify_all()

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
                for job in self._watched.values():
                    self._check(job)
                self._watched = {}
        except BaseException as error:
            self._fail(error)  # staging may still be copying; it ends itself
            raise

    def _check(self, job: ChunkJob) -> None:
        memory = job.fragment.memory
        if memory.changed is not None and memory.changed():
            raise StateChanged(
                f"array {job.entry.name!r} was changed in place, donated or deleted after the save "
                "was requested and before it was staged. Call PendingSave.wait_staged() before the "
                "update (Checkpointer(optimizers=[...]) does that automatically), or save with "
                'SaveOptions(staging="copy"). The checkpoint was not saved.'
            )

    def _copy(self, jobs: Sequence[ChunkJob], threads: int = _THREADS) -> None:
        if sum(job.nbytes for job in jobs) < _ALONE_BYTES:
            threads = 1
        rest, order, errors = iter(jobs), threading.Lock(), list[BaseException]()
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
        self, rest: Iterator[ChunkJob], order: threading.Lock, errors: list[BaseException]
    ) -> None:
        try:
            while not errors and self._error is None:
                with order:  # memory goes to chunks in the order in which they are written
                    job = next(rest, None)
                    if job is None:
                        return
                    self._reserve(job.nbytes)
                self._keep(job)
        except BaseException as error:
            errors.append(error)

    def _reserve(self, nbytes: int) -> None:
        if not self._area.reserve(nbytes, self._budget):
            self.may_write.set()
            self._area.wait_and_reserve(nbytes, self._budget, lambda: self._abandoned)

    def _keep(self, job: ChunkJob) -> None:
        memory, taken = job.fragment.memory, list[Array]()

        def take(nbytes: int) -> Array:
            taken.append(self._area.take(nbytes, self._budget, memory))
            return taken[0]

        def release() -> None:
            for buffer in taken:
                self._area.give(buffer, memory)
            taken.clear()
            self._area.unreserve(job.nbytes)

        lazy = memory.mutable and self._ways[id(job.fragment)] is Way.LATER
        try:
            if lazy:
                self._check(job)
            try:
                data = stage(job.fragment, job.box, job.dtype, take, copied=not memory.on_device)
            except StateChanged as error:
                raise named(error, job) from None
            if lazy:  # it may have changed temporarily, as for evaluating averaged weights
                self._check(job)
        except BaseException as error:
            release()
            self._check(job)  # a clearer error than that of reading a deleted array
            error.add_note(f"unickpt: while array {job.entry.name!r} was being staged")
            raise
        with self._told:
            self._staged[_key(job)] = Staged(data, 0, release)
            self.nbytes += job.nbytes
            self._told.notify_all()

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

    def ready(self, jobs: Sequence[ChunkJob]) -> bool:
        with self._told:
            return self._error is not None or all(
                _key(job) in self._staged or _key(job) in self._references for job in jobs
            )

    def fetch(self, job: ChunkJob) -> Staged:
        key = _key(job)
        if key in self._references:
            return self._fetch_reference(self._references[key])
        return replace(self._fetch_copy(job), release=partial(self._release, key))

    def digest(self, job: ChunkJob) -> int:
        if _key(job) not in self._references:
            return chunk_store.digest(self._fetch_copy(job).data)
        staged = self._fetch_reference(self._references[_key(job)])
        try:
            return chunk_store.digest(staged.data)
        finally:
            staged.release()

    def _fetch_copy(self, job: ChunkJob) -> Staged:
        key = _key(job)
        with self._told:
            while key not in self._staged and self._error is None and not self._complete.is_set():
                self._told.wait()
            found = self._staged.get(key)
            if found is not None:
                return found
            if self._error is not None:
                raise self._error
        raise CoverageError(
            f"array {job.entry.name!r} {job.box}: by its layout another process holds this chunk, "
            "but that process lacks the array in its tree, and this one staged only its own share. "
            "Give all processes of a mesh the same arrays, or use unickpt.save, without staging"
        )

    def _fetch_reference(self, job: ChunkJob) -> Staged:
        staged = self._direct.fetch(job)
        if not job.fragment.memory.mutable:
            return staged

        def release() -> None:
            staged.release()
            self._check(job)  # in case the caller did not wait

        return replace(staged, release=release)

    def _release(self, key: tuple[int, int]) -> None:
        with self._told:
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
        self._jobs = {way: [] for way in Way}
        self._references, self._watched = {}, {}
        del self._saving
        self._safe.set()


def _key(job: ChunkJob) -> tuple[int, int]:
    return job.array, job.position
