"""Copies a box of a fragment to host memory."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np

from unickpt.arrays import strided_copy
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array, DType
from unickpt.frameworks.protocol import Fragment

_ALIGN = 64  # bytes
_SMALL = 1 << 20
_STEP = 64 << 10
_WORTH_HUGE_PAGES = 4 << 20  # as NumPy does for its own arrays


def prefer_huge_pages(array: Array) -> None:
    """Asks Linux for huge pages in an array that is going to be filled.

    The system gives memory when it is first written, by default 4 KiB at a time: that takes as long
    as reading into it. NumPy asks for huge pages itself, so its own memory is left alone; torch
    does not. Pages that were written before are not affected.
    """
    if array.nbytes < _WORTH_HUGE_PAGES or not array.flags.c_contiguous:
        return
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    advise = _madvise()
    if owner.flags.owndata or advise is None:
        return
    start = array.__array_interface__["data"][0]
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    after = (start + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    advise(first, after - first, mmap.MADV_HUGEPAGE)  # only advice: it may fail


@cache
def _madvise() -> Any:
    found = getattr(ctypes.CDLL(None), "madvise", None)
    if found is None or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


class HostBuffers:
    """Host memory that is reused: pages that were touched before cost half as much.

    Large buffers are allocated from the system directly, because the C library would keep them.
    Several threads may use it.

    Arguments:
        most_bytes: how much to hold, in use or not; more only if more is in use.
        allocate: allocates this many bytes; by default from the system.
    """

    def __init__(self, most_bytes: int, allocate: Callable[[int], Array] | None = None) -> None:
        self.most_bytes, self._held = most_bytes, 0
        self._allocate = allocate or _from_system
        self._free: list[Array] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Array:
        """Memory for `nbytes`, as bytes; it may be a little longer."""
        if nbytes < _SMALL:
            return np.empty(nbytes, np.uint8)
        with self._lock:
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
    try:
        return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    except OSError as error:
        raise MemoryError(f"Unable to allocate {nbytes / (1 << 20):.0f} MiB") from error


class Scratch(threading.local):
    """Memory of each thread for chunks, reused: fresh pages cost twice as much."""

    def __init__(self) -> None:
        self._raw: Array = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """As `arrays`, of one."""
        return self.arrays([(shape, dtype)])[0]

    def arrays(self, kinds: Sequence[tuple[tuple[int, ...], DType]]) -> list[Array]:
        """Arrays of some shapes and dtypes, until this thread asks for others."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in kinds]
        begins = list(accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes), initial=0))
        if self._raw.nbytes < begins[-1]:
            self._raw = np.empty(begins[-1], np.uint8)
        return [
            self._raw[begin : begin + size].view(dtype).reshape(shape)
            for begin, size, (shape, dtype) in zip(begins, sizes, kinds, strict=False)
        ]


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

    def make_buffer() -> Array:
        if not made:
            nbytes = box.size * dtype.itemsize
            made.append(take(nbytes)[:nbytes].view(dtype).reshape(box.shape))
        return made[0]

    data = fragment.read(box, make_buffer)
    if dtype == np.bool_:
        # A bool may be any byte in memory; only 0 and 1 are valid for every reader.
        return np.not_equal(data.view(np.uint8), 0, out=make_buffer())
    if not copied and data.flags.c_contiguous and data.dtype == dtype:
        return data.reshape(box.shape)
    if data is not make_buffer():
        strided_copy.copy(make_buffer(), data)
    return make_buffer()
