"""Mesh and Layout: the box of an array that each device, and so each process, holds."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any

import numpy as np

from unickpt.arrays.box import Box

Coordinate = tuple[int, ...]


@dataclass(frozen=True)
class Mesh:
    """A named device grid, as JAX's `Mesh` and torch's `DeviceMesh(mesh_dim_names=)`.

    Arguments:
        axes: name of each axis, all different.
        shape: number of devices along each axis.
        processes: process index of each device, row-major.

    Example:
        >>> Mesh(("data", "model"), (1, 2), (0, 0)).size("model")
        2
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    processes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(set(self.axes)) != len(self.axes) or len(self.axes) != len(self.shape):
            raise ValueError(f"mesh axes {self.axes} and shape {self.shape} do not fit together")
        if any(n < 1 for n in self.shape) or math.prod(self.shape) != len(self.processes):
            raise ValueError(f"mesh of shape {self.shape} lists {len(self.processes)} devices")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # cached: a mesh may have thousands of devices
        return hash((self.axes, self.shape, self.processes))

    @cached_property
    def grid(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The process of each device, in the shape of the mesh."""
        return np.asarray(self.processes, dtype=np.int64).reshape(self.shape)

    @cached_property
    def has_one_device_each(self) -> bool:
        """Whether no process has several devices."""
        return len(set(self.processes)) == len(self.processes)

    def size(self, axis: str) -> int:
        """Number of devices along `axis`."""
        return self.shape[self.axes.index(axis)]

    def coordinates(self, process: int) -> list[Coordinate]:
        """Coordinates of the devices that belong to `process`."""
        return list(map(tuple, np.argwhere(self.grid == process).tolist()))

    def __str__(self) -> str:
        axes = ", ".join(f"{a}={n}" for a, n in zip(self.axes, self.shape, strict=True))
        return f"Mesh({axes})"


@dataclass(frozen=True)
class Layout:
    """A mesh, and for each array dimension the mesh axes that split it, outermost first.

    A dimension of `n` elements is cut by its axes in order, each time into pieces of
    `ceil(extent / axis size)` elements (the last ones shorter or empty). This is JAX's
    `PartitionSpec` and torch's placements with their shard order; axes that no dimension names
    hold replicas.

    Example:
        >>> mesh = Mesh(("x",), (2,), (0, 1))
        >>> Layout(mesh, (("x",), ())).box((5, 2), (1,))
        Box(start=(3, 0), stop=(5, 2))
    """

    mesh: Mesh
    dims: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        used = [axis for dim in self.dims for axis in dim]
        unknown = [axis for axis in used if axis not in self.mesh.axes]
        if unknown or len(set(used)) != len(used):
            raise ValueError(f"layout {self.dims} does not fit {self.mesh}")

    @classmethod
    def replicated(cls, rank: int, processes: int) -> Layout:
        """Every one of `processes` processes holds the whole array of `rank` dimensions."""
        return _replicated(rank, processes)

    @property
    def spec(self) -> tuple[str | tuple[str, ...] | None, ...]:
        """The mesh axes per dimension in PartitionSpec's notation, e.g. `("data", None)`."""
        return tuple(None if not dim else dim[0] if len(dim) == 1 else dim for dim in self.dims)

    def intervals(self, shape: Sequence[int], dim: int) -> tuple[tuple[int, int], ...]:
        """The `(start, stop)` of every piece of one dimension, outermost axis slowest."""
        return _intervals(shape[dim], tuple(self.mesh.size(axis) for axis in self.dims[dim]))

    def process_intervals(self, shape: Sequence[int], dim: int) -> tuple[tuple[int, int], ...]:
        """The non-empty intervals of one dimension between boundaries of *processes*.

        As `intervals`, but neighbours are joined if, along all other dimensions, the same processes
        hold both. Every box of these intervals is held whole by the same processes.

        Example:
            >>> layout = Layout(Mesh(("x",), (4,), (0, 0, 1, 1)), (("x",),))
            >>> layout.process_intervals((12,), 0)
            ((0, 6), (6, 12))
        """
        return _process_intervals(self, tuple(shape))[dim]

    def box(self, shape: Sequence[int], coordinate: Coordinate) -> Box:
        """The box of an array of `shape` that the device at `coordinate` holds."""
        if len(shape) != len(self.dims):
            raise ValueError(f"layout of rank {len(self.dims)} does not fit shape {tuple(shape)}")
        positions = dict(zip(self.mesh.axes, coordinate, strict=True))
        starts, stops = [], []
        for dim, axes in enumerate(self.dims):
            piece = 0
            for axis in axes:
                piece = piece * self.mesh.size(axis) + positions[axis]
            start, stop = self.intervals(shape, dim)[piece]
            starts.append(start)
            stops.append(stop)
        return Box(tuple(starts), tuple(stops))

    def replicas(self, coordinate: Coordinate) -> tuple[int, ...]:
        """The processes that hold the same box as the device at `coordinate`, ascending."""
        used = {axis for dim in self.dims for axis in dim}
        pick = tuple(
            c if axis in used else slice(None)
            for axis, c in zip(self.mesh.axes, coordinate, strict=True)
        )
        return tuple(sorted({*self.mesh.grid[pick].ravel().tolist()}))

    def fragments(self, shape: Sequence[int]) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Every distinct non-empty box with the processes that hold it."""
        used = {axis for dim in self.dims for axis in dim}
        ranges = [
            range(n) if axis in used else range(1)
            for axis, n in zip(self.mesh.axes, self.mesh.shape, strict=True)
        ]
        for coordinate in itertools.product(*ranges):
            box = self.box(shape, coordinate)
            if not box.empty:
                yield box, self.replicas(coordinate)

    def local(self, shape: Sequence[int], process: int) -> dict[Box, tuple[int, ...]]:
        """The distinct non-empty boxes of `process`, each with the processes that hold it.

        They lie between boundaries of processes (`process_intervals`): neighbouring devices of the
        same processes hold one box.
        """
        intervals = _process_intervals(self, tuple(shape))
        boxes: dict[Box, tuple[int, ...]] = {}
        for coordinate in self.mesh.coordinates(process):
            box = self.box(shape, coordinate)
            if box.empty:
                continue
            within = [
                dim_intervals[bisect_right(dim_intervals, n, key=itemgetter(0)) - 1]
                for dim_intervals, n in zip(intervals, box.start, strict=True)
            ]
            joined = Box(tuple(a for a, _ in within), tuple(b for _, b in within))
            if joined not in boxes:
                boxes[joined] = self.replicas(coordinate)
        return boxes

    def __str__(self) -> str:
        return "(" + ", ".join(repr(s) for s in self.spec) + ") on " + str(self.mesh)


@lru_cache(maxsize=256)
def _intervals(n: int, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    pieces = [(0, n)]
    for size in sizes:
        split = []
        for start, stop in pieces:
            step = -(-(stop - start) // size)
            cuts = [min(start + k * step, stop) for k in range(size + 1)]
            split += list(itertools.pairwise(cuts))
        pieces = split
    return tuple(pieces)


@lru_cache(maxsize=256)
def _process_intervals(
    layout: Layout, shape: tuple[int, ...]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each dimension the intervals of `Layout.process_intervals`."""
    pieces = [layout.intervals(shape, dim) for dim in range(len(shape))]
    filled = [[n for n, (a, b) in enumerate(dim_intervals) if a < b] for dim_intervals in pieces]
    intervals = [[p for p in dim_intervals if p[0] < p[1]] for dim_intervals in pieces]
    if all(filled) and not layout.mesh.has_one_device_each:
        owners = _owners(layout, [len(dim_intervals) for dim_intervals in pieces])[np.ix_(*filled)]
        for dim, dim_intervals in enumerate(intervals):
            low, high = np.delete(owners, -1, dim), np.delete(owners, 0, dim)
            other_dims = tuple(d for d in range(owners.ndim) if d != dim)
            dim_intervals[:] = _joined(dim_intervals, (low == high).all(axis=other_dims))
    return tuple(map(tuple, intervals))


def _joined(intervals: Sequence[tuple[int, int]], same: Iterable[bool]) -> list[tuple[int, int]]:
    """Joins intervals with their predecessors if `same` is true; it has an item for all but the
    first."""
    joined_intervals = list(intervals[:1])
    for (start, stop), joins in zip(intervals[1:], same, strict=True):
        if joins:
            joined_intervals[-1] = joined_intervals[-1][0], stop
        else:
            joined_intervals.append((start, stop))
    return joined_intervals


def _owners(layout: Layout, counts: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The processes that hold each piece, along the last axis, ascending, and again if they do so
    with several devices.

    Arguments:
        layout: of rank n.
        counts: the pieces along each of the n dimensions.
    """
    used = [axis for dim in layout.dims for axis in dim]
    axes = [*used, *(axis for axis in layout.mesh.axes if axis not in used)]
    grid = layout.mesh.grid.transpose([layout.mesh.axes.index(axis) for axis in axes])
    return np.sort(grid.reshape(*counts, -1), axis=-1)


@lru_cache(maxsize=256)
def _replicated(rank: int, processes: int) -> Layout:
    if processes == 1:
        return Layout(Mesh((), (), (0,)), ((),) * rank)
    return Layout(Mesh(("process",), (processes,), tuple(range(processes))), ((),) * rank)
