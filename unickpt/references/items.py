"""A chunk, or several, that one process of a save holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry
from unickpt.frameworks.protocol import Fragment
from unickpt.write_filter import Unit


@dataclass(slots=True, eq=False)  # not frozen: a save makes one for each chunk, see `protocol`
class WriteItem:
    """One chunk that this process holds, or several that follow each other and are all borrowed;
    never modified.

    Arguments:
        array: number of the array in this process's description.
        entry: the array.
        part: the part of the array.
        number: the chunk's row-major number in the part; of several, that of the first.
        position: its number among the chunks of all parts (see `commit.messages`), likewise.
        box: its box in the global array; of several chunks, that of a fragment that has them all.
        nbytes: of its elements in memory; of several chunks, of all.
        fragment: holds its data.
        assumed: as `ArraySource.assumed`.
        unit: of which it is a part.
        borrowed: whether the chunk of the step before is saved, not its data.
        count: how many chunks these are.
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
        """Of its chunks in the part."""
        return range(self.number, self.number + self.count)

    def chunks(self) -> Sequence[WriteItem]:
        """Each of its chunks."""
        if self.count == 1:
            return (self,)
        return [self.some(range(at, at + 1)) for at in range(self.count)]

    def with_borrowed(self, borrowed: bool) -> WriteItem:
        """The same, borrowed or not."""
        return WriteItem(  # `replace` takes four times as long
            self.array, self.entry, self.part, self.number, self.position, self.box, self.nbytes,
            self.fragment, self.assumed, self.unit, borrowed, self.count,
        )  # fmt: skip

    def some(self, which: range) -> WriteItem:
        """Some of its chunks, by their positions among them."""
        if len(which) == self.count:
            return self
        number, box = self.number + which.start, self.box
        boxes = [self.part.chunk_box(number + at) for at in range(len(which))]
        if len(boxes) == 1:
            (box,) = boxes
        return replace(
            self,
            number=number,
            position=self.position + which.start,
            box=box,
            nbytes=sum(each.size for each in boxes) * self.entry.itemsize,
            count=len(which),
        )
