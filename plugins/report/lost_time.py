"""The time that a run lost to interruptions, from its lines of metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from unickpt.plugins.report.metric_lines import EventLine, Lines, LoadedLine, SavedLine

_FAILURES = ("save failed", "copy failed")


@dataclass(frozen=True)
class Interruption:
    """The end of a job, and the beginning of the next. None is not known.

    Arguments:
        last_sign: the last sign of life of the job, in seconds since 1970.
        closed: whether it closed its Checkpointer, without an error.
        error: of the first failure after its last known step; empty if there is none.
        reached: the last step that it is known to have reached.
        noticed_s: seconds from the last known step to that failure.
        down_s: seconds from the last sign of life to the beginning of the next job.
        load_s: seconds that the next job's load took.
        resumed: the step that the next job loaded.
        lost_steps: the known steps that are trained again.
        lost_s: seconds from the call that saved the resumed step, or from its load by the job
            before, until it was loaded.
    """

    last_sign: float
    closed: bool
    error: str
    reached: int | None
    noticed_s: float | None
    down_s: float
    load_s: float | None
    resumed: int | None
    lost_steps: int | None
    lost_s: float | None


@dataclass(frozen=True)
class LostTime:
    """Where the time of a run went.

    Arguments:
        wall_s: seconds from the beginning of the first job to the last sign of life.
        effective_s: of these, in steps that were kept, and not blocked by saves.
        interruptions: in their order.
        skipped: how many steps were due but not saved, because an earlier save had not ended.
    """

    wall_s: float
    effective_s: float
    interruptions: Sequence[Interruption]
    skipped: int

    @property
    def ratio(self) -> float:
        """The effective training time, as a share of the whole time."""
        return self.effective_s / self.wall_s if self.wall_s > 0 else 0.0


@dataclass
class _Stretch:
    """The steps that follow a load, or the beginning of a job.

    Arguments:
        started: when training could begin.
        resumed, load_s: the step that was loaded, and the seconds of the load.
        points: the moments at which steps were known to be reached, in order.
        blocked: when saves were called, and for how long each blocked the loop.
        failed_step: the largest step whose save failed.
    """

    started: float
    resumed: int | None = None
    load_s: float | None = None
    points: list[tuple[float, int]] = field(default_factory=list)
    blocked: list[tuple[float, float]] = field(default_factory=list)
    failed_step: int | None = None

    @property
    def reached(self) -> int | None:
        steps = [step for _, step in self.points]
        return max((*steps, self.failed_step or 0, self.resumed or 0)) if self.is_known else None

    @property
    def is_known(self) -> bool:
        return bool(self.points) or self.resumed is not None

    @property
    def first_step(self) -> int | None:
        """The step after which it trained; if it loaded none, the first known."""
        return self.points[0][1] if self.points and self.resumed is None else self.resumed

    def kept_until(self, limit: float) -> float | None:
        """The last known moment at which no step beyond a limit was reached; None if it trained
        only such steps."""
        if self.first_step is None or self.first_step > limit:
            return None
        return max((moment for moment, step in self.points if step <= limit), default=self.started)

    def effective_s(self, limit: float) -> float:
        """Seconds of training until then."""
        until = self.kept_until(limit) or self.started
        waits = sum(seconds for called, seconds in self.blocked if called < until)
        return max(0.0, until - self.started - waits)


class _TrainingJob:
    """What process 0 of a job reported.

    Arguments:
        began: when it began, in seconds since 1970.
    """

    def __init__(self, began: float) -> None:
        self.began = self.last = began
        self.stretches = [_Stretch(began)]
        self.end: EventLine | None = None
        self._load: LoadedLine | None = None  # after steps: only the next step says what it was for

    def add(self, moment: float, line: SavedLine | LoadedLine | EventLine) -> None:
        """Adds a line; a save as of its call."""
        self.last = max(self.last, line.time.timestamp())
        if isinstance(line, LoadedLine):
            if self.stretches[-1].points:
                self._load = line
            else:
                self.stretches[-1] = _resumed(line)
        elif isinstance(line, SavedLine):
            self._reach(moment, line.step)
            self.stretches[-1].blocked.append((moment, line.blocked_s))
        elif line.kind == "step":
            self._reach(moment, line.step)
        elif line.kind == "save failed":
            stretch = self.stretches[-1]
            stretch.failed_step = max(stretch.failed_step or 0, line.step or 0)
        elif line.kind == "ended":
            self.end = line

    def _reach(self, moment: float, step: int | None) -> None:
        if step is None:
            return
        load, self._load = self._load, None
        if load is not None and step <= (self.stretches[-1].reached or 0):
            self.stretches.append(_resumed(load))  # it went back
        self.stretches[-1].points.append((moment, step))


def _resumed(line: LoadedLine) -> _Stretch:
    return _Stretch(line.time.timestamp(), line.step, line.seconds)


def lost_time(lines: Lines) -> LostTime | None:
    """Where the time of a run went; None if no line says when a job began.

    Arguments:
        lines: of one run.
    """
    jobs = _jobs(lines)
    if not jobs:
        return None
    failures = [event for event in lines.events if event.kind in _FAILURES]
    failures += [event for event in lines.events if event.kind == "ended" and event.error]
    earlier, limits = list[_Stretch](), list[float]()
    interruptions = list[Interruption]()
    reached: int | None = None
    for number, job in enumerate(jobs):
        for place, stretch in enumerate(job.stretches):
            step = stretch.first_step
            limits = [limit if step is None else min(limit, step) for limit in limits]
            if number and not place:
                moments = (s.kept_until(n) for s, n in zip(earlier, limits, strict=True))
                kept_moment = max((m for m in moments if m is not None), default=jobs[0].began)
                interruptions.append(
                    _interruption(jobs[number - 1], job, failures, reached, kept_moment)
                )
            reached = stretch.reached if stretch.is_known else reached
            earlier.append(stretch)
            limits.append(math.inf)
    effective = sum(s.effective_s(limit) for s, limit in zip(earlier, limits, strict=True))
    wall = max(job.last for job in jobs) - jobs[0].began
    skipped = sum(event.kind == "skipped" for event in lines.events)
    return LostTime(wall, effective, interruptions, skipped)


def _interruption(
    job: _TrainingJob,
    following: _TrainingJob,
    failures: Iterable[EventLine],
    reached: int | None,
    kept_moment: float,
) -> Interruption:
    """The interruption between two jobs.

    Arguments:
        job, following: before and after it.
        failures: of all processes of all jobs.
        reached: the last step that the run is known to have reached.
        kept_moment: the last known moment of steps that are not trained again.
    """
    last, first = job.stretches[-1], following.stretches[0]
    last_step = max((moment for moment, _ in last.points), default=last.started)
    failure_lines = [e for e in failures if last_step <= e.time.timestamp() < following.began]
    failure_lines.sort(key=lambda event: event.time)
    signs = [job.last, *(event.time.timestamp() for event in failure_lines)]
    step = first.first_step
    return Interruption(
        max(signs),
        job.end is not None and not job.end.error,
        failure_lines[0].error if failure_lines else "",
        reached,
        failure_lines[0].time.timestamp() - last_step if failure_lines else None,
        max(0.0, following.began - max(signs)),
        first.load_s,
        first.resumed,
        None if reached is None or step is None else max(0, reached - step),
        max(0.0, first.started - kept_moment) if first.is_known else None,
    )


def _jobs(lines: Lines) -> list[_TrainingJob]:
    """The jobs in the order in which they began, without those that only load while another one
    trains."""
    by_name = dict[str, _TrainingJob]()
    for event in lines.events:
        if event.kind == "began" and event.process == 0 and event.job not in by_name:
            by_name[event.job] = _TrainingJob(event.time.timestamp())
    moments: list[tuple[float, SavedLine | LoadedLine | EventLine]] = []
    moments += [(line.time.timestamp() - line.seconds, line) for line in lines.saves]
    moments += [(line.time.timestamp(), line) for line in lines.loads if line.process == 0]
    moments += [(line.time.timestamp(), line) for line in lines.events if line.process == 0]
    for moment, line in sorted(moments, key=lambda pair: pair[0]):
        if line.job in by_name:
            by_name[line.job].add(moment, line)
    jobs = list[_TrainingJob]()
    for job in sorted(by_name.values(), key=lambda job: job.began):
        if not jobs or job.began > jobs[-1].last or any(s.points for s in job.stretches):
            jobs.append(job)
    return jobs
