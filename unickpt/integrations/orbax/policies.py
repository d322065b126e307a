"""When to save and which steps to keep, with the names and fields of Orbax's policies.

A policy of Orbax, or of your own, does as well: an object with `should_save` or `should_preserve`.
These are here, rather than Orbax's own, because a metric that is NaN is the worst here and anywhere
in Orbax's `BestN`, because processes agree by any group and not only by `jax.distributed`, and so
that a program can leave Orbax behind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol


class CheckpointInfo(Protocol):
    """What policies are told of a step."""

    @property
    def step(self) -> int: ...

    @property
    def time(self) -> datetime: ...

    @property
    def metrics(self) -> Any: ...


@dataclass(frozen=True)
class MultiprocessingOptions:
    """Which processes take part: all, with process 0 as the coordinator; see `options`."""

    primary_host: int | None = 0
    active_processes: Collection[int] | None = None
    barrier_sync_key_prefix: str | None = None


@dataclass(frozen=True, kw_only=True)
class DecisionContext:
    """What else a `SaveDecisionPolicy` may consider.

    Arguments:
        is_saving_in_progress: whether an earlier save is not committed yet.
        reached_preemption: whether the job is about to be stopped.
        agree: returns on all processes what process 0 passes.
    """

    is_saving_in_progress: bool
    reached_preemption: bool
    multiprocessing_options: MultiprocessingOptions = field(default_factory=MultiprocessingOptions)
    agree: Callable[[bool], bool] = bool


@dataclass(frozen=True, kw_only=True)
class PreservationContext:
    """What else a `PreservationPolicy` may consider: nothing."""


class SaveDecisionPolicy(Protocol):
    """When to save."""

    def should_save(
        self,
        step: CheckpointInfo,
        previous_steps: Sequence[CheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool: ...


class PreservationPolicy(Protocol):
    """Which steps to keep: a flag for each step, ascending."""

    def should_preserve(
        self, checkpoints: Sequence[CheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]: ...


# --- when to save --------------------------------------------------------------------------------

Steps = Sequence[CheckpointInfo]


@dataclass(frozen=True)
class FixedIntervalPolicy:
    """At steps that are multiples of `interval`."""

    interval: int

    def __post_init__(self) -> None:
        _check_interval(self.interval, "interval")

    def should_save(
        self, step: CheckpointInfo, previous_steps: Steps, *, context: DecisionContext
    ) -> bool:
        return step.step % self.interval == 0


@dataclass(frozen=True)
class SpecificStepsPolicy:
    """At these steps."""

    steps: Container[int]

    def should_save(
        self, step: CheckpointInfo, previous_steps: Steps, *, context: DecisionContext
    ) -> bool:
        return step.step in self.steps


@dataclass(frozen=True, kw_only=True)
class ContinuousCheckpointingPolicy:
    """Whenever no save is in progress; at most every `minimum_interval_secs`. Process 0 decides for
    all."""

    minimum_interval_secs: int | None = None

    def should_save(
        self, step: CheckpointInfo, previous_steps: Steps, *, context: DecisionContext
    ) -> bool:
        due = not context.is_saving_in_progress
        if due and previous_steps and self.minimum_interval_secs is not None:
            since = step.time - previous_steps[-1].time
            due = since >= timedelta(seconds=self.minimum_interval_secs)
        return context.agree(due)


@dataclass(frozen=True)
class PreemptionCheckpointingPolicy:
    """When the job is about to be stopped."""

    def should_save(
        self, step: CheckpointInfo, previous_steps: Steps, *, context: DecisionContext
    ) -> bool:
        return context.reached_preemption


@dataclass(frozen=True)
class InitialSavePolicy:
    """When no step exists."""

    def should_save(
        self, step: CheckpointInfo, previous_steps: Steps, *, context: DecisionContext
    ) -> bool:
        return not previous_steps


@dataclass(frozen=True)
class ShouldSaveFunction:
    """When a function of the step and the newest one says so."""

    function: Callable[[int, int | None], bool]

    def should_save(
        self, step: CheckpointInfo, previous_steps: Steps, *, context: DecisionContext
    ) -> bool:
        return self.function(step.step, previous_steps[-1].step if previous_steps else None)


@dataclass(frozen=True)
class AnySavePolicy:
    """When any of several policies says so."""

    policies: Sequence[SaveDecisionPolicy]

    def should_save(
        self, step: CheckpointInfo, previous_steps: Steps, *, context: DecisionContext
    ) -> bool:
        return any(p.should_save(step, previous_steps, context=context) for p in self.policies)


# --- which steps to keep -------------------------------------------------------------------------


@dataclass(frozen=True)
class PreserveAll:
    """All steps."""

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> list[bool]:
        return [True] * len(checkpoints)


@dataclass(frozen=True)
class LatestN:
    """The newest `n`; all, if it is None."""

    n: int | None = None

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> list[bool]:
        first = 0 if self.n is None else len(checkpoints) - self.n
        return [position >= first for position in range(len(checkpoints))]


@dataclass(frozen=True)
class LatestDuration:
    """Those of the last `duration`."""

    duration: timedelta

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> list[bool]:
        since = datetime.now(UTC) - self.duration
        first = next((i for i, info in enumerate(checkpoints) if info.time >= since), None)
        return [first is not None and i >= first for i in range(len(checkpoints))]


@dataclass(frozen=True)
class EveryNSeconds:
    """The first, and each that is at least so much later than the last that is kept."""

    interval_secs: int

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> list[bool]:
        kept: list[bool] = []
        last: datetime | None = None
        for info in checkpoints:
            due = last is None or info.time - last >= timedelta(seconds=self.interval_secs)
            last = info.time if due else last
            kept.append(due)
        return kept


@dataclass(frozen=True)
class EveryNSteps:
    """Multiples of `interval_steps`; with `exact_interval=False` the first, and each that is at
    least so many steps after the last that is kept. Of them the newest `max_to_keep`."""

    interval_steps: int
    exact_interval: bool = True
    max_to_keep: int | None = None

    def __post_init__(self) -> None:
        _check_interval(self.interval_steps)

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> list[bool]:
        if self.exact_interval:
            kept = [info.step % self.interval_steps == 0 for info in checkpoints]
            return _newest_of(kept, self.max_to_keep)
        kept, last = [], None
        for info in checkpoints:
            due = last is None or info.step - last >= self.interval_steps
            last = info.step if due else last
            kept.append(due)
        return _newest_of(kept, self.max_to_keep)


@dataclass(frozen=True)
class EveryNStepsClosest:
    """The step closest to each multiple of `interval_steps`, and the newest. Of them the newest
    `max_to_keep`."""

    interval_steps: int
    max_to_keep: int | None = None

    def __post_init__(self) -> None:
        _check_interval(self.interval_steps)

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> list[bool]:
        closest: dict[int, tuple[int, int]] = {}  # multiple: how far, and at which position
        for position, info in enumerate(checkpoints):
            multiple = round(info.step / self.interval_steps)
            far = abs(info.step - multiple * self.interval_steps)
            if multiple not in closest or far <= closest[multiple][0]:
                closest[multiple] = far, position
        wanted = {position for _, position in closest.values()} | {len(checkpoints) - 1}
        return _newest_of([i in wanted for i in range(len(checkpoints))], self.max_to_keep)


@dataclass(frozen=True)
class CustomSteps:
    """These steps."""

    steps: Collection[int]

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> list[bool]:
        return [info.step in self.steps for info in checkpoints]


@dataclass(frozen=True, kw_only=True)
class BestN:
    """The `n` best by `get_metric_fn(metrics)`, the largest ones, or with `reverse` the smallest;
    all, if `n` is None. NaN is the worst. Steps without metrics are kept unless
    `keep_checkpoints_without_metrics` is False."""

    get_metric_fn: Callable[[Any], float]
    reverse: bool = False
    n: int | None = None
    keep_checkpoints_without_metrics: bool = True

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> list[bool]:
        if self.n is None or len(checkpoints) <= self.n:
            return [True] * len(checkpoints)
        ranked = ranking(checkpoints, self.get_metric_fn, self.reverse)
        kept = set(ranked[len(ranked) - min(self.n, len(ranked)) :])
        if self.keep_checkpoints_without_metrics:
            kept |= {i for i, info in enumerate(checkpoints) if info.metrics is None}
        return [i in kept for i in range(len(checkpoints))]


@dataclass(frozen=True)
class AnyPreservationPolicy:
    """Those that any of several policies keeps."""

    policies: Sequence[PreservationPolicy]

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> list[bool]:
        flags = [p.should_preserve(checkpoints, context=context) for p in self.policies]
        return [any(each[i] for each in flags) for i in range(len(checkpoints))]


def ranking(checkpoints: Steps, metric: Callable[[Any], float], smallest: bool) -> list[int]:
    """The positions of the steps with metrics, from the worst to the best; of equal ones, the
    newest is the best.

    Example:
        >>> from types import SimpleNamespace as Info
        >>> infos = [Info(metrics={"loss": x}) for x in (0.5, float("nan"), 0.1)]
        >>> ranking(infos, lambda metrics: metrics["loss"], smallest=True)
        [1, 0, 2]
    """
    rated = []
    for position, info in enumerate(checkpoints):
        if info.metrics is not None:
            value = float(metric(info.metrics))
            worst = math.isnan(value)
            rated.append((not worst, 0.0 if worst else -value if smallest else value, position))
    return [position for _, _, position in sorted(rated)]


def _newest_of(kept: list[bool], most: int | None) -> list[bool]:
    positions = [i for i, flag in enumerate(kept) if flag]
    if most is not None:
        positions = positions[max(0, len(positions) - most) :]
    return [i in positions for i in range(len(kept))]


def _check_interval(steps: int, name: str = "interval_steps") -> None:
    if steps < 1:
        raise ValueError(f"{name}={steps!r} must be at least 1")
