"""Which data-parallel rank a process is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from unickpt.extend import adapters, current_group


@dataclass(frozen=True)
class Ranks:
    """Which data-parallel rank this process is, and of how many.

    Processes that differ only by tensor, pipeline or context parallelism see the same samples and
    have the same rank; one of them saves the loader's state, and all of them load it.

    Arguments:
        rank: data-parallel rank of this process, 0 to `count - 1`.
        count: number of data-parallel ranks.
        writes: whether this process saves; true on one process of each rank.

    Raises:
        ValueError: there is no such rank.

    Example:
        >>> Ranks(3, 8)
        Ranks(rank=3, count=8, writes=True)
    """

    rank: int = 0
    count: int = 1
    writes: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.count:
            raise ValueError(f"there is no rank {self.rank} of {self.count} data-parallel ranks")

    @classmethod
    def of_job(cls) -> Self:
        """Each process of the job is a rank of its own, as without other kinds of parallelism.

        Raises:
            ValueError: JAX and torch each report a job.
        """
        group = current_group(adapters())
        return cls(group.index, group.count)

    @classmethod
    def of_mesh(cls, mesh: Any, *axes: str) -> Self:
        """The rank of this process along some axes of a mesh.

        Arguments:
            mesh: torch's `DeviceMesh` of all processes that save, or JAX's `Mesh`.
            axes: those along which processes see other samples, outermost first, such as
                `"dp_replicate", "dp_shard"`.

        Raises:
            ValueError: the mesh has no such axis, does not contain this process, or (of JAX)
                processes share some samples, but not all.

        Example:
            >>> import jax
            >>> mesh = jax.make_mesh((1,), ("data",))
            >>> Ranks.of_mesh(mesh, "data")
            Ranks(rank=0, count=1, writes=True)
        """
        names = tuple(getattr(mesh, "mesh_dim_names", None) or mesh.axis_names)
        missing = [axis for axis in axes if axis not in names]
        if missing or not axes:
            raise ValueError(f"the mesh has no axis {missing[:1] or axes}; its axes are {names}")
        axis_numbers = [names.index(axis) for axis in axes]
        if hasattr(mesh, "axis_names"):
            return cls._of_jax(mesh, axis_numbers)
        coordinate, shape = mesh.get_coordinate(), tuple(mesh.shape)
        if coordinate is None:
            raise ValueError("this process is not in the mesh")
        indices, sizes = [coordinate[a] for a in axis_numbers], [shape[a] for a in axis_numbers]
        other_indices = [c for a, c in enumerate(coordinate) if a not in axis_numbers]
        rank = int(np.ravel_multi_index(indices, sizes))
        return cls(rank, int(np.prod(sizes)), not any(other_indices))

    @classmethod
    def _of_jax(cls, mesh: Any, axis_numbers: list[int]) -> Self:
        seen: dict[int, set[tuple[int, ...]]] = {}
        for index, device in np.ndenumerate(mesh.devices):
            seen.setdefault(device.process_index, set()).add(tuple(index[a] for a in axis_numbers))
        local = {device.process_index for device in mesh.local_devices}
        if not local:
            raise ValueError("no device of this process is in the mesh")
        parts = sorted({tuple(sorted(coordinates)) for coordinates in seen.values()})
        if sum(map(len, parts)) != len(set().union(*parts)):
            raise ValueError(
                "along these axes, processes of the mesh have some samples in common, but not all: "
                "give Ranks(rank, count, writes)"
            )
        (process,) = local
        part = tuple(sorted(seen[process]))
        first = min(p for p, coordinates in seen.items() if tuple(sorted(coordinates)) == part)
        return cls(parts.index(part), len(parts), process == first)
