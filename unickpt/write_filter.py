"""The interface for saves that leave out parts of the state that an earlier checkpoint has.

A unit is a part that is written or left out as a whole: an array, or a slice of several arrays
along a dimension, such as an expert of a mixture of experts. The metadata of a checkpoint record
the step of each unit (`format.unit_steps`).
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
    """The units of which one array holds a part.

    Arguments:
        key: of these units.
        numbers: of the units.
        axis: the dimension along which they are stacked; None if the array belongs to one unit.
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
    """The arrays that belong to units; one object for all saves of a run with the same units."""

    def find(self, name: str, shape: Sequence[int], layout: Layout | None) -> ArrayUnits | None:
        """The units of which an array holds a part; None if it is saved every time.

        Raises:
            ValueError: they cannot be determined; says why.
        """

    def check(self, units: Mapping[str, ArrayUnits]) -> None:
        """Checks the units of all arrays together.

        Raises:
            ValueError: names arrays that do not fit together.
        """


class WriteFilter(Protocol):
    """The units that one save in one process leaves out."""

    @property
    def units(self) -> Units:
        """The arrays that belong to units."""

    def select(self, index: Index, units: Mapping[str, ArrayUnits]) -> Selection:
        """Chooses the units to write. All processes must choose alike.

        Arguments:
            index: the arrays that this process has to save.
            units: the units of each array that has any.

        Raises:
            ValueError: they cannot be chosen.
        """


@dataclass(frozen=True)
class Earlier:
    """A checkpoint that may have the units that a save leaves out.

    Arguments:
        path: of the checkpoint.
        attempt: the attempt that made it; another one means that the path was overwritten.
        metadata: of the checkpoint to save, if this one has the units.
        steps: the steps of this process's units if they are in this checkpoint.
    """

    path: str
    attempt: str
    metadata: Mapping[str, Any]
    steps: UnitSteps


@dataclass(frozen=True)
class Selection:
    """The units that a save writes.

    Arguments:
        units: the units of this process in each array that has any.
        metadata: of the checkpoint to save.
        steps: the steps of this process's units once they are saved.
        what: the word for units in messages.
        written: the numbers of the units to write, by key; None for all.
        earlier: the checkpoints that may have the other units, the expected one first; the next
            ones serve if the save of that one was still in flight and failed.
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
        """The same units, with the checkpoint of `earlier` that an attempt made as the only one;
        None if it made none of them."""
        for candidate in self.earlier:
            if candidate.attempt == attempt:
                return replace(
                    self, metadata=candidate.metadata, steps=candidate.steps, earlier=(candidate,)
                )
        return None

    def check(self, index: Index | None, where: object) -> None:
        """Checks that the first of `earlier` has not changed since the units were chosen.

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
