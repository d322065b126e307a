"""Boxes of arrays that lie in files in any order, read in ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.foreign import count_reads

from unickpt import Checkpoint, CheckpointCorrupt
from unickpt.format import file_ranges
from unickpt.format.file_ranges import FileBox, FileRange, RangeReader, of_boxes, whole
from unickpt.format.files import Files
from unickpt.format.index import Index
from unickpt.storage.paths import resolve
from unickpt.trees import tree_json
from unickpt.types import Box


def reader(folder: Path, entry: Any, boxes: list[FileBox]) -> Checkpoint:
    node = tree_json.from_names([entry.name])
    index = Index(tree_json.to_json(node), {entry.name: entry})
    found = RangeReader(Files(resolve(folder)), index, {entry.name: boxes})
    found.format = "test"
    return Checkpoint(found)


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Box]:
    """A shape, strides, and a box: permutations, gaps, overlaps and repetitions."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    if draw(st.booleans()):
        order = draw(st.permutations(range(len(shape))))
        steps, width = [0] * len(shape), 1
        for d in reversed(order):
            steps[d] = width
            width *= max(1, shape[d]) + draw(st.integers(0, 3))
    else:
        steps = [draw(st.integers(0, 40)) for _ in shape]
    starts = [draw(st.integers(0, max(0, n - 1))) for n in shape]
    stops = [draw(st.integers(a, n)) for a, n in zip(starts, shape, strict=True)]
    return shape, tuple(steps), Box(tuple(starts), tuple(stops))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.mark.parametrize("sizes", [(4 << 20, 64 << 10), (64, 16), (8, 1 << 20)])
@pytest.mark.parametrize("dtype", ["<i2", ">i4", "|u1"])
def test_any_strides_read_as_numpy_reads_them(
    folder: Path, sizes: tuple[int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small chunks and gaps, so that all ways to read a box occur.
    monkeypatch.setattr(file_ranges, "CHUNK_BYTES", sizes[0])
    monkeypatch.setattr(file_ranges, "_NEAR", sizes[1])
    at, kind = 3, np.dtype(dtype)

    @given(views())
    def check(view: tuple[tuple[int, ...], tuple[int, ...], Box]) -> None:
        shape, steps, box = view
        last = sum((n - 1) * s for n, s in zip(shape, steps, strict=True) if n)
        data = np.random.default_rng(last).integers(0, 120, max(1, last + 1)).astype(kind)
        (folder / "f").write_bytes(b"x" * at + data.tobytes())
        found = FileBox(Box.whole(shape), FileRange("f", at, dtype[0] == ">"), 0, steps)
        native = kind.newbyteorder("=")
        opened = reader(folder, whole("w", shape, native.name, found), [found])
        strides = tuple(s * kind.itemsize for s in steps)
        expected = np.lib.stride_tricks.as_strided(data, shape, strides).astype(native)
        assert opened["w"][...].tobytes() == expected.tobytes()
        assert opened["w"].read(box).tobytes() == expected[box.slices].tobytes()

    check()


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_an_array_of_several_boxes(folder: Path, rows: int, cols: int, a: int, b: int) -> None:
    array = np.arange(rows * cols, dtype=np.int32).reshape(rows, cols)
    a, b = min(a, rows), min(b, cols)
    every = [
        Box((top, left), (bottom, right))
        for top, bottom in ((0, a), (a, rows))
        for left, right in ((0, b), (b, cols))
        if top < bottom and left < right
    ]
    boxes = []
    for n, box in enumerate(every):
        column_major = n % 2 == 1
        piece = array[box.slices]
        (folder / f"{n}").write_bytes((piece.T if column_major else piece).tobytes())
        steps = (1, box.shape[0]) if column_major else None
        boxes.append(FileBox(box, FileRange(f"{n}", 0), 0, steps))
    opened = reader(folder, of_boxes("w", (rows, cols), "int32", boxes), boxes)
    assert np.array_equal(opened["w"][...], array)


def test_a_few_rows_are_a_few_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(3000 * 1000, dtype=np.int64).reshape(3000, 1000)
    (tmp_path / "f").write_bytes(array.tobytes())
    reads = count_reads(monkeypatch)
    for view, steps in ((array, None), (array.T, (1, 1000))):
        found = FileBox(Box.whole(view.shape), FileRange("f", 0), 0, steps)
        opened = reader(tmp_path, whole("w", view.shape, "int64", found), [found])
        reads.clear()
        box = Box((0, 0), (1, 1))
        assert opened["w"].read(box) == array[0, 0]
        assert sum(count for _, count in reads) <= file_ranges.CHUNK_BYTES


def test_a_column_far_apart_takes_no_memory_for_what_lies_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, step = 300, 10_000_000
    with (tmp_path / "f").open("wb") as file:
        for n in range(count):
            file.seek(n * step * 8)
            file.write(np.int64(n).tobytes())
    found = FileBox(Box.whole((count,)), FileRange("f", 0), 0, (step,))
    opened = reader(tmp_path, whole("w", (count,), "int64", found), [found])
    reads = count_reads(monkeypatch)
    assert np.array_equal(opened["w"][...], np.arange(count))
    assert sum(size for _, size in reads) == count * 8


def test_near_columns_are_read_in_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(600_000, dtype=np.int32).reshape(6000, 100)
    (tmp_path / "f").write_bytes(array.tobytes())
    found = FileBox(Box.whole((6000, 2)), FileRange("f", 4), 0, (100, 1))
    opened = reader(tmp_path, whole("w", (6000, 2), "int32", found), [found])
    reads = count_reads(monkeypatch)
    assert np.array_equal(opened["w"][...], array[:, 1:3])
    assert len(reads) <= 2


def test_an_array_beyond_its_file_names_both(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(100))
    for found in (
        FileBox(Box.whole((5, 5)), FileRange("f", 4)),
        FileBox(Box.whole((5, 5)), FileRange("g", 0)),
        FileBox(Box.whole((5, 5)), FileRange("f", 0), 0, (9, 1)),
        FileBox(Box.whole((5, 5)), FileRange("f", 8), 0, (-5, 1)),
    ):
        opened = reader(tmp_path, whole("w", (5, 5), "float32", found), [found])
        with pytest.raises(CheckpointCorrupt, match=r"array 'w'.*(f|g|stored)"):
            opened["w"][...]


def test_shapes_that_no_data_justify_take_no_memory(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(100))
    huge = (1 << 30, 1 << 10)
    for steps in (None, (0, 0), (0, 1)):
        found = FileBox(Box.whole(huge), FileRange("f", 0), 0, steps)
        with pytest.raises(CheckpointCorrupt, match="array 'w'"):
            reader(tmp_path, whole("w", huge, "float32", found), [found])["w"][...]


def test_repeated_elements(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(np.arange(3, dtype=np.int16).tobytes())
    found = FileBox(Box.whole((40_000, 3)), FileRange("f", 0), 0, (0, 1))
    opened = reader(tmp_path, whole("w", (40_000, 3), "int16", found), [found])
    assert np.array_equal(opened["w"][...], np.tile(np.arange(3), (40_000, 1)))


def test_row_major_strides() -> None:
    assert file_ranges.row_major((4, 3, 2)) == (6, 2, 1)
    assert file_ranges.row_major(()) == ()
