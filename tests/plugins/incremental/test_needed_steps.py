"""Steps that others need: which may go, in both tiers, whoever removes them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS
from support.forks import Forks
from support.run_folders import refuse, run_folder
from support.saving import same as same_arrays

import unickpt
from unickpt import Checkpointer, SaveConflict, SaveOptions, UnsupportedLeaf
from unickpt.runs import attempt_folders, save_leftovers, tier_copies
from unickpt.runs.step_folder import StepFolder
from unickpt.saving import writer
from unickpt.storage import paths

OPTIONS = SaveOptions(chunk_bytes=4096, fsync=False, timeout_s=20)
FROZEN = np.random.default_rng(1).random(20_000)


def no_copy(*_: Any) -> None:
    raise unickpt.StorageError("the network is down")


def state(step: int) -> dict[str, Any]:
    experts = {str(x): np.full(3000, step * 10 + x, "f4") for x in range(6)}
    return {"frozen": FROZEN, "experts": experts, "dense": np.full(50, step), "step": step}


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether two states are equal, bit by bit."""
    flat = [{**tree, **tree["experts"], "experts": 0} for tree in (found, expected)]
    return same_arrays(*flat)


class Run:
    """A run with two tiers."""

    def __init__(self, folder: Path) -> None:
        self.root, self.local = folder / "root", folder / "local"

    def open(self, **arguments: Any) -> Checkpointer:
        return Checkpointer(self.root, local=self.local, **{"options": OPTIONS, **arguments})

    def save(self, *steps: int, **arguments: Any) -> None:
        """Saves steps, each of which is copied and cleaned up before the next one."""
        with self.open(**arguments) as run:
            if run.latest() is not None:
                run.load()
            for step in steps:
                run.save(step, state(step), wait=True)
                run.wait()

    def save_uncopied(self, patch: pytest.MonkeyPatch, *steps: int, **arguments: Any) -> None:
        """Saves steps as a job that is killed before it copies them."""
        with patch.context() as inner:
            inner.setattr(tier_copies, "copy_version", no_copy)
            run = self.open(**arguments)
            if run.latest() is not None:
                run.load()
            for step in steps:
                run.save(step, state(step)).result(30)
                with pytest.raises(unickpt.StorageError, match="the network is down"):
                    run.wait()
            run.close()

    def in_root(self) -> list[int]:
        return StepFolder(self.root).committed()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


# --- steps that only the local tier has ----------------------------------------------------------


def test_deleting_the_newest_step_of_the_root_abandons_no_other(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(1, 2)
    run.save_uncopied(monkeypatch, 3, 4)
    with run.open() as steps:
        steps.delete(2)
        assert steps.steps() == [1, 3, 4]
    with run.open() as steps:
        assert same(steps.load(), state(4))
        steps.save(5, state(5))
    assert run.in_root() == [1, 3, 4, 5]


def test_deleting_all_steps_of_the_root_one_by_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(1, 2, 3)
    run.save_uncopied(monkeypatch, 4, 5)
    with run.open() as steps:
        for step in (3, 2, 1):
            steps.delete(step)
        assert steps.steps() == [4, 5]
        assert same(steps.load(), state(5))
        steps.save(6, state(6))
    assert run.in_root() == [4, 5, 6]


def test_a_job_without_the_local_tier_still_abandons_steps_that_followed_a_deleted_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(1, 2)
    run.save_uncopied(monkeypatch, 3)
    with run.open() as steps:
        steps.delete(2)
    with Checkpointer(run.root, options=OPTIONS) as other:
        other.load()
        other.save(2, state(20))
    with run.open() as steps:
        assert steps.steps() == [1, 2]
        assert same(steps.load(), state(20))


def test_a_step_whose_newest_version_is_local_is_deleted_whole(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(tier_copies, "copy_version", no_copy)
        steps = run.open()
        steps.save(2, state(20), overwrite=True).result(30)
        with pytest.raises(unickpt.StorageError, match="the network is down"):
            steps.wait()
        removed = list[str]()
        real = StepFolder.remove

        def remove(folder: StepFolder, step: int) -> None:
            removed.append(folder.path(step))
            real(folder, step)

        patch.setattr(StepFolder, "remove", remove)
        steps.delete(2)
        assert removed == [str(run.root / "step_2"), str(run.local / "step_2")]
        assert steps.steps() == [1]
        steps.close()


@pytest.mark.parametrize("is_needed", [False, True])
def test_retention_brings_no_older_version_back(
    is_needed: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, copy = os.link, tier_copies.copy_version
    monkeypatch.setattr(os, "link", lambda a, b: refuse() if "/root" in str(b) else real(a, b))
    run.save(1, 2)

    def copy_others(root: Any, source: Any, step: int, *arguments: Any) -> bool:
        if step == 2:
            no_copy()
        return copy(root, source, step, *arguments)

    removed = list[str]()
    remove = StepFolder.remove
    monkeypatch.setattr(tier_copies, "copy_version", copy_others)
    with run.open(reuse=is_needed) as steps:
        steps.load()
        steps.save(2, state(20), overwrite=True).result(30)
        with pytest.raises(unickpt.StorageError, match="the network is down"):
            steps.wait()
        assert same(steps.load(step=2), state(20))
        if is_needed:  # the version in the root
            marked = paths.resolve(run.root / "step_2")
            unickpt.save(run.root / "best", state(2), options=replace(OPTIONS, base=str(marked)))

    def watch(folder: StepFolder, step: int) -> None:
        remove(folder, step)
        removed.append(folder.path(step))

    monkeypatch.setattr(StepFolder, "remove", watch)
    with run.open(keep_last=1) as steps:
        steps.load()
        for step in (3, 4):
            steps.save(step, state(step)).result(30)
            with suppress(unickpt.StorageError):
                steps.wait()
        assert steps.steps() == ([2, 4] if is_needed else [4])
        if is_needed:
            assert same(steps.load(step=2), state(20))
    two = [path for path in removed if path.endswith("step_2")]
    assert two == ([] if is_needed else [str(run.root / "step_2"), str(run.local / "step_2")])


# --- steps that others borrow from ---------------------------------------------------------------


def test_a_copied_step_stays_while_a_local_one_needs_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link
    monkeypatch.setattr(os, "link", lambda a, b: refuse() if "/local" in str(b) else real(a, b))
    arguments: dict[str, Any] = {"reuse": True, "keep_last": 1}
    run.save(1, 2, 3, 4, **arguments)
    run.save_uncopied(monkeypatch, 8, **arguments)
    assert [b.name for b in unickpt.open(run.local / "step_8").index.bases] == ["step_1"]
    with run.open(**arguments) as steps:
        steps.load()
        with pytest.raises(UnsupportedLeaf):
            steps.save(9, {"unknown": object()})
        assert steps.steps() == [4, 8]
        assert same(steps.load(step=8), state(8))
        assert unickpt.verify(run.local / "step_8").ok
        steps.save(9, state(9))
    assert run.in_root() == [9]
    assert same(unickpt.load(run.root / "step_9"), state(9))


@pytest.mark.plugins
@pytest.mark.parametrize("keep", [1, 2])
def test_experts_of_a_step_that_was_not_copied_stay(
    keep: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse)
    arguments: dict[str, Any] = {
        "keep_last": keep,
        "reuse": True,
        "experts": unickpt.Experts({"experts/{x}": 2}),
    }
    run.save(*range(1, 8), **arguments)
    run.save_uncopied(monkeypatch, 8, **arguments)
    folders = {int(name[5:]) for name in os.listdir(run.local) if name.startswith("step_")}
    assert folders <= {1, 6, 7, 8}, "the local tier has no more than what step 8 needs"
    expected = run.open().load(step=8)
    with run.open(**arguments) as steps:
        steps.load()
        steps.save(9, state(9), wait=True)
        steps.wait()
        assert steps.steps()[-2:] == ([8, 9] if keep == 2 else [9])
        if keep == 2:
            assert same(steps.load(step=8), expected)
        for step in steps.steps():
            assert unickpt.verify(steps.path(step)).ok


@pytest.mark.parametrize("tier", ["root", "local"])
def test_a_step_is_deleted_from_both_tiers_or_from_none(
    tier: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link
    monkeypatch.setattr(os, "link", lambda a, b: refuse() if f"/{tier}" in str(b) else real(a, b))
    with run.open(reuse=True) as steps:
        for step in (1, 2):
            steps.save(step, state(step), wait=True)
            steps.wait()
        needed = f"{tier}/step_1 has chunks of step_2"
        borrowed = bool(unickpt.open(run.__dict__[tier] / "step_2").index.bases)
        there = os.path.exists(run.local / "step_1")
        if borrowed and (tier == "root" or there):
            with pytest.raises(SaveConflict, match=needed):
                steps.delete(1)
            assert steps.steps() == [1, 2]
            assert os.path.exists(run.local / "step_1") == there
        steps.delete(2)
        steps.delete(1)
        assert steps.steps() == []


def test_a_checkpoint_that_others_need_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse)
    unickpt.save(tmp_path / "a", state(1), options=OPTIONS)
    base = SaveOptions(chunk_bytes=4096, fsync=False, base=tmp_path / "a")
    unickpt.save(tmp_path / "b", state(2), options=base)
    location = paths.resolve(tmp_path / "a")
    with pytest.raises(SaveConflict, match="a has chunks of b, which did not write them"):
        attempt_folders.remove_checkpoint(location, paths.context())
    assert unickpt.verify(tmp_path / "b").ok


def test_what_a_renamed_checkpoint_borrows_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse)
    with Checkpointer(tmp_path, reuse=True, keep_last=1, options=OPTIONS) as steps:
        for step in (1, 2):
            steps.save(step, state(step), wait=True)
            steps.wait()
        os.rename(tmp_path / "step_2", tmp_path / "best")  # so that retention does not remove it
        unickpt.save(tmp_path / "step_2", state(2), options=OPTIONS)
        steps.save(3, state(3), wait=True)
        steps.wait()
        with pytest.raises(SaveConflict, match="step_1 has chunks of best"):
            steps.delete(1)
        assert same(unickpt.load(tmp_path / "best"), state(2))
        assert unickpt.verify(tmp_path / "best").ok


# --- a second save of a step in flight -----------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("exists", [False, True])
def test_a_refused_save_of_a_step_in_flight_changes_nothing(
    overwrite: bool, exists: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(1, *([2] if exists else []))
    writes, refused = threading.Event(), threading.Event()
    real = writer.ChunkWriter.write_all

    def write_all(*arguments: Any, **named: Any) -> Any:
        writes.set()
        assert refused.wait(60)
        return real(*arguments, **named)

    with run.open() as steps:
        monkeypatch.setattr(writer.ChunkWriter, "write_all", write_all)
        pending = steps.save(2, state(20), overwrite=exists)
        assert writes.wait(60)
        with pytest.raises(UnsupportedLeaf):
            steps.save(2, {"unknown": object()}, overwrite=overwrite or exists)
        refused.set()
        pending.result(30)
    assert run.in_root() == [1, 2]
    assert same(unickpt.load(run.root / "step_2"), state(20))
    with run.open() as steps:
        assert same(steps.load(), state(20))


# --- retired steps -------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "no links", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with run_folder(request, tmp_path) as folder:
        yield folder


def folders_of(root: str) -> list[str]:
    return sorted(n for n in paths.resolve(root).folders(paths.context()) if n != "processes")


@pytest.mark.plugins
@pytest.mark.parametrize(
    ("how", "root"),
    [
        ({}, "memory"),
        ({}, "no links"),
        ({"reuse": True}, "memory"),
        ({"reuse": True}, "no links"),
        pytest.param({"reuse": True}, "s3", marks=pytest.mark.slow),  # below is one of its storage
    ],
    indirect=["root"],
)
def test_retired_steps_go_when_the_run_continues_without_experts(
    how: dict[str, Any], root: str
) -> None:
    experts = unickpt.Experts({"experts/{x}": 1})
    with Checkpointer(root, keep_last=1, experts=experts, options=OPTIONS) as steps:
        for step in range(8):
            steps.save(step, state(step), wait=True)
            steps.wait()
    assert len(folders_of(root)) == 6
    with Checkpointer(root, keep_last=1, options=OPTIONS, **how) as steps:
        steps.load()
        for step in (10, 11):
            steps.save(step, state(step), wait=True)
            steps.wait()
            assert unickpt.verify(steps.path(step)).ok
            assert same(steps.load(), state(step))
    frozen = ["step_10"] if how else []  # it wrote what step 11 borrows
    assert folders_of(root)[-1] == "step_11"
    assert set(folders_of(root)) <= {"step_11", "step_7", *frozen}


@pytest.mark.plugins
def test_clean_removes_retired_steps_that_nothing_needs(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_leftovers, "RECENT_S", 0.0)
    experts = unickpt.Experts({"experts/{x}": 1})
    with Checkpointer(root, keep_last=1, experts=experts, options=OPTIONS) as steps:
        for step in range(8):
            steps.save(step, state(step), wait=True)
            steps.wait()
    assert save_leftovers.find(root).orphans == (), "the newest step needs all of them"
    for name in folders_of(root):  # also if asked about one of them
        found = save_leftovers.find(f"{root}/{name}")
        assert (*found.orphans, *found.unknown) == ()
    if os.path.isdir(f"{root}/step_7"):  # people rename what they want to keep
        os.rename(f"{root}/step_7", f"{root}/best")
        assert save_leftovers.find(root).orphans == ()
        os.rename(f"{root}/best", f"{root}/step_7")
    expected = unickpt.load(f"{root}/step_7")
    unickpt.copy(f"{root}/step_7", f"{root}/whole")
    paths.resolve(f"{root}/step_7").remove(paths.context())
    found = save_leftovers.find(root)
    assert {orphan.kind for orphan in (*found.orphans, *found.unknown)} == {"retired"}
    assert len({*found.orphans, *found.unknown}) == 5
    removed = save_leftovers.clean(root, [*found.orphans, *found.unknown])
    assert len(removed) == 5
    assert folders_of(root) == ["whole"]
    assert same(unickpt.load(f"{root}/whole"), expected)


# --- processes that die --------------------------------------------------------------------------

DYING = f"""
import sys
sys.path[:0] = [{TESTS!r}, {str(Path(__file__).parent)!r}]
from pathlib import Path
from support.dying import die_at
from test_needed_steps import Run

folder, step, when = ARGS
with Run(Path(folder)).open() as steps:
    die_at(step, when)
    steps.delete(2)
"""


@pytest.mark.parametrize(
    ("step", "when"),
    [
        ("runs.requested_removal.Removal:_keep_later", "after"),
        ("runs.lineage_notes:record", "before"),
        ("runs.lineage_notes:record", "after"),
        ("runs.attempt_folders:remove_checkpoint", "before"),
        ("runs.attempt_folders:remove_checkpoint", "during"),
        ("runs.attempt_folders:remove_checkpoint", "after"),
        ("runs.attempt_folders:_remove_data", "before"),
    ],
)
def test_killed_while_a_step_is_deleted(
    step: str, when: str, forks: Forks, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(1, 2)
    run.save_uncopied(monkeypatch, 3, 4)
    (ended,) = forks.wait_all([forks.start(DYING, str(run.root.parent), step, when)])
    assert ended.code == -9, ended.out
    with run.open() as steps:
        there = steps.steps()
        assert there in ([1, 2, 3, 4], [1, 3, 4])
        assert same(steps.load(), state(4))
        steps.save(5, state(5))
    assert run.in_root() == [*there, 5]
    for number in run.in_root():
        assert same(unickpt.load(run.root / f"step_{number}"), state(number))
    assert sorted(os.listdir(run.local)) == [".unickpt.lock", "step_5"]
