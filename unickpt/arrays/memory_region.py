"""Strided memory by its address: whether two arrays share the memory of an element."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from unickpt.arrays.dtypes import Array

_MOST_WORK = 1_000_000


class MemoryRegion(NamedTuple):
    """The memory of an array; not read, so it may be that of a device.

    Arguments:
        device: the device that has the memory.
        address: of the first element.
        shape: extents.
        strides: in bytes.
        itemsize: bytes of an element.
    """

    device: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def span(self) -> tuple[int, int]:
        """The addresses (begin, end) between which all elements lie.

        Example:
            >>> MemoryRegion("cpu", 100, (2, 3), (24, -8), 8).span
            (84, 132)
        """
        if 0 in self.shape:
            return self.address, self.address
        steps = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        low, high = (sum(limit(0, step) for step in steps) for limit in (min, max))
        return self.address + low, self.address + high + self.itemsize

    def overlaps(self, other: MemoryRegion) -> bool:
        """Whether a byte belongs to both; False if that takes too long to determine.

        Example:
            >>> even = MemoryRegion("cpu", 64, (4,), (16,), 8)
            >>> even.overlaps(even._replace(address=72)), even.overlaps(even._replace(address=76))
            (False, True)
        """
        return self.device == other.device and share(self.as_bytes(), other.as_bytes())

    def as_bytes(self) -> Array:
        """The bytes of the elements; not to be read."""
        interface = {  # NumPy makes an array from it, without reading the memory
            "version": 3,
            "data": (self.address, True),
            "shape": (*self.shape, self.itemsize),
            "strides": (*self.strides, 1),
            "typestr": "|u1",
        }
        return np.asarray(SimpleNamespace(__array_interface__=interface))

    def within(self, memory: Array, start: int, dtype: np.dtype[Any]) -> Array:
        """The elements in a copy of the memory that begins at an address.

        Arguments:
            memory: bytes.
            start: the address of the first one.
            dtype: of the elements.
        """
        return np.ndarray(self.shape, dtype, memory, self.address - start, self.strides)


def share(first: Array, second: Array) -> bool:
    """Whether two arrays share memory; False if that takes too long to determine."""
    try:
        return np.shares_memory(first, second, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False
