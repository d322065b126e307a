"""torch's dtypes as NumPy's; and DTensors: which box of the global array a rank holds."""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.layout import Layout, Mesh

TO_NUMPY: dict[torch.dtype, dtypes.DType] = {
    getattr(torch, name): dtypes.from_name(name)
    for name in dtypes.supported()
    if isinstance(getattr(torch, name, None), torch.dtype)
    and not name.startswith(("int4", "int2", "float4"))  # shells without operations
}


def is_dtensor(leaf: object) -> bool:
    # Whoever has a DTensor has imported the module; to import it takes half a second.
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(leaf, kind)


class LocalShard(NamedTuple):
    """What a rank holds of a DTensor.

    Arguments:
        layout: of the global array.
        box: what this rank holds, which may be empty; None if it is not in the mesh.
        replicas: the ranks that hold the same box, ascending.
    """

    layout: Layout
    box: Box | None
    replicas: tuple[int, ...]


def local_shard_of(leaf: Any) -> LocalShard:
    """What this rank holds of a DTensor.

    Raises:
        TypeError: its placements give no box.
    """
    return _local_shard(dist.get_rank(), *sharding_of(leaf))


def sharding_of(leaf: Any) -> tuple[Any, ...]:
    """What determines how a DTensor is sharded: all of its global shape, mesh and placements."""
    placements = tuple(leaf.placements)
    # Since torch 2.10 plain Shards may be applied in another order, which only the spec records.
    shard_order = tuple(getattr(leaf._spec, "shard_order", None) or ())
    shape, kinds = tuple(leaf.shape), tuple(map(type, placements))
    return leaf.device_mesh, shape, placements, kinds, shard_order


@lru_cache(maxsize=4096)  # a model has few, and a save looks it up for every tensor
def _local_shard(
    rank: int,
    mesh: Any,
    shape: tuple[int, ...],
    placements: tuple[Any, ...],
    kinds: tuple[type, ...],  # because placements of different types can compare equal
    shard_order: tuple[Any, ...],
) -> LocalShard:
    grid, at = _grid(mesh, rank)
    order = _shard_order(placements, len(shape), shard_order, grid.shape)
    layout = Layout(grid, tuple(tuple(grid.axes[m] for m in dims) for dims in order))
    if at is None:
        return LocalShard(layout, None, ())
    return LocalShard(layout, layout.box(shape, at), layout.replicas(at))


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
    at = places[listed == rank].tolist()
    return Mesh(names, grid.shape, tuple(grid.flatten().tolist())), tuple(at[0]) if at else None


def _shard_order(
    placements: tuple[Any, ...], rank: int, shard_order: tuple[Any, ...], sizes: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """For each tensor dimension the mesh dimensions that split it, outermost first.

    Mesh dimensions split from left to right, except for `_StridedShard`, whose split factor is the
    number of pieces into which mesh dimensions to its right have split the dimension before, and
    if the DTensor states the order itself.
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
