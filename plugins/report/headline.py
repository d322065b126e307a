"""The headline: the one most notable fact of a run, by rules in a fixed order."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from unickpt.extend import ORPHANS_LOCK, counted, size_text
from unickpt.plugins.report.loop_cost import LoopCost
from unickpt.plugins.report.metric_series import Series
from unickpt.plugins.report.run_facts import RunFacts, StepFacts

_SHARE = 0.05
"""The share of the loop's time that saves may take."""
_LEAST_S = 1.0
"""A shorter wait does not stand out."""
_OTHERS = 3
"""Saves that show how long one usually takes."""
_TIMES = 2.0

BAD, NOTICE, FINE = "bad", "notice", "fine"


@dataclass(frozen=True)
class Headline:
    """One line about a run.

    Arguments:
        level: "bad": something is wrong; "notice": something costs time or space; "fine".
        text: the line.
    """

    level: str
    text: str


def headline(
    run: RunFacts, names: Sequence[str], series: Sequence[Series], cost: LoopCost | None
) -> Headline:
    """The first of these that holds, in this order (docs/report.md):

    a step cannot be read; a metric is not finite since some step; half of the processes waited for
    one at least a second, and half of the time, in the newest save; the loop waited for saves at
    least 5 % of its time; failed saves left files; a metric was not finite in some steps; the
    newest save took twice as long as the others.

    Arguments:
        run: the facts from the storage.
        names: of the steps that the values of the series belong to.
        series: the metrics.
        cost: of saving, if it is known.
    """
    headlines = _notable(run, names, series, cost)
    return next(headlines, None) or Headline(FINE, f"Nothing stands out{_usual(run, cost)}.")


def _notable(
    run: RunFacts, names: Sequence[str], series: Sequence[Series], cost: LoopCost | None
) -> Iterator[Headline]:
    yield from _unreadable(run)
    for metric in series:
        if (since := metric.broken_since) is not None:
            value = metric.values[since]
            kind = "NaN" if value is None or math.isnan(value) else "infinite"
            yield Headline(BAD, f"{metric.name} is {kind} since {names[since]}.")
    yield from _slow_process(run.steps)
    if cost is not None and cost.share >= _SHARE and cost.waited >= _LEAST_S:
        yield Headline(NOTICE, f"The loop waited for saves {cost_text(cost)}.")
    yield from _left(run)
    for metric in series:
        if places := metric.not_finite:
            where = f"in {counted(len(places), 'step')}, the last time in {names[places[-1]]}"
            yield Headline(NOTICE, f"{metric.name} was NaN or infinite {where}.")
    yield from _slow_save(run.steps)


def cost_text(cost: LoopCost) -> str:
    """The cost of saving, in words.

    Example:
        >>> cost_text(LoopCost(3.0, 60.0, False))
        '5 % of its time: 3.00 s of 60.0 s'
    """
    least = "at least " if cost.is_least else ""
    times = f"{_seconds(cost.waited)} of {_seconds(cost.total)}"
    return f"{least}{share_text(cost.share)} of its time: {times}"


def share_text(share: float) -> str:
    """A share in per cent.

    Example:
        >>> share_text(0.00012), share_text(0.031), share_text(0.42), share_text(1e-6)
        ('0.012 %', '3.1 %', '42 %', '< 0.01 %')
    """
    if 0 < share < _SMALLEST:
        return f"< {100 * _SMALLEST:g} %"
    return f"{100 * share:.0f} %" if share >= _TWO_DIGITS else f"{100 * share:.2g} %"


_SMALLEST, _TWO_DIGITS = 1e-4, 0.0995


def _unreadable(run: RunFacts) -> Iterator[Headline]:
    broken = [step for step in run.steps if step.error]
    if not broken:
        return
    newest = broken[-1]
    name = newest.name if run.is_run else "This checkpoint"
    what = f"The timing of {name}" if newest.created else name  # then its index was read
    more = f" So it is with {counted(len(broken) - 1, 'other step')}." if len(broken) > 1 else ""
    yield Headline(BAD, f"{what} cannot be read: {newest.error.rstrip('.')}.{more}")


def _slow_process(steps: Sequence[StepFacts]) -> Iterator[Headline]:
    """A process for which the others waited in the newest save."""
    several = [step for step in steps if step.durations is not None and step.processes > 1]
    if not several or several[-1] is not steps[-1]:
        return
    newest = several[-1].durations
    assert newest is not None, "it is one of those that have durations"
    waited = newest.done - newest.median
    if waited < max(_LEAST_S, newest.done / 2):
        return
    often = sum(s.durations is not None and s.durations.slowest == newest.slowest for s in several)
    again = f", the slowest in {often} of {len(several)} saves" if often > 1 else ""
    where = "" if several[-1].name == "." else f" in {several[-1].name}"
    yield Headline(
        NOTICE,
        f"Half of the processes waited at least {_seconds(waited)} of {_seconds(newest.done)} "
        f"for process {newest.slowest}{where}{again}.",
    )


def _left(run: RunFacts) -> Iterator[Headline]:
    every = [] if run.left is None else run.left.orphans
    orphans = [orphan for orphan in every if orphan.kind != ORPHANS_LOCK]
    if orphans:
        many = counted(len(orphans), "failed save")
        size = size_text(sum(orphan.nbytes for orphan in orphans))
        path = shlex.quote(run.url.removeprefix("file://"))
        yield Headline(NOTICE, f"{many} left {size}: unickpt clean {path}")


def _slow_save(steps: Sequence[StepFacts]) -> Iterator[Headline]:
    timed = [(s.name, s.durations.merged) for s in steps if s.durations is not None]
    if len(timed) > _OTHERS and timed[-1][0] == steps[-1].name:
        (name, took), usual = timed[-1], median(took for _, took in timed[:-1])
        if took > max(_TIMES * usual, usual + _LEAST_S):
            yield Headline(
                NOTICE,
                f"{name} took {_seconds(took)}, and half of the others {_seconds(usual)} or less.",
            )


def _usual(run: RunFacts, cost: LoopCost | None) -> str:
    facts = []
    if run.is_run:
        facts.append(f"{counted(len(run.steps), 'step')} can be opened")
    if cost is not None:
        facts.append(f"the loop waited for saves {cost_text(cost)}")
    return f": {', and '.join(facts)}" if facts else ""


def _seconds(number: float) -> str:
    if number < 1:
        return f"{1000 * number:.3g} ms"
    return f"{number:,.{2 if number < 10 else 1 if number < 1000 else 0}f} s"
