"""The timing of a save as columns of whole numbers, which the page draws."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from unickpt.format.timing import PHASES, Timing

_SIZES = ("written", "stored", "reused", "staged", "chunks")
_FINE, _COARSE = 100_000, 1000
_LONG_S = 100.0

Columns = dict[str, Any]


def columns(timing: Timing) -> Columns:
    """A timing for the page.

    Returns:
        `unit`, how many of its units of time a second has; `processes`, `collected` and `merged`;
        and by the names of the format (`began`, `write_at`, `write_s`, `written`, ...) a list with
        a number for each process, without those that are 0 throughout.

    Example:
        >>> from unickpt.format.timing import from_columns
        >>> found = columns(from_columns(1.5, 2, {"write_s": np.array([1.25, 0.5])}, 2))
        >>> found["unit"], found["write_s"], found["merged"]
        (100000, [125000, 50000], 200000)
    """
    unit = _COARSE if max(float(timing.done.max()), timing.merged) > _LONG_S else _FINE
    every: dict[str, NDArray[Any]] = {
        "began": timing.began,
        "blocked": timing.blocked,
        **{f"{phase}_at": timing.at[phase] for phase in PHASES},
        **{f"{phase}_s": timing.seconds[phase] for phase in PHASES},
    }
    scaled = {name: np.rint(column.astype(float) * unit) for name, column in every.items()}
    sizes = {name: getattr(timing, name) for name in _SIZES}
    found = {name: column.astype(int) for name, column in scaled.items()} | sizes
    return {
        "unit": unit,
        "processes": timing.processes,
        "collected": round(timing.collected * unit),
        "merged": round(timing.merged * unit),
        **{name: column.tolist() for name, column in found.items() if column.any()},
    }


def size(timing: Timing) -> int:
    """About how many numbers its columns have."""
    return timing.processes * (len(PHASES) + 4)
