"""A save in the background, on its own thread; no save and no error is lost.

The threads are not daemons, so that Python waits for them before it exits. An error that was never
raised makes the program exit with status 1.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from unickpt.errors import ForkedProcess, SaveTimeout, out_of_memory
from unickpt.saving.background_errors import BackgroundErrors
from unickpt.saving.exit_status import Failure, exit_child, unfinished
from unickpt.saving.options import SaveReport
from unickpt.saving.save_job import SaveJob, call_metrics
from unickpt.saving.staging.host_area import Abandoned
from unickpt.saving.staging.kept_state import Staging
from unickpt.threads import step_back

_log = logging.getLogger("unickpt")


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
    """

    begin: Callable[[], None] = _nothing
    prepare: Callable[[str], None] = _nothing
    check: Callable[[], None] = _nothing
    committed: Callable[[], None] = _nothing
    failed: Callable[[BaseException], None] = _nothing
    ended: Callable[[], object] = _nothing


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
        job: SaveJob,
        staging: Staging,
        previous: PendingSave | None,
        callbacks: SaveCallbacks,
        errors: BackgroundErrors,
    ) -> None:
        self.url: str = job.location.url
        """Where the checkpoint will be."""
        self._callbacks, self._errors = callbacks, errors
        self._job, self._staging, self._previous = job, staging, previous
        self._returned = threading.Event()
        self._ended = threading.Event()
        """The save is over, and the next one may start."""
        self._finished = threading.Event()
        """The save is over, and its `SaveOptions.metrics` was called."""
        self._when_done: list[Callable[[], object]] = []
        self._adding = threading.Lock()
        self._report: SaveReport | None = None
        self._failure: Failure | None = None
        self._process = os.getpid()

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
            if not self._staging.wait_safe(timeout):
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
        if not self._over.wait(timeout):
            raise SaveTimeout(f"{self.url}: not committed within {timeout:g} s; it continues")
        if self._failure is not None:
            self._errors.raise_these([self._failure])
        assert self._report is not None, "a save ends with a report or with an error"
        return self._report

    def done(self) -> bool:
        """Whether the save has ended, with a checkpoint or with an error."""
        return self._over.is_set()

    def add_done_callback(self, function: Callable[[], object]) -> None:
        """Calls a function when the save has ended, with a checkpoint or with an error; on the
        thread that saves, or at once if it has ended already.

        Arguments:
            function: an error that it raises is logged, and does not affect the save.
        """
        self._check_process()
        with self._adding:
            if not self._finished.is_set():
                self._when_done.append(function)
                return
        self._call(function)

    def _call(self, function: Callable[[], object]) -> None:
        try:
            function()
        except Exception:
            _log.exception("a function to call at the end of the save of %s failed", self.url)

    @property
    def _over(self) -> threading.Event:
        """The event to wait for until this save is over.

        A `SaveOptions.metrics` function waits only for saves to end, never for such a function to
        return: that could be itself, or one that waits for it.
        """
        return self._ended if _calling_metrics.active else self._finished

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ForkedProcess(
                f"{self.url}: this save belongs to the parent process; wait for it there"
            )

    # --- on the thread of the caller -----------------------------------------------------------

    def begin(self) -> None:
        """Starts the thread that waits for its turn to write."""
        threading.Thread(target=self._run, name=f"unickpt save {self.url}").start()
        unfinished.add(self)

    def stage(self) -> None:
        """Stages what must be staged while the caller waits; starts the rest in the background."""
        timings, staging = self._job.timings, self._staging
        try:
            with staging.failing():
                staging.prepare()
                if staging.has_later:  # now, because the program may end right after this call
                    name = f"unickpt stage {self.url}"
                    threading.Thread(target=self._stage_later, name=name).start()
                staging.stage_now()
        except Abandoned:
            pass  # the writer failed; its error is reported like any other
        except BaseException as error:
            self._let_go()
            self._ended.wait()
            self._errors.forget(self._failure)
            if isinstance(error, MemoryError):
                raise out_of_memory(f"saving to {self.url.rstrip('/')}", error) from error
            raise
        timings.lap("stage")
        if staging.has_later or not staging.waits_for_commit:
            timings.unblock()
        self._let_go()
        if not staging.has_later:
            self.wait_staged()

    def _let_go(self) -> None:
        """Lets the threads of this save start; earlier they would only slow the caller down."""
        self._returned.set()
        self._staging.may_write.set()

    # --- on its own threads --------------------------------------------------------------------

    def _stage_later(self) -> None:
        step_back()
        self._returned.wait()
        self._staging.stage_later()

    def _run(self) -> None:
        previous, self._previous = self._previous, None
        options = self._job.options
        try:
            self._write(previous)
            if previous is not None:
                previous._finished.wait()  # one report after another
            if self._report is not None and self._failure is None:
                with _calling_metrics:
                    call_metrics(options, self._report)
        except BaseException:  # such as SystemExit, which would end this thread silently
            _log.exception("SaveOptions.metrics failed; the checkpoint %s is committed", self.url)
        finally:
            unfinished.discard(self)
            with self._adding:
                self._finished.set()
                functions, self._when_done = self._when_done, []
            for function in functions:
                self._call(function)
            exit_child()

    def _write(self, previous: PendingSave | None) -> None:
        job, staging, callbacks = self._job, self._staging, self._callbacks
        staging.may_write.wait()
        with job.timings.phase("queue"):
            if previous is not None:
                previous._ended.wait()
        try:
            with job.failing():
                callbacks.prepare(job.attempt)
                plan = staging.plan()
            self._report = job.run(plan, staging, self._before_publish, callbacks.check)
            callbacks.committed()
        except BaseException as error:
            self._failure = self._errors.add(f"the save of {self.url}", error)
            callbacks.failed(error)
        finally:
            del self._job, self._callbacks
            staging.close()
            callbacks.ended()
            self._ended.set()

    def _before_publish(self) -> None:
        self._returned.wait()
        self._staging.settle()


class _CallingMetrics(threading.local):
    """Whether this thread is calling `SaveOptions.metrics`."""

    active = False

    def __enter__(self) -> None:
        self.active = True

    def __exit__(self, *_: object) -> None:
        self.active = False


_calling_metrics = _CallingMetrics()
