"""Arrays that lie in files without chunks: each box of an array is a range of a file.

Most formats of other systems are of this kind; their readers only find out which box is where.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
# A range with this many times the bytes of a chunk is read as a whole; beyond it, row by row.
_WASTE = 4


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
            size = self._size(entry, found.file)
            if begin < 0 or (size is not None and end > size):
                raise CheckpointCorrupt(
                    f"{self.location}: array {entry.name!r} {found.box} needs bytes {begin} to "
                    f"{end} of {found.file}, which has {size}"
                )

    def _size(self, entry: ArrayEntry, file: str) -> int | None:
        try:
            return self._files.size(file)
        except Failed as error:
            raise reading_failed(error, f"{self.location}: array {entry.name!r}") from error

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
        steps, itemsize = found.steps, out.itemsize
        at = found.offset + start * itemsize
        needed = [s for n, s in zip(out.shape, steps, strict=True) if n > 1]
        expected = [s for n, s in zip(out.shape, row_major(out.shape), strict=True) if n > 1]
        if needed == expected:
            self._files.read_into(found.file, at, out.reshape(-1).view(np.uint8).data)
            return
        low, high = _span(out.shape, steps)
        if high - low < _WASTE * out.size or out.ndim == 1:
            span = np.empty((high - low + 1) * itemsize, np.uint8)
            self._files.read_into(found.file, at + low * itemsize, span.data)
            strides = tuple(s * itemsize for s in steps)
            out[...] = np.ndarray(out.shape, out.dtype, span.data, -low * itemsize, strides)
            return
        # Piece by piece along the dimension whose elements are farthest apart in the file.
        outer = max((d for d in range(out.ndim) if out.shape[d] > 1), key=lambda d: abs(steps[d]))
        inner = replace(found, strides=steps[:outer] + steps[outer + 1 :])
        for index in range(out.shape[outer]):
            piece = np.empty(out.shape[:outer] + out.shape[outer + 1 :], out.dtype)
            self._read(inner, start + index * steps[outer], piece)
            out[(slice(None),) * outer + (index,)] = piece


def _span(shape: Sequence[int], steps: Sequence[int]) -> tuple[int, int]:
    """The lowest and the highest element of a strided box, relative to its first."""
    ends = [(n - 1) * s for n, s in zip(shape, steps, strict=True)]
    return sum(min(0, end) for end in ends), sum(max(0, end) for end in ends)
