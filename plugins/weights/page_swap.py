"""Live host memory whose pages are exchanged in a flip, by Linux's `mremap`: all elements change at
once, and their addresses stay."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from unickpt.extend import Array, Pool
from unickpt.plugins.weights.live_arrays import ElementsChange, in_memory_order

_PAGE = mmap.PAGESIZE
_BLOCK = 2 << 20  # whole tables of pages move at once between addresses that are equal modulo this
_LEAST_BYTES = 1 << 20  # of an array: below, copying its changes takes as long
_HUGE_BYTES = 16 << 20  # of an array whose copy gets huge pages: they take up to 4 MiB more
_MAPS = 8  # of the system's limit, for each part of an array
# MAYMOVE, FIXED, and DONTUNMAP: at no time an address is without memory, which another thread could
# get, or whose use would kill the process.
_MOVE = 1 | 2 | 4


class _PageRange:
    """Consecutive live memory and a copy, which is changed before the pages are exchanged.

    Arguments:
        live: all bytes.
    """

    def __init__(self, live: Array) -> None:
        self.live, self.start = live, live.ctypes.data
        first = -self.start % _PAGE
        self.pages = slice(first, first + (live.nbytes - first) // _PAGE * _PAGE)
        self.parts = [self.pages]
        """The pages of each mapping of the system, which are exchanged together."""

    def split(self, maps: Sequence[tuple[int, int]]) -> bool:
        """Splits the pages into parts; returns whether all are in mappings.

        Arguments:
            maps: the addresses of mappings, ascending.
        """
        self.parts, begin = [], self.pages.start
        for start, stop in maps[bisect_right(maps, (self.start + begin, sys.maxsize)) - 1 :]:
            end = min(stop - self.start, self.pages.stop)
            if not start - self.start <= begin < end:
                break
            self.parts.append(slice(begin, end))
            begin = end
        return bool(begin == self.pages.stop)

    def copy(self) -> None:
        """Copies the memory, to addresses that are equal modulo `_BLOCK`."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, self.live.nbytes + _BLOCK, flags)
        if self.live.nbytes >= _HUGE_BYTES:
            with suppress(OSError):  # a system without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        offset = (self.start - whole.ctypes.data) % _BLOCK
        self.staged = whole[offset : offset + self.live.nbytes]
        self.staged[...] = self.live

    def has(self, view: Array) -> bool:
        """Whether a view, whose steps are positive, lies within this memory."""
        last = sum((n - 1) * step for n, step in zip(view.shape, view.strides, strict=True))
        end = view.ctypes.data + last + view.itemsize
        return bool(self.start <= view.ctypes.data and end <= self.start + self.live.nbytes)

    def view(self, view: Array) -> Array:
        """A view of the copy, from one of the live memory."""
        offset = view.ctypes.data - self.start
        return np.ndarray(view.shape, view.dtype, self.staged, offset, view.strides)

    def exchange(self, between: Array) -> None:
        """Exchanges the elements of the memory and of the copy, or raises OSError.

        Arguments:
            between: memory of this size and `_BLOCK`.
        """
        moves = list[tuple[int, int, int]]()
        for part in self.parts:
            live, staged = (array[part].ctypes.data for array in (self.live, self.staged))
            free = between.ctypes.data + (live - between.ctypes.data) % _BLOCK
            size = part.stop - part.start
            moves += [(live, size, free), (staged, size, live), (free, size, staged)]
        for number, (source, size, target) in enumerate(moves):
            try:
                _move(source, size, target)
            except OSError:
                for back, length, origin in reversed(moves[:number]):
                    _move(origin, length, back)
                raise
        for ends in (slice(self.pages.start), slice(self.pages.stop, None)):
            before = self.live[ends].copy()
            self.live[ends] = self.staged[ends]
            self.staged[ends] = before


class PagesChange:
    """A change of the pages of live memory.

    Arguments:
        regions: with staged copies.
    """

    def __init__(self, regions: Sequence[_PageRange]) -> None:
        self._regions, self._exchanged = regions, list[_PageRange]()
        size = max(region.live.nbytes for region in regions) + _BLOCK
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._between = np.frombuffer(memory, np.uint8)
        self._lock, self._is_reverted = Lock(), False

    def apply(self) -> None:
        _on_thread(self._exchange)

    def revert(self) -> None:
        _on_thread(self._restore)

    @property
    def nbytes(self) -> int:
        """Bytes that are staged."""
        return sum(region.staged.nbytes for region in self._regions)

    def _exchange(self) -> None:
        with self._lock:
            for region in self._regions if not self._is_reverted else ():
                region.exchange(self._between)
                self._exchanged.append(region)

    def _restore(self) -> None:
        with self._lock:
            self._is_reverted = True
            while self._exchanged:
                self._exchanged.pop().exchange(self._between)


def with_pages(
    changes: list[ElementsChange], memory: Sequence[Array], threads: int
) -> list[ElementsChange | PagesChange]:
    """The same changes, by exchanging pages where that is possible.

    Arguments:
        changes: of live host memory; removed, so that those in copies take no memory.
        memory: that is changed, in arrays.
        threads: how many copy it.
    """
    regions = _regions(memory) if _can_move() else []
    starts = [region.start for region in regions]
    result, moved = list[ElementsChange | PagesChange](), dict[int, list[ElementsChange]]()
    while changes:
        change = changes.pop()
        number = bisect_right(starts, change.view.ctypes.data) - 1
        if number >= 0 and regions[number].has(change.view):
            moved.setdefault(number, []).append(change)
        else:
            result.append(change)

    def stage(number: int) -> None:
        region = regions[number]
        region.copy()
        for change in moved.pop(number):
            region.view(change.view)[change.index] = change.new

    numbers = list(moved)
    with Pool(threads - 1, "unickpt weights") as pool:
        pending = [pool.submit(stage, number) for number in numbers]
        for ended in pending:
            with suppress(OSError):  # no memory for this copy
                pool.result(ended)
    for in_place in moved.values():
        result += in_place
    staged = [regions[number] for number in numbers if number not in moved]
    return [PagesChange(staged), *result] if staged else result


def _regions(memory: Sequence[Array]) -> list[_PageRange]:
    """The memory that can be exchanged, by addresses: private to this process, and no file."""
    maps = list[tuple[int, int]]()
    count = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, _, _, inode, *_ = line.split()
        count += 1
        if permissions == "rw-p" and inode == "0":
            start, stop = span.split("-")
            maps.append((int(start, 16), int(stop, 16)))
    regions = list[_PageRange]()
    for array in memory:
        ordered, _ = in_memory_order(array, array)
        if array.nbytes < _LEAST_BYTES or not ordered.flags.c_contiguous:
            continue
        region = _PageRange(ordered.reshape(-1).view(np.uint8))
        if region.split(maps):
            regions.append(region)
    left = int(Path("/proc/sys/vm/max_map_count").read_text()) - count
    possible = list[_PageRange]()
    for region in sorted(regions, key=lambda region: -region.live.nbytes):
        left -= _MAPS * len(region.parts)
        if left > 0:
            possible.append(region)
    possible.sort(key=lambda region: region.start)
    return [
        region
        for before, region in zip([None, *possible], possible, strict=False)
        if before is None or before.start + before.live.nbytes <= region.start
    ]


def _move(source: int, size: int, target: int) -> None:
    """Moves pages; pages without memory stay.

    Raises:
        OSError: the system refuses it; nothing is moved.
    """
    if _mremap()(source, size, size, _MOVE, target) != target:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@cache
def _mremap() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mremap
    function.restype = ctypes.c_void_p
    size = ctypes.c_size_t
    function.argtypes = (ctypes.c_void_p, size, size, ctypes.c_int, ctypes.c_void_p)
    return function


@cache
def _can_move() -> bool:
    """Whether the system exchanges pages."""
    if sys.platform != "linux":
        return False
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    live = np.frombuffer(mmap.mmap(-1, 2 * _PAGE, flags), np.uint8)
    region = _PageRange(live)
    try:
        region.copy()
        region.staged[...] = 7
        PagesChange([region]).apply()
    except (AttributeError, OSError):
        return False
    return bool((live == 7).all() and not region.staged.any())


def _on_thread(work: Callable[[], None]) -> None:
    """Calls `work` where no signal interrupts it."""
    with ThreadPoolExecutor(1, "unickpt weights") as executor:
        executor.submit(work).result()
