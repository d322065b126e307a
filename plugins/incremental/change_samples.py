"""Samples of arrays, which show a save whether arrays changed since the save before.

The elements are chosen at random when their values are noted, for the next save to compare. So each
save compares other elements, and no pattern of writes can avoid all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from unickpt.extend import Array, ArraySource, DType, Fragment
from unickpt.types import Box

SAMPLED = 64
"""Elements of each fragment."""


@dataclass(frozen=True)
class ArraySample:
    """Some elements of this process's part of an array.

    Arguments:
        shape, dtype, boxes: of the array and its fragments.
        positions: of the elements, row-major in each box.
        values: the elements of each box.
    """

    shape: tuple[int, ...]
    dtype: DType
    boxes: tuple[Box, ...]
    positions: tuple[Array, ...]
    values: tuple[Array, ...]

    def fits(self, source: ArraySource) -> bool:
        """Whether it samples an array of this shape and dtype, with the same boxes on this
        process."""
        theirs = source.shape, source.dtype, _boxes(source)
        return (self.shape, self.dtype, self.boxes) == theirs

    def differs(self, values: tuple[Array, ...], rows: Array | None) -> Box | None:
        """A box in which elements differ; None if none do.

        Arguments:
            values: the same elements, later.
            rows: those that may differ; None for none.
        """
        for box, positions, before, now in zip(
            self.boxes, self.positions, self.values, values, strict=True
        ):
            if rows is not None:
                same = ~rows[box.start[0] + positions // math.prod(box.shape[1:])]
                before, now = before[same], now[same]
            if before.tobytes() != now.tobytes():
                return box
        return None


def gather(source: ArraySource, positions: tuple[Array, ...]) -> Callable[[], tuple[Array, ...]]:
    """Gathers the current elements; returns a function that waits for their values."""
    pairs = zip(source.fragments, positions, strict=True)
    parts = [_gather(fragment, source.dtype, flat) for fragment, flat in pairs]
    return lambda: tuple(part() for part in parts)


def _gather(fragment: Fragment, dtype: DType, flat: Array) -> Callable[[], Array]:
    box = fragment.box
    if fragment.sample is not None:
        index = np.unravel_index(flat, box.shape or (1,))
        return fragment.sample(tuple(i + a for i, a in zip(index, box.start or (0,), strict=True)))
    view = fragment.read(box, partial(np.empty, box.shape, dtype))
    if view.flags.c_contiguous:
        values: Array = view.reshape(-1)[flat]  # a copy
    else:
        values = view[np.unravel_index(flat, box.shape)]
    return lambda: values


def _boxes(source: ArraySource) -> tuple[Box, ...]:
    return tuple(fragment.box for fragment in source.fragments)


def can_sample(source: ArraySource) -> bool:
    """Whether elements can be had without all of the array."""
    return all(f.sample is not None or not f.memory.on_device for f in source.fragments)


class Sampler:
    """Notes samples of the arrays of one save, and compares them with those of the save before.

    All gathers are started before the first one is waited for.

    Arguments:
        sources: the arrays as they are now.
    """

    def __init__(self, sources: Mapping[str, ArraySource]) -> None:
        self._sources = {name: s for name, s in sources.items() if can_sample(s)}
        self._random = np.random.default_rng()
        self._compared: list[
            tuple[str, ArraySample, Array | None, Callable[[], tuple[Array, ...]]]
        ] = []

    def compare(self, name: str, before: ArraySample | None, rows: Array | None) -> bool:
        """Compares an array with its sample of the save before; False if that is impossible.

        Arguments:
            name: of the array.
            before: its sample.
            rows: those that may have changed; None for none.
        """
        source = self._sources.get(name)
        if source is None or before is None or not before.fits(source):
            return False
        self._compared.append((name, before, rows, gather(source, before.positions)))
        return True

    def finish(self) -> tuple[dict[str, ArraySample], tuple[str, Box] | None]:
        """The samples for the next save; and the first array that changed, with the box."""
        drawn = list[tuple[str, ArraySource, tuple[Array, ...], Callable[[], tuple[Array, ...]]]]()
        for name, source in self._sources.items():
            positions = tuple(self._positions(fragment.box.size) for fragment in source.fragments)
            drawn.append((name, source, positions, gather(source, positions)))
        changed = None
        for name, before, rows, values in self._compared:
            box = before.differs(values(), rows)
            if box is not None:
                changed = changed or (name, box)
        return {
            name: ArraySample(source.shape, source.dtype, _boxes(source), positions, values())
            for name, source, positions, values in drawn
        }, changed

    def _positions(self, size: int) -> Array:
        if size <= SAMPLED:
            return np.arange(size)
        return self._random.integers(0, size, SAMPLED)
