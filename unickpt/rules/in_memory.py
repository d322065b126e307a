"""Rules on arrays in memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from unickpt.arrays import dtypes, strided_copy
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.format.index import ArrayEntry
from unickpt.reading.recipes import Copy, MappedSource, place, put
from unickpt.rules.plan import Fact, Made, RulePlan, StoredLeaves


def stored_leaves(facts: Mapping[str, Fact]) -> StoredLeaves:
    """Arrays as a plan sees what is stored."""
    entries = {
        name: ArrayEntry(name, fact.shape, fact.dtype, tuple(max(1, n) for n in fact.shape))
        for name, fact in facts.items()
    }
    return StoredLeaves(facts, entries)


def facts_of(arrays: Mapping[str, Array]) -> dict[str, Fact]:
    """Shapes and dtypes of arrays."""
    return {name: Fact(x.shape, dtypes.name_of(x.dtype)) for name, x in arrays.items()}


def apply(plan: RulePlan, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """What a plan makes of arrays, by all of its names.

    Arguments:
        plan: without functions and plain values.
        arrays: what is stored, by name.
    """
    made = {name: _made(one, arrays) for name, one in plan.made.items()}
    return made | {alias: made[name] for alias, name in plan.aliases.items()}


def _made(made: Made, arrays: Mapping[str, Array]) -> Array:
    fact = made.fact
    out = np.zeros(fact.shape, dtypes.from_name(fact.dtype))
    whole = Box.whole(fact.shape)
    for source in made.sources:
        _place(source, arrays[source.entry.name], out, whole)
    for fill in made.fills:
        for copy in fill.copies(whole):
            there = _views(copy, out, out)[1]
            put(np.broadcast_to(np.asarray(fill.value, out.dtype), copy.shape), there, made.name)
    return out


def _place(source: MappedSource, stored: Array, out: Array, whole: Box) -> None:
    needed = source.within(whole)
    for copy in needed.copies(Box.whole(stored.shape)) if needed is not None else ():
        data, there = _views(copy, stored, out)
        place(data, there, source)


def _views(copy: Copy, stored: Array, out: Array) -> tuple[Array, Array]:
    there = strided_copy.view(out, copy.out, copy.out_steps, copy.shape)
    if len(copy.source) != stored.ndim:
        return there, there
    return strided_copy.view(stored, copy.source, copy.source_steps, copy.shape), there
