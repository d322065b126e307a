"""What is given to a Checkpointer, checked: steps, optimizers, metrics, metadata."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from unickpt.errors import UnsupportedLeaf
from unickpt.format.index import RESERVED
from unickpt.frameworks.leaves import adapters
from unickpt.frameworks.protocol import Fence
from unickpt.quoting import quoted
from unickpt.saving.describe import check_mapping

_STEPS_END = 10**18  # the folders of later steps are not recognised


def step_number(step: object, what: str = "step ") -> int:
    """A step as an int, from any integer type, including NumPy's.

    Raises:
        ValueError: it is not one that a Checkpointer would find again.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{what}{quoted(step)} must be an integer, at least 0")
    if number >= _STEPS_END:
        raise ValueError(f"{what}{step!r} must be less than 10**18")
    return number


def fences_of(optimizers: Sequence[Any], wait: Callable[[], None]) -> list[Fence]:
    """The fences of optimizers.

    Arguments:
        optimizers: as given.
        wait: what their next step waits for.

    Raises:
        ValueError: they are not a list of optimizers.
    """
    among, found = adapters(), []
    if not isinstance(optimizers, Iterable):
        raise ValueError(
            f"optimizers is of type {type(optimizers).__name__}; pass a list, even for a single "
            "optimizer"
        )
    for optimizer in optimizers:
        fence = next((f for f in (a.fence(optimizer, wait) for a in among) if f), None)
        if fence is None:
            raise ValueError(
                f"optimizers: {type(optimizer).__name__} is not a torch.optim.Optimizer; omit it "
                "in JAX, whose arrays never change"
            )
        found.append(fence)
    return found


def step_metadata(
    step: int,
    metrics: Mapping[str, float] | None,
    metadata: Mapping[str, Any] | None,
    after: int | None,
) -> dict[str, Any]:
    """The metadata of a step.

    Raises:
        UnsupportedLeaf: it cannot be stored.
    """
    check_mapping("metadata", metadata)
    check_mapping("metrics", metrics)
    if RESERVED in (metadata or {}):
        raise UnsupportedLeaf(
            f"metadata: the key {RESERVED!r} is reserved for the Checkpointer; rename yours"
        )
    numbers = {str(name): _metric(name, value) for name, value in (metrics or {}).items()}
    shown = {n: v if math.isfinite(v) else str(v) for n, v in numbers.items()}  # JSON lacks nan
    own = {"step": step, "metrics": shown}
    return {**(metadata or {}), RESERVED: own if after is None else {**own, "after": after}}


def _metric(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedLeaf(f"metrics must be numbers: {name!r}: {error}") from error
