"""CUDA memory: page-locked buffers, and copies on a stream apart from the training's."""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from unickpt.adapters.torch_distributed import TO_NUMPY
from unickpt.adapters.torch_from_numpy import as_torch
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array, DType
from unickpt.frameworks.adapter_protocol import Read, Sample, Transfer

_log = logging.getLogger("unickpt")


def pinned(nbytes: int) -> Array:
    """Page-locked memory; plain memory where the system gives no more of it."""
    try:
        memory: Array = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError as error:  # such as a limit of locked memory
        _warn_once(str(error).partition("\n")[0])
        return np.empty(nbytes, np.uint8)
    return memory


_warned: list[str] = []


def _warn_once(why: str) -> None:
    if not _warned:  # not for each of thousands of buffers
        _warned.append(why)
        text = "there is no page-locked memory, so copies to and from the device are slower: %s"
        _log.warning(text, why)


# Smaller ones are not worth it; larger ones would stay with torch, which keeps its allocations,
# in sizes that are powers of two.
_PINNED_BYTES = range(1 << 20, (256 << 20) + 1)


def buffer_for_cuda(shape: tuple[int, ...], dtype: DType) -> Array:
    """Host memory that fills a tensor on a device."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes not in _PINNED_BYTES:
        return np.empty(shape, dtype)
    return pinned(nbytes).view(dtype).reshape(shape)


# Smaller tensors are copied together, to new memory of the device, and from there to their own.
_JOINED_BYTES = 1 << 20
_ALIGNMENT = 64
_COPIES = 2
"""How many staged memories may be copied at once."""


class _StagedTensors(NamedTuple):
    """Tensors of one dtype whose elements lie together in staged memory, in bytes `begin:end`."""

    tensors: list[torch.Tensor]
    begin: int
    end: int
    is_joined: bool


class CudaUploader:
    """An `Uploader`: copies each staged memory on a stream apart from the training's.

    Arguments:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copying: deque[tuple[Any, Array]] = deque()  # memory is kept until its event

    def stage(
        self, destinations: Sequence[torch.Tensor]
    ) -> tuple[Sequence[Array], Callable[[], None]]:
        kinds = [_staging_kind(tensor) for tensor in destinations]
        begins, groups, end = dict[int, int](), list[_StagedTensors](), 0
        for kind, numbers in _alike(kinds):
            is_joined = not kind[0]
            begin = end = end if is_joined else -(-end // _ALIGNMENT) * _ALIGNMENT
            for number in numbers:
                begins[number] = end
                end += destinations[number].nbytes
            tensors = [destinations[n] for n in numbers if destinations[n].nbytes]
            if tensors:
                groups.append(_StagedTensors(tensors, begin, end, is_joined))
        memory = buffer_for_cuda((end,), np.dtype(np.uint8))
        arrays = [
            memory[begins[number] : begins[number] + tensor.nbytes]
            .view(TO_NUMPY[tensor.dtype])
            .reshape(tuple(tensor.shape))
            for number, tensor in enumerate(destinations)
        ]
        return arrays, partial(self._start, memory, groups)

    def close(self) -> None:
        self._wait(0)

    def _wait(self, most: int) -> None:
        while len(self._copying) > most:
            self._copying[0][0].synchronize()
            self._copying.popleft()

    def _start(self, memory: Array, groups: Sequence[_StagedTensors]) -> None:
        copied: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with stream_after_training(self._device)():
            try:
                self._copy(torch.from_numpy(memory), groups)
            finally:
                copied.record(torch.cuda.current_stream())
                self._copying.append((copied, memory))
        self._wait(_COPIES)

    def _copy(self, memory: torch.Tensor, groups: Sequence[_StagedTensors]) -> None:
        nbytes = max((group.end for group in groups if group.is_joined), default=0)
        joined = memory
        if nbytes:
            with suppress(torch.OutOfMemoryError), torch.no_grad():  # then copied from the host
                joined = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                joined.copy_(memory[:nbytes], non_blocking=True)
        for tensors, begin, end, is_joined in groups:
            first = tensors[0]
            with torch.inference_mode() if first.is_inference() else torch.no_grad():
                flat = (joined if is_joined else memory)[begin:end].view(first.dtype)
                parts = torch._C._nn.unflatten_dense_tensors(flat, tensors)
                if is_joined:
                    torch._foreach_copy_(tensors, parts)
                else:
                    is_lazy = first.is_conj() or first.is_neg()
                    first.copy_(parts[0], non_blocking=not is_lazy)


_StagingKind = tuple[bool, int, str, bool]


def _staging_kind(tensor: torch.Tensor) -> _StagingKind:
    """Tensors of one kind are copied together, unless its first element is true."""
    is_lazy = tensor.is_conj() or tensor.is_neg()
    is_alone = is_lazy or tensor.nbytes >= _JOINED_BYTES
    return is_alone, -tensor.dtype.itemsize, str(tensor.dtype), tensor.is_inference()


def _alike(kinds: Sequence[_StagingKind]) -> Iterator[tuple[_StagingKind, list[int]]]:
    """The positions of each kind, by falling size of items, so that tensors that lie together begin
    at multiples of their items' sizes; alone where they are copied alone."""
    positions: dict[_StagingKind, list[int]] = {}
    for position, kind in enumerate(kinds):
        positions.setdefault(kind, []).append(position)
    for kind in sorted(positions):
        if kind[0]:
            yield from ((kind, [position]) for position in positions[kind])
        else:
            yield kind, positions[kind]


@cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def stream_after_training(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """A context that uses a CUDA stream apart from the training's, but after all work that the
    training has queued until now."""
    if device.type != "cuda":
        return nullcontext
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))

    @contextmanager
    def after() -> Iterator[None]:
        stream = _stream(device)
        stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield

    return after


def transfer(
    boxes: Sequence[Box],
    tensor_of: Callable[[Box], torch.Tensor],
    then: Callable[[], AbstractContextManager[None]],
) -> Transfer:
    """Starts to copy boxes of a tensor to page-locked memory.

    A wait for each of thousands of small copies would compete for Python's lock with the training
    and the writing threads. Then 2 GiB took 0.25 s instead of 0.05 s on an H100.

    Arguments:
        boxes: which.
        tensor_of: the part of the tensor that is a box.
        then: a context from `stream_after_training`.
    """
    copies: dict[Box, tuple[Array, Any]] = {}
    with then():
        stream = torch.cuda.current_stream()
        for box in boxes:
            part = tensor_of(box)
            dtype = TO_NUMPY[part.dtype]
            out = pinned(part.numel() * dtype.itemsize).view(dtype).reshape(box.shape)
            part.record_stream(stream)  # its memory is not reused before the copy
            # Else torch would conjugate or negate the copy on the host, before it arrived.
            resolved_part = part.resolve_conj().resolve_neg()
            as_torch(out, part.dtype).copy_(resolved_part, non_blocking=True)
            copied: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record(stream)
            copies[box] = out, copied
    device, last = stream.device, copied

    def read(box: Box, make_buffer: Callable[[], Array]) -> Array:
        out, copied = copies[box]
        copied.synchronize()
        return out

    def go_first() -> None:
        torch.cuda.current_stream(device).wait_event(last)

    return Transfer(read, last.synchronize, go_first)


_DTYPES = {getattr(torch, name) for name in (
    "bool", "uint8", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
)}  # fmt: skip


class FlatTensors:
    """A `Gatherer`: small tensors of one dtype become one on their device, which is copied.

    Arguments:
        tensors: this rank's parts of leaves.
        starts: the indices of the first element of each in its global array.
        local_part: returns this rank's part of a leaf.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        starts: Sequence[tuple[int, ...]],
        local_part: Callable[[Any], torch.Tensor],
    ) -> None:
        self._local_part = local_part
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number, tensor in enumerate(tensors):
            is_plain = tensor.dtype in _DTYPES and not (tensor.is_conj() or tensor.is_neg())
            if is_plain and tensor.is_cuda:
                alike.setdefault((tensor.device, tensor.dtype), []).append(number)
        self.numbers: Sequence[int] = list(itertools.chain.from_iterable(alike.values()))
        self._parts = [
            _JoinedTensors(device, dtype, [(tuple(tensors[n].shape), starts[n]) for n in numbers])
            for (device, dtype), numbers in alike.items()
        ]

    def prepare(self) -> None:
        for part in self._parts:
            part.prepare()

    def start(self, leaves: Sequence[Any]) -> Sequence[Read]:
        tensors = iter(map(self._local_part, leaves))
        for part in self._parts:
            part.start(list(itertools.islice(tensors, len(part.reads))))
        return [read for part in self._parts for read in part.reads]


class _JoinedTensors:
    """The tensors of one dtype on one device.

    Arguments:
        device, dtype: of all of them.
        places: the shape of each, and the indices of its first element in its global array.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        places: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    ) -> None:
        self._device, self._dtype, self._places = device, dtype, places
        self._room: Array = np.empty(0, np.uint8)
        self._copied: Any = None
        self.reads: list[Read] = []
        """Read the copies."""

    def prepare(self) -> None:
        dtype, sizes = TO_NUMPY[self._dtype], [math.prod(shape) for shape, _ in self._places]
        self._room = pinned(sum(sizes) * dtype.itemsize).view(dtype)
        copies = np.split(self._room, list(itertools.accumulate(sizes))[:-1])
        for copy, (shape, start) in zip(copies, self._places, strict=True):
            self.reads.append(partial(self._read, copy.reshape(shape), start))

    def start(self, tensors: list[torch.Tensor]) -> None:
        """Starts to copy the tensors, after the work that was queued for their device."""
        room = as_torch(self._room, self._dtype)
        with torch.no_grad():
            try:
                flat = torch._C._nn.flatten_dense_tensors(tensors)
            except torch.OutOfMemoryError:
                room.copy_(torch._C._nn.flatten_dense_tensors([t.cpu() for t in tensors]))
                self._copied = None
                return
            with stream_after_training(self._device)():
                stream = torch.cuda.current_stream()
                flat.record_stream(stream)  # its memory is not reused before the copy
                room.copy_(flat, non_blocking=True)
                self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                self._copied.record(stream)

    def _read(
        self, copy: Array, start: tuple[int, ...], box: Box, make_buffer: Callable[[], Array]
    ) -> Array:
        if self._copied is not None:
            self._copied.synchronize()
        return copy[box.relative_to(start).slices]


def sampler(tensor: torch.Tensor, start: tuple[int, ...]) -> Sample:
    """A function that gathers elements on a device; all that were gathered before any of them is
    needed on the host come there in one transfer.

    Arguments:
        tensor: on the device.
        start: the indices of its first element in the global array.
    """

    def sample(indices: tuple[Array, ...]) -> Callable[[], Array]:
        local = (i - a for i, a in zip(indices, start or (0,), strict=True))
        where = tuple(torch.from_numpy(index).to(tensor.device) for index in local)
        bits = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        gathered = (bits if bits.ndim else bits.reshape(1))[where]
        data = gathered.detach().resolve_conj().resolve_neg().contiguous().view(torch.uint8)
        dtype, bring = TO_NUMPY[tensor.dtype], _Gathered.add(data)
        return lambda: bring().view(dtype)

    return sample


class _Gathered:
    """Bytes that were gathered on a device, and are not needed on the host yet."""

    _open: ClassVar[dict[torch.device, _Gathered]] = {}
    _adding = threading.Lock()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: list[torch.Tensor] = []
        self._afters: list[Callable[[], AbstractContextManager[None]]] = []
        self._values: list[Array] = []

    @classmethod
    def add(cls, data: torch.Tensor) -> Callable[[], Array]:
        """Adds bytes, flat; returns a function that returns them on the host."""
        device = data.device
        with cls._adding:
            batch = cls._open.setdefault(device, cls())
            batch._parts.append(data)
            batch._afters.append(stream_after_training(device))
            number = len(batch._parts) - 1
        return lambda: batch._bring(device)[number]

    def _bring(self, device: torch.device) -> list[Array]:
        with self._adding:
            if self._open.get(device) is self:
                del self._open[device]
        with self._lock:
            if self._parts:
                for after in self._afters:
                    with after():
                        pass  # from here on the stream waits for the gather
                with self._afters[-1]():
                    data = torch.cat(self._parts).cpu().numpy()
                ends = list(itertools.accumulate(part.numel() for part in self._parts))
                self._values = np.split(data, ends[:-1])
                self._parts, self._afters = [], []
        return self._values
