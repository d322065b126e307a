"""Reports of tools that are plug-ins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unickpt.save_report import SaveReport


@dataclass(frozen=True)
class MergeReport:
    """The report of a merge.

    Arguments:
        saved: how the result was written.
        method: the name of the method.
        sources: their URLs, in their order.
        weights: of the sources, as they were used; they are never normalised to sum to 1.
        from_last: arrays that were taken from the last source: integers, counts, keys.
        values_differ: names of plain and per-process values that differ, or that some sources lack;
            those of the last source were used.
        dtypes_differ: arrays with another dtype in some source; the last one's was used.
        nonfinite: with `allow_nonfinite=True`, the sources and arrays in which this process found
            NaN or infinite elements.
        score: of the weights that a search found, for one score.
        trials: of a search on several tasks: prints the Pareto front as a table, and is drawn in a
            notebook.
    """

    saved: SaveReport
    method: str
    sources: tuple[str, ...]
    weights: tuple[float, ...]
    from_last: tuple[str, ...] = ()
    values_differ: tuple[str, ...] = ()
    dtypes_differ: tuple[str, ...] = ()
    nonfinite: tuple[tuple[str, str], ...] = ()
    score: float | None = None
    trials: Any = None

    @property
    def url(self) -> str:
        """The location of the result."""
        return self.saved.url

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the result, as sentences."""
        total = math.fsum(self.weights)
        counted = {
            "taken from the last source": self.from_last,
            "plain values that differ, taken from the last source": self.values_differ,
            "arrays whose dtypes differ, stored as in the last source": self.dtypes_differ,
            "arrays with NaN or infinite elements": [f"{a} ({url})" for url, a in self.nonfinite],
        }
        sums = self.method in ("weighted", "search") and not math.isclose(total, 1, rel_tol=1e-6)
        return (
            *([f"the weights sum to {total:g}, not to 1"] if sums else []),
            *(f"{len(names)} {what}: {_shown(names)}" for what, names in counted.items() if names),
        )


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
