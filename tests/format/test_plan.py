"""Plans: grids, parts and shares that give every element exactly one writer and one chunk."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import laid_out

from unickpt import Box, Layout, Mesh
from unickpt.commit import chunk_owners
from unickpt.format import chunk_grid
from unickpt.format.index import ArrayEntry

ITEMSIZE = 4


def entry_for(
    shape: tuple[int, ...],
    layout: Layout,
    chunk_bytes: int,
    chunk_shape: tuple[int, ...] | None = None,
) -> ArrayEntry:
    chunk, cut = chunk_grid.chunk_grid(shape, ITEMSIZE, layout, chunk_bytes, chunk_shape)
    return ArrayEntry("x", shape, "float32", chunk, layout, cut)


@given(laid_out(), st.integers(1, 400), st.data())
def test_chunks_tile_the_array_and_none_crosses_a_fragment(
    case: tuple, chunk_bytes: int, data: st.DataObject
) -> None:
    shape, layout = case
    wanted = data.draw(st.none() | st.tuples(*[st.integers(1, 20) for _ in shape]))
    entry = entry_for(shape, layout, chunk_bytes, wanted)
    fragments = [box for box, _ in layout.fragments(shape)]
    canvas = np.zeros(shape, int)
    for part in chunk_grid.parts(entry):
        for number in range(part.count):
            box = part.chunk_box(number)
            canvas[box.slices] += 1
            assert any(fragment.contains(box) for fragment in fragments)
    assert (canvas == 1).all()


@given(laid_out(), st.integers(1, 400))
def test_every_chunk_has_one_writer_and_it_holds_the_chunk(case: tuple, chunk_bytes: int) -> None:
    shape, layout = case
    entry = entry_for(shape, layout, chunk_bytes)
    written: dict[tuple[str, int], list[int]] = {}
    for process in set(layout.mesh.processes):
        for box, replicas in layout.local(shape, process).items():
            for part in chunk_grid.parts(entry):
                numbers = list(part.chunks_in(box))
                for k in chunk_owners.chunks_of_replica("x", box, process, replicas, len(numbers)):
                    written.setdefault((part.key, numbers[k]), []).append(process)
    expected = {(p.key, n) for p in chunk_grid.parts(entry) for n in range(p.count)}
    assert set(written) == expected
    assert all(len(writers) == 1 for writers in written.values())


@given(laid_out(), st.integers(1, 200), st.data())
def test_the_chunks_that_serve_a_box_are_those_that_meet_it(
    case: tuple, chunk_bytes: int, data: st.DataObject
) -> None:
    shape, layout = case
    start = tuple(data.draw(st.integers(0, n)) for n in shape)
    stop = tuple(data.draw(st.integers(a, n)) for a, n in zip(start, shape, strict=True))
    box = Box(start, stop)
    for part in chunk_grid.parts(entry_for(shape, layout, chunk_bytes)):
        meeting = [n for n in range(part.count) if part.chunk_box(n).intersect(box)]
        assert list(part.chunks_in(box)) == meeting


@given(st.integers(1, 40), st.integers(0, 100))
def test_shares_differ_by_one_chunk_at_most(replicas: int, count: int) -> None:
    holders = tuple(range(3, 3 + replicas))
    box = Box((0,), (count + 1,))
    shares = [chunk_owners.chunks_of_replica("x", box, p, holders, count) for p in holders]
    assert sorted(k for share in shares for k in share) == list(range(count))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    for share in shares:
        assert share == sorted(share)


def test_small_replicated_arrays_spread_over_the_replicas() -> None:
    box = Box((0,), (1,))
    writers = [
        p
        for i in range(400)
        for p in range(4)
        if chunk_owners.chunks_of_replica(f"layer/{i}/bias", box, p, (0, 1, 2, 3), 1)
    ]
    assert len(writers) == 400
    assert all(60 < writers.count(p) < 140 for p in range(4))


def test_a_chunk_is_contiguous_rows_near_the_wanted_size() -> None:
    alone = Layout.replicated(2, 1)
    assert chunk_grid.chunk_grid((8192, 4096), 4, alone, 8 << 20) == ((512, 4096), ())
    assert chunk_grid.chunk_grid((3, 5), 4, alone, 8 << 20) == ((3, 5), ())
    # One row is larger than a chunk: rows are split, too.
    assert chunk_grid.chunk_grid((4, 8 << 20), 4, alone, 8 << 20) == ((1, 2 << 20), ())
    # Balanced: not 2 chunks and a sliver.
    assert chunk_grid.chunk_grid((1025, 4096), 4, alone, 8 << 20)[0] == (342, 4096)


def test_a_grid_that_would_need_slivers_becomes_parts() -> None:
    mesh = Mesh(("dp", "tp"), (3, 2), tuple(range(6)))
    layout = Layout(mesh, (("tp", "dp"), ()))
    assert chunk_grid.chunk_grid((7, 5), 4, layout, 8 << 20) == ((1, 5), ())
    chunk, cut = chunk_grid.chunk_grid((1_000_003, 8), 4, layout, 8 << 20)
    assert cut == (0,)
    entry = ArrayEntry("x", (1_000_003, 8), "float32", chunk, layout, cut)
    assert [p.box.shape[0] for p in chunk_grid.parts(entry)] == [
        166668, 166668, 166666, 166667, 166667, 166667,
    ]  # fmt: skip
    assert chunk_grid.parts(entry)[1].key == "x/part_166668_0"


def test_chunk_keys_are_those_of_zarr() -> None:
    part = chunk_grid.Part("x", Box((0, 0), (4, 6)), (2, 2))
    assert [part.chunk_key(n) for n in (0, 2, 3)] == ["c/0/0", "c/0/2", "c/1/0"]
    assert chunk_grid.Part("s", Box((), ()), ()).chunk_key(0) == "c"
