"""DTensors: which box of the global array a rank holds, by device mesh and placements."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from unickpt.box import Box
from unickpt.layout import Layout, Mesh


def _types() -> tuple[type, ...]:
    if not dist.is_available():
        return ()
    from torch.distributed.tensor import DTensor

    return (DTensor,)


_DTENSOR = _types()  # not at the first save: this import takes half a second


def is_dtensor(leaf: object) -> bool:
    return isinstance(leaf, _DTENSOR)


class Place(NamedTuple):
    """What a rank holds of a DTensor.

    Arguments:
        layout: of the global array.
        coordinate: of this rank in the mesh; None where it is not in it.
        box: what it holds, which may be empty; None likewise.
    """

    layout: Layout
    coordinate: tuple[int, ...] | None
    box: Box | None

    @property
    def replicas(self) -> tuple[int, ...]:
        """The ranks that hold the same box, ascending."""
        return () if self.coordinate is None else self.layout.replicas(self.coordinate)


def place_of(leaf: Any) -> Place:
    """What this rank holds of a DTensor.

    Raises:
        TypeError: its placements give no box.
    """
    grid, at = _grid(leaf.device_mesh, dist.get_rank())
    order = _shard_order(leaf, grid.shape)
    layout = Layout(grid, tuple(tuple(grid.axes[m] for m in dims) for dims in order))
    shape = tuple(leaf.shape)
    return Place(layout, at, None if at is None else layout.box(shape, at))


@lru_cache(maxsize=64)
def _grid(mesh: Any, rank: int) -> tuple[Mesh, tuple[int, ...] | None]:
    """A device mesh in the order of its process groups, and where `rank` stands in it.

    Process groups sort their ranks, so collectives and FSDP2, and with them `full_tensor`, order
    the shards along a mesh dimension by rank, even where the mesh lists them otherwise.
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


def _shard_order(leaf: Any, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """For each tensor dimension the mesh dimensions that split it, outermost first.

    Mesh dimensions split from left to right, but for `_StridedShard`, whose split factor is the
    number of pieces into which mesh dimensions to its right have cut the dimension before, and
    where the DTensor tells the order itself.
    """
    order: list[list[int]] = [[] for _ in range(leaf.ndim)]
    placements, strided = leaf.placements, False
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
                "with pieces that do not adjoin; redistribute the DTensor to Shard or Replicate"
            )
        dims.insert(before.index(factor), mesh_dim)
    # Since torch 2.10 plain Shards may have been applied in another order; only the spec tells.
    told = () if strided else getattr(leaf._spec, "shard_order", None) or ()
    for dim, mesh_dims in told:
        order[dim] = list(mesh_dims)
    return [tuple(dims) for dims in order]
