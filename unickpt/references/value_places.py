"""The chunks that one process of a save holds, and their places, for its record."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.commit.messages import ADDITION_DTYPE, CHUNK_DTYPE, ELSEWHERE, Record, ValuePlace
from unickpt.errors import StorageError
from unickpt.format.chunk_grid import FULL_LINK, Part
from unickpt.format.index import ArrayEntry, BaseEntry
from unickpt.frameworks.adapter_protocol import Fragment
from unickpt.storage.btree.builder import INLINE, PLACE_DTYPE
from unickpt.storage.btree.nodes import DataReference
from unickpt.storage.data_files import DataFile

if TYPE_CHECKING:
    from unickpt.write_filter import Unit


@dataclass(slots=True, eq=False)  # not frozen: see `adapter_protocol`
class WriteItem:
    """One chunk that this process holds, or several consecutive borrowed ones; never modified.

    Arguments:
        array: number of the array in this process's description.
        entry: the array.
        part: the part of the array.
        number: the chunk's row-major number in the part; for several, that of the first.
        position: its number among the chunks of all parts (see `commit.messages`), likewise.
        box: its box in the global array; for several chunks, that of a fragment that has them all.
        nbytes: of its elements in memory; for several chunks, of all.
        fragment: holds its data.
        assumed: as `ArraySource.assumed`.
        unit: the unit to which it belongs.
        borrowed: whether the chunk of the previous step is saved, not its data.
        count: the number of chunks.
    """

    array: int
    entry: ArrayEntry
    part: Part
    number: int
    position: int
    box: Box
    nbytes: int
    fragment: Fragment
    assumed: bool = False
    unit: Unit | None = None
    borrowed: bool = False
    count: int = 1

    @property
    def dtype(self) -> dtypes.DType:
        return dtypes.from_name(self.entry.dtype)

    @property
    def numbers(self) -> range:
        """The numbers of its chunks in the part."""
        return range(self.number, self.number + self.count)

    def chunks(self) -> Sequence[WriteItem]:
        """Each of its chunks."""
        if self.count == 1:
            return (self,)
        return [self.select(range(index, index + 1)) for index in range(self.count)]

    def with_borrowed(self, borrowed: bool) -> WriteItem:
        """The same, borrowed or not."""
        return WriteItem(  # `replace` takes four times as long
            self.array, self.entry, self.part, self.number, self.position, self.box, self.nbytes,
            self.fragment, self.assumed, self.unit, borrowed, self.count,
        )  # fmt: skip

    def select(self, which: range) -> WriteItem:
        """Some of its chunks, by their positions in it."""
        if len(which) == self.count:
            return self
        number, box = self.number + which.start, self.box
        boxes = [self.part.chunk_box(number + index) for index in range(len(which))]
        if len(boxes) == 1:
            (box,) = boxes
        return replace(
            self,
            number=number,
            position=self.position + which.start,
            box=box,
            nbytes=sum(chunk_box.size for chunk_box in boxes) * self.entry.itemsize,
            count=len(which),
        )


_PLACE = list(PLACE_DTYPE.names or ())
Taken = DataReference | BaseEntry | bytes
"""The place of a value that a save references: in a file, below the folder of the process, or in a
sibling checkpoint. Or the value itself, if it must be written again."""


class Compared(NamedTuple):
    """A chunk of the save, compared with the base.

    Arguments:
        digest: of the chunk.
        reused: the places of its values; empty if it has to be written.
        added: one more value to write.
    """

    digest: int
    reused: Sequence[Taken] = ()
    added: bytes | None = None


class ValuePlaces:
    """The places of all values that a process saves, for its record. Several threads add to it.

    Arguments:
        items: the chunks, in the order of their rows.
    """

    def __init__(self, items: Sequence[WriteItem]) -> None:
        keys = [(item.array, item.position, item.count) for item in items]
        array, position, counts = np.array(keys, np.int64).reshape(-1, 3).T
        self.chunks, first = np.zeros(counts.sum(), CHUNK_DTYPE), np.cumsum(counts) - counts
        self.chunks["array"] = np.repeat(array, counts)
        self.chunks["chunk"] = np.repeat(position - first, counts) + np.arange(len(self.chunks))
        self._places = self.chunks[_PLACE]  # a view
        self.others: list[ValuePlace] = []
        """The places of the values that are no chunks, in order."""
        self._files = dict[str, int]()
        self._inline, self._nbytes = list[bytes](), 0
        self._additions, self._bases = [np.zeros(0, ADDITION_DTYPE)], dict[BaseEntry, int]()
        self._lock = threading.Lock()

    def place(self, reference: DataReference | BaseEntry) -> ValuePlace:
        """The place of a reused value, in the form of the record."""
        with self._lock:
            if isinstance(reference, BaseEntry):
                return ELSEWHERE, self._bases.setdefault(reference, len(self._bases)), 0
            number = self._files.setdefault(reference.path, len(self._files))
            return number, reference.offset, reference.length

    def note(self, comparisons: Mapping[int, Compared]) -> None:
        """Records the places of the values of reused chunks, by their rows: that of a whole chunk,
        or of its full chunk and the values added to it."""
        places, additions = list[ValuePlace](), list[tuple[int, ...]]()
        for row, comparison in comparisons.items():
            first = comparison.reused[0]
            assert not isinstance(first, bytes), "only added values are written again"
            places.append(self.place(first))
            additions += [
                (row, link, *self.place(value))
                for link, value in enumerate(comparison.reused[1:], FULL_LINK + 1)
                if not isinstance(value, bytes)
            ]
        if not comparisons:
            return
        rows = np.fromiter(comparisons, np.int64, len(comparisons))
        digests = [comparison.digest for comparison in comparisons.values()]
        self.chunks["digest"][rows] = np.array(digests, np.uint64)
        self._places[rows] = np.array(places, PLACE_DTYPE)
        if additions:
            self._add_additions(np.array(additions, ADDITION_DTYPE))

    def _add_additions(self, additions: Any) -> None:
        with self._lock:
            self._additions.append(additions)

    def add(
        self, file: DataFile, rows: Sequence[int], value_count: int, links: Sequence[int] = ()
    ) -> None:
        """Records the places of the values of a file.

        Arguments:
            file: with these values.
            rows: of those that are chunks; -1 - row for values that are added to chunks.
            value_count: how many values follow.
            links: their positions among the values of their chunks.

        Raises:
            StorageError: it has more or fewer.
        """
        if len(file.lengths) != len(rows) + value_count:
            raise StorageError(
                f"{file.path}: {len(file.lengths)} values were written, not "
                f"{len(rows) + value_count}"
            )
        if not file.lengths:
            return
        places = np.zeros(len(file.lengths), PLACE_DTYPE)
        offsets, places["length"] = np.array(file.offsets, np.int64), file.lengths
        is_inline = offsets < 0
        sizes = places["length"][is_inline].astype(np.int64)
        with self._lock:
            if is_inline.all():
                places["file"] = INLINE
            else:
                number = self._files.setdefault(file.path, len(self._files))
                places["file"] = np.where(is_inline, INLINE, number)
            offsets[is_inline] = self._nbytes + np.cumsum(sizes) - sizes
            self._inline += file.inline
            self._nbytes += int(sizes.sum())
        places["offset"] = offsets
        row_numbers = np.array(rows, np.int64)
        chunk_places, is_chunk = places[: len(row_numbers)], row_numbers >= 0
        self._places[row_numbers[is_chunk]] = chunk_places[is_chunk]
        if not is_chunk.all():
            additions = np.zeros(len(row_numbers) - int(is_chunk.sum()), ADDITION_DTYPE)
            additions["row"], additions["link"] = -1 - row_numbers[~is_chunk], links
            additions[_PLACE][:] = chunk_places[~is_chunk]
            self._add_additions(additions)
        if value_count:
            self.others = places[len(row_numbers) :].tolist()

    def record(self, description: int, **more: Any) -> Record:
        """The record of all recorded places.

        Arguments:
            description: digest of the process's description.
            more: further fields.
        """
        additions = np.concatenate(self._additions)
        return Record(
            description=description,
            chunks=self.chunks,
            files=tuple(self._files),
            inline=b"".join(self._inline),
            bases=tuple(self._bases),
            additions=additions[np.lexsort((additions["link"], additions["row"]))],
            **more,
        )
