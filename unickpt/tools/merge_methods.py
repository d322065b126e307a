"""How checkpoints are merged: the methods, the weights of their sources, and their arithmetic.

Pure functions of NumPy arrays. All arithmetic is done in float64 (complex128 for complex numbers).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from numbers import Real
from typing import Any, ClassVar, Literal

import numpy as np
import xxhash

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array, DType
from unickpt.errors import MergeError

BLOCK = 1 << 15
"""Elements that are computed at once; their float64 copies stay in the cache."""
_PARALLEL = 0.9995  # SLERP: above this cosine the angle is too small to divide by its sine


@dataclass(frozen=True)
class SourceFacts:
    """What weights depend on.

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
    """A way to merge; what all of them have in common."""

    name: ClassVar[str]
    needs_base: ClassVar[bool] = False
    takes_weights: ClassVar[bool] = False
    is_linear: ClassVar[bool] = False
    """Whether each input has one weight for all elements, so that NaN only makes NaN."""
    has_signs: ClassVar[bool] = False
    """Whether it compares signs, which complex numbers lack."""

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
    is_linear = True
    metric: str = "loss"
    penalty: float = 1.0
    better: Literal["lower", "higher"] = "lower"

    def __post_init__(self) -> None:
        _check_range("penalty", self.penalty, 0, math.inf)
        if self.better not in ("lower", "higher"):
            raise ValueError(f"better={self.better!r} must be 'lower' or 'higher'")


@dataclass(frozen=True)
class ByStep(Method):
    """The average with weights by step, as metrics-weighted averaging (arXiv 2504.18580) by step:
    proportional to `step ** penalty`.

    Arguments:
        penalty: how much an earlier step reduces the weight; 0 is the mean.
    """

    name = "step"
    is_linear = True
    penalty: float = 1.0

    def __post_init__(self) -> None:
        _check_range("penalty", self.penalty, 0, math.inf)


@dataclass(frozen=True)
class Ema(Method):
    """The exponential moving average of the sources in their order: it starts as the first, and
    each later one makes it `decay * average + (1 - decay) * source`.

    Arguments:
        decay: from 0, which is the last source, up to 1.
    """

    name = "ema"
    is_linear = True
    decay: float = 0.9

    def __post_init__(self) -> None:
        _check_range("decay", self.decay, 0, 1)


@dataclass(frozen=True)
class Slerp(Method):
    """Spherical interpolation of two sources, each array on its own arc.

    Arrays that are parallel or opposite (a cosine beyond 0.9995), or zero, are interpolated
    linearly.

    Arguments:
        t: 0 for the first source, 1 for the second.
    """

    name = "slerp"
    t: float = 0.5

    def __post_init__(self) -> None:
        _check_range("t", self.t, 0, 1)


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
    needs_base = True
    has_signs = True
    density: float = 0.2
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_range("density", self.density, 0, 1)
        _check_range("scale", self.scale, -math.inf, math.inf)
        if not self.density > 0:
            raise ValueError("density=0 keeps nothing; it must be above 0")


@dataclass(frozen=True)
class Dare(Method):
    """DARE (arXiv 2311.03099): task arithmetic with differences of which elements are dropped at
    random, and the others enlarged by `1 / (1 - drop)`.

    Which elements are dropped depends on the seed, the array's name, the number of the source and
    the position in the array only.

    Arguments:
        drop: the probability with which each element is dropped.
        seed: of the random numbers.
    """

    name = "dare"
    needs_base = True
    takes_weights = True
    drop: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        _check_range("drop", self.drop, 0, 1)
        if self.drop == 1:
            raise ValueError("drop=1 drops everything; it must be below 1")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed={self.seed!r} must be an integer")


@dataclass(frozen=True)
class Search(Method):
    """The weighted sum whose weights a search finds, as the recycling paper (arXiv 2412.04144)
    does: each trial is merged and scored. Starts at the mean; the best trial is the result.

    The optimiser is COBYQA of scipy, which needs no gradients: `pip install 'unickpt[search]'`.

    Arguments:
        score: called with each trial, an opened checkpoint; returns a number. In a job of several
            processes all of them call it, and the score of the first counts.
        better: whether higher scores are better, or lower ones.
        trials: how many at most.
        low, high: bounds of each weight.
        scratch: a path or URL below which trials are written, and removed at the end; by default
            beside the destination.
    """

    name = "search"
    is_linear = True
    score: Callable[[Any], float]
    better: Literal["lower", "higher"] = "higher"
    trials: int = 50
    low: float = 0.0
    high: float = 1.0
    scratch: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.score):
            raise TypeError("score must be a function of a checkpoint")
        if self.better not in ("lower", "higher"):
            raise ValueError(f"better={self.better!r} must be 'lower' or 'higher'")
        if isinstance(self.trials, bool) or not isinstance(self.trials, int) or self.trials < 1:
            raise ValueError(f"trials={self.trials!r} must be an integer, at least 1")
        _check_range("low", self.low, -math.inf, math.inf)
        _check_range("high", self.high, self.low, math.inf)

    @property
    def parameters(self) -> dict[str, Any]:
        names = ("better", "trials", "low", "high")
        return {name: getattr(self, name) for name in names}


METHODS: tuple[type[Method], ...] = (
    Mean,
    Weighted,
    ByMetric,
    ByStep,
    Ema,
    Slerp,
    TaskArithmetic,
    Ties,
    Dare,
)


def method_of(how: str | Method, parameters: Mapping[str, Any] | None = None) -> Method:
    """A method by its name.

    Arguments:
        how: its name, or the method itself.
        parameters: if it is a name.

    Raises:
        ValueError, TypeError: there is none of this name, or no such parameter.
    """
    if isinstance(how, Method):
        return how
    found = {kind.name: kind for kind in METHODS}.get(how) if isinstance(how, str) else None
    if found is None:
        known = ", ".join(kind.name for kind in METHODS)
        raise ValueError(f"how={how!r} is no method; methods are {known}")
    has = [field.name for field in fields(found)]
    unknown = sorted(set(parameters or {}) - set(has))
    if unknown:
        takes = f"its parameters are {', '.join(has)}" if has else "it has no parameters"
        raise ValueError(f"{how} has no parameter {unknown[0]!r}; {takes}")
    return found(**(parameters or {}))


def _check_range(name: str, value: Any, low: float, high: float) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and low <= value <= high):
        bounds = f" from {low:g} to {high:g}" if low > -math.inf else ""
        raise ValueError(f"{name}={value!r} must be a number{bounds}")


# --- the weights of the sources -------------------------------------------------------------------


def weights_of(
    method: Method, sources: Sequence[SourceFacts], given: Sequence[float] | None
) -> tuple[float, ...]:
    """The weight of each source; 1 each for methods without.

    Arguments:
        method: how to merge.
        sources: in their order.
        given: by the user.

    Raises:
        ValueError: the method takes no weights, or others.
        MergeError: a source has no step or metric that the method needs.
    """
    count = len(sources)
    if given is not None:
        return _checked_weights(method, given, count)
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


def _checked_weights(method: Method, given: Sequence[float], count: int) -> tuple[float, ...]:
    if not method.takes_weights:
        hint = "; for a weighted sum say how='weighted'" if method.is_linear else ""
        raise ValueError(f"how={method.name!r} takes no weights{hint}")
    weights = tuple(given)
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
        known = ", ".join(sorted(source.metrics)) or "none"
        raise MergeError(
            f"{source.url}: no metric {name!r} is recorded in it (recorded: {known}); save with "
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
    logs = [power * math.log(value) for value in values]  # of which powers cannot overflow
    largest = max(logs)
    scaled = [math.exp(log - largest) for log in logs]
    total = math.fsum(scaled)
    return tuple(one / total for one in scaled)


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
    return (math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)), (
        False
    )


# --- the arithmetic of blocks ---------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """Consecutive elements of a box of an array, in row-major order.

    Arguments:
        shape: of the array.
        box: of the array.
        first, stop: numbers of elements of the box.
    """

    shape: tuple[int, ...]
    box: Box
    first: int
    stop: int

    @cached_property
    def positions(self) -> Array:
        """The row-major numbers of the elements in the whole array."""
        within = np.arange(self.first, self.stop, dtype=np.uint64)
        found, stride = np.zeros_like(within), 1
        for n, extent, start in zip(
            reversed(self.box.shape), reversed(self.shape), reversed(self.box.start), strict=True
        ):
            within, index = np.divmod(within, np.uint64(n))
            found += (index + np.uint64(start)) * np.uint64(stride)
            stride *= extent
        return found


Formula = Callable[[Sequence[Array], Span], Array]
"""The arithmetic of one array: from elements of all inputs, the sources and then the base, in
float64 or complex128, makes those of the result."""


@dataclass(frozen=True)
class Sum:
    """A weighted sum."""

    weights: tuple[float, ...]

    def __call__(self, inputs: Sequence[Array], span: Span) -> Array:
        total: Array = inputs[0] * self.weights[0]
        for weight, block in zip(self.weights[1:], inputs[1:], strict=True):
            total += block * weight
        return total


@dataclass(frozen=True)
class Differences:
    """The base, plus a weighted sum of the sources' differences from it."""

    weights: tuple[float, ...]

    def __call__(self, inputs: Sequence[Array], span: Span) -> Array:
        *sources, base = inputs
        total: Array = base.copy()
        for weight, block in zip(self.weights, sources, strict=True):
            total += (block - base) * weight
        return total


@dataclass(frozen=True)
class RandomDifferences:
    """The same, of differences of which most elements are dropped.

    Arguments:
        weights: of the sources.
        method: how many to drop, and the seed.
        name: of the array.
    """

    weights: tuple[float, ...]
    method: Dare
    name: str

    def __call__(self, inputs: Sequence[Array], span: Span) -> Array:
        *sources, base = inputs
        total: Array = base.copy()
        for number, (weight, block) in enumerate(zip(self.weights, sources, strict=True)):
            kept = is_kept(self.method, self.name, number, span.positions)
            factor = weight / (1 - self.method.drop)
            total += np.where(kept, (block - base) * factor, 0)
        return total


@dataclass(frozen=True)
class Elected:
    """The base, plus the mean of the large differences whose sign prevails.

    Arguments:
        thresholds: for each source, the smallest magnitude that is kept.
        scale: of the merged difference.
        wide: whether magnitudes are compared as float64.
    """

    thresholds: tuple[float, ...]
    scale: float
    wide: bool

    def __call__(self, inputs: Sequence[Array], span: Span) -> Array:
        *sources, base = inputs
        trimmed = []
        for threshold, block in zip(self.thresholds, sources, strict=True):
            difference = block - base
            kept = magnitudes(difference, self.wide) >= threshold
            trimmed.append(np.where(kept, difference, 0))
        sign = np.sign(sum(trimmed))
        agreeing = [np.where(np.sign(one) == sign, one, 0) for one in trimmed]
        count = sum((one != 0).astype(np.float64) for one in agreeing)
        mean = sum(agreeing) / np.maximum(count, 1)
        found: Array = base + self.scale * mean
        return found


def magnitudes(difference: Array, wide: bool) -> Array:
    """The magnitudes by which TIES compares differences.

    Arguments:
        difference: in float64.
        wide: whether a source or the base is of float64; otherwise float32 is enough.
    """
    return np.abs(difference) if wide else np.abs(difference).astype(np.float32)


_GAMMA, _MIX = np.uint64(0x9E3779B97F4A7C15), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def is_kept(method: Dare, name: str, source: int, positions: Array) -> Array:
    """Which elements DARE keeps; the same for any split of the array.

    The random number of an element is that of the generator SplitMix64 at the element's position,
    seeded with the xxh3-64 of `<seed>/<source>/<name>`.

    Arguments:
        method: how many to drop, and the seed.
        name: of the array.
        source: its number.
        positions: row-major numbers of elements in the array, as uint64.
    """
    start = np.uint64(xxhash.xxh3_64_intdigest(f"{method.seed}/{source}/{name}".encode()))
    with np.errstate(over="ignore"):
        z = start + (positions + np.uint64(1)) * _GAMMA
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX[0])
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX[1])
    z ^= z >> np.uint64(31)
    found: Array = (z >> np.uint64(11)) >= np.uint64(math.ceil(method.drop * 2**53))
    return found


def wide_dtype(dtype: DType) -> DType:
    """The dtype in which elements are computed."""
    return np.dtype(np.complex128 if dtype.kind == "c" else np.float64)


def is_finite(block: Array) -> bool:
    # A sum is cheaper than a mask, and is not finite if an element is not; it may also overflow.
    return bool(np.isfinite(block.sum()) or np.isfinite(block).all())


@dataclass
class Outcome:
    """What was found while a box was merged.

    Arguments:
        nonfinite: the numbers of the inputs with NaN or infinite elements.
        overflows: whether the result's dtype cannot hold the merge of finite elements.
    """

    nonfinite: set[int]
    overflows: bool = False


def merge_box(
    formula: Formula, inputs: Sequence[Array], shape: tuple[int, ...], box: Box, out: Array
) -> Outcome:
    """Merges a box of an array.

    Arguments:
        formula: the arithmetic.
        inputs: the box in all inputs, contiguous.
        shape: of the array.
        box: of the array.
        out: contiguous; receives the result, cast once to its dtype.
    """
    flat, to = [one.reshape(-1) for one in inputs], out.reshape(-1)
    outcome = Outcome(set())
    limit = _saturates_above(out.dtype)
    with np.errstate(all="ignore"):
        for first in range(0, len(to), BLOCK):
            stop = min(first + BLOCK, len(to))
            blocks = [one[first:stop].astype(wide_dtype(one.dtype)) for one in flat]
            bad = {number for number, block in enumerate(blocks) if not is_finite(block)}
            outcome.nonfinite |= bad
            made = formula(blocks, Span(shape, box, first, stop))
            to[first:stop] = made.astype(out.dtype)
            if not bad:
                held = is_finite(to[first:stop].astype(wide_dtype(out.dtype)))
                outcome.overflows |= not held or bool((np.abs(made) > limit).any())
    return outcome


def _saturates_above(dtype: DType) -> float:
    """The magnitude above which a dtype without infinities and NaN takes its largest number."""
    return 7.0 if dtypes.name_of(dtype) == "float4_e2m1fn" else math.inf
