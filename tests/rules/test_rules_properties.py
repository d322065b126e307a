"""Rules against an evaluator that is slow and obvious: one element after the other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rule_cases import flat_names, flat_tree
from support.strategies import examples

import unickpt
from unickpt import LoadOptions, Rules, SaveOptions
from unickpt.arrays.index_map import Digit, linear_index, pull
from unickpt.format.index import ArrayEntry
from unickpt.frameworks.adapter_protocol import ArrayTarget
from unickpt.reading.array_reader import read_arrays
from unickpt.reading.targets import NewTarget
from unickpt.rules.view import through
from unickpt.types import Box

AXES = "abcde"
SIZES = dict(zip(AXES, (2, 3, 4, 5, 7), strict=True))  # distinct: no wrong transpose can pass


@dataclass(frozen=True)
class Laid:
    """One side: the axes in the names, and the dimensions, each a product of axes."""

    named: tuple[str, ...]
    dims: tuple[tuple[str, ...], ...]
    reversed: frozenset[str]

    def text(self, name: str) -> str:
        items = [
            "(" + " ".join(self._axis(a) for a in dim) + ")" if len(dim) > 1 else self._axis(dim[0])
            for dim in self.dims
        ]
        return "/".join([name, *(f"n{{{a}}}" for a in self.named)]) + f" [{' '.join(items)}]"

    def _axis(self, axis: str) -> str:
        return f"-{axis}" if axis in self.reversed else axis

    def place(self, name: str, at: dict[str, int]) -> tuple[str, tuple[int, ...]]:
        """Where the element with these indices is."""
        index = []
        for dim in self.dims:
            i = 0
            for axis in dim:
                own = SIZES[axis] - 1 - at[axis] if axis in self.reversed else at[axis]
                i = i * SIZES[axis] + own
            index.append(i)
        return "/".join([name, *(f"n{at[a]}" for a in self.named)]), tuple(index)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(SIZES[a] for a in dim) for dim in self.dims)

    def arrays(self, name: str) -> Iterator[str]:
        for indices in itertools.product(*(range(SIZES[a]) for a in self.named)):
            yield "/".join([name, *(f"n{i}" for i in indices)])


@st.composite
def sides(draw: Any, axes: tuple[str, ...]) -> Laid:
    order = draw(st.permutations(axes))
    count = draw(st.integers(0, min(2, len(order))))
    dims: list[list[str]] = []
    for axis in order[count:]:
        if dims and draw(st.booleans()):
            dims[-1].append(axis)
        else:
            dims.append([axis])
    flipped = draw(st.sets(st.sampled_from(order[count:]))) if order[count:] else set()
    return Laid(tuple(order[:count]), tuple(map(tuple, dims)), frozenset(flipped))


def boxes(draw: Any, shape: tuple[int, ...]) -> Box:
    pairs = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


@pytest.mark.integration  # takes seconds
@examples(150)
@given(st.data())
def test_any_arrangement_of_axes(data: Any) -> None:
    axes = tuple(AXES[: data.draw(st.integers(1, 5))])
    left, right = data.draw(sides(axes)), data.draw(sides(axes))
    where = ", ".join(f"{a}={SIZES[a]}" for a in axes)
    rules = Rules.parse(f"{left.text('x')} <-> {right.text('y')} where {where}")
    rng = np.random.default_rng(0)
    stored = {name: rng.integers(0, 1 << 30, left.shape) for name in left.arrays("x")}
    expected = {name: np.full(right.shape, -1) for name in right.arrays("y")}
    for indices in itertools.product(*(range(SIZES[a]) for a in axes)):
        at = dict(zip(axes, indices, strict=True))
        (a, i), (b, j) = left.place("x", at), right.place("y", at)
        expected[b][j] = stored[a][i]

    options = SaveOptions(
        chunk_bytes=data.draw(st.sampled_from([16, 64, 200, 1 << 20])), fsync=False
    )
    unickpt.save("memory://rules/any", flat_tree(stored), overwrite=True, options=options)
    made = flat_names(unickpt.load("memory://rules/any", rules=rules))
    assert made.keys() == expected.keys()
    assert all(np.array_equal(made[name], expected[name]) for name in expected)
    check_boxes(data, rules, expected)

    unickpt.save("memory://rules/back", flat_tree(made), overwrite=True, options=options)
    back = flat_names(unickpt.load("memory://rules/back", rules=rules.inverse))
    assert all(np.array_equal(back[name], stored[name]) for name in stored)


def check_boxes(data: Any, rules: Rules, expected: dict[str, Any]) -> None:
    """Some boxes of each array, read as shards are."""
    view = through(unickpt.open("memory://rules/any").reader, rules)
    asked: dict[str, dict[str, ArrayTarget]] = {}
    wanted = {}
    for name, whole in expected.items():
        wanted[name] = boxes(data.draw, whole.shape)
        entry: ArrayEntry = view.index.arrays[name]
        asked[name] = {name: NewTarget(entry, wanted[name])}
    found = read_arrays(view.checkpoint, view.jobs(asked), LoadOptions())
    for name, box in wanted.items():
        assert np.array_equal(found[name], expected[name][box.slices])


@examples(100)
@given(st.data())
def test_sums_of_products(data: Any) -> None:
    """`(a b + c + ...)` between other axes, against np.concatenate."""
    pieces = data.draw(
        st.lists(st.sampled_from(["a", "b", "c d", "d"]), min_size=2, max_size=3, unique=True)
    )
    outer, inner = data.draw(st.booleans()), data.draw(st.booleans())
    pad = data.draw(st.integers(0, 3))
    before, after = "x " * outer, " y" * inner
    sizes = {**SIZES, "x": 3, "y": 2}
    parts, terms = {}, []
    rng = np.random.default_rng(1)
    for i, piece in enumerate(pieces):
        width = math.prod(sizes[a] for a in piece.split())
        parts[f"p{i}"] = rng.integers(0, 1 << 30, (3,) * outer + (width,) + (2,) * inner)
        terms.append(f"p{i} [{before}({piece}){after}]")
    joined = np.concatenate(list(parts.values()), axis=int(outer))
    summed = " + ".join([*pieces, *["_"] * bool(pad)])
    merged = (
        f"({before}({summed}){after})" if data.draw(st.booleans()) else f"{before}({summed}){after}"
    )
    used = {a for piece in pieces for a in piece.split()} | set("x" * outer) | set("y" * inner)
    where = ", ".join([f"{a}={sizes[a]}" for a in sorted(used)] + [f"_={pad}"] * bool(pad))
    rules = Rules.parse(f"{', '.join(terms)} <-> whole [{merged}] where {where}")

    unickpt.save(
        "memory://rules/sum",
        parts,
        overwrite=True,
        options=SaveOptions(chunk_bytes=64, fsync=False),
    )
    (whole,) = flat_names(unickpt.load("memory://rules/sum", rules=rules)).values()
    widths = [(0, pad if axis == outer else 0) for axis in range(joined.ndim)]
    padded = np.pad(joined, widths)
    assert np.array_equal(whole, padded.reshape(whole.shape))

    unickpt.save("memory://rules/parts", {"whole": whole}, overwrite=True)
    back = unickpt.load("memory://rules/parts", rules=rules.inverse)
    assert all(np.array_equal(back[name], parts[name]) for name in parts)


@given(st.data())
def test_pull_finds_each_index_once(data: Any) -> None:
    """The boxes of axes that `pull` gives hold exactly the indices that lie in the range."""
    extents = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    digits = []
    for axis, n in enumerate(extents):
        offset, rest = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
        reverse = data.draw(st.booleans())
        digits.append(Digit(offset + n + rest, offset, n, axis, reverse))
    dim = tuple(digits)
    size = math.prod(d.radix for d in dim)
    low, high = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    line = linear_index(dim)
    expected = sorted(
        at for at in itertools.product(*map(range, extents)) if low <= line.value(at) < high
    )
    found = [
        at
        for ranges in pull([dim], (low,), (high,), tuple((0, n) for n in extents))
        for at in itertools.product(*(range(a, b) for a, b in ranges))
    ]
    assert sorted(found) == expected
