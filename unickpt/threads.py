"""Threads: pools, background work, events, batches and a bounded window of work; pauses of garbage
collection."""

from __future__ import annotations

import gc
import inspect
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class SerialExecutor:
    """Runs pieces of work in order, on a thread that exists only while there are any.

    The thread is not a daemon, so that Python waits for it before it exits. If no thread can be
    started, `add` runs the work.

    Arguments:
        name: of the thread.
        failed: called with the error that a piece of work raises; also with a SystemExit, which
            would end the thread and leave the rest waiting. What it raises itself is ignored.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], object]) -> None:
        self._name, self._failed = name, failed
        self._work: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._running = self._calls_user = False
        self._thread: threading.Thread | None = None

    def add(self, work: Callable[[], None]) -> None:
        """Runs a piece of work after all that were added before, once if it is added again before
        it has begun."""
        with self._changed:
            if work in self._work:
                return
            self._work.append(work)
            if self._running:
                return
            self._running = True
        if start(self._run, self._name) is None:
            self._run()

    def wait(self, most: int = 0) -> None:
        """Waits until at most this many pieces of work remain.

        A piece of work itself does not wait for its own end. While one calls a user's function,
        which may wait for this thread, only who waits for all pieces, and calls none, waits.
        """
        if self._thread is threading.current_thread():
            return
        goes_on = most or calling_user.active
        with self._changed:
            while len(self._work) + self._running > most and not (goes_on and self._calls_user):
                self._changed.wait()

    def calls_user(self, now: bool) -> None:
        """Says that the piece of work that runs begins, or ends, to call a user's function."""
        with self._changed:
            self._calls_user = now
            self._changed.notify_all()

    def _run(self) -> None:
        self._thread = threading.current_thread()
        before, calling_user.executor = calling_user.executor, self
        while True:
            with self._changed:
                if not self._work:
                    self._running, self._thread = False, None
                    calling_user.executor = before
                    self._changed.notify_all()
                    return
                work = self._work.popleft()
            try:
                work()
            except BaseException as error:
                with suppress(BaseException):  # such as of a user's handler of logging
                    self._failed(error)
            with self._changed:
                self._changed.notify_all()


def is_synchronous(function: object) -> bool:
    """Whether this can be called, and no `async def`, whose result nothing would await."""
    calls = function, getattr(function, "__call__", None)  # noqa: B004 - an object's may be async
    return callable(function) and not any(map(inspect.iscoroutinefunction, calls))


class _CallingUser(threading.local):
    """Within the block, this thread calls a function of the user, which may wait for any save.

    It must not wait then for a function of the user on another thread, which may wait for this one;
    and no save waits for the work of a `SerialExecutor` that calls one.
    """

    executor: SerialExecutor | None = None
    """The one whose thread this is."""
    active = 0
    """How many of these calls this thread is in."""

    def __enter__(self) -> None:
        self.active += 1
        if self.executor is not None:
            self.executor.calls_user(True)

    def __exit__(self, *_: object) -> None:
        self.active -= 1
        if self.executor is not None:
            self.executor.calls_user(self.active > 0)


calling_user = _CallingUser()


def in_batches(
    items: Iterable[T],
    most: int | None = None,
    most_bytes: int | None = None,
    nbytes_of: Callable[[T], int] = lambda item: 0,
) -> Iterator[list[T]]:
    """Splits work into batches, in order, none of them empty.

    Arguments:
        items: the pieces of work.
        most: how many pieces a batch may have.
        most_bytes: how many bytes a batch may have; a larger piece is a batch of its own.
        nbytes_of: the bytes of a piece.
    """
    batch: list[T] = []
    batch_bytes = 0
    for item in items:
        nbytes = nbytes_of(item)
        is_large = most_bytes is not None and batch_bytes + nbytes > most_bytes
        if batch and (is_large or len(batch) == most):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += nbytes
    if batch:
        yield batch


class Window:
    """Work in flight, oldest first, whose memory together stays within a budget.

    A piece of work that is larger than the budget runs alone.

    Arguments:
        budget_bytes: the limit.
        most: the largest number of pieces of work at once.
    """

    def __init__(self, budget_bytes: int, most: int | None = None) -> None:
        self._budget, self._most, self._held = budget_bytes, most, 0
        self._work: deque[tuple[int, Callable[[], object]]] = deque()

    def make_room(self, nbytes: int) -> None:
        """Waits for the oldest work until `nbytes` more fit."""
        while self._work and (self._held + nbytes > self._budget or len(self._work) == self._most):
            self.wait_oldest()

    def add(self, nbytes: int, wait: Callable[[], object]) -> None:
        """Adds work that holds `nbytes` until `wait` returns."""
        self._held += nbytes
        self._work.append((nbytes, wait))

    def drain(self) -> None:
        """Waits for all work."""
        while self.wait_oldest():
            pass

    def wait_oldest(self) -> bool:
        """Waits for the oldest work; False if there is none."""
        if not self._work:
            return False
        nbytes, wait = self._work.popleft()
        wait()
        self._held -= nbytes
        return True


_STEP = 10  # of niceness
_NICEST = 19


def step_back() -> None:
    """Gives training priority over this thread.

    Only for threads that copy and hash, and rarely hold the GIL: one that holds it and has to wait
    would block the training.
    """
    if sys.platform == "linux":  # where each thread has its own priority
        with suppress(OSError):
            program = os.getpriority(os.PRIO_PROCESS, os.getpid())  # it may run under `nice`
            niceness = min(program + _STEP, _NICEST)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def start(
    work: Callable[[], object], name: str, *, daemon: bool = False
) -> threading.Thread | None:
    """Starts a thread that does some work; returns None if no thread can be started.

    Since Python 3.12, none can be started after the main thread has ended, which is when the last
    pending saves are completed.
    """
    thread = threading.Thread(target=work, name=name, daemon=daemon)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


class Ticker:
    """Calls a function on a thread repeatedly, at growing intervals, until it is closed.

    Arguments:
        name: of the thread.
        first_s: seconds until the first call.
        longest_s: the longest interval.
        calls_at_end: whether `close` makes a last call, if there was any.
    """

    def __init__(
        self, name: str, first_s: float, longest_s: float, *, calls_at_end: bool = True
    ) -> None:
        self._name, self._first_s, self._longest_s = name, first_s, max(first_s, longest_s)
        self._calls_at_end = calls_at_end
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._calls = 0

    def start(self, tick: Callable[[int], object]) -> None:
        """Starts to call a function, with the number of the call; its errors are ignored."""
        self._tick = tick
        self._thread = start(self._run, self._name, daemon=True)

    def close(self) -> None:
        """Ends the calls, with a last one if that is wanted. When it returns, none is running."""
        thread, self._thread = self._thread, None
        self._closed.set()
        if thread is not None:
            thread.join()
            if self._calls and self._calls_at_end:
                self._call()

    def _run(self) -> None:
        pause = self._first_s
        while not self._closed.wait(pause):
            self._call()
            pause = min(pause * 1.5, self._longest_s)

    def _call(self) -> None:
        with suppress(Exception):
            self._tick(self._calls)
            self._calls += 1


def settle(future: Future[T], work: Callable[[], T]) -> None:
    """Does some work, and gives a future its result or its error."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


class Pool(ThreadPoolExecutor):
    """A `ThreadPoolExecutor` that runs work on the submitting thread if no thread can be started.

    Arguments:
        threads: at most; without any, `submit` runs the work.
        name: of each thread, with a number after it.
        background: whether they run during training, see `step_back`.
    """

    def __init__(
        self, threads: int, name: str = "unickpt worker", *, background: bool = False
    ) -> None:
        self._none = threads < 1
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        super().__init__(max(1, threads), name, step_back if background else None)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        done: Future[T] = Future()
        self._waiting.append((done, partial(fn, *args, **kwargs)))
        try:
            if self._none:
                self._run_next()
            else:
                super().submit(self._run_next)
        except RuntimeError:
            self._run_next()
        return done

    def result(self, future: Future[T]) -> T:
        """The result of work that was submitted here; until it is there, this thread works too."""
        while not future.done() and self._waiting:
            error = self._run_next()
            if error is not None and not isinstance(error, Exception):
                raise error  # such as KeyboardInterrupt, of this thread
        return future.result()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while cancel_futures and self._waiting:
            with suppress(IndexError):  # begun meanwhile
                self._waiting.pop()[0].cancel()
        super().shutdown(wait, cancel_futures=cancel_futures)

    def _run_next(self) -> BaseException | None:
        """Does the oldest work that no thread has begun, if there is any; returns its error."""
        try:
            done, work = self._waiting.popleft()
        except IndexError:
            return None
        if not done.set_running_or_notify_cancel():
            return None
        settle(done, work)
        return done.exception()


EventKind = TypeVar("EventKind", bound=Enum)


class Events(Generic[EventKind]):
    """A few events that threads wait for; each happens at most once.

    Example:
        >>> class Meal(Enum):
        ...     COOKED = 1
        ...     EATEN = 2
        >>> events = Events[Meal]()
        >>> events.happened(Meal.COOKED)
        >>> events.wait(Meal.COOKED), events.wait(Meal.EATEN, timeout=0.0)
        (True, False)
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        """Also guards other state that threads share; code that changes it notifies all."""
        self._happened = set[EventKind]()

    def happened(self, *events: EventKind) -> None:
        """Marks these as happened and wakes all waiting threads."""
        with self.changed:
            self._happened.update(events)
            self.changed.notify_all()

    def __contains__(self, event: object) -> bool:
        return event in self._happened

    def wait(self, event: EventKind, timeout: float | None = None) -> bool:
        """Waits until one has happened; False if that takes more than `timeout` seconds."""
        if event in self._happened:
            return True
        with self.changed:
            return self.changed.wait_for(lambda: event in self._happened, timeout)


_pauses = 0
_pausing = threading.Lock()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pauses Python's search for reference cycles in the whole process; may be nested.

    For work that creates many long-lived objects: the search would start repeatedly and visit all
    objects each time, and a process with frameworks has millions. Use it only for work that the
    caller waits for: if the program disables the search meanwhile, the end of the pause enables it
    again.
    """
    global _pauses
    with _pausing:
        paused = _pauses > 0 or gc.isenabled()
        if paused:
            _pauses += 1
            gc.disable()
    try:
        yield
    finally:
        if paused:
            with _pausing:
                _pauses -= 1
                if _pauses == 0:
                    gc.enable()
