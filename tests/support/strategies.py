"""Hypothesis strategies for shapes, layouts and trees; how many examples are tried."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from unickpt.types import Layout, Mesh

AXES = ("a", "b", "c", "d")


def examples(count: int, **others: Any) -> settings:
    """Settings of a test whose examples take long: `make test` tries half of them, `make soak` all.

    Arguments:
        count: how many there are.
        others: further settings.
    """
    is_short = settings().derandomize  # see tests/conftest.py
    return settings(max_examples=-(-count // 2) if is_short else count, deadline=None, **others)


def shapes(max_rank: int = 4, max_extent: int = 13) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes with uneven extents, zero included."""
    return st.lists(st.integers(0, max_extent), max_size=max_rank).map(tuple)


@st.composite
def meshes(draw: st.DrawFn, max_axes: int = 3, max_size: int = 4) -> Mesh:
    shape = tuple(draw(st.lists(st.integers(1, max_size), max_size=max_axes)))
    count = math.prod(shape)
    per_process = draw(st.integers(1, count))
    processes = tuple(device // per_process for device in range(count))
    order = tuple(draw(st.permutations(processes)))
    return Mesh(AXES[: len(shape)], shape, order)


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout]:
    """A shape and a layout for it; every axis splits one dimension or holds replicas."""
    shape = draw(shapes(max_rank=3))
    mesh = draw(meshes())
    dims: list[list[str]] = [[] for _ in shape]
    for axis in draw(st.permutations(mesh.axes)):
        at = draw(st.integers(0, len(shape)))
        if at < len(shape):
            dims[at].append(axis)
    return shape, Layout(mesh, tuple(tuple(d) for d in dims))


keys = st.one_of(
    st.integers(-(10**20), 10**20),
    st.text(st.characters(codec="utf-8"), max_size=6),
    st.sampled_from(["", "/", "%", ".", "..", "__x", "0", "1", "a/b", "a%2Fb", "c", "zarr.json"]),
)

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=8),
    st.binary(max_size=8),
)


def trees(leaf: st.SearchStrategy[Any] = plain) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(keys, inner, max_size=3),
        ),
        max_leaves=12,
    )
