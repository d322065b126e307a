"""The values of a chunk of several, and where they are: its full chunk, what is added to it."""

from __future__ import annotations

from dataclasses import replace

from unickpt.format.chunk_grid import Part

_FULL, _ADDED = "full", "patch"
WHOLE_LINK = 0
"""The number of the only value of a chunk that is stored whole."""
FULL_LINK = 1
"""That of the full chunk of a composed one; what is added to it follows."""


def part_of(part: Part, link: int) -> Part:
    """The part whose key, instead of that of a part, leads to some values of its chunks.

    Arguments:
        part: of the array.
        link: which values: `WHOLE_LINK`, `FULL_LINK`, or what is added to that.
    """
    if link == WHOLE_LINK:
        return part
    return _below(part, _FULL if link == FULL_LINK else f"{_ADDED}/{link - FULL_LINK}")


def _below(part: Part, key: str) -> Part:
    return replace(part, key=f"{part.key}/{key}" if part.key else key)
