"""Codes chosen by how often a run is expected to go on from quantised checkpoints.

Each such restore changes the state a little. Check-N-Run (arXiv 2010.08679) stores the fewer bits,
the fewer restores it expects, and 8 bits once there have been more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# As Check-N-Run: up to how many restores these codes keep its models' accuracy.
_CODES = (1, "int2"), (3, "int3"), (20, "int4")
_MOST = "uint8"


@dataclass(frozen=True)
class Restores:
    """In `SaveOptions.quantize`: as few bits as a number of restores allows, by Check-N-Run's
    rule for embedding tables.

    Up to 1 restore 2 bits, up to 3 3 bits, up to 20 4 bits, else 8 bits. `Checkpointer` counts
    how often the run went on from a step that was saved so, also over many jobs, and stores 8 bits
    after more than `expected`; the count is in the metadata of each step, under
    `["unickpt"]["restores"]`. A plain `save` does not count.

    Arguments:
        expected: how often the run will go on from such a step, at least 0.

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


def chosen(
    patterns: Mapping[str, str | Restores | None], happened: int
) -> dict[str, str | Restores | None]:
    """Patterns with the codes to store after a number of restores."""
    return {
        pattern: each.codes(happened) if isinstance(each, Restores) else each
        for pattern, each in patterns.items()
    }
