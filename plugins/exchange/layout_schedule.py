"""Who reads a chunk and who gets which part of it, computed from layouts alone.

A layout says by arithmetic which processes need a chunk: along each dimension, the pieces that
meet it are neighbours. So every process finds the reader of a chunk without the needs of the
others. It computes only the chunks that it needs, array by array, in arrays of NumPy; for those
that it reads, also who gets what.

Between nodes, a box goes to one of the processes that need it on each other node, its relay, which
passes it on within the node. A different one relays each chunk.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import pairwise
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from unickpt.extend import (
    ArrayEntry,
    Dim,
    ElementSource,
    Part,
    Unchanged,
    chunk_count,
    linear_index,
    numbered_parts,
)
from unickpt.plugins.exchange.shared_read import Hop, SharedChunk, moved_bytes
from unickpt.types import Box, Layout, Mesh

Numbers = np.ndarray[Any, np.dtype[np.int64]]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2 ** 64 divided by the golden ratio
_RELAY = np.uint64(0x6A09E667F3BCC909)  # 2 ** 64 times the root of 2, less 1: not in step with that
_HALF = np.uint64(32)  # bits
_BOX_BYTES = 512  # of memory for a box that is sent or received, beyond its elements
_MOST_KEPT = 1 << 16  # chunks whose plans are kept until they are read


class DimensionMap(NamedTuple):
    """How a dimension of a stored array maps to a dimension of a requested one.

    Arguments:
        target: the requested array's dimension; -1 if the stored one has a single index.
        shift: the stored index minus the requested one.
        start, stop: the stored indices that are mapped.
    """

    target: int
    shift: int
    start: int
    stop: int


class _Pieces:
    """The non-empty pieces into which the axes of a layout split a dimension, by arithmetic.

    Every block of the outermost axis is split alike, but for the last, which may be smaller.

    Arguments:
        n: the extent of the dimension.
        sizes: of the axes, outermost first.
        strides: of the axes, in the numbers of devices.
    """

    def __init__(self, n: int, sizes: Sequence[int], strides: Sequence[int]) -> None:
        self._n, self.count, self._stride = n, int(n > 0), 0
        self._step, self._blocks = max(1, n), int(n > 0)
        self._block: _Pieces | None = None  # None without axes
        if sizes and n:
            self._stride = strides[0]
            self._step = -(-n // sizes[0])
            self._blocks, remainder = divmod(n, self._step)
            self._block = _pieces(self._step, sizes[1:], strides[1:])
            self._last = _pieces(remainder, sizes[1:], strides[1:])
            self.count = self._blocks * self._block.count + self._last.count

    def position(self, coordinates: Sequence[int]) -> int:
        """The number of a piece among the non-empty ones, by its index along each axis; -1 if it is
        empty."""
        if self._block is None:
            return self.count - 1
        outer = coordinates[0]
        block = self._block if outer < self._blocks else self._last
        inner = -1 if outer > self._blocks else block.position(coordinates[1:])
        return -1 if inner < 0 else outer * self._block.count + inner

    def pieces_at(self, index: Numbers) -> Numbers:
        """The numbers of the pieces at some indices of the dimension."""
        if self._block is None:
            return np.zeros_like(index)
        if self._block.count == 1:
            return index // self._step
        outer, inner = np.divmod(index, self._step)
        return outer * self._block.count + self._nested(outer, inner, _Pieces.pieces_at)

    def start(self, piece: Numbers) -> Numbers:
        """Where some pieces begin."""
        if self._block is None:
            return np.zeros_like(piece)
        if self._block.count == 1:
            return piece * self._step
        outer, inner = self._divided(piece, self._block.count)
        return outer * self._step + self._nested(outer, inner, _Pieces.start)

    def stop(self, piece: Numbers) -> Numbers:
        """Where some pieces end."""
        if self._block is None:
            return np.full_like(piece, self._n)
        if self._block.count == 1:
            return np.minimum(piece * self._step + self._step, self._n)
        outer, inner = self._divided(piece, self._block.count)
        return outer * self._step + self._nested(outer, inner, _Pieces.stop)

    def ends(self, piece: int) -> tuple[int, int]:
        """Where a piece begins and ends."""
        number = np.array(piece)
        return int(self.start(number)), int(self.stop(number))

    def device(self, piece: Numbers) -> Numbers:
        """What some pieces add to the numbers of their devices."""
        if self._block is None:
            return np.zeros_like(piece)
        if self._block.count == 1:
            return piece * self._stride
        outer, inner = self._divided(piece, self._block.count)
        return outer * self._stride + self._nested(outer, inner, _Pieces.device)

    def _divided(self, piece: Numbers, per_block: int) -> tuple[Numbers, Numbers]:
        """The blocks of some pieces, and their numbers in these."""
        outer = np.minimum(piece // per_block, self._blocks)
        return outer, piece - outer * per_block

    def _nested(
        self, outer: Numbers, inner: Numbers, function: Callable[[_Pieces, Numbers], Numbers]
    ) -> Numbers:
        """A function of pieces within blocks of the outermost axis."""
        assert self._block is not None, "there is an axis"
        values = function(self._block, inner)
        if not self._last.count:
            return values
        return np.where(outer < self._blocks, values, function(self._last, inner))


@lru_cache(maxsize=4096)
def _pieces(n: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> _Pieces:
    return _Pieces(n, sizes, strides)


@dataclass(frozen=True)
class Demand:
    """The elements of a stored array that the processes of a mesh need for one requested array.

    Arguments:
        layout: of the requested array; its mesh has indices in the group that loads.
        shape: of the requested array.
        maps: of each dimension of the stored array.
        fixed: the requested array's other dimensions, each with its only index.
    """

    layout: Layout
    shape: tuple[int, ...]
    maps: tuple[DimensionMap, ...]
    fixed: tuple[tuple[int, int], ...] = ()

    @classmethod
    def from_source(
        cls, source: ElementSource, layout: Layout, shape: Sequence[int]
    ) -> Demand | None:
        """The demand of an array that has a source; None if it is more than shifted and transposed
        blocks."""
        shape = tuple(shape)
        if isinstance(source, Unchanged):
            return cls(layout, shape, tuple(DimensionMap(d, 0, 0, n) for d, n in enumerate(shape)))
        stored = [_line(dim, source.extents) for dim in source.source]
        requested = [_line(dim, source.extents) for dim in source.out]
        axes = [sorted(axis for _, axis in filter(None, lines) if axis >= 0)
                for lines in (stored, requested)]  # fmt: skip
        if None in (*stored, *requested) or axes[0] != axes[1] or len({*axes[0]}) < len(axes[0]):
            return None
        targets = {axis: (dim, first) for dim, (first, axis) in enumerate(filter(None, requested))}
        maps = []
        for first, axis in filter(None, stored):
            dim, begin = targets[axis] if axis >= 0 else (-1, first)
            extent = source.extents[axis] if axis >= 0 else 1
            maps.append(DimensionMap(dim, first - begin, first, first + extent))
        fixed = [
            (dim, first) for dim, (first, axis) in enumerate(filter(None, requested)) if axis < 0
        ]
        return cls(layout, shape, tuple(maps), tuple(fixed))

    @cached_property
    def pieces(self) -> list[_Pieces]:
        """Of each dimension of the requested array."""
        mesh = self.layout.mesh
        strides = dict(zip(mesh.axes, _strides(mesh.shape), strict=True))
        return [
            _pieces(n, tuple(map(mesh.size, axes)), tuple(strides[axis] for axis in axes))
            for n, axes in zip(self.shape, self.layout.dims, strict=True)
        ]

    @cached_property
    def replicas(self) -> Numbers:
        """What replicas add to the number of a device."""
        return _replicas(self.layout.mesh, frozenset(a for dim in self.layout.dims for a in dim))

    @cached_property
    def fixed_device(self) -> int:
        """What the fixed dimensions add to the number of a device."""
        return sum(int(self.pieces[dim].device(np.array(n))) for dim, n in self.fixed_pieces)

    @cached_property
    def fixed_pieces(self) -> list[tuple[int, int]]:
        """The fixed dimensions, each with its piece."""
        return [
            (dim, int(self.pieces[dim].pieces_at(np.array(index)))) for dim, index in self.fixed
        ]

    def held_by(self, process: int) -> list[tuple[int, ...]]:
        """The non-empty pieces that a process holds, along each dimension of the requested array;
        in the order in which boxes are sent."""
        mesh, places = self.layout.mesh, set[tuple[int, ...]]()
        for device in devices_of(mesh, process):
            coordinate = dict(zip(mesh.axes, _unravel(device, mesh.shape), strict=True))
            along = zip(self.pieces, self.layout.dims, strict=True)
            places.add(tuple(p.position([coordinate[axis] for axis in axes]) for p, axes in along))
        dims = [m.target for m in self.maps if m.target >= 0]
        return sorted((h for h in places if -1 not in h), key=lambda h: [h[dim] for dim in dims])

    def holders_of(self, place: Sequence[int]) -> Numbers:
        """The processes that hold a piece, as from `held_by`: one for each device."""
        along = zip(self.pieces, place, strict=True)
        device = sum(int(pieces.device(np.array(piece))) for pieces, piece in along)
        holders: Numbers = self.layout.mesh.grid.ravel()[device + self.replicas]
        return holders

    def boxes_of(self, process: int) -> set[Box]:
        """The boxes of the requested array that a process holds."""
        boxes = set[Box]()
        for place in self.held_by(process):
            ends = [p.ends(n) for p, n in zip(self.pieces, place, strict=True)]
            boxes.add(Box(tuple(start for start, _ in ends), tuple(stop for _, stop in ends)))
        return boxes

    def stored_box(self, place: Sequence[int]) -> Box | None:
        """The box of the stored array that a piece needs; None if it needs none."""
        if any(place[dim] != piece for dim, piece in self.fixed_pieces):
            return None
        starts, stops = list[int](), list[int]()
        for mapped in self.maps:
            start, stop = mapped.start, mapped.stop
            if mapped.target >= 0:
                begin, end = self.pieces[mapped.target].ends(place[mapped.target])
                start, stop = max(start, begin + mapped.shift), min(stop, end + mapped.shift)
            starts.append(start)
            stops.append(stop)
        if any(a >= b for a, b in zip(starts, stops, strict=True)):
            return None
        return Box(tuple(starts), tuple(stops))


def _line(dim: Dim, extents: Sequence[int]) -> tuple[int, int] | None:
    """The first index of a dimension, and the axis along which it advances, -1 if along none; None
    if it does not advance in steps of 1 along a single axis."""
    index = linear_index(dim)
    steps = [(axis, step) for axis, step in index.steps if extents[axis] != 1]
    if not steps:
        return index.constant, -1
    (axis, step), *more_steps = steps
    return None if more_steps or step != 1 else (index.constant, axis)


@lru_cache(maxsize=64)
def _replicas(mesh: Mesh, used: frozenset[str]) -> Numbers:
    free = [
        np.arange(n) * stride
        for axis, n, stride in zip(mesh.axes, mesh.shape, _strides(mesh.shape), strict=True)
        if axis not in used
    ]
    return reduce(np.add.outer, free, np.zeros((), np.int64)).ravel()


@lru_cache(maxsize=256)
def devices_of(mesh: Mesh, process: int) -> list[int]:
    """The numbers of a process's devices in the mesh."""
    devices: list[int] = np.flatnonzero(mesh.grid.ravel() == process).tolist()
    return devices


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _unravel(number: int, shape: Sequence[int]) -> list[int]:
    return [number // stride % n for n, stride in zip(shape, _strides(shape), strict=True)]


class Receivers(NamedTuple):
    """Who gets which box of a chunk: for each box the process, its ends along each dimension, and
    the number of the piece, which all replicas of it share.

    All processes that need the chunk count, also the one that reads it.
    """

    processes: Numbers
    start: Numbers
    stop: Numbers
    pieces: Numbers

    @property
    def boxes(self) -> dict[int, list[Box]]:
        """The boxes of each process."""
        boxes: dict[int, list[Box]] = {}
        rows = zip(self.processes.tolist(), self.start.tolist(), self.stop.tolist(), strict=True)
        for process, start, stop in rows:
            boxes.setdefault(process, []).append(Box(tuple(start), tuple(stop)))
        return boxes


class _Crossing:
    """The pieces of a demand that meet chunks of a part of a stored array.

    Along each dimension of the part and for each index of its grid from the range: `start` and
    `stop` of the elements that are needed, the first piece that meets them, and how many do.

    Arguments:
        part: the part.
        demand: the demand.
        ranges: the indices of the grid along each dimension.
    """

    def __init__(self, part: Part, demand: Demand, ranges: Sequence[range]) -> None:
        self._demand, self._part = demand, part
        self._lows = [indices.start for indices in ranges]
        self._holders = demand.layout.mesh.grid.ravel()
        self._start, self._stop = list[Numbers](), list[Numbers]()
        self._first, self._count = list[Numbers](), list[Numbers]()
        for dim, (mapped, indices) in enumerate(zip(demand.maps, ranges, strict=True)):
            chunk, box = part.chunk[dim], part.box
            begin = box.start[dim] + chunk * np.arange(indices.start, indices.stop)
            start = np.maximum(begin, mapped.start)
            stop = np.minimum(np.minimum(begin + chunk, box.stop[dim]), mapped.stop)
            first, last = np.zeros_like(start), np.zeros_like(start)
            if mapped.target >= 0:
                pieces = demand.pieces[mapped.target]
                first = pieces.pieces_at(start - mapped.shift)
                last = pieces.pieces_at(np.maximum(stop - 1, start) - mapped.shift)
            self._start.append(start)
            self._stop.append(stop)
            self._first.append(first)
            self._count.append(np.where(start < stop, last - first + 1, 0))

    def indices(self, numbers: Numbers) -> list[Numbers]:
        """The indices of chunks along each dimension, from the range's start."""
        grid = self._part.grid
        unravelled = np.unravel_index(numbers, grid) if grid else ()
        return [index - low for index, low in zip(unravelled, self._lows, strict=True)]

    def needed_by(self, place: Sequence[int]) -> tuple[Numbers, Numbers]:
        """The numbers of the chunks that meet a piece, and how many elements of each it needs.

        Arguments:
            place: the piece, as from `Demand.held_by`.
        """
        numbers, sizes = np.zeros(1, np.int64), np.ones(1, np.int64)
        if self._demand.stored_box(place) is None:
            return numbers[:0], sizes[:0]
        for dim, stride in enumerate(_strides(self._part.grid)):
            first, piece = self._first[dim], self._piece(dim, place)
            indices = np.flatnonzero((first <= piece) & (piece < first + self._count[dim]))
            start, stop = self._ends(dim, indices, piece)
            numbers = np.add.outer(numbers, (self._lows[dim] + indices) * stride).ravel()
            sizes = np.multiply.outer(sizes, stop - start).ravel()
        return numbers, sizes

    def count_at(self, indices: Sequence[Numbers]) -> Any:
        """The number of devices that need each of some chunks."""
        return _product(len(self._demand.replicas), self._count, indices)

    def sent_at(self, indices: Sequence[Numbers], most: int | None) -> Any:
        """The most elements that the reader of each of some chunks sends.

        Arguments:
            indices: of the chunks.
            most: how many processes it sends a box to; None for all that need it.
        """
        pairs = zip(self._start, self._stop, strict=True)
        sizes = [np.maximum(stop - start, 0) for start, stop in pairs]
        replicas = len(self._demand.replicas)
        return _product(replicas if most is None else min(replicas, most), sizes, indices)

    def process_at(self, indices: Sequence[Numbers], which: Numbers) -> Numbers:
        """For each of some chunks the process of a device that needs it.

        Arguments:
            indices: of the chunks.
            which: of the devices that need the chunk, as `count_at` counts them.
        """
        demand = self._demand
        device: Any = demand.fixed_device
        if len(demand.replicas) > 1:
            which, replica = np.divmod(which, len(demand.replicas))
            device = device + demand.replicas[replica]
        for dim in reversed(range(len(indices))):
            index, target = indices[dim], demand.maps[dim].target
            if target >= 0:
                which, piece = np.divmod(which, self._count[dim][index])
                device = device + demand.pieces[target].device(self._first[dim][index] + piece)
        processes: Numbers = self._holders[np.broadcast_to(device, which.shape)]
        return processes

    def receivers(self, number: int) -> Receivers:
        """Who gets which box of a chunk."""
        demand, rank = self._demand, len(self._part.grid)
        device, counts = np.full(1, demand.fixed_device, np.int64), list[int]()
        ends = list[tuple[Numbers, Numbers]]()
        for dim, (index,) in enumerate(self.indices(np.array([number]))):
            first, count = int(self._first[dim][index]), int(self._count[dim][index])
            target, pieces = demand.maps[dim].target, np.arange(first, first + count)
            start, stop = self._ends(dim, index, pieces)
            ends.append((np.broadcast_to(start, count), np.broadcast_to(stop, count)))
            counts.append(count)
            along = demand.pieces[target].device(pieces) if target >= 0 else 0 * pieces
            device = np.add.outer(device, along).ravel()
        processes = self._holders[np.add.outer(device, demand.replicas)]
        box = np.repeat(np.arange(len(device)), len(demand.replicas))
        processes = processes.ravel()
        if not demand.layout.mesh.has_one_device_each:  # a process gets each box once
            _, once = np.unique(np.stack([box, processes]), axis=1, return_index=True)
            once.sort()
            box, processes = box[once], processes[once]
        start, stop = np.empty((len(box), rank), np.int64), np.empty((len(box), rank), np.int64)
        piece = box
        for dim in reversed(range(rank)):
            if counts[dim] == 1:
                start[:, dim], stop[:, dim] = ends[dim][0][0], ends[dim][1][0]
                continue
            box, along = np.divmod(box, max(1, counts[dim]))
            start[:, dim], stop[:, dim] = ends[dim][0][along], ends[dim][1][along]
        return Receivers(processes, start, stop, piece)

    def _piece(self, dim: int, place: Sequence[int]) -> int:
        target = self._demand.maps[dim].target
        return place[target] if target >= 0 else 0

    def _ends(self, dim: int, index: Any, piece: Any) -> tuple[Any, Any]:
        """Where the elements begin and end that a piece needs of a chunk, along a dimension."""
        start, stop = self._start[dim][index], self._stop[dim][index]
        mapped = self._demand.maps[dim]
        if mapped.target < 0:
            return start, stop
        pieces, piece = self._demand.pieces[mapped.target], np.asarray(piece)
        return (
            np.maximum(start, pieces.start(piece) + mapped.shift),
            np.minimum(stop, pieces.stop(piece) + mapped.shift),
        )


def _product(start: int, factors: Sequence[Numbers], indices: Sequence[Numbers]) -> Any:
    """The product of a factor of each dimension, for each of some indices."""
    product: Any = np.int64(start)
    for along, index in zip(factors, indices, strict=True):
        product = product * (along[index] if len(along) > 1 else along[0])
    return product


class ArrayPlan(Protocol):
    """The chunks of a stored array that a process reads or receives.

    `rows` are their rows in the array's digest table, ascending. `held_sums` are the bytes of
    memory that the exchange of each and of all before it needs in this process, at most.
    """

    rows: Numbers

    @property
    def held_sums(self) -> Numbers: ...

    def chunk(self, position: int) -> SharedChunk:
        """The chunk of a row, with the boxes of this process; if it reads it, of all processes."""


class LayoutPlan:
    """An `ArrayPlan` from the layouts of the requested arrays.

    Arguments:
        entry: the stored array.
        demands: of all requested arrays that have elements of it; in the same order on all
            processes.
        process: the index of this process.
        seed: the number of the array's first chunk among those of the checkpoint.
        nodes: the number of each process's node; None if nothing is relayed.
    """

    def __init__(
        self,
        entry: ArrayEntry,
        demands: Sequence[Demand],
        process: int,
        seed: int = 0,
        nodes: Numbers | None = None,
    ) -> None:
        self.entry, self._process, self._seed, self._nodes = entry, process, seed, nodes
        self._boxes = list[Box]()  # that this process needs, in the order in which they are sent
        self._mates = list[Numbers]()  # for each, the processes of this node that need it
        pieces = list[tuple[int, tuple[int, ...]]]()
        for which, demand in enumerate(demands):
            for place in demand.held_by(process):
                box = demand.stored_box(place)
                if box is not None:
                    self._boxes.append(box)
                    pieces.append((which, place))
                    if nodes is not None:
                        holders = demand.holders_of(place)
                        self._mates.append(np.unique(holders[nodes[holders] == nodes[process]]))
        self._parts, self._begins = list[_PlannedPart](), [0]
        self._by_piece = list[tuple[Numbers, Numbers, Numbers]]()  # mates, rows, sizes
        rows, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for first, part in numbered_parts(entry) if pieces else ():
            common = [box for box in map(part.box.intersect, self._boxes) if box is not None]
            if not common:
                continue
            ends = map(_grid_range, *_bounding(common), part.box.start, part.chunk)
            ranges = [range(low, high) for low, high in ends]
            crossings = [_Crossing(part, demand, ranges) for demand in demands]
            needed = [crossings[which].needed_by(place) for which, place in pieces]
            numbers, counts = _joined(needed)
            self._by_piece += [
                (mates, first + of_piece[0], of_piece[1])
                for mates, of_piece in zip(self._mates, needed, strict=False)
                if len(mates) > 1
            ]
            self._parts.append(_PlannedPart(first, part, crossings))
            self._begins.append(self._begins[-1] + len(numbers))
            rows.append(first + numbers)
            sizes.append(counts)
        self.rows, self._sizes = np.concatenate(rows), np.concatenate(sizes)

    @cached_property
    def _readers_and_sent(self) -> tuple[Numbers, Numbers]:
        readers, sent = np.empty_like(self.rows), np.zeros_like(self.rows)  # bytes
        # A relay for each other node, and all of the own one.
        most = None if self._nodes is None else _most_receivers(self._nodes)
        ends = pairwise(self._begins)
        for (begin, end), (first, _, crossings) in zip(ends, self._parts, strict=True):
            rows = self.rows[begin:end]
            indices = crossings[0].indices(rows - first)
            counts = [np.broadcast_to(c.count_at(indices), rows.shape) for c in crossings]
            which = _spread(self._seed + rows, sum(counts[1:], counts[0]))
            for crossing, count in zip(crossings, counts, strict=True):
                sent[begin:end] += self.entry.itemsize * crossing.sent_at(indices, most)
                sent[begin:end] += _BOX_BYTES * count
                if len(crossings) == 1:
                    readers[begin:end] = crossing.process_at(indices, which)
                    break
                matches = np.flatnonzero((which >= 0) & (which < count))
                chosen = crossing.process_at([index[matches] for index in indices], which[matches])
                readers[begin + matches] = chosen
                which = which - count
        return readers, sent

    @property
    def readers(self) -> Numbers:
        """The process that reads each chunk; one of those that need it."""
        return self._readers_and_sent[0]

    @cached_property
    def held_sums(self) -> Numbers:
        readers, sent = self._readers_and_sent
        own_bytes = self.entry.itemsize * self._sizes + _BOX_BYTES
        for mates, rows, sizes in self._by_piece:
            positions = np.searchsorted(self.rows, rows)
            passes = (self._relays(rows, mates) == self._process) & self._is_remote(
                readers[positions]
            )
            more = (len(mates) - 1) * (self.entry.itemsize * sizes + _BOX_BYTES)
            np.add.at(own_bytes, positions[passes], more[passes])
        return np.cumsum(np.where(readers == self._process, sent, own_bytes))

    def _relays(self, rows: Numbers, mates: Numbers) -> Numbers:
        """Of processes of a node that need the same box, the one that gets it for each row."""
        return mates[_spread(self._seed + rows, np.full(len(rows), len(mates)), _RELAY)]

    def _is_remote(self, readers: Numbers) -> Any:
        assert self._nodes is not None, "else nothing is relayed"
        return self._nodes[readers] != self._nodes[self._process]

    @property
    def received(self) -> Numbers:
        """The bytes of each chunk that this process gets from another one."""
        return self.entry.itemsize * np.where(self.readers == self._process, 0, self._sizes)

    def receivers(self, position: int) -> Receivers:
        """Who gets which box of a chunk that this process reads."""
        first, _, crossings = self._part_of(position)
        every = [crossing.receivers(int(self.rows[position]) - first) for crossing in crossings]
        if len(every) == 1:
            return every[0]
        firsts = np.cumsum([0, *(r.pieces.max(initial=-1) + 1 for r in every)])
        every = [
            r._replace(pieces=r.pieces + first) for r, first in zip(every, firsts, strict=False)
        ]
        return Receivers(*map(np.concatenate, zip(*every, strict=True)))

    def chunk(self, position: int) -> SharedChunk:
        first, part, _ = self._part_of(position)
        row, reader = int(self.rows[position]), int(self.readers[position])
        chunk_box = part.chunk_box(row - first)
        common = list(map(chunk_box.intersect, self._boxes))
        boxes = {self._process: [box for box in common if box is not None]}
        hops: list[Hop] | None = None
        if self._nodes is not None:
            is_read = reader == self._process
            hops = list(self.sends(position) if is_read else self._last_hops(row, reader, common))
        elif reader == self._process:
            boxes = self.receivers(position).boxes
        return SharedChunk(self.entry, part, row - first, row, chunk_box, reader, boxes, hops)

    def sends(self, position: int) -> Iterator[Hop]:
        """From this process, which reads a chunk, to each on its node, and to others' relays."""
        receivers = self.receivers(position)
        for n in self.first_receivers(position, receivers).tolist():
            box = Box(tuple(receivers.start[n].tolist()), tuple(receivers.stop[n].tolist()))
            yield Hop(box, self._process, int(receivers.processes[n]))

    def first_receivers(self, position: int, receivers: Receivers) -> Numbers:
        """The rows of the receivers of a chunk to which this process, which reads it, sends it."""
        assert self._nodes is not None, "else nothing is relayed"
        processes, nodes = receivers.processes, self._nodes[receivers.processes]
        order = np.lexsort((processes, nodes, receivers.pieces))  # mates stand together
        alike = np.stack([receivers.pieces, nodes])[:, order]
        begins = np.flatnonzero(np.diff(alike, prepend=-1).any(axis=0))
        counts = np.diff(begins, append=len(order))
        numbers = np.full(len(begins), self._seed + self.rows[position])
        chosen = _spread(numbers, counts, _RELAY)
        is_first = nodes == self._nodes[self._process]
        is_first[order[begins + chosen]] = True
        return np.flatnonzero(is_first & (processes != self._process))

    def _last_hops(self, row: int, reader: int, boxes: Sequence[Box | None]) -> Iterator[Hop]:
        """To this process, and from it if it is the relay."""
        rows = np.array([row])
        is_remote = bool(self._is_remote(np.array([reader]))[0])
        for box, mates in zip(boxes, self._mates, strict=True):
            if box is None:
                continue
            relay = int(self._relays(rows, mates)[0]) if is_remote else self._process
            if relay != self._process:
                yield Hop(box, relay, self._process, is_relayed=True)
                continue
            yield Hop(box, reader, self._process)
            for mate in mates.tolist() if is_remote else ():
                if mate != self._process:
                    yield Hop(box, self._process, mate, is_relayed=True)

    def _part_of(self, position: int) -> _PlannedPart:
        return self._parts[bisect_right(self._begins, position) - 1]


class _PlannedPart(NamedTuple):
    """A part of a stored array, with the row of its first chunk, and each demand for it."""

    first: int
    part: Part
    crossings: Sequence[_Crossing]


def _bounding(boxes: Sequence[Box]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ends of the smallest box that contains boxes."""
    low = tuple(map(min, zip(*(box.start for box in boxes), strict=True)))
    return low, tuple(map(max, zip(*(box.stop for box in boxes), strict=True)))


def _grid_range(start: int, stop: int, origin: int, chunk: int) -> tuple[int, int]:
    """The indices of a grid's chunks between two ends."""
    return (start - origin) // chunk, -(-(stop - origin) // chunk)


def _joined(needed: Sequence[tuple[Numbers, Numbers]]) -> tuple[Numbers, Numbers]:
    """Numbers of chunks, each once and ascending, with the sums of their sizes."""
    if len(needed) == 1:
        return needed[0]
    numbers = np.concatenate([of_piece for of_piece, _ in needed])
    numbers, positions = np.unique(numbers, return_inverse=True)
    sums = np.zeros(len(numbers), np.int64)
    np.add.at(sums, positions, np.concatenate([sizes for _, sizes in needed]))
    return numbers, sums


def _most_receivers(nodes: Numbers) -> int:
    """How many processes a reader sends a box to, at most."""
    counts = np.bincount(nodes)
    return int(np.count_nonzero(counts) + counts.max())


def _spread(numbers: Numbers, counts: Numbers, factor: np.uint64 = _GOLDEN) -> Numbers:
    """For each number one from 0 to below a count, so that neighbours are spread evenly: a sequence
    of low discrepancy, which is in step with no layout."""
    high = (numbers.astype(np.uint64) * factor) >> _HALF
    return ((high * counts.astype(np.uint64)) >> _HALF).astype(np.int64)


class WantedPlan:
    """An `ArrayPlan` from the needs of all processes.

    Arguments:
        chunks: of the array that this process reads or receives, ascending.
        process: the index of this process.
    """

    def __init__(self, chunks: Sequence[SharedChunk], process: int) -> None:
        self._chunks, self.rows = chunks, np.array([chunk.row for chunk in chunks], np.int64)
        moved = [moved_bytes(chunk)[process] for chunk in chunks]
        self.held_sums = np.cumsum(moved, dtype=np.int64)

    def chunk(self, position: int) -> SharedChunk:
        return self._chunks[position]


PlanT = TypeVar("PlanT", bound=ArrayPlan)


class JobPlan(Generic[PlanT]):
    """The chunks of all arrays that a process reads or receives, in the order of the checkpoint.

    Places are numbers of chunks among all of the checkpoint, the same on all processes.

    Arguments:
        arrays: all stored arrays.
        plan: makes the plan of one, given the place of its first chunk; None if this process needs
            nothing of it.
        most_bytes: the memory of this process for a round, unless a single chunk needs more.
    """

    def __init__(
        self,
        arrays: Iterable[ArrayEntry],
        plan: Callable[[ArrayEntry, int], PlanT | None],
        most_bytes: int,
    ) -> None:
        self._plan, self._most_bytes = plan, most_bytes
        self._entries, self._firsts, self.end = list[ArrayEntry](), list[int](), 0
        self.counts = dict[str, int]()
        """The number of chunks of each array that this process needs."""
        self._plans = dict[int, PlanT]()  # of arrays that are near, or small
        rows = 0
        for entry in arrays:
            array_plan = plan(entry, self.end)
            if array_plan is not None and len(array_plan.rows):
                rows += len(array_plan.rows)
                if rows <= _MOST_KEPT:
                    self._plans[len(self._entries)] = array_plan
                self.counts[entry.name] = len(array_plan.rows)
                self._entries.append(entry)
                self._firsts.append(self.end)
            self.end += chunk_count(entry)

    def round_end(self, start: int) -> int:
        """The latest place at which a round can end that starts at a place."""
        planned_bytes = 0
        for first, array_plan in self._plans_from(start):
            rows, sums = array_plan.rows, array_plan.held_sums
            begin = int(np.searchsorted(rows, start - first))
            before = int(sums[begin - 1]) if begin else 0
            fit = int(np.searchsorted(sums, before + self._most_bytes - planned_bytes, "right"))
            if fit < len(rows):
                alone = not planned_bytes and fit == begin  # this chunk may be larger
                return first + int(rows[fit]) + alone
            planned_bytes += int(sums[-1]) - before
        return self.end

    def chunks(self, start: int, stop: int) -> list[SharedChunk]:
        """The chunks of a round that starts and ends at places; rounds are taken in their order."""
        return [plan.chunk(n) for plan, numbers in self.parts(start, stop) for n in numbers]

    def parts(self, start: int, stop: int) -> Iterator[tuple[PlanT, range]]:
        """As `chunks`, but of each array its plan, and the positions of the chunks in it."""
        for first, array_plan in self._plans_from(start):
            if first >= stop:
                break
            yield (
                array_plan,
                range(*np.searchsorted(array_plan.rows, [start - first, stop - first]).tolist()),
            )
        for number in [n for n in self._plans if n + 1 < bisect_right(self._firsts, stop)]:
            del self._plans[number]

    def _plans_from(self, start: int) -> Iterator[tuple[int, PlanT]]:
        """The plans of the arrays from a place on, each with the place of its first chunk."""
        for number in range(max(0, bisect_right(self._firsts, start) - 1), len(self._firsts)):
            if number not in self._plans:
                array_plan = self._plan(self._entries[number], self._firsts[number])
                assert array_plan is not None, "this process needs the array"
                self._plans[number] = array_plan
            yield self._firsts[number], self._plans[number]
