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
from functools import lru_cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from unickpt.adapters.jax_settings import unchecked
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.frameworks.adapter_protocol import Read, Transfer

_PINNED = "pinned_host"
_MOST_BYTES = int(os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64)) << 28
"""A quarter of the page-locked memory that XLA has; the program may need the rest."""
_PART_PASSING = 8
"""So much of it is for temporary copies: transfers hold theirs until the save ends."""

Gather = Callable[[Mapping[Box, Any], Box, Callable[[], Array]], Array]


KeyT = TypeVar("KeyT")


class _Arriving(Generic[KeyT]):
    """Pieces of arrays on their way to the host, by keys such as their boxes."""

    _bytes = 0
    """Of all in this process."""
    _counting = threading.Lock()

    def __init__(self, parts: Mapping[KeyT, Any], shardings: Sequence[Sharding]) -> None:
        self._parts = dict(zip(parts, jax.device_put(list(parts.values()), shardings), strict=True))
        self._views: dict[KeyT, Array] | None = None
        self._lock = threading.Lock()

    @classmethod
    def start(
        cls, parts: Mapping[KeyT, Any], shardings: Sequence[Sharding], *, passing: bool = False
    ) -> _Arriving[KeyT] | None:
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

    def views(self) -> Mapping[KeyT, Array]:
        """The pieces in host memory; waits until they are there."""
        with self._lock:
            if self._views is None:
                with unchecked():
                    self._views = {key: np.asarray(part) for key, part in self._parts.items()}
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


_STACKED = 256  # arrays at most: for more, compiling takes long
_LEAST_STACKED = 4  # arrays that are alike; for fewer, compiling does not pay


class _Stack(NamedTuple):
    """Pieces of arrays that are alike, on one device.

    Arguments:
        arrays: their numbers.
        shard: the number of the piece among the shards of each array; None if an array is on one
            device.
        device: the sharding of a piece.
        shape, dtype: of a piece.
    """

    arrays: range
    shard: int | None
    device: SingleDeviceSharding
    shape: tuple[int, ...]
    dtype: Any

    def compile(self) -> Callable[..., Any]:
        """A function that makes all pieces one array."""
        return _stacking(len(self.arrays), self.device, self.shape, self.dtype)

    def pieces(self, leaves: Sequence[Any]) -> Sequence[Any]:
        if self.shard is None:
            return leaves[self.arrays.start : self.arrays.stop]
        return [leaves[number].addressable_data(self.shard) for number in self.arrays]


@lru_cache(maxsize=1024)
def _stacking(
    count: int, device: SingleDeviceSharding, shape: tuple[int, ...], dtype: Any
) -> Callable[..., Any]:
    """A compiled function that stacks pieces on their device."""
    make: Any = jax.ShapeDtypeStruct
    piece = make(shape, dtype, sharding=device)
    stack = jax.jit(lambda *pieces: jax.numpy.stack(pieces), out_shardings=device)
    return stack.lower(*[piece] * count).compile()


class StackedArrays:
    """A `Gatherer`: arrays that are alike become one on their device, so that few are transferred.

    A transfer of each takes the caller 40 to 80 us of Python; as one of many in a stack, 2 us.

    Arguments:
        leaves: the arrays.
        places_of: the boxes of an array, and the number of a shard that has each.
        gather: see `transfer`.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        places_of: Callable[[Any], Mapping[Box, int]],
        gather: Gather,
    ) -> None:
        self._gather = gather
        alike: dict[tuple[Any, ...], list[int]] = {}
        for number, leaf in enumerate(leaves):
            alike.setdefault((leaf.sharding, leaf.shape, leaf.dtype), []).append(number)
        self.numbers: Sequence[int] = ()
        self._stacks: list[_Stack] = []
        self._stacking = list[Callable[..., Any]]()
        self._on_host = list[Sharding]()
        self._places: list[list[tuple[Box, int, int]]] = []
        """For each array its boxes, with the stack of each and the position in it."""
        for (sharding, *_), numbers in alike.items():
            if len(numbers) >= _LEAST_STACKED and _on_host(sharding) is not None:
                self._add(numbers, leaves[numbers[0]], places_of(leaves[numbers[0]]))

    def _add(self, numbers: Sequence[int], leaf: Any, places: Mapping[Box, int]) -> None:
        """Adds arrays like `leaf`."""
        size = -(-len(numbers) // -(-len(numbers) // _STACKED))
        for start in range(0, len(numbers), size):
            members, first = numbers[start : start + size], len(self.numbers)
            self.numbers = *self.numbers, *members
            self._places += [[] for _ in members]
            for box, shard in places.items():
                for position, place in enumerate(self._places[first:]):
                    place.append((box, len(self._stacks), position))
                is_alone = type(leaf.sharding) is SingleDeviceSharding
                device = SingleDeviceSharding(leaf.addressable_shards[shard].device)
                self._on_host.append(device.with_memory_kind(_PINNED))
                arrays = range(first, len(self.numbers))
                more = device, box.shape, leaf.dtype
                self._stacks.append(_Stack(arrays, None if is_alone else shard, *more))

    def prepare(self) -> None:
        with unchecked():
            self._stacking = [stack.compile() for stack in self._stacks]

    def start(self, leaves: Sequence[Any]) -> Sequence[Read]:
        with unchecked():
            views = self._views(leaves)
        read = partial(self._read, views)
        return [partial(read, places) for places in self._places]

    def _views(self, leaves: Sequence[Any]) -> Callable[[], Mapping[int, Array]]:
        """Starts to copy all stacks; returns a function that waits for them in host memory."""
        try:
            pieces = [stack.pieces(leaves) for stack in self._stacks]
            both = zip(self._stacking, pieces, strict=True)
            stacks = {number: stack(*arrays) for number, (stack, arrays) in enumerate(both)}
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            stacks = {n: np.stack(list(map(np.asarray, arrays))) for n, arrays in enumerate(pieces)}
            return lambda: stacks
        arriving = _Arriving.start(stacks, self._on_host)
        if arriving is not None:
            return arriving.views
        arrays = {number: np.asarray(stack) for number, stack in stacks.items()}
        return lambda: arrays

    def _read(
        self,
        views: Callable[[], Mapping[int, Array]],
        places: Sequence[tuple[Box, int, int]],
        box: Box,
        make_buffer: Callable[[], Array],
    ) -> Array:
        stacks = views()
        pieces = {piece: stacks[stack][position, ...] for piece, stack, position in places}
        return self._gather(pieces, box, make_buffer)
