"""A save in the background, on its own thread; no save and no error is lost.

The threads are not daemons, so that Python waits for them before it exits. An error that was never
raised makes the program exit with status 1.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from unickpt.errors import (
    ForkedProcess,
    ProcessFailed,
    SaveConflict,
    SaveTimeout,
    out_of_memory,
)
from unickpt.frameworks.process_group import Group
from unickpt.options import SaveOptions
from unickpt.quoting import error_text
from unickpt.save_report import SaveReport
from unickpt.saving.plan_cache import DescribedTree, PlanCache
from unickpt.saving.snapshot import Snapshot
from unickpt.saving.staging_memory import Abandoned, HostMemoryPool
from unickpt.saving.task import SaveEvent, SaveTask, call_metrics, send_failure
from unickpt.saving.write_plan import LearnedBytes
from unickpt.storage import paths
from unickpt.storage.locations import Location
from unickpt.threads import calling_user, collection_paused, step_back


@dataclass(frozen=True)
class Failure:
    """An error in the background.

    Arguments:
        what: the operation that failed.
        error: why it failed.
    """

    what: str
    error: BaseException


# --- when the program ends -----------------------------------------------------------------------

unfinished: set[PendingSave] = set()
"""Saves that have not ended."""
unraised: list[Failure] = []


def _exit_if_unraised() -> None:
    """Ends the program with status 1 if an error was never raised.

    Python offers no other way to change the exit status this late. Handlers that were registered
    before this module was imported are not called.
    """
    if not unraised:
        return
    for failure in unraised:
        print(
            f"unickpt: {failure.what} failed, and its result was not requested:\n"
            f"{error_text(failure.error)}",
            file=sys.stderr,
        )
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it may be closed, or None
            stream.flush()
    os._exit(1)


def exit_child() -> None:
    """The same in a process of `multiprocessing`, which does not call `atexit` handlers."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is None or multiprocessing.parent_process() is None:
        return
    if not threading.main_thread().is_alive() and not unfinished:
        _exit_if_unraised()


def _end() -> None:
    """Waits for saves that other `atexit` handlers have begun: Python would end their threads."""
    for save in list(unfinished):
        wait([save._finished])
    _exit_if_unraised()


atexit.register(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=unfinished.clear)
    os.register_at_fork(after_in_child=unraised.clear)

_log = logging.getLogger("unickpt")


class BackgroundErrors:
    """The background errors of one queue that were not raised yet."""

    def __init__(self) -> None:
        self._failures: list[Failure] = []

    def add(self, what: str, error: BaseException) -> Failure:
        """Keeps an error until it can be raised.

        Arguments:
            what, error: see `Failure`.
        """
        failure = Failure(what, error)
        self._failures.append(failure)
        unraised.append(failure)
        with suppress(BaseException):  # of a user's handler of logging, or of the error's text
            _log.error("%s failed: %s", what, error)
        return failure

    def raise_first(self) -> None:
        """Raises the first error that was not raised yet, if any."""
        if self._failures:
            self.raise_these(self._failures)

    def raise_unless_refused(self) -> None:
        """As `raise_first`, except for saves that failed only because another process refused
        them; otherwise two processes could refuse each other's saves forever."""
        errors = [failure.error for failure in self._failures]
        if not all(isinstance(error, ProcessFailed) and error.refused for error in errors):
            self.raise_first()

    def raise_these(self, failures: Sequence[Failure]) -> NoReturn:
        """Raises the first error, which names the others; drops all of them."""
        first, *remaining_failures = failures
        for failure in list(failures):
            self.forget(failure)
        notes = [f"unickpt: {first.what} failed with this error, in the background"]
        notes += [
            f"unickpt: {other.what} failed too: {error_text(other.error)}"
            for other in remaining_failures
        ]
        for note in notes:
            if note not in getattr(first.error, "__notes__", ()):
                first.error.add_note(note)
        raise first.error

    def forget(self, failure: Failure | None) -> None:
        """Drops an error, because its caller has it."""
        for failures in (self._failures, unraised):
            if failure in failures:
                failures.remove(failure)


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class SaveCallbacks:
    """Callbacks of a save; called on the thread that saves, unless stated otherwise.

    Arguments:
        begin: in the call, before the save starts; an error fails the save.
        prepare: before this process writes anything, with the name of the attempt; an error fails
            the save.
        check: right before the commit, on the coordinator; an error fails the save.
        committed: after the commit; raises nothing.
        failed: with the error that made the save fail; raises nothing.
        ended: at the end of the save, failed or not, even if it never started; raises nothing.
        survives: as in its report.
    """

    begin: Callable[[], None] = _nothing
    prepare: Callable[[str], None] = _nothing
    check: Callable[[], None] = _nothing
    committed: Callable[[], None] = _nothing
    failed: Callable[[BaseException], None] = _nothing
    ended: Callable[[], object] = _nothing
    survives: str = ""


class PendingSave:
    """A save that runs in the background, as `unickpt.save_async` returns it.

    Example:
        >>> import numpy as np, unickpt
        >>> pending = unickpt.save_async("memory://run/pending", {"w": np.ones(3)})
        >>> pending.wait_staged()  # from here on the state may change
        >>> pending.result().arrays
        1
    """

    def __init__(
        self,
        task: SaveTask,
        snapshot: Snapshot,
        previous: PendingSave | None,
        callbacks: SaveCallbacks,
        errors: BackgroundErrors,
    ) -> None:
        self.url: str = task.location.url
        """Where the checkpoint will be."""
        self._task, self._snapshot, self._previous = task, snapshot, previous
        self._callbacks, self._errors, self._events = callbacks, errors, task.events
        self._known = task.known
        self._learned: LearnedBytes | None = None
        self._finished: Future[None] = Future()
        """Done when the save is over, and its `SaveOptions.metrics` was called."""
        self._report: SaveReport | None = None
        self._failure: Failure | None = None
        self._process = os.getpid()
        self._begun = threading.Lock()  # not twice: on its thread, and for a call that failed

    def __repr__(self) -> str:
        ended = self._report if self._failure is None else self._failure.error
        return f"PendingSave({self.url!r}, {'not committed yet' if ended is None else repr(ended)})"

    def wait_staged(self, timeout: float | None = None) -> None:
        """Waits until the state that is being saved may be changed.

        Arguments:
            timeout: seconds; None waits without limit.

        Raises:
            StateChanged: the state was changed too early; the save fails.
            SaveTimeout: it takes longer; the save continues.
        """
        self._check_process()
        try:
            if not self._snapshot.wait_safe(timeout):
                raise SaveTimeout(f"{self.url}: not staged within {timeout:g} s; it continues")
        except Abandoned:
            pass  # the save failed for another reason, and no longer needs the state

    def result(self, timeout: float | None = None) -> SaveReport:
        """Waits until the checkpoint is committed, or the save has failed.

        Arguments:
            timeout: seconds; None waits without limit.

        Returns:
            What was written.

        Raises:
            SaveTimeout: it takes longer; the save continues.
            UnickptError: the error that made the save fail, as for `unickpt.save`.
        """
        self._check_process()
        if not self._wait_over(timeout):
            raise SaveTimeout(f"{self.url}: not committed within {timeout:g} s; it continues")
        if self._failure is not None:
            self._errors.raise_these([self._failure])
        assert self._report is not None, "a save ends with a report or with an error"
        return self._report

    def wait_ended(self) -> None:
        """Waits until the save is over, but not for its `SaveOptions.metrics`; raises no error."""
        self._events.wait(SaveEvent.ENDED)

    def done(self) -> bool:
        """Whether the save has ended, with a checkpoint or with an error."""
        return SaveEvent.ENDED in self._events if calling_user.active else self._finished.done()

    def failed(self) -> bool:
        """Whether the save has ended with an error, which `result` raises."""
        return self._failure is not None

    def add_done_callback(self, function: Callable[[], object]) -> None:
        """Calls a function when the save has ended, with a checkpoint or with an error. Runs on the
        saving thread, or at once if the save has already ended.

        Arguments:
            function: an error that it raises is logged, and does not affect the save.
        """
        self._check_process()

        def call(_: object) -> None:
            try:
                function()
            except Exception:
                _log.exception("a function to call at the end of the save of %s failed", self.url)

        self._finished.add_done_callback(call)

    def _wait_over(self, timeout: float | None = None) -> bool:
        """Waits until this save is over.

        A user's function waits only for saves to end, never for a metrics function to return: it
        could be waiting for itself, or for one that waits for it.
        """
        if self.done():
            return True
        refuse_within(self._errors)
        if calling_user.active:
            return self._events.wait(SaveEvent.ENDED, timeout)
        return bool(wait([self._finished], timeout).done)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ForkedProcess(
                f"{self.url}: this save belongs to the parent process; wait for it there"
            )

    # --- on the thread of the caller -----------------------------------------------------------

    def _begin(self) -> None:
        """Starts the thread that waits for its turn to write."""
        unfinished.add(self)
        threading.Thread(target=self._run, name=f"unickpt save {self.url}").start()

    def _stage(self, waits: bool) -> bool:
        """Stages what must be staged while the caller waits; starts the rest in the background.

        Returns:
            Whether there is a rest.
        """
        timings, snapshot = self._task.timings, self._snapshot
        try:
            with snapshot.failing():
                snapshot.prepare()
                has_later = snapshot.has_later
                if has_later:  # now, because the program may end right after this call
                    name = f"unickpt stage {self.url}"
                    threading.Thread(target=self._stage_later, name=name).start()
                snapshot.stage_now()
        except Abandoned:
            has_later = (
                snapshot.has_later
            )  # the writer failed, which is reported like any other error
        timings.lap("stage")
        if not waits and (has_later or not snapshot.waits_for_commit):
            timings.unblock()
        self._events.happened(*_LET_GO)
        return has_later

    def _abort(self, error: BaseException) -> None:
        """Fails the save, whose call raises this error; it may also be an interrupt before its
        thread has begun. Returns when the save has ended.

        Raises:
            OutOfMemory: instead of the error, if that is a lack of memory.
        """
        self._snapshot.fail(error)
        self._events.happened(*_LET_GO)
        self._run()
        self._events.wait(SaveEvent.ENDED)
        self._errors.forget(self._failure)
        if isinstance(error, MemoryError):
            raise out_of_memory(f"saving to {self.url.rstrip('/')}", error) from error

    # --- on its own threads --------------------------------------------------------------------

    def _stage_later(self) -> None:
        step_back()
        self._events.wait(SaveEvent.RETURNED)
        self._snapshot.stage_later()

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        previous, self._previous = self._previous, None
        options, group = self._task.options, self._task.group
        try:
            _this_thread.save = self
            self._write(previous)
            _this_thread.save = None
            if self._failure is not None:
                send_failure(options, self.url, group, self._failure.error)
            if previous is not None:
                wait([previous._finished])  # one report after another
            if self._report is not None and self._failure is None:
                call_metrics(options, self._report)
        except BaseException:  # such as SystemExit, which would end this thread silently
            ended = "is committed" if self._failure is None else "was not saved"
            _log.exception("SaveOptions.metrics failed; the checkpoint %s %s", self.url, ended)
        finally:
            unfinished.discard(self)
            self._finished.set_result(None)
            exit_child()

    def _write(self, previous: PendingSave | None) -> None:
        task, snapshot, callbacks = self._task, self._snapshot, self._callbacks
        try:
            with task.failing():
                self._events.wait(SaveEvent.WRITABLE)
                with task.timings.phase("queue"):
                    if previous is not None:
                        previous.wait_ended()
                callbacks.prepare(task.attempt)
                plan = snapshot.plan()
            report = task.run(plan, snapshot.chunks, self._before_publish, callbacks.check)
            self._report = replace(report, survives=callbacks.survives)
            callbacks.committed()
        except BaseException as error:
            self._failure = self._errors.add(f"the save of {self.url}", error)
            callbacks.failed(error)
        finally:
            del self._task, self._callbacks
            snapshot.close()
            callbacks.ended()
            self._events.happened(SaveEvent.ENDED)

    def _before_publish(self) -> None:
        self._events.wait(SaveEvent.RETURNED)
        self._snapshot.settle()


class _Within(threading.local):
    """The save that this thread stages or writes."""

    save: PendingSave | None = None


_this_thread = _Within()


def refuse_within(errors: BackgroundErrors) -> None:
    """Refuses to save or to wait within a save of the same queue, which would wait for itself.

    Arguments:
        errors: of the queue.

    Raises:
        SaveConflict: a signal handler, or another function of the user, interrupts the save.
    """
    save = _this_thread.save
    if save is not None and save._errors is errors:
        raise SaveConflict(
            f"{save.url}: this was called within this save, for which it would wait. In a handler "
            "of a signal, set a flag, as SaveEvery(preemption=True) does, and save in the loop; in "
            "another function, such as progress=, neither save nor wait: SaveOptions.metrics may"
        )


_LET_GO = SaveEvent.RETURNED, SaveEvent.WRITABLE  # sooner, it would slow the caller down
_MOST = 2  # saves in flight: one is written while the next is staged


@dataclass(frozen=True)
class SaveRequest:
    """The arguments of a save in the background.

    Arguments:
        path, tree, options, overwrite: as for `save_async`; or the location of a path.
        metadata: returns the metadata; an error fails the save.
        owners: the memory of the optimizers whose steps wait for staging.
        callbacks, find_base, group: of this save; see `SaveTask`.
        waits: whether the caller waits for the commit, and so is blocked until then.
        is_delayed: whether `callbacks.prepare` waits until another party has made the destination,
            which also limits the number of saves in flight.
    """

    path: paths.PathLike | Location
    tree: Any
    options: SaveOptions
    overwrite: bool = False
    metadata: Callable[[], Mapping[str, Any] | None] = lambda: None
    owners: set[Hashable] | None = None
    callbacks: SaveCallbacks = field(default_factory=SaveCallbacks)
    find_base: Callable[[], paths.PathLike | None] = lambda: None
    group: Group | None = None
    waits: bool = False
    is_delayed: bool = False


class SaveQueue:
    """Runs saves one after another, in order, with at most two in flight."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self.beginning = threading.RLock()
        """Held while a save begins; `SaveOptions.metrics` may save on another thread."""
        self._area, self._plans = HostMemoryPool(), PlanCache(_MOST)
        self._pending: list[PendingSave] = []
        self._learned: list[LearnedBytes] = []
        """Of the last saves, which the next ones balance by."""
        self._is_forgotten = False  # if True, the state may differ from that of the last call
        self.errors = BackgroundErrors()

    def save(self, request: SaveRequest) -> PendingSave:
        """Starts a save, as `save_async`.

        Raises:
            Exception: also the error of an earlier save, if it was not raised yet.
        """
        self.check_process(f"{request.path}: ")
        with self.beginning, self.following(), ExitStack() as undo:
            undo.callback(request.callbacks.ended)
            pending = self._begin(request)
            before, _this_thread.save = _this_thread.save, pending
            try:
                undo.pop_all()
                self._add(pending)
                pending._begin()
                has_later = pending._stage(request.waits)
            except BaseException as error:
                pending._abort(error)
                raise
            finally:
                _this_thread.save = before
            if not has_later:
                pending.wait_staged()
        return pending

    def prepare(self, request: SaveRequest) -> int:
        """Describes, plans and copies the tree of a save as far as its memory allows, and writes
        nothing; returns the bytes that were copied."""
        self.check_process(f"{request.path}: ")
        with self.beginning:
            task = SaveTask(request.path, request.overwrite, request.options, group=request.group)
            described_tree = self._plans.describe(task, request.tree, request.metadata())
            snapshot = self._keep(task, described_tree, request)
            try:
                return snapshot.rehearse()
            finally:
                snapshot.close()

    def _add(self, pending: PendingSave) -> None:
        """Adds a save to those in flight."""
        learned, self._is_forgotten = pending._learned, False
        if learned is not None:
            self._learned.append(learned)
        self._pending = [*(p for p in self._pending if not p._finished.done()), pending]

    def _begin(self, request: SaveRequest) -> PendingSave:
        if not request.is_delayed and len(self._pending) >= _MOST:
            self._pending[-_MOST].wait_ended()
        while len(self._learned) >= _MOST:  # those that have ended on all processes
            self._learned.pop(0).remember()
        where = request.path, request.overwrite, request.options
        task = SaveTask(*where, request.find_base, request.group)
        try:
            with task.failing(refused=True):  # so that the other processes are notified
                self.errors.raise_unless_refused()
            with collection_paused():
                described_tree = self._describe(task, request)
            # Early, if that costs the caller no time; and once more when it is this save's turn.
            is_known = not request.is_delayed and not task.location.is_remote
            if is_known and task.location.exists():
                with task.failing():
                    task.check_destination()
            previous = self._pending[-1] if self._pending else None
            waited_s = 0.0 if previous is None else previous._snapshot.wait_complete()
            with task.failing(), collection_paused():
                snapshot = self._keep(task, described_tree, request, waited_s)
                pending = PendingSave(task, snapshot, previous, request.callbacks, self.errors)
        except BaseException as error:
            send_failure(task.options, task.location.url, task.group, error)
            raise
        pending._learned = None if request.is_delayed else task.learned
        return pending

    def _keep(
        self, task: SaveTask, tree: DescribedTree, request: SaveRequest, waited_s: float = 0.0
    ) -> Snapshot:
        snapshot = Snapshot(task, tree, self._area, request.owners, waited_s)
        task.keep(snapshot.sources, snapshot.working_bytes)
        return snapshot

    def _describe(self, task: SaveTask, request: SaveRequest) -> DescribedTree:
        with task.failing():
            request.callbacks.begin()
            described_tree = self._plans.describe(task, request.tree, request.metadata())
            if task.options.changed is not None:
                from unickpt.saving import skipping  # only where it is requested

                before = self._known_of_base(task.options.base, request.find_base())
                task.known = skipping.skip(task, described_tree, before)
        return described_tree

    def _known_of_base(
        self, requested: paths.PathLike | None, newest: paths.PathLike | None
    ) -> Any:
        """The facts about the last save, if it is the base: arrays that did not change since the
        last call may be skipped.

        Arguments:
            requested: `SaveOptions.base`.
            newest: the newest base among the saves that have ended.
        """
        last = self._pending[-1] if self._pending and not self._is_forgotten else None
        if last is None or last._failure is not None:
            return None
        base = newest if requested is None else requested
        if base is not None and paths.resolve(base).url == last.url:
            return last._known
        # A save in flight will be the newest base, if it may be one.
        return last._known if requested is None and base is not None and not last.done() else None

    @contextmanager
    def following(self) -> Iterator[None]:
        """Within the block, an error makes the next save skip nothing."""
        try:
            yield
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Makes the next save skip nothing: the state may differ from that of the last call."""
        self._is_forgotten = True

    def fence(self) -> None:
        """Waits until the state of all saves may change; their errors are reported elsewhere."""
        for pending in self._pending:
            pending._snapshot.wait_fence()

    def wait_ended(self) -> None:
        """Waits until all saves are committed, or have failed; raises nothing."""
        for pending in self._pending:
            pending.wait_ended()

    def wait(self) -> None:
        """Waits for all saves; raises none of their errors.

        Raises:
            ForkedProcess: they are saves of the parent process.
        """
        self.check_process()
        while unfinished := self.unfinished():  # meanwhile another thread may begin one
            unfinished[0]._wait_over()

    def unfinished(self) -> list[PendingSave]:
        return [pending for pending in self._pending if not pending.done()]

    def check_process(self, what: str = "") -> None:
        """Refuses to work in a forked process, where no thread of the parent exists, and within a
        save of this queue.

        Arguments:
            what: the beginning of the message.

        Raises:
            ForkedProcess: this is one.
            SaveConflict: see `refuse_within`.
        """
        refuse_within(self.errors)
        if os.getpid() != self._process:
            raise ForkedProcess(
                f"{what}this Checkpointer belongs to the parent process; create one in a process "
                'that is started by "spawn"'
            )
