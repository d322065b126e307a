"""The proof that boxes fill an array exactly."""

from __future__ import annotations

from collections.abc import Sequence

from unickpt.arrays.box import Box, overlap, uncovered
from unickpt.errors import CoverageError
from unickpt.format.index import ArrayEntry


def check_boxes(entry: ArrayEntry, boxes: Sequence[tuple[Box, tuple[int, ...]]]) -> None:
    """Checks that boxes cover an array exactly once.

    Raises:
        CoverageError: names the array, and a gap or two boxes that overlap.
    """
    plain = [box for box, _ in boxes]
    pair = overlap(plain)
    if pair is not None:
        (first, by_first), (second, by_second) = boxes[pair[0]], boxes[pair[1]]
        raise CoverageError(
            f"array {entry.name!r} of shape {list(entry.shape)}: {first} of process {by_first[0]} "
            f"overlaps {second} of process {by_second[0]}; only one process may hold each element"
        )
    whole = Box.whole(entry.shape)
    if sum(box.size for box in plain) != whole.size:
        raise CoverageError(
            f"array {entry.name!r} of shape {list(entry.shape)}: no process holds "
            f"{uncovered(whole, plain)}"
        )
