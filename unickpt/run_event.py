"""The events of a run that are no report of a save."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from unickpt.threads import calling_user

_log = logging.getLogger("unickpt")
EventKind = Literal[
    "began", "step", "skipped", "loaded", "fallback", "save failed", "copy failed", "ended"
]


@dataclass(frozen=True)
class RunEvent:
    """An event of a run, for `SaveOptions.metrics` objects with a method `run_event`.

    Arguments:
        kind: "began": a job uses its Checkpointer for the first time; "step": the loop has reached
            a step, and "skipped": the step was due, but an earlier save had not ended, both only on
            process 0; "loaded": `Checkpointer.load` returns; "fallback": a damaged version is
            passed over; "save failed", "copy failed"; "ended": the Checkpointer is closed.
        url: of the checkpoint; of "began", "step" and "ended", of the run.
        step: its number, if known.
        process, processes: index of this process, and how many there are.
        error: why it failed, or why the job ends; empty if for no error.
        report: of kind "loaded", the `LoadReport`.
        time: when it happened, in seconds since 1970; of "began", when the Checkpointer was made.
    """

    kind: EventKind
    url: str
    step: int | None = None
    process: int = 0
    processes: int = 1
    error: str = ""
    report: Any = None
    time: float = field(default_factory=time.time)


def hears_events(receiver: object) -> bool:
    """Whether `SaveOptions.metrics` is an object with a method `run_event`."""
    return callable(getattr(receiver, "run_event", None))


def send_event(receiver: Any, event: RunEvent) -> None:
    """Calls the method `run_event` of `SaveOptions.metrics`, if it has one. An error is logged."""
    if hears_events(receiver):
        try:
            with calling_user:
                receiver.run_event(event)
        except Exception:
            _log.exception("SaveOptions.metrics failed for the event %r", event.kind)
