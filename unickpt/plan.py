"""Planning, purely: chunk grids, parts, who writes which chunk, and which chunks serve a box.

Nothing here does I/O, knows a framework, or talks to another process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import xxhash

from unickpt.box import Box
from unickpt.index import ArrayEntry
from unickpt.layout import Layout

# A grid is left for parts where it would need chunks this much smaller than the fragments ask.
_TOLERANCE = 4
# Statistics and biases are smaller. All weights from one process would unbalance the writing.
_LITTLE_BYTES = 64 << 10


@dataclass(frozen=True)
class Part:
    """One stored zarr array that carries `box` of a global array in chunks of extent `chunk`."""

    key: str
    box: Box
    chunk: tuple[int, ...]

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each dimension."""
        return tuple(-(-n // c) for n, c in zip(self.box.shape, self.chunk, strict=True))

    @cached_property
    def count(self) -> int:
        return math.prod(self.grid)

    def chunk_box(self, number: int) -> Box:
        """The box, in global coordinates, of the chunk with a row-major number."""
        start, stop = [], []
        for n, c, a, b in reversed(
            list(zip(self.grid, self.chunk, self.box.start, self.box.stop, strict=True))
        ):
            number, at = divmod(number, n)
            start.append(a + at * c)
            stop.append(min(a + at * c + c, b))
        return Box(tuple(start[::-1]), tuple(stop[::-1]))

    def chunk_key(self, number: int) -> str:
        """The key of a chunk below the part's own: zarr v3's default encoding."""
        at = []
        for n in reversed(self.grid):
            number, index = divmod(number, n)
            at.append(str(index))
        return "/".join(["c", *at[::-1]])

    def chunks_in(self, box: Box) -> Iterator[int]:
        """Row-major numbers of the chunks that meet a box given in global coordinates."""
        common = self.box.intersect(box)
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
        for at in itertools.product(*ranges):
            yield sum(i * s for i, s in zip(at, strides, strict=True))


def free_chunk(shape: Sequence[int], itemsize: int, chunk_bytes: int) -> tuple[int, ...]:
    """Chunk extents for a box with no boundaries inside: near `chunk_bytes`, contiguous, balanced.

    Leading dimensions are split first, so that a chunk is contiguous in row-major memory.
    """
    chunk = [max(1, n) for n in shape]
    for dim in range(len(chunk)):
        rest = itemsize * math.prod(chunk[dim + 1 :])
        if chunk[dim] * rest <= chunk_bytes:
            break
        chunk[dim] = _balanced(chunk[dim], max(1, chunk_bytes // rest))
    return tuple(chunk)


def _balanced(extent: int, limit: int) -> int:
    """The extent of pieces of nearly equal size, as few as `limit` permits."""
    return -(-extent // -(-extent // limit))


@lru_cache(maxsize=4096)
def chunk_grid(
    shape: tuple[int, ...],
    itemsize: int,
    layout: Layout,
    chunk_bytes: int,
    chunk_shape: tuple[int, ...] | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Chooses chunks for an array so that no chunk has two writers.

    Arguments:
        shape: global shape.
        itemsize: bytes per element.
        layout: how the array is split; fragment boundaries must lie between chunks.
        chunk_bytes: wanted bytes of a chunk.
        chunk_shape: wanted extents instead; taken as upper bounds that are lowered to divide the
            fragment boundaries.

    Returns:
        The chunk extents, and the dimensions along whose intervals the array must be cut into
        parts, because no reasonable grid has a line on every boundary.
    """
    units, extents = [], []
    for dim in range(len(shape)):
        pieces = [p for p in layout.intervals(shape, dim) if p[0] < p[1]]
        extents.append(max((b - a for a, b in pieces), default=1))
        units.append(math.gcd(*(a for a, _ in pieces[1:])) if len(pieces) > 1 else 0)
    wanted = (
        [max(1, min(c, n)) for c, n in zip(chunk_shape, extents, strict=True)]
        if chunk_shape is not None
        else list(free_chunk(extents, itemsize, chunk_bytes))
    )
    chunk, cut = list(wanted), []
    for dim, (unit, want) in enumerate(zip(units, wanted, strict=True)):
        if unit:
            divisor = _near_divisor(unit, want)
            if divisor * _TOLERANCE < want:
                cut.append(dim)
            else:
                chunk[dim] = divisor
    return tuple(chunk), tuple(cut)


def _near_divisor(unit: int, want: int) -> int:
    """The largest divisor of `unit` that is at most `want`."""
    best = 1
    for low in range(1, math.isqrt(unit) + 1):
        if unit % low == 0:
            for divisor in (low, unit // low):
                if best < divisor <= want:
                    best = divisor
    return best


def parts(entry: ArrayEntry) -> list[Part]:
    """The parts of an array, in the order in which the digest table lists them."""
    if math.prod(entry.shape) == 0:
        return []
    if entry.boxes is not None:
        return [box_part(entry, box) for box, _ in entry.boxes]
    if not entry.cut:
        return [Part(entry.name, Box.whole(entry.shape), entry.chunk)]
    layout = entry.layout
    assert layout is not None
    ranges = [
        [p for p in layout.intervals(entry.shape, d) if p[0] < p[1]] if d in entry.cut else [(0, n)]
        for d, n in enumerate(entry.shape)
    ]
    return [
        box_part(entry, Box(tuple(a for a, _ in at), tuple(b for _, b in at)))
        for at in itertools.product(*ranges)
    ]


def numbered_parts(entry: ArrayEntry) -> Iterator[tuple[int, Part]]:
    """The parts of an array, each with the row of its first chunk in the array's digest table."""
    first = 0
    for part in parts(entry):
        yield first, part
        first += part.count


def box_part(entry: ArrayEntry, box: Box) -> Part:
    """The part that carries one box of an array of several parts; its origin is its name.

    In the dimensions where the box is smaller than the array, chunks are evened out so that the
    last one is hardly padded; in the others they stay on the array's grid.
    """
    chunk = tuple(
        c if (a, b) == (0, n) else _balanced(b - a, c)
        for a, b, n, c in zip(box.start, box.stop, entry.shape, entry.chunk, strict=True)
    )
    suffix = "part_" + "_".join(map(str, box.start))
    return Part(f"{entry.name}/{suffix}" if entry.name else suffix, box, chunk)


def share(name: str, box: Box, process: int, replicas: Sequence[int], count: int) -> list[int]:
    """Which of the `count` chunks of a replicated fragment a process writes.

    Every replica gets a contiguous run of nearly equal length; a stable hash says who begins, so
    that many small fragments spread over the replicas. All processes get the same answer alone.

    Returns:
        Positions within the fragment's chunks, ascending.
    """
    n = len(replicas)
    if n == 1:
        return list(range(count))
    first = xxhash.xxh3_64_intdigest(f"{name} {box}".encode()) % n
    me = replicas.index(process)
    return [
        k for k in range(count) if replicas[(first + k * n // max(count, n)) % n] == replicas[me]
    ]


def is_whole(entry: ArrayEntry, part: Part) -> bool:
    """Whether an array, of which this is a part, is a single chunk."""
    return part.count == 1 and part.box.shape == entry.shape


def is_little(nbytes: int) -> bool:
    """Whether an array has so few bytes that who writes it does not matter for the balance."""
    return nbytes <= _LITTLE_BYTES


def share_assumed(sizes: Sequence[int], whole: Sequence[bool], processes: int) -> list[int]:
    """Which process writes each chunk of the arrays that all processes are taken to hold.

    Arrays of a single chunk come from process 0, so that what belongs together stays together even
    where the processes differ: the smallest first, as many as are its equal share of all bytes, and
    all little ones. Of the rest each process has a run of chunks, so that all write as much.

    Arguments:
        sizes: bytes of each chunk.
        whole: for each chunk whether it is all of its array.
        processes: how many there are.
    """
    total, at = sum(sizes), 0
    first, writers = 0, [-1] * len(sizes)
    for number in sorted((n for n, is_all in enumerate(whole) if is_all), key=sizes.__getitem__):
        if not is_little(sizes[number]) and (at + sizes[number]) * processes > total:
            break
        writers[number] = 0
        at += sizes[number]
    if at * processes >= total and processes > 1:  # process 0 has enough to do
        first, processes, total, at = 1, processes - 1, total - at, 0
    for number, size in enumerate(sizes):
        if writers[number] < 0:
            writers[number] = first + (2 * at + size) * processes // (2 * total)
            at += size
    return writers
