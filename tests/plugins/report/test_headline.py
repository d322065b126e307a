"""What a report says first: the most notable fact of a run, and what saving cost its loop."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from unickpt.plugins.report.headline import headline
from unickpt.plugins.report.loop_cost import LoopCost, ReportedSave, calls_of, loop_cost
from unickpt.plugins.report.metric_lines import SavedLine
from unickpt.plugins.report.metric_series import series_of
from unickpt.plugins.report.run_facts import Durations, RunFacts, StepFacts
from unickpt.runs.save_leftovers import Orphan, OrphanSearch

USUAL = Durations(done=10.0, median=9.0, merged=11.0, blocked=0.5, slowest=3)


def step(number: int, durations: Durations | None = USUAL, **facts: Any) -> StepFacts:
    created = f"2026-11-25T00:{number:02d}:11+00:00"
    made = StepFacts(f"step_{number}", "", "a", created, 80, 80, 1, 4, durations=durations)
    return replace(made, **facts)


def said(
    *steps: StepFacts, left: OrphanSearch | None = None, cost: LoopCost | None = None
) -> tuple[str, str]:
    """The level and the text of the headline of a run."""
    run = RunFacts("file:///data/my run/", True, steps, left=left)
    names, (series, _) = [one.name for one in steps], series_of([one.metrics for one in steps])
    found = headline(run, names, series, cost)
    return found.level, found.text


def left_by(*sizes: int) -> OrphanSearch:
    found = [Orphan(f"step_{n}", "unfinished", 3, size, 1e5) for n, size in enumerate(sizes)]
    return OrphanSearch((*found, Orphan("x", "lock", 1, 0, 1e5)), (), (), None)


SLOW = replace(USUAL, done=60.0, median=19.0, merged=61.0, slowest=37)


def test_nothing_stands_out() -> None:
    assert said(step(1), step(2)) == ("fine", "Nothing stands out: 2 steps can be opened.")
    cost = LoopCost(2.0, 100.0, False)
    fine = "2 steps can be opened, and the loop waited for saves 2 % of its time"
    assert said(step(1), step(2), cost=cost)[1] == f"Nothing stands out: {fine}: 2.00 s of 100.0 s."


def test_a_metric_that_is_nan_since_a_step_is_said_with_it() -> None:
    values = [{"loss": 1.0}, {"loss": math.nan}, {"loss": math.nan}, {}]
    steps = [step(n, metrics=metrics) for n, metrics in enumerate(values)]
    assert said(*steps) == ("bad", "loss is NaN since step_1.")
    steps.append(step(4, metrics={"loss": 0.5}))
    recovered = "loss was NaN or infinite in 2 steps, the last time in step_2."
    assert said(*steps) == ("notice", recovered)


def test_a_process_for_which_half_of_the_others_waited_is_named() -> None:
    text = "Half of the processes waited at least 41.0 s of 60.0 s for process 37 in step_2"
    assert said(step(1), step(2, SLOW)) == ("notice", f"{text}.")
    again = said(step(1, SLOW), step(2, SLOW))[1]
    assert again == f"{text}, the slowest in 2 of 2 saves."
    assert said(step(1, SLOW), step(2))[0] == "fine", "only of the newest save"
    short = Durations(done=0.9, median=0.1, merged=1.0, blocked=0.1, slowest=1)
    assert said(step(1, short))[0] == "fine", "less than a second"
    assert said(step(1, SLOW, processes=1))[0] == "fine", "nobody waited"


def test_what_failed_saves_left_is_said_with_the_command_that_removes_it() -> None:
    found = said(step(1), left=left_by(2_000_000_000, 1_000_000_000))
    assert found == ("notice", "2 failed saves left 3.0 GB: unickpt clean '/data/my run/'")


def test_what_cannot_be_read_comes_first() -> None:
    broken = step(3, None, created="", error="no index.")
    nan = step(4, metrics={"loss": math.nan})
    assert said(broken, nan) == ("bad", "step_3 cannot be read: no index.")
    timing = step(5, None, error="it does not match its checksum")
    more = "So it is with 1 other step."
    text = f"The timing of step_5 cannot be read: it does not match its checksum. {more}"
    assert said(broken, timing) == ("bad", text)


def test_one_line_is_said_by_the_order_of_the_rules() -> None:
    costly, left = LoopCost(30.0, 100.0, True), left_by(1000)
    slow = step(9, replace(USUAL, merged=80.0))
    usual = [step(n) for n in range(5)]
    nan = step(6, metrics={"loss": math.nan})
    at_least = "The loop waited for saves at least 30 % of its time: 30.0 s of 100.0 s."
    assert (
        said(*usual, nan, step(7, SLOW), left=left, cost=costly)[1] == "loss is NaN since step_6."
    )
    assert said(*usual, step(7, SLOW), left=left, cost=costly)[1].startswith("Half of")
    assert said(*usual, slow, left=left, cost=costly)[1] == at_least
    assert said(*usual, slow, left=left)[1].startswith("1 failed save left 1.0 kB")
    assert said(*usual, slow) == (
        "notice",
        "step_9 took 80.0 s, and half of the others 11.0 s or less.",
    )
    assert said(*usual, cost=LoopCost(0.9, 10.0, False))[0] == "fine", "less than a second"


def test_what_saving_cost_ends_where_the_last_save_begins() -> None:
    calls = [
        ReportedSave(130.0, 50.0, True),
        ReportedSave(100.0, 3.0, True),
        ReportedSave(110.0, 2.0, True),
    ]
    cost = loop_cost(calls, is_least=False)
    assert cost == LoopCost(5.0, 30.0, False)
    assert cost.share == pytest.approx(1 / 6)
    assert loop_cost(calls[:1], is_least=False) is None


def test_without_lines_moments_are_known_to_the_second_and_need_more_of_them() -> None:
    def calls(*numbers: int) -> list[ReportedSave]:
        return [
            call
            for number in numbers
            for call in calls_of(step(number), None, datetime.fromisoformat(step(number).created))
        ]

    first = calls(0)[0]
    assert first.asked == datetime(2026, 11, 25, tzinfo=UTC).timestamp(), "11 s before the merge"
    assert (first.waited, first.is_told) == (0.5, False)
    assert loop_cost(calls(0, 2, 4), is_least=True) == LoopCost(1.0, 240.0, True)
    close = [ReportedSave(0.0, 0.1, False), ReportedSave(19.0, 0.1, False)]
    assert loop_cost(close, is_least=True) is None


def test_a_call_that_returned_after_the_commit_waited_until_then() -> None:
    whole, when = step(1, replace(USUAL, blocked=None)), datetime(2026, 11, 25, tzinfo=UTC)
    line = SavedLine(when, "file:///r/step_1", 80, 4, 11.5, 11.5)
    (stored,), (told,) = calls_of(whole, None, when), calls_of(whole, line, when)
    assert (stored.waited, told.waited) == (11.0, 11.5)
    assert told.asked == when.timestamp() - 11.5
    assert [*calls_of(step(1, None), None, when)] == [], "nobody knows"
    early = SavedLine(when, "file:///r/step_1", 80, 4, 11.5, 0.1)
    (call,) = calls_of(step(1), early, when)
    assert call.waited == 0.5, "another process waited longer than process 0, which told"
