"""Read plans: which chunks serve the requested boxes, and where their pieces go."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add, sub
from typing import TYPE_CHECKING, Any, NamedTuple

from unickpt.arrays import strided_copy
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.format import chunk_grid
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry
from unickpt.format.reader_protocol import Reader, Request
from unickpt.reading.targets import place

if TYPE_CHECKING:
    from unickpt.reading.recipes import Copy, ElementSource, Needed, Recipe


class TargetBox(NamedTuple):
    """A box of a target to fill."""

    name: str
    position: int
    box: Box
    recipe: Recipe


class Consumer(NamedTuple):
    """A buffer that takes elements from a stored array, and the elements that it needs."""

    needed: Needed
    buffer: Array
    source: ElementSource

    def pieces(self, box: Box) -> Iterator[Piece]:
        """The elements that it needs from a box of the stored array."""
        for copy in self.needed.copies(box):
            yield self.piece(copy)

    def piece(self, copy: Copy) -> Piece:
        """A copy with its destination."""
        out = strided_copy.view(self.buffer, copy.out, copy.out_steps, copy.shape)
        return Piece(copy, out, self.source)


class Piece(NamedTuple):
    """A piece of a box of a stored array, and its destination."""

    copy: Copy
    out: Array
    source: ElementSource

    def place(self, data: Array) -> None:
        """Copies the elements of the box to the destination."""
        copy = self.copy
        place(
            strided_copy.view(data, copy.source, copy.source_steps, copy.shape),
            self.out,
            self.source,
        )


@dataclass(slots=True)
class ChunkRead:
    """One chunk to read, and the destinations of its pieces.

    Arguments:
        entry, part, number: identify the chunk.
        box: of the chunk, or of the part of it that is read.
        row: of the digest table; None without verification.
        pieces: of the chunk.
    """

    entry: ArrayEntry
    part: Part
    number: int
    box: Box
    row: Any
    pieces: Sequence[Piece]

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return self.box.size * self.entry.itemsize

    def request(self, out: Array) -> Request:
        """This read, into memory of the box's shape."""
        is_part = self.box.size < self.part.chunk_box(self.number).size
        digest = None if is_part or self.row is None else int(self.row["digest"])
        box = self.box if is_part else None
        return Request(self.entry, self.part, self.number, out, digest, box)


def consumers_of(
    slots: Sequence[TargetBox], buffers: Mapping[str, Sequence[Array]]
) -> dict[str, tuple[ArrayEntry, list[Consumer]]]:
    """The consumers of each stored array, by its name."""
    consumers: dict[str, tuple[ArrayEntry, list[Consumer]]] = {}
    for name, position, box, recipe in slots:
        for source in recipe.sources:
            needed = source.within(box)
            if needed is not None:
                of_entry = consumers.setdefault(source.entry.name, (source.entry, []))[1]
                of_entry.append(Consumer(needed, buffers[name][position], source))
    return consumers


# Plans are cached for arrays with few chunks, where planning takes longer than reading. So the
# cache stays small, whatever is loaded.
_KEPT_PLANS, _KEPT_CHUNKS = 1024, 16


class Planner:
    """Plans which chunks are read; plans small arrays of one shape with the same needs once.

    Arguments:
        stored: the checkpoint.
        verify: whether chunks are checked against their digests.
    """

    def __init__(self, stored: Reader, verify: bool) -> None:
        self._stored, self.verify = stored, verify
        self._known: dict[Hashable, Sequence[_Planned]] = {}

    def reads(
        self, consumers: Mapping[str, tuple[ArrayEntry, list[Consumer]]]
    ) -> Iterator[ChunkRead]:
        """The chunks that consumers need."""
        for name, (entry, array_consumers) in consumers.items():
            table = self._stored.digests_of(name) if self.verify else None
            parts = chunk_grid.parts(entry)
            for part_number, number, row, box, copies in self._planned(
                entry, parts, array_consumers
            ):
                pieces = [array_consumers[which].piece(copy) for which, copy in copies]
                digest = None if table is None else table[row]
                yield ChunkRead(entry, parts[part_number], number, box, digest, pieces)

    def _planned(
        self, entry: ArrayEntry, parts: Sequence[Part], consumers: Sequence[Consumer]
    ) -> Iterable[_Planned]:
        if len(parts) != 1 or parts[0].count > _KEPT_CHUNKS:
            return _plan(parts, consumers)
        key = entry.shape, entry.chunk, *(consumer.needed for consumer in consumers)
        plan = self._known.get(key)
        if plan is None:
            if len(self._known) == _KEPT_PLANS:
                self._known.clear()
            plan = self._known[key] = list(_plan(parts, consumers))
        return plan


class _Planned(NamedTuple):
    """A chunk to read, of any array of one shape and grid.

    Arguments:
        part: its position among the array's parts.
        number: the chunk's number in the part.
        row: of the array's digest table.
        box: of the chunk.
        copies: each with the position of its consumer.
    """

    part: int
    number: int
    row: int
    box: Box
    copies: Sequence[tuple[int, Copy]]


def _plan(parts: Sequence[Part], consumers: Sequence[Consumer]) -> Iterator[_Planned]:
    first = 0
    for part_number, part in enumerate(parts):
        for number, which in sorted(by_chunk(part, consumers).items()):
            box = part.chunk_box(number)
            copies = [(w, copy) for w in which for copy in consumers[w].needed.copies(box)]
            if copies:
                yield _Planned(part_number, number, first + number, box, copies)
        first += part.count


_WORTH_A_READ = 256 << 10  # bytes: reading, or copying, them takes longer than one more read


def narrowed(read: ChunkRead) -> Iterator[ChunkRead]:
    """Reads of no more of the chunk than its pieces need: of the box around all of them, or of each
    if they are large or far apart; then they may be read into their destinations."""
    around = _around(read, read.pieces)
    if around.nbytes >= _WORTH_A_READ * len(read.pieces) > _WORTH_A_READ:
        parts = [_around(read, [piece]) for piece in read.pieces]
        if sum(part.nbytes for part in parts) <= around.nbytes:
            yield from parts
            return
    yield around


def _around(read: ChunkRead, pieces: Sequence[Piece]) -> ChunkRead:
    """A read of the box around some pieces of a chunk."""
    bounds = [piece.copy.bounds for piece in pieces]
    low = tuple(map(min, zip(*(start for start, _ in bounds), strict=True)))
    high = tuple(map(max, zip(*(stop for _, stop in bounds), strict=True)))
    box = Box(tuple(map(add, read.box.start, low)), tuple(map(add, read.box.start, high)))
    if box == read.box:
        return read if pieces is read.pieces else replace(read, pieces=pieces)
    moved = [
        piece._replace(copy=piece.copy._replace(source=tuple(map(sub, piece.copy.source, low))))
        for piece in pieces
    ]
    return replace(read, box=box, pieces=moved)


def by_chunk(part: Part, consumers: Iterable[Consumer]) -> dict[int, list[int]]:
    """The positions of the consumers of each chunk of a part."""
    positions: dict[int, list[int]] = {}
    for which, consumer in enumerate(consumers):
        for number in _chunks_of(part, consumer.needed.boxes):
            positions.setdefault(number, []).append(which)
    return positions


def _chunks_of(part: Part, boxes: Sequence[Box]) -> Iterable[int]:
    if len(boxes) == 1:
        return part.chunks_in(boxes[0])
    return {number for box in boxes for number in part.chunks_in(box)}
