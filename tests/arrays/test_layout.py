"""Layouts: nested ceil-chunking, replicas, and their notation."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from support.strategies import laid_out

from unickpt.types import Box, Layout, Mesh


@given(laid_out())
def test_fragments_cover_an_array_exactly_once(case: tuple) -> None:
    shape, layout = case
    canvas = np.zeros(shape, int)
    for box, _ in layout.fragments(shape):
        canvas[box.slices] += 1
    assert (canvas == 1).all()


@given(laid_out())
def test_local_boxes_of_all_processes_are_the_fragments_with_their_replicas(case: tuple) -> None:
    shape, layout = case
    holders: dict[Box, set[int]] = {}
    for process in set(layout.mesh.processes):
        for box, replicas in layout.local(shape, process).items():
            assert process in replicas
            holders.setdefault(box, set()).add(process)
            for dim, bounds in enumerate(zip(box.start, box.stop, strict=True)):
                assert bounds in layout.process_intervals(shape, dim)
    for box, replicas in layout.fragments(shape):  # each in one local box, of the same processes
        (within,) = [of for of in holders if of.intersect(box)]
        assert within.contains(box)
        assert holders[within] == set(replicas)
    assert sum(box.size for box in holders) == np.prod(shape, dtype=int)
    if layout.mesh.has_one_device_each:
        assert holders.keys() == {box for box, _ in layout.fragments(shape)}


@given(laid_out())
def test_neighbours_of_the_same_processes_are_one_interval(case: tuple) -> None:
    shape, layout = case
    owner = np.empty(shape, object)
    for box, replicas in layout.fragments(shape):
        owner[box.slices] = frozenset(replicas)
    if 0 in shape:
        return
    for dim in range(len(shape)):
        intervals = layout.process_intervals(shape, dim)
        assert [intervals[0][0], intervals[-1][1]] == [0, shape[dim]]
        for (_, stop), (start, _) in itertools.pairwise(intervals):
            assert start == stop
            counts = set(Counter(layout.mesh.processes).values())
            if len(counts) == 1 and not _replicated(layout):
                assert (owner.take(start - 1, dim) != owner.take(start, dim)).any()


def _replicated(layout: Layout) -> bool:
    return len([axis for dim in layout.dims for axis in dim]) < len(layout.mesh.axes)


@given(laid_out())
def test_pieces_are_those_of_repeated_ceil_chunks(case: tuple) -> None:
    shape, layout = case
    for dim, axes in enumerate(layout.dims):
        pieces = [np.arange(shape[dim])]
        for axis in axes:
            size = layout.mesh.size(axis)
            pieces = [
                piece[k * step : (k + 1) * step]
                for piece in pieces
                for step in [-(-len(piece) // size)]
                for k in range(size)
            ]
        got = [np.arange(a, b) for a, b in layout.intervals(shape, dim)]
        assert [p.tolist() for p in got] == [p.tolist() for p in pieces]


def test_the_order_of_axes_on_one_dimension_counts() -> None:
    mesh = Mesh(("dp", "tp"), (3, 2), tuple(range(6)))
    outer_tp = Layout(mesh, (("tp", "dp"),))  # FSDP2 over tensor parallelism, 7 rows
    rows = [outer_tp.box((7,), divmod(p, 2)) for p in range(6)]
    assert [(b.start[0], b.stop[0]) for b in rows] == [
        (0, 2), (4, 5), (2, 4), (5, 6), (4, 4), (6, 7),
    ]  # fmt: skip


def test_spec_is_a_partition_spec() -> None:
    mesh = Mesh(("data", "model"), (2, 2), (0, 0, 1, 1))
    assert Layout(mesh, (("data",), ())).spec == ("data", None)
    assert Layout(mesh, (("model", "data"), ())).spec == (("model", "data"), None)
    assert str(Layout(mesh, (("data",), ()))) == "('data', None) on Mesh(data=2, model=2)"


@pytest.mark.parametrize("dims", [(("x",),), (("data",), ("data",))])
def test_layouts_that_do_not_fit_their_mesh_are_refused(dims: tuple) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        Layout(Mesh(("data",), (2,), (0, 1)), dims)
