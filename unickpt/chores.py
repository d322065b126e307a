"""Chores: work in the background, one piece after another, all done before the program exits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from unickpt.workers import start


class Chores:
    """Runs pieces of work in order, on a thread that exists only while there are any.

    The thread is not a daemon, so that Python waits for it before it exits. If no thread can be
    started, `add` runs the work.

    Arguments:
        name: of the thread.
        failed: called with the error that a piece of work raises.
    """

    def __init__(self, name: str, failed: Callable[[Exception], object]) -> None:
        self._name, self._failed = name, failed
        self._work: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._running = False

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
        """Waits until at most this many pieces of work remain."""
        with self._changed:
            while len(self._work) + self._running > most:
                self._changed.wait()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._work:
                    self._running = False
                    self._changed.notify_all()
                    return
                work = self._work.popleft()
            try:
                work()
            except Exception as error:
                self._failed(error)
            with self._changed:
                self._changed.notify_all()
