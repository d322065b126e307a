"""How checkpoints are merged: the methods with their parameters, and the weights of the sources."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import Any, ClassVar, Literal

from unickpt.errors import MergeError

_PARALLEL = 0.9995  # SLERP: above this cosine the angle is too small to divide by its sine


@dataclass(frozen=True)
class SourceFacts:
    """The facts that weights depend on.

    Arguments:
        url: of the source.
        step: of a run, which `Checkpointer` recorded; None if it did not.
        metrics: that were recorded with it.
    """

    url: str
    step: int | None
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Method:
    """A way to merge; the base class of all methods."""

    name: ClassVar[str]
    needs_base: ClassVar[bool] = False
    takes_weights: ClassVar[bool] = False
    is_linear: ClassVar[bool] = False
    """Whether each input has one weight for all elements, so that NaN only makes NaN."""
    has_signs: ClassVar[bool] = False
    """Whether it compares signs, which complex numbers lack."""
    limits: ClassVar[tuple[tuple[str, float, float], ...]] = ()
    """Parameters that are numbers, with the least and the largest value."""

    def __post_init__(self) -> None:
        for name, low, high in self.limits:
            _check_range(name, getattr(self, name), low, high)
        better = getattr(self, "better", "lower")
        ways = list(better.values()) if isinstance(better, Mapping) else [better]
        if not ways or any(way not in ("lower", "higher") for way in ways):
            raise ValueError(f"better={better!r} must be 'lower' or 'higher'")

    @property
    def parameters(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Mean(Method):
    """The mean of all sources."""

    name = "mean"
    is_linear = True


@dataclass(frozen=True)
class Weighted(Method):
    """The sum of the sources, each times its weight in `weights`, which need not sum to 1."""

    name = "weighted"
    takes_weights = True
    is_linear = True


@dataclass(frozen=True)
class ByMetric(Method):
    """The average with weights from a recorded metric, as metrics-weighted averaging
    (arXiv 2504.18580) by loss: proportional to `metric ** -penalty`.

    Arguments:
        metric: its name in `Checkpointer.save(metrics=)`.
        penalty: how much a worse metric reduces the weight; 0 is the mean.
        better: whether lower values are better, or higher ones, whose weights are proportional to
            `metric ** penalty`.
    """

    name = "metric"
    limits = (("penalty", 0, math.inf),)
    is_linear = True
    metric: str = "loss"
    penalty: float = 1.0
    better: Literal["lower", "higher"] = "lower"


@dataclass(frozen=True)
class ByStep(Method):
    """The average with weights by step, as metrics-weighted averaging (arXiv 2504.18580) by step:
    proportional to `step ** penalty`.

    Arguments:
        penalty: how much an earlier step reduces the weight; 0 is the mean.
    """

    name = "step"
    limits = (("penalty", 0, math.inf),)
    is_linear = True
    penalty: float = 1.0


@dataclass(frozen=True)
class Ema(Method):
    """The exponential moving average of the sources in their order: it starts as the first, and
    each later one makes it `decay * average + (1 - decay) * source`.

    Arguments:
        decay: from 0, which is the last source, up to 1.
    """

    name = "ema"
    limits = (("decay", 0, 1),)
    is_linear = True
    decay: float = 0.9


@dataclass(frozen=True)
class Slerp(Method):
    """Spherical interpolation of two sources, each array on its own arc.

    Arrays that are parallel or opposite (a cosine beyond 0.9995), or zero, are interpolated
    linearly.

    Arguments:
        t: 0 for the first source, 1 for the second.
    """

    name = "slerp"
    limits = (("t", 0, 1),)
    t: float = 0.5


@dataclass(frozen=True)
class TaskArithmetic(Method):
    """The base, plus for each source its weight (1 by default) times its difference from the
    base."""

    name = "task_arithmetic"
    needs_base = True
    takes_weights = True
    is_linear = True


@dataclass(frozen=True)
class Ties(Method):
    """TIES (arXiv 2306.01708): of each source's difference from the base, only the largest elements
    of each array are kept; of these, each element is the mean of those whose sign prevails.

    Arguments:
        density: the share of the elements of an array that is kept, above 0 and up to 1. Elements
            as large as the smallest of them are kept too.
        scale: of the merged difference, which is added to the base.
    """

    name = "ties"
    limits = (("density", 0, 1), ("scale", -math.inf, math.inf))
    needs_base = True
    has_signs = True
    density: float = 0.2
    scale: float = 1.0

    def __post_init__(self) -> None:
        Method.__post_init__(self)
        if not self.density > 0:
            raise ValueError("density=0 keeps nothing; it must be above 0")


@dataclass(frozen=True)
class Dare(Method):
    """DARE (arXiv 2311.03099): task arithmetic with differences whose elements are dropped at
    random, and the others enlarged by `1 / (1 - drop)`.

    Which elements are dropped depends on the seed, the array's name, the number of the source and
    the position in the array only.

    Arguments:
        drop: the probability with which each element is dropped.
        seed: of the random numbers.
    """

    name = "dare"
    limits = (("drop", 0, 1),)
    needs_base = True
    takes_weights = True
    drop: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        Method.__post_init__(self)
        if self.drop == 1:
            raise ValueError("drop=1 drops everything; it must be below 1")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed={self.seed!r} must be an integer")


@dataclass(frozen=True)
class Search(Method):
    """The weighted sum whose weights a search finds, as the recycling paper (arXiv 2412.04144)
    does: each trial is merged and scored. Starts at the mean; the best trial is the result.

    For one score the optimiser is COBYQA of scipy, which needs no gradients. For several tasks it
    is TPE of optuna, which searches for the Pareto front: the merges than which no other is at
    least as good in all tasks and better in one. `MergeReport.trials` has them. Both come with
    `pip install 'unickpt[search]'`.

    Arguments:
        score: called with each trial, an opened checkpoint; returns a number, or a dict with one
            for each task. In a job of several processes all of them call it, and the scores of the
            first count.
        better: whether higher scores are better, or lower ones; or a dict that says it by task.
        trials: how many at most.
        low, high: bounds of each weight.
        choose: which trial becomes the result, of those on the front, with their `weights` and
            `scores`; by default the one whose largest distance to the best of any task is smallest;
            each task's range on the front counts as 1.
        log: a local file in which each trial is kept: a search that was stopped, and is called
            again with the same arguments, resumes there.
        scratch: a path or URL below which trials are written, and removed at the end; by default
            next to the destination.
    """

    name = "search"
    is_linear = True
    score: Callable[[Any], float | Mapping[str, float]]
    better: Literal["lower", "higher"] | Mapping[str, Literal["lower", "higher"]] = "higher"
    trials: int = 50
    low: float = 0.0
    high: float = 1.0
    scratch: str | None = None
    choose: Callable[[Sequence[Any]], Any] | None = None
    log: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if not callable(self.score):
            raise TypeError("score must be a function of a checkpoint")
        Method.__post_init__(self)
        if type(self.trials) is not int or self.trials < 1:
            raise ValueError(f"trials={self.trials!r} must be an integer, at least 1")
        _check_range("low", self.low, -math.inf, math.inf)
        _check_range("high", self.high, self.low, math.inf)

    @property
    def parameters(self) -> dict[str, Any]:
        names = ("better", "trials", "low", "high")
        values = {name: getattr(self, name) for name in names}
        return values if isinstance(self.better, str) else {**values, "better": dict(self.better)}

    def better_of(self, tasks: Sequence[str]) -> dict[str, str]:
        """By task whether "higher" or "lower" scores are better.

        Raises:
            MergeError: `better` lacks a task.
        """
        if isinstance(self.better, str):
            return dict.fromkeys(tasks, self.better)
        if set(tasks) != set(self.better):
            raise MergeError(
                f"better={dict(self.better)!r} says which scores are better of other tasks than "
                f"{sorted(tasks)}, but the score function returns only some of them"
            )
        return {task: self.better[task] for task in tasks}


MethodName = Literal[
    "mean", "weighted", "metric", "step", "ema", "slerp", "task_arithmetic", "ties", "dare"
]
METHODS = (Mean, Weighted, ByMetric, ByStep, Ema, Slerp, TaskArithmetic, Ties, Dare)


def method_of(how: MethodName | Method, parameters: Mapping[str, Any] | None = None) -> Method:
    """A method by its name.

    Arguments:
        how: its name, or the method itself.
        parameters: if it is a name.

    Raises:
        ValueError, TypeError: there is no method of this name, or no such parameter.
    """
    if isinstance(how, Method):
        return how
    methods: dict[str, type[Method]] = {kind.name: kind for kind in METHODS}
    method = methods.get(how) if isinstance(how, str) else None
    if method is None:
        raise ValueError(f"how={how!r} is no method; methods are {', '.join(methods)}")
    has = [field.name for field in fields(method)]
    unknown = sorted(set(parameters or {}) - set(has))
    if unknown:
        takes = f"its parameters are {', '.join(has)}" if has else "it has no parameters"
        raise ValueError(f"{how} has no parameter {unknown[0]!r}; {takes}")
    return method(**(parameters or {}))


def _check_range(name: str, value: Any, low: float, high: float) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and low <= value <= high):
        bounds = f" from {low:g} to {high:g}" if low > -math.inf else ""
        raise ValueError(f"{name}={value!r} must be a number{bounds}")


# --- the weights of the sources -------------------------------------------------------------------


def weights_of(
    method: Method, sources: Sequence[SourceFacts], weights: Sequence[float] | None
) -> tuple[float, ...]:
    """The weight of each source; 1 each for methods without.

    Arguments:
        method: how to merge.
        sources: in their order.
        weights: by the user.

    Raises:
        ValueError: the method takes no weights, or others.
        MergeError: a source has no step or metric that the method needs.
    """
    count = len(sources)
    if weights is not None:
        return _checked_weights(method, weights, count)
    match method:
        case Weighted():
            raise ValueError("how='weighted' needs weights=, a number for each source")
        case Mean() | Search():
            return (1 / count,) * count
        case Ema(decay=decay):
            later = [(1 - decay) * decay**age for age in range(count - 2, -1, -1)]
            return (decay ** (count - 1), *later)
        case ByStep(penalty=penalty):
            return _shares([_step(source) for source in sources], penalty)
        case ByMetric():
            power = method.penalty if method.better == "higher" else -method.penalty
            return _shares([_metric(source, method.metric) for source in sources], power)
    return (1.0,) * count


def _checked_weights(method: Method, numbers: Sequence[float], count: int) -> tuple[float, ...]:
    if not method.takes_weights:
        hint = "; for a weighted sum say how='weighted'" if method.is_linear else ""
        raise ValueError(f"how={method.name!r} takes no weights{hint}")
    weights = tuple(numbers)
    for weight in weights:
        _check_range("a weight", weight, -math.inf, math.inf)
    if len(weights) != count:
        raise ValueError(f"there are {len(weights)} weights for {count} sources")
    return tuple(map(float, weights))


def _step(source: SourceFacts) -> float:
    if source.step is None:
        raise MergeError(
            f"{source.url}: no step is recorded in it; merge checkpoints that a Checkpointer saved,"
            " or give weights= with how='weighted'"
        )
    return _positive(source, "step", source.step)


def _metric(source: SourceFacts, name: str) -> float:
    if name not in source.metrics:
        names = ", ".join(sorted(source.metrics)) or "none"
        raise MergeError(
            f"{source.url}: no metric {name!r} is recorded in it (recorded: {names}); save with "
            "Checkpointer.save(metrics=), or give weights= with how='weighted'"
        )
    return _positive(source, f"metric {name!r}", source.metrics[name])


def _positive(source: SourceFacts, what: str, value: float) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise MergeError(
            f"{source.url}: its {what} is {value:g}, and weights by it need positive numbers; give "
            "weights= with how='weighted'"
        )
    return value


def _shares(values: Sequence[float], power: float) -> tuple[float, ...]:
    """Weights in proportion to powers of positive numbers; their sum is 1."""
    logs = [power * math.log(value) for value in values]  # whose powers cannot overflow
    largest = max(logs)
    scaled = [math.exp(log - largest) for log in logs]
    total = math.fsum(scaled)
    return tuple(weight / total for weight in scaled)


def slerp_weights(
    t: float, first: float, second: float, product: float
) -> tuple[tuple[float, float], bool]:
    """The weights of two arrays in their spherical interpolation, and whether it is linear.

    Arguments:
        t: 0 for the first, 1 for the second.
        first, second: the sums of the squares of their elements.
        product: the sum of the products of their elements.
    """
    length = math.sqrt(first) * math.sqrt(second)
    if length == 0 or abs(product / length) > _PARALLEL:
        return (1 - t, t), True
    angle = math.acos(product / length)
    weights = math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)
    return weights, False
