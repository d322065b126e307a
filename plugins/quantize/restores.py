"""Codes chosen by how often a run is expected to resume from quantised checkpoints.

Each such restore changes the state a little. Check-N-Run (arXiv 2010.08679) stores the fewer bits,
the fewer restores it expects, and 8 bits once there have been more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unickpt.extend import Reader, RunFeature, SaveCall, SaveFeature

# As Check-N-Run: up to how many restores these codes keep its models' accuracy.
_CODES = (1, "int2"), (3, "int3"), (20, "int4")
_MOST = "uint8"
_KEY = "restores"


@dataclass(frozen=True)
class Restores:
    """In `SaveOptions.quantize`: as few bits as a number of restores allows, by Check-N-Run's
    rule for embedding tables.

    Up to 1 restore 2 bits, up to 3 3 bits, up to 20 4 bits, else 8 bits. `Checkpointer` counts how
    often the run resumed from a step that was saved so, also over many jobs, and stores 8 bits
    after more than `expected`. The count is in the metadata of each step, under
    `["unickpt"]["restores"]`. A plain `save` does not count.

    Arguments:
        expected: how often the run will resume from such a step, at least 0.

    Raises:
        ValueError: the number is negative, or no integer.

    Example:
        >>> import unickpt
        >>> unickpt.Restores(3).codes(happened=0), unickpt.Restores(3).codes(happened=4)
        ('int3', 'uint8')
    """

    expected: int

    def __post_init__(self) -> None:
        if type(self.expected) is not int or self.expected < 0:
            raise ValueError(f"Restores({self.expected!r}): the number must be an int, at least 0")

    def codes(self, happened: int = 0) -> str:
        """The codes to store.

        Arguments:
            happened: how many restores there have been.
        """
        if happened > self.expected:
            return _MOST
        return next((codes for most, codes in _CODES if self.expected <= most), _MOST)


class RestoreCount(RunFeature):
    """Counts how often a run resumed from steps with quantised arrays; stored with each step.

    Arguments:
        patterns: of `SaveOptions.quantize`.
        make: makes the feature of a save, of patterns.
        name: of the codec.
    """

    def __init__(
        self,
        patterns: Mapping[str, str | Restores | None],
        make: Callable[[Mapping[str, str | Restores | None]], SaveFeature],
        name: str,
    ) -> None:
        self._patterns, self._make, self._name, self._happened = patterns, make, name, 0

    def before_save(self, call: SaveCall) -> tuple[SaveFeature, Mapping[str, Any]]:
        """The patterns with the codes to store after the restores that happened."""
        patterns = {
            pattern: choice.codes(self._happened) if isinstance(choice, Restores) else choice
            for pattern, choice in self._patterns.items()
        }
        return self._make(patterns), {_KEY: self._happened}

    def after_load(self, step: int, path: str, stored: Reader | None) -> None:
        """Counts this restore, and those that the step says."""
        if stored is None:
            return
        index = stored.index
        reserved = index.metadata.get("unickpt")
        before = reserved.get(_KEY) if isinstance(reserved, Mapping) else None
        is_quantized = any(entry.codec == self._name for entry in index.arrays.values())
        self._happened = (before if type(before) is int else 0) + is_quantized
