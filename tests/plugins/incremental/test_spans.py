"""Chunks that follow each other and did not change: taken by the span, without a look at each."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes import Processes
from support.saving import same

import unickpt
from unickpt import Checkpointer, SaveOptions
from unickpt.arrays.box import Box
from unickpt.format import chunk_grid
from unickpt.format.chunk_grid import Part
from unickpt.plugins.incremental import candidates, unchanged
from unickpt.plugins.incremental.linked_files import LinkedFiles
from unickpt.saving import write_plan

CHUNK = 4096


def options(**more: Any) -> SaveOptions:
    return SaveOptions(chunk_bytes=CHUNK, fsync=False, **more)


def tree() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    return {"w": rng.random((403, 64)), "frozen": rng.random((40, 64)), "b": np.zeros((9, 60))}


@pytest.fixture(autouse=True)
def no_chunk_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of arrays of any size."""
    monkeypatch.setattr(unchanged, "LEAST_BYTES", 0)
    monkeypatch.setattr(unchanged, "_due", lambda *_: ())


ALL_CHANGED = {"**": True}
"""For the save to which the next one refers: it takes the samples."""


def is_stored(path: Path | str, state: Any) -> None:
    assert same(unickpt.load(path), state)
    report = unickpt.verify(path)
    assert report.ok, report.damage


# --- what a part says of many of its chunks -------------------------------------------------------

EXTENTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=0, max_size=3)


@given(EXTENTS, st.data())
def test_of_many_chunks_as_of_each(extents: list[tuple[int, int]], data: st.DataObject) -> None:
    start = tuple(data.draw(st.integers(0, 3)) for _ in extents)
    box = Box(start, tuple(a + n for a, (n, _) in zip(start, extents, strict=True)))
    part = Part.covering("a/b", box, tuple(chunk for _, chunk in extents))
    every = range(part.count)
    assert part.sizes().tolist() == [part.chunk_box(number).size for number in every]
    low = data.draw(st.integers(0, part.count))
    some = range(low, data.draw(st.integers(low, part.count)))
    keys = [chunk_grid.chunk_key(part, number) for number in some]
    assert chunk_grid.chunk_keys(part, some) == keys
    stop = tuple(data.draw(st.integers(a + 1, b)) for a, b in zip(start, box.stop, strict=True))
    begin = tuple(data.draw(st.integers(0, b - 1)) for b in stop)
    within = Box(begin, stop)
    runs = list(part.runs_in(within))
    assert [number for run in runs for number in run] == list(part.chunks_in(within))
    assert all(a.stop < b.start for a, b in pairwise(runs))


def test_keys_of_a_large_grid_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_grid, "_MOST_KEPT", 10)
    part = Part.whole("a", (30, 4), (2, 2))
    assert chunk_grid.chunk_keys(part, range(3, 9)) == [
        chunk_grid.chunk_key(part, number) for number in range(3, 9)
    ]


# --- what is taken --------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["file", "memory"])
def test_an_array_that_did_not_change_is_one_piece_of_work(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path) if storage == "file" else "memory://spans/one"
    state, made = tree(), list[str]()
    unickpt.save(f"{root}/0", state, options=options(changed=ALL_CHANGED))
    known = {"w": False, "frozen": False}

    def noted(kind: Any, name: str) -> Any:
        real = getattr(kind, name)

        def make(*arguments: Any, **named: Any) -> Any:
            found = real(*arguments, **named)
            made.append(f"{name} {found.entry.name}")
            return found

        return make

    monkeypatch.setattr(candidates, "Candidate", noted(candidates, "Candidate"))
    monkeypatch.setattr(write_plan, "WriteItem", noted(write_plan, "WriteItem"))
    for step in range(1, 4):
        state["b"] += 1
        made.clear()
        told = options(base=f"{root}/{step - 1}", changed=known)
        report = unickpt.save(f"{root}/{step}", state, options=told)
        # In memory, what the step before wrote is not borrowed: it is read, and written.
        looked_at = 2 if storage == "file" else 2 * step
        assert made.count("WriteItem w") == made.count("WriteItem frozen") == 1
        assert "Candidate w" not in made
        assert "Candidate frozen" not in made
        assert report.reused_bytes == state["w"].nbytes + state["frozen"].nbytes
        assert report.written_bytes <= state["b"].nbytes * looked_at
        is_stored(f"{root}/{step}", state)


def test_what_one_looks_at_divides_an_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tree()
    unickpt.save(tmp_path / "a", state, options=options(changed=ALL_CHANGED))
    due = {"w": {(96, 0), (400, 0)}}
    monkeypatch.setattr(unchanged, "_due", lambda entry, *_: due.get(entry.name, ()))
    state["b"] += 1
    told = options(base=tmp_path / "a", changed={"w": False, "frozen": False})
    report = unickpt.save(tmp_path / "b", state, options=told)
    assert report.written_bytes == state["b"].nbytes
    is_stored(tmp_path / "b", state)
    state["w"][401] += 1
    with pytest.raises(unickpt.errors.StateChanged, match="'w'"):
        unickpt.save(tmp_path / "c", state, options=told)


def test_of_a_file_that_is_hardly_used_the_chunks_are_written_again(tmp_path: Path) -> None:
    state = {**tree(), "x": np.zeros((90, 64))}
    unickpt.save(tmp_path / "a", state, options=options())
    state["w"][17] += 1
    state["x"] += 1
    unickpt.save(tmp_path / "b", state, options=options(base=tmp_path / "a", changed=ALL_CHANGED))
    del state["x"]  # which was most of the new file
    told = options(base=tmp_path / "b", changed={"w": False, "frozen": False, "b": False})
    report = unickpt.save(tmp_path / "c", state, options=told)
    assert report.written_bytes == CHUNK, "of `w`, and no more"
    is_stored(tmp_path / "c", state)


@pytest.mark.parametrize("which", ["the large file", "all files"])
def test_of_a_file_that_cannot_be_linked_the_chunks_are_written_again(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have as many names as the file system allows, or go right now."""
    state = tree()
    unickpt.save(tmp_path / "a", state, options=options())
    state["w"][264:] += 1  # so that the chunks of `w` are in two files
    unickpt.save(tmp_path / "b", state, options=options(base=tmp_path / "a", changed=ALL_CHANGED))
    linked = LinkedFiles._linked

    def sometimes(share: LinkedFiles, path: str) -> str | None:
        lost = which == "all files" or share._files.size(path) > 100 * 1024
        return None if lost else linked(share, path)

    monkeypatch.setattr(LinkedFiles, "_linked", sometimes)
    told = options(base=tmp_path / "b", changed={"w": False, "frozen": False, "b": False})
    report = unickpt.save(tmp_path / "c", state, options=told)
    nbytes = sum(array.nbytes for array in state.values())
    assert report.written_bytes + report.reused_bytes == nbytes
    assert (report.reused_bytes == 0) == (which == "all files")
    is_stored(tmp_path / "c", state)


@pytest.mark.parametrize("how", ["gone", "too short"])
def test_a_file_that_is_damaged_is_noticed(how: str, tmp_path: Path) -> None:
    """What is not written cannot be taken either: the save fails, and nothing is committed."""
    state = tree()
    unickpt.save(tmp_path / "a", state, options=options(changed=ALL_CHANGED))
    files = (path for path in (tmp_path / "a" / "processes").rglob("*") if path.is_file())
    file = max(files, key=lambda path: path.stat().st_size)
    if how == "gone":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2)
    told = options(base=tmp_path / "a", changed={"w": False, "frozen": False})
    with pytest.raises(unickpt.StorageError, match="which this save keeps, cannot be read"):
        unickpt.save(tmp_path / "b", state, options=told)
    assert not (tmp_path / "b" / "manifest.ocdbt").exists()


# --- in a job -------------------------------------------------------------------------------------

JOB = """
import json, sys
import numpy as np, torch, torch.distributed as dist
import unickpt
from unickpt.plugins.incremental import unchanged

unchanged.LEAST_BYTES, unchanged._due = 0, lambda *_: ()
dist.init_process_group("gloo")
rank = dist.get_rank()
options = unickpt.SaveOptions(
    chunk_bytes=4096, fsync=False, timeout_s=60, check_replicas=sys.argv[2] == "all"
)
tree = {"plain": np.arange(40000.0).reshape(500, 80), "b": np.zeros(9)}
if rank == 0:  # as in a pipeline; the other one is planned to write a part of it
    tree["only"] = -np.arange(40000.0).reshape(500, 80)
said = []
with unickpt.Checkpointer(sys.argv[1], reuse=True, options=options) as run:
    for step in range(4):
        tree["b"] = tree["b"] + 1
        changed = {} if rank and step == 2 else {"plain": False}  # this rank looks at it
        if rank == 0:
            changed["only"] = False
        report = run.save(step, tree, changed=changed).result()
        said.append([report.written_bytes, report.reused_bytes])
print(json.dumps(said))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("replicas", ["all", "samples"])
def test_replicas_share_spans_out(replicas: str, processes: Processes, tmp_path: Path) -> None:
    outs = processes.finish(processes.torch(2, JOB, tmp_path / "run", replicas))
    said = [
        json.loads(next(line for line in out.splitlines() if line.startswith("[["))) for out in outs
    ]
    nbytes = 8 * 40000
    for step in range(1, 4):
        assert sum(own[step][0] for own in said) == 9 * 8, said
        assert sum(own[step][1] for own in said) == 2 * nbytes, said
    assert all(0.3 * nbytes < own[3][1] for own in said), "each has its part of `plain`"
    plain = np.arange(40000.0).reshape(500, 80)
    state = {"plain": plain, "b": np.full(9, 4.0), "only": -plain}
    is_stored(tmp_path / "run" / "step_3", state)


def test_a_run_goes_on_with_spans(tmp_path: Path) -> None:
    state = tree()
    with Checkpointer(tmp_path, reuse=True, keep_last=2, options=options()) as run:
        for step in range(5):
            state["b"] += 1
            run.save(step, state, changed={"w": False, "frozen": False} if step else None)
    is_stored(tmp_path / "step_4", state)
    is_stored(tmp_path / "step_3", {**state, "b": state["b"] - 1})
