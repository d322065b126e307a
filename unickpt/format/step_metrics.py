"""The metrics in the metadata of a step, which are untrusted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unickpt.format.index import RESERVED

_NOT_FINITE = {"nan", "inf", "-inf"}  # as texts, because JSON lacks them
_MOST = 1e300  # larger numbers may be no float at all


def step_metrics(metadata: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a step, from its metadata, which are untrusted: those that the Checkpointer
    stores, or else a dict `metrics`, which a step of Orbax's manager has.

    Example:
        >>> step_metrics({"unickpt": {"step": 1, "metrics": {"loss": 0.5, "lr": "nan", "x": []}}})
        {'loss': 0.5, 'lr': nan}
    """
    reserved = metadata.get(RESERVED)
    stored = reserved.get("metrics") if isinstance(reserved, dict) else None
    metrics = stored or metadata.get("metrics")
    return {
        str(name): float(value)
        for name, value in (metrics.items() if isinstance(metrics, dict) else ())
        if (isinstance(value, str) and value in _NOT_FINITE)
        or (type(value) in (int, float) and abs(value) < _MOST)
    }


def finite_or_text(number: float) -> float | str:
    """A number for JSON, which has no NaN and no infinities; `step_metrics` reads it."""
    return number if math.isfinite(number) else str(number)
