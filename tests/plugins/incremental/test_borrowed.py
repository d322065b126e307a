"""Checkpoints that borrow chunks from one beside them, in storage without hard links."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from support.run_folders import refuse, run_folder
from support.saving import in_job, same
from typer.testing import CliRunner

import unickpt
from unickpt import CheckpointCorrupt, Checkpointer, CheckpointExists, SaveConflict, SaveOptions
from unickpt.arrays.layout import Layout, Mesh
from unickpt.cli.app import app
from unickpt.errors import UnsupportedFormat
from unickpt.format import borrowed, index_json
from unickpt.format.index import ArrayEntry, BaseEntry, Index
from unickpt.storage import paths

CHUNK = 4096
ROWS = 64


@pytest.fixture(params=["memory", "s3", "no links"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder for checkpoints."""
    with run_folder(request, tmp_path) as folder:
        yield folder


def tree() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        "w": rng.random((ROWS, CHUNK // 32)),
        "h": rng.random(3000).astype(np.float32),
        "count": np.array(7),
        "step": 1,
    }


def save(path: str, state: Any, **options: Any) -> unickpt.types.SaveReport:
    made = SaveOptions(chunk_bytes=CHUNK, fsync=False, **options)
    return unickpt.save(path, state, options=made)


def is_whole(path: str, state: Any) -> None:
    assert same(unickpt.load(path), state)
    report = unickpt.verify(path)
    assert report.ok, report.damage


def remove(path: str) -> None:
    paths.resolve(path).remove(paths.context())


def test_chunks_are_borrowed_along_a_chain(run: str) -> None:
    state = tree()
    states = []
    for n in range(4):
        if n:
            state["w"][20 * n - 1] += 1
        state["count"] = np.array(n)
        report = save(f"{run}/s{n}", state, base=f"{run}/s{n - 1}" if n else None)
        states.append({k: np.copy(v) if k != "step" else v for k, v in state.items()})
        assert report.written_bytes + report.reused_bytes == report.bytes
        assert report.written_bytes < (n * 5000 if n else report.bytes + 1)
        assert unickpt.open(f"{run}/s{n}").index.reused == report.reused_bytes
        bases = [base.name for base in unickpt.open(f"{run}/s{n}").index.bases]
        assert bases == ["s0"] * (n > 0)  # whole itself: nothing else is needed
    for n, expected in enumerate(states):
        is_whole(f"{run}/s{n}", expected)
    found = unickpt.open(f"{run}/s3")
    assert np.array_equal(found["w"][18:22], state["w"][18:22])
    assert unickpt.diff(f"{run}/s3", f"{run}/s2").same is False
    unickpt.convert(f"{run}/s3", f"{run}/whole")
    for n in range(4):
        remove(f"{run}/s{n}")
    is_whole(f"{run}/whole", state)


def test_the_report_and_inspect_name_what_must_stay(run: str) -> None:
    assert save(f"{run}/a", tree()).bases == ()
    report = save(f"{run}/b", tree(), base=f"{run}/a")
    assert report.bases == ("a",)
    assert "cannot be read without" in report._repr_html_()
    shown = CliRunner().invoke(app, ["inspect", f"{run}/b"], env={"COLUMNS": "200"}).stdout
    assert "in 'a', without which it cannot be read" in " ".join(shown.split())
    told = json.loads(CliRunner().invoke(app, ["inspect", "--json", f"{run}/b"]).stdout)
    assert told["totals"]["bases"] == ["a"]
    unickpt.copy(f"{run}/b", f"{run}/whole")
    shown = CliRunner().invoke(app, ["inspect", f"{run}/whole"]).stdout
    assert "without which" not in shown


def test_a_missing_or_other_base_is_told_when_it_is_opened(run: str) -> None:
    state = tree()
    save(f"{run}/a", state)
    save(f"{run}/b", state, base=f"{run}/a")
    with pytest.raises(UnsupportedFormat, match="slicing"):
        unickpt.open(f"{run}/b")["w"].tensorstore()
    remove(f"{run}/a")
    with pytest.raises(CheckpointCorrupt, match=r"did not change are in .*/a, which is missing"):
        unickpt.open(f"{run}/b")
    save(f"{run}/a", state)
    with pytest.raises(CheckpointCorrupt, match="was replaced by another checkpoint"):
        unickpt.load(f"{run}/b")


def test_a_base_that_is_needed_is_not_replaced(run: str) -> None:
    state = tree()
    save(f"{run}/a", state)
    save(f"{run}/b", state, base=f"{run}/a")
    with pytest.raises(CheckpointExists, match="has chunks of b, which did not write them again"):
        unickpt.save(f"{run}/a", state, overwrite=True)
    is_whole(f"{run}/b", state)
    options = SaveOptions(chunk_bytes=CHUNK, base=f"{run}/b")  # not of itself
    report = unickpt.save(f"{run}/b", state, overwrite=True, options=options)
    assert report.reused_bytes == 0
    unickpt.save(f"{run}/a", {"other": 1}, overwrite=True)
    is_whole(f"{run}/b", state)


def test_retention_keeps_what_is_needed(run: str) -> None:
    options = SaveOptions(chunk_bytes=CHUNK, fsync=False)
    state = tree()
    with Checkpointer(run, keep_last=1, reuse=True, options=options) as steps:
        for step in range(5):
            state["h"][step] += 1
            report = steps.save(step, state, wait=True).result()
            assert (report.reused_bytes > state["w"].nbytes // 2) == (step > 0)
            steps.wait()
            assert unickpt.verify(steps.path(step)).ok
        assert steps.steps() == [0, 4]
        with pytest.raises(SaveConflict, match="has chunks of step_4"):
            steps.delete(0)
        state["w"] += 1
        state["h"] += 1
        assert steps.save(5, state, wait=True).result().reused_bytes == state["count"].nbytes
        steps.wait()
        assert steps.steps() == [0, 5]  # as long as one byte of it is needed
        steps.save(6, state, wait=True)
        steps.wait()
        assert steps.steps() == [6]
    is_whole(f"{run}/step_6", state)


def test_a_base_of_which_little_is_used_is_left(run: str) -> None:
    state = {"w": tree()["w"]}
    save(f"{run}/0", state)
    for n, changed in enumerate([9, 0, 0], 1):
        state["w"][: changed * ROWS // 16] += 1
        report = save(f"{run}/{n}", state, base=f"{run}/{n - 1}")
        assert report.written_bytes == [9, 16, 0][n - 1] * state["w"].nbytes // 16
        is_whole(f"{run}/{n}", state)


def test_a_checkpoint_elsewhere_is_no_base(run: str) -> None:
    state = tree()
    save(f"{run}/x/a", state)
    assert save(f"{run}/b", state, base=f"{run}/x/a").reused_bytes == 0
    is_whole(f"{run}/b", state)


def test_several_processes(run: str) -> None:
    state = tree()

    def work(group: unickpt.ProcessGroup, path: str, base: str | None) -> unickpt.types.SaveReport:
        made = SaveOptions(chunk_bytes=CHUNK, fsync=False, group=group, timeout_s=20, base=base)
        return unickpt.save(path, state, options=made)

    for n in range(3):
        if n:
            state["w"][9 * n] += 1
        base = f"{run}/{n - 1}" if n else None
        reports = in_job(3, lambda group, n=n, base=base: work(group, f"{run}/{n}", base))
        assert all(isinstance(report, unickpt.types.SaveReport) for report in reports), reports
    assert sum(report.reused_bytes for report in reports) > 0.8 * reports[0].bytes
    assert [base.name for base in unickpt.open(f"{run}/2").index.bases] == ["0"]
    is_whole(f"{run}/2", state)


def test_ls_tells_what_is_new(run: str) -> None:
    if run.startswith("memory"):
        pytest.skip("the command line sees no memory of this process")
    state = tree()
    save(f"{run}/a", state)
    save(f"{run}/b", state, base=f"{run}/a")
    listed = json.loads(CliRunner().invoke(app, ["ls", run, "--json"]).stdout)["checkpoints"]
    assert [facts["new_bytes"] for facts in listed] == [
        listed[0]["bytes"],
        state["count"].nbytes if os.path.isabs(run) else 0,
    ] or listed[1]["new_bytes"] < 100


# --- hostile --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\\b", "a\0", "/etc"])
def test_a_base_is_one_folder_beside(name: str) -> None:
    index = Index({"dict": []}, {}, bases=(BaseEntry(name, "0" * 16),), borrowed=1)
    with pytest.raises(CheckpointCorrupt, match="no name of a folder"):
        index_json.decode(index_json.encode(index), "here")


@pytest.mark.parametrize("count", [0, -1, 1 << 62, True, "1", None])
def test_the_number_of_borrowed_chunks(count: Any) -> None:
    index = Index({"dict": []}, {}, bases=(BaseEntry("a", "0" * 16),), borrowed=count)
    with pytest.raises(CheckpointCorrupt, match="'borrowed'"):
        index_json.decode(index_json.encode(index), "here")


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([(0, 0, 0), (0, 0, 0)], "one twice"),
        ([(3, 0, 0), (1, 0, 0)], "one twice"),
        ([(4, 0, 0)], "do not exist"),
        ([(1, 1, 0)], "names a base that the index does not"),
        ([(1, 0, 1), (1, 0, 1)], "one twice"),
        ([(1, 0, 2), (1, 0, 1)], "one twice"),
        ([(1, 0, 0), (1, 0, 1)], "one twice"),
    ],
)
def test_a_hostile_table(rows: list[tuple[int, int, int]], why: str) -> None:
    alone = Layout(Mesh((), (), (0,)), ((),))
    entry = ArrayEntry("w", (4,), "uint8", (1,), alone, composed=1, additions=1)
    arrays = {"w": entry} if any(link for _, _, link in rows) else {}
    data = np.array(rows, borrowed.DTYPE).tobytes()
    index = Index(
        None, arrays, bases=(BaseEntry("a", ""),), chunks=4, borrowed=len(rows),
        borrowed_xxh3=f"{xxhash.xxh3_64_intdigest(data):016x}",
    )  # fmt: skip
    with pytest.raises(ValueError, match=why):
        borrowed.decode(data, index)


def test_a_folder_that_was_moved_without_its_base(tmp_path: Path) -> None:
    state = tree()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", refuse)
        save(str(tmp_path / "a"), state)
        save(str(tmp_path / "b"), state, base=tmp_path / "a")
    (tmp_path / "other").mkdir()
    shutil.move(tmp_path / "b", tmp_path / "other" / "b")
    with pytest.raises(CheckpointCorrupt, match="is missing; put it back"):
        unickpt.load(tmp_path / "other" / "b")
    shutil.copytree(tmp_path / "a", tmp_path / "other" / "a")
    is_whole(str(tmp_path / "other" / "b"), state)
