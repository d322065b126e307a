"""JAX: copies from accelerators to page-locked host memory, which the devices make by themselves.

XLA runs such a transfer after the queued work, and before any computation that gets the memory of a
donated array. So the caller need not wait, and may donate the array at once. A copy that NumPy
requests waits, and goes to memory that is not page-locked: on an H100, 1.6 GB/s.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from unickpt.adapters.jax_settings import unchecked
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.frameworks.protocol import Transfer

_PINNED = "pinned_host"
_MOST_BYTES = int(os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64)) << 28
"""A quarter of the page-locked memory that XLA has; the program may need the rest."""
_PART_PASSING = 8
"""So much of it is for temporary copies: transfers hold theirs until the save ends."""

Gather = Callable[[Mapping[Box, Any], Box, Callable[[], Array]], Array]


class _Arriving:
    """Pieces of an array on their way to the host."""

    _bytes = 0
    """Of all in this process."""
    _counting = threading.Lock()

    def __init__(self, parts: Mapping[Box, Any], shardings: Sequence[Sharding]) -> None:
        self._parts = dict(zip(parts, jax.device_put(list(parts.values()), shardings), strict=True))
        self._views: dict[Box, Array] | None = None
        self._lock = threading.Lock()

    @classmethod
    def start(
        cls, parts: Mapping[Box, Any], shardings: Sequence[Sharding], *, passing: bool = False
    ) -> _Arriving | None:
        """Starts the transfers; None if there is no room."""
        nbytes = sum(data.nbytes for data in parts.values())
        most = _MOST_BYTES if passing else _MOST_BYTES - _MOST_BYTES // _PART_PASSING
        with cls._counting:
            if cls._bytes + nbytes > most:
                return None
            cls._bytes += nbytes
        try:
            arriving = cls(parts, shardings)
        except BaseException as error:  # such as an array that was deleted
            cls._gone(nbytes)
            if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
                return None
            raise
        weakref.finalize(arriving, cls._gone, nbytes)
        return arriving

    @classmethod
    def _gone(cls, nbytes: int) -> None:
        with cls._counting:
            cls._bytes -= nbytes

    def views(self) -> Mapping[Box, Array]:
        """The pieces in host memory; waits until they are there."""
        with self._lock:
            if self._views is None:
                with unchecked():
                    self._views = {box: np.asarray(part) for box, part in self._parts.items()}
            return self._views


def transfer(gather: Gather, pieces: Mapping[Box, Any], boxes: Sequence[Box]) -> Transfer | None:
    """Starts to copy boxes of an array to the host, as they are now.

    Arguments:
        gather: host memory of a box that pieces in host memory cover.
        pieces: the data of this process's devices, by box.
        boxes: no element is in two of them, and the pieces cover all of them.

    Returns:
        The copies; None if the devices cannot do it, or there is no room.
    """
    with unchecked():
        return _transfer(gather, pieces, boxes)


def _transfer(gather: Gather, pieces: Mapping[Box, Any], boxes: Sequence[Box]) -> Transfer | None:
    parts: dict[Box, Any] = {}
    lost = sum(box.size for box in boxes)
    for box, data in pieces.items():
        overlaps = [
            overlap for requested in boxes if (overlap := box.intersect(requested)) is not None
        ]
        size = sum(overlap.size for overlap in overlaps)
        lost -= size
        if size == box.size:
            parts[box] = data
        else:  # the rest is for other processes to write
            parts |= {overlap: _cut(data, overlap.relative_to(box.start)) for overlap in overlaps}
    assert lost == 0, f"the pieces {list(pieces)} lack {lost} elements of {list(boxes)}"
    shardings = [_on_host(data.sharding) for data in parts.values()]
    host_shardings = [sharding for sharding in shardings if sharding is not None]
    arriving = _Arriving.start(parts, host_shardings) if len(host_shardings) == len(parts) else None
    if arriving is None:
        return None
    return Transfer(lambda box, make_buffer: gather(arriving.views(), box, make_buffer))


def copied(data: Any, box: Box, make_buffer: Callable[[], Array]) -> Array:
    """A copy of a box of an array on a device; waits for it."""
    with unchecked():
        return _copied(data, box, make_buffer)


def _copied(data: Any, box: Box, make_buffer: Callable[[], Array]) -> Array:
    part = data if box.shape == data.shape else _cut(data, box)
    sharding = _on_host(part.sharding)
    arriving = None if sharding is None else _Arriving.start({box: part}, [sharding], passing=True)
    if arriving is None:
        return np.asarray(part)
    out = make_buffer()
    np.copyto(out, arriving.views()[box])  # so that page-locked memory is free at once
    return out


def _cut(data: Any, box: Box) -> Any:
    """A box of an array, cut out on the device."""
    # Not `data[box.slices]`: JAX would compile that again for each position.
    return jax.lax.dynamic_slice(data, [np.int32(start) for start in box.start], box.shape)


@lru_cache(maxsize=4096)
def _on_host(sharding: Sharding) -> Sharding | None:
    """The sharding in page-locked memory; None if it uses another memory than the device's already,
    or there is none."""
    devices: set[Any] = set(sharding.device_set)
    for device in devices:
        if sharding.memory_kind not in (None, device.default_memory().kind):
            return None
        if _PINNED not in {memory.kind for memory in device.addressable_memories()}:
            return None
    return sharding.with_memory_kind(_PINNED)
