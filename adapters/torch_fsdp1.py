"""FSDP1: its `ShardedTensor`s, and the states of optimizers over its flat parameters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from unickpt.adapters.torch_distributed import TO_NUMPY, check_ranks
from unickpt.adapters.torch_fresh_state import (
    add_counters,
    check_same_parameters,
    dtype_of,
    fresh_slots,
    slots_by_key,
    undo_casts,
)
from unickpt.adapters.torch_modules import fsdp1
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.arrays.layout import Layout, Mesh
from unickpt.arrays.memory_region import MemoryRegion
from unickpt.errors import UnsupportedLeaf
from unickpt.frameworks.adapter_protocol import (
    ArraySource,
    ArrayTarget,
    DeviceMemory,
    Fragment,
    StoredTree,
)
from unickpt.frameworks.leaves import placed
from unickpt.frameworks.process_group import Group
from unickpt.trees.tree import Expansion, Node, by_key, component, join
from unickpt.trees.tree import rebuild as rebuild_tree


def sharded_source(
    leaf: Any, group: Group, describe: Callable[[torch.Tensor], ArraySource]
) -> ArraySource:
    """Describes a `ShardedTensor`; see `Adapter.source`.

    Arguments:
        leaf: the tensor.
        group: the processes.
        describe: describes a plain tensor, as one of this process alone.
    """
    check_ranks(group, "a ShardedTensor")
    shape, (layout, ranks_by_box) = tuple(leaf.size()), _places(leaf)
    fragments: list[Fragment] = []
    for shard in leaf.local_shards():
        source = describe(shard.tensor.detach())
        box = _box(shard.metadata)
        replicas = ranks_by_box.get(box, ())
        if source.shape != box.shape or not (replicas or box.empty):
            raise TypeError(
                f"this rank has a shard of shape {list(source.shape)} for {box}, which the "
                "ShardedTensor's metadata does not list"
            )
        fragments += [placed(fragment, box, replicas) for fragment in source.fragments]
    boxes = None if layout is not None else tuple(ranks_by_box.items())
    # Not by its memory: some ranks have none, and must agree with the others.
    identity = ("torch", id(leaf))
    return ArraySource(shape, _dtype(leaf), tuple(fragments), layout, boxes, identity)


class ShardedTarget:
    """Fills the local shards of a `ShardedTensor`.

    Arguments:
        leaf: the tensor.
        make: makes the target of a plain tensor.
    """

    prng: str | None = None
    abstract = False
    layout: Layout | None = None  # shards need not be equal pieces

    def __init__(self, leaf: Any, make: Callable[[torch.Tensor], ArrayTarget]) -> None:
        shards = leaf.local_shards()
        self._leaf, self._inner = leaf, [make(shard.tensor.detach()) for shard in shards]
        if any(inner.abstract for inner in self._inner):
            raise TypeError("a ShardedTensor on the meta device cannot be filled")
        self.shape, self.dtype = tuple(leaf.size()), _dtype(leaf)
        self.boxes: Sequence[Box] = [_box(shard.metadata) for shard in shards]
        self.processes = len(_ranks(leaf))
        self.identity: Hashable = ("torch", id(leaf))
        self.device_memory = DeviceMemory.joined(self._inner, self.boxes)

    @property
    def span(self) -> tuple[int, int] | None:
        spans = [inner.span for inner in self._inner if inner.span is not None]
        return (min(spans)[0], max(end for _, end in spans)) if spans else None

    def regions(self) -> Sequence[MemoryRegion]:
        return [region for inner in self._inner for region in inner.regions()]

    def buffer(self, position: int) -> Array:
        return self._inner[position].buffer(0)

    def finish(self, buffers: Sequence[Array]) -> Any:
        for inner, buffer in zip(self._inner, buffers, strict=True) if buffers else ():
            inner.finish([buffer])
        return self._leaf


def _dtype(leaf: Any) -> Any:
    if leaf.dtype not in TO_NUMPY:
        raise TypeError(f"a ShardedTensor of dtype {leaf.dtype} has no framework-neutral form")
    return TO_NUMPY[leaf.dtype]


def _box(metadata: Any) -> Box:
    start, sizes = tuple(metadata.shard_offsets), tuple(metadata.shard_sizes)
    return Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))


def _ranks(leaf: Any) -> tuple[int, ...]:
    """The ranks of its process group, in the order of the group."""
    return tuple(dist.get_process_group_ranks(leaf._process_group))


def _places(leaf: Any) -> tuple[Layout | None, dict[Box, tuple[int, ...]]]:
    """The layout of a `ShardedTensor`, and who holds each box of it, as far as this rank knows.

    Its metadata has the boxes of the ranks of its process group. With hybrid sharding several
    groups hold the same array, and do not know each other: a layout describes each the same way.
    Without one, if shards are not equal pieces of a dimension, a single group holds the array.
    """
    shards = []
    for metadata in leaf.metadata().shards_metadata:
        rank = metadata.placement.rank()
        if rank is None:
            raise TypeError(f"the shard {_box(metadata)} is on {metadata.placement}, not on a rank")
        shards.append((rank, tuple(metadata.shard_offsets), tuple(metadata.shard_sizes)))
    return _places_of(tuple(leaf.size()), _ranks(leaf), tuple(shards))


@lru_cache(maxsize=4096)  # a model has few, and each is looked up at every save
def _places_of(
    shape: tuple[int, ...], ranks: tuple[int, ...], shards: tuple[Any, ...]
) -> tuple[Layout | None, dict[Box, tuple[int, ...]]]:
    ranks_by_box: dict[Box, tuple[int, ...]] = {
        Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True))): (rank,)
        for rank, start, sizes in shards
        if 0 not in sizes
    }
    mesh = Mesh(("shard",), (len(ranks),), ranks)
    for dim in range(len(shape)):
        layout = Layout(mesh, tuple(("shard",) if d == dim else () for d in range(len(shape))))
        if ranks_by_box == dict(layout.fragments(shape)):
            return layout, ranks_by_box
    return None, ranks_by_box


# --- optimizers -----------------------------------------------------------------------------------


def expand_flattened(
    obj: Any, optimizer: torch.optim.Optimizer, name: str, stored: StoredTree | None
) -> Expansion:
    """The state of an optimizer over flat parameters, by the names of the parameters in them, as
    FSDP1 gives it: all ranks take part.

    Arguments:
        obj: a `NamedOptimizer`.
        optimizer: its innermost optimizer.
        name: in the tree.
        stored: while loading, the checkpoint.

    Raises:
        UnsupportedLeaf: it is another object.
    """
    module, wrapper = getattr(obj, "module", None), fsdp1()
    if module is None or wrapper is None:
        raise UnsupportedLeaf(
            f"{name!r}: the parameters of this {type(optimizer).__name__} are flattened by FSDP1; "
            "put NamedOptimizer(optimizer, model) of unickpt.adapters.torch into the tree"
        )
    fsdp: Any = wrapper
    with _sharded(fsdp, module):
        state = dict(fsdp.optim_state_dict(module, optimizer))
        if stored is not None:
            add_counters(state, name, stored)
            fresh = _fresh_state(module, state, join(name, "state"), stored)
            state["state"] = {**state["state"], **fresh}
    groups = state["param_groups"]

    def check(node: Node, value: Callable[[str], Any]) -> None:
        loaded_groups = rebuild_tree(by_key(node)["param_groups"], value)
        check_same_parameters(name, groups, loaded_groups)

    def rebuild(children: list[Any]) -> Any:
        (loaded,) = children
        both = zip(groups, loaded["param_groups"], strict=True)
        ordered = [{**loaded_group, "params": group["params"]} for group, loaded_group in both]
        with _sharded(fsdp, module):
            flat = fsdp.optim_state_dict_to_load(
                module, optimizer, {**loaded, "param_groups": ordered}
            )
        optimizer.load_state_dict(flat)
        undo_casts(optimizer, flat["state"])
        return obj

    kind = type(optimizer).__name__
    return Expansion("wrapper", ("state_dict",), (state,), rebuild, kind, check)


@contextmanager
def _sharded(fsdp: Any, module: torch.nn.Module) -> Iterator[None]:
    """FSDP1 gives and takes shards, whatever its settings: on CPUs, the full states of torch 2.13
    are several names of one buffer."""
    if any(part.sharding_strategy.name == "NO_SHARD" for part in fsdp.fsdp_modules(module)):
        yield  # it refuses to give shards
        return
    from torch.distributed.fsdp import StateDictType

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # that FSDP1 is deprecated
        context = fsdp.state_dict_type(module, StateDictType.SHARDED_STATE_DICT)
        with context:
            yield


def _fresh_state(
    module: torch.nn.Module, state: Mapping[str, Any], name: str, stored: StoredTree
) -> dict[str, Any]:
    """The stored slots of parameters without any, sharded like the parameters."""
    slots_of = slots_by_key(stored, name)
    param_names = [param for group in state["param_groups"] for param in group["params"]]
    lacking_names = {component(p): p for p in param_names if not state["state"].get(p)}
    slots_to_make = {
        lacking_names[key]: slots for key, slots in slots_of.items() if key in lacking_names
    }
    params = module.state_dict() if slots_to_make else {}
    fresh = {}
    for param, slots in slots_to_make.items():
        if param in params:
            make = partial(_room, params[param])
            fresh[param] = fresh_slots(make, slots, join(name, component(param)), stored)
    return {param: slots for param, slots in fresh.items() if slots}


def _room(param: Any, slot: str, entry: Any) -> Any:
    """The value to load into a slot of a parameter."""
    if not hasattr(entry, "shape"):
        return entry  # a plain value
    dtype = dtype_of(entry)
    if tuple(entry.shape) != tuple(param.size()) or not entry.shape:
        return torch.empty(entry.shape, dtype=dtype)
    if not hasattr(param, "local_shards"):
        return torch.empty_like(param, dtype=dtype)
    from torch.distributed._shard.sharded_tensor.shard import Shard  # imported by who has one

    metadata = copy.deepcopy(param.metadata())
    metadata.tensor_properties.dtype = dtype
    shards = [
        Shard(torch.empty_like(shard.tensor, dtype=dtype), shard.metadata)
        for shard in param.local_shards()
    ]
    make: Any = type(param)
    return make._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=param._process_group
    )
