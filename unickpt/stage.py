"""Staging: brings chunks into contiguous host memory that does not change, within a budget."""

from __future__ import annotations

import math
import mmap
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from unickpt import strided
from unickpt.adapt import Array, Fragment
from unickpt.box import Box
from unickpt.dtypes import DType

_SMALL = 1 << 20
_STEP = 64 << 10


class HostBuffers:
    """Host memory that is reused: pages that were touched before cost half as much.

    Large buffers are allocated from the system directly, because the C library would keep them.

    Arguments:
        most_bytes: how much to hold, in use or not; more only if more is in use.
        allocate: allocates this many bytes; by default from the system.
    """

    def __init__(self, most_bytes: int, allocate: Callable[[int], Array] | None = None) -> None:
        self.most_bytes, self._held = most_bytes, 0
        self._allocate = allocate or _from_system
        self._free: list[Array] = []

    def take(self, nbytes: int) -> Array:
        """Memory for `nbytes`, as bytes; it may be a little longer."""
        if nbytes < _SMALL:
            return np.empty(nbytes, np.uint8)
        for at, buffer in enumerate(self._free):
            if nbytes <= len(buffer) <= nbytes + nbytes // 4:
                return self._free.pop(at)
        size = -(-nbytes // _STEP) * _STEP
        while self._free and self._held + size > self.most_bytes:
            self._held -= len(self._free.pop(0))
        buffer = self._allocate(size)  # may fail; only then is it held
        self._held += size
        return buffer

    def give(self, buffer: Array) -> None:
        """Takes back memory that nothing refers to any more."""
        if len(buffer) >= _SMALL:
            self._free.append(buffer)


def _from_system(nbytes: int) -> Array:
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


class Scratch(threading.local):
    """Memory for one chunk per thread, reused: fresh pages cost twice as much."""

    def __init__(self) -> None:
        self._raw: Array = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: DType) -> Array:
        nbytes = math.prod(shape) * dtype.itemsize
        if self._raw.nbytes < nbytes:
            self._raw = np.empty(nbytes, np.uint8)
        return self._raw[:nbytes].view(dtype).reshape(shape)


def stage(
    fragment: Fragment,
    box: Box,
    dtype: DType,
    take: Callable[[int], Array],
    *,
    copied: bool = False,
) -> Array:
    """Contiguous host memory of a fragment's box, in native byte order; a view where possible.

    Arguments:
        fragment: what holds the data.
        box: in global coordinates, within the fragment's.
        dtype: of the array.
        take: allocates this many bytes, if the data must be copied; see `HostBuffers`.
        copied: copy even if a view is possible.
    """

    made: list[Array] = []

    def room() -> Array:
        if not made:
            nbytes = box.size * dtype.itemsize
            made.append(take(nbytes)[:nbytes].view(dtype).reshape(box.shape))
        return made[0]

    data = fragment.read(box, room)
    if dtype == np.bool_:
        # A bool may be any byte in memory; only 0 and 1 are valid for every reader.
        return np.not_equal(data.view(np.uint8), 0, out=room())
    if not copied and data.flags.c_contiguous and data.dtype == dtype:
        return data.reshape(box.shape)
    if data is not room():
        strided.copy(room(), data)
    return room()


class Window:
    """Work in flight, oldest first, that together holds no more memory than a budget.

    A piece of work that is larger than the budget runs alone.

    Arguments:
        budget_bytes: the bound.
        most: how many pieces of work at once, at most.
    """

    def __init__(self, budget_bytes: int, most: int | None = None) -> None:
        self._budget, self._most, self._held = budget_bytes, most, 0
        self._work: deque[tuple[int, Callable[[], None]]] = deque()

    def make_room(self, nbytes: int) -> None:
        """Waits for the oldest work until `nbytes` more fit."""
        while self._work and (self._held + nbytes > self._budget or len(self._work) == self._most):
            self.wait_oldest()

    def add(self, nbytes: int, wait: Callable[[], None]) -> None:
        """Adds work that holds `nbytes` until `wait` returns."""
        self._held += nbytes
        self._work.append((nbytes, wait))

    def drain(self) -> None:
        """Waits for all work."""
        while self.wait_oldest():
            pass

    def wait_oldest(self) -> bool:
        """Waits for the oldest work; False if there is none."""
        if not self._work:
            return False
        nbytes, wait = self._work.popleft()
        wait()
        self._held -= nbytes
        return True
