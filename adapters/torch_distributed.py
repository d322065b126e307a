"""torch.distributed: the job of this process, and the layouts of DTensors."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.arrays.layout import Layout, Mesh
from unickpt.errors import ProcessFailed, SaveTimeout
from unickpt.frameworks.members import Members, named
from unickpt.frameworks.memory_limits import node_name
from unickpt.frameworks.process_group import (
    DECIDE,
    LOAD,
    SAVE,
    BoundedGroup,
    Group,
    JobSession,
    JointCall,
    new_session,
)


def group_of(obj: Any) -> Group | None:
    if not dist.is_available():
        return None
    if obj is None:
        is_job = dist.is_initialized() and dist.get_world_size() > 1
        return TorchGroup(dist.group.WORLD) if is_job else None
    outside = dist.GroupMember.NON_GROUP_MEMBER
    if type(obj) is type(outside) and obj == outside:
        raise ValueError(
            f"rank {dist.get_rank()} is not a member of this process group (new_group returned "
            "GroupMember.NON_GROUP_MEMBER); only its members save and load with it"
        )
    if not isinstance(obj, dist.ProcessGroup):
        return None
    try:
        dist.get_process_group_ranks(obj)
    except KeyError:
        raise ValueError("the process group was destroyed, or torch does not know it") from None
    return TorchGroup(obj)


class TorchGroup(BoundedGroup):
    """Ranks of torch.distributed: all, or those of a process group.

    Arguments:
        process_group: the process group.
        timeout_s: how long to wait for other ranks; None waits as long as torch does.
    """

    def __init__(self, process_group: Any, timeout_s: float | None = None) -> None:
        self.index, self.count = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.members = None if process_group is dist.group.WORLD else _members(process_group)
        self._process_group, self._timeout_s = process_group, timeout_s

    def __repr__(self) -> str:
        return f"TorchGroup({self.members or 'all ranks'})"

    def within(self, timeout_s: float) -> TorchGroup:
        return TorchGroup(self._process_group, timeout_s)

    def next_attempt(self) -> str:
        if self._process_group not in _sessions:
            _sessions[self._process_group] = self._new_session()
        return _sessions[self._process_group].next_attempt()

    @property
    def session(self) -> JobSession | None:
        return _sessions.get(self._process_group)

    def agree(self, value: int) -> int:
        largest = torch.tensor(value, dtype=torch.int64, device=self._device())
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._process_group, async_op=True)
        self._finish(work, DECIDE)
        return int(largest.item())

    def exchange(self, data: Array, sent: Sequence[int], received: Sequence[int]) -> Array:
        device = self._device()
        incoming = torch.empty(sum(received), dtype=torch.uint8, device=device)
        tensors, group = (incoming, torch.from_numpy(data).to(device)), self._process_group
        parts = list(received), list(sent)
        work = dist.all_to_all_single(*tensors, *parts, group=group, async_op=True)
        self._finish(work, LOAD)
        exchanged: Array = incoming.cpu().numpy()
        return exchanged

    def _new_session(self) -> JobSession:
        """The first process creates the session's name and writes it to the group's store."""
        # Not by a collective: if a rank does not take part, the process group of the others becomes
        # unusable, and nothing reports which rank that was.
        store, name = _store(self._process_group), new_session()
        if self.count == 1:  # needs no store, which may have ended with the rank that had it
            return JobSession(name)
        if store is None:  # MPI has none
            return JobSession(self._broadcast(name))
        try:
            if self.index == 0:
                for index in range(1, self.count):
                    store.set(_SESSION_KEY.format(index), name)
            else:
                name = self._name_from(store)
            return JobSession.begin(name, self, _StoreCounters(store), node_name)
        except dist.DistNetworkError as error:
            raise ProcessFailed(f"rank 0 hosts the store, and may have ended: {error}") from error

    def _name_from(self, store: Any) -> str:
        key = _SESSION_KEY.format(self.index)
        wait = () if self._timeout_s is None else (timedelta(seconds=self._timeout_s),)
        try:
            store.wait([key], *wait)
            name = str(store.get(key).decode())
            # Deleted, so that a later process group with this store never finds an older name.
            store.delete_key(key)
        except dist.DistNetworkError:
            raise
        except RuntimeError as error:  # DistStoreError; some stores raise its base
            raise SaveTimeout(
                f"{self._me()} waited for {named(self.members, [0])}, which did not start to save "
                f"within {self._limit(SAVE)}; all ranks{self._part} must {SAVE.duty}"
            ) from error
        return name

    def _broadcast(self, name: str) -> str:
        shared = torch.tensor(list(bytes.fromhex(name)), dtype=torch.uint8, device=self._device())
        first = 0 if self.members is None else self.members.numbers[0]
        work = dist.broadcast(shared, src=first, group=self._process_group, async_op=True)
        self._finish(work, SAVE)
        return bytes(shared.tolist()).hex()

    def _finish(self, work: Any, call: JointCall) -> None:
        """Waits for a collective that is part of a call.

        Raises:
            SaveTimeout: it takes longer than this group waits.
            ProcessFailed: another rank ended.
        """
        if self._timeout_s is None:
            work.wait()
            return
        if self._device() == "cpu":
            try:
                work.wait(timedelta(seconds=self._timeout_s))
                return
            except RuntimeError as error:
                if work.is_completed():
                    raise ProcessFailed(f"another rank has probably ended: {error}") from error
                raise self._late(call) from error
        # NCCL's `wait` does not block the host.
        deadline, pause = time.monotonic() + self._timeout_s, 50e-6
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise self._late(call)
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)
        work.wait()

    def _late(self, call: JointCall) -> SaveTimeout:
        peers = [index for index in range(self.count) if index != self.index]
        return SaveTimeout(
            f"{self._me()} waited for {named(self.members, peers)}, but not all of them took part "
            f"within {self._limit(call)}; all ranks{self._part} must {call.duty}"
        )

    def _me(self) -> str:
        """This process, for messages."""
        if self.members is None:
            return f"process {self.index} of {self.count}"
        return f"{named(self.members, [self.index])} in the group of {self.members}"

    @property
    def _part(self) -> str:
        return "" if self.members is None else " of the group"

    def _limit(self, call: JointCall) -> str:
        if self._timeout_s is None:
            return "the timeout of torch.distributed"
        return f"{self._timeout_s:g} s ({call.option})"

    def _device(self) -> str:
        config = str(dist.get_backend_config(self._process_group))  # e.g. cpu:gloo,cuda:nccl
        devices = [backend.partition(":")[0] for backend in config.split(",")]
        return "cpu" if "cpu" in devices else devices[0]


class _StoreCounters:
    """The job's key-value store."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def announce(self, key: str) -> None:
        self._store.set(key, "")

    def wait(self, key: str, seconds: float) -> None:
        with suppress(RuntimeError):  # too late, or the store is gone: later calls report that
            self._store.wait([key], timedelta(seconds=seconds))


_SESSION_KEY = "unickpt/session/{}"


def _store(process_group: Any) -> Any:
    """The key-value store of a process group. All keys begin with the group's name, so groups do
    not collide. torch has no public name for it."""
    return dist.distributed_c10d._get_process_group_store(process_group)


# A session lasts as long as its process group; weak keys, so that a new group gets a new one.
_sessions: WeakKeyDictionary[Any, JobSession] = WeakKeyDictionary()
_known_members: WeakKeyDictionary[Any, Members] = WeakKeyDictionary()


def _members(process_group: Any) -> Members | None:
    """The ranks of a process group, always the same object; None if it has all, in their order."""
    if process_group not in _known_members:
        ranks = tuple(dist.get_process_group_ranks(process_group))
        world = dist.get_world_size()
        _known_members[process_group] = Members(ranks, world, "rank", "torch.distributed")
    members = _known_members[process_group]
    return None if members.numbers == tuple(range(members.job_count)) else members


TO_NUMPY: dict[torch.dtype, dtypes.DType] = {
    getattr(torch, name): dtypes.from_name(name)
    for name in dtypes.supported()
    if isinstance(getattr(torch, name, None), torch.dtype)
    and not name.startswith(("int4", "int2", "float4"))  # shells without operations
}


def is_dtensor(leaf: object) -> bool:
    # A DTensor exists only after an import of the module, which takes half a second.
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(leaf, kind)


class LocalShard(NamedTuple):
    """The shard of a DTensor on a rank.

    Arguments:
        layout: of the global array.
        box: of this rank, which may be empty; None if it is not in the mesh.
        replicas: the processes that hold the same box, ascending.
    """

    layout: Layout
    box: Box | None
    replicas: tuple[int, ...]


def local_shard_of(leaf: Any, members: Members | None = None) -> LocalShard:
    """The shard of a DTensor on this rank.

    Arguments:
        leaf: the DTensor.
        members: the ranks by whose positions to count instead of by ranks.

    Raises:
        TypeError: its placements give no box, or it is on ranks that are not among `members`.
    """
    return _local_shard(members, dist.get_rank(), *sharding_of(leaf))


def members_saving(group: Group) -> Members | None:
    """The ranks by whose positions DTensors are stored; None for all ranks.

    Raises:
        TypeError: nothing says which rank a process of the group is.
    """
    if isinstance(group, TorchGroup):
        return group.members
    if (group.index, group.count) == (dist.get_rank(), dist.get_world_size()):
        return None
    raise TypeError(
        f"a DTensor's mesh spans the {dist.get_world_size()} ranks of torch.distributed, but "
        f"{group.count} processes save here; save its full_tensor() or to_local(), or, to save "
        "with some of the ranks, give SaveOptions(group=) their torch process group"
    )


def with_parts(leaf: Any) -> bool:
    """Whether a tensor, or this rank's part of a DTensor, consists of tensors that it names."""
    local = leaf._local_tensor if is_dtensor(leaf) else leaf
    if not hasattr(type(local), "__tensor_flatten__"):
        return False
    # Jagged tensors have sizes that are no numbers, and results of collectives only wait for one.
    return not (local.is_nested or hasattr(local, "trigger_wait"))


class TensorPart(torch.Tensor):
    """Memory of a tensor that another one consists of; changes do not count in its version.

    Attributes:
        whole: shape of the global array.
        shard: of this rank; None if it holds all.
        kind: the type of device on which it is made, if it is on the meta device.
    """

    whole: tuple[int, ...]
    shard: LocalShard | None
    kind: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def wrap(
        cls,
        tensor: torch.Tensor,
        whole: tuple[int, ...] | None = None,
        shard: LocalShard | None = None,
        kind: str = "cpu",
    ) -> TensorPart:
        """A tensor's memory as such a part."""
        part: TensorPart = tensor.detach().as_subclass(cls)
        part.whole, part.shard = tuple(tensor.shape) if whole is None else whole, shard
        part.kind = kind
        return part


@dataclass(frozen=True, eq=False)
class PlacedTensor:
    """A tensor that consists of tensors, and the global array that it is a part of.

    Arguments:
        local: the tensor of this rank.
        shape: of the global array.
        shard: of this rank; None if it holds all.
        kind: as of `TensorPart`.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    shard: LocalShard | None = None
    kind: str = "cpu"


def check_ranks(group: Group, what: str) -> None:
    """Checks that the processes that save are the ranks of torch.distributed.

    Raises:
        TypeError: they are not.
    """
    if (group.index, group.count) != (dist.get_rank(), dist.get_world_size()):
        raise TypeError(
            f"the processes of {what} are the {dist.get_world_size()} ranks of torch.distributed, "
            f"but {group.count} processes save here; save its full_tensor() or to_local()"
        )


def shard_of(leaf: Any) -> LocalShard | None:
    """The shard of a distributed tensor on this rank; None for others.

    Raises:
        TypeError: the placements of a DTensor give no box.
    """
    if is_dtensor(leaf):
        return local_shard_of(leaf)
    return leaf.shard if type(leaf) is TensorPart else None


def shard_saving(leaf: Any, group: Group) -> LocalShard | None:
    """As `shard_of`, with the positions of ranks among those that save.

    Raises:
        TypeError: as `shard_of`; or the tensor is on other ranks than those that save.
    """
    if is_dtensor(leaf):
        return local_shard_of(leaf, members_saving(group))
    shard = shard_of(leaf)
    if shard is not None and members_saving(group) is not None:
        raise TypeError(
            "a DTensor that consists of several tensors cannot be saved by some of the ranks "
            "(SaveOptions.group); save it on all ranks, or its dequantised values"
        )
    return shard


def sharding_of(leaf: Any) -> tuple[Any, ...]:
    """The properties that determine the sharding of a DTensor: its global shape, mesh and
    placements."""
    placements = tuple(leaf.placements)
    # Since torch 2.10 plain Shards may be applied in another order, which only the spec records.
    shard_order = tuple(getattr(leaf._spec, "shard_order", None) or ())
    shape, kinds = tuple(leaf.shape), tuple(map(type, placements))
    return leaf.device_mesh, shape, placements, kinds, shard_order


@lru_cache(maxsize=4096)  # a model has few, and a save looks it up for every tensor
def _local_shard(
    members: Members | None,
    rank: int,
    mesh: Any,
    shape: tuple[int, ...],
    placements: tuple[Any, ...],
    kinds: tuple[type, ...],  # because placements of different types can compare equal
    shard_order: tuple[Any, ...],
) -> LocalShard:
    grid, coordinates = _grid(mesh, rank)
    if members is not None:
        members.check("a DTensor", grid.processes)
        grid = members.mesh(grid)
    order = _shard_order(placements, len(shape), shard_order, grid.shape)
    layout = Layout(grid, tuple(tuple(grid.axes[m] for m in dims) for dims in order))
    if coordinates is None:
        return LocalShard(layout, None, ())
    return LocalShard(layout, layout.box(shape, coordinates), layout.replicas(coordinates))


@lru_cache(maxsize=64)
def _grid(mesh: Any, rank: int) -> tuple[Mesh, tuple[int, ...] | None]:
    """A device mesh in the order of its process groups, and the coordinates of `rank` in it.

    Process groups sort their ranks, so collectives and FSDP2, and with them `full_tensor`, order
    the shards along a mesh dimension by rank, even if the mesh lists them in another order.
    """
    names = tuple(mesh.mesh_dim_names or (f"dim_{i}" for i in range(mesh.ndim)))
    listed = mesh.mesh.numpy()
    places = np.stack([listed.argsort(d).argsort(d) for d in range(listed.ndim)], axis=-1)
    grid = np.full(listed.shape, -1)
    grid[tuple(np.moveaxis(places, -1, 0))] = listed
    if (grid < 0).any():
        raise TypeError(
            f"the process groups of the mesh {listed.tolist()} order its ranks in contradictory "
            "ways; list the ranks of a mesh in ascending order along each dimension"
        )
    coordinates = places[listed == rank].tolist()
    grid_mesh = Mesh(names, grid.shape, tuple(grid.flatten().tolist()))
    return grid_mesh, tuple(coordinates[0]) if coordinates else None


def _shard_order(
    placements: tuple[Any, ...], rank: int, shard_order: tuple[Any, ...], sizes: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """For each tensor dimension the mesh dimensions that split it, outermost first.

    Mesh dimensions split from left to right, unless the DTensor states the order itself. The
    exception is `_StridedShard`: its split factor is the number of pieces that mesh dimensions to
    its right have split the dimension into before.
    """
    order: list[list[int]] = [[] for _ in range(rank)]
    strided = False
    for mesh_dim in reversed(range(len(placements))):
        placement = placements[mesh_dim]
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise TypeError(
                f"placement {placement!r} holds unreduced partial results; "
                "redistribute the DTensor to Shard or Replicate first"
            )
        if not hasattr(placement, "dim"):
            raise TypeError(f"placement {placement!r} of {placements} is of an unknown kind")
        strided |= hasattr(placement, "split_factor")
        factor = getattr(placement, "split_factor", 1)
        dims = order[placement.dim]
        before = [math.prod(sizes[m] for m in dims[:k]) for k in range(len(dims) + 1)]
        if factor not in before:
            raise TypeError(
                f"placement {placement!r} of {placements} on a mesh of {sizes} leaves this rank "
                "with pieces that are not adjacent; redistribute the DTensor to Shard or Replicate"
            )
        dims.insert(before.index(factor), mesh_dim)
    for dim, mesh_dims in () if strided else shard_order:
        order[dim] = list(mesh_dims)
    return [tuple(dims) for dims in order]
