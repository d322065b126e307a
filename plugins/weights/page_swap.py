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
        """Copies the memory; maps memory for the pages that the flip takes out, without any yet."""
        self.staged, self._free = self._mapped(self.live.nbytes >= _HUGE_BYTES), self._mapped(False)
        self.staged[...] = self.live
        for ends in self._ends:
            self._free[ends] = self.live[ends]

    @property
    def _ends(self) -> tuple[slice, slice]:
        """The elements beside whole pages."""
        return slice(self.pages.start), slice(self.pages.stop, None)

    def _mapped(self, has_huge_pages: bool) -> Array:
        """Memory at addresses that are equal modulo `_BLOCK`."""
        memory = _map(self.live.nbytes + _BLOCK)
        if has_huge_pages:
            with suppress(OSError):  # a system without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        offset = (self.start - whole.ctypes.data) % _BLOCK
        return whole[offset : offset + self.live.nbytes]

    def has(self, view: Array) -> bool:
        """Whether a view, whose steps are positive, lies within this memory."""
        last = sum((n - 1) * step for n, step in zip(view.shape, view.strides, strict=True))
        end = view.ctypes.data + last + view.itemsize
        return bool(self.start <= view.ctypes.data and end <= self.start + self.live.nbytes)

    def view(self, view: Array) -> Array:
        """A view of the copy, from one of the live memory."""
        offset = view.ctypes.data - self.start
        return np.ndarray(view.shape, view.dtype, self.staged, offset, view.strides)

    def exchange(self) -> None:
        """Exchanges the elements of the memory and of the copy, or raises OSError."""
        moves = list[tuple[Array, Array]]()
        for part in self.parts:
            live, staged, free = self.live[part], self.staged[part], self._free[part]
            moves += [(live, free), (staged, live)]
        for number, (source, target) in enumerate(moves):
            try:
                _move(source, target)
            except OSError:
                for back, origin in reversed(moves[:number]):
                    _move(origin, back)
                raise
        for ends in self._ends:
            self._free[ends] = self.live[ends]
            self.live[ends] = self.staged[ends]
        self.staged, self._free = self._free, self.staged


class PagesChange:
    """A change of the pages of live memory.

    Arguments:
        regions: with staged copies.
        memory: of these regions, which must exist so long.
    """

    def __init__(self, regions: Sequence[_PageRange], memory: Sequence[Array]) -> None:
        self._regions, self._exchanged = regions, list[_PageRange]()
        self._memory = memory
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
                region.exchange()
                self._exchanged.append(region)

    def _restore(self) -> None:
        with self._lock:
            self._is_reverted = True
            while self._exchanged:
                self._exchanged.pop().exchange()


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
    return [PagesChange(staged, memory), *result] if staged else result


def _regions(memory: Sequence[Array]) -> list[_PageRange]:
    """The memory that can be exchanged, by addresses: private to this process, and no file."""
    maps = list[tuple[int, int]]()
    count = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, _, _, inode, *_ = line.split()
        count += 1
        if permissions == "rw-p" and inode == "0":
            first, last = span.split("-")
            maps.append((int(first, 16), int(last, 16)))
    regions = list[_PageRange]()
    for start, stop in _spans(memory):
        if stop - start >= _LEAST_BYTES:
            bits = (ctypes.c_uint8 * (stop - start)).from_address(start)
            region = _PageRange(np.ctypeslib.as_array(bits))
            if region.split(maps):
                regions.append(region)
    left = int(Path("/proc/sys/vm/max_map_count").read_text()) - count
    possible = list[_PageRange]()
    for region in sorted(regions, key=lambda region: -region.live.nbytes):
        left -= _MAPS * len(region.parts)
        if left > 0:
            possible.append(region)
    return sorted(possible, key=lambda region: region.start)


def _spans(memory: Sequence[Array]) -> list[tuple[int, int]]:
    """The addresses of arrays without gaps, ascending; consecutive ones together."""
    spans = list[tuple[int, int]]()
    ordered = [in_memory_order(array, array)[0] for array in memory]
    dense = [array for array in ordered if array.flags.c_contiguous]
    for array in sorted(dense, key=lambda array: array.ctypes.data):
        start = stop = array.ctypes.data
        if spans and start <= spans[-1][1]:
            start, stop = spans.pop()
        spans.append((start, max(stop, array.ctypes.data + array.nbytes)))
    return spans


def _map(size: int) -> mmap.mmap:
    """Memory of this process alone."""
    return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _move(source: Array, target: Array) -> None:
    """Moves pages; the source stays mapped, without memory.

    Raises:
        OSError: the system refuses it; nothing is moved.
    """
    address, size = target.ctypes.data, target.nbytes
    if _mremap()(source.ctypes.data, size, size, _MOVE, address) != address:
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
    live = np.frombuffer(_map(2 * _PAGE), np.uint8)
    region = _PageRange(live)
    try:
        region.copy()
        region.staged[...] = 7
        PagesChange([region], [live]).apply()
    except (AttributeError, OSError):
        return False
    return bool((live == 7).all() and not region.staged.any())


def _on_thread(work: Callable[[], None]) -> None:
    """Calls `work` where no signal interrupts it."""
    with ThreadPoolExecutor(1, "unickpt weights") as executor:
        executor.submit(work).result()
