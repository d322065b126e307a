"""Retention: which steps to keep and which to remove; does no I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

from unickpt.quoting import changed_repr, quoted
from unickpt.threads import calling_user, is_synchronous

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Retention:
    """Which steps are kept: the newest one and those that any rule keeps; all steps without rules.

    A step without `metric`, or where it is NaN, is not among the best.

    Arguments:
        keep_last: how many of the newest steps.
        keep_every: steps that are multiples of this.
        keep_best: how many of the best steps by `metric`, which the first save of a run must have.
        metric: the name of a metric given to `Checkpointer.save`.
        best: whether the smallest or the largest value is the best.
        keep: called with a step; returns whether to keep it.
        keep_among: called with all steps, ascending, on process 0; returns those to keep.

    Raises:
        ValueError: a rule is invalid.

    Example:
        >>> Retention(keep_last=1, keep_every=10).expendable({5: {}, 10: {}, 21: {}})
        [5]
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    metric: str | None = None
    best: Literal["min", "max"] = "min"
    keep: Callable[[int], bool] | None = None
    keep_among: Callable[[Sequence[int]], Collection[int]] | None = None

    __repr__ = changed_repr

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Integral) or value < 1):
                raise ValueError(f"{name}={value!r} must be an integer, at least 1")
        if (self.keep_best is None) != (self.metric is None):
            raise ValueError(
                "give both keep_best and metric, or neither, such as keep_best=3, metric='loss'"
            )
        if isinstance(self.metric, str):
            object.__setattr__(self, "metric", str.__str__(self.metric))
        if self.best not in ("min", "max"):
            raise ValueError(f"best={self.best!r} must be 'min' or 'max'")
        if self.keep is not None and not is_synchronous(self.keep):
            raise ValueError(
                f"keep={self.keep!r} must be a function of a step, or a Retention, such as "
                "Retention(keep_every=100); it is not awaited"
            )
        if self.keep_among is not None and not is_synchronous(self.keep_among):
            raise ValueError(
                f"keep_among={self.keep_among!r} must be a function of all steps; it is not awaited"
            )

    @property
    def keeps_all(self) -> bool:
        rules = (self.keep_last, self.keep_every, self.keep_best, self.keep, self.keep_among)
        return all(rule is None for rule in rules)

    def rates(self, metrics: Metrics) -> bool:
        """Whether a step with these metrics can be one of the best; True if no rule needs that."""
        return self.metric is None or self.metric in metrics

    def how_to_rate(self, metrics: Metrics) -> str:
        """Advice about a step that `rates` refuses."""
        metrics_text = f"the metrics {sorted(metrics)}" if metrics else "no metrics"
        return (
            f"keep_best={self.keep_best} keeps steps by metric={self.metric!r}, but the first save "
            f"of the run has {metrics_text}: pass metrics={{{self.metric!r}: value}} to save, or "
            f"{{{self.metric!r}: float('nan')}} if this step has none yet"
        )

    def expendable(
        self, steps: Mapping[int, Metrics], protected: Collection[int] = ()
    ) -> list[int]:
        """Steps that no rule keeps, ascending; never the newest.

        Arguments:
            steps: all committed steps with their metrics.
            protected: steps to keep in any case, such as those just saved.
        """
        if self.keeps_all:
            return []
        kept_steps = set(protected).union(*self.steps_by_rule(steps).values())
        return [step for step in sorted(steps) if step not in kept_steps]

    def steps_by_rule(self, steps: Mapping[int, Metrics]) -> dict[str, set[int]]:
        """The steps that each rule keeps, by a text that names the rule.

        Arguments:
            steps: all committed steps with their metrics.
        """
        ordered = sorted(steps)
        steps_by_rule = {"the newest": set(ordered[-1:])}
        if self.keep_last is not None:
            steps_by_rule[f"keep_last={self.keep_last}"] = set(ordered[-self.keep_last :])
        if self.keep_every is not None:
            every = {step for step in ordered if step % self.keep_every == 0}
            steps_by_rule[f"keep_every={self.keep_every}"] = every
        if self.keep_best is not None and self.metric is not None:
            best = self._best_first(steps, self.metric)[: self.keep_best]
            steps_by_rule[f"keep_best={self.keep_best} by {self.metric}"] = set(best)
        if self.keep is not None:
            keep = self.keep
            steps_by_rule["keep"] = _call(keep, lambda: {step for step in ordered if keep(step)})
        if self.keep_among is not None:
            keep_among = self.keep_among
            steps_by_rule["keep_among"] = _call(keep_among, lambda: set(keep_among(ordered)))
        return steps_by_rule

    def _best_first(self, steps: Mapping[int, Metrics], metric: str) -> list[int]:
        sign = 1 if self.best == "min" else -1
        values = {step: metrics.get(metric, math.nan) for step, metrics in steps.items()}
        rated = [(sign * float(v), -step) for step, v in values.items() if not math.isnan(v)]
        return [-step for _, step in sorted(rated)]  # the newest of equal ones first


def _call(rule: object, choose: Callable[[], set[int]]) -> set[int]:
    """The steps that a user's rule keeps. Its error names it."""
    try:
        with calling_user:
            steps = choose()
        for step in steps:
            if not isinstance(step, Real):  # such as a name or a tensor, which equals no step
                raise TypeError(f"it returned {quoted(step)}, which is no step")
    except BaseException as error:
        error.add_note(f"in the rule {quoted(rule)}; until it succeeds, no step is removed")
        raise
    return steps
