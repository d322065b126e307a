"""Triggers: whether to save now; all processes of a job decide the same."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from types import FrameType
from typing import Any, Literal, get_args

from unickpt.frameworks.process_group import Group
from unickpt.quoting import changed_repr

_log = logging.getLogger("unickpt")
_DUE, _BUSY, _PREEMPTED = 1, 2, 3
_WhenBusy = Literal["wait", "skip", "newest"]


@dataclass(frozen=True)
class SaveEvery:
    """When `Checkpointer.should_save` is true; never, if nothing is given.

    Arguments:
        steps: at steps that are multiples of this.
        seconds: when this many seconds have passed since the last save, by the coordinator's clock.
        preemption: once after SIGTERM on any process, and set `preempted`; call it at every step.
        when_busy: where a step is due and an earlier save has not ended: "wait", as `save` does for
            memory; "skip" that step; "newest": save the first step after that save has ended.

    Raises:
        ValueError: a value is not positive, or not one of these.

    Example:
        >>> SaveEvery(steps=100, seconds=600, preemption=True)
        SaveEvery(steps=100, seconds=600, preemption=True)
    """

    steps: int | None = None
    seconds: float | None = None
    preemption: bool = False
    when_busy: _WhenBusy = "wait"

    __repr__ = changed_repr

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("seconds", self.seconds)):
            if value is not None and not (isinstance(value, Real) and value > 0):
                raise ValueError(f"save_every: {name}={value!r} must be a positive number")
        if self.when_busy not in get_args(_WhenBusy):
            allowed = ", ".join(map(repr, get_args(_WhenBusy)))
            raise ValueError(f"save_every: when_busy={self.when_busy!r} must be one of {allowed}")


class SaveTriggers:
    """Decides, on one process, when to save.

    Arguments:
        when: as given.
        unfinished: the saves of this process that have not ended.
    """

    def __init__(self, when: SaveEvery, unfinished: Callable[[], Sequence[object]]) -> None:
        self._when, self._unfinished = when, unfinished
        self._is_owed = False  # a step was due and not saved, and the next one that can be is
        self.has_skipped = False
        """Whether the last step was due, and an earlier save had not ended."""
        self._stop_requested = threading.Event()
        self._preempted_at: float | None = None

    @property
    def preempted(self) -> bool:
        """Whether the processes agreed that one of them was requested to stop."""
        return self._preempted_at is not None

    def request_stop(self) -> None:
        """Records that this process was requested to stop."""
        self._stop_requested.set()

    def is_due(self, step: int, group: Group, saved_at: float) -> bool:
        """Whether to save now; unless the step alone decides, the processes agree on it.

        Arguments:
            step: the step.
            group: the job.
            saved_at: when the last save began, by `time.monotonic`.

        Raises:
            ValueError: the processes have no way to agree.
        """
        by_step = self._when.steps is not None and step % self._when.steps == 0
        seconds = math.inf if self._when.seconds is None else self._when.seconds
        late = group.index == 0 and time.monotonic() - saved_at >= seconds
        is_timed, yields = self._when.seconds is not None, self._when.when_busy != "wait"
        self.has_skipped = False
        may_yield = yields and (by_step or self._is_owed or is_timed)
        reason = _DUE if late else 0
        if self._stop_requested.is_set():
            reason = _PREEMPTED
        elif may_yield and self._unfinished():
            reason = _BUSY
        if group.count > 1 and (is_timed or self._when.preemption or may_yield):
            reason = group.agree(reason)
        elif reason == _PREEMPTED and group.count > 1:
            raise ValueError(
                "this process received a stop signal, but the others do not check for that: create "
                "the Checkpointer with save_every=SaveEvery(preemption=True) on all processes"
            )
        if reason == _PREEMPTED and self._preempted_at is None:
            self._preempted_at = time.monotonic()
            _log.info("stop signal received: saving a last checkpoint, at step %d", step)
        if self._preempted_at is not None:
            return saved_at < self._preempted_at
        is_due = by_step or self._is_owed
        self._is_owed = is_due and reason == _BUSY and self._when.when_busy == "newest"
        if by_step and reason == _BUSY:
            self.has_skipped = True
            _log.info("step %d is not saved: an earlier save has not ended", step)
        return reason != _BUSY and (is_due or reason == _DUE)


class SigtermHandler:
    """Calls a function when the process receives SIGTERM, instead of ending it.

    Handlers may be removed in any order and by any thread, and others may be installed in between:
    a removed handler, or one in a forked process, forwards the signal. When all are removed, the
    signal has its original effect.

    Arguments:
        callback: the function.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            _restore_signal()
            self._before = signal.signal(signal.SIGTERM, self._handle)
            _active.add(self)
        else:
            _log.warning("only the main thread can handle SIGTERM; call Checkpointer.preempt()")

    def remove(self) -> None:
        """Forwards the signal from now on; restores the previous handler if this thread can."""
        _active.discard(self)
        if threading.current_thread() is threading.main_thread():
            _restore_signal()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self in _active:
            self._callback()
        if callable(self._before):
            self._before(number, frame)
        elif self._before is not signal.SIG_IGN and not _active:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_active: set[SigtermHandler] = set()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_active.clear)


def _restore_signal() -> None:
    """Restores the handler from before the removed ones, unless another one was installed after
    them; only on the main thread."""
    while True:
        handler = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if not isinstance(handler, SigtermHandler) or handler in _active:
            return
        signal.signal(signal.SIGTERM, handler._before or signal.SIG_DFL)
