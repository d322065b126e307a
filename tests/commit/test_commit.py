"""The commit: one checkpoint or none, whatever the processes of one job or of two do."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.saving import files, in_job, numbers, same, save_in_job, session

import unickpt
from unickpt import (
    CheckpointExists,
    CheckpointNotFound,
    PerProcess,
    ProcessGroup,
    SaveConflict,
    SaveOptions,
    StorageError,
    UnsupportedLeaf,
)
from unickpt.commit import attempt, messages
from unickpt.commit.attempt import Attempt
from unickpt.commit.coordinator import Coordinator
from unickpt.commit.merge import MergePolicies
from unickpt.commit.messages import Notes, Record
from unickpt.commit.participant import wait_committed
from unickpt.errors import CoverageError, ProcessFailed, SaveTimeout
from unickpt.frameworks.leaves import adapters
from unickpt.saving import writer
from unickpt.saving.describe import describe
from unickpt.saving.save_features import SaveFeatures
from unickpt.saving.write_plan import DirectSource, Sharing, plan_writes
from unickpt.storage import data_files, paths
from unickpt.storage.data_files import DataFile
from unickpt.storage.errors import Failed
from unickpt.types import Box, LocalFragments


def absent(path: Path) -> bool:
    try:
        unickpt.load(path)
    except CheckpointNotFound:
        return True
    return False


def of_step(step: str) -> type[Any]:
    """The class that has a step of a commit."""
    return Attempt if hasattr(Attempt, step) else Coordinator


def sound(path: Path, tree: dict[str, Any]) -> bool:
    return same(unickpt.load(path), tree) and unickpt.verify(path).ok


# --- one job ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_processes_return_when_the_checkpoint_is_there(count: int, tmp_path: Path) -> None:
    reports = save_in_job(tmp_path, count, lambda index: numbers(1))
    assert sound(tmp_path, numbers(1))
    assert {(r.arrays, r.bytes, r.processes) for r in reports} == {(4, 240_048, count)}
    assert sum(r.chunks for r in reports) == 3


def test_the_root_holds_one_file_and_nothing_else_is_left(tmp_path: Path) -> None:
    save_in_job(tmp_path, 3, lambda index: numbers(1))
    left = files(tmp_path)
    assert [f for f in left if "/" not in f] == ["manifest.ocdbt"]
    assert not [f for f in left if "/records/" in f or "error" in f]
    assert len(os.listdir(tmp_path / "processes")) == 1


def test_a_process_that_raises_makes_all_raise_its_message_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    errors = save_in_job(
        tmp_path, 3, lambda index: {"w": np.ones(3), "x": object() if index == 1 else 0}
    )
    assert time.monotonic() - started < 5
    assert isinstance(errors[1], UnsupportedLeaf)
    for error in (errors[0], errors[2]):
        assert isinstance(error, ProcessFailed)
        assert "process 1 failed" in str(error)
        assert "'x': builtins.object is neither an array" in str(error)
    assert absent(tmp_path)


def test_a_process_that_fails_to_write_makes_all_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Attempt.publish

    def publish(self: Attempt, *arguments: Any) -> None:
        if self.group.index == 2:
            raise StorageError("the disk of process 2 is full")
        real(self, *arguments)

    monkeypatch.setattr(Attempt, "publish", publish)
    errors = save_in_job(tmp_path, 3, lambda index: numbers(1))
    assert [type(e) for e in errors] == [ProcessFailed, ProcessFailed, StorageError]
    assert all("the disk of process 2 is full" in str(e) for e in errors)
    monkeypatch.undo()
    assert absent(tmp_path)
    assert not [f for f in files(tmp_path) if "/d/" in f], "each removes what it wrote"
    save_in_job(tmp_path, 3, lambda index: numbers(2))
    assert sound(tmp_path, numbers(2))
    assert len(os.listdir(tmp_path / "processes")) == 1, "the debris of the first try is gone"


def test_a_missing_process_ends_the_wait_of_the_others_at_the_deadline(tmp_path: Path) -> None:
    def work(group: ProcessGroup) -> Any:
        if group.index == 1:
            return None
        options = SaveOptions(group=group, timeout_s=0.5)
        return unickpt.save(tmp_path, numbers(1), options=options)

    started = time.monotonic()
    errors = in_job(3, work)
    assert time.monotonic() - started < 10
    kinds = {type(errors[0]), type(errors[2])}
    assert SaveTimeout in kinds
    assert kinds <= {SaveTimeout, ProcessFailed}
    assert "process 1 (not begun) did not finish within 0.5 s" in str(errors[0]) + str(errors[2])
    assert absent(tmp_path)


def test_a_straggler_learns_that_the_try_is_over(tmp_path: Path) -> None:
    name = session()

    def save(index: int, timeout_s: float) -> Any:
        options = SaveOptions(group=ProcessGroup(index, 2, name), timeout_s=timeout_s)
        return unickpt.save(tmp_path, numbers(1), options=options)

    with pytest.raises(SaveTimeout, match=r"process 1 \(not begun\) did not finish"):
        save(0, 0.2)
    with pytest.raises(ProcessFailed, match=r"process 0 failed: .* did not finish"):
        save(1, 60)
    assert absent(tmp_path)


def test_a_straggler_does_no_harm_to_the_next_try(tmp_path: Path) -> None:
    name = session()
    options = SaveOptions(group=ProcessGroup(0, 2, name), timeout_s=0.2)
    with pytest.raises(SaveTimeout):
        unickpt.save(tmp_path, numbers(1), options=options)
    save_in_job(tmp_path, 2, lambda index: numbers(2))
    late = SaveOptions(group=ProcessGroup(1, 2, name), timeout_s=0.5)
    with pytest.raises((CheckpointExists, SaveTimeout, SaveConflict)):
        unickpt.save(tmp_path, numbers(1), options=late)
    assert sound(tmp_path, numbers(2))


def test_a_process_that_gave_up_too_late_finds_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Coordinator._write_root

    def slow(self: Coordinator, manifest: bytes) -> None:
        time.sleep(0.5)  # the coordinator looks for errors, stalls, and process 1 gives up
        real(self, manifest)

    monkeypatch.setattr(Coordinator, "_write_root", slow)
    reports = save_in_job(tmp_path, 2, lambda index: numbers(1), timeout_s=0.3)
    assert [type(r).__name__ for r in reports] == ["SaveReport", "SaveReport"]
    assert sound(tmp_path, numbers(1))


def test_a_process_that_gave_up_in_time_prevents_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Coordinator._build_root

    def slow(self: Coordinator, *arguments: Any) -> bytes:
        time.sleep(0.6)
        return real(self, *arguments)

    monkeypatch.setattr(Coordinator, "_build_root", slow)
    errors = save_in_job(tmp_path, 2, lambda index: numbers(1), timeout_s=0.2)
    assert isinstance(errors[0], ProcessFailed)
    assert isinstance(errors[1], SaveTimeout)
    assert "process 0 (committing) did not commit within 0.2 s" in str(errors[1])
    assert absent(tmp_path)


def test_a_coordinator_that_dies_after_the_commit_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: Coordinator, older: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Coordinator, "_remove_older_attempts", die)
    started = time.monotonic()
    results = save_in_job(tmp_path, 3, lambda index: numbers(1))
    assert time.monotonic() - started < 10
    assert isinstance(results[0], KeyboardInterrupt)
    assert [type(r).__name__ for r in results[1:]] == ["SaveReport", "SaveReport"]
    assert sound(tmp_path, numbers(1)), "an interrupt after the commit takes nothing away"


def test_an_interrupt_while_the_commit_is_under_way_takes_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Coordinator._write_root

    def interrupted(self: Coordinator, manifest: bytes) -> None:
        real(self, manifest)
        raise KeyboardInterrupt

    monkeypatch.setattr(Coordinator, "_write_root", interrupted)
    with pytest.raises(KeyboardInterrupt):
        unickpt.save(tmp_path, numbers(1))
    assert sound(tmp_path, numbers(1))


def test_an_answer_that_was_lost_is_no_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Coordinator._write_root

    def twice(self: Coordinator, manifest: bytes) -> None:
        real(self, manifest)
        real(self, manifest)  # as a client does that retries a request which did succeed

    monkeypatch.setattr(Coordinator, "_write_root", twice)
    unickpt.save(tmp_path, numbers(1))
    assert sound(tmp_path, numbers(1))


def test_a_note_that_a_network_file_system_hides_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Coordinator._write_root

    def hiding(self: Coordinator, manifest: bytes) -> None:
        for note in (tmp_path / "processes").glob("*/notes/commit"):
            note.unlink()
        real(self, manifest)

    monkeypatch.setattr(Coordinator, "_write_root", hiding)
    reports = save_in_job(tmp_path, 3, lambda index: numbers(1))
    assert {(r.arrays, r.bytes) for r in reports} == {(4, 240_048)}
    assert sound(tmp_path, numbers(1))


def test_an_error_note_that_is_none_still_ends_the_save(tmp_path: Path) -> None:
    name = session()
    for number, note in enumerate([b"", b"{}", b"[1]", b'{"message": 3, "hopeless": "maybe"}']):
        notes = tmp_path / str(number) / "processes" / f"{name}-000000" / "notes"
        notes.mkdir(parents=True)
        (notes / "error-00001").write_bytes(note)
        (notes / "error-x").write_bytes(b"not an error")
        options = SaveOptions(group=ProcessGroup(0, 2, name), timeout_s=20)
        with pytest.raises(ProcessFailed, match=r"process 1 failed: (its error message cannot|3)"):
            unickpt.save(tmp_path / str(number), numbers(1), options=options)


def test_a_chunk_that_was_told_of_but_not_written_prevents_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DataFile.add

    def forgetful(self: DataFile, value: Any, *arguments: Any) -> None:
        if self.lengths:
            real(self, value, *arguments)
        else:
            self.inline.append(b"")

    monkeypatch.setattr(DataFile, "add", forgetful)
    with pytest.raises(StorageError, match=r"values were written, not"):
        unickpt.save(tmp_path, numbers(1))
    assert absent(tmp_path)


def test_a_damaged_record_prevents_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Notes.publish

    def publish(self: Notes, record: Record, kind: str) -> None:
        if self._group.index == 0:
            real(self, record, kind)
        else:
            self._records.write(f"{self._group.index:05d}{kind}", record.encode()[:-1]).result()

    monkeypatch.setattr(Notes, "publish", publish)
    error, _ = save_in_job(tmp_path, 2, lambda index: numbers(1))
    assert isinstance(error, StorageError)
    assert "process 1: the record does not match its checksum" in str(error)
    assert absent(tmp_path)


def test_a_session_that_was_used_before_is_refused(tmp_path: Path) -> None:
    name = session()
    first = SaveOptions(group=ProcessGroup(0, 2, name), timeout_s=0.2)
    with pytest.raises(SaveTimeout):
        unickpt.save(tmp_path, numbers(1), options=first)
    again = SaveOptions(group=ProcessGroup(0, 2, name), timeout_s=0.2)
    with pytest.raises(SaveConflict, match="must be new for every run"):
        unickpt.save(tmp_path, numbers(1), options=again)


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("1,2")
    errors = save_in_job(tmp_path, 2, lambda index: numbers(1), overwrite=True)
    assert all(isinstance(e, CheckpointExists) for e in errors)
    assert "data.csv" in str(errors[0])
    assert files(tmp_path) == ["data.csv"]


# --- processes that contradict each other -------------------------------------------------------

W = np.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("trees", "facts"),
    [
        (
            [{"w": W}, {"w": W[:1]}],
            ["array 'w'", "process 0 has float64[2, 3]", "process 1 has float64[1, 3]"],
        ),
        (
            [{"w": W}, {"w": W.astype(np.int32)}],
            ["array 'w'", "process 0 has float64", "process 1 has int32"],
        ),
        (
            [{"lr": 0.1}, {"lr": 0.2}],
            ["value 'lr'", "process 0 has the value 0.1", "process 1 has the value 0.2"],
        ),
        ([{"lr": 0.0}, {"lr": -0.0}], ["value 'lr'", "0.0", "-0.0"]),
        ([{"lr": float("nan")}, {"lr": 1.0}], ["value 'lr'", "nan", "1.0"]),
        ([{"n": 1}, {"n": True}], ["value 'n'", "the value 1", "the value True"]),
        ([{"x": W}, {"x": 5}], ["'x'", "process 0 has float64", "process 1 has the value 5"]),
        ([{"x": PerProcess(1)}, {"x": 5}], ["'x'", "a PerProcess", "the value 5"]),
        (
            [{"x": [1, 2]}, {"x": [1, 2, 3]}],
            ["process 0 and process 1 save different trees", "'x'"],
        ),
        ([{1: W}, {"1": W}], ["trees differ at '%31'"]),
        (
            [{"r": PerProcess(1), "w": W}, {"w": W}],
            ["process 1 has no value for the PerProcess leaf 'r'"],
        ),
    ],
)
def test_a_contradiction_is_named_with_both_facts(
    trees: list[Any], facts: list[str], tmp_path: Path
) -> None:
    errors = save_in_job(tmp_path, 2, lambda index: trees[index])
    assert isinstance(errors[0], CoverageError)
    assert isinstance(errors[1], ProcessFailed)
    for fact in facts:
        assert fact in str(errors[0])
        assert fact in str(errors[1])
    assert absent(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ([{"metadata": {"step": 1}}, {"metadata": {"step": 2}}], "different metadata"),
        ([{"compression": "zstd"}, {"compression": None}], "different compression"),
        (
            [{"chunk_bytes": 24}, {"chunk_bytes": 1000}],
            r"chunks of \[1, 3\], .* chunks of \[2, 3\]",
        ),
    ],
)
def test_processes_must_agree_on_the_settings(
    arguments: list[dict[str, Any]], fact: str, tmp_path: Path
) -> None:
    def work(group: ProcessGroup) -> Any:
        given = dict(arguments[group.index])
        metadata = given.pop("metadata", None)
        options = SaveOptions(group=group, timeout_s=20, **given)
        return unickpt.save(tmp_path, {"w": W}, metadata=metadata, options=options)

    errors = in_job(2, work)
    with pytest.raises(CoverageError, match=fact):
        raise errors[0]
    assert isinstance(errors[1], ProcessFailed)


def test_processes_must_agree_on_their_number(tmp_path: Path) -> None:
    name = session()

    def work(group: ProcessGroup) -> Any:
        wrong = ProcessGroup(group.index, 2 + group.index, name)
        return unickpt.save(tmp_path, {"w": W}, options=SaveOptions(group=wrong, timeout_s=20))

    errors = in_job(2, work)
    assert "different processes: process 0 with 2, process 1 with 3" in str(errors[0])


def boxes(*pairs: tuple[tuple[int, int], tuple[int, int]]) -> list[LocalFragments]:
    """For each process rows [start, stop) of an array of shape (4, 2)."""
    return [
        LocalFragments((4, 2), [(Box((a, 0), (b, 2)), np.full((b - a, 2), i))], dtype="int64")
        for i, (a, b) in enumerate(pairs)
    ]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (boxes((0, 2), (3, 4)), r"array 'w' of shape \[4, 2\]: no process holds \[2:3, 0:2\]"),
        (boxes((0, 3), (2, 4)), r"\[0:3, 0:2\] of process 0 overlaps \[2:4, 0:2\] of process 1"),
    ],
)
def test_local_fragments_must_cover_their_array_once(
    parts: list[LocalFragments], reason: str, tmp_path: Path
) -> None:
    errors = save_in_job(tmp_path, 2, lambda index: {"w": parts[index]})
    with pytest.raises(CoverageError, match=reason):
        raise errors[0]
    assert isinstance(errors[1], ProcessFailed)
    assert absent(tmp_path)


def test_trees_of_different_processes_unite(tmp_path: Path) -> None:
    def tree(index: int) -> dict[str, Any]:
        mine = np.full((2, 3), index, np.float32)
        return {
            "step": 7,
            "shared": W,
            "stages": {f"stage_{index}": {"w": LocalFragments.whole(mine), "depth": index}},
            "rng": PerProcess({"seed": index}),
        }

    save_in_job(tmp_path, 5, tree)
    found = unickpt.load(tmp_path)
    assert unickpt.verify(tmp_path).ok
    assert list(found["stages"]) == [f"stage_{i}" for i in range(5)]
    for index in range(5):
        assert found["stages"][f"stage_{index}"]["depth"] == index
        assert np.all(found["stages"][f"stage_{index}"]["w"] == index)
    assert [v["seed"] for v in found["rng"].values] == list(range(5))
    np.testing.assert_array_equal(found["shared"], W)


def test_an_array_that_only_some_processes_have_is_written_by_them(tmp_path: Path) -> None:
    some = {f"w{k}": np.full(3, k) for k in range(8)}
    save_in_job(tmp_path, 4, lambda index: {"all": W, **(some if index % 2 else {})})
    found = unickpt.load(tmp_path)
    assert unickpt.verify(tmp_path).ok
    assert all(np.array_equal(found[name], some[name]) for name in some)


# --- overwriting --------------------------------------------------------------------------------


def test_a_taken_place_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    unickpt.save(tmp_path, numbers(1))
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    with pytest.raises(CheckpointExists, match="already holds a checkpoint; pass overwrite=True"):
        unickpt.save(tmp_path, numbers(2))
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


def test_the_old_checkpoint_stays_until_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unickpt.save(tmp_path, numbers(1))
    seen = []

    def checked(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any) -> Any:
            seen.append(sound(tmp_path, numbers(1)))
            return real(*arguments)

        return step

    for step in ("publish", "_build_root", "_write_root"):
        monkeypatch.setattr(of_step(step), step, checked(getattr(of_step(step), step)))
    unickpt.save(tmp_path, numbers(2), overwrite=True)
    assert seen == [True, True, True]
    assert sound(tmp_path, numbers(2))


@pytest.mark.parametrize("fault", ["publish", "_build_root", "_write_root"])
def test_a_failed_overwrite_keeps_the_old_checkpoint(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unickpt.save(tmp_path, numbers(1))

    def fail(self: Any, *arguments: Any) -> None:
        raise Failed("no more space")

    monkeypatch.setattr(of_step(fault), fault, fail)
    with pytest.raises(StorageError, match="no more space"):
        unickpt.save(tmp_path, numbers(2), overwrite=True)
    assert sound(tmp_path, numbers(1))
    monkeypatch.undo()
    unickpt.save(tmp_path, numbers(3), overwrite=True)
    assert sound(tmp_path, numbers(3))


def overwrite_often(path: Path, times: int, count: int) -> None:
    sizes = set()
    for k in range(times):
        save_in_job(path, count, lambda index, k=k: numbers(k), overwrite=True)
        names = files(path)
        sizes.add(len(names))
        assert sum((path / n).stat().st_size for n in names) < 300_000
        if k % 10 == 0 or k == times - 1:
            assert sound(path, numbers(k))
    assert len(sizes) == 1, "files pile up"
    assert len(os.listdir(path / "processes")) == 1


@pytest.mark.parametrize("count", [1, 2])
def test_many_overwrites_neither_break_nor_pile_up(count: int, tmp_path: Path) -> None:
    overwrite_often(tmp_path, 45, count)


@pytest.mark.slow
def test_hundreds_of_overwrites_neither_break_nor_pile_up(tmp_path: Path) -> None:
    overwrite_often(tmp_path, 400, 2)


def test_a_damaged_checkpoint_can_be_overwritten(tmp_path: Path) -> None:
    unickpt.save(tmp_path, numbers(1))
    (tmp_path / "manifest.ocdbt").write_bytes(b"\0" * 50)
    unickpt.save(tmp_path, numbers(2), overwrite=True)
    assert sound(tmp_path, numbers(2))


def test_a_link_in_the_folder_is_not_followed_when_debris_is_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "inner").mkdir(parents=True)
    (precious / "inner" / "file").write_text("keep me")
    path = tmp_path / "checkpoint"
    unickpt.save(path, numbers(1))
    (path / "processes" / "link").symlink_to(precious)
    (path / "processes" / "older").mkdir()
    (path / "processes" / "older" / "link").symlink_to(precious)
    unickpt.save(path, numbers(2), overwrite=True)
    assert not (path / "processes" / "older").exists()
    assert (precious / "inner" / "file").read_text() == "keep me"


# --- two jobs -----------------------------------------------------------------------------------


class Stop:
    """Holds a save up at a step until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: str, name: str) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        real = getattr(of_step(step), step)

        def wait(self_: Any, *arguments: Any) -> Any:
            attempt = self_ if isinstance(self_, Attempt) else self_.attempt
            if attempt.name.startswith(name) and not self.reached.is_set():
                self.reached.set()
                assert self.go_on.wait(30)
            return real(self_, *arguments)

        monkeypatch.setattr(of_step(step), step, wait)


@pytest.mark.parametrize("step", ["publish", "commit", "_merge", "_build_root", "_write_root"])
@pytest.mark.parametrize("first_commit", [True, False])
def test_of_two_jobs_the_later_one_raises_and_the_winner_is_whole(
    step: str, first_commit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not first_commit:
        unickpt.save(tmp_path, numbers(0))
    name = session()
    stop = Stop(monkeypatch, step, name)
    result: list[Any] = []

    def slow(group: ProcessGroup) -> Any:
        options = SaveOptions(group=group, timeout_s=20)
        return unickpt.save(tmp_path, numbers(1), overwrite=not first_commit, options=options)

    thread = threading.Thread(target=lambda: result.extend(in_job(1, slow, name)))
    thread.start()
    assert stop.reached.wait(30)
    unickpt.save(tmp_path, numbers(2), overwrite=not first_commit)
    stop.go_on.set()
    thread.join()
    assert isinstance(result[0], SaveConflict)
    assert "another job committed here" in str(result[0])
    assert sound(tmp_path, numbers(2))


def test_a_job_whose_processes_found_different_roots_is_refused(tmp_path: Path) -> None:
    """Process 1 began before another job committed, and that job removed what it wrote."""
    unickpt.save(tmp_path, numbers(0))
    name = session()

    def save(index: int) -> Any:
        options = SaveOptions(group=ProcessGroup(index, 2, name), timeout_s=20)
        return unickpt.save(tmp_path, numbers(1), overwrite=True, options=options)

    result: list[Any] = []

    def late() -> None:
        try:
            save(1)
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    while not list((tmp_path / "processes").glob(f"{name}*/records/00001.ok")):
        time.sleep(0.01)
    kept = {f: (tmp_path / f).read_bytes() for f in files(tmp_path) if name in f}
    unickpt.save(tmp_path, numbers(2), overwrite=True)
    thread.join()
    for file, data in kept.items():  # as if the other job had not got round to removing it yet
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(data)
    for note in (tmp_path / "processes").glob(f"{name}*/notes/*"):
        note.unlink()
    with pytest.raises(SaveConflict, match="between the start of process 0 and of process 1"):
        save(0)
    assert isinstance(result[0], SaveConflict)
    assert sound(tmp_path, numbers(2))


def race(path: Path, seeds: tuple[int, int], count: int, overwrite: bool) -> list[bool]:
    """Two jobs save to one path at once; which of them say that they did."""
    barrier = threading.Barrier(2)
    outcomes: list[list[Any]] = [[], []]

    def job(number: int) -> None:
        barrier.wait()
        tree = numbers(seeds[number])
        outcomes[number] = save_in_job(path, count, lambda index: tree, overwrite=overwrite)

    threads = [threading.Thread(target=job, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results in outcomes:
        won = [not isinstance(r, BaseException) for r in results]
        assert all(won) or not any(won), f"processes of one job differ: {results}"
        # The last: of a process that began when the winner had removed the attempt, with what
        # the others had told there.
        refusals = (SaveConflict, CheckpointExists, ProcessFailed, SaveTimeout)
        assert all(won) or all(isinstance(r, refusals) for r in results), results
    return [not isinstance(results[0], BaseException) for results in outcomes]


@pytest.mark.parametrize("count", [1, 2])
def test_two_jobs_that_make_the_first_commit_at_once(count: int, tmp_path: Path) -> None:
    for k in range(12):
        path = tmp_path / str(k)
        won = race(path, (1, 2), count, overwrite=False)
        assert sum(won) == 1
        assert sound(path, numbers(1 + won.index(True)))


@pytest.mark.parametrize("count", [1, 2])
def test_a_process_that_looks_late_knows_that_its_job_had_committed(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unickpt.save(tmp_path, numbers(0))
    late, replaced = session(), threading.Event()
    real = Attempt.committed

    def look(attempt: Attempt) -> Any:
        if attempt.name.startswith(late):
            replaced.wait(20)
        return real(attempt)

    monkeypatch.setattr(Attempt, "committed", look)
    reports: list[Any] = [None, None]

    def save(index: int) -> None:
        options = SaveOptions(group=ProcessGroup(index, 2, late), fsync=False)
        reports[index] = unickpt.save(tmp_path, numbers(1), options=options, overwrite=True)

    threads = [threading.Thread(target=save, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    threads[0].join()
    for seed in (2, 3):  # of a job of `count` processes, and of one process
        save_in_job(tmp_path, count, lambda index, seed=seed: numbers(seed), overwrite=True)
        count = 1
    replaced.set()
    threads[1].join()
    assert reports[1] is not None, "it took its job's commit for lost"
    assert (reports[1].arrays, reports[1].bytes) == (reports[0].arrays, reports[0].bytes)
    assert sound(tmp_path, numbers(3))


@pytest.mark.parametrize("count", [1, 2])
def test_two_jobs_that_overwrite_at_once(count: int, tmp_path: Path) -> None:
    unickpt.save(tmp_path, numbers(0))
    for k in itertools.count(1):
        won = race(tmp_path, (2 * k, 2 * k + 1), count, overwrite=True)
        assert any(won), "with both refused, nobody would ever get through"
        last = [2 * k + i for i in range(2) if won[i]]  # one may have begun after the other ended
        assert any(sound(tmp_path, numbers(seed)) for seed in last)
        if k == 15:
            break


# --- cost ---------------------------------------------------------------------------------------


def test_waiting_processes_ask_less_often_the_more_there_are(tmp_path: Path) -> None:
    def pause(index: int, count: int) -> float:
        location = paths.resolve(tmp_path)
        return Notes(location, ProcessGroup(index, count, "s"), paths.context(), 1).pause_s

    assert pause(1, 2) == 0.1
    assert pause(1, 4000) == 1
    assert pause(0, 4000) == 0.1, "the last record should not wait for the coordinator"


def test_the_longest_pause_depends_on_how_long_a_poll_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pauses(index: int, poll_s: float) -> list[float]:
        seconds, slept = [0.0], list[float]()

        def sleep(pause: float) -> None:
            slept.append(pause)
            seconds[0] += pause

        def ready(notes: set[str]) -> bool:
            seconds[0] += poll_s
            return len(slept) == 40

        clock = SimpleNamespace(monotonic=lambda: seconds[0], sleep=sleep)
        monkeypatch.setattr(messages, "time", clock)
        group = ProcessGroup(index, 100_000, "s")
        Notes(paths.resolve(tmp_path), group, paths.context(), 1e6).wait(ready)
        return slept

    assert max(pauses(0, 0.001)) == 0.1
    assert max(pauses(0, 2.0)) == 8, "it lists the records of all"
    assert max(pauses(1, 0.001)) == 25


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_jobs_of_many_processes(count: int, tmp_path: Path) -> None:
    """All parts are written one after the other here, then committed as by the coordinator."""
    name = session()
    held: list[Any] = []
    for index in range(count):
        group = ProcessGroup(index, count, name)
        options = SaveOptions(group=group, fsync=False)
        rows = [(Box((index, 0), (index + 1, 8)), np.full((1, 8), index))]
        tree = {
            "all": np.arange(9),
            "rows": LocalFragments((count, 8), rows),
            "own": {f"p{index}": LocalFragments.whole(np.full(3, index))},
            "rng": PerProcess(index),
        }
        description = describe(
            tree, None, group, options, adapters(), SaveFeatures(options, name, group)
        )
        context = paths.context(fsync=False)
        location = paths.resolve(tmp_path)
        attempt = Attempt(location, group, group.next_attempt(), context, 60)
        attempt.check_destination(False)
        jobs = plan_writes(description, Sharing(index)).own_items
        direct = DirectSource(1 << 20)
        attempt.folder_of(index).child(data_files.FOLDER).make()
        attempt.publish(writer.ChunkWriter(attempt, description, 1 << 20, direct).write_all(jobs))
        held.append((attempt, description))
    attempt, description = held[0]
    coordinator = Coordinator(
        attempt, lambda request: pytest.fail("nothing is missing"), MergePolicies()
    )
    totals = coordinator.commit(description.index, description.digest, lambda merged: None).totals
    assert totals.arrays == count + 2
    for attempt, _ in held[1::37]:
        found = wait_committed(attempt, lambda request: pytest.fail("nothing is missing"))
        assert found == totals
    found = unickpt.load(tmp_path)
    assert found["rows"][:, 3].tolist() == list(range(count))
    assert found["own"][f"p{count - 1}"].tolist() == [count - 1] * 3
    assert [*found["rng"].values] == list(range(count))
    assert unickpt.verify(tmp_path).ok


def test_folders_are_made_durable_and_can_be_left_to_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    real: Callable[[int], None] = os.fsync

    def fsync(handle: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    unickpt.save(tmp_path / "new" / "checkpoint", numbers(1))
    below = {os.path.relpath(path, tmp_path) for path in synced}
    (attempt,) = os.listdir(tmp_path / "new/checkpoint/processes")
    root = f"new/checkpoint/processes/{attempt}"
    assert {"new", "new/checkpoint", "new/checkpoint/processes", root} <= below
    assert {f"{root}/00000/d", f"{root}/root"} <= below
    synced.clear()
    unickpt.save(tmp_path / "fast", numbers(1), options=SaveOptions(fsync=False))
    assert not synced


def test_the_modules_agree_on_where_things_are() -> None:
    assert writer.Attempt is attempt.Attempt
