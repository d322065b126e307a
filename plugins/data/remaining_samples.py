"""The samples left when ranks that took turns on one order stop. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count as count_from
from itertools import pairwise
from typing import Self


@dataclass(frozen=True)
class Positions:
    """The positions of an endless order that are not used yet: some, and all from one on.

    Of `n` ranks that take turns, rank `r` takes the `r`-th, the `r + n`-th and so on of these.

    Arguments:
        start: all positions from here on.
        left: earlier ones, ascending.

    Example:
        >>> Positions().after([2, 3])  # of two ranks, the second is one ahead: 0 1 2 3 5 are used
        Positions(start=6, left=(4,))
    """

    start: int = 0
    left: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        every = (-1, *self.left, self.start)
        if any(a >= b for a, b in pairwise(every)):
            raise ValueError(f"{self} is not ascending, from 0 on")

    def __getitem__(self, turn: int) -> int:
        """The position at a turn."""
        behind = turn - len(self.left)
        return self.left[turn] if behind < 0 else self.start + behind

    def of(self, rank: int, count: int, taken: int = 0) -> Iterator[int]:
        """The positions that a rank takes, from its turn `taken` on; endless."""
        return (self[turn] for turn in count_from(rank + count * taken, count))

    def after(self, taken: Sequence[int]) -> Self:
        """The positions left after each of the ranks has taken so many.

        Raises:
            ValueError: a number is negative.
        """
        count = len(taken)
        if min(taken) < 0:
            raise ValueError(f"a rank cannot have taken {min(taken)}")
        end = max((r + count * (n - 1) + 1 for r, n in enumerate(taken) if n), default=0)
        first = count * min(taken)
        missed = (self[t] for t in range(first, end) if t // count >= taken[t % count])
        return type(self)(max(self.start, self[end]), (*missed, *self.left[end:]))
