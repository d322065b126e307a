"""The metrics that steps were saved with, each as a series over the steps."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_SERIES = 24
_LOW = {"loss", "err", "error", "perplexity", "ppl", "nll", "mse", "rmse", "mae", "wer", "cer"}
_HIGH = {"acc", "accuracy", "f1", "auc", "bleu", "rouge", "score", "reward", "precision", "recall"}


@dataclass(frozen=True)
class Series:
    """A metric over the steps of a run.

    Arguments:
        name: of the metric.
        values: of each step; None of a step without it.
    """

    name: str
    values: Sequence[float | None]

    @property
    def lowest(self) -> int | None:
        """The place of the smallest finite value, the latest of equal ones."""
        return self._best(-1)

    @property
    def highest(self) -> int | None:
        """The place of the largest finite value, the latest of equal ones."""
        return self._best(1)

    @property
    def better(self) -> str:
        """ "lowest" or "highest", which is the better one by the words of its name; "" if they do
        not say."""
        words = set(re.split(r"[^a-z0-9]+", self.name.lower()))
        low, high = bool(words & _LOW), bool(words & _HIGH)
        return "" if low == high else "lowest" if low else "highest"

    @property
    def not_finite(self) -> list[int]:
        """The places of NaN and infinities."""
        values = enumerate(self.values)
        return [position for position, v in values if v is not None and not math.isfinite(v)]

    @property
    def broken_since(self) -> int | None:
        """The place since which no value was finite; None if the last one is."""
        positions = [position for position, value in enumerate(self.values) if value is not None]
        broken, since = set(self.not_finite), None
        while positions and positions[-1] in broken:
            since = positions.pop()
        return since

    def _best(self, sign: int) -> int | None:
        finite = [
            (sign * value, position)
            for position, value in enumerate(self.values)
            if value is not None and math.isfinite(value)
        ]
        return max(finite)[1] if finite else None


def series_of(rows: Sequence[Mapping[str, float]]) -> tuple[list[Series], int]:
    """The metrics of steps in their order, by name in the order of their first use.

    Arguments:
        rows: the metrics of each step.

    Returns:
        At most `MOST_SERIES`, because names are untrusted, and may be many; and how many more.

    Example:
        >>> (loss,), more = series_of([{"loss": 2.0}, {}, {"loss": 1.0}])
        >>> loss.values, loss.better, loss.lowest, more
        ([2.0, None, 1.0], 'lowest', 2, 0)
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    shown = [Series(name, [row.get(name) for row in rows]) for name in names[:MOST_SERIES]]
    return shown, len(names) - len(shown)
