"""Sends the events of a run to `SaveOptions.metrics`, if it hears them (`RunEvent`)."""

from __future__ import annotations

import sys
import time
from typing import Any

from unickpt.frameworks.process_group import Group
from unickpt.loading.report import LoadReport
from unickpt.quoting import error_text
from unickpt.run_event import EventKind, RunEvent, send_event
from unickpt.runs.current_steps import Steps


class RunEvents:
    """The events of one Checkpointer, on one process. All name the folder that the run saves to.

    Arguments:
        receiver: `SaveOptions.metrics`.
        steps: of the run.
    """

    def __init__(self, receiver: Any, steps: Steps) -> None:
        self._receiver, self._steps = receiver, steps
        self._made = time.time()
        self._place: tuple[int, int] | None = None

    def began(self, group: Group) -> None:
        """Called in each call of the run; sends that its job began once, with the time at which
        the Checkpointer was made."""
        if self._place is None:
            self._place = group.index, group.count
            self._send("began", time=self._made)

    def reached(self, step: int, group: Group) -> None:
        """Sends, on process 0, that the loop has reached a step."""
        self.began(group)
        if group.index == 0:
            self._send("step", step)

    def skipped(self, step: int, group: Group) -> None:
        """Sends, on process 0, that a step was due and not saved."""
        if group.index == 0:
            self._send("skipped", step)

    def loaded(self, step: int, report: LoadReport) -> None:
        """Sends that the run resumes from a step."""
        self._send("loaded", step, report=report)

    def fell_back(self, step: int, error: str) -> None:
        """Sends that a damaged version of a step was passed over."""
        self._send("fallback", step, error=error)

    def ended(self) -> None:
        """Sends that the Checkpointer was closed, and the error that is being handled, if any."""
        if self._place is not None:
            error = sys.exception()
            self._send("ended", error="" if error is None else error_text(error))
            self._place = None

    def _send(self, kind: EventKind, step: int | None = None, **details: Any) -> None:
        location = self._steps.first.location
        if step is not None and kind != "step":  # at which there may be no checkpoint
            location = self._steps.first.location_of(step)
        place = self._place or (0, 1)
        send_event(self._receiver, RunEvent(kind, location.url, step, *place, **details))
