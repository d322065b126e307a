"""What a manager's `logger` is told: an entry for each save and restore, as of Orbax's managers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Entry:
    """An entry that is being made: what was done, when it began, and how long it took."""

    def __init__(self, **known: Any) -> None:
        self.values: dict[str, Any] = known

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times a part of the call."""
        begun, clock = time.time(), time.monotonic()
        yield
        self.values[f"{name}_start_time"] = begun
        self.values[f"{name}_duration_secs"] = time.monotonic() - clock


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
    def saving(self, step: int, synchronous: bool) -> Iterator[Entry]:
        """Times a call of `save`; in the background, only until it returns."""
        since = None if self._last is None else time.time() - self._last
        entry = Entry(
            step=step,
            event_type="save",
            directory=self._directory,
            reached_preemption=None,  # it is only asked when it decides
            preemption_received_at=None,
            synchronous=synchronous,
            time_between_consecutive_saves_sec=since,
        )
        with entry.part("checkpoint_manager_blocking"):
            yield entry
        with entry.part("get_old_steps"):
            pass  # it is done in the background
        self._last = time.time()
        self._tell(entry)

    @contextmanager
    def restoring(self, step: int) -> Iterator[None]:
        """Times a call of `restore`."""
        entry = Entry(step=step, event_type="restore", directory=self._directory)
        with entry.part("checkpoint_manager"), entry.part("checkpointer"):
            yield
        self._tell(entry)

    def _tell(self, entry: Entry) -> None:
        if self._logger is not None:
            self._logger.log_entry(entry.values)
