"""A checkpoint with a feature or a format that is not known is not read, replaced or removed, nor
is what it refers to."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.run_folders import refuse
from support.unknown import with_feature

import unickpt
from unickpt import Checkpointer, SaveOptions
from unickpt.errors import CheckpointExists, SaveConflict, UnsupportedFormat
from unickpt.runs import save_leftovers
from unickpt.runs.pruning import PruneRun
from unickpt.runs.retention import Retention

FAST = SaveOptions(fsync=False, chunk_bytes=800)
UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({}, "needs the feature 'telepathy'"),
    ({"feature": "", "format": 2}, "its format is 2"),
]
NAMES = ["feature", "format"]


def state(step: int) -> dict[str, Any]:
    rows = np.arange(400.0).reshape(40, 10)
    rows[step] *= -1
    return {"rows": rows, "step": step}


def files(path: Path) -> dict[str, bytes]:
    """All that is stored there, but for locks."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and "lock" not in file.name
    }


@pytest.mark.parametrize(("changes", "said"), UNKNOWN, ids=NAMES)
@pytest.mark.parametrize(
    "act",
    [
        unickpt.load,
        unickpt.open,
        unickpt.verify,
        lambda path: unickpt.save(path, {"w": 1}, overwrite=True, options=FAST),
        lambda path: unickpt.copy(path.with_name("other"), path, overwrite=True),
        lambda path: unickpt.convert(path.with_name("other"), path, overwrite=True),
        pytest.param(
            lambda path: unickpt.convert(path.with_name("other"), path, to="dcp", overwrite=True),
            marks=pytest.mark.plugins,
        ),
        lambda path: unickpt.convert(path, path.with_name("new")),
        lambda path: unickpt.copy(path, path.with_name("new")),
    ],
    ids=["load", "open", "verify", "save", "copy", "convert", "export", "convert it", "copy it"],
)
def test_it_is_neither_read_nor_replaced(
    act: Callable[[Path], Any], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "c"
    for name in ("c", "other"):
        unickpt.save(tmp_path / name, state(0), options=FAST)
    with_feature(path, **changes)
    before = files(path)
    with pytest.raises(UnsupportedFormat, match=said):
        act(path)
    assert files(path) == before


def test_what_is_damaged_may_be_replaced_and_removed(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options=FAST) as run:
        for step in range(2):
            run.save(step, state(step), wait=True)
    for step in range(2):
        (manifest,) = (tmp_path / f"step_{step}").glob("manifest.ocdbt")
        manifest.write_bytes(manifest.read_bytes()[:-1])
    unickpt.save(tmp_path / "step_0", state(0), overwrite=True, options=FAST)
    with Checkpointer(tmp_path, options=FAST) as run:
        run.delete(1)
    assert not (tmp_path / "step_1").exists()


@pytest.mark.parametrize(("changes", "said"), UNKNOWN, ids=NAMES)
def test_a_run_leaves_such_a_step_and_says_so(
    changes: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path, options=FAST) as run:
        for step in range(3):
            run.save(step, state(step), wait=True)
    with_feature(tmp_path / "step_1", **changes)
    before = files(tmp_path / "step_1")
    with caplog.at_level(logging.WARNING), Checkpointer(tmp_path, keep_last=1, options=FAST) as run:
        with pytest.raises(UnsupportedFormat, match=said):
            run.delete(1)
        with pytest.raises(UnsupportedFormat, match=said):
            run.load(None, step=1)
        for step in range(3, 5):
            run.save(step, state(step), wait=True)
        run.wait()
        assert run.steps() == [1, 4]
    told = [record.getMessage() for record in caplog.records]
    assert len([each for each in told if said in each]) == 1, told
    assert files(tmp_path / "step_1") == before


def test_a_run_does_not_replace_such_a_step(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options=FAST) as run:
        run.save(0, state(0), wait=True)
    with_feature(tmp_path / "step_0")
    before = files(tmp_path / "step_0")
    with Checkpointer(tmp_path, options=FAST) as run:
        with pytest.raises(UnsupportedFormat, match="telepathy"):
            run.save(0, state(1), overwrite=True, wait=True)
        with pytest.raises(UnsupportedFormat, match="telepathy"):
            run.load(None)
    assert files(tmp_path / "step_0") == before


def borrowing(folder: Path) -> None:
    """`step_1`, which is not known, has values in `step_0`."""
    with (
        mock.patch.object(os, "link", refuse),
        Checkpointer(folder, reuse=True, options=FAST) as run,
    ):
        for step in range(2):
            run.save(step, state(step), wait=True)
    assert unickpt.open(folder / "step_1").index.bases
    with_feature(folder / "step_1")


@pytest.mark.plugins
@pytest.mark.plugins
def test_what_it_refers_to_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    borrowing(folder)
    before = files(folder / "step_0")
    unickpt.save(tmp_path / "other", state(0), options=FAST)
    with pytest.raises(CheckpointExists, match="step_1"):
        unickpt.save(folder / "step_0", state(0), overwrite=True, options=FAST)
    with pytest.raises(CheckpointExists, match="step_1"):
        unickpt.copy(tmp_path / "other", folder / "step_0", overwrite=True)
    with pytest.raises(CheckpointExists, match="step_1"):
        unickpt.convert(tmp_path / "other", folder / "step_0", to="dcp", overwrite=True)
    with Checkpointer(folder, keep_last=1, options=FAST) as run:
        with pytest.raises(SaveConflict, match="step_1"):
            run.delete(0)
        for step in range(2, 4):
            run.save(step, state(step), wait=True)
        run.wait()
        assert run.steps() == [0, 1, 3]
    assert files(folder / "step_0") == before


@pytest.mark.plugins
def test_a_retired_step_that_it_refers_to_stays(tmp_path: Path) -> None:
    borrowing(tmp_path)
    run = save_leftovers.paths.resolve(tmp_path / "step_0")
    digest = save_leftovers.borrowed.retire(run, save_leftovers.paths.context())
    before = files(tmp_path / "step_0")
    assert digest
    with mock.patch.object(save_leftovers, "RECENT_S", -1.0):
        assert not save_leftovers.clean(tmp_path, save_leftovers.find(tmp_path).orphans)
    with Checkpointer(tmp_path, keep_last=1, options=FAST) as ckpt:
        ckpt.save(2, state(2), wait=True)
        ckpt.wait()
    assert files(tmp_path / "step_0") == before


def test_nothing_of_it_is_cleaned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither remains of other attempts in its folder, nor itself if it is retired."""
    for name in ("unused", "retired"):
        unickpt.save(tmp_path / name, state(0), options=FAST)
        with_feature(tmp_path / name)
    other = tmp_path / "unused" / "processes" / "0123456789abcdef-000000" / "00000" / "d"
    other.mkdir(parents=True)
    (other / ("0" * 32)).write_bytes(b"x")
    location = save_leftovers.paths.resolve(tmp_path / "retired")
    save_leftovers.borrowed.retire(location, save_leftovers.paths.context())
    old = time.time() - 1e6
    for file in tmp_path.rglob("*"):
        os.utime(file, (old, old))
    before = files(tmp_path)
    with caplog.at_level(logging.WARNING):
        found = save_leftovers.find(tmp_path)
    assert not found.orphans
    assert not found.under_way
    told = " ".join(record.getMessage() for record in caplog.records)
    for name in ("unused", "retired"):
        assert f"{tmp_path / name}: it needs the feature 'telepathy'" in told
    assert files(tmp_path) == before


def test_pruning_says_why_it_stays(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options=FAST) as run:
        for step in range(4):
            run.save(step, state(step), wait=True)
    with_feature(tmp_path / "step_1")
    prune = PruneRun(tmp_path, Retention(keep_last=1))
    plan = prune.plan()
    assert plan.removed == [0, 2]
    assert "it needs the feature 'telepathy'" in plan.kept[1][0]
    assert prune.remove(plan) == [0, 2]
    assert (tmp_path / "step_1" / "manifest.ocdbt").exists()


def test_a_copy_of_a_step_does_not_replace_one_that_is_not_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The root's version is current, whatever the local tier has."""
    root, local = tmp_path / "root", tmp_path / "local"
    with Checkpointer(root, local=local, options=FAST) as run:
        for step in range(2):
            run.save(step, state(step), wait=True)
        run.wait()
    with_feature(root / "step_1")
    before = files(root / "step_1")
    with Checkpointer(root, local=local, options=FAST) as run:
        assert run.steps() == [0, 1]
        with pytest.raises(UnsupportedFormat, match="telepathy"):
            run.load(None, step=1)
        run.save(2, state(2), wait=True)
        run.wait()
        assert run.load(None, step=2)["step"] == 2
    assert files(root / "step_1") == before
