"""The memory of the host: what a process may use, buffers, copies to it; the base of options."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from unickpt.arrays import strided_copy
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array, DType
from unickpt.frameworks.adapter_protocol import Fragment
from unickpt.frameworks.leaves import adapters
from unickpt.frameworks.memory_limits import node_memory
from unickpt.frameworks.process_group import (
    Group,
    group_named,
    groups_of,
    launched_on_node,
    processes_on_node,
)

if TYPE_CHECKING:
    from unickpt.progress import Progress

_ALIGN = 64  # bytes
_BYTES = np.dtype(np.uint8)
_SMALL = 1 << 20
_STEP = 64 << 10
_REPORTED_ORDER = "/sys/module/page_reporting/parameters/page_reporting_order"  # -1: none
_WORTH_HUGE_PAGES = 4 << 20  # as NumPy does for its own arrays
_WORTH_A_START = 128 << 10  # from here on, the C library gets memory of its own from the system


def prefer_huge_pages(array: Array) -> None:
    """Requests huge pages from Linux for an array that is about to be filled.

    The system provides memory on the first write, by default 4 KiB at a time: that takes as long as
    reading into it. NumPy requests huge pages itself, so its own memory is skipped; torch does not.
    Pages that were already written are not affected. Does nothing in a virtual machine that gives
    free memory back to its host, which it does in huge pages: to get one again took 4 ms.
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
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or not hasattr(mmap, "MADV_HUGEPAGE") or _gives_back():
        return None
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise


def _gives_back() -> bool:
    """Whether Linux reports free memory to the host of this virtual machine."""
    with suppress(OSError, ValueError):  # without the feature, there is no such file
        return int(Path(_REPORTED_ORDER).read_text()) >= 0
    return False


def new_array(shape: Sequence[int], dtype: DType) -> Array:
    """An array in new memory; a large one begins 32 bytes after a multiple of 64.

    NumPy's begin 16 bytes after one, where the system copies half as fast from the page cache (64
    MiB in 10.4 instead of 5.2 ms). JAX would share memory at the multiples themselves: its arrays
    would change with those of NumPy from which they were made.

    Arguments:
        shape, dtype: of the array.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _WORTH_A_START:
        return np.empty(shape, dtype)
    try:
        raw = np.empty(nbytes + _ALIGN, np.uint8)
    except (MemoryError, ValueError):
        return np.empty(shape, dtype)  # whose error has the shape
    start = (_ALIGN // 2 - raw.__array_interface__["data"][0]) % _ALIGN
    return np.ndarray(shape, dtype, raw, start)


class HostBuffers:
    """Reused host memory: pages that were already touched cost half as much.

    Large buffers are allocated from the system directly, because the C library would keep them.
    Several threads may use it.

    Arguments:
        most_bytes: the limit of held memory, in use or not; exceeded only by memory in use.
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
            for index, buffer in enumerate(self._free):
                if nbytes <= len(buffer) <= nbytes + nbytes // 4:
                    return self._free.pop(index)
            size = -(-nbytes // _STEP) * _STEP
            while self._free and self._held + size > self.most_bytes:
                self._held -= len(self._free.pop(0))
            buffer = self._allocate(size)  # may fail; only then is it held
            self._held += size
            return buffer

    def give(self, buffer: Array) -> None:
        """Takes back memory that is no longer referenced."""
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

    def arrays(self, kinds: Sequence[tuple[tuple[int, ...], DType]]) -> list[Array]:
        """Arrays of some shapes and dtypes, valid until this thread requests others."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in kinds]
        begins = list(accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes), initial=0))
        if self._raw.nbytes < begins[-1]:
            self._raw = new_array((begins[-1],), _BYTES)
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
        fragment: holds the data.
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
        copy = np.copyto if data.flags.c_contiguous else strided_copy.copy
        copy(make_buffer(), data)
    return make_buffer()


# Shares of a node's memory, and of its available memory. Machines with accelerators have two to
# four times the accelerators' memory, and the state to save takes at most three quarters of the
# latter, so a quarter holds all of it. And never more than half of the available memory, so that
# the rest of the program can grow.
_PART, _PART_AVAILABLE = 4, 2
MOST_WORKING = 1 << 30
"""Bytes that one process's reading and writing can use; more does not make it faster."""


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of memory for saving or loading.

    Arguments:
        bytes: how many.
        per: the owner: the node, whose processes share them, or each process.
    """

    bytes: int
    per: Literal["node", "process"] = "node"

    @classmethod
    def from_option(cls, option: int | MemoryBudget | None) -> MemoryBudget:
        """The budget of an option: a number is a node's; by default, each process has its own."""
        if option is None:
            return cls(MOST_WORKING, "process")
        return option if isinstance(option, MemoryBudget) else cls(int(option))

    def share(self, processes: int) -> int:
        """The bytes of one process, at least 1.

        Arguments:
            processes: how many share the node; those of the whole job, for a part that is the same
                on all of them.
        """
        return max(1, int(self.bytes) // (1 if self.per == "process" else processes))


def node_bytes() -> int:
    """The default staging budget of a node's processes together, from the available memory."""
    memory = node_memory()
    return min(memory.total // _PART, memory.available // _PART_AVAILABLE)


def share(requested: int | MemoryBudget | None, on_node: int, default: int | None = None) -> int:
    """One process's share of a node's budget, in bytes, at least 1.

    Arguments:
        requested: the value of the option.
        on_node: how many processes share the node.
        default: the node's default; if None, a fixed part, up to what reading and writing can use.
    """
    if requested is not None or default is not None:
        return MemoryBudget.from_option(default if requested is None else requested).share(on_node)
    return max(1, min(MOST_WORKING, _total() // _PART // on_node))


@cache
def _total() -> int:
    return node_memory().total


# --- options ------------------------------------------------------------------------------------


@cache
def _default(options: Any) -> Any:
    return options()


class CommonOptions:
    """The common part of `SaveOptions` and `LoadOptions`."""

    budget_bytes: int | MemoryBudget | None
    timeout_s: float
    group: Group | Any | None
    progress: Progress

    @property
    def working_bytes(self) -> int:
        """Bytes of memory that this process may use to read and write."""
        requested = self.budget_bytes
        is_per_process = isinstance(requested, MemoryBudget) and requested.per == "process"
        return share(requested, 1 if is_per_process else processes_here(self.group))

    @classmethod
    def or_default(cls, options: object) -> Self:
        """The given options; the default ones for None.

        Raises:
            TypeError: they are not options, or those of the other kind.
        """
        if options is None:
            default: Self = _default(cls)  # type: ignore[arg-type]
            return default
        if not isinstance(options, cls):
            raise TypeError(
                f"options must be unickpt.{cls.__name__}(...), not of type {type(options).__name__}"
            )
        return options

    def check_common(self) -> None:
        """Checks these options.

        Raises:
            MissingPackage: `progress=True` without tqdm.
            ValueError, TypeError: one is out of range, or of a wrong type.
        """
        requested = self.budget_bytes
        if requested is not None:
            nbytes = requested.bytes if isinstance(requested, MemoryBudget) else requested
            check_number("budget_bytes", nbytes)
        check_number("timeout_s", self.timeout_s)
        if self.group is not None and not hasattr(self.group, "next_attempt"):
            object.__setattr__(self, "group", group_named(self.group, adapters()))
        if self.progress is not None:
            from unickpt.progress import check_progress

            check_progress(self.progress)


def check_number(name: str, value: object) -> None:
    if not isinstance(value, Real) or not float(value) > 0:
        raise ValueError(f"{name}={value!r} must be a positive number")


def check_flags(**flags: object) -> None:
    """Refuses flags that are no truth values, such as "no", which Python takes for true.

    Raises:
        TypeError: one is neither True nor False.
    """
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{name}={value!r} must be True or False")


def processes_here(group: Group | None) -> int:
    """How many processes share the memory of this node; an upper bound if not known exactly.

    Arguments:
        group: the job, if the options name one.
    """
    groups = groups_of(None, adapters()) if group is None else [group]
    return max(map(processes_on_node, groups), default=launched_on_node(1) or 1)
