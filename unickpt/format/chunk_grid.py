"""Chunk grids: the parts of an array and their chunks, and which chunks meet a box.

Nothing here does I/O, uses a framework, or communicates.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from unickpt.arrays.box import Box
from unickpt.arrays.layout import Layout
from unickpt.format.index import ArrayEntry

Intervals = Sequence[tuple[int, int]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]

# Parts replace one grid if the grid would need chunks smaller than wanted by this factor.
_TOLERANCE = 4
# Chunks of a process's devices are joined up to this size. Larger ones are saved as views of a
# device's memory, and read straight into it: joining them by a copy takes longer than the smaller
# number of chunks saves (measured: benchmarks/devices.py; as `verified_chunks.SMALL`).
_JOINED_BYTES = 64 << 10
# Replicas split chunks among them. An array does not show how many similar ones exist: for a
# hundred of them, each replica would write this many chunks.
_SHARES = 10
# Large arrays, which may be most of the model, are cut so that the busiest replica has at most this
# much more than the mean: arrays are large if an equal share is at least a chunk divided by this.
_EVEN, _LARGE = 1.05, 4
# For this, chunks become smaller than wanted by at most this factor. So many sizes are tried, which
# may be larger than an equal share, for whole rows.
_FINEST, _TRIES, _LEEWAY = 16, 16, 1.02
# In an array that is cut anyway, chunks end at the shard boundaries of so many processes, or else
# of fewer; a process whose shard ends within a chunk has to read all of it. For this, chunks shrink
# to no less than half of the wanted size, nor below this size: with 2 MiB, one process that
# transposes them takes a fifth longer (measured: benchmarks/ranks.py).
_SHARDS, _LEAST_FOR_SHARDS = 8, 4 << 20
WHOLE_LINK = 0
"""The link of the only value of a chunk that is stored whole."""
FULL_LINK = 1
"""The link of the full chunk of a composed one; those of the added values follow."""
_FULL, _ADDED = "full", "patch"
_MOST_KEPT = 4096  # chunks of a grid whose keys are cached, for the next part like it


@dataclass(slots=True, unsafe_hash=True)  # not frozen: see `adapter_protocol`
class Part:
    """One stored zarr array that carries `box` of a global array; never modified.

    Arguments:
        key: its name.
        box: the box that it carries.
        chunk: extents of a chunk.
        grid: number of chunks along each dimension.
        count: of all chunks.
    """

    key: str
    box: Box
    chunk: tuple[int, ...]
    grid: tuple[int, ...]
    count: int

    @classmethod
    def covering(cls, key: str, box: Box, chunk: tuple[int, ...]) -> Part:
        """The part that carries a box in chunks of some extents."""
        return cls(key, box, chunk, *grid_of(box.shape, chunk))

    @classmethod
    def whole(cls, key: str, shape: tuple[int, ...], chunk: tuple[int, ...]) -> Part:
        """The part that carries a whole array."""
        return _whole(key, shape, chunk)

    def linked(self, link: int) -> Part:
        """The part whose key, instead of this one's, leads to some values of the chunks.

        Arguments:
            link: which values: `WHOLE_LINK`, `FULL_LINK`, or a later one for added values.
        """
        if link == WHOLE_LINK:
            return self
        below = _FULL if link == FULL_LINK else f"{_ADDED}/{link - FULL_LINK}"
        return replace(self, key=f"{self.key}/{below}" if self.key else below)

    def chunk_box(self, number: int) -> Box:
        """The box, in global coordinates, of the chunk with a row-major number."""
        if self.count == 1:
            return self.box
        start, stop = [], []
        for n, c, a, b in reversed(
            list(zip(self.grid, self.chunk, self.box.start, self.box.stop, strict=True))
        ):
            number, index = divmod(number, n)
            start.append(a + index * c)
            stop.append(min(a + index * c + c, b))
        return Box(tuple(start[::-1]), tuple(stop[::-1]))

    def chunk_key(self, number: int) -> str:
        """The key of a chunk below the part's own: zarr v3's default encoding."""
        if self.count == 1:
            return only_key(len(self.chunk))
        indices = []
        for n in reversed(self.grid):
            number, index = divmod(number, n)
            indices.append(str(index))
        return "/".join(["c", *indices[::-1]])

    def chunks_in(self, box: Box) -> Iterator[int]:
        """Row-major numbers of the chunks that intersect a box in global coordinates."""
        common = box if box == self.box else self.box.intersect(box)
        if common is None:
            return
        if common == self.box:
            yield from range(self.count)
            return
        local = common.relative_to(self.box.start)
        ranges = [
            range(a // c, -(-b // c))
            for a, b, c in zip(local.start, local.stop, self.chunk, strict=True)
        ]
        strides = [math.prod(self.grid[d + 1 :]) for d in range(len(self.grid))]
        for indices in itertools.product(*ranges):
            yield sum(i * s for i, s in zip(indices, strides, strict=True))

    def runs_in(self, box: Box) -> Iterator[range]:
        """As `chunks_in`; consecutive numbers as one range."""
        if box == self.box:
            yield range(self.count)
            return
        run = range(0)
        for number in self.chunks_in(box):
            if run and number != run.stop:
                yield run
                run = range(0)
            run = range(run.start if run else number, number + 1)
        if run:
            yield run

    def sizes(self) -> Numbers:
        """The number of elements of each chunk, by its number; read-only."""
        return _sizes(self.box.shape, self.chunk)


@lru_cache(maxsize=64)
def _sizes(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Numbers:
    sizes = np.ones(1, np.int64)
    for n, c in zip(shape, chunk, strict=True):
        along = np.minimum(c, n - np.arange(0, n, c))
        sizes = np.multiply.outer(sizes, along).reshape(-1)
    sizes.flags.writeable = False
    return sizes


@lru_cache(maxsize=64)
def only_key(rank: int) -> str:
    """The key of the only chunk of a part."""
    return "/".join(["c", *"0" * rank])


@lru_cache(maxsize=4096)
def grid_of(shape: tuple[int, ...], chunk: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Number of chunks along each dimension, and of all."""
    grid = tuple(-(-n // c) for n, c in zip(shape, chunk, strict=True))
    return grid, math.prod(grid)


def free_chunk(
    shape: Sequence[int], itemsize: int, chunk_bytes: int, shards: int = 1
) -> tuple[int, ...]:
    """Chunk extents for a box without inner boundaries: near `chunk_bytes`, contiguous, balanced.

    Leading dimensions are split first, so that a chunk is contiguous in row-major memory.

    Arguments:
        shape: of the box.
        itemsize: bytes per element.
        chunk_bytes: the most bytes of a chunk, unless a single element has more.
        shards: a power of two; a box that is split has a line at the end of each of so many
            shards, if chunks of a reasonable size allow that; else of half as many, and so on.
    """
    chunk = [max(1, n) for n in shape]
    least_bytes = max(_LEAST_FOR_SHARDS, chunk_bytes // 2)
    for dim in range(len(chunk)):
        row_bytes = itemsize * math.prod(chunk[dim + 1 :])
        if chunk[dim] * row_bytes <= chunk_bytes:
            break
        extent, limit = chunk[dim], max(1, chunk_bytes // row_bytes)
        chunk[dim] = _for_shards(extent, limit, max(1, -(-least_bytes // row_bytes)), shards)
        shards //= -(-extent // chunk[dim])
    return tuple(chunk)


def _for_shards(extent: int, limit: int, least: int, shards: int) -> int:
    """The largest extent from `least` to `limit` that divides a shard; if there is none,
    for half as many shards, and so on. Frameworks make all shards equal but the last."""
    while shards > 1:
        shard = -(-extent // shards)
        for pieces in range(-(-shard // limit), shard // least + 1):
            if shard % pieces == 0:
                return shard // pieces
        shards //= 2
    return _balanced(extent, limit)


def _balanced(extent: int, limit: int) -> int:
    """The extent of the fewest pieces of nearly equal size that are at most `limit`."""
    return -(-extent // -(-extent // limit))


@dataclass(frozen=True)
class _Target:
    """The size and shape that chunks should have; see `chunk_grid` for the arguments."""

    itemsize: int
    chunk_bytes: int
    chunk_shape: tuple[int, ...] | None = None
    single: int | None = None

    def grid(self, pieces: Sequence[Intervals]) -> _AxisCuts:
        """The grid that has a line on every boundary of the intervals, if there is one."""
        extents = [max((b - a for a, b in intervals), default=1) for intervals in pieces]
        units = [
            math.gcd(*(a for a, _ in intervals[1:])) if len(intervals) > 1 else 0
            for intervals in pieces
        ]
        if self.single is not None:
            extents[self.single] = 1
        shards = _SHARDS // math.prod(max(1, len(intervals)) for intervals in pieces)
        targets = (
            [max(1, min(c, n)) for c, n in zip(self.chunk_shape, extents, strict=True)]
            if self.chunk_shape is not None
            else list(free_chunk(extents, self.itemsize, self.chunk_bytes, shards))
        )
        chunk, cut = list(targets), []
        for dim, (unit, target) in enumerate(zip(units, targets, strict=True)):
            if unit:
                divisor = _near_divisor(unit, target)
                if divisor * _TOLERANCE < target:
                    cut.append(dim)
                else:
                    chunk[dim] = divisor
        return _AxisCuts(tuple(chunk), tuple(cut), self.itemsize * math.prod(chunk))

    def near(self, nbytes: float) -> _Target:
        """The same with chunks of about this many bytes, if that is less."""
        return replace(self, chunk_bytes=max(1, min(self.chunk_bytes, int(nbytes))))


class _AxisCuts(NamedTuple):
    """The extents of a chunk, the dimensions along which there are parts, and a chunk's bytes."""

    chunk: tuple[int, ...]
    cut: tuple[int, ...]
    nbytes: int


@lru_cache(maxsize=4096)
def chunk_grid(
    shape: tuple[int, ...],
    itemsize: int,
    layout: Layout,
    chunk_bytes: int,
    chunk_shape: tuple[int, ...] | None = None,
    single: int | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Chooses chunk extents for an array so that no chunk has two writers.

    Arguments:
        shape: global shape.
        itemsize: bytes per element.
        layout: how the array is split; its boundaries must lie between chunks.
        chunk_bytes: target size of a chunk in bytes.
        chunk_shape: target extents instead; upper bounds, lowered to divide these boundaries.
        single: a dimension along which every chunk has one element.

    Returns:
        The chunk extents, and the dimensions along which the array is cut into one part per
        interval, because no reasonable grid has a line on every boundary.
    """
    dims = range(len(shape))
    devices = [[p for p in layout.intervals(shape, d) if p[0] < p[1]] for d in dims]
    processes = [[*layout.process_intervals(shape, d)] for d in dims]
    target = _Target(itemsize, chunk_bytes, chunk_shape, single)
    replicas = len(layout.replicas((0,) * len(layout.mesh.shape)))
    grid = _for_replicas(target, devices, processes, replicas)
    if 2 * grid.nbytes < _JOINED_BYTES and processes != devices:
        joined = _for_replicas(target.near(_JOINED_BYTES), processes, processes, replicas)
        if joined.nbytes > grid.nbytes and not joined.cut:
            grid = joined
    return grid.chunk, grid.cut


def _for_replicas(
    target: _Target, pieces: Sequence[Intervals], process_pieces: Sequence[Intervals], replicas: int
) -> _AxisCuts:
    """A grid whose chunks can be split evenly among the processes that hold the same box.

    Arguments:
        target: of the grid.
        pieces: the intervals between which it has lines.
        process_pieces: the intervals that a process holds.
        replicas: how many processes hold the same.
    """
    extents = [max((b - a for a, b in intervals), default=0) for intervals in process_pieces]
    size = target.itemsize * math.prod(extents)
    if replicas == 1 or target.chunk_shape is not None or not size:
        return target.grid(pieces)

    def busiest(grid: _AxisCuts) -> float:
        count = math.prod(-(-n // c) for n, c in zip(extents, grid.chunk, strict=True))
        return -(-count // replicas) * grid.nbytes * replicas / size

    least = max(1, target.chunk_bytes // _FINEST)
    is_large = size * _LARGE >= replicas * target.chunk_bytes
    target = target.near(max(least, _SHARES * size / replicas))
    best = target.grid(pieces)
    if not is_large:
        return best
    first = -(-size // (replicas * target.chunk_bytes))
    for per_replica in range(first, min(first + _TRIES, size // (replicas * least) + 1)):
        if busiest(best) <= _EVEN:
            break
        finer = target.near(_LEEWAY * size / (replicas * per_replica)).grid(pieces)
        if busiest(finer) < busiest(best):
            best = finer
    return best


def _near_divisor(unit: int, want: int) -> int:
    """The largest divisor of `unit` that is at most `want`."""
    best = 1
    for low in range(1, math.isqrt(unit) + 1):
        if unit % low == 0:
            for divisor in (low, unit // low):
                if best < divisor <= want:
                    best = divisor
    return best


@lru_cache(maxsize=4096)  # a save needs the parts of each array several times
def _whole(key: str, shape: tuple[int, ...], chunk: tuple[int, ...]) -> Part:
    return Part.covering(key, Box.whole(shape), chunk)


def parts(entry: ArrayEntry) -> list[Part]:
    """The parts of an array, in the order in which the digest table lists them."""
    if math.prod(entry.shape) == 0:
        return []
    if entry.boxes is not None:
        return [box_part(entry, box) for box, _ in entry.boxes]
    if not entry.cut:
        return [Part.whole(entry.name, entry.shape, entry.chunk)]
    layout = entry.layout
    assert layout is not None
    ranges = [
        [p for p in layout.intervals(entry.shape, d) if p[0] < p[1]] if d in entry.cut else [(0, n)]
        for d, n in enumerate(entry.shape)
    ]
    return [
        box_part(entry, Box(tuple(a for a, _ in intervals), tuple(b for _, b in intervals)))
        for intervals in itertools.product(*ranges)
    ]


def numbered_parts(entry: ArrayEntry) -> Iterator[tuple[int, Part]]:
    """The parts of an array, each with the row of its first chunk in the array's digest table."""
    first = 0
    for part in parts(entry):
        yield first, part
        first += part.count


def parts_of(entry: ArrayEntry, boxes: Iterable[Box]) -> list[Part]:
    """As `parts`; before all boxes of an array are known, the parts of one process.

    Arguments:
        entry: the array.
        boxes: the boxes that this process holds.
    """
    return [box_part(entry, box) for box in boxes] if entry.boxes == () else parts(entry)


def box_part(entry: ArrayEntry, box: Box) -> Part:
    """The part that carries one box of an array of several parts; it is named by its origin.

    In dimensions where the box is smaller than the array, chunks are balanced so that the last one
    has little padding; in the others they keep the array's chunk extent.
    """
    chunk = tuple(
        c if (a, b) == (0, n) else _balanced(b - a, c)
        for a, b, n, c in zip(box.start, box.stop, entry.shape, entry.chunk, strict=True)
    )
    suffix = "part_" + "_".join(map(str, box.start))
    return Part.covering(f"{entry.name}/{suffix}" if entry.name else suffix, box, chunk)


def chunk_count(entry: ArrayEntry) -> int:
    """Number of chunks of all parts of an array.

    Its time does not depend on the number of chunks, because the index is untrusted.
    """
    if entry.boxes is None and not entry.cut:
        return grid_of(entry.shape, entry.chunk)[1]
    if math.prod(entry.shape) == 0:
        return 0
    if entry.boxes is not None:
        return sum(box_part(entry, box).count for box, _ in entry.boxes)
    return math.prod(_count_along(entry, dim) for dim in range(len(entry.shape)))


def _count_along(entry: ArrayEntry, dim: int) -> int:
    n, chunk = entry.shape[dim], entry.chunk[dim]
    if dim not in entry.cut:
        return -(-n // chunk)
    assert entry.layout is not None, "the index is checked: only arrays with a layout are cut"
    lengths = Counter({n: 1})
    for axis in entry.layout.dims[dim]:
        lengths = _split(lengths, entry.layout.mesh.size(axis))
    # Balancing the chunks of a part does not change their number.
    return sum(times * -(-length // chunk) for length, times in lengths.items())


def _split(lengths: Counter[int], pieces: int) -> Counter[int]:
    """The count of each length after every interval is cut into pieces as by layouts."""
    out: Counter[int] = Counter()
    for length, times in lengths.items():
        step = -(-length // pieces)
        out[step] += times * (length // step)
        if length % step:
            out[length % step] += times
    return out


def total_chunks(arrays: Mapping[str, ArrayEntry]) -> int:
    """The number of chunks of all arrays, and so of rows of the digest table."""
    return sum(map(chunk_count, arrays.values()))


def chunk_spans(arrays: Mapping[str, ArrayEntry]) -> dict[str, slice]:
    """The rows of each array's chunks in the digest table."""
    stops = list(accumulate(map(chunk_count, arrays.values())))
    return dict(zip(arrays, map(slice, [0, *stops], stops), strict=True))


def join_key(prefix: str, key: str) -> str:
    """A key below a prefix."""
    return f"{prefix}/{key}" if prefix else key


def chunk_key(part: Part, number: int) -> str:
    """The key of a chunk in the database."""
    return join_key(part.key, part.chunk_key(number))


def chunk_keys(part: Part, numbers: range) -> list[str]:
    """The keys of some chunks in the database."""
    if part.count > _MOST_KEPT:
        return [chunk_key(part, number) for number in numbers]
    prefix = join_key(part.key, "")
    return [prefix + end for end in _ends(part.grid)[numbers.start : numbers.stop]]


@lru_cache(maxsize=64)
def _ends(grid: tuple[int, ...]) -> list[str]:
    """The ends of the keys of a grid's chunks, by the chunks' numbers."""
    return ["/".join(["c", *map(str, indices)]) for indices in itertools.product(*map(range, grid))]
