"""Saves in flight: one after another, each on its own thread; no save and no error is lost.

The threads are not daemons, so that Python waits for them before it exits. An error that was never
raised makes the program exit with status 1.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

from unickpt.errors import ForkedProcess, ProcessFailed, SaveTimeout
from unickpt.saving.exit_status import Failure, leave_child, unasked, unfinished
from unickpt.saving.options import SaveOptions, SaveReport
from unickpt.saving.save_job import Saving, tell
from unickpt.saving.staging import Staging
from unickpt.saving.staging_memory import Abandoned, HostArea
from unickpt.storage import paths
from unickpt.threads import step_back

_log = logging.getLogger("unickpt")
_MOST = 2  # saves in flight: one is written while the next is staged


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
        queue: SaveQueue,
        saving: Saving,
        staging: Staging,
        previous: PendingSave | None,
        hooks: Hooks,
    ) -> None:
        self.url: str = saving.location.url
        """Where the checkpoint will be."""
        self._queue, self._hooks = queue, hooks
        self._saving, self._staging, self._previous = saving, staging, previous
        self._returned = threading.Event()
        self._ended = threading.Event()
        """The save is over, and the next one may start."""
        self._finished = threading.Event()
        """The save is over, and its `SaveOptions.metrics` was called."""
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
            self._queue._ask([self._failure])
        assert self._report is not None, "a save ends with a report or with an error"
        return self._report

    def done(self) -> bool:
        """Whether the save has ended, with a checkpoint or with an error."""
        return self._over.is_set()

    @property
    def _over(self) -> threading.Event:
        """The event to wait for until this save is over.

        A `SaveOptions.metrics` function waits only for saves to end, never for such a function to
        return: that could be itself, or one that waits for it.
        """
        return self._ended if _telling.active else self._finished

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ForkedProcess(
                f"{self.url}: this save belongs to the parent process; wait for it there"
            )

    # --- on the thread of the caller -----------------------------------------------------------

    def _begin(self) -> None:
        """Starts the thread that waits for its turn to write."""
        threading.Thread(target=self._run, name=f"unickpt save {self.url}").start()
        unfinished.add(self)

    def _stage(self) -> None:
        """Stages what must be staged while the caller waits; starts the rest in the background."""
        saving, staging = self._saving, self._staging
        try:
            with staging.failing():
                if staging.has_later:  # now, because the program may end right after this call
                    name = f"unickpt stage {self.url}"
                    threading.Thread(target=self._stage_later, name=name).start()
                staging.stage_now()
        except Abandoned:
            pass  # the writer failed; its error is reported like any other
        except BaseException:
            self._let_go()
            self._ended.wait()
            self._queue._forget(self._failure)
            raise
        saving.phases["stage"] = saving.elapsed - saving.phases["describe"]
        if staging.has_later or not staging.waits_for_commit:
            saving.blocked_s = saving.elapsed
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
        options = self._saving.options
        try:
            self._write(previous)
            if previous is not None:
                previous._finished.wait()  # one report after another
            if self._report is not None and self._failure is None:
                with _telling:
                    tell(options, self._report)
        except BaseException:  # such as SystemExit, which would end this thread silently
            _log.exception("SaveOptions.metrics failed; the checkpoint %s is committed", self.url)
        finally:
            unfinished.discard(self)
            self._finished.set()
            leave_child()

    def _write(self, previous: PendingSave | None) -> None:
        saving, staging = self._saving, self._staging
        staging.may_write.wait()
        asked = saving.elapsed
        if previous is not None:
            previous._ended.wait()
        saving.phases["queue"] = saving.elapsed - asked
        try:
            with saving.failing():
                self._hooks.prepare(saving.attempt)
                staging.plan()
            self._report = saving.run(staging, self._before_commit, self._hooks.check)
            self._hooks.committed()
        except BaseException as error:
            self._failure = self._queue.fail(f"the save of {self.url}", error)
            self._hooks.failed(error)
        finally:
            del self._saving
            staging.close()
            self._hooks.ended()
            del self._hooks
            self._ended.set()

    def _before_commit(self) -> None:
        self._returned.wait()
        self._staging.settle()
        self._saving.staged_bytes = self._staging.nbytes


class _Telling(threading.local):
    """Whether this thread is calling `SaveOptions.metrics`."""

    active = False

    def __enter__(self) -> None:
        self.active = True

    def __exit__(self, *_: object) -> None:
        self.active = False


_telling = _Telling()


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Hooks:
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


class SaveQueue:
    """Runs saves one after another, in order, with at most two in flight."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._beginning = threading.RLock()  # `SaveOptions.metrics` may save on another thread
        self._area = HostArea()
        self._pending: list[PendingSave] = []
        self._failures: list[Failure] = []

    def save(
        self,
        path: paths.Path,
        tree: Any,
        *,
        overwrite: bool,
        metadata: Callable[[], Mapping[str, Any] | None],
        options: SaveOptions,
        owners: set[Hashable] | None = None,
        hooks: Hooks = Hooks(),
    ) -> PendingSave:
        """Starts a save, as `save_async`.

        Arguments:
            path, tree, overwrite, options: as for `save_async`.
            metadata: returns the metadata; an error fails the save.
            owners: what the optimizers own whose steps wait for staging.
            hooks: callbacks of this save.

        Raises:
            Exception: also the error of an earlier save, if it was not raised before.
        """
        if os.getpid() != self._process:
            raise ForkedProcess(
                f"{path}: this Checkpointer belongs to the parent process; create one in a process "
                'that is started by "spawn"'
            )
        with self._beginning, ExitStack() as undo:
            undo.callback(hooks.ended)
            pending = self._begin(path, tree, overwrite, metadata, options, owners, hooks)
            undo.pop_all()
            pending._stage()
        return pending

    def _begin(
        self,
        path: paths.Path,
        tree: Any,
        overwrite: bool,
        metadata: Callable[[], Mapping[str, Any] | None],
        options: SaveOptions,
        owners: set[Hashable] | None,
        hooks: Hooks,
    ) -> PendingSave:
        while len(unended := [p for p in self._pending if not p._ended.is_set()]) >= _MOST:
            unended[0]._ended.wait()
        saving = Saving(path, overwrite, options)
        with saving.failing(refused=True):  # so that the other processes are notified
            self._refuse()
        with saving.failing():
            hooks.begin()
            described = metadata()
        saving.describe(tree, described)
        # Early, if that costs the caller no time; and again when it is this save's turn.
        if not saving.location.is_remote and saving.location.exists():
            with saving.failing():
                saving.check_destination()
        previous = self._pending[-1] if self._pending else None
        if previous is not None:
            previous._staging.wait_complete()
        with saving.failing():
            staging = Staging(saving, self._area, owners)
            pending = PendingSave(self, saving, staging, previous, hooks)
            pending._begin()
        self._pending = [*(p for p in self._pending if not p._finished.is_set()), pending]
        return pending

    def fence(self) -> None:
        """Waits until the state of all saves may change; their errors are reported elsewhere."""
        for pending in self._pending:
            pending._staging.wait_fence()

    def wait(self) -> None:
        """Waits for all saves; raises nothing."""
        while unfinished := self.unfinished():  # meanwhile another thread may begin one
            unfinished[0]._over.wait()

    def fail(self, what: str, error: BaseException) -> Failure:
        """Keeps an error in the background until it can be raised."""
        _log.error("%s failed: %s", what, error)
        failure = Failure(what, error)
        self._failures.append(failure)
        unasked.append(failure)
        return failure

    def raise_failed(self) -> None:
        """Raises the first error in the background that was not raised before."""
        if self._failures:
            self._ask(self._failures)

    def _refuse(self) -> None:
        """As `raise_failed`, except for saves that failed only because another process refused
        them; otherwise two processes could refuse each other's saves forever."""
        errors = [failure.error for failure in self._failures]
        if not all(isinstance(error, ProcessFailed) and error.refused for error in errors):
            self.raise_failed()

    def unfinished(self) -> list[PendingSave]:
        return [pending for pending in self._pending if not pending.done()]

    def _ask(self, failures: Sequence[Failure]) -> NoReturn:
        first, *others = failures
        for failure in list(failures):
            self._forget(failure)
        notes = [f"unickpt: {first.what} failed with this error, in the background"]
        notes += [f"unickpt: {other.what} failed too: {other.error}" for other in others]
        for note in notes:
            if note not in getattr(first.error, "__notes__", ()):
                first.error.add_note(note)
        raise first.error

    def _forget(self, failure: Failure | None) -> None:
        for failures in (self._failures, unasked):
            if failure in failures:
                failures.remove(failure)
