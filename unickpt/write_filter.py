"""The seam for saves that leave out parts of the state which an earlier checkpoint has.

A part that is written or left out as a whole is a unit: an array, or what several arrays have along
a dimension, as an expert of a mixture of experts. Of which step the units of a checkpoint are, its
metadata say (`format.unit_steps`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from unickpt.arrays.box import Box
from unickpt.arrays.layout import Layout
from unickpt.errors import StorageError
from unickpt.format.index import Index

if TYPE_CHECKING:
    from unickpt.format.unit_steps import UnitSteps

Unit = tuple[str, int]
"""The key of some units, and the number of one of them."""


@dataclass(frozen=True)
class ArrayUnits:
    """The units that one array holds a part of.

    Arguments:
        key: of these units.
        numbers: of the units.
        axis: the dimension along which they are stacked; None if the array is of one unit.
    """

    key: str
    numbers: range
    axis: int | None = None

    @property
    def only(self) -> Unit | None:
        """The array's unit; None if several are stacked."""
        return (self.key, self.numbers.start) if self.axis is None else None

    def within(self, box: Box) -> range:
        """The units of a box of the array."""
        if self.axis is None:
            return self.numbers
        return range(box.start[self.axis], box.stop[self.axis])


class Units(Protocol):
    """Which arrays are of units; the same object for all saves of a run with the same units."""

    def find(self, name: str, shape: Sequence[int], layout: Layout | None) -> ArrayUnits | None:
        """The units that an array holds a part of; None if it is saved every time.

        Raises:
            ValueError: says why that cannot be told.
        """

    def check(self, units: Mapping[str, ArrayUnits]) -> None:
        """Checks what was found of all arrays together.

        Raises:
            ValueError: names arrays that do not fit together.
        """


class WriteFilter(Protocol):
    """What one save in one process leaves out."""

    @property
    def units(self) -> Units:
        """Which arrays are of units."""

    def select(self, index: Index, units: Mapping[str, ArrayUnits]) -> Selection:
        """Chooses the units to write. All processes must choose alike.

        Arguments:
            index: what this process has to save.
            units: those of each array with units.

        Raises:
            ValueError: they cannot be chosen.
        """


@dataclass(frozen=True)
class Earlier:
    """A checkpoint that may have the units that a save leaves out.

    Arguments:
        path: of the checkpoint.
        attempt: that made it, by which another checkpoint at this path is noticed.
        metadata: of the checkpoint that is saved, if this one has them.
        steps: the steps of this process's units if they are in this checkpoint.
    """

    path: str
    attempt: str
    metadata: Mapping[str, Any]
    steps: UnitSteps


@dataclass(frozen=True)
class Selection:
    """Which units a save writes.

    Arguments:
        units: those that this process has in each array with units.
        metadata: of the checkpoint that is saved.
        steps: the steps of this process's units once they are saved.
        what: what messages call the units.
        written: the numbers of those that are written, by key; None if all are.
        earlier: which checkpoints may have the others, the right one first; the next ones if the
            save of that one, which had not ended, has failed.
        bytes_by_process: how many bytes of units each process writes, as far as all processes know.
    """

    units: Mapping[str, ArrayUnits]
    metadata: Mapping[str, Any]
    steps: UnitSteps
    what: str
    written: Mapping[str, Container[int]] | None = None
    earlier: Sequence[Earlier] = ()
    bytes_by_process: Mapping[int, int] = field(default_factory=dict)

    def unit_at(self, name: str, box: Box) -> tuple[Unit, bool]:
        """The unit of a chunk of an array with units, and whether it is left out."""
        array_units = self.units[name]
        return (array_units.key, array_units.within(box).start), self.borrows(name, box)

    def borrows(self, name: str, box: Box) -> bool:
        """Whether all units of a box of an array are left out."""
        array_units = self.units.get(name)
        if array_units is None or self.written is None:
            return False
        return not any(map(self.written[array_units.key].__contains__, array_units.within(box)))

    def writes(self, unit: Unit) -> bool:
        """Whether a unit is written."""
        return self.written is None or unit[1] in self.written[unit[0]]

    def on(self, attempt: str | None) -> Selection | None:
        """The same units, with the others in that of `earlier` which an attempt made; None if it
        made none of these."""
        for candidate in self.earlier:
            if candidate.attempt == attempt:
                return replace(
                    self, metadata=candidate.metadata, steps=candidate.steps, earlier=(candidate,)
                )
        return None

    def check(self, index: Index | None, where: object) -> None:
        """Checks that the first of `earlier` is as it was when the units were chosen.

        Arguments:
            index: its index, now; None if it is gone.
            where: the checkpoint that is saved.

        Raises:
            StorageError: it is not.
        """
        if not self.earlier or (index is not None and index.attempt == self.earlier[0].attempt):
            return
        how = "gone, or no longer on this file system" if index is None else "replaced"
        raise StorageError(
            f"{where}: the {self.what} that this save does not write are in "
            f"{self.earlier[0].path}, which is {how}. Nothing was saved; the next save writes all "
            f"{self.what}"
        )
