"""Threads: workers, work in the background, batches of work, a bounded window of it; pauses of
garbage collection."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class SerialExecutor:
    """Runs pieces of work in order, on a thread that exists only while there are any.

    The thread is not a daemon, so that Python waits for it before it exits. If no thread can be
    started, `add` runs the work.

    Arguments:
        name: of the thread.
        failed: called with the error that a piece of work raises; also with a SystemExit, which
            would end the thread, and nobody could wait for the rest.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], object]) -> None:
        self._name, self._failed = name, failed
        self._work: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._running = False
        self._thread: threading.Thread | None = None

    def add(self, work: Callable[[], None]) -> None:
        """Runs a piece of work after all that were added before."""
        with self._changed:
            self._work.append(work)
            if self._running:
                return
            self._running = True
        if start(self._run, self._name) is None:
            self._run()

    def wait(self, most: int = 0) -> None:
        """Waits until at most this many pieces of work remain; a piece of work itself, which may
        call a user's function, does not wait for its own end."""
        if self._thread is threading.current_thread():
            return
        with self._changed:
            while len(self._work) + self._running > most:
                self._changed.wait()

    def _run(self) -> None:
        self._thread = threading.current_thread()
        while True:
            with self._changed:
                if not self._work:
                    self._running, self._thread = False, None
                    self._changed.notify_all()
                    return
                work = self._work.popleft()
            try:
                work()
            except BaseException as error:
                self._failed(error)
            with self._changed:
                self._changed.notify_all()


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
    held = 0
    for item in items:
        nbytes = nbytes_of(item)
        is_large = most_bytes is not None and held + nbytes > most_bytes
        if batch and (is_large or len(batch) == most):
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += nbytes
    if batch:
        yield batch


class Window:
    """Work in flight, oldest first, that together holds no more memory than a budget.

    A piece of work that is larger than the budget runs alone.

    Arguments:
        budget_bytes: the bound.
        most: how many pieces of work at once, at most.
    """

    def __init__(self, budget_bytes: int, most: int | None = None) -> None:
        self._budget, self._most, self._held = budget_bytes, most, 0
        self._work: deque[tuple[int, Callable[[], None]]] = deque()

    def make_room(self, nbytes: int) -> None:
        """Waits for the oldest work until `nbytes` more fit."""
        while self._work and (self._held + nbytes > self._budget or len(self._work) == self._most):
            self.wait_oldest()

    def add(self, nbytes: int, wait: Callable[[], None]) -> None:
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
    """Gives the training priority over this thread.

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

    Since Python 3.12 that is so once the main thread has ended, which is when the last pending
    saves are completed.
    """
    thread = threading.Thread(target=work, name=name, daemon=daemon)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


class Pool(ThreadPoolExecutor):
    """A `ThreadPoolExecutor` that runs work on the submitting thread once it accepts none."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


class Workers:
    """A few threads, which end with the `with` block; without threads, `submit` runs the work.

    Arguments:
        count: number of threads.
        behind: whether they work in the background of a training loop, see `step_back`.

    Example:
        >>> with Workers(2) as workers:
        ...     result = workers.submit(lambda: 6 * 7)
        ...     result()
        42
    """

    def __init__(self, count: int, *, behind: bool = False) -> None:
        self._count, self._behind = count, behind
        self._work: SimpleQueue[_Task[object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        """Runs work on a thread; returns a function that waits for its result or error."""
        task = _Task(work)
        if self._threads:
            self._work.put(task)  # type: ignore[arg-type]
        else:
            task.run()
        return task.result

    def __enter__(self) -> Self:
        started = [start(self._run, "unickpt worker") for _ in range(self._count)]
        self._threads = [thread for thread in started if thread is not None]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        if self._behind:
            step_back()
        while (task := self._work.get()) is not None:
            task.run()


class _Task(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        assert self._work is not None, "a task is run once"
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error
        self._work = None
        self._done.set()

    def result(self) -> T:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value


_pauses = 0
_pausing = threading.Lock()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pauses Python's search for reference cycles in the whole process; may be nested.

    For work that makes many objects which stay: the search starts again and again then, and each
    time visits all objects, of which a process with frameworks in it has millions. Only for work
    that the caller waits for, so that a program that switches the search off at the same time is
    unlikely: it would be switched on again.
    """
    global _pauses
    with _pausing:
        if _pauses == 0 and not gc.isenabled():
            paused = False
        else:
            paused = True
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
