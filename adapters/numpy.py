"""NumPy arrays and scalars: assumed equal on every process, filled in place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.arrays.layout import Layout
from unickpt.arrays.memory_region import MemoryRegion
from unickpt.arrays.strided_copy import may_overlap
from unickpt.frameworks.adapter_protocol import (
    ArraySource,
    DeviceMemory,
    Fence,
    Memory,
    Read,
    whole_source,
)
from unickpt.frameworks.host_memory import new_array
from unickpt.frameworks.process_group import Group
from unickpt.trees.tree import Expansion


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic)


varies = None


def source(leaf: Any, group: Group) -> ArraySource:
    array = _checked(leaf)
    read = _reader(array)
    memory = Memory(spans=lambda: [_span(array)])
    return whole_source(array.shape, array.dtype, group, read, _tie(leaf), memory)


def facts(leaves: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Hashable]]:
    properties = list(map(attrgetter("shape", "dtype", "strides"), leaves))
    if all(map(attrgetter("flags.owndata"), leaves)):
        # Then no two share memory, and to ask for its address takes most of the time.
        return properties, list(map(_key, leaves, range(len(leaves))))
    return properties, [_begin(leaf) or -number for number, leaf in enumerate(leaves)]


def _key(leaf: Any, number: int) -> int:
    return id(leaf) if isinstance(leaf, np.ndarray) else -number


def _begin(leaf: Any) -> int | None:
    """Where the elements of an array are."""
    is_shared = isinstance(leaf, np.ndarray) and leaf.size > 0
    return leaf.__array_interface__["data"][0] if is_shared else None


def tokens(leaves: Sequence[Any]) -> Sequence[None]:
    return [None] * len(leaves)  # on the host


def copier(out: Sequence[Array]) -> Callable[[Sequence[Any], Sequence[int] | None], None]:
    def copy(leaves: Sequence[Any], numbers: Sequence[int] | None) -> None:
        destinations = out if numbers is None else [out[number] for number in numbers]
        assert len(leaves) == len(destinations)
        deque(map(np.copyto, destinations, leaves), maxlen=0)

    return copy


def gatherer(leaves: Sequence[Any], sources: Sequence[ArraySource]) -> None:
    return None  # none is on a device


def readers(leaves: Sequence[Any]) -> list[Read]:
    return [_reader(np.asarray(leaf)) for leaf in leaves]


def _reader(array: Array) -> Read:
    return lambda box, make_buffer: array[box.slices]


def target(leaf: Any) -> NumpyTarget:
    return NumpyTarget(leaf, _checked(leaf))


def empty(entry: Any, example: Any = None) -> Array:
    return new_array(entry.shape, dtypes.from_name(entry.dtype))


def expand(obj: Any, name: str, stored: Mapping[str, Any] | None) -> Expansion | None:
    return None


group_of = None


def fence(optimizer: Any, wait: Callable[[], None]) -> Fence | None:
    return None


class NumpyTarget:
    """Fills a writable array in place; read-only ones and scalars are replaced."""

    abstract = False
    processes = 1
    prng: str | None = None
    device_memory: DeviceMemory | None = None
    layout: Layout | None = None

    def __init__(self, leaf: Any, array: Array) -> None:
        self.leaf, self.shape, self.dtype = leaf, array.shape, array.dtype.newbyteorder("=")
        self.boxes: Sequence[Box] = (Box.whole(array.shape),)
        self.in_place = isinstance(leaf, np.ndarray) and leaf.flags.writeable
        is_strided = self.in_place and not array.flags.forc
        if is_strided and may_overlap(array.shape, array.strides, array.itemsize):
            raise TypeError(
                f"elements of the array share memory (strides {array.strides}), so it cannot be "
                "filled; copy it first"
            )
        self.identity = _tie(leaf) if self.in_place else None
        self.span = None if self.identity is None else _span(array)

    def regions(self) -> Sequence[MemoryRegion]:
        if self.span is None:
            return ()
        array = np.asarray(self.leaf)
        address = array.__array_interface__["data"][0]
        return (MemoryRegion("cpu", address, array.shape, array.strides, array.itemsize),)

    def buffer(self, position: int) -> Array:
        if self.in_place and self.leaf.dtype.isnative:
            view: Array = np.asarray(self.leaf)
            return view
        return new_array(self.shape, self.dtype)

    def finish(self, buffers: Sequence[Array]) -> Any:
        (filled,) = buffers
        if self.in_place:
            if not self.leaf.dtype.isnative:
                np.copyto(self.leaf, filled)
            return self.leaf
        return filled[()] if isinstance(self.leaf, np.generic) else filled


def _checked(leaf: Any) -> Array:
    is_plain = type(leaf) is np.ndarray or isinstance(leaf, np.generic)
    if not is_plain and isinstance(leaf, np.ma.MaskedArray):  # its module takes 10 ms to import
        raise TypeError("a masked array would lose its mask; save .data and .mask")
    array: Array = np.asarray(leaf)
    dtypes.name_of(array.dtype)
    return array


def _span(array: Array) -> tuple[int, int]:
    """The address range (begin, end) of the elements of an array that is not empty."""
    steps = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    first = array.__array_interface__["data"][0]
    low, high = (sum(limit(0, step) for step in steps) for limit in (min, max))
    return first + low, first + high + array.itemsize


def _tie(leaf: Any) -> Hashable:
    if not isinstance(leaf, np.ndarray) or leaf.size == 0:
        return None
    pointer = leaf.__array_interface__["data"][0]
    return ("host", pointer, leaf.shape, leaf.strides, leaf.dtype)
