"""Schedules from layouts alone: every process computes its part, and all parts fit together."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unickpt.arrays.layout import Layout, Mesh
from unickpt.format import chunk_grid
from unickpt.format.index import ArrayEntry
from unickpt.plugins.exchange.layout_schedule import Demand, DimensionMap, JobPlan, LayoutPlan
from unickpt.reading.recipes import MappedSource, Unchanged, whole_dims

SHAPES = st.lists(st.integers(0, 13), min_size=0, max_size=3).map(tuple)


@st.composite
def meshes(draw: st.DrawFn, processes: int) -> Mesh:
    """Some or all processes, each with one or several devices."""
    each = draw(st.sampled_from([1, 1, 2]))
    count = draw(st.integers(1, processes))
    members = draw(st.permutations(range(processes)))[:count]
    devices = [process for process in members for _ in range(each)]
    if draw(st.booleans()):
        devices = draw(st.permutations(devices))
    sizes = []
    left = len(devices)
    while left > 1:
        size = draw(st.sampled_from([n for n in range(2, left + 1) if left % n == 0]))
        sizes.append(size)
        left //= size
    sizes = draw(st.permutations([*sizes, *draw(st.sampled_from([[], [1]]))]))
    axes = tuple(f"a{number}" for number in range(len(sizes)))
    return Mesh(axes, tuple(sizes), tuple(devices))


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, rank: int) -> Layout:
    dims: list[list[str]] = [[] for _ in range(rank)]
    for axis in draw(st.permutations(mesh.axes)):
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            dims[dim].append(axis)
    return Layout(mesh, tuple(map(tuple, dims)))


@st.composite
def entries(draw: st.DrawFn, processes: int) -> ArrayEntry:
    """Arrays in one grid, in parts of a layout, or in boxes of any size."""
    shape = draw(SHAPES)
    chunk = tuple(draw(st.integers(1, max(1, n))) for n in shape)
    layout = draw(layouts(draw(meshes(processes)), len(shape)))
    kind = draw(st.sampled_from(["grid", "grid", "cut", "boxes"]))
    cut = (
        tuple(draw(st.sets(st.sampled_from(range(len(shape)))))) if kind == "cut" and shape else ()
    )
    boxes = tuple(layout.fragments(shape)) if kind == "boxes" else None
    return ArrayEntry("x", shape, "int16", chunk, None if boxes else layout, cut, boxes)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, ArrayEntry, list[Demand]]:
    processes = draw(st.integers(1, 7))
    entry = draw(entries(processes))
    mesh, demands = draw(meshes(processes)), []
    for _ in range(draw(st.integers(1, 3))):
        layout = draw(layouts(mesh, len(entry.shape)))
        source: Any = Unchanged(entry)
        shape = entry.shape
        if draw(st.booleans()) and 0 not in shape:
            source, shape = draw(blocks(entry))
            layout = draw(layouts(mesh, len(shape)))
        demand = Demand.from_source(source, layout, shape)
        assert demand is not None
        demands.append(demand)
    return processes, entry, demands


@st.composite
def blocks(draw: st.DrawFn, entry: ArrayEntry) -> tuple[MappedSource, tuple[int, ...]]:
    """A block of a stored array as a block of a transposed, larger one, perhaps in a stack."""
    from unickpt.arrays.index_map import Digit

    source, extents, out, shape = [], [], [], []
    for axis, n in enumerate(entry.shape):
        begin = draw(st.integers(0, n - 1))
        extent = draw(st.integers(1, n - begin))
        before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        extents.append(extent)
        source.append((Digit(n, begin, extent, axis),))
        shape.append(before + extent + after)
        out.append((Digit(shape[-1], before, extent, axis),))
    order = draw(st.permutations(range(len(entry.shape))))
    out, shape = [out[dim] for dim in order], [shape[dim] for dim in order]
    if draw(st.booleans()):
        at = draw(st.integers(0, 2))
        out.insert(0, (Digit(3, at, 1, None),))
        shape.insert(0, 3)
    return MappedSource(entry, tuple(extents), tuple(source), tuple(out)), tuple(shape)


def needed(demand: Demand, entry: ArrayEntry, process: int) -> Any:
    """How often a process needs each stored element, by the layout's own boxes."""
    counts = np.zeros(entry.shape, int)
    numbers = np.indices(entry.shape)
    boxes = {
        demand.layout.box(demand.shape, coordinate)
        for coordinate in demand.layout.mesh.coordinates(process)
    }
    for box in boxes:
        inside = np.ones(entry.shape, bool)
        for index, mapped in zip(numbers, demand.maps, strict=True):
            inside &= (mapped.start <= index) & (index < mapped.stop)
            if mapped.target >= 0:
                at = index - mapped.shift
                inside &= (box.start[mapped.target] <= at) & (at < box.stop[mapped.target])
        for dim, at in demand.fixed:
            inside &= box.start[dim] <= at < box.stop[dim]
        counts += inside
    return counts


@pytest.mark.integration  # hundreds of layouts
@settings(deadline=None, max_examples=100)
@given(cases(), st.integers(0, 1000))
def test_all_parts_fit_together(case: Any, seed: int) -> None:
    processes, entry, demands = case
    plans = [LayoutPlan(entry, demands, process, seed) for process in range(processes)]
    chunks = [[p.chunk(n) for n in range(len(p.rows))] for p in plans]
    readers: dict[int, int] = {}
    for process, (plan, own) in enumerate(zip(plans, chunks, strict=True)):
        found = np.zeros(entry.shape, int)
        for position, chunk in enumerate(own):
            assert readers.setdefault(chunk.row, chunk.owner) == chunk.owner, "all agree"
            assert chunk.box == chunk.part.chunk_box(chunk.number)
            for box in chunk.wanted_boxes[process]:
                assert chunk.box.contains(box)
                assert not box.empty
                found[box.slices] += 1
            moved = sum(b.size for boxes in chunk.wanted_boxes.values() for b in boxes)
            assert np.diff(plan.held_sums, prepend=0)[position] >= 2 * moved
            assert (plan.received[position] == 0) == (chunk.owner == process)
        expected = sum(needed(demand, entry, process) for demand in demands)
        assert np.array_equal(found, expected), "each needed element arrives once for each need"
        assert plan.rows.tolist() == sorted({*plan.rows.tolist()})
    # Both sides of a transfer list the same boxes in the same order.
    by_process = [{chunk.row: chunk for chunk in own} for own in chunks]
    for process, own in enumerate(chunks):
        for chunk in own:
            reading = by_process[chunk.owner][chunk.row]
            assert list(reading.wanted_boxes[process]) == list(chunk.wanted_boxes[process])
            if chunk.owner == process:
                for other in chunk.wanted_boxes:
                    assert chunk.row in by_process[other]
    # Each stored chunk that is needed is read once: its reader is the only one to list receivers.
    read = Counter(c.row for process, own in enumerate(chunks) for c in own if c.owner == process)
    assert set(read.values()) <= {1}
    assert set(read) == set(readers)


@pytest.mark.integration  # hundreds of layouts
@settings(deadline=None, max_examples=100)
@given(cases(), st.integers(0, 1000), st.data())
def test_a_box_goes_to_one_process_of_each_other_node(case: Any, seed: int, data: Any) -> None:
    processes, entry, demands = case
    numbers = st.lists(st.integers(0, 2), min_size=processes, max_size=processes)
    nodes = np.array(data.draw(numbers))
    plans = [LayoutPlan(entry, demands, p, seed, nodes) for p in range(processes)]
    direct = [LayoutPlan(entry, demands, p, seed) for p in range(processes)]
    chunks = [{c.row: c for c in map(p.chunk, range(len(p.rows)))} for p in plans]
    for process, (plan, own) in enumerate(zip(plans, chunks, strict=True)):
        held = np.diff(plan.held_sums, prepend=0)
        for position, chunk in enumerate(own.values()):
            reader, boxes = chunk.owner, list(chunk.wanted_boxes[process])
            assert reader == direct[process].chunk(position).owner
            assert sorted(map(str, boxes)) == sorted(
                map(str, direct[process].chunk(position).wanted_boxes[process])
            )
            assert chunk.hops is not None
            come = [hop for hop in chunk.hops if hop.receiver == process]
            go = [hop for hop in chunk.hops if hop.sender == process]
            assert len(come) + len(go) == len(chunk.hops), "no process lists hops of others"
            assert [hop.box for hop in come] == ([] if reader == process else boxes)
            for hop in come:
                first = hop.sender == reader and not hop.is_relayed
                assert first or nodes[hop.sender] == nodes[process] != nodes[reader]
            assert {h.box for h in go if h.is_relayed} <= {h.box for h in come if not h.is_relayed}
            assert held[position] >= 2 * sum(h.box.size for h in go if h.is_relayed or not come)
            for other in {hop.receiver for hop in go} | {hop.sender for hop in come}:
                for pair in (process, other), (other, process):
                    both = [
                        [hop for hop in c.hops or () if (hop.sender, hop.receiver) == pair]
                        for c in (chunk, chunks[other][chunk.row])
                    ]
                    assert both[0] == both[1], "both sides list the same, in the same order"
    for process, plan in enumerate(plans):
        for position, row in enumerate(plan.rows.tolist()):
            chunk = chunks[process][row]
            if chunk.owner != process:
                continue
            receivers = plan.receivers(position)
            of_node = Counter(nodes[hop.receiver] for hop in chunk.hops or ())
            pieces = zip(receivers.pieces.tolist(), nodes[receivers.processes], strict=True)
            expected = Counter(node for _, node in set(pieces))
            del expected[nodes[process]], of_node[nodes[process]]
            assert of_node == expected, "each piece crosses once to each node that needs it"


def test_relays_take_turns() -> None:
    """16 replicas on two nodes: of each node each relays about as much."""
    shape = (1000, 16)
    entry = ArrayEntry("x", shape, "int8", (1, 16))
    demand = Demand.from_source(Unchanged(entry), Layout.replicated(2, 16), shape)
    assert demand is not None
    nodes, relayed = np.repeat([0, 1], 8), Counter[int]()
    for process in range(16):
        plan = LayoutPlan(entry, [demand], process, 5, nodes)
        for chunk in map(plan.chunk, range(len(plan.rows))):
            relayed[process] += any(h.is_relayed and h.sender == process for h in chunk.hops or ())
    assert sum(relayed.values()) == 1000
    assert max(relayed.values()) <= 1.25 * 1000 / 16


@given(st.lists(cases(), min_size=1, max_size=3), st.integers(8, 20_000))
def test_rounds_have_all_chunks_and_fit(every: list[Any], most: int) -> None:
    processes = max(count for count, _, _ in every)
    arrays = {str(n): (entry, demands) for n, (_, entry, demands) in enumerate(every)}
    renamed = [
        ArrayEntry(n, e.shape, e.dtype, e.chunk, e.layout, e.cut, e.boxes)
        for n, (e, _) in arrays.items()
    ]

    def job(process: int) -> JobPlan:
        return JobPlan(
            renamed, lambda e, seed: LayoutPlan(e, arrays[e.name][1], process, seed), most
        )

    jobs = [job(process) for process in range(processes)]
    (end,) = {plan.end for plan in jobs}
    seen = [Counter[str]() for _ in jobs]
    sent = Counter[tuple[int, int]]()
    start = 0
    while start < end:
        stop = min(plan.round_end(start) for plan in jobs)
        assert start < stop <= end
        for process, plan in enumerate(jobs):
            chunks = plan.chunks(start, stop)
            held = 0
            for chunk in chunks:
                seen[process][chunk.entry.name] += 1
                boxes = {p: sum(b.size for b in bs) for p, bs in chunk.wanted_boxes.items()}
                held += 2 * (sum(boxes.values()) if chunk.owner == process else boxes[process])
                for other, size in boxes.items():
                    if chunk.owner == process != other:
                        sent[process, other] += size
                    elif other == process != chunk.owner:
                        sent[chunk.owner, process] -= size
            assert held <= most or len(chunks) == 1
        assert not any(sent.values()), "what is sent is received in the same round"
        start = stop
    assert all(dict(s) == plan.counts for s, plan in zip(seen, jobs, strict=True))


def test_boxes_of_a_process_have_one_order() -> None:
    """A transposed array, of which a process holds two pieces in another order than the stored."""
    mesh = Mesh(("x", "y"), (2, 2), (1, 0, 0, 1))
    entry = ArrayEntry("x", (4, 4), "int8", (4, 4))
    demand = Demand(
        Layout(mesh, (("x",), ("y",))),
        (4, 4),
        (DimensionMap(1, 0, 0, 4), DimensionMap(0, 0, 0, 4)),
    )
    (first,), (second,) = ([LayoutPlan(entry, [demand], p).chunk(0)] for p in range(2))
    assert first.owner == second.owner
    other = 1 - first.owner
    boxes = [chunk.wanted_boxes[other] for chunk in (first, second)]
    assert list(boxes[0]) == list(boxes[1])
    assert len(boxes[0]) == 2


def test_reading_is_spread_evenly() -> None:
    """Replicas; columns from rows; and pieces that end amid chunks, where two need each chunk."""
    count, rows = 64, 64 * 4
    mesh = Mesh(("x",), (count,), tuple(range(count)))
    stored = Layout(mesh, (("x",), ()))
    for spec, shape, chunk in (
        (((), ()), (rows, 64), (1, 64)),
        (((), ("x",)), (rows, 64), (1, 64)),
        ((("x",), ()), (rows * 3, 64), (8, 64)),
    ):
        read = Counter[int]()
        for number in range(20):
            entry = ArrayEntry(str(number), shape, "int8", chunk, stored)
            demand = Demand.from_source(Unchanged(entry), Layout(mesh, spec), shape)
            assert demand is not None
            seed = number * chunk_grid.chunk_count(entry)
            for process in range(count):
                plan = LayoutPlan(entry, [demand], process, seed)
                read[process] += int((plan.readers == process).sum())
        mean = sum(read.values()) / count
        assert mean == 20 * chunk_grid.chunk_count(entry) / count, "each once"
        assert max(read.values()) <= 1.25 * mean, (spec, read)


def test_sources_that_are_not_shifted_blocks_have_no_demand() -> None:
    from unickpt.arrays.index_map import Digit

    entry = ArrayEntry("x", (6, 4), "int8", (6, 4))
    layout = Layout.replicated(2, 2)
    turned = MappedSource(
        entry, (6, 4), ((Digit(6, 0, 6, 0, True),), (Digit(4, 0, 4, 1),)), whole_dims((6, 4))
    )
    merged = MappedSource(
        entry,
        (6, 2, 2),
        ((Digit(6, 0, 6, 0),), (Digit(2, 0, 2, 1), Digit(2, 0, 2, 2))),
        ((Digit(6, 0, 6, 0),), (Digit(2, 0, 2, 2), Digit(2, 0, 2, 1))),
    )
    repeated = MappedSource(
        entry, (6, 4), whole_dims((6, 4)), ((Digit(6, 0, 6, 0),), (Digit(6, 0, 6, 0),))
    )
    for source in (turned, merged, repeated):
        assert Demand.from_source(source, layout, (6, 4)) is None
    plain = MappedSource(entry, (6, 4), whole_dims((6, 4)), whole_dims((6, 4)))
    assert Demand.from_source(plain, layout, (6, 4)) == Demand(
        layout, (6, 4), (DimensionMap(0, 0, 0, 6), DimensionMap(1, 0, 0, 4))
    )
