"""Rules on arrays in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from unickpt.arrays import dtypes, strided_copy
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.format.index import ArrayEntry
from unickpt.reading.recipes import Copy
from unickpt.reading.targets import place, put
from unickpt.rules.plan import Fact, Made, RulePlan, StoredLeaves


def stored_leaves(facts: Mapping[str, Fact]) -> StoredLeaves:
    """Arrays in the place of a stored checkpoint, for a plan."""
    entries = {
        name: ArrayEntry(name, fact.shape, fact.dtype, tuple(max(1, n) for n in fact.shape))
        for name, fact in facts.items()
        if fact.is_array
    }
    return StoredLeaves(facts, entries)


def facts_of(arrays: Mapping[str, Array]) -> dict[str, Fact]:
    """Shapes and dtypes of arrays."""
    return {name: Fact(x.shape, dtypes.name_of(x.dtype)) for name, x in arrays.items()}


def apply(plan: RulePlan, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays that a plan makes from others, by all of their names.

    Arguments:
        plan: without functions; plain values are left out.
        arrays: the stored arrays, by name.
    """

    def read(name: str, box: Box) -> Array:
        return arrays[name][box.slices]

    made = {
        name: elements(array, Box.whole(array.fact.shape), read)
        for name, array in plan.made.items()
        if array.carried is None
    }
    return made | {alias: made[name] for alias, name in plan.aliases.items() if name in made}


def elements(made: Made, box: Box, read: Callable[[str, Box], Array]) -> Array:
    """The elements of a box of an array that rules make.

    Arguments:
        made: the array.
        box: of it.
        read: returns a box of a stored array.
    """
    out = np.zeros(box.shape, dtypes.from_name(made.fact.dtype))
    for source in made.sources:
        needed = source.within(box)
        for source_box in needed.boxes if needed is not None else ():
            data = read(source.entry.name, source_box)
            for copy in needed.copies(source_box) if needed is not None else ():
                place(_view(data, copy.source, copy.source_steps, copy), _out(out, copy), source)
    for fill in made.fills:
        for copy in fill.copies(box):
            value = np.broadcast_to(np.asarray(fill.value, out.dtype), copy.shape)
            put(value, _out(out, copy), repr(made.name))
    return out


def _out(out: Array, copy: Copy) -> Array:
    return _view(out, copy.out, copy.out_steps, copy)


def _view(
    array: Array, start: tuple[int, ...], steps: tuple[tuple[int, ...], ...], copy: Copy
) -> Array:
    return strided_copy.view(array, start, steps, copy.shape)
