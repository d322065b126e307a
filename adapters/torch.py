"""PyTorch: tensors and DTensors of every placement, modules, optimizers."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from unickpt import doors
from unickpt.adapters import torch_digests
from unickpt.adapters.torch_cuda import (
    CudaUploader,
    FlatTensors,
    buffer_for_cuda,
    pinned,
    sampler,
    stream_after_training,
    transfer,
)
from unickpt.adapters.torch_distributed import (
    TO_NUMPY,
    LocalShard,
    PlacedTensor,
    TensorPart,
    is_dtensor,
    shard_of,
    shard_saving,
    sharding_of,
    with_parts,
)
from unickpt.adapters.torch_distributed import group_of as group_of
from unickpt.adapters.torch_from_numpy import FROM_NUMPY, as_torch
from unickpt.adapters.torch_from_numpy import from_numpy as from_numpy
from unickpt.adapters.torch_modules import expand_module
from unickpt.adapters.torch_optimizer import (
    NamedOptimizer,
    OptimizerFence,
    expand_optimizer,
    is_optimizer,
)
from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.arrays.layout import Layout
from unickpt.arrays.memory_region import MemoryRegion
from unickpt.arrays.strided_copy import may_overlap
from unickpt.errors import StateChanged
from unickpt.frameworks.adapter_protocol import (
    ArraySource,
    ArrayTarget,
    DeviceMemory,
    Fence,
    Fragment,
    Gatherer,
    Memory,
    Read,
    StoredTree,
    Transfer,
    whole_source,
)
from unickpt.frameworks.process_group import Group, alone
from unickpt.threads import Pool
from unickpt.trees.tree import Expansion


def is_array(leaf: Any) -> bool:
    if type(leaf) in _PLAIN:
        return leaf.layout is torch.strided or leaf.layout not in _SPARSE
    return isinstance(leaf, torch.Tensor) and not (with_parts(leaf) or leaf.layout in _SPARSE)


def varies(kind: type) -> bool:
    return issubclass(kind, torch.Tensor)


def source(leaf: Any, group: Group) -> ArraySource:
    _check(leaf)
    if _is_sharded_tensor(leaf):
        from unickpt.adapters.torch_fsdp1 import sharded_source  # only where there are such

        return sharded_source(leaf, group, lambda tensor: source(tensor, alone()))
    if leaf.is_meta:
        raise TypeError("a tensor on the meta device has no data; it can only be loaded into")
    shard = None if type(leaf) in _PLAIN else shard_saving(leaf, group)
    if shard is None:
        tensor_memory = _memory(leaf)
        tensor, shape = tensor_memory.tensor, tensor_memory.shape
        changed = None if type(leaf) is TensorPart else _changed(tensor)
        memory = _facts(tensor_memory, (0,) * len(shape), changed)
        sample = None if tensor_memory.on_host else sampler(tensor, (0,) * len(shape))
        dtype, read = tensor_memory.dtype, _reader(tensor_memory, (0,) * len(shape))
        return whole_source(shape, dtype, group, read, _tie(tensor_memory), memory, sample)
    tensor_memory = _local(leaf, shard)
    fragments: tuple[Fragment, ...] = ()
    if shard.box is not None and not shard.box.empty:
        # Optimizers change local tensors without incrementing any version counter.
        memory = _facts(tensor_memory, shard.box.start, None)
        read = _reader(tensor_memory, shard.box.start)
        sample = None if tensor_memory.on_host else sampler(tensor_memory.tensor, shard.box.start)
        fragments = (Fragment(shard.box, shard.replicas, read, memory, sample),)
    shape = _shape(leaf)
    identity = (_tie(tensor_memory), shape, shard.layout)
    return ArraySource(shape, TO_NUMPY[leaf.dtype], fragments, shard.layout, identity=identity)


def facts(leaves: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Hashable]]:
    local_tensors, specs = leaves, ()
    if not _PLAIN_TYPES.issuperset(map(type, leaves)):
        local_tensors, specs = zip(*map(_plain_local, leaves), strict=True)
    storages = list(map(torch.Tensor.untyped_storage, local_tensors))
    of_tensors = [list(map(ask, local_tensors)) for ask in _ASKED]
    properties = specs, *of_tensors, list(map(torch.UntypedStorage.nbytes, storages))
    return properties, list(map(attrgetter("_cdata"), storages))


_ASKED: tuple[Callable[[Any], Any], ...] = (
    attrgetter("shape", "dtype", "device"),
    *(torch.Tensor.stride, torch.Tensor.storage_offset),
    *(torch.Tensor.is_conj, torch.Tensor.is_neg),
)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_PLAIN_TYPES = frozenset(_PLAIN)
_SPARSE = frozenset(
    getattr(torch, f"sparse_{kind}") for kind in ("coo", "csr", "csc", "bsr", "bsc")
)


def _plain_local(leaf: Any) -> tuple[torch.Tensor, Hashable]:
    """This rank's part of a tensor, and how the tensor is sharded, if it is.

    Raises:
        TypeError: it is none, or its part is not a plain tensor.
    """
    if type(leaf) in _PLAIN_TYPES:
        return leaf, None
    if type(leaf) is TensorPart:
        return leaf, (leaf.whole, leaf.shard)
    if not is_dtensor(leaf) or type(leaf._local_tensor) not in _PLAIN:
        raise TypeError(f"a {type(leaf).__name__} is described by `source` only")
    return leaf._local_tensor, sharding_of(leaf)


def tokens(leaves: Sequence[Any]) -> Sequence[Hashable]:
    parts = list(map(_hashable_part, leaves))
    digests = torch_digests.tokens([part for part, _ in parts])
    specs = (spec for _, spec in parts)
    return [None if d is None else (d, spec) for d, spec in zip(digests, specs, strict=True)]


def _hashable_part(leaf: Any) -> tuple[torch.Tensor | None, Hashable]:
    """This rank's part of a tensor, and how the tensor is sharded; None if it has no plain part."""
    try:
        return _plain_local(leaf)
    except TypeError:
        return None, None


def copier(out: Sequence[Array]) -> Callable[[Sequence[Any], Sequence[int] | None], None]:
    all_of_them = [as_torch(array, FROM_NUMPY[array.dtype]) for array in out]
    nbytes = sum(array.nbytes for array in out)
    count = max(1, min(_COPYING_THREADS, nbytes // _EACH_COPIES))

    def copy(leaves: Sequence[Any], numbers: Sequence[int] | None) -> None:
        chosen = all_of_them if numbers is None else [all_of_them[number] for number in numbers]
        tensors, size = list(map(_local_part, leaves)), max(1, -(-len(chosen) // count))
        parts = [slice(first, first + size) for first in range(0, len(chosen), size)]
        with Pool(len(parts) - 1) as pool:
            waits = [pool.submit(_copy, chosen[part], tensors[part]) for part in parts[1:]]
            for part in parts[:1]:  # none, if nothing is due
                _copy(chosen[part], tensors[part])
            for wait in waits:
                wait.result()

    return copy


# Of small tensors, one thread copies with half of the memory's speed (measured on two CPUs).
_COPYING_THREADS = max(1, min(4, os.cpu_count() or 1))
_EACH_COPIES = 4 << 20


def _copy(destinations: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(destinations, tensors)


def gatherer(leaves: Sequence[Any], sources: Sequence[ArraySource]) -> Gatherer | None:
    starts = [source.fragments[0].box.start for source in sources]
    flat = FlatTensors(list(map(_local_part, leaves)), starts, _local_part)
    return flat if flat.numbers else None


def readers(leaves: Sequence[Any]) -> list[Read]:
    return [_reader(_TensorMemory(_local_part(leaf).detach()), (0,) * leaf.ndim) for leaf in leaves]


def _local_part(leaf: Any) -> torch.Tensor:
    """This rank's part of a tensor for which there are `facts`."""
    if type(leaf) is TensorPart:
        return _memory(leaf).tensor
    local: torch.Tensor = leaf if type(leaf) in _PLAIN else leaf._local_tensor
    return local


class _TensorMemory:
    """A tensor with its own memory, and torch's facts about it: each is asked for once, because
    that takes most of the time of describing or filling a small tensor.

    Arguments:
        tensor: without autograd, and of no subclass; see `_memory`.
    """

    __slots__ = (
        "as_is", "dtype", "is_contiguous", "lazily", "offset", "on_host", "owner", "reach", "shape",
        "tensor", "then", "where",
    )  # fmt: skip

    def __init__(self, tensor: torch.Tensor) -> None:
        storage, dtype = tensor.untyped_storage(), tensor.dtype
        self.tensor, self.dtype, self.shape = tensor, TO_NUMPY[dtype], tuple(tensor.shape)
        self.owner, self.where = storage._cdata, (storage.data_ptr(), storage.nbytes())
        self.on_host = tensor.is_cpu
        # These two release the GIL: asking while threads write costs 20 times as much.
        self.lazily = dtype.is_complex and tensor.is_conj(), tensor.is_neg()
        self.as_is = self.on_host and not any(self.lazily)
        self.then = nullcontext if self.on_host else stream_after_training(tensor.device)
        self.is_contiguous = tensor.is_contiguous()
        self.offset = int(tensor.storage_offset()) * dtype.itemsize
        self.reach = self._reach()

    def _reach(self) -> int:
        """How many bytes of its storage it needs."""
        count: int = self.tensor.numel()
        if count and not self.is_contiguous:
            strides = zip(self.shape, self.tensor.stride(), strict=True)
            count = sum((n - 1) * stride for n, stride in strides) + 1
        return self.offset + count * self.dtype.itemsize if count else 0

    def check(self) -> None:
        """Checks that its memory is still the same.

        Raises:
            StateChanged: it is not.
        """
        if _where(self.tensor) != self.where:
            raise StateChanged("its memory was freed, resized or replaced")

    def array(self) -> Array:
        """Its memory as an array; of a tensor `as_is`.

        `Tensor.numpy` would make the storage non-resizable, and FSDP2 resizes it at each step.

        Raises:
            StateChanged: its storage was freed, or is too small for it.
        """
        tensor, reach, dtype = self.tensor, self.reach, self.dtype
        if reach == 0:
            return np.empty(self.shape, dtype)
        if tensor.untyped_storage().nbytes() < reach:
            raise StateChanged("its memory was freed or made smaller")
        memory: Any = _bytes(reach - self.offset).from_address(tensor.data_ptr())
        memory.tensor = tensor  # which NumPy so keeps alive
        if self.is_contiguous:
            return np.ndarray(self.shape, dtype, memory)
        strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
        return np.ndarray(self.shape, dtype, memory, 0, strides)


def _reader(tensor_memory: _TensorMemory, start: tuple[int, ...]) -> Read:
    """A function that reads a tensor whose first element is at `start` of the global array."""
    tensor, shape, on_host = tensor_memory.tensor, tensor_memory.shape, tensor_memory.on_host
    as_is, then = tensor_memory.as_is, tensor_memory.then

    def read(box: Box, make_buffer: Callable[[], Array]) -> Array:
        tensor_memory.check()
        whole = box.shape == shape  # the fast path, used while a caller waits
        if as_is:
            array = tensor_memory.array()
            return array if whole else array[box.relative_to(start).slices]
        part = tensor if whole else tensor[box.relative_to(start).slices]
        host_copy = make_buffer()
        with then():
            as_torch(host_copy, part.dtype).copy_(part)
        if not on_host:
            tensor_memory.check()
        return host_copy

    return read


def _where(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and size of a tensor's storage; resizing or freeing it changes them."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _facts(
    tensor_memory: _TensorMemory, start: tuple[int, ...], changed: Callable[[], bool] | None
) -> Memory:
    tensor, owner = tensor_memory.tensor, tensor_memory.owner
    if tensor_memory.on_host:
        return Memory(changed=changed, owner=owner, spans=lambda: [_ends(_where(tensor))])

    def clone() -> Read:
        try:
            return _reader(_TensorMemory(tensor.clone()), start)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    if not tensor.is_cuda:
        return Memory(True, True, clone, changed, owner)

    def bring(boxes: Sequence[Box]) -> Transfer:
        tensor_memory.check()
        then = tensor_memory.then
        return transfer(boxes, lambda box: tensor[box.relative_to(start).slices], then)

    return Memory(True, True, clone, changed, owner, pinned, transfer=bring)


def _ends(where: tuple[int, int]) -> tuple[int, int]:
    begin, nbytes = where
    return begin, begin + nbytes


def _changed(tensor: torch.Tensor) -> Callable[[], bool] | None:
    if tensor.is_inference():
        return None  # it has no version counter
    version = tensor._version
    return lambda: tensor._version != version


def target(leaf: Any) -> ArrayTarget:
    _check(leaf)
    if _is_sharded_tensor(leaf):
        from unickpt.adapters.torch_fsdp1 import ShardedTarget  # only where there are such

        return ShardedTarget(leaf, TorchTarget)
    return TorchTarget(leaf)


def empty(entry: Any, example: Any = None) -> Any:
    dtype = FROM_NUMPY.get(dtypes.from_name(entry.dtype))
    device = "meta" if example is None else example.device
    return None if dtype is None else torch.empty(entry.shape, dtype=dtype, device=device)


def expand(obj: Any, name: str, stored: StoredTree | None) -> Expansion | None:
    """Expands optimizers, modules that differ from other objects with a `state_dict`, and tensors
    that are stored as their parts."""
    if isinstance(obj, torch.Tensor | PlacedTensor):
        return _expand_tensor(obj, name, stored)
    if isinstance(obj, NamedOptimizer) or is_optimizer(obj):
        return expand_optimizer(obj, name, stored)
    if isinstance(obj, torch.nn.Module):
        return expand_module(obj, name, stored)
    return None


def _expand_tensor(obj: Any, name: str, stored: Mapping[str, Any] | None) -> Expansion | None:
    if is_array(obj):
        return None
    if isinstance(obj, torch.Tensor) and obj.layout in _SPARSE:
        from unickpt.adapters.torch_sparse import expand_sparse  # only where there are such

        return expand_sparse(obj, name, stored)
    from unickpt.adapters.torch_subclasses import expand_subclass

    return expand_subclass(obj, name)


def fence(optimizer: Any, wait: Callable[[], None]) -> Fence | None:
    if not is_optimizer(optimizer):
        return None
    return OptimizerFence(optimizer, wait)


class TorchTarget:
    """Fills tensors in place; on the meta device they are materialised."""

    prng: str | None = None
    layout: Layout | None = None
    processes = 1
    span: tuple[int, int] | None = None
    identity: Hashable = None
    device_memory: DeviceMemory | None = None

    def __init__(self, leaf: Any) -> None:
        self.leaf, self.abstract = leaf, leaf.is_meta
        shard = None if type(leaf) in _PLAIN else shard_of(leaf)
        if shard is None:
            tensor_memory = _memory(leaf)
            self.shape: tuple[int, ...] = tensor_memory.shape
            box: Box | None = Box.whole(self.shape)
        else:
            tensor_memory, self.shape, box = _local(leaf, shard), _shape(leaf), shard.box
            self.layout, self.processes = shard.layout, len(shard.layout.mesh.processes)
        self.dtype, local = tensor_memory.dtype, tensor_memory.tensor
        if not (self.abstract or tensor_memory.is_contiguous) and may_overlap(
            local.shape, local.stride()
        ):
            raise TypeError(
                f"elements of the tensor share memory (strides {tuple(local.stride())}), so it "
                "cannot be filled; make it contiguous first"
            )
        self.boxes: Sequence[Box] = () if box is None else (box,)
        if not self.abstract:
            self.identity = _tie(tensor_memory)
            self.span = _ends(tensor_memory.where) if tensor_memory.reach else None
        self._filled: Any = None if self.abstract else leaf
        self._inspect(tensor_memory)
        if not tensor_memory.on_host:
            device = torch.device(self._kind) if self.abstract else local.device
            if device.type == "cuda" or (local.is_cuda and not self.abstract):
                uploader = partial(CudaUploader, device)
                self.device_memory = DeviceMemory(device, uploader, self._destination)

    def regions(self) -> Sequence[MemoryRegion]:
        if self.span is None:
            return ()
        local, size = self._memory.tensor, self.dtype.itemsize
        strides = tuple(stride * size for stride in local.stride())
        device, shape = str(local.device), tuple(local.shape)
        return (MemoryRegion(device, local.data_ptr(), shape, strides, size),)

    def _materialise(self) -> None:
        if self._filled is not None:
            return
        local = self._filled = torch.empty_like(self._memory.tensor, device=self._kind)
        if is_dtensor(self.leaf):
            # Like `DTensor.from_local`, which would lose the order of the shards.
            make = type(self.leaf.detach())
            self._filled = make(local, self.leaf._spec, requires_grad=False)
        self._inspect(_TensorMemory(local))

    @property
    def _kind(self) -> Any:
        """The kind of device on which an abstract tensor is materialised."""
        if is_dtensor(self.leaf):
            return self.leaf.device_mesh.device_type
        return getattr(self.leaf, "kind", "cpu")

    def _destination(self, position: int, box: Box) -> torch.Tensor:
        """The memory of a part of a box."""
        self._materialise()
        part: torch.Tensor = self._memory.tensor[box.relative_to(self.boxes[position].start).slices]
        return part

    def _inspect(self, tensor_memory: _TensorMemory) -> None:
        """Queries torch about the memory, before threads read: each query releases the GIL, which
        threads compete for."""
        self._memory = tensor_memory
        self._has_version = self._filled is not None and not self._filled.is_inference()

    def buffer(self, position: int) -> Array:
        self._materialise()
        if self._memory.as_is and self._memory.reach:
            return self._memory.array()
        shape = self.boxes[position].shape
        if self._memory.tensor.is_cuda:
            return buffer_for_cuda(shape, self.dtype)
        return np.empty(shape, self.dtype)

    def finish(self, buffers: Sequence[Array]) -> Any:
        self._materialise()
        new, local = self._filled, self._memory.tensor
        if not self._memory.as_is:
            with torch.inference_mode() if local.is_inference() else torch.no_grad():
                for buffer in buffers if local.numel() else ():
                    local.copy_(as_torch(buffer, self.leaf.dtype))
        elif self._has_version:  # autograd does not see writes of NumPy
            torch.autograd.graph.increment_version(new)
        if not self.abstract:
            return new
        if isinstance(self.leaf, torch.nn.Parameter):
            return torch.nn.Parameter(new, requires_grad=self.leaf.requires_grad)
        return new.requires_grad_(self.leaf.requires_grad)


def _check(leaf: Any) -> None:
    if _is_sharded_tensor(leaf):
        return  # it does not answer all of this
    is_dense = leaf.layout is torch.strided and leaf.dtype in TO_NUMPY and not leaf.is_nested
    if is_dense and (type(leaf) in _PLAIN or not torch.nn.parameter.is_lazy(leaf)):
        return
    raise TypeError(_refusal(leaf))


def _refusal(leaf: Any) -> str:
    """Why a tensor cannot be stored, and what to store instead."""
    if torch.nn.parameter.is_lazy(leaf):
        return "an uninitialized (lazy) parameter has no shape; run the module once"
    if leaf.is_nested or leaf.layout != torch.strided:
        kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
        return f"a {kind} tensor cannot be stored; save its dense components"
    if leaf.is_quantized:
        return (
            f"a quantized tensor ({leaf.dtype}) cannot be stored; save its int_repr(), scale and "
            "zero point"
        )
    return (
        f"dtype {leaf.dtype} has no framework-neutral form; store "
        f"x.view(torch.uint{8 * leaf.dtype.itemsize}), and call .view({leaf.dtype}) after the load"
    )


def _is_sharded_tensor(leaf: Any) -> bool:
    if type(leaf) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed._shard.sharded_tensor.api")
    return module is not None and isinstance(leaf, module.ShardedTensor)


def _memory(leaf: torch.Tensor) -> _TensorMemory:
    """A tensor's own memory, without autograd and without a subclass's behaviour.

    Raises:
        TypeError: it has none.
    """
    kind, is_plain = type(leaf), type(leaf) in _PLAIN
    if not is_plain and hasattr(kind, "__tensor_flatten__"):
        raise TypeError(f"a {kind.__name__} wraps other tensors; save those")
    try:
        has_data = is_plain or leaf.untyped_storage().device.type == leaf.device.type
        if has_data:
            tensor = leaf.detach()
            if type(tensor) is not torch.Tensor:
                tensor = tensor.as_subclass(torch.Tensor)
            tensor_memory = _TensorMemory(tensor)
            has_data = tensor_memory.where[1] >= tensor_memory.reach
    except RuntimeError:
        raise TypeError(
            f"a {kind.__name__} has no memory of its own (a wrapper, or inside torch.func); save "
            "its component tensors"
        ) from None
    if not has_data:
        raise TypeError(f"a {kind.__name__} has no data (it is fake, or its storage was freed)")
    return tensor_memory


def _shape(leaf: Any) -> tuple[int, ...]:
    """The shape of the global array."""
    return leaf.whole if type(leaf) is TensorPart else tuple(leaf.shape)


def _local(leaf: Any, shard: LocalShard) -> _TensorMemory:
    """The memory of this rank's part of a distributed tensor."""
    if type(leaf) is TensorPart:
        return _memory(leaf)
    with torch.no_grad():
        local = leaf.to_local()
    if hasattr(local, "wait"):  # the result of an asynchronous collective
        local = local.wait()
    tensor_memory, box = _memory(local), shard.box
    if box is None or (box.empty and 0 in tensor_memory.shape):
        return tensor_memory
    if box.shape != tensor_memory.shape:
        raise TypeError(
            f"placements {tuple(leaf.placements)} on {shard.layout.mesh} give this rank the box "
            f"{box}, but its local tensor has shape {tensor_memory.shape}; shards that are not "
            "torch's own (dimensions cut into ceil-sized chunks) go into "
            "unickpt.types.LocalFragments"
        )
    return tensor_memory


@lru_cache(maxsize=256)
def _bytes(count: int) -> Any:
    """The type of so many bytes of memory."""
    return ctypes.c_char * count


def _tie(tensor_memory: _TensorMemory) -> Hashable:
    # By its storage, not its address: empty tensors have none, and must agree across ranks too.
    tensor = tensor_memory.tensor
    place = tensor_memory.offset, tensor_memory.shape, tensor.stride(), tensor.dtype
    return ("torch", tensor_memory.owner, *place, tensor_memory.lazily)


def __getattr__(name: str) -> Any:
    if name != "RouterTokens":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return doors.need("names", "router_tokens_torch")
