"""Going back to an earlier step of a run, and what lies in a run as a symbolic link."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import Processes
from support.s3_server import make_bucket, use
from support.saving import damage, files, in_agreeing_job, numbers, same

import unickpt
from unickpt import (
    CheckpointCorrupt,
    Checkpointer,
    CheckpointExists,
    CheckpointNotFound,
    ProcessGroup,
    SaveConflict,
    SaveOptions,
    StorageError,
)
from unickpt.errors import CoverageError, LaterStepsExist, ProcessFailed
from unickpt.runs import tier_copies
from unickpt.runs.retention import Retention
from unickpt.runs.step_folder import StepFolder
from unickpt.runs.step_loader import StepLoader

FAST = SaveOptions(fsync=False, timeout_s=20, chunk_bytes=4096)


def run_of(root: Any, *steps: int, **arguments: Any) -> None:
    """A job that saves some steps, the values of each its number."""
    with Checkpointer(root, options=FAST, **arguments) as checkpointer:
        for step in steps:
            checkpointer.save(step, numbers(step))


# --- steps that are later ------------------------------------------------------------------------


def test_what_was_just_saved_is_kept_whatever_the_rules_say() -> None:
    found: dict[int, dict[str, float]] = {step: {} for step in (5, 10, 160, 200)}
    assert Retention(keep_last=1).expendable(found, {160}) == [5, 10]
    assert Retention(keep_every=100).expendable(found, {160}) == [5, 10]


@pytest.mark.parametrize("rules", [{"keep_last": 1}, {"keep": Retention(keep_every=100)}])
def test_what_was_just_saved_is_kept_beside_a_step_of_others(
    rules: dict[str, Any], tmp_path: Path
) -> None:
    with Checkpointer(tmp_path, options=FAST, **rules) as checkpointer:
        checkpointer.save(10, numbers(10), wait=True)
        pending = checkpointer.save(20, numbers(20))
        unickpt.save(tmp_path / "step_1000", numbers(1000))  # somebody puts it there meanwhile
        pending.result(30)
        checkpointer.wait()
        assert 20 in checkpointer.steps()
        with pytest.raises(LaterStepsExist):
            checkpointer.save(30, numbers(30), wait=True)


@pytest.mark.parametrize("local", [None, "local"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_below_later_steps_is_an_error(
    overwrite: bool, local: str | None, tmp_path: Path
) -> None:
    root, tier = tmp_path / "run", local and tmp_path / local
    run_of(root, 700, 800, 900, 1000, local=tier)
    with Checkpointer(root, keep_last=1, local=tier, options=FAST) as checkpointer:
        checkpointer.load(step=800)
        for step in (810, 800, 900):
            with pytest.raises(LaterStepsExist) as caught:
                checkpointer.save(step, numbers(step), overwrite=overwrite)
        assert isinstance(caught.value, FileExistsError)
        for part in ("step 900 is below", "step 1000.", "after=800", "drop_later_steps(800)"):
            assert part in str(caught.value)
        assert checkpointer.steps() == [700, 800, 900, 1000]
        assert not (root / "step_810").exists(), "it was begun"
        checkpointer.save(1010, numbers(1010))
        with pytest.raises(LaterStepsExist, match=r"step 1005 is below .* step 1010\."):
            checkpointer.save(1005, numbers(1005))  # whether or not that is committed by now


def test_later_steps_in_the_root_alone_count(tmp_path: Path) -> None:
    run_of(tmp_path / "run", 1, 2, 3)
    checkpointer = Checkpointer(tmp_path / "run", local=tmp_path / "local", options=FAST)
    with checkpointer, pytest.raises(LaterStepsExist, match="step 3"):
        checkpointer.save(2, numbers(2), overwrite=True)


def test_later_steps_on_s3_are_found_in_the_background(
    moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(moto, monkeypatch)
    make_bucket(moto, "rollback")
    root = "s3://rollback/run"
    run_of(root, 100, 150, 200)
    with Checkpointer(root, options=FAST) as checkpointer:
        checkpointer.load(step=150)
        pending = checkpointer.save(160, numbers(160))
        with pytest.raises(LaterStepsExist, match=r"after=150.*drop_later_steps\(150\)"):
            pending.result(30)
        assert checkpointer.drop_later_steps() == [200]
        checkpointer.save(160, numbers(160), wait=True)
    with Checkpointer(root, after=100, options=FAST) as checkpointer:
        assert checkpointer.steps() == [100]
        checkpointer.save(150, numbers(151), wait=True)
        assert checkpointer.steps() == [100, 150]
        assert same(checkpointer.load(), numbers(151))
    assert Checkpointer(root).steps() == [100, 150]


# --- Checkpointer(after=) ------------------------------------------------------------------------


@pytest.mark.parametrize("local", [None, "local"])
@pytest.mark.parametrize(
    "rules",
    [
        {"keep_last": 1},
        {"keep": Retention(keep_every=50)},
        {"keep": Retention(keep_best=1, metric="loss")},
    ],
)
def test_going_on_after_an_earlier_step(
    rules: dict[str, Any], local: str | None, tmp_path: Path
) -> None:
    root, tier = tmp_path / "run", local and tmp_path / local
    with Checkpointer(root, options=FAST, local=tier) as checkpointer:
        for step in (100, 150, 160, 200):
            checkpointer.save(step, numbers(step), metrics={"loss": 1000 - step})
    arguments: dict[str, Any] = {"after": 150, "local": tier, "options": FAST, **rules}
    with Checkpointer(root, **arguments) as checkpointer:
        assert (checkpointer.steps(), checkpointer.latest()) == ([100, 150], 150)
        with pytest.raises(CheckpointNotFound, match=r"committed steps are: 100, 150$"):
            checkpointer.load(step=200)
        assert same(checkpointer.load(), numbers(150))
        assert Checkpointer(root, local=tier).latest() == 200, "looking has removed something"
        checkpointer.save(160, numbers(161), metrics={"loss": 900.0}, wait=True)
        assert Checkpointer(root, local=tier).latest() == 160
        checkpointer.wait()
        assert same(checkpointer.load(), numbers(161))
    with Checkpointer(root, **arguments) as again:  # restarted, it sees its own progress
        assert again.latest() == 160
        assert same(again.load(), numbers(161))
        again.save(170, numbers(171), metrics={"loss": 900.0})
    assert unickpt.open(root / "step_170").metadata["unickpt"]["after"] == 150
    with Checkpointer(root, local=tier, options=FAST) as later:
        assert same(later.load(), numbers(171))
        later.save(180, numbers(180))  # without the argument, but in the same branch
    assert Checkpointer(root, **arguments).latest() == 180
    assert Checkpointer(root, local=tier).latest() == 180


def test_after_must_name_a_step_that_is_there(tmp_path: Path) -> None:
    run_of(tmp_path, 100, 200)
    with Checkpointer(tmp_path, after=150, options=FAST) as checkpointer:
        message = r"after=150: step 150 is not in .*; the committed steps are: 100, 200"
        with pytest.raises(CheckpointNotFound, match=message):
            checkpointer.load()
        with pytest.raises(CheckpointNotFound, match=message):
            checkpointer.save(160, numbers(160))
    assert Checkpointer(tmp_path).steps() == [100, 200]
    for wrong in (-1, 1.5, "100", True):
        with pytest.raises(ValueError, match=r"after=.* must be an integer, at least 0"):
            Checkpointer(tmp_path, after=wrong)  # type: ignore[arg-type]


def test_a_step_of_ones_own_that_is_damaged_is_not_taken_for_one_of_others(tmp_path: Path) -> None:
    run_of(tmp_path, 100, 200)
    run_of(tmp_path, 150, after=100)
    for name in files(tmp_path / "step_150"):
        if name.startswith("processes") and "root" in name:
            (tmp_path / "step_150" / name).write_bytes(b"?")
    checkpointer = Checkpointer(tmp_path, after=100)
    assert checkpointer.steps() == [100, 150]
    with pytest.raises(unickpt.CheckpointCorrupt, match="step_150"):
        checkpointer.load()


def test_processes_go_back_together(tmp_path: Path) -> None:
    run_of(tmp_path, 100, 150, 200, 300)

    def run(group: ProcessGroup) -> Any:
        options = SaveOptions(group=group, timeout_s=20, fsync=False, chunk_bytes=4096)
        with Checkpointer(tmp_path, after=200, keep_last=2, options=options) as checkpointer:
            assert checkpointer.latest() == 200
            checkpointer.load()
            checkpointer.save(300, numbers(301), wait=True)
            with pytest.raises(LaterStepsExist):
                checkpointer.save(250, numbers(250))
            first = checkpointer.drop_later_steps(200)
            assert checkpointer.steps() in ([150, 200], [200]), "it is gone when this returns"
            checkpointer.save(250, numbers(250), wait=True)
            checkpointer.delete(250)
            return first, checkpointer.latest()

    assert in_agreeing_job(3, run) == [([300], 200)] * 3


def test_processes_hear_that_process_0_could_not_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(tmp_path, 100, 200)

    def fail(self: StepFolder, step: int) -> None:
        raise StorageError("not allowed")

    monkeypatch.setattr(StepFolder, "remove", fail)

    def run(group: ProcessGroup) -> Any:
        options = SaveOptions(group=group, timeout_s=20, fsync=False)
        with Checkpointer(tmp_path, after=100, options=options) as checkpointer:
            checkpointer.save(110, numbers(110))

    first, second = in_agreeing_job(2, run)
    assert isinstance(first, StorageError)
    assert isinstance(second, ProcessFailed)
    assert "process 0 could not remove the steps after 100" in str(second)


# --- drop_later_steps and delete -----------------------------------------------------------------


@pytest.mark.parametrize("local", [None, "local"])
def test_later_steps_are_dropped_the_newest_first(
    local: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, tier = tmp_path / "run", local and tmp_path / local
    run_of(root, 1, 2, 3, 4, local=tier)
    with Checkpointer(root, local=tier, options=FAST) as checkpointer:
        with pytest.raises(ValueError, match="no step was loaded"):
            checkpointer.drop_later_steps()
        with pytest.raises(CheckpointNotFound, match=r"step 0 is not in .*: 1, 2, 3, 4"):
            checkpointer.drop_later_steps(0)
        checkpointer.save(5, numbers(5))  # is waited for
        removed, real = [], StepFolder.remove

        def remove(self: StepFolder, step: int) -> None:
            if step == 3:
                raise StorageError("killed")
            removed.append(step)
            real(self, step)

        with monkeypatch.context() as patch:
            patch.setattr(StepFolder, "remove", remove)
            with pytest.raises(StorageError, match="killed"):
                checkpointer.drop_later_steps(2)
        assert sorted({*removed}, reverse=True) == [5, 4]
        assert checkpointer.steps() == [1, 2, 3]
        checkpointer.load(step=2)
        assert checkpointer.drop_later_steps() == [3]
        assert checkpointer.steps() == [1, 2]
        assert checkpointer.drop_later_steps() == []
        checkpointer.save(3, numbers(33), wait=True)
    assert same(Checkpointer(root, local=tier).load(), numbers(33))


@pytest.mark.parametrize("local", [None, "local"])
def test_a_step_is_deleted(local: str | None, tmp_path: Path) -> None:
    root, tier = tmp_path / "run", local and tmp_path / local
    run_of(root, 1, 2, 3, local=tier)
    with Checkpointer(root, local=tier, options=FAST) as checkpointer:
        with pytest.raises(CheckpointNotFound, match=r"step 7 is not in .*: 1, 2, 3"):
            checkpointer.delete(7)
        checkpointer.delete(3)
        checkpointer.delete(1)
        assert checkpointer.steps() == [2]
        checkpointer.save(3, numbers(33), wait=True)
        checkpointer.wait()
        assert same(checkpointer.load(), numbers(33))
        second = Checkpointer(root, local=tier, options=FAST)
        with pytest.raises(SaveConflict, match="is not closed"):
            second.delete(2)
    assert sorted(os.listdir(root)) == [".unickpt.lock", "step_2", "step_3"]


@pytest.mark.parametrize("call", ["delete", "drop_later_steps"])
def test_processes_that_name_different_steps_remove_none(call: str, tmp_path: Path) -> None:
    run_of(tmp_path, 1, 2, 3)

    def run(group: ProcessGroup) -> CoverageError:
        options = SaveOptions(fsync=False, timeout_s=5, group=group)
        with Checkpointer(tmp_path, options=options) as checkpointer:
            with pytest.raises(CoverageError) as caught:
                getattr(checkpointer, call)((1, 2, 2)[group.index])
            return caught.value

    for process, error in enumerate(in_agreeing_job(3, run)):
        assert f"the processes call {call} with different steps" in str(error)
        assert f"process {process} with {(1, 2, 2)[process]}" in str(error)
    assert Checkpointer(tmp_path).steps() == [1, 2, 3]


def test_a_step_in_flight_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path, options=FAST) as checkpointer:
        errors = []
        real = StepFolder.open

        def during(self: StepFolder, *arguments: Any) -> bool:
            with pytest.raises(SaveConflict, match="step_1 is being saved") as caught:
                checkpointer.delete(1)
            errors.append(caught.value)
            return real(self, *arguments)

        monkeypatch.setattr(StepFolder, "open", during)
        checkpointer.save(1, numbers(1), wait=True)
        assert len(errors) == 1
        checkpointer.delete(1)
        assert checkpointer.steps() == []


# --- symbolic links ------------------------------------------------------------------------------


def elsewhere(tmp_path: Path) -> Path:
    """A checkpoint outside of the run, with what retention would remove in one of its own."""
    place = tmp_path / "elsewhere" / "precious"
    unickpt.save(place, numbers(77))
    for stray in ("processes/older/00000/d/x", "processes/a.__lock", "manifest.ocdbt.__lock"):
        (place / stray).parent.mkdir(parents=True, exist_ok=True)
        (place / stray).write_bytes(b"mine")
    return place


def link_to(target: Path, place: Path, *, relative: bool) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(os.path.relpath(target, place.parent) if relative else target)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("removal", ["retention", "delete", "drop", "after", "debris"])
def test_a_link_in_a_run_is_not_followed(removal: str, relative: bool, tmp_path: Path) -> None:
    target, root = elsewhere(tmp_path), tmp_path / "run"
    before = files(target)
    link_to(target, root / "step_0", relative=relative)
    if removal in ("drop", "after", "debris"):
        (root / "step_0").rename(root / "step_5")
        if removal != "debris":
            unickpt.save(root / "step_1", numbers(1))
    after = 1 if removal == "after" else None
    keep = 1 if removal == "retention" else None
    with Checkpointer(root, keep_last=keep, after=after, options=FAST) as checkpointer:
        if removal == "retention":
            assert same(checkpointer.load(), numbers(77))
            checkpointer.save(1, numbers(1))
        elif removal == "delete":
            checkpointer.delete(0)
        elif removal == "drop":
            assert checkpointer.drop_later_steps(1) == [5]
        elif removal == "after":
            checkpointer.save(2, numbers(2))
        else:  # the newest step is looked through for what crashed tries left
            checkpointer.save(6, numbers(6))
        checkpointer.wait()
        left = [n for n in os.listdir(root) if (root / n).is_symlink()]
        assert left == (["step_5"] if removal == "debris" else [])
    assert files(target) == before
    assert same(unickpt.load(target), numbers(77))


def test_a_link_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link_to(elsewhere(tmp_path), tmp_path / "run" / "step_0", relative=False)

    def fail(path: str) -> None:
        raise PermissionError(1, "Operation not permitted", path)

    with Checkpointer(tmp_path / "run", options=FAST) as checkpointer, monkeypatch.context() as m:
        m.setattr(os, "unlink", fail)
        with pytest.raises(StorageError, match="step_0: the link cannot be removed: Operation"):
            checkpointer.delete(0)


@pytest.mark.parametrize("what", ["processes", "attempt"])
def test_a_link_inside_of_a_step_is_not_followed(what: str, tmp_path: Path) -> None:
    root, target = tmp_path / "run", tmp_path / "elsewhere"
    run_of(root, 1, 2)
    inside = root / "step_1" / "processes"
    if what == "attempt":
        (inside,) = inside.iterdir()
    inside.rename(target)
    inside.symlink_to(target)
    (target / "x.__lock").write_text("mine")
    before = files(target)
    with pytest.raises(CheckpointCorrupt, match="a link may not lead out of it"):
        Checkpointer(root).load(step=1)
    run_of(root, 3, keep_last=1)
    assert sorted(os.listdir(root)) == [".unickpt.lock", "step_3"]
    assert files(target) == before


def test_links_that_lead_nowhere_or_within_the_run(tmp_path: Path) -> None:
    root = tmp_path / "run"
    run_of(root, 1, 2)
    (root / "step_3").symlink_to("step_1")
    (root / "step_9").symlink_to("nowhere")
    checkpointer = Checkpointer(root)
    assert checkpointer.steps() == [1, 2, 3]
    assert same(checkpointer.load(), numbers(1))
    run_of(root, 4, keep_last=3)
    assert Checkpointer(root).steps() == [2, 4], "step 1 is gone, to which step 3 led"
    assert same(unickpt.load(root / "step_2"), numbers(2))
    assert (root / "step_9").is_symlink()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_onto_a_link_is_refused(overwrite: bool, tmp_path: Path) -> None:
    target, root = elsewhere(tmp_path), tmp_path / "run"
    before = files(target)
    link_to(target, root / "step_3", relative=False)
    with Checkpointer(root, options=FAST) as checkpointer:
        message = f"step_3 is a symbolic link to {target}"
        with pytest.raises(CheckpointExists, match=message):
            checkpointer.save(3, numbers(3), overwrite=overwrite)
        checkpointer.save(4, numbers(4))
    local = Checkpointer(root, local=tmp_path / "local", options=FAST)
    link_to(target, root / "step_5", relative=False)
    with local, pytest.raises(CheckpointExists, match=f"step_5 is a symbolic link to {target}"):
        local.save(5, numbers(5), overwrite=overwrite)
    assert files(target) == before


def test_the_run_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    run_of(tmp_path / "run", 1, 2, 3, keep_last=2)
    with Checkpointer(tmp_path / "run", options=FAST) as checkpointer:
        assert checkpointer.drop_later_steps(2) == [3]
        assert same(checkpointer.load(), numbers(2))
    assert sorted(os.listdir(tmp_path / "disk")) == [".unickpt.lock", "step_2"]


# --- readers beside a job ------------------------------------------------------------------------

SAVER = """
import sys, numpy as np, unickpt
root = sys.argv[1]
options = unickpt.SaveOptions(fsync=False)
keep = unickpt.Retention(keep_last=1, keep_every=10_000)
with unickpt.Checkpointer(root, keep=keep, options=options) as ckpt:
    for step in range(1, 10_000):
        arrays = {str(k): np.full(50, step) for k in range(40)}
        ckpt.save(step, {"step": step, "arrays": arrays}, wait=True)
        if step == 1:
            print("saving", flush=True)
"""


def test_a_reader_beside_retention_gets_the_newest_step(
    processes: Processes, tmp_path: Path
) -> None:
    """The oldest step is kept for ever: what a reader falls back to, if it takes removal for
    damage, or lists no other one."""
    unickpt.save(tmp_path / "step_0", {"step": 0})
    saver = processes.forked(SAVER, tmp_path)
    assert saver.stdout is not None
    saver.stdout.readline()
    newest = 1
    for load in range(60):
        checkpointer = Checkpointer(tmp_path)
        found = checkpointer.load(fallback=True)["step"]
        assert found >= newest, f"load {load} gave step {found}, and {newest} was there before"
        assert found == checkpointer.loaded_step
        newest = found
    assert newest > 1


def test_a_step_that_is_removed_before_it_is_read_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(tmp_path, 1, 2)
    with Checkpointer(
        tmp_path, keep_last=1, keep=Retention(keep_every=10_000), options=FAST
    ) as saver:
        checkpointer = Checkpointer(tmp_path)
        real, listed = StepLoader._newest, []

        def newest(self: StepLoader, *arguments: Any) -> int:
            listed.append(real(self, *arguments))
            if len(listed) < 4:
                saver.save(listed[-1] + 1, numbers(listed[-1] + 1))
                saver.wait()
            return listed[-1]

        monkeypatch.setattr(StepLoader, "_newest", newest)
        assert same(checkpointer.load(), numbers(5))
        assert listed == [2, 3, 4, 5]
        damage(tmp_path / "step_5")
        with pytest.raises(CheckpointNotFound, match="step_5 is damaged"):
            checkpointer.load(fallback=True)


def test_processes_list_again_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one of them finds that the step was removed."""
    run_of(tmp_path, 1, 2)
    real, tried_by = StepLoader._try, {0: list[int](), 1: list[int]()}

    def attempt(self: StepLoader, step: int) -> Any:
        index = self._group.index
        tried_by[index].append(step)
        if index == 1 and len(tried_by[1]) < 3:
            return None, CheckpointNotFound("it was removed")
        return real(self, step)

    monkeypatch.setattr(StepLoader, "_try", attempt)

    def run(group: ProcessGroup) -> Any:
        checkpointer = Checkpointer(tmp_path, options=SaveOptions(group=group))
        return checkpointer.load()["seed"], tried_by[group.index]

    assert in_agreeing_job(2, run) == [(2, [2, 2, 2])] * 2


# --- errors that say what to do ------------------------------------------------------------------


def test_a_lease_of_another_process_is_told_from_ones_own(
    processes: Processes, tmp_path: Path
) -> None:
    other = processes.forked(
        "import sys, time, unickpt; c = unickpt.Checkpointer(sys.argv[1])\n"
        "c.save(1, {'a': 1}, wait=True); print('saved', flush=True); time.sleep(100)",
        tmp_path,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "saved\n"
    checkpointer = Checkpointer(tmp_path, options=FAST)
    with pytest.raises(SaveConflict, match=rf"another job saves here .*process {other.pid} on"):
        checkpointer.save(2, numbers(2), wait=True)
    checkpointer.close()


def test_a_step_that_failed_after_its_commit_says_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise StorageError("the network is down")

    checkpointer = Checkpointer(tmp_path / "run", local=tmp_path / "local", options=FAST)
    with monkeypatch.context() as patch:
        patch.setattr(tier_copies, "copy_version", fail)
        checkpointer.save(3, numbers(3))
        checkpointer._drain()
        with pytest.raises(StorageError, match="network is down"):
            checkpointer.save(3, numbers(3))
        with pytest.raises(CheckpointExists, match=r"step 3 was saved before, and that failed: "
                           r"the network is down.*overwrite=True") as caught:  # fmt: skip
            checkpointer.save(3, numbers(3))
    assert isinstance(caught.value.__cause__, StorageError)
    checkpointer.save(3, numbers(33), overwrite=True, wait=True)
    checkpointer.close()
    assert same(unickpt.load(tmp_path / "run/step_3"), numbers(33))


def test_metadata_tells_no_branch_without_need(tmp_path: Path) -> None:
    run_of(tmp_path, 1)
    assert "after" not in unickpt.open(tmp_path / "step_1").metadata["unickpt"]
    assert np.array_equal(unickpt.load(tmp_path / "step_1")["small"], numbers(1)["small"])


def test_a_checkpoint_is_no_folder_of_steps(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "step_1", numbers(1))
    with Checkpointer(tmp_path / "step_1", options=FAST) as checkpointer:
        pending = checkpointer.save(1, numbers(2))
        with pytest.raises(CheckpointExists, match="step_1 is a checkpoint, not a folder of steps"):
            pending.result(30)
    assert same(unickpt.load(tmp_path / "step_1"), numbers(1))
    assert sorted(os.listdir(tmp_path / "step_1")) == ["manifest.ocdbt", "processes"]
