"""Which process writes which pieces of the files of an export; pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from unickpt.extend import Box, PlannedFile, cut_box, flat_range_to_boxes

# Two clients of a network file system should not write into the same page.
_ALIGN = 64 << 10
# A process takes so much more or less of its share of all bytes, to write whole files.
_TOLERANCE = 8


@dataclass(frozen=True)
class FilePiece:
    """A box of an array, whose elements follow each other in a file.

    Arguments:
        data: number of the `Data` in its file.
        array: name of the array.
        box: of the array.
        offset: in the file, in bytes.
        nbytes: how many bytes.
    """

    data: int
    array: str
    box: Box
    offset: int
    nbytes: int


@dataclass(frozen=True)
class FileShare:
    """The part of one file that one process writes.

    Arguments:
        file: it.
        begin, end: the bytes, counted in its data.
    """

    file: PlannedFile
    begin: int
    end: int


class FileSplitter:
    """Divides files.

    Arguments:
        itemsizes: bytes of an element of each array.
    """

    def __init__(self, itemsizes: Mapping[str, int]) -> None:
        self._itemsizes = itemsizes

    def nbytes(self, file: PlannedFile) -> int:
        """Bytes of arrays in a file."""
        return sum(self._sizes(file))

    def _sizes(self, file: PlannedFile) -> list[int]:
        return [data.box.size * self._itemsizes[data.array] for data in file.data]

    def shares(
        self, files: Sequence[PlannedFile], process: int, count: int, whole: bool
    ) -> list[FileShare]:
        """The pieces that a process writes, in order; all processes together write everything once.

        Arguments:
            files: those with data.
            process: its number.
            count: of processes.
            whole: whether a file may not be divided.
        """
        ends = list(accumulate(map(self.nbytes, files)))
        total = ends[-1] if ends else 0
        bounds = [self._bound(files, ends, total * k // count, total // count, whole)
                  for k in range(count + 1)]  # fmt: skip
        low, high = bounds[process], bounds[process + 1]
        shares = []
        for file, end in zip(files, ends, strict=True):
            start = end - self.nbytes(file)
            begin, stop = max(low, start), min(high, end)
            if begin < stop:
                shares.append(FileShare(file, begin - start, stop - start))
        return shares

    def _bound(
        self,
        files: Sequence[PlannedFile],
        ends: Sequence[int],
        position: int,
        share: int,
        whole: bool,
    ) -> int:
        """Moves a bound between two processes to the beginning of a file, if one is near."""
        for file, end in zip(files, ends, strict=True):
            if position < end:
                start = end - self.nbytes(file)
                if whole:
                    return start if position - start <= end - position else end
                if position - start <= share // _TOLERANCE:
                    return start
                if end - position <= share // _TOLERANCE:
                    return end
                return start + self._aligned(file, position - start)
        return position

    def _aligned(self, file: PlannedFile, position: int) -> int:
        """Moves a bound within the data of a file to the beginning of a page, of an element, and of
        an array."""
        before = 0
        for data, size in zip(file.data, self._sizes(file), strict=True):
            if position < before + size:
                page = (data.offset + position - before) // _ALIGN * _ALIGN - data.offset
                itemsize = self._itemsizes[data.array]
                return before + max(0, page) // itemsize * itemsize
            before += size
        return position

    def cut(self, share: FileShare, most_bytes: int) -> Iterator[FilePiece]:
        """The pieces of a share, by ascending offsets.

        Arguments:
            share: to cut.
            most_bytes: of a piece.
        """
        before = 0
        for number, (data, size) in enumerate(
            zip(share.file.data, self._sizes(share.file), strict=True)
        ):
            begin, end = max(share.begin, before), min(share.end, before + size)
            if begin < end:
                itemsize = self._itemsizes[data.array]
                first, stop = (begin - before) // itemsize, (end - before) // itemsize
                offset = data.offset + begin - before
                for flat in flat_range_to_boxes(data.box.shape, first, stop):
                    for box in cut_box(flat, max(1, most_bytes // itemsize)):
                        start = tuple(a + b for a, b in zip(data.box.start, box.start, strict=True))
                        ends = tuple(a + b for a, b in zip(data.box.start, box.stop, strict=True))
                        nbytes = box.size * itemsize
                        yield FilePiece(number, data.array, Box(start, ends), offset, nbytes)
                        offset += nbytes
            before += size
