"""Retention, purely: which steps are kept, and which may go."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Retention:
    """Which steps are kept: those that any of the rules keeps, and the newest one; all, if no rule
    is given.

    Arguments:
        keep_last: the newest so many.
        keep_every: those that are multiples of it.
        keep_best: the best so many by `metric`; those without it, or with NaN, are not among them.
        metric: the name of a metric that was given to `Checkpointer.save`.
        best: whether the least or the largest value is the best.
        keep: whether to keep a step.

    Raises:
        ValueError: a rule makes no sense.

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

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if (self.keep_best is None) != (self.metric is None):
            raise ValueError(
                "give both keep_best and metric, or neither: keep_best=3, metric='loss'"
            )
        if self.best not in ("min", "max"):
            raise ValueError(f"best={self.best!r} must be 'min' or 'max'")

    @property
    def keeps_all(self) -> bool:
        rules = (self.keep_last, self.keep_every, self.keep_best, self.keep)
        return all(rule is None for rule in rules)

    def expendable(self, steps: Mapping[int, Metrics], spared: Collection[int] = ()) -> list[int]:
        """Steps that no rule keeps, ascending; never the newest.

        Arguments:
            steps: all committed steps with their metrics.
            spared: steps that are kept whatever the rules say, as what was just saved.
        """
        if self.keeps_all:
            return []
        ordered = sorted(steps)
        kept = set(ordered[-(self.keep_last or 1) :]) | set(self._best(steps))
        if self.keep_every is not None:
            kept |= {step for step in ordered if step % self.keep_every == 0}
        if self.keep is not None:
            kept |= {step for step in ordered if self.keep(step)}
        return [step for step in ordered if step not in kept and step not in spared]

    def _best(self, steps: Mapping[int, Metrics]) -> list[int]:
        if self.keep_best is None or self.metric is None:
            return []
        sign = 1 if self.best == "min" else -1
        rated = [
            (sign * float(metrics[self.metric]), -step)  # of equals, the newest
            for step, metrics in steps.items()
            if self.metric in metrics and not math.isnan(metrics[self.metric])
        ]
        return [-step for _, step in sorted(rated)[: self.keep_best]]
