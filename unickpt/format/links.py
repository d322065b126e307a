"""The values of a patched chunk, and where they are: its full chunk, its patches (`chains`)."""

from __future__ import annotations

from dataclasses import replace

from unickpt.format.chunk_grid import Part

_FULL, _PATCH = "full", "patch"
WHOLE_LINK = 0
"""The number of the only value of a chunk that is stored whole."""
FULL_LINK = 1
"""That of the full chunk of a patched one; its patches follow."""


def part_of(part: Part, link: int) -> Part:
    """The part whose key, instead of that of a part, leads to some values of its chunks.

    Arguments:
        part: of the array.
        link: which values: `WHOLE_LINK`, `FULL_LINK`, or those of patches.
    """
    if link == WHOLE_LINK:
        return part
    return _below(part, _FULL if link == FULL_LINK else f"{_PATCH}/{link - FULL_LINK}")


def _below(part: Part, key: str) -> Part:
    return replace(part, key=f"{part.key}/{key}" if part.key else key)
