"""Chores: work behind the training loop, one piece after another, which no exit cuts short."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from unickpt.workers import start


class Chores:
    """Runs pieces of work in order, on a thread that lives only while there are any.

    The thread is no daemon, so that Python waits for it before it exits. Where there can be none
    any more, who adds work does it.

    Arguments:
        name: of the thread.
        failed: gets what a piece of work raises.
    """

    def __init__(self, name: str, failed: Callable[[Exception], object]) -> None:
        self._name, self._failed = name, failed
        self._work: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._running = False

    def add(self, work: Callable[[], None]) -> None:
        """Has a piece of work done after all that was added before."""
        with self._changed:
            self._work.append(work)
            if self._running:
                return
            self._running = True
        if start(self._run, self._name) is None:
            self._run()

    def wait(self, most: int = 0) -> None:
        """Waits until at most so many pieces of work are left."""
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
