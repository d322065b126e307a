"""The cost of saving for the training loop: its waiting time, as a share of its time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from unickpt.plugins.report.metric_lines import SavedLine
from unickpt.plugins.report.run_facts import StepFacts

_LEAST_S = 20.0
"""An index keeps whole seconds: of a shorter time, an error of one second is too much."""


@dataclass(frozen=True)
class ReportedSave:
    """A call that saved a step.

    Arguments:
        asked: when it was made, in seconds since 1970.
        waited: seconds that the loop waited.
        is_told: whether a line of metrics records it; else `asked` is known to the second.
    """

    asked: float
    waited: float
    is_told: bool


@dataclass(frozen=True)
class LoopCost:
    """The cost of saving for the loop, from the call of the first save to that of the last.

    Arguments:
        waited: seconds that the loop waited in that time, for all known saves.
        total: seconds of that time.
        is_least: whether there may have been more saves, which were removed since.
    """

    waited: float
    total: float
    is_least: bool

    @property
    def share(self) -> float:
        """Of the time of the loop, from 0 to 1."""
        return min(1.0, self.waited / self.total)


def waited_for(step: StepFacts, line: SavedLine | None) -> float | None:
    """For how long the loop waited for a save, in seconds: the longest that a process's call
    blocked its caller.

    A call that returned only after the commit blocked it until then. Of this the storage records
    the time until process 0 had merged the parts of all.
    """
    waits = [] if line is None else [line.blocked_s]
    if step.durations is not None:
        blocked = step.durations.blocked
        waits.append(step.durations.merged if blocked is None else blocked)
    return max(waits, default=None)


def calls_of(
    step: StepFacts, line: SavedLine | None, created: datetime | None
) -> Iterable[ReportedSave]:
    """The call that saved a step, and its cost, if the time of the call is known.

    Arguments:
        step: a committed checkpoint.
        line: the line of metrics about its save, if there is one.
        created: when it was committed, by its index.
    """
    waited = waited_for(step, line)
    if waited is None:
        return
    if line is not None:
        yield call_told(line, waited)
    elif created is not None and step.durations is not None:
        yield ReportedSave(created.timestamp() - step.durations.merged, waited, False)


def call_told(line: SavedLine, waited: float | None = None) -> ReportedSave:
    """The call that a line of metrics records."""
    called_at = line.time.timestamp() - line.seconds
    return ReportedSave(called_at, line.blocked_s if waited is None else waited, True)


def loop_cost(calls: Sequence[ReportedSave], *, is_least: bool) -> LoopCost | None:
    """The cost of a run's saves; None if they are too few, or too close to each other for the
    precision of their times.

    Arguments:
        calls: those that are known, in any order.
        is_least: whether there may have been others.

    Example:
        >>> times = (0.0, 1.0), (50.0, 2.0), (100.0, 9)
        >>> calls = [ReportedSave(asked, waited, True) for asked, waited in times]
        >>> loop_cost(calls, is_least=False).share
        0.03
    """
    ordered = sorted(calls, key=lambda call: call.asked)
    if len(ordered) < 2:
        return None
    total = ordered[-1].asked - ordered[0].asked
    if total < (0.0 if all(call.is_told for call in ordered) else _LEAST_S) or not total:
        return None
    return LoopCost(sum(call.waited for call in ordered[:-1]), total, is_least)
