"""Tensors as they lie in files: parts of one rank, and arrays that consist of such parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np

from unickpt.backends._files.elements import ConvertedElements, ElementRun, JoinedElements
from unickpt.extend import FileBox, Layout, TensorSource, dtype_from_name

FLOAT32 = "float32"
SlotValue = TensorSource | int | float
"""A slot of an optimizer: a tensor, or a number such as its step."""
Shapes = Mapping[str, tuple[int, ...]]
"""Of parameters, by name."""


@dataclass(frozen=True, eq=False)  # by identity: names of one array are aliases
class MergedArray:
    """An array, and where its boxes are.

    Arguments:
        dtype: the checkpoint's name of its dtype.
        shape: its extents.
        boxes: of the array; they cover it exactly once.
        layout: how the ranks split it, if that is stored and a layout can express it.
        copies: of other ranks; must be equal, which `verify` checks.
    """

    dtype: str
    shape: tuple[int, ...]
    boxes: Sequence[FileBox]
    layout: Layout | None = None
    copies: list[MergedArray] = field(default_factory=list)

    def converted(self, dtype: str) -> MergedArray:
        """The array in another dtype."""
        boxes = [
            FileBox(b.box, ConvertedElements(b.elements, self.dtype), b.first, b.strides)
            for b in self.boxes
        ]
        return MergedArray(dtype, self.shape, boxes, self.layout)


def whole(source: TensorSource) -> MergedArray:
    """An array that one rank holds."""
    return MergedArray(source.dtype, source.shape, (source.box,))


def widened(array: MergedArray) -> MergedArray:
    """An array of 16 bits in float32, which is exact; others unchanged."""
    narrow = dtype_from_name(array.dtype).itemsize == 2 and array.dtype in ("float16", "bfloat16")
    return array.converted(FLOAT32) if narrow else array


@dataclass(frozen=True)
class Parameter:
    """The optimizer state that one model-parallel rank, or all of them, hold of a parameter.

    Arguments:
        shape: its extents there.
        slots: `fp32`, the weights in float32, and the slots of the optimizer that have its shape.
        scalars: other slots, such as `step`: an array without dimensions, or a number.
    """

    shape: tuple[int, ...]
    slots: Mapping[str, TensorSource]
    scalars: Mapping[str, SlotValue] = field(default_factory=dict)


class EvenParts(Sequence[ElementRun]):
    """The parts of a tensor that is split evenly among ranks; the last ones have fewer elements.

    They are made when they are needed: parameters times ranks can be millions.

    Arguments:
        flats: of the ranks, in order, without gaps; each contains its part.
        offset: where the parts begin in them.
        part: elements of a part.
        count: elements of the tensor.
    """

    def __init__(self, flats: Sequence[TensorSource], offset: int, part: int, count: int) -> None:
        self._flats, self._offset, self._part, self._count = flats, offset, part, count

    def __len__(self) -> int:
        return -(-self._count // self._part) if self._part else 0

    @overload
    def __getitem__(self, number: int) -> ElementRun: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[ElementRun]: ...
    def __getitem__(self, number: int | slice) -> ElementRun | Sequence[ElementRun]:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        flat = self._flats[number]
        count = min(self._part, self._count - number * self._part)
        return ElementRun(flat.elements, flat.first + self._offset, count)


def joined(dtype: str, shape: Sequence[int], runs: Sequence[ElementRun]) -> TensorSource:
    """A tensor whose elements, in row-major order, are in several runs."""
    return TensorSource(dtype, tuple(shape), JoinedElements(runs))


def is_number(value: Any) -> bool:
    """Whether a value is a plain number."""
    return type(value) in (int, float)


def unraveled(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of an element, by its position in row-major order."""
    return tuple(int(i) for i in np.unravel_index(position, tuple(shape)))
