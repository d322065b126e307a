"""Plans: grids, parts and shares that give every element exactly one writer and one chunk."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import laid_out

from unickpt.commit import writer_choice
from unickpt.commit.writer_choice import Shared
from unickpt.format import chunk_grid
from unickpt.format.index import ArrayEntry
from unickpt.types import Box, Layout, Mesh

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
def test_chunks_tile_the_array_and_none_lies_on_two_processes(
    case: tuple, chunk_bytes: int, data: st.DataObject
) -> None:
    shape, layout = case
    wanted = data.draw(st.none() | st.tuples(*[st.integers(1, 20) for _ in shape]))
    entry = entry_for(shape, layout, chunk_bytes, wanted)
    held = [box for p in set(layout.mesh.processes) for box in layout.local(shape, p)]
    canvas = np.zeros(shape, int)
    for part in chunk_grid.parts(entry):
        for number in range(part.count):
            box = part.chunk_box(number)
            canvas[box.slices] += 1
            assert any(box_of_one.contains(box) for box_of_one in held)
    assert (canvas == 1).all()


@given(laid_out(), st.integers(1, 400))
def test_every_chunk_has_one_writer_and_it_holds_the_chunk(case: tuple, chunk_bytes: int) -> None:
    shape, layout = case
    entry = entry_for(shape, layout, chunk_bytes)
    written: dict[tuple[str, int], list[int]] = {}
    for process in set(layout.mesh.processes):
        held = [
            (part.key, list(part.chunks_in(box)), box, replicas)
            for part in chunk_grid.parts(entry)
            for box, replicas in layout.local(shape, process).items()
        ]
        held = [of for of in held if of[1]]
        units = [
            Shared(key, box.start, replicas, len(numbers), 4 * box.size)
            for key, numbers, box, replicas in held
        ]
        for (key, numbers, _, _), run in zip(
            held, writer_choice.shares(units, process), strict=True
        ):
            for k in run:
                written.setdefault((key, numbers[k]), []).append(process)
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


@given(laid_out(), st.integers(1, 400))
def test_devices_of_one_process_share_small_chunks(case: tuple, chunk_bytes: int) -> None:
    shape, layout = case
    alone = Layout(replace(layout.mesh, processes=(0,) * len(layout.mesh.processes)), layout.dims)
    assert list(alone.local(shape, 0)) == ([Box.whole(shape)] if 0 not in shape else [])
    entry, devices = entry_for(shape, alone, 8 << 20), dict(layout.fragments(shape))
    assert sum(part.count for part in chunk_grid.parts(entry)) == bool(devices)


def test_chunks_that_are_large_enough_end_where_a_device_does() -> None:
    mesh = Mesh(("x",), (8,), (0,) * 8)
    layout = Layout(mesh, (("x",), ()))
    for rows, joined in (512, 512), (16, 16), (15, 30), (4, 32):  # 2 KiB each; up to 64 KiB
        assert chunk_grid.chunk_grid((8 * rows, 512), 4, layout, 8 << 20)[0] == (joined, 512)
    assert chunk_grid.chunk_grid((8, 2), 4, layout, 8 << 20)[0] == (8, 2)
    assert chunk_grid.chunk_grid((8, 2), 4, layout, 16)[0] == (2, 2)
    assert chunk_grid.chunk_grid((8, 2), 4, layout, 8 << 20, (3, 1))[0] == (3, 1)
    two = Layout(Mesh(("x",), (8,), (0,) * 4 + (1,) * 4), (("x",), ()))
    assert chunk_grid.chunk_grid((8, 2), 4, two, 8 << 20)[0] == (4, 2)
    woven = Layout(Mesh(("x",), (8,), (0, 1) * 4), (("x",), ()))
    assert chunk_grid.chunk_grid((8, 2), 4, woven, 8 << 20)[0] == (1, 2)


def test_a_chunk_is_contiguous_rows_near_the_wanted_size() -> None:
    alone = Layout.replicated(2, 1)
    assert chunk_grid.chunk_grid((8192, 4096), 4, alone, 8 << 20) == ((512, 4096), ())
    assert chunk_grid.chunk_grid((3, 5), 4, alone, 8 << 20) == ((3, 5), ())
    # One row is larger than a chunk: rows are split, too.
    assert chunk_grid.chunk_grid((4, 8 << 20), 4, alone, 8 << 20) == ((1, 2 << 20), ())
    # Balanced: not 2 chunks and a sliver.
    assert chunk_grid.free_chunk((1025, 4096), 4, 8 << 20) == (342, 4096)


def test_chunks_end_where_shards_of_later_processes_will() -> None:
    alone, rows = Layout.replicated(2, 1), 8192  # bytes

    def chunk(extent: int, chunk_bytes: int = 8 << 20, layout: Layout = alone) -> int:
        return chunk_grid.chunk_grid((extent, rows // 4), 4, layout, chunk_bytes)[0][0]

    assert chunk(2048) == 512, "of four processes: chunks of 2 MiB would be too small"
    assert chunk(4096) == 512
    assert chunk(14336) == 896, "of eight, in as few chunks as possible"
    assert chunk(16) == 16, "what is not split stays whole"
    assert chunk(2049) == 513, "three shards of 513 rows, and one of 510"
    # What is asked for explicitly and small is taken as it is.
    assert chunk(2048, 3 << 20) == 342
    # Shards that are there already need not be cut again.
    four = Layout(Mesh(("x",), (4,), (0, 1, 2, 3)), (("x",), ()))
    assert chunk(4096, layout=four) == 1024
    # Columns of shards that have been made of rows: neither.
    assert chunk_grid.chunk_grid((4, 4 << 20), 4, alone, 8 << 20)[0] == (1, 2 << 20)


@given(st.integers(1, 1 << 16), st.integers(1, 1 << 16), st.sampled_from([1, 2, 4, 8]))
def test_chunks_for_shards_are_neither_too_small_nor_too_large(
    extent: int, width: int, shards: int
) -> None:
    chunk = chunk_grid.free_chunk((extent, width), 4, 8 << 20, shards)
    plain = chunk_grid.free_chunk((extent, width), 4, 8 << 20)
    nbytes = 4 * math.prod(chunk)
    assert nbytes <= 8 << 20
    assert nbytes >= 4 << 20 or chunk == plain


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
    part = chunk_grid.Part.covering("x", Box((0, 0), (4, 6)), (2, 2))
    assert [part.chunk_key(n) for n in (0, 2, 3)] == ["c/0/0", "c/0/2", "c/1/0"]
    assert chunk_grid.Part.covering("s", Box((), ()), ()).chunk_key(0) == "c"
