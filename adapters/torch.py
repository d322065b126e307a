"""PyTorch: tensors and DTensors of every placement, optimizers, processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from unickpt import dtypes
from unickpt.adapt import Array, ArraySource, Fragment
from unickpt.adapters.numpy import whole_source
from unickpt.box import Box
from unickpt.group import Group, new_session
from unickpt.layout import Layout, Mesh
from unickpt.tree import Expansion

_TO_NUMPY: dict[torch.dtype, dtypes.DType] = {
    getattr(torch, name): dtypes.from_name(name)
    for name in dtypes.supported()
    if isinstance(getattr(torch, name, None), torch.dtype)
    and not name.startswith(("int4", "int2", "float4"))  # shells without operations
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def source(leaf: Any, group: Group) -> ArraySource:
    _check(leaf)
    if leaf.device.type == "meta":
        raise TypeError("a tensor on the meta device has no data; it can only be loaded into")
    if not _is_dtensor(leaf):
        tensor = leaf.detach()
        return whole_source(
            tuple(leaf.shape),
            _TO_NUMPY[leaf.dtype],
            group,
            lambda box: _host(tensor[box.slices]),
            _tie(tensor),
        )
    layout, box, local = _dtensor(leaf)
    fragments: tuple[Fragment, ...] = ()
    if box is not None and not box.empty:
        start = box.start

        def read(wanted: Box) -> Array:
            return _host(local[wanted.relative_to(start).slices])

        at = leaf.device_mesh.get_coordinate()
        fragments = (Fragment(box, layout.replicas(tuple(at)), read),)
    shape = tuple(leaf.shape)
    identity = (_tie(local), shape, layout)
    return ArraySource(shape, _TO_NUMPY[leaf.dtype], fragments, layout, identity=identity)


def target(leaf: Any) -> TorchTarget:
    _check(leaf)
    return TorchTarget(leaf)


def expand(obj: Any, name: str, stored: Mapping[str, Any] | None) -> Expansion | None:
    """Optimizers, whose state is made here when a fresh one is loaded into."""
    if not isinstance(obj, torch.optim.Optimizer):
        return None
    state = obj.state_dict()
    if stored is not None and not state["state"]:
        state["state"] = _fresh_state(obj, f"{name}/state/" if name else "state/", stored)

    def rebuild(children: list[Any]) -> Any:
        obj.load_state_dict(children[0])
        return obj

    return Expansion("wrapper", ("state_dict",), (state,), rebuild, type(obj).__name__)


def group() -> Group | None:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return _TorchGroup(dist.group.WORLD)


class _TorchGroup:
    def __init__(self, world: Any) -> None:
        self.index, self.count = dist.get_rank(), dist.get_world_size()
        self._world = world

    def next_attempt(self) -> str:
        if self._world not in _sessions:
            _sessions[self._world] = (self._agree(), itertools.count())
        session, counter = _sessions[self._world]
        return f"{session}-{next(counter):06d}"

    def _agree(self) -> str:
        backends = str(dist.get_backend_config(self._world))
        device = "cpu" if "cpu:" in backends or "gloo" in backends else torch.device("cuda")
        mine = torch.tensor(list(bytes.fromhex(new_session())), dtype=torch.uint8, device=device)
        dist.broadcast(mine, src=0)
        return bytes(mine.tolist()).hex()


# A session lives as long as its process group; keyed weakly, so that a new group agrees anew.
_sessions: WeakKeyDictionary[Any, tuple[str, Iterator[int]]] = WeakKeyDictionary()


class TorchTarget:
    """Fills tensors in place; on the meta device they are materialised."""

    prng: str | None = None

    def __init__(self, leaf: Any) -> None:
        self.leaf, self.shape, self.dtype = leaf, tuple(leaf.shape), _TO_NUMPY[leaf.dtype]
        self.layout: Layout | None = None
        self.meta = leaf.device.type == "meta"
        box: Box | None = Box.whole(self.shape)
        local = leaf.detach()
        if _is_dtensor(leaf):
            self.layout, box, local = _dtensor(leaf)
            self.meta = self.meta or local.device.type == "meta"
        if box is not None and not self.meta and _self_overlapping(local):
            raise TypeError(
                f"elements of the tensor share memory (strides {tuple(local.stride())}), so it "
                "cannot be filled; make it contiguous first"
            )
        self.boxes: Sequence[Box] = () if box is None else (box,)
        self.local = torch.empty(box.shape, dtype=leaf.dtype, device=self._device()) if (
            self.meta and box is not None
        ) else local  # fmt: skip
        self.in_place = self.local.device.type == "cpu" and self.local.is_contiguous()
        self.identity: Hashable = None if self.meta else _tie(self.local)

    def _device(self) -> torch.device:
        kind = self.leaf.device_mesh.device_type if self.layout is not None else "cpu"
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else (
            torch.device(kind)
        )  # fmt: skip

    def buffer(self, position: int) -> Array:
        if self.in_place:
            return _as_numpy(self.local)
        return np.empty(self.boxes[position].shape, self.dtype)

    def finish(self, buffers: Sequence[Array]) -> Any:
        if buffers and not self.in_place:
            with torch.no_grad():
                self.local.copy_(_as_torch(buffers[0], self.leaf.dtype))
        if not self.meta:
            return self.leaf
        new: Any = self.local
        if self.layout is not None:
            from torch.distributed.tensor import DTensor

            new = DTensor.from_local(
                self.local,
                self.leaf.device_mesh,
                self.leaf.placements,
                run_check=False,
                shape=self.leaf.shape,
                stride=self.leaf.stride(),
            )
        if isinstance(self.leaf, torch.nn.Parameter):
            return torch.nn.Parameter(new, requires_grad=self.leaf.requires_grad)
        return new.requires_grad_(self.leaf.requires_grad)


def _check(leaf: Any) -> None:
    if torch.nn.parameter.is_lazy(leaf):
        raise TypeError("an uninitialized (lazy) parameter has no shape; run the module once")
    if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested:
        raise TypeError(f"a tensor of layout {leaf.layout} ({leaf.dtype}) cannot be stored")
    if leaf.dtype not in _TO_NUMPY:
        names = ", ".join(str(d).removeprefix("torch.") for d in _TO_NUMPY)
        raise TypeError(f"dtype {leaf.dtype} has no framework-neutral form; supported are {names}")
    subclass = torch.utils._python_dispatch.is_traceable_wrapper_subclass(leaf)
    if subclass and not _is_dtensor(leaf):
        raise TypeError(f"a {type(leaf).__name__} wraps other tensors; save those")


def _is_dtensor(leaf: torch.Tensor) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(leaf, DTensor)


def _dtensor(leaf: Any) -> tuple[Layout, Box | None, torch.Tensor]:
    """Layout, this rank's box (None where it is not in the mesh), and the local tensor."""
    mesh = leaf.device_mesh
    names = tuple(mesh.mesh_dim_names or (f"dim_{i}" for i in range(mesh.ndim)))
    grid = Mesh(names, tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()))
    order = _shard_order(leaf.placements, grid.shape, leaf.ndim)
    layout = Layout(grid, tuple(tuple(names[m] for m in dims) for dims in order))
    local = leaf.detach()._local_tensor
    if hasattr(local, "wait"):  # the result of an asynchronous collective
        local = local.wait()
    at = mesh.get_coordinate()
    if at is None:
        return layout, None, local
    box = layout.box(tuple(leaf.shape), tuple(at))
    if box.shape != tuple(local.shape) and not (box.empty and local.numel() == 0):
        raise TypeError(
            f"placements {leaf.placements} on {grid} give this rank the box {box}, but its local "
            f"tensor has shape {tuple(local.shape)}"
        )
    return layout, box, local


def _shard_order(
    placements: Sequence[Any], sizes: tuple[int, ...], rank: int
) -> list[tuple[int, ...]]:
    """For each tensor dimension the mesh dimensions that split it, outermost first.

    Mesh dimensions split from left to right, but for `_StridedShard`, whose split factor is the
    number of pieces into which mesh dimensions to its right have cut the dimension before.
    """
    order: list[list[int]] = [[] for _ in range(rank)]
    for mesh_dim in reversed(range(len(placements))):
        placement = placements[mesh_dim]
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise TypeError(
                f"placement {placement} holds unreduced partial sums; "
                "redistribute the DTensor to Shard or Replicate first"
            )
        factor = getattr(placement, "split_factor", 1)
        if not hasattr(placement, "dim"):
            raise TypeError(f"placement {placement!r} of {placements} is of an unknown kind")
        dims = order[placement.dim % rank]
        before = [math.prod(sizes[m] for m in dims[:k]) for k in range(len(dims) + 1)]
        if factor not in before:
            raise TypeError(
                f"placement {placement} on a mesh of {sizes} cannot be decoded: its split factor "
                f"{factor} is no product of mesh dimensions to its right"
            )
        dims.insert(before.index(factor), mesh_dim)
    return [tuple(dims) for dims in order]


def _host(tensor: torch.Tensor) -> Array:
    """Contiguous host memory of a tensor; itself where it is that already."""
    return _as_numpy(tensor.resolve_conj().resolve_neg().contiguous().cpu())


def _as_numpy(tensor: torch.Tensor) -> Array:
    dtype = _TO_NUMPY[tensor.dtype]
    if tensor.dtype in (torch.bfloat16,) or tensor.dtype.itemsize == 1:
        # NumPy does not know the type: hand over the bits.
        return tensor.view(_BITS[tensor.dtype.itemsize]).numpy().view(dtype)
    return tensor.numpy()


def _as_torch(array: Array, dtype: torch.dtype) -> torch.Tensor:
    if dtype in (torch.bfloat16,) or dtype.itemsize == 1:
        bits = np.dtype(f"i{dtype.itemsize}" if dtype.itemsize > 1 else "u1")
        return torch.from_numpy(array.view(bits)).view(dtype)
    return torch.from_numpy(array)


def _tie(tensor: torch.Tensor) -> Hashable:
    storage = tensor.untyped_storage()
    return (
        "torch",
        storage._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
    )


def _self_overlapping(tensor: torch.Tensor) -> bool:
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def _fresh_state(
    optimizer: torch.optim.Optimizer, prefix: str, stored: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """Empty slots as the checkpoint has them, sharded like their parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    by_name = {dtypes.name_of(n): t for t, n in _TO_NUMPY.items()}
    state: dict[int, dict[str, Any]] = {}
    for name, entry in stored.items():
        at, _, slot = name.removeprefix(prefix).partition("/")
        if not name.startswith(prefix) or not at.isdigit() or int(at) >= len(params) or not slot:
            continue
        param = params[int(at)].detach()
        value = entry
        if hasattr(entry, "shape"):
            dtype = by_name[entry.dtype]
            value = (
                torch.empty_like(param, dtype=dtype)
                if tuple(entry.shape) == tuple(param.shape)
                else torch.empty(entry.shape, dtype=dtype)
            )
        state.setdefault(int(at), {})[slot] = value
    return state
