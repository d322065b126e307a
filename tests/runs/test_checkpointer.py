"""The Checkpointer: what it keeps, when it saves, what it finds again."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.saving import damage, in_agreeing_job, in_job, numbers, same, session

import unickpt
from unickpt import (
    CheckpointCorrupt,
    Checkpointer,
    CheckpointExists,
    CheckpointNotFound,
    LoadMismatch,
    ProcessGroup,
    SaveConflict,
    SaveEvery,
    SaveOptions,
    StorageError,
    UnsupportedLeaf,
)
from unickpt.commit import lease
from unickpt.errors import InvalidPath, LaterStepsExist, ProcessFailed, SaveTimeout
from unickpt.runs import tier_copies
from unickpt.runs.retention import Retention
from unickpt.runs.step_folder import StepFolder
from unickpt.storage import paths

FAST = SaveOptions(fsync=False, timeout_s=20, chunk_bytes=4096)


# --- saving and loading --------------------------------------------------------------------------


def test_a_step_that_is_being_saved_is_not_loaded_yet(tmp_path: Path) -> None:
    go = threading.Event()
    options = replace(FAST, progress=lambda done, total: go.wait(20))
    with Checkpointer(tmp_path / "run", options=options) as checkpointer:
        checkpointer.save(1, numbers(1))
        try:
            with pytest.raises(CheckpointNotFound, match=r"being saved: 1\. Call wait\(\) first"):
                checkpointer.load()
        finally:
            go.set()
        checkpointer.wait()
        assert same(checkpointer.load(), numbers(1))


def test_steps_are_saved_found_and_loaded(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run", options=FAST) as checkpointer:
        assert checkpointer.steps() == []
        assert checkpointer.latest() is None
        with pytest.raises(CheckpointNotFound, match="no step is committed"):
            checkpointer.load()
        for step in (0, 9, 10):
            checkpointer.save(step, numbers(step))
        checkpointer.wait()
        assert checkpointer.steps() == [0, 9, 10]
        assert checkpointer.latest() == 10
        assert same(checkpointer.load(), numbers(10))
        assert checkpointer.loaded_step == 10
        assert same(checkpointer.load(numbers(3), step=9), numbers(9))
        assert checkpointer.loaded_step == 9
        with pytest.raises(
            CheckpointNotFound, match=r"step 5 is not in .* committed steps are: 0, 9, 10"
        ):
            checkpointer.load(step=5)
        assert checkpointer.path(9) == str(tmp_path / "run" / "step_9")
        assert same(unickpt.load(checkpointer.path(9)), numbers(9))
    assert Checkpointer(tmp_path / "run").latest() == 10


def test_save_may_wait(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options=FAST) as checkpointer:
        pending = checkpointer.save(1, numbers(1), wait=True)
        assert pending.done()
        assert checkpointer.steps() == [1]


def test_a_step_that_exists_is_replaced_only_if_asked(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options=FAST) as checkpointer:
        checkpointer.save(1, numbers(1), wait=True)
        with pytest.raises(CheckpointExists, match="step_1"):
            checkpointer.save(1, numbers(2))
        checkpointer.save(1, numbers(2), overwrite=True, wait=True)
        assert same(checkpointer.load(), numbers(2))


def test_a_third_save_waits_for_the_first(tmp_path: Path) -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()

    def progress(done: int, total: int) -> None:
        begun.release()
        assert may_end.wait(60)

    options = replace(FAST, progress=progress)
    with Checkpointer(tmp_path, options=options) as checkpointer, ThreadPoolExecutor(1) as pool:
        first, _ = (checkpointer.save(step, numbers(step)) for step in (1, 2))
        assert begun.acquire(timeout=60)
        third = pool.submit(checkpointer.save, 3, numbers(3))
        with pytest.raises(TimeoutError):
            third.result(0.2)
        assert not first.done()
        may_end.set()
        third.result(60)
    assert checkpointer.steps() == [1, 2, 3]


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", None])
def test_a_step_is_a_number(step: Any, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match="step"):
        checkpointer.save(step, {})


def test_after_close_nothing_is_saved(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, options=FAST)
    checkpointer.save(1, numbers(1))
    checkpointer.close()
    checkpointer.close()
    assert checkpointer.steps() == [1]
    with pytest.raises(ValueError, match="is closed"):
        checkpointer.save(2, numbers(2))


def test_metadata_and_metrics_are_stored(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options=FAST) as checkpointer:
        metrics = {"loss": 0.5, "nothing": float("nan")}
        checkpointer.save(3, numbers(3), metrics=metrics, metadata={"run": "a"}, wait=True)
        found = unickpt.open(checkpointer.path(3)).metadata
        assert found["run"] == "a"
        assert found["unickpt"] == {"step": 3, "metrics": {"loss": 0.5, "nothing": "nan"}}
        with pytest.raises(UnsupportedLeaf, match="the key 'unickpt'"):
            checkpointer.save(4, {}, metadata={"unickpt": 1})
        with pytest.raises(UnsupportedLeaf, match="metrics must be numbers"):
            checkpointer.save(4, {}, metrics={"loss": "low"})  # type: ignore[dict-item]


def test_a_step_is_any_integer(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options=FAST) as checkpointer:
        checkpointer.save(np.int64(3), numbers(3), wait=True)  # type: ignore[arg-type]
        for wrong in ("4", 4.0, -4, True, None):
            with pytest.raises(ValueError, match=r"must be an integer, at least 0"):
                checkpointer.save(wrong, numbers(4))  # type: ignore[arg-type]
        assert checkpointer.steps() == [3]
        found = unickpt.open(checkpointer.path(3)).metadata["unickpt"]["step"]
        assert type(found) is int


@pytest.mark.parametrize("ask", ["wait", "close", "__exit__", "save"])
def test_an_error_in_the_background_is_raised_once(ask: str, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, options=FAST)
    arguments = {"__exit__": (None, None, None), "save": (2, numbers(2))}.get(ask, ())
    take = checkpointer._steps.first.lease.take
    checkpointer._steps.first.lease.take = lambda: 1 / 0  # type: ignore[method-assign]
    checkpointer.save(1, numbers(1))
    checkpointer._queue.wait()
    with pytest.raises(ZeroDivisionError):
        getattr(checkpointer, ask)(*arguments)
    checkpointer._steps.first.lease.take = take  # type: ignore[method-assign]
    getattr(checkpointer, ask)(*arguments)
    checkpointer.close()
    assert checkpointer.steps() == ([2] if ask == "save" else [])


def test_an_exception_in_the_loop_is_not_hidden_by_one_in_the_background(tmp_path: Path) -> None:
    def loop() -> None:
        with Checkpointer(tmp_path / "run", options=FAST) as checkpointer:
            checkpointer._steps.first.lease.take = lambda: 1 / 0  # type: ignore[method-assign]
            checkpointer.save(1, numbers(1))
            raise KeyError("the loop's own")

    with pytest.raises(KeyError, match="the loop's own") as caught:
        loop()
    assert any("ZeroDivisionError in the background" in n for n in caught.value.__notes__)


# --- retention -----------------------------------------------------------------------------------

steps = st.dictionaries(
    st.integers(0, 60), st.fixed_dictionaries({}, optional={"loss": st.floats(width=16)})
)


@given(
    steps,
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 4),
    st.sampled_from(["min", "max"]),
    st.none() | st.sampled_from([3, 7]),
)
def test_retention(
    found: dict[int, dict[str, float]],
    last: int | None,
    every: int | None,
    count: int | None,
    best: Any,
    modulus: int | None,
) -> None:
    keep = None if modulus is None else lambda step: step % modulus == 1
    metric = None if count is None else "loss"
    rule = Retention(last, every, count, metric, best, keep)
    gone = rule.expendable(found)
    if (last, every, count, keep) == (None,) * 4 or not found:
        assert gone == []
        return
    left = set(found) - set(gone)
    assert gone == sorted(gone)
    assert max(found) in left, "the newest is gone"
    assert set(sorted(found)[-(last or 1) :]) <= left
    assert every is None or {s for s in found if s % every == 0} <= left
    assert keep is None or set(filter(keep, found)) <= left
    rated = [s for s in found if found[s].get("loss", np.nan) == found[s].get("loss")]
    by_loss = sorted(rated, key=lambda s: (found[s]["loss"] * (1 if best == "min" else -1), -s))
    assert set(by_loss[: count or 0]) <= left
    for step in gone:  # each kept step has a reason
        assert step not in by_loss[: count or 0]
    reasons = set(sorted(found)[-(last or 1) :]) | set(by_loss[: count or 0])
    reasons |= {s for s in found if every and s % every == 0}
    reasons |= set(filter(keep, found)) if keep else set()
    assert left == reasons


@given(st.sets(st.integers(0, 60)), st.none() | st.integers(1, 3), st.sets(st.integers(0, 60)))
def test_retention_by_a_function_of_all_steps(
    found: set[int], last: int | None, wanted: set[int]
) -> None:
    seen: list[Any] = []

    def keep(steps: Any) -> set[int]:
        seen.append(list(steps))
        return wanted

    gone = Retention(keep_last=last, keep_among=keep).expendable({key: {} for key in found}, {3})
    assert seen == [sorted(found)]
    kept = set(sorted(found)[-(last or 1) :]) | wanted | {3}
    assert gone == sorted(found - kept)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"keep_among": 3}, "keep_among=3 must be a function of all steps"),
        ({"keep_last": 0}, "keep_last=0 must be an integer, at least 1"),
        ({"keep_best": 2}, "give both keep_best and metric"),
        ({"metric": "loss"}, "give both keep_best and metric"),
        ({"keep_best": 1, "metric": "a", "best": "most"}, "'min' or 'max'"),
    ],
)
def test_rules_that_make_no_sense(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Retention(**rules)


def test_functions_that_nothing_would_await_are_refused() -> None:
    async def function(*_: Any) -> bool:
        return True

    class Asynchronous:
        async def __call__(self, *_: Any) -> bool:
            return True

    refused: Any
    for refused in (function, Asynchronous()):
        for name in ("keep", "keep_among"):
            with pytest.raises(ValueError, match=f"{name}=.*; it is not awaited"):
                Retention(**{name: refused})
        with pytest.raises(TypeError, match="called with each SaveReport, and not awaited"):
            SaveOptions(metrics=refused)
        with pytest.raises(TypeError, match="a function, not async, of bytes done"):
            SaveOptions(progress=refused)


def test_a_receiver_whose_events_nothing_would_await_is_refused() -> None:
    class Receiver:
        def __call__(self, report: Any) -> None:
            pass

        async def run_event(self, event: Any) -> None:
            pass

    with pytest.raises(TypeError, match=r"run_event of metrics=.*Receiver.* is async"):
        SaveOptions(metrics=Receiver())


@pytest.mark.parametrize("kept", [["1"], [None]])
def test_a_rule_that_returns_no_steps_removes_none(kept: Any) -> None:
    def by_name(steps: Any) -> Any:
        return kept

    with pytest.raises(TypeError, match=r"returned .*, which is no step") as raised:
        Retention(keep_among=by_name).expendable({1: {}, 2: {}})
    assert "by_name" in raised.value.__notes__[0]


@pytest.mark.parametrize(("seconds", "steps"), [(-1.0, None), (None, -1), ("10", 1)])
def test_times_that_make_no_sense(seconds: Any, steps: Any) -> None:
    with pytest.raises(ValueError, match="must be a positive number"):
        SaveEvery(steps, seconds)
    rule: Any = "drop"
    with pytest.raises(ValueError, match="when_busy='drop' must be one of 'wait', 'skip', 'new"):
        SaveEvery(1, when_busy=rule)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 3}, "keep=3 must be a function of a step, or a Retention"),
        ({"keep_every": 2, "keep": Retention(keep_every=3)}, "give keep_every .* not to both"),
        ({"save_every_s": 2, "save_every": SaveEvery(seconds=3)}, "give seconds .* not to both"),
        ({"choose": max}, "choose is for experts; give partial"),
        ({"keep_last": 2, "keep": Retention(keep_last=3)}, "not to both"),
        ({"save_every": 0}, "save_every: steps=0 must be a positive number"),
        ({"optimizers": [object()]}, "object is not a torch.optim.Optimizer"),
        ({"optimizers": object()}, "pass a list, even for a single optimizer"),
        ({"local": "."}, "local and root are the same folder"),
    ],
)
def test_arguments_that_make_no_sense(
    arguments: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        Checkpointer(tmp_path, **arguments)


def test_policies_by_the_names_of_their_fields(tmp_path: Path) -> None:
    best: dict[str, Any] = {"keep_best": 1, "metric": "loss", "best": "max"}
    with Checkpointer(
        tmp_path, keep_last=1, keep_every=4, keep=lambda step: step == 3, save_every_s=60, **best
    ) as run:
        for step in range(8):
            run.save(step, numbers(step), metrics={"loss": 9.0 if step == 2 else step})
        run.wait()
        assert run.steps() == [0, 2, 3, 4, 7]
        assert not run.should_save(7)
    with pytest.raises(TypeError, match="unexpected keyword argument 'keep_most'"):
        Checkpointer(tmp_path, keep_most=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("root", ["{tmp}", "memory://retention"])
def test_steps_that_no_rule_keeps_are_removed(root: str, tmp_path: Path) -> None:
    losses = [5.0, 1.0, float("nan"), 3.0, 0.5, 4.0, 6.0, 7.0]
    best: dict[str, Any] = {"keep_best": 2, "metric": "loss"}
    where = root.format(tmp=tmp_path)
    keep = Retention(keep=lambda step: step == 3, **best)
    with Checkpointer(where, keep_last=2, keep=keep) as checkpointer:
        for step, loss in enumerate(losses):
            checkpointer.save(step, numbers(step), metrics={"loss": loss})
        checkpointer.wait()
        assert checkpointer.steps() == [1, 3, 4, 6, 7]
    keep = Retention(keep_every=3, **best)
    with Checkpointer(where, keep_last=2, keep=keep) as checkpointer:  # reads the old losses
        checkpointer.save(8, numbers(8))
        checkpointer.wait()
        assert checkpointer.steps() == [1, 3, 4, 6, 7, 8]
        for step in checkpointer.steps():
            assert same(checkpointer.load(step=step), numbers(step))
    if root != "memory://retention":
        assert sorted(os.listdir(tmp_path)) == [
            ".unickpt.lock",
            *(f"step_{n}" for n in [1, 3, 4, 6, 7, 8]),
        ]


def test_a_step_that_cannot_be_removed_does_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: StepFolder, step: int) -> None:
        raise StorageError("not allowed")

    with Checkpointer(tmp_path, keep_last=1, options=FAST) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(StepFolder, "remove", fail)
            for step in (1, 2):
                checkpointer.save(step, numbers(step))
            checkpointer.wait()
        assert checkpointer.steps() == [1, 2]
        assert "not allowed" in caplog.text
        checkpointer.save(3, numbers(3))
        checkpointer.wait()
        assert checkpointer.steps() == [3], "what failed is tried again"


def test_steps_do_not_pile_up_where_removing_one_takes_longer_than_saving_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go, remove = threading.Event(), StepFolder.remove

    def slow(folder: StepFolder, step: int) -> None:
        assert may_go.wait(20)
        remove(folder, step)

    monkeypatch.setattr(StepFolder, "remove", slow)
    with Checkpointer(tmp_path, keep_last=1, options=FAST) as checkpointer:
        for step in range(3):
            checkpointer.save(step, numbers(step)).result()
        late = checkpointer.save(3, numbers(3))
        with pytest.raises(TimeoutError):
            late.result(timeout=0.5)
        assert checkpointer.steps() == [0, 1, 2]
        may_go.set()
        late.result()
        checkpointer.wait()
        assert checkpointer.steps() == [3]


def test_a_run_that_was_released_looks_for_later_steps_of_others(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options=FAST) as checkpointer:
        checkpointer.save(1, numbers(1), wait=True)
        checkpointer.release()
        with Checkpointer(tmp_path, options=FAST) as other:
            other.save(2, numbers(2), wait=True)
        with pytest.raises(LaterStepsExist):
            checkpointer.save(1, numbers(1))


def test_a_save_that_is_waited_for_has_removed_old_steps(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep_last=1, options=FAST) as checkpointer:
        for step in range(4):
            checkpointer.save(step, numbers(step), wait=True)
            assert checkpointer.steps() == [step]


# --- debris --------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["{tmp}", "memory://debris"])
def test_what_crashed_jobs_left_is_removed_and_nothing_else(root: str, tmp_path: Path) -> None:
    where = root.format(tmp=tmp_path)
    places = StepFolder(where)
    context = paths.context()

    def put(key: str) -> None:
        places.location.store(context).write(key, b"x").result()

    def there(key: str) -> bool:
        return bool(places.location.store(context).read(key).result().state == "value")

    for step in (1, 2):
        unickpt.save(places.path(step), numbers(step))
    debris = [f"step_{step}/processes/old/00001/d/abc" for step in (1, 2, 7)]
    others = ["step_8/notes.txt", "step_x/processes/a/b", "readme"]
    others += ["step_1/processes/now-000008/00001/d/x"]
    others += ["step_9/processes/now-000007/00001/d/x"]  # of a process that is ahead
    for key in [*debris, *others]:
        put(key)
    with Checkpointer(where, options=FAST) as reader:
        assert reader.steps() == [1, 2]
    assert all(map(there, debris)), "one that does not save has removed something"
    options = SaveOptions(group=ProcessGroup(0, 1, "now"), fsync=False)
    with Checkpointer(where, options=options) as checkpointer:
        checkpointer.save(3, numbers(3))
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2, 3]
        assert [key for key in debris if there(key)] == []
        assert all(map(there, others))
        assert same(checkpointer.load(step=2), numbers(2))


# --- one job at a time ---------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["{tmp}", "memory://lease"])
def test_two_jobs_in_one_folder_are_an_error(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_RENEW_S", 0.1)
    monkeypatch.setattr(lease, "_EXPIRES_S", 2.0)
    where = root.format(tmp=tmp_path)
    with Checkpointer(where, options=FAST) as first:
        first.save(1, numbers(1), wait=True)
        second = Checkpointer(where, options=FAST)
        assert same(second.load(), numbers(1)), "reading needs no lease"
        pending = second.save(2, numbers(2))
        message = "another Checkpointer of this same process saves here and is not closed"
        with pytest.raises(SaveConflict, match=message):
            pending.result(30)
        first.save(3, numbers(3), wait=True)
        assert first.steps() == [1, 3]
    second.save(4, numbers(4), wait=True)
    second.close()
    assert second.steps() == [1, 3, 4]


def test_a_lease_that_was_taken_over_commits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_RENEW_S", 3600.0)
    first = Checkpointer("memory://stale", options=FAST)
    first.save(1, numbers(1), wait=True)
    monkeypatch.setattr(lease, "_RENEW_S", 0.1)
    monkeypatch.setattr(lease, "_EXPIRES_S", 0.3)
    with Checkpointer("memory://stale", options=FAST) as second:  # the first one seems dead
        second.save(2, numbers(2), wait=True)
        with pytest.raises(SaveConflict):
            first.save(3, numbers(3), wait=True)
        assert second.steps() == [1, 2]
    first.save(4, numbers(4), wait=True)  # the other job has ended
    first.close()
    assert first.steps() == [1, 2, 4]


def test_a_checkpointer_that_is_forgotten_gives_its_lease_back(tmp_path: Path) -> None:
    Checkpointer(tmp_path, options=FAST).save(1, numbers(1), wait=True)
    with Checkpointer(tmp_path, options=FAST) as second:
        second.save(2, numbers(2), wait=True)


# --- resuming ------------------------------------------------------------------------------------


def test_a_damaged_step_is_an_error_unless_asked_to_fall_back(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options=FAST) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, numbers(step), wait=True)
        for step in (2, 3):
            damage(checkpointer.path(step))
        message = r"'large' .*the next older step is 2: load\(step=2\), or load\(fallback=True\)"
        with pytest.raises(CheckpointCorrupt, match=message):
            checkpointer.load()
        assert checkpointer.loaded_step is None
        assert same(checkpointer.load(numbers(0), fallback=True), numbers(1))
        assert checkpointer.loaded_step == 1
        assert checkpointer.steps() == [1, 2, 3], "loading removes nothing"
        with pytest.raises(LoadMismatch):
            checkpointer.load({"other": 1}, step=1, fallback=True)
        damage(checkpointer.path(1))
        with pytest.raises(CheckpointNotFound, match="step_1 is damaged, and there is no older"):
            checkpointer.load(fallback=True)


def test_processes_fall_back_together(tmp_path: Path) -> None:
    """Only one of them reads what is damaged."""
    half = {k: {"large": v["large"][:, :20]} for k, v in ((i, numbers(i)) for i in (1, 2))}

    def tree(group: ProcessGroup, step: int) -> Any:
        return {"mine": unickpt.PerProcess(step * 10 + group.index), **half[step]}

    def run(group: ProcessGroup) -> Any:
        options = SaveOptions(group=group, timeout_s=20, fsync=False)
        with Checkpointer(tmp_path, options=options) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, tree(group, step), wait=True)
            if group.index == 0:
                place = tmp_path / "step_2"
            group.agree(0)
            if group.index == 0:
                damage(place)
            group.agree(0)
            like = {"mine": unickpt.PerProcess(0)}
            if group.index == 1:
                like["large"] = np.zeros((300, 20), np.float32)
            loaded = checkpointer.load(like, strict=False, fallback=True)
            return checkpointer.loaded_step, loaded["mine"].value

    assert in_agreeing_job(2, run) == [(1, 10), (1, 11)]


def test_processes_that_cannot_agree_must_name_the_step(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "step_1", numbers(1))

    def run(group: ProcessGroup) -> Any:
        checkpointer = Checkpointer(tmp_path, options=SaveOptions(group=group))
        with pytest.raises(ValueError, match=r"ProcessGroup\(\.\.\., agree=\)"):
            checkpointer.load()
        return same(checkpointer.load(step=1), numbers(1))

    assert in_job(2, run) == [True, True]


# --- when to save --------------------------------------------------------------------------------


def test_saving_every_so_many_steps(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, save_every=5)
    assert [s for s in range(13) if checkpointer.should_save(s)] == [0, 5, 10]
    assert not Checkpointer(tmp_path).should_save(5)


def test_saving_every_so_many_seconds_is_decided_by_process_0(tmp_path: Path) -> None:
    def run(group: ProcessGroup) -> list[int]:
        seconds = 0.3 if group.index == 0 else 1e9
        options = SaveOptions(group=group, fsync=False, timeout_s=20)
        saved = []
        with Checkpointer(
            tmp_path, save_every=SaveEvery(seconds=seconds), options=options
        ) as checkpointer:
            for step in range(12):
                time.sleep(0.05 * (group.index + 1))
                if checkpointer.should_save(step):
                    checkpointer.save(step, numbers(step))
                    saved.append(step)
        return saved

    first, second = in_agreeing_job(2, run)
    assert first == second
    assert 1 <= len(first) < 12
    assert Checkpointer(tmp_path).steps() == first


class _Held:
    """Metrics that keep each save from ending until `go`; hears events."""

    def __init__(self) -> None:
        self.go, self.events = threading.Event(), list[tuple[str, int | None]]()

    def __call__(self, report: Any) -> None:
        assert self.go.wait(20)

    def run_event(self, event: Any) -> None:
        self.events.append((event.kind, event.step))


@pytest.mark.parametrize(
    ("when_busy", "due", "skipped"),
    [
        ("wait", [0, 2, 4, 6], []),
        ("skip", [0, 6], [2, 4]),
        ("newest", [0, 5, 6], [2, 4]),
    ],
)
def test_what_is_due_while_a_save_has_not_ended(
    when_busy: Any, due: list[int], skipped: list[int], tmp_path: Path
) -> None:
    held, saved = _Held(), []
    options, save_every = replace(FAST, metrics=held), SaveEvery(steps=2, when_busy=when_busy)
    with Checkpointer(tmp_path, save_every=save_every, options=options) as checkpointer:
        for step in range(7):
            if step == 5:
                held.go.set()
                checkpointer.wait()
            if checkpointer.should_save(step):
                saved.append(step)
                checkpointer.save(step, numbers(step))
            if step >= 5:
                checkpointer.wait()
    assert saved == checkpointer.steps() == due
    assert [step for kind, step in held.events if kind == "skipped"] == skipped


def test_a_receiver_of_events_waits_for_a_save_of_another_thread(tmp_path: Path) -> None:
    class Receiver(_Held):
        def run_event(self, event: Any) -> None:
            super().run_event(event)
            if (event.kind, event.step) == ("step", 2):
                self.go.set()
                thread = threading.Thread(target=checkpointer.save, args=(1, numbers(1)))
                thread.start()
                thread.join(5)
                self.events.append(("hangs" if thread.is_alive() else "saved", 1))

    receiver = Receiver()
    with Checkpointer(tmp_path, options=replace(FAST, metrics=receiver)) as checkpointer:
        checkpointer.save(2, numbers(2)).result()
        assert checkpointer.steps() == [1, 2]
    assert ("saved", 1) in receiver.events


def test_a_due_time_waits_for_the_save_before(tmp_path: Path) -> None:
    held = _Held()
    options, save_every = replace(FAST, metrics=held), SaveEvery(seconds=1e-9, when_busy="skip")
    with Checkpointer(tmp_path, save_every=save_every, options=options) as checkpointer:
        assert checkpointer.should_save(1)
        checkpointer.save(1, numbers(1))
        assert not checkpointer.should_save(2)
        held.go.set()
        checkpointer.wait()
        assert checkpointer.should_save(3)
    assert ("skipped", 2) not in held.events, "it is late, not left out"


@pytest.mark.parametrize(("when_busy", "due"), [("skip", [0, 4]), ("newest", [0, 3, 4])])
def test_all_processes_leave_out_a_step_while_one_is_busy(
    when_busy: Any, due: list[int], tmp_path: Path
) -> None:
    held = [_Held(), _Held()]
    held[0].go.set()

    def run(group: ProcessGroup) -> list[int]:
        options = replace(FAST, group=group, metrics=held[group.index])
        save_every, saved = SaveEvery(steps=2, when_busy=when_busy), list[int]()
        with Checkpointer(tmp_path, save_every=save_every, options=options) as checkpointer:
            for step in range(5):
                if group.index == 0 or step >= 3:
                    held[1].go.set() if step >= 3 else None
                    checkpointer.wait()
                group.agree(0)
                if checkpointer.should_save(step):
                    saved.append(step)
                    checkpointer.save(step, numbers(step))
        return saved

    assert in_agreeing_job(2, run) == [due, due]
    assert [[e for e in h.events if e[0] == "skipped"] for h in held] == [[("skipped", 2)], []]


def test_a_job_that_must_stop_saves_even_while_it_is_busy(tmp_path: Path) -> None:
    held, save_every = _Held(), SaveEvery(steps=1, when_busy="skip")
    options = replace(FAST, metrics=held)
    with Checkpointer(tmp_path, save_every=save_every, options=options) as checkpointer:
        checkpointer.save(1, numbers(1))
        checkpointer.preempt()
        assert checkpointer.should_save(2)
        held.go.set()
        checkpointer.save(2, numbers(2))
    assert checkpointer.steps() == [1, 2]


def test_one_process_that_is_told_to_stop_stops_all(tmp_path: Path) -> None:
    def run(group: ProcessGroup) -> tuple[int, bool]:
        options = SaveOptions(group=group, fsync=False, timeout_s=20)
        with Checkpointer(
            tmp_path, save_every=SaveEvery(preemption=True), options=options
        ) as checkpointer:
            for step in range(100):
                if step == 7 and group.index == 1:
                    checkpointer.preempt()
                if checkpointer.should_save(step):
                    checkpointer.save(step, numbers(step))
                if checkpointer.preempted:
                    return step, checkpointer.should_save(step + 1)
        return -1, True

    assert in_agreeing_job(3, run) == [(7, False)] * 3
    assert Checkpointer(tmp_path).steps() == [7]


def test_sigterm_saves_a_last_time(tmp_path: Path) -> None:
    calls = []
    before = signal.signal(signal.SIGTERM, lambda *_: calls.append(1))
    try:
        with Checkpointer(
            tmp_path, save_every=SaveEvery(preemption=True), options=FAST
        ) as checkpointer:
            assert not checkpointer.should_save(1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert checkpointer.should_save(2)
            assert checkpointer.preempted
            checkpointer.save(2, numbers(2))
            assert not checkpointer.should_save(3)
        assert calls == [1], "the handler that was there before is called too"
        os.kill(os.getpid(), signal.SIGTERM)
        assert calls == [1, 1], "the handler is put back"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert Checkpointer(tmp_path).steps() == [2]


# --- two tiers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["{tmp}/root", "memory://tiers"])
def test_two_tiers(root: str, tmp_path: Path) -> None:
    where, local = root.format(tmp=tmp_path), tmp_path / "local"
    with Checkpointer(where, local=local, keep_last=2, options=FAST) as checkpointer:
        for step in range(5):
            checkpointer.save(step, numbers(step)).result(30)
            assert same(unickpt.load(local / f"step_{step}"), numbers(step))
        checkpointer.wait()
        assert checkpointer.steps() == [3, 4]
        assert StepFolder(where).committed() == [3, 4]
        assert StepFolder(local).committed() == [4]
        assert checkpointer.path(4) == StepFolder(where).path(4)
        assert unickpt.verify(checkpointer.path(4)).ok
        damage(local / "step_4")
        assert same(checkpointer.load(), numbers(4)), "the other tier has it whole"
        checkpointer.save(4, numbers(44), overwrite=True)
        checkpointer.wait()
        assert same(unickpt.load(StepFolder(where).path(4)), numbers(44))
        with pytest.raises(CheckpointExists):
            checkpointer.save(4, numbers(4), wait=True)
        with pytest.raises(LaterStepsExist, match="below existing step 4"):
            checkpointer.save(3, numbers(3), wait=True)
    shutil.rmtree(local)
    assert same(Checkpointer(where, local=local).load(), numbers(44))


def test_what_was_not_copied_is_copied_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, local = tmp_path / "root", tmp_path / "local"

    def fail(*arguments: Any) -> None:
        raise StorageError("the network is down")

    checkpointer = Checkpointer(root, local=local, keep_last=5, options=FAST)
    with monkeypatch.context() as patch:
        patch.setattr(tier_copies, "copy_version", fail)
        checkpointer.save(1, numbers(1))
        checkpointer._drain()
        with pytest.raises(StorageError, match="network is down") as caught:
            checkpointer.save(2, numbers(2))
        assert any("copying a step to" in note for note in caught.value.__notes__)
        checkpointer.save(2, numbers(2))
        with pytest.raises(StorageError):
            checkpointer.close()
    assert StepFolder(root).committed() == []
    with Checkpointer(root, local=local, keep_last=5, options=FAST) as again:
        assert again.latest() == 2
        assert again.path(2) == str(local / "step_2")
        assert same(again.load(), numbers(2))
        again.save(3, numbers(3))
        again.wait()
        assert StepFolder(root).committed() == [1, 2, 3]
        assert StepFolder(local).committed() == [3]


def test_the_newest_step_in_the_root_stays_while_a_newer_one_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, local = tmp_path / "root", tmp_path / "local"

    def fail(*arguments: Any) -> None:
        raise StorageError("the network is down")

    with Checkpointer(root, local=local, keep_last=1, options=FAST) as checkpointer:
        checkpointer.save(1, numbers(1))
        checkpointer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(tier_copies, "copy_version", fail)
            for step in (2, 3):
                checkpointer.save(step, numbers(step))
                with pytest.raises(StorageError):
                    checkpointer.wait()
                checkpointer._cleaning.clean()
                assert StepFolder(root).committed() == [1]
                assert step in StepFolder(local).committed()
        checkpointer.save(4, numbers(4))
        checkpointer.wait()
        assert StepFolder(root).committed() == [4]
        assert StepFolder(local).committed() == [4]


def test_two_tiers_of_several_processes(tmp_path: Path) -> None:
    def run(group: ProcessGroup, local: Path) -> Any:
        options = SaveOptions(group=group, fsync=False, timeout_s=20, chunk_bytes=4096)
        with Checkpointer(tmp_path / "root", local=local, options=options) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, numbers(step))
        return checkpointer.steps()

    assert in_agreeing_job(3, lambda group: run(group, tmp_path / "local")) == [[1, 2]] * 3
    assert same(unickpt.load(tmp_path / "root/step_2"), numbers(2))
    found = in_agreeing_job(2, lambda group: run(group, tmp_path / f"local_{group.index}"))
    assert all(isinstance(error, InvalidPath) for error in found)
    assert "not the same storage on all processes" in str(found[0])


# --- several processes ---------------------------------------------------------------------------


def test_processes_save_in_order(tmp_path: Path) -> None:
    def run(group: ProcessGroup) -> Any:
        options = SaveOptions(group=group, fsync=False, timeout_s=20, chunk_bytes=4096)
        with Checkpointer(tmp_path, keep_last=2, options=options) as checkpointer:
            for step in range(6):
                tree = {**numbers(step), "mine": unickpt.PerProcess(group.index)}
                checkpointer.save(step, tree)
            pending = checkpointer.save(6, numbers(6))
            report = pending.result(30)
        return [w["bytes"] for w in report.writers], report.process

    found = in_job(3, run)
    assert [process for _, process in found] == [0, 1, 2]
    assert len(found[0][0]) == 3
    assert found[1][0] == []
    assert Checkpointer(tmp_path).steps() == [5, 6]
    assert same(unickpt.load(tmp_path / "step_6"), numbers(6))


@pytest.mark.parametrize("budget", [1 << 30, 1 << 18])
def test_arrays_that_only_some_processes_have(budget: int, tmp_path: Path) -> None:
    """As in a pipeline: all is staged, because the process that should write it may lack it."""
    arrays = {f"w{i}": np.full((300, 300), i, np.float32) for i in range(6)}

    def run(group: ProcessGroup) -> Any:
        options = SaveOptions(group=group, fsync=False, timeout_s=20, budget_bytes=budget)
        mine = {k: v.copy() for i, (k, v) in enumerate(arrays.items()) if i % 3 == group.index}
        with Checkpointer(tmp_path, options=options) as checkpointer:
            for step in (1, 2):
                pending = checkpointer.save(step, mine)
                for array in mine.values():
                    array += 1
                pending.result(30)
        return True

    assert in_job(3, run) == [True] * 3
    for step in (1, 2):
        found = unickpt.load(tmp_path / f"step_{step}")
        assert same(found, {k: v + step - 1 for k, v in arrays.items()})


def test_a_process_that_fails_fails_all(tmp_path: Path) -> None:
    def run(group: ProcessGroup) -> Any:
        options = SaveOptions(group=group, fsync=False, timeout_s=20)
        with Checkpointer(tmp_path, options=options) as checkpointer:
            if group.index == 1:
                checkpointer._queue._area.take = lambda *_: 1 / 0  # type: ignore[method-assign]
            errors = []
            for _ in range(2):
                try:
                    checkpointer.save(1, {"w": np.ones((100, 500))}).result(30)
                except Exception as error:
                    errors.append(error)
            return errors

    name = session()
    found = in_job(3, run, name)
    assert all(isinstance(error, ZeroDivisionError) for error in found[1])
    for index in (0, 2):
        assert all(isinstance(error, ProcessFailed) for error in found[index])
        assert "process 1 failed: division by zero" in str(found[index][0])
    assert Checkpointer(tmp_path).steps() == []


def test_processes_do_not_refuse_in_turns_for_ever(tmp_path: Path) -> None:
    """One learns of a failure before the other one does, and refuses the save after it."""
    told = threading.Event()

    def run(group: ProcessGroup) -> list[str]:
        options = SaveOptions(group=group, fsync=False, timeout_s=20)
        outcomes = []
        with Checkpointer(tmp_path, options=options) as checkpointer:
            if group.index == 0:
                checkpointer._queue.errors.add("an earlier save", StorageError("no"))
            for step in range(4):
                try:
                    checkpointer.save(step, {"w": np.ones(9)}).result(30)
                    outcomes.append("saved")
                except Exception as error:
                    outcomes.append(type(error).__name__)
                if group.index == 1 and step == 0:
                    checkpointer._queue.errors.add("the same save", StorageError("no"))
                    told.set()
                assert told.wait(30)
        return outcomes

    first, second = in_job(2, run)
    assert first == ["StorageError", "ProcessFailed", "saved", "saved"]
    assert second == ["ProcessFailed", "StorageError", "saved", "saved"]


@pytest.mark.parametrize("metrics", [None, {"val_loss": 1.0}])
def test_the_best_cannot_be_kept_without_their_metric(metrics: Any, tmp_path: Path) -> None:
    best: dict[str, Any] = {"keep_best": 2, "metric": "loss"}
    with Checkpointer(tmp_path, **best) as run:
        with pytest.raises(ValueError, match=r"pass metrics=\{'loss': value\} to save") as error:
            run.save(0, numbers(0), metrics=metrics)
        assert "val_loss" in str(error.value) or metrics is None
        assert run.steps() == []
        run.save(0, numbers(0), metrics={"loss": float("nan")})
        run.save(1, numbers(1))  # perhaps it is not evaluated at each step
    with Checkpointer(tmp_path, **best) as run:  # nor at the first one after a restart
        run.save(2, numbers(2))
    assert run.steps()[-1] == 2


def test_all_processes_learn_that_the_metric_is_missing(tmp_path: Path) -> None:
    def run(group: ProcessGroup) -> str:
        options = SaveOptions(group=group, fsync=False, timeout_s=20)
        mine = None if group.index == 0 else {"loss": 1.0}
        keep = Retention(keep_best=1, metric="loss")
        with Checkpointer(tmp_path, keep=keep, options=options) as checkpointer:
            try:
                checkpointer.save(0, {"w": np.ones(9)}, metrics=mine, wait=True)
            except (ValueError, unickpt.UnickptError) as error:
                return type(error).__name__
        return "saved"

    assert in_job(2, run) == ["ValueError", "ProcessFailed"]


def test_the_metrics_of_process_0_count(tmp_path: Path) -> None:
    def run(group: ProcessGroup) -> list[str]:
        options = SaveOptions(group=group, fsync=False, timeout_s=20)
        outcomes = []
        with Checkpointer(
            tmp_path, keep=Retention(keep_best=1, metric="loss"), options=options
        ) as checkpointer:
            for step, loss in enumerate([3.0, 1.0, "low", 2.0, 4.0]):
                mine: Any = loss if group.index == 0 else 9.0 - step
                try:
                    checkpointer.save(step, {"w": np.ones(9)}, metrics={"loss": mine}).result(30)
                    outcomes.append("saved")
                except unickpt.UnickptError as error:
                    outcomes.append(type(error).__name__)
        return outcomes

    first, second = in_job(2, run)
    assert first == ["saved", "saved", "UnsupportedLeaf", "saved", "saved"]
    assert second == ["saved", "saved", "ProcessFailed", "saved", "saved"]
    assert Checkpointer(tmp_path).steps() == [1, 4]
    found = unickpt.open(tmp_path / "step_1").metadata["unickpt"]
    assert found == {"step": 1, "metrics": {"loss": 1.0}}


def test_the_error_of_a_load_is_raised_where_another_process_has_ended(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, numbers(1))
    for file in (tmp_path / "step_1").rglob("d/*"):
        file.write_bytes(bytes(file.stat().st_size))

    def agree(value: int) -> int:
        if value == 1:  # that a copy is damaged; the newest step is 2 here
            raise SaveTimeout("process 1 did not answer")
        return value

    options = SaveOptions(group=ProcessGroup(0, 2, session(), agree=agree))
    checkpointer = Checkpointer(tmp_path, options=options)
    with pytest.raises(CheckpointCorrupt, match="step_1") as caught:
        checkpointer.load(numbers(0))
    assert "process 1 did not answer" in str(caught.value.__cause__)
