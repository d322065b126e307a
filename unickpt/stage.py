"""Staging: what a chunk needs to be in host memory, contiguous and unchanging, within a budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from unickpt.adapt import Array, Fragment
from unickpt.box import Box


def stage(fragment: Fragment, box: Box) -> Array:
    """Contiguous host memory of a fragment's box, in native byte order; a view where possible."""
    data = fragment.read(box)
    if data.dtype == np.bool_:
        # A bool may be any byte in memory; only 0 and 1 have a meaning to every reader.
        data = data.view(np.uint8) != 0
    staged: Array = np.ascontiguousarray(data, data.dtype.newbyteorder("="))
    return staged.reshape(box.shape)  # ascontiguousarray makes 0-d arrays 1-d


class Window:
    """Work in flight, oldest first, that together holds no more memory than a budget.

    One piece of work may be larger than the budget; it then goes alone.

    Arguments:
        budget_bytes: the bound.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget, self._held = budget_bytes, 0
        self._work: deque[tuple[int, Callable[[], None]]] = deque()

    def make_room(self, nbytes: int) -> None:
        """Waits for the oldest work until `nbytes` more fit."""
        while self._work and self._held + nbytes > self._budget:
            self._wait_oldest()

    def add(self, nbytes: int, wait: Callable[[], None]) -> None:
        """Adds work that holds `nbytes` until `wait` returns."""
        self._held += nbytes
        self._work.append((nbytes, wait))

    def drain(self) -> None:
        """Waits for all work."""
        while self._work:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        nbytes, wait = self._work.popleft()
        wait()
        self._held -= nbytes
