"""A thread that writes this process's report now and then, once its save takes long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from unickpt import threads
from unickpt.commit.progress import reports
from unickpt.commit.progress.reports import Report
from unickpt.storage.kvstore import KvStore

_FIRST_S = 5.0
"""A save that takes less than this writes no report."""
_GROWTH, _LONGEST_S = 1.5, 60.0
_REPORTS_PER_S = 200
"""Of all processes of a job together, at most."""


class Reporter:
    """Writes what `now` says, at growing intervals, until it is closed.

    Arguments:
        records: the folder of the attempt's records.
        process: index of this process.
        count: number of processes.
    """

    def __init__(self, records: KvStore, process: int, count: int) -> None:
        self._records, self._process = records, process
        self._pause_s = max(_FIRST_S, count / _REPORTS_PER_S)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._written = 0

    def start(self, now: Callable[[], Report]) -> None:
        """Starts to report what `now` returns; it is called on another thread."""
        self._now = now
        self._thread = threads.start(self._run, "unickpt report", daemon=True)

    def close(self) -> None:
        """Ends the reports; when it returns, nothing is being written.

        If there was any, a last one is written, so that all of this process's bytes are counted.
        """
        thread, self._thread = self._thread, None
        self._closed.set()
        if thread is not None:
            thread.join()
            if self._written:
                self._write()

    def _run(self) -> None:
        pause = self._pause_s
        while not self._closed.wait(pause):
            self._write()
            pause = min(pause * _GROWTH, max(_LONGEST_S, self._pause_s))

    def _write(self) -> None:
        with suppress(Exception):  # of the storage: the save itself will meet it
            report = replace(self._now(), number=self._written)
            self._records.write(reports.name_of(self._process), report.encode()).result()
            self._written += 1
