"""What a manager's `logger` is told: an entry for each save and restore, as of Orbax's managers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StepLog:
    """Tells a logger how long the calls of a manager took.

    Arguments:
        logger: with `log_entry`, which takes a dict; or None.
        directory: of the run.

    Raises:
        TypeError: the logger has no such function.
    """

    def __init__(self, logger: Any, directory: object) -> None:
        if logger is not None and not callable(getattr(logger, "log_entry", None)):
            raise TypeError(f"logger= is a {type(logger).__name__}, which has no log_entry")
        self._logger, self._directory = logger, str(directory)
        self._last: float | None = None

    @contextmanager
    def saving(self, step: int, *, synchronous: bool) -> Iterator[None]:
        """Times a call of `save`; in the background, only until it returns."""
        since = None if self._last is None else time.time() - self._last
        more = {"synchronous": synchronous, "time_between_consecutive_saves_sec": since}
        with self._timed("save", step, "checkpoint_manager_blocking", more):
            yield
        self._last = time.time()

    @contextmanager
    def restoring(self, step: int) -> Iterator[None]:
        """Times a call of `restore`."""
        with self._timed("restore", step, "checkpoint_manager", {}):
            yield

    @contextmanager
    def _timed(self, what: str, step: int, name: str, more: dict[str, Any]) -> Iterator[None]:
        if self._logger is None:
            yield
            return
        begun, clock = time.time(), time.monotonic()
        yield
        entry = {"step": step, "event_type": what, "directory": self._directory, **more}
        entry |= {f"{name}_start_time": begun, f"{name}_duration_secs": time.monotonic() - clock}
        self._logger.log_entry(entry)
