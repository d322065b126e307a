"""Arrays that lie in files without chunks: each box of an array is a range of a file.

Most formats of other systems are of this kind; their readers only find out which box is where.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.arrays.layout import Layout
from unickpt.errors import CheckpointCorrupt
from unickpt.format.chunk_grid import Part, free_chunk
from unickpt.format.files import Files
from unickpt.format.index import ArrayEntry, Index
from unickpt.format.reader import Reader
from unickpt.storage.errors import Failed, reading_failed

CHUNK_BYTES = 4 << 20
"""What one request reads at most, as far as the order of the elements allows."""
# A range with this many times the bytes of a chunk is read as a whole; beyond it, in pieces.
_WASTE = 4
# Neighbours that are nearer in the file are read with what lies between them: a request costs more.
_NEAR = 64 << 10
# Strides can repeat elements. What an array takes in memory may exceed its bytes in the files by
# this factor, or be this large.
_MOST_REPEATED, _SMALL = 1000, 64 << 20


@dataclass(frozen=True)
class FileBox:
    """A box of an array in a file.

    Arguments:
        box: in the array's coordinates.
        file: below the checkpoint's location.
        offset: of the box's first element in the file, in bytes.
        strides: for each dimension, the distance of neighbours in elements; None for row-major
            order without gaps.
        big_endian: the byte order of the elements.
    """

    box: Box
    file: str
    offset: int
    strides: tuple[int, ...] | None = None
    big_endian: bool = False

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides, also for row-major order."""
        return row_major(self.box.shape) if self.strides is None else self.strides


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides in elements of an array in row-major order."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def whole(name: str, shape: Sequence[int], dtype: str, where: FileBox) -> ArrayEntry:
    """The entry of an array that is one box of one file.

    Its chunks are ranges of the file, also if the elements are in another than row-major order.
    """
    extents = tuple(shape)
    return ArrayEntry(
        name,
        extents,
        dtype,
        _chunk(extents, dtype, where.steps),
        Layout.replicated(len(extents), 1),
    )


def of_boxes(name: str, shape: Sequence[int], dtype: str, boxes: Sequence[FileBox]) -> ArrayEntry:
    """The entry of an array that consists of several boxes, which must not overlap."""
    extents = tuple(shape)
    largest = tuple(max(found.box.shape[d] for found in boxes) for d in range(len(extents)))
    chunk = _chunk(largest, dtype, boxes[0].steps)
    return ArrayEntry(
        name, extents, dtype, chunk, boxes=tuple((found.box, (0,)) for found in boxes)
    )


def _chunk(shape: tuple[int, ...], dtype: str, steps: Sequence[int]) -> tuple[int, ...]:
    order = sorted(range(len(shape)), key=lambda d: (-abs(steps[d]), d))
    sizes = free_chunk([shape[d] for d in order], dtypes.from_name(dtype).itemsize, CHUNK_BYTES)
    by_dim = dict(zip(order, sizes, strict=True))
    return tuple(by_dim[d] for d in range(len(shape)))


class RangeReader(Reader):
    """Reads ranges of files.

    Arguments:
        files: of the checkpoint.
        index: the arrays, with entries of `whole` or `of_boxes`.
        boxes: by the name of the array, where its boxes are; in the order of the entry's.
    """

    version = ""

    def __init__(self, files: Files, index: Index, boxes: Mapping[str, Sequence[FileBox]]) -> None:
        self.location, self.index = files.location, index
        self._files = files
        self._boxes = {
            name: {found.box.start: found for found in of_array} for name, of_array in boxes.items()
        }

    def check_backed(self, entry: ArrayEntry) -> None:
        itemsize = dtypes.from_name(entry.dtype).itemsize
        for found in self._boxes.get(entry.name, {}).values():
            if not found.box.size:
                continue
            low, high = _span(found.box.shape, found.steps)
            begin, end = found.offset + low * itemsize, found.offset + (high + 1) * itemsize
            if begin < 0 or not self._reaches(entry, found.file, end):
                raise CheckpointCorrupt(
                    f"{self.location}: array {entry.name!r} {found.box} needs bytes {begin} to "
                    f"{end} of {found.file}, which has fewer"
                )
            if found.box.size * itemsize > max(_SMALL, _MOST_REPEATED * (end - begin)):
                raise CheckpointCorrupt(
                    f"{self.location}: array {entry.name!r} {found.box} repeats the {end - begin} "
                    f"bytes that {found.file} has for it too often"
                )

    def _reaches(self, entry: ArrayEntry, file: str, end: int) -> bool:
        """Whether a file has so many bytes."""
        try:
            size = self._files.size(file)
            if size is None:  # the storage does not tell it
                self._files.read(file, end - 1, 1)
        except Failed as error:
            raise reading_failed(error, f"{self.location}: array {entry.name!r}") from error
        return size is None or end <= size

    def read_chunk(
        self,
        entry: ArrayEntry,
        part: Part,
        number: int,
        row: Any,
        out: Array,
        requested: Any = None,
    ) -> bool:
        box = part.chunk_box(number)
        found = self._boxes[entry.name][part.box.start]
        local = box.relative_to(part.box.start)
        start = sum(a * s for a, s in zip(local.start, found.steps, strict=True))
        try:
            self._read(found, start, out)
        except Failed as error:
            raise reading_failed(error, f"{self.location}: array {entry.name!r} {box}") from error
        if found.big_endian and out.itemsize > 1:
            out.byteswap(inplace=True)
        return True

    def _read(self, found: FileBox, start: int, out: Array) -> None:
        """Fills an array from a file, whose element `start` of the box is the array's first."""
        if not out.size:
            return
        steps, at = found.steps, found.offset + start * out.itemsize
        needed = [s for n, s in zip(out.shape, steps, strict=True) if n > 1]
        expected = [s for n, s in zip(out.shape, row_major(out.shape), strict=True) if n > 1]
        if needed == expected and out.flags.c_contiguous:
            self._files.read_into(found.file, at, out.reshape(-1).view(np.uint8).data)
            return
        low, high = _span(out.shape, steps)
        longer = [d for d in range(out.ndim) if out.shape[d] > 1]
        far = max((abs(steps[d]) * out.itemsize for d in longer), default=0)
        dense = high - low < _WASTE * out.size or far < _NEAR
        if dense and (high - low) * out.itemsize <= _WASTE * CHUNK_BYTES:
            self._read_span(found, at, out)
            return
        if dense:
            outer = max(longer, key=lambda d: (out.shape[d] - 1) * abs(steps[d]))
            most = CHUNK_BYTES // (abs(steps[outer]) * out.itemsize)
            count = min(max(1, most), -(-out.shape[outer] // 2))
        else:
            outer, count = max(longer, key=lambda d: abs(steps[d])), 1
        for index in range(0, out.shape[outer], count):
            piece = out[(slice(None),) * outer + (slice(index, index + count),)]
            self._read(found, start + index * steps[outer], piece)

    def _read_span(self, found: FileBox, at: int, out: Array) -> None:
        """Fills an array from the range of a file that contains all of its elements.

        Arguments:
            found: has the strides.
            at: of the first element, in bytes.
            out: receives them.
        """
        low, high = _span(out.shape, found.steps)
        span = np.empty((high - low + 1) * out.itemsize, np.uint8)
        self._files.read_into(found.file, at + low * out.itemsize, span.data)
        strides = tuple(s * out.itemsize for s in found.steps)
        out[...] = np.ndarray(out.shape, out.dtype, span.data, -low * out.itemsize, strides)


def _span(shape: Sequence[int], steps: Sequence[int]) -> tuple[int, int]:
    """The lowest and the highest element of a strided box, relative to its first."""
    ends = [(n - 1) * s for n, s in zip(shape, steps, strict=True)]
    return sum(min(0, end) for end in ends), sum(max(0, end) for end in ends)
