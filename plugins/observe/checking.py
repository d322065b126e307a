"""Check: whether rules turn one side into the other, by a few elements of each array.

Where names and shapes fit, a transpose of a square kernel, or an exchange of q and k, shows in the
values alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np

from unickpt import Checkpoint, Rules
from unickpt.extend import (
    Array,
    LeafFact,
    LeafKind,
    MadeLeaf,
    RulesCheck,
    facts_of,
    is_plain_kind,
    opened_checkpoint,
    plan_rules,
    ruled_elements,
    stored_leaves,
)
from unickpt.plugins.observe.converters import leaves_in
from unickpt.types import Box

_SMALL = 1 << 22
_SHORT = 4


@dataclass(frozen=True)
class Side:
    """Arrays that can be read in boxes.

    Arguments:
        facts: of all leaves, by name.
        read: returns a box of an array.
        where: its description, for messages.
        values: the leaves that are no arrays.
    """

    facts: Mapping[str, LeafFact]
    read: Callable[[str, Box], Array]
    where: str
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Any, where: str) -> Side:
        """A tree of arrays, or a checkpoint: a path, a URL, or a result of `unickpt.open`."""
        if isinstance(source, str | PathLike | Checkpoint):
            opened = opened_checkpoint(source)
            index = opened.reader.index
            facts = {name: LeafFact(x.shape, x.dtype) for name, x in index.entries.items()}
            facts |= dict.fromkeys(index.values, LeafFact(kind=LeafKind.VALUE))
            facts |= dict.fromkeys(index.per_process, LeafFact(kind=LeafKind.PROCESS))
            return cls(facts, lambda name, box: opened[name].read(box), str(source), index.values)
        arrays, values = leaves_in(source)
        facts = facts_of(arrays) | dict.fromkeys(values, LeafFact(kind=LeafKind.VALUE))
        return cls(facts, lambda name, box: arrays[name][box.slices], where, values)

    @property
    def arrays(self) -> dict[str, LeafFact]:
        """The facts of the arrays."""
        return {name: fact for name, fact in self.facts.items() if fact.is_array}

    def whole(self, name: str) -> Array:
        return self.read(name, Box.whole(self.facts[name].shape))


def check(rules: Rules, left: Any, right: Any, *, probes: int, rtol: float) -> RulesCheck:
    """See `Rules.check`."""
    have, want = Side.of(left, "the left side"), Side.of(right, "the right side")
    stored = stored_leaves(have.facts)
    plan = plan_rules(rules, stored, want.facts, where=have.where)
    random = np.random.default_rng(0)
    names = {**{name: name for name in plan.made}, **plan.aliases}
    differences: dict[str, str] = {}
    compared, arrays = 0, 0
    for name, made_as in names.items():
        made = plan.made[made_as]
        if made.carried in have.values or name in want.values:
            differing = _unequal_values(name, made, have, want)
            if differing is not None:
                theirs, ours = map(repr, differing)
                differences[name] = f"it is {theirs}, and would be made as {ours} by `{made.rule}`"
            continue
        if made.carried is not None or made.function is not None:
            continue
        arrays += 1
        for box in _boxes(made.fact.shape, probes, random):
            compared += math.prod(box.shape)
            array, other = ruled_elements(made, box, have.read), want.read(name, box)
            bad = np.argwhere(~_equal(array, other, 0 if made.exact else max(rtol, 1e-5)))
            if len(bad):
                element = tuple(int(i + o) for i, o in zip(bad[0], box.start, strict=True))
                differences[name] = _difference(name, made, element, have, want)
                break
    return RulesCheck(arrays, compared, differences)


def _unequal_values(name: str, made: MadeLeaf, have: Side, want: Side) -> tuple[Any, Any] | None:
    """The right side's value and the rules' result, where one of the two is a plain value; None if
    they are equal. A 0-d array is compared as its number, as `load` takes it."""
    theirs: Any = want.values.get(name)
    ours: Any = have.values.get(made.carried or "")
    if name in want.arrays:
        theirs = _number(want.whole(name), ours)
    elif made.carried is None and made.function is None:
        ours = _number(ruled_elements(made, Box.whole(made.fact.shape), have.read), theirs)
    is_plain = not (isinstance(ours, np.ndarray) or isinstance(theirs, np.ndarray))
    is_same = is_plain and (ours == theirs or (ours != ours and theirs != theirs))
    return None if is_same else (theirs, ours)


def _number(array: Array, other: Any) -> Any:
    """A 0-d array as a plain number, which is the other one if the array holds that as well as its
    dtype can."""
    if array.shape != () or not is_plain_kind(other, array.dtype):
        return array
    return other if _equal(array, np.asarray(other, array.dtype), 0) else array.item()


def _equal(array: Array, other: Array, rtol: float) -> Array:
    if array.shape != other.shape:
        return np.zeros(array.shape, bool)
    if rtol:
        wide = np.complex128 if array.dtype.kind == "c" else np.float64
        return np.isclose(array.astype(wide), other.astype(wide), rtol, rtol, equal_nan=True)
    same = array == other
    if array.dtype.kind not in "biu":
        same |= (array != array) & (other != other)
    return np.asarray(same)


def _boxes(shape: tuple[int, ...], probes: int, random: np.random.Generator) -> Iterator[Box]:
    """Small boxes of an array that together have about so many elements: its ends, and others."""
    if 0 in shape:
        return
    size = math.prod(shape)
    if size <= probes:
        yield Box.whole(shape)
        return
    extent = tuple(min(n, _SHORT) for n in shape[-2:])
    extent = (1,) * (len(shape) - len(extent)) + extent
    last = tuple(n - e for n, e in zip(shape, extent, strict=True))
    count = max(3, probes // math.prod(extent))
    starts = [tuple(0 for _ in shape), last]
    starts += [tuple(int(random.integers(0, n + 1)) for n in last) for _ in range(count - 2)]
    for start in dict.fromkeys(starts):
        yield Box(start, tuple(a + e for a, e in zip(start, extent, strict=True)))


def _difference(name: str, made: MadeLeaf, element: tuple[int, ...], have: Side, want: Side) -> str:
    """The difference, and its possible cause."""
    box = Box(element, tuple(i + 1 for i in element))
    ours = ruled_elements(made, box, have.read).reshape(())
    theirs = want.read(name, box).reshape(())
    text = f"element {list(element)} is {theirs}, and would be made as {ours} by `{made.rule}`"
    if math.prod(made.fact.shape) > _SMALL or want.facts[name].shape != made.fact.shape:
        return text
    reason = _reason(name, ruled_elements(made, Box.whole(made.fact.shape), have.read), want)
    return f"{text}; {reason}" if reason else text


def _reason(name: str, made: Array, want: Side) -> str:
    """The likely mistake in a rule."""
    expected = want.whole(name)
    for order in itertools.permutations(range(made.ndim)):
        turned = made.transpose(order)
        if turned.shape == expected.shape and _equal(turned, expected, 0).all():
            letters = "abcdefgh"[: made.ndim]
            return (
                f"it is the same with its axes exchanged, [{' '.join(letters)}] as "
                f"[{' '.join(letters[i] for i in order)}]: the rule lacks a transpose, or has one "
                "too many"
            )
    for other, fact in want.arrays.items():
        if other != name and fact.shape == made.shape and _equal(made, want.whole(other), 0).all():
            return f"it has the values of {other!r}: two names are exchanged"
    ours, theirs = np.sort(made, None), np.sort(expected, None)
    if made.dtype == expected.dtype and np.array_equal(ours, theirs):
        return (
            "both hold the same numbers in another order: check how heads, or pairs of rotary "
            "dimensions, are ordered"
        )
    return ""
