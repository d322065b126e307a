"""Arrays in files without chunks: each box of an array consists of ranges of files.

Most formats of other systems are of this kind; their readers only find the place of each box.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.lib.stride_tricks import as_strided

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.arrays.layout import Layout
from unickpt.errors import CheckpointCorrupt
from unickpt.format.chunk_grid import Part, free_chunk
from unickpt.format.crc32 import Range
from unickpt.format.files import CheckedFiles, Files
from unickpt.format.index import ArrayEntry, Index
from unickpt.format.reader_protocol import Reader, Request
from unickpt.storage.errors import Failed, reading, reading_failed
from unickpt.trees import tree, tree_json

CHUNK_BYTES = 16 << 20
"""The bytes that a thread reads at a time: only the needed part of a chunk is read, so small chunks
would only cost planning."""
WHOLE = 1 << 62
"""The value of `most` for boxes that can only be read as a whole."""
# A range with this many times the bytes of a chunk is read as a whole; beyond it, in pieces.
_WASTE = 4
# Memory for elements that are read in order to be reordered.
_SPAN_BYTES = 16 << 20
# Nearer neighbours in the file are read with the gap between them: a request costs more.
_NEAR = 64 << 10
# Strides can repeat elements. The memory of an array may exceed its bytes in the files by this
# factor, or be this large.
_MOST_REPEATED, _SMALL = 1000, 64 << 20


class ByteRange(NamedTuple):
    """Bytes of a file, from `begin` up to `end`."""

    file: str
    begin: int
    end: int


class Elements(Protocol):
    """Elements of one dtype, numbered from 0."""

    def read(self, files: Files, first: int, out: Array) -> None:
        """Reads consecutive elements.

        Arguments:
            files: of the checkpoint.
            first: the number of the first element.
            out: one-dimensional and contiguous, of the array's dtype; receives them.

        Raises:
            Failed: the storage failed, or a file is too short.
        """

    def ranges(self, first: int, count: int, itemsize: int) -> Iterator[ByteRange]:
        """The place of consecutive elements.

        Arguments:
            first: the number of the first element.
            count: how many.
            itemsize: of the array's dtype, in bytes.
        """


@dataclass(frozen=True)
class FileRange:
    """Consecutive elements in a file.

    Arguments:
        file: below the checkpoint's location.
        offset: of the element 0, in bytes.
        big_endian: the byte order of the elements.
    """

    file: str
    offset: int
    big_endian: bool = False

    def read(self, files: Files, first: int, out: Array) -> None:
        files.read_into(self.file, self.offset + first * out.itemsize, out.view(np.uint8).data)
        if self.big_endian and out.itemsize > 1:
            out.byteswap(inplace=True)

    def ranges(self, first: int, count: int, itemsize: int) -> Iterator[ByteRange]:
        begin = self.offset + first * itemsize
        yield ByteRange(self.file, begin, begin + count * itemsize)


@dataclass(frozen=True)
class FileBox:
    """The place of the elements of a box of an array.

    Arguments:
        box: in the array's coordinates.
        elements: a sequence that contains them.
        first: the number of the box's first element in the sequence.
        strides: for each dimension, the distance of neighbours in the sequence; None for row-major
            order without gaps.
    """

    box: Box
    elements: Elements
    first: int = 0
    strides: tuple[int, ...] | None = None

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides, also for row-major order."""
        return row_major(self.box.shape) if self.strides is None else self.strides

    def ranges(self, itemsize: int) -> Iterator[ByteRange]:
        """The range of its elements, from the lowest to the highest."""
        if not self.box.size:
            return iter(())
        low, high = _span(self.box.shape, self.steps)
        return self.elements.ranges(self.first + low, high - low + 1, itemsize)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides in elements of an array in row-major order."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def whole(
    name: str, shape: Sequence[int], dtype: str, where: FileBox, most: int | None = None
) -> ArrayEntry:
    """The entry of an array that is one box of one file.

    Its chunks are ranges of the file, also if the elements are in another than row-major order.
    They have at most `most` bytes, by default `CHUNK_BYTES`.
    """
    extents = tuple(shape)
    return ArrayEntry(
        name,
        extents,
        dtype,
        _chunk(extents, dtype, where.steps, most),
        Layout.replicated(len(extents), 1),
    )


def of_boxes(
    name: str, shape: Sequence[int], dtype: str, boxes: Sequence[FileBox], most: int | None = None
) -> ArrayEntry:
    """The entry of an array that consists of several boxes, which must not overlap.

    Its chunks have at most `most` bytes, by default `CHUNK_BYTES`; with `WHOLE`, each box is one.
    """
    extents = tuple(shape)
    largest = tuple(max(file_box.box.shape[d] for file_box in boxes) for d in range(len(extents)))
    chunk = _chunk(largest, dtype, boxes[0].steps, most)
    return ArrayEntry(
        name, extents, dtype, chunk, boxes=tuple((file_box.box, (0,)) for file_box in boxes)
    )


def _chunk(
    shape: tuple[int, ...], dtype: str, steps: Sequence[int], most: int | None
) -> tuple[int, ...]:
    order = sorted(range(len(shape)), key=lambda d: (-abs(steps[d]), d))
    itemsize = dtypes.from_name(dtype).itemsize
    sizes = free_chunk([shape[d] for d in order], itemsize, most or CHUNK_BYTES)
    by_dim = dict(zip(order, sizes, strict=True))
    return tuple(by_dim[d] for d in range(len(shape)))


class RangeReader(Reader):
    """Reads boxes of arrays from ranges of files.

    Arguments:
        files: of the checkpoint.
        index: the arrays, with entries of `whole` or `of_boxes`.
        boxes: the places of an array's boxes by its name, in the order of the entry's boxes.
    """

    version, has_wide_checksums = "", True

    def __init__(self, files: Files, index: Index, boxes: Mapping[str, Sequence[FileBox]]) -> None:
        self.location, self.index = files.location, index
        self._files = files
        self._sizes: dict[str, int | None] = {}
        self._boxes = {
            name: {file_box.box.start: file_box for file_box in of_array}
            for name, of_array in boxes.items()
        }

    def check_backed(self, entry: ArrayEntry) -> None:
        itemsize = dtypes.from_name(entry.dtype).itemsize
        for file_box in self._boxes.get(entry.name, {}).values():
            if not file_box.box.size:
                continue
            stored, where = 0, f"{self.location}: array {entry.name!r} {file_box.box}"
            if file_box.first + _span(file_box.box.shape, file_box.steps)[0] < 0:
                raise CheckpointCorrupt(f"{where} begins before its stored data")
            for file, begin, end in file_box.ranges(itemsize):
                stored += end - begin
                if begin < 0 or not self._reaches(entry, file, end):
                    needs = f"needs bytes {begin} to {end} of {file}, which has fewer"
                    raise CheckpointCorrupt(f"{where} {needs}")
            if file_box.box.size * itemsize > max(_SMALL, _MOST_REPEATED * stored):
                repeats = f"repeats the {stored} bytes that are stored for it too often"
                raise CheckpointCorrupt(f"{where} {repeats}")

    def checking(self) -> Self:
        if isinstance(self._files, CheckedFiles):
            return self
        reader = copy.copy(self)
        reader._files = CheckedFiles(self._files)
        return reader

    def check_rest(self, index: int = 0, count: int = 1) -> Iterator[tuple[str, str]]:
        files = self._files
        if not isinstance(files, CheckedFiles):
            return
        for range_ in files.begun(index, count):
            try:
                files.complete(range_)
            except Failed as error:
                name = next((n for n in self._boxes if self._has(n, range_)), "")
                what = f"array {name!r}" if name else range_.file
                yield name, str(reading_failed(error, f"{self.location}: {what}"))

    def _has(self, name: str, bytes_of: Range) -> bool:
        """Whether an array has some bytes of a range."""
        return any(bytes_of in self._files.summed.within(*where) for where in self._ranges(name))

    def _ranges(self, name: str) -> Iterator[ByteRange]:
        itemsize = self.index.arrays[name].itemsize
        for file_box in self._boxes[name].values():
            if file_box.box.size:
                yield from file_box.ranges(itemsize)

    def unchecked(self) -> Sequence[str]:
        files = self._files
        return [
            name
            for name in self.index.arrays
            if name not in self._boxes
            or any(not files.summed.within(*where) for where in self._ranges(name))
        ]

    def stored_bytes(self) -> int | None:
        """The bytes that hold the boxes, each once; for arrays that are stored another way, all
        files that could hold them."""
        with reading(self.location):
            other_bytes = self._files.total({*self._files.here, *self._files.heads})
        if other_bytes is None and self.index.arrays.keys() - self._boxes.keys():
            return None
        names = self._boxes.keys() & self.index.arrays.keys()
        ranges = (where for name in names for where in self._ranges(name))
        return (other_bytes or 0) + _joint_length(ranges)

    def _reaches(self, entry: ArrayEntry, file: str, end: int) -> bool:
        """Whether a file has at least this many bytes."""
        with reading(f"{self.location}: array {entry.name!r}"):
            if file not in self._sizes:  # once: reading finds out if a file is shorter by then
                self._sizes[file] = self._files.size(file)
            size = self._sizes[file]
            if size is None:  # the storage does not report it
                self._files.read(file, end - 1, 1)
        return size is None or end <= size

    def read(self, requests: Sequence[Request]) -> Sequence[int]:
        for entry, part, number, out, _, box in requests:
            self.read_box(entry, part, box or part.chunk_box(number), out)
        return ()

    def reads_boxes(self, entry: ArrayEntry) -> bool:
        return entry.name in self._boxes

    def read_box(self, entry: ArrayEntry, part: Part, box: Box, out: Array) -> None:
        """Reads a box of a part."""
        file_box = self._boxes[entry.name][part.box.start]
        with reading(f"{self.location}: array {entry.name!r} {box}"):
            read_box(self._files, file_box, box.relative_to(part.box.start), out)


def _joint_length(ranges: Iterable[tuple[str, int, int]]) -> int:
    """The bytes of ranges of files; shared bytes count once."""
    total, last, done = 0, "", 0
    for file, begin, end in sorted(ranges):
        begin = max(begin, done) if file == last else begin
        if end > begin or file != last:
            total += max(0, end - begin)
            last, done = file, end
    return total


def read_box(files: Files, box: FileBox, local: Box, out: Array) -> None:
    """Reads a part of a box.

    Arguments:
        files: of the checkpoint.
        box: the box.
        local: the part, relative to the first element of the box.
        out: of the part's shape; receives it.

    Raises:
        Failed: the storage failed, or a file is too short.
    """
    _read(files, box, sum(a * s for a, s in zip(local.start, box.steps, strict=True)), out)


def _read(files: Files, file_box: FileBox, start: int, out: Array) -> None:
    """Fills an array, whose first element is `start` after the first of the box."""
    if not out.size:
        return
    steps = file_box.steps
    needed = [s for n, s in zip(out.shape, steps, strict=True) if n > 1]
    expected = [s for n, s in zip(out.shape, row_major(out.shape), strict=True) if n > 1]
    if needed == expected and out.flags.c_contiguous:
        file_box.elements.read(files, file_box.first + start, out.reshape(-1))
        return
    low, high = _span(out.shape, steps)
    longer = [d for d in range(out.ndim) if out.shape[d] > 1]
    far = max((abs(steps[d]) * out.itemsize for d in longer), default=0)
    dense = high - low < _WASTE * out.size or far < _NEAR
    if dense and (high - low) * out.itemsize <= _SPAN_BYTES:
        _read_span(files, file_box, start, out)
        return
    if dense:
        outer = max(longer, key=lambda d: (out.shape[d] - 1) * abs(steps[d]))
        most = _SPAN_BYTES // _WASTE // (abs(steps[outer]) * out.itemsize)
        count = min(max(1, most), -(-out.shape[outer] // 2))
    else:
        outer, count = max(longer, key=lambda d: abs(steps[d])), 1
    for index in range(0, out.shape[outer], count):
        piece = out[(slice(None),) * outer + (slice(index, index + count),)]
        _read(files, file_box, start + index * steps[outer], piece)


def _read_span(files: Files, file_box: FileBox, start: int, out: Array) -> None:
    """Fills an array from the elements between its lowest and its highest; as `_read`."""
    low, high = _span(out.shape, file_box.steps)
    span = np.empty(high - low + 1, out.dtype)
    file_box.elements.read(files, file_box.first + start + low, span)
    strides = tuple(s * out.itemsize for s in file_box.steps)
    out[...] = as_strided(span[-low:], out.shape, strides, writeable=False)


def _span(shape: Sequence[int], steps: Sequence[int]) -> tuple[int, int]:
    """The lowest and the highest element of a strided box, relative to its first."""
    ends = [(n - 1) * s for n, s in zip(shape, steps, strict=True)]
    return sum(min(0, end) for end in ends), sum(max(0, end) for end in ends)


# --- contents of headers, as a table --------------------------------------------------------------


@dataclass(frozen=True)
class TensorSource:
    """A tensor in files: a whole one, or a contiguous part.

    Arguments:
        dtype: the checkpoint's name of its dtype.
        shape: its extents.
        elements: a sequence that contains its elements.
        first: the number of its first element in the sequence.
        strides: in elements; None for row-major order without gaps.
    """

    dtype: str
    shape: tuple[int, ...]
    elements: Elements
    first: int = 0
    strides: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.count * dtypes.from_name(self.dtype).itemsize

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides, also for row-major order."""
        return row_major(self.shape) if self.strides is None else self.strides

    @property
    def is_row_major(self) -> bool:
        """Whether its elements follow each other in row-major order."""
        expected = row_major(self.shape)
        return all(
            n == 1 or a == b for n, a, b in zip(self.shape, self.steps, expected, strict=True)
        )

    @property
    def box(self) -> FileBox:
        """All of it, as a box of an array of its shape."""
        return FileBox(Box.whole(self.shape), self.elements, self.first, self.strides)

    def reshaped(self, shape: Sequence[int]) -> TensorSource:
        """The elements in another shape; only if they are in row-major order."""
        assert self.is_row_major, "checked by the caller"
        return TensorSource(self.dtype, tuple(shape), self.elements, self.first)


class ArrayTable:
    """The arrays and plain values of a checkpoint.

    Arguments:
        node: its tree; by default nested dicts, as the names of the arrays say.
    """

    def __init__(self, node: tree.Node | tree.Leaf | None = None) -> None:
        self._node = node
        self.entries: dict[str, ArrayEntry] = {}
        self.boxes: dict[str, Sequence[FileBox]] = {}
        """By array, for `RangeReader`."""
        self.aliases: dict[str, str] = {}
        self.values: dict[str, tree_json.Plain] = {}

    def add(self, name: str, tensor: TensorSource) -> None:
        """Adds an array that is one tensor."""
        where = tensor.box
        self.put(whole(name, tensor.shape, tensor.dtype, where), (where,))

    def put(self, entry: ArrayEntry, boxes: Sequence[FileBox]) -> None:
        """Adds an array that consists of several boxes."""
        self.entries[entry.name], self.boxes[entry.name] = entry, boxes

    def index(self, metadata: Mapping[str, Any] | None = None, processes: int = 1) -> Index:
        """The index of all that was added.

        Raises:
            ValueError: without a tree, if a name is both an array and a container.
        """
        names = (*self.entries, *self.aliases, *self.values)
        node = tree_json.from_names(names) if self._node is None else self._node
        return Index(
            tree_json.to_json(node), self.entries, aliases=self.aliases, values=self.values,
            metadata=metadata or {}, processes=processes,
        )  # fmt: skip
