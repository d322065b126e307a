"""Fragments on no grid: boxes and flat ranges, told by each process without communication."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import Processes

import unickpt
from unickpt.types import Box, LocalFragments

SHAPE = (7, 3, 5)
GLOBAL = np.arange(105, dtype=np.float32).reshape(SHAPE)

JOB = """
import sys, numpy as np, unickpt
from unickpt import ProcessGroup, SaveOptions
from unickpt.types import LocalFragments
me, path, cuts, mode = int(sys.argv[1]), sys.argv[2], eval(sys.argv[3]), sys.argv[4]
shape, flat = (7, 3, 5), np.arange(105, dtype=np.float32)
mine = [(a, flat[a:b].copy()) for a, b in cuts[me]]
options = SaveOptions(group=ProcessGroup(me, len(cuts), "s"), timeout_s=20)
if mode == "save":
    unickpt.save(path, {"x": LocalFragments.flat(shape, mine, dtype="float32")}, options=options)
else:
    into = [(a, np.zeros_like(data)) for a, data in mine]
    unickpt.load(path, {"x": LocalFragments.flat(shape, into, dtype="float32")})
    for (_, got), (_, want) in zip(into, mine):
        assert got.tobytes() == want.tobytes()
"""


def run(processes: Processes, path: Path, cuts: list, mode: str = "save") -> list[str]:
    """Runs the job; returns what each process wrote to stderr."""
    started = [processes.forked(JOB, me, path, cuts, mode) for me in range(len(cuts))]
    return [p.communicate(timeout=60)[1] for p in started]


def test_flat_ranges_of_processes_save_and_load_both_ways(
    processes: Processes, tmp_path: Path
) -> None:
    saved = [[(0, 11), (90, 105)], [(11, 64)], [(64, 90)], []]
    assert run(processes, tmp_path / "c", saved) == [""] * 4
    assert np.array_equal(unickpt.load(tmp_path / "c")["x"], GLOBAL)
    stored = unickpt.open(tmp_path / "c")["x"]
    assert len(stored.parts) == len(stored.fragments) > 4
    assert {holders for _, holders in stored.fragments} == {(0,), (1,), (2,)}
    assert np.array_equal(stored[2:5, :, 1], GLOBAL[2:5, :, 1])
    assert np.array_equal(stored.tensorstore().read().result(), GLOBAL)
    assert unickpt.verify(tmp_path / "c").ok
    assert run(processes, tmp_path / "c", [[(3, 80)], [(80, 105), (0, 3)]], "load") == [""] * 2


def test_holes_and_overlaps_are_named_by_all_processes(
    processes: Processes, tmp_path: Path
) -> None:
    for error in run(processes, tmp_path / "hole", [[(0, 40)], [(41, 105)]]):
        assert "array 'x' of shape [7, 3, 5]: no process holds [2:3, 2:3, 0:1]" in error
    for error in run(processes, tmp_path / "twice", [[(0, 50)], [(45, 105)]]):
        assert "array 'x'" in error
        assert "of process 0 overlaps" in error
        assert "of process 1" in error
    for name in ("hole", "twice"):
        with pytest.raises(unickpt.CheckpointNotFound):
            unickpt.open(tmp_path / name)


def test_a_job_of_one_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    part = LocalFragments(SHAPE, [(Box((0, 0, 0), (6, 3, 5)), GLOBAL[:6])])
    with pytest.raises(unickpt.errors.CoverageError, match=r"no process holds \[6:7, 0:3, 0:5\]"):
        unickpt.save(tmp_path / "c", {"x": part})
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(1, 104), max_size=6), st.sets(st.integers(1, 104), max_size=6),
       st.integers(8, 200), st.uuids())  # fmt: skip
def test_any_cuts_to_any_cuts(save: set, load: set, chunk_bytes: int, unique: object) -> None:
    def ranges(cuts: set[int]) -> list[tuple[int, np.ndarray]]:
        edges = [0, *sorted(cuts), 105]
        return [(a, GLOBAL.ravel()[a:b].copy()) for a, b in itertools.pairwise(edges)]

    path = f"memory://local/{unique}"
    options = unickpt.SaveOptions(chunk_bytes=chunk_bytes)
    unickpt.save(
        path, {"x": LocalFragments.flat(SHAPE, ranges(save))}, overwrite=True, options=options
    )
    into = [(a, np.zeros_like(data)) for a, data in ranges(load)]
    unickpt.load(path, {"x": LocalFragments.flat(SHAPE, into)})
    for (start, data), (_, want) in zip(into, ranges(load), strict=True):
        assert data.tobytes() == want.tobytes(), start


def test_from_a_grid_into_ranges_and_boxes(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"x": GLOBAL}, options=unickpt.SaveOptions(chunk_bytes=48))
    flat = np.zeros(30, np.float32)
    unickpt.load(tmp_path / "c", {"x": LocalFragments.flat(SHAPE, [(20, flat)])})
    assert np.array_equal(flat, np.arange(20, 50))
    box = np.zeros((2, 2, 5), np.float32)
    unickpt.load(tmp_path / "c", {"x": LocalFragments(SHAPE, [(Box((3, 1, 0), (5, 3, 5)), box)])})
    assert np.array_equal(box, GLOBAL[3:5, 1:3])


def test_malformed_fragments_are_refused() -> None:
    x = np.zeros((2, 5), np.float32)
    with pytest.raises(ValueError, match=r"does not lie within shape \(2, 4\)"):
        LocalFragments((2, 4), [(Box((0, 0), (2, 5)), x)])
    with pytest.raises(ValueError, match="does not fit box"):
        LocalFragments((9, 9), [(Box((0, 0), (3, 5)), x)])
    with pytest.raises(ValueError, match="overlap"):
        LocalFragments((9, 9), [(Box((0, 0), (2, 5)), x), (Box((1, 4), (3, 9)), x)])
    with pytest.raises(ValueError, match="1-d data"):
        LocalFragments.flat((9, 9), [(0, x)])
    with pytest.raises(ValueError, match="contiguous"):
        LocalFragments.flat((9, 9), [(0, np.zeros(20)[::2])])
    unickpt.save("memory://local/read_only", {"x": np.zeros(4, np.float32)}, overwrite=True)
    read_only = np.broadcast_to(np.float32(0), (4,))
    with pytest.raises(unickpt.UnsupportedLeaf, match=r"\[0:4\] cannot be filled in place"):
        unickpt.load("memory://local/read_only", {"x": LocalFragments.whole(read_only)})
    with pytest.raises(unickpt.UnsupportedLeaf, match="need a dtype"):
        unickpt.save("memory://local/none", {"x": LocalFragments((2,), [])})
