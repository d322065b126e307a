"""Two tiers under adversity: what is copied is whole, and it is the version that was saved last."""

from __future__ import annotations

import datetime
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import TESTS
from support.processes import Processes
from support.s3_server import make_bucket, use
from support.saving import files, numbers, same
from support.strategies import examples

import unickpt
from unickpt import CheckpointCorrupt, Checkpointer, SaveConflict, SaveOptions, StorageError
from unickpt.commit import coordinator, lease
from unickpt.runs import lineage_notes, tier_copies
from unickpt.runs.current_steps import Steps
from unickpt.runs.step_folder import StepFolder
from unickpt.runs.tier_copies import Copying
from unickpt.tools import copying as copying_tools

FAST = SaveOptions(fsync=False, timeout_s=20, chunk_bytes=4096)


class Run:
    """A run with two tiers.

    Arguments:
        folder: for both.
        root: of the steps, where that is elsewhere.
    """

    def __init__(self, folder: Path, root: str = "") -> None:
        self.root, self.local = root or str(folder / "root"), folder / "local"

    def open(self, **arguments: Any) -> Checkpointer:
        return Checkpointer(self.root, local=self.local, **{"options": FAST, **arguments})

    def in_root(self, step: int) -> dict[str, Any]:
        """What the root holds, checked."""
        assert unickpt.verify(f"{self.root}/step_{step}").ok
        loaded: dict[str, Any] = unickpt.load(f"{self.root}/step_{step}")
        return loaded


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@contextmanager
def first_copy_waits(
    patch: pytest.MonkeyPatch,
) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Has the first copy of a step wait when it has listed its files: until the second event, which
    the test sets, while the first one says that it waits."""
    real, waits, goes_on = copying_tools._copy_values, threading.Event(), threading.Event()

    def copy(*arguments: Any) -> None:
        if not waits.is_set():
            waits.set()
            assert goes_on.wait(60)
        real(*arguments)

    with patch.context() as inner:
        inner.setattr(copying_tools, "_copy_values", copy)
        try:
            yield waits, goes_on
        finally:
            goes_on.set()


def flip(folder: Path, name: str = "/d/") -> None:
    """Flips a byte in the largest file of a folder that has a name with this in it."""
    largest = max((folder / f for f in files(folder) if name in f), key=os.path.getsize)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(bytes(data))


# --- all or nothing ------------------------------------------------------------------------------


def test_the_report_says_what_a_step_survives_at_its_commit(run: Run) -> None:
    with run.open() as ckpt:
        assert ckpt.save(1, {"w": [1.0, 2.0]}).result().survives == tier_copies.IN_LOCAL
        ckpt.wait()
        assert ckpt.survives() == {1: tier_copies.IN_ROOT}
    with Checkpointer(run.root, options=FAST) as ckpt:
        assert ckpt.save(2, {"w": [1.0, 2.0]}).result().survives == tier_copies.IN_ROOT
    assert not unickpt.save(f"{run.root}/alone", {"w": [1.0, 2.0]}, options=FAST).survives


def test_a_step_that_is_overwritten_while_it_is_copied(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run.open(keep_last=3) as checkpointer:
        checkpointer.save(1, numbers(0))
        checkpointer.wait()
        with first_copy_waits(monkeypatch) as (waits, goes_on):
            checkpointer.save(1, numbers(1), overwrite=True).result(30)
            assert waits.wait(30)
            assert same(run.in_root(1), numbers(0)), "the old one is there until the new one is"
            checkpointer.save(1, numbers(2), overwrite=True).result(30)
            goes_on.set()
            checkpointer.wait()
        assert same(run.in_root(1), numbers(2))
        assert len(os.listdir(f"{run.root}/step_1/processes")) == 1, "nothing of others is left"
        checkpointer.save(2, numbers(3))
        checkpointer.wait()
        assert StepFolder(run.local).committed() == [2]
        assert same(checkpointer.load(step=1), numbers(2))


def test_a_step_that_is_overwritten_right_after_its_copy(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is committed, but who made it has not been told yet."""
    real, copied, goes_on = tier_copies.copy_version, threading.Event(), threading.Event()

    def copy_from(*arguments: Any) -> Any:
        outcome = real(*arguments)
        copied.set()
        assert goes_on.wait(60)
        return outcome

    monkeypatch.setattr(tier_copies, "copy_version", copy_from)
    with run.open(keep_last=3) as checkpointer:
        checkpointer.save(1, numbers(1)).result(30)
        assert copied.wait(30)
        checkpointer.save(1, numbers(2), overwrite=True).result(30)
        goes_on.set()
        checkpointer.wait()
        assert same(run.in_root(1), numbers(2))
        checkpointer.save(2, numbers(3))
        checkpointer.wait()
        assert same(checkpointer.load(step=1), numbers(2))


def test_a_step_is_not_removed_while_it_is_copied(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        run.open(keep_last=1) as checkpointer,
        first_copy_waits(monkeypatch) as (waits, goes_on),
    ):
        checkpointer.save(1, numbers(1)).result(30)
        assert waits.wait(30)
        checkpointer.save(2, numbers(2)).result(30)
        checkpointer._cleaning.clean()
        assert StepFolder(run.local).committed() == [1, 2]
        goes_on.set()
        checkpointer.wait()
        assert StepFolder(run.root).committed() == [2]
        assert same(run.in_root(2), numbers(2))
        assert checkpointer.steps() == [2]


@pytest.mark.parametrize("what", ["vanishes", "is_cut", "changes"])
def test_a_step_that_is_damaged_is_not_copied_and_others_are(
    what: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run.open(keep_last=3) as checkpointer:
        with first_copy_waits(monkeypatch) as (waits, goes_on):
            checkpointer.save(1, numbers(1)).result(30)
            assert waits.wait(30)
            checkpointer.save(2, numbers(2)).result(30)
            (data,) = (run.local / "step_1/processes").glob("*/00000/d/*")
            if what == "vanishes":
                data.unlink()
            elif what == "is_cut":
                data.write_bytes(b"")
            else:
                flip(run.local / "step_1")
            goes_on.set()
            with pytest.raises(CheckpointCorrupt, match=r"copying .*step_1 to .*nothing was"):
                checkpointer.wait()
        assert os.listdir(run.root) in ([".unickpt.lock", "step_2"], ["step_2", ".unickpt.lock"])
        assert same(run.in_root(2), numbers(2))
        checkpointer.save(3, numbers(3))
        checkpointer.wait()  # what was told once is not told again
        assert StepFolder(run.root).committed() == [2, 3]


def test_a_step_that_is_looked_at_for_removal_is_copied_nonetheless(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, goes_on, real = threading.Event(), threading.Event(), Steps.versions

    def versions(self: Steps, step: int) -> Any:
        if step == 2 and threading.current_thread() is cleans:
            looks.set()
            assert goes_on.wait(60)
        return real(self, step)

    with run.open(keep_last=3) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(Copying, "start", lambda self: None)
            for step in (1, 2):
                checkpointer.save(step, numbers(step)).result(30)
        assert checkpointer._copying is not None
        cleans = threading.Thread(target=checkpointer._cleaning.clean)
        monkeypatch.setattr(Steps, "versions", versions)
        cleans.start()
        assert looks.wait(30)
        copies = threading.Thread(target=checkpointer._copying.copy)
        copies.start()
        copies.join(0.1)
        goes_on.set()
        copies.join(30)
        cleans.join(30)
        assert StepFolder(run.root).committed() == [1, 2]


def test_a_step_that_somebody_removes_while_it_is_copied(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run.open() as checkpointer:
        with first_copy_waits(monkeypatch) as (waits, goes_on):
            checkpointer.save(1, numbers(1)).result(30)
            assert waits.wait(30)
            StepFolder(run.local).remove(1)
            goes_on.set()
            with pytest.raises(unickpt.CheckpointNotFound, match=r"local/step_1 was removed"):
                checkpointer.wait()
        assert os.listdir(run.root) == [".unickpt.lock"]


def test_a_copy_that_reads_differently_is_not_committed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage of the root has a bad day: what it was given is not what it gives."""
    real = copying_tools._copy_values

    def copy(*arguments: Any) -> None:
        real(*arguments)
        flip(Path(run.root) / "step_1")

    with run.open() as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(copying_tools, "_copy_values", copy)
            checkpointer.save(1, numbers(1))
            with pytest.raises(StorageError, match="reading back gives something else: 'large'"):
                checkpointer.wait()
            assert os.listdir(run.root) == [".unickpt.lock"]
        checkpointer.save(2, numbers(2))
        checkpointer.wait()
        assert same(run.in_root(1), numbers(1)), "what failed is tried again"


@pytest.mark.parametrize("damaged", ["manifest.ocdbt", "root/"])
def test_a_damaged_step_in_the_root_is_replaced_and_stops_nothing(
    damaged: str, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with run.open(keep_last=3) as checkpointer:
        checkpointer.save(1, numbers(1))
        checkpointer.save(2, numbers(2))
    for name in files(Path(run.root)):
        if damaged in name:
            (Path(run.root) / name).write_bytes(b"")
    with run.open(keep_last=3) as checkpointer:
        assert same(checkpointer.load(), numbers(2))
        checkpointer.save(3, numbers(3))
        checkpointer.wait()
        assert same(run.in_root(3), numbers(3))
        assert same(run.in_root(2), numbers(2))
        assert "root/step_2" in caplog.text


@pytest.mark.parametrize("damage", ["emptied", "flipped"])
def test_a_damaged_manifest_in_the_local_tier_hides_nothing(
    damage: str, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with run.open() as checkpointer:
        checkpointer.save(1, numbers(1))
    damage_manifest(run.local / "step_1", damage)
    with run.open() as checkpointer:
        assert same(checkpointer.load(), numbers(1))
        assert "local/step_1 is damaged" in caplog.text
        checkpointer.save(2, numbers(2))
        checkpointer.wait()
        assert same(run.in_root(1), numbers(1))
        assert same(run.in_root(2), numbers(2))


@pytest.mark.parametrize("damage", ["emptied", "flipped"])
def test_a_damaged_manifest_in_the_local_tier_brings_nothing_older_back(
    damage: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run.open() as checkpointer:
        checkpointer.save(1, numbers(1))
    with run.open() as checkpointer, monkeypatch.context() as patch:
        patch.setattr(Copying, "copy", lambda _: None)  # as if killed before
        checkpointer.save(1, numbers(2), overwrite=True, wait=True)
        checkpointer.wait()
    damage_manifest(run.local / "step_1", damage)
    with pytest.raises(CheckpointCorrupt, match="local/step_1"):
        run.open().load()


def damage_manifest(step: Path, damage: str) -> None:
    manifest = step / "manifest.ocdbt"
    data = bytearray(manifest.read_bytes())
    data[len(data) // 2] ^= 255
    manifest.write_bytes(b"" if damage == "emptied" else bytes(data))


@pytest.mark.integration
def test_hammered_steps_are_copied_as_they_were_saved_last(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = copying_tools.copy_files

    def slow(*arguments: Any, **options: Any) -> None:
        threading.Event().wait(0.02)
        real(*arguments, **options)

    monkeypatch.setattr(copying_tools, "copy_files", slow)
    last: dict[int, int] = {}
    with run.open(keep_last=3) as checkpointer:
        for number in range(60):
            step = number // 20
            checkpointer.save(step, {"n": number}, overwrite=True)
            last[step] = number
            if number % 20 == 19:
                checkpointer.wait()
                assert all(run.in_root(step) == {"n": last[step]} for step in last)
    assert all(run.in_root(step) == {"n": number} for step, number in last.items())
    assert StepFolder(run.local).committed() == [2]


def test_a_save_waits_for_the_removal_of_its_step(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is stale, and about to be removed from the local tier, when it is overwritten."""
    real, removes, goes_on = StepFolder.remove, threading.Event(), threading.Event()

    def remove(self: StepFolder, step: int) -> None:
        removes.set()
        assert goes_on.wait(60)
        real(self, step)

    with run.open() as checkpointer:
        checkpointer.save(1, numbers(1))
    with Checkpointer(run.root, options=FAST) as checkpointer:
        checkpointer.save(1, numbers(2), overwrite=True)
    monkeypatch.setattr(StepFolder, "remove", remove)
    with run.open() as checkpointer:
        cleaning = threading.Thread(target=checkpointer._cleaning.clean)
        cleaning.start()
        assert removes.wait(30)
        pending = checkpointer.save(1, numbers(3), overwrite=True)
        with pytest.raises(unickpt.errors.SaveTimeout):
            pending.result(0.3)
        goes_on.set()
        cleaning.join(30)
        pending.result(30)
        checkpointer.wait()
        assert same(run.in_root(1), numbers(3))


# --- which version counts ------------------------------------------------------------------------


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the clock that steps are stamped with, to so many hours from now."""

    def set_clock(hours: int) -> None:
        def now(zone: datetime.tzinfo) -> datetime.datetime:
            return datetime.datetime.now(zone) + datetime.timedelta(hours=hours)

        clock = SimpleNamespace(UTC=datetime.UTC, datetime=SimpleNamespace(now=now))
        monkeypatch.setattr(coordinator, "datetime", clock)

    return set_clock


@pytest.mark.parametrize("ahead", [-1, 0, 1])
def test_a_step_replaced_in_the_root_is_not_hidden_by_a_stale_one(
    ahead: int, run: Run, hours: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    with run.open() as checkpointer:
        checkpointer.save(100, numbers(1))
    hours(ahead)
    with Checkpointer(run.root, options=FAST) as checkpointer:
        checkpointer.save(100, numbers(2), overwrite=True)
    with run.open() as checkpointer:
        assert checkpointer.path(100) == f"{run.root}/step_100"
        assert same(checkpointer.load(), numbers(2))
        assert "local/step_100 is stale" in caplog.text
        checkpointer.save(101, numbers(3))
        checkpointer.wait()
        assert same(run.in_root(100), numbers(2))
        assert StepFolder(run.local).committed() == [101]
        assert same(checkpointer.load(step=100), numbers(2))


@pytest.mark.parametrize("ahead", [-1, 0, 1])
def test_a_step_replaced_in_the_local_tier_counts_before_it_is_copied(
    ahead: int, run: Run, hours: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise StorageError("the network is down")

    with run.open() as checkpointer:
        checkpointer.save(100, numbers(1))
    with monkeypatch.context() as patch:
        patch.setattr(tier_copies, "copy_version", fail)
        for number in (2, 3):  # it supersedes what the one before it superseded
            hours(number * ahead)
            with pytest.raises(StorageError), run.open() as checkpointer:
                checkpointer.save(100, numbers(number), overwrite=True)
    assert same(run.in_root(100), numbers(1))
    with run.open() as checkpointer:
        assert checkpointer.path(100) == f"{run.local}/step_100"
        assert same(checkpointer.load(), numbers(3))
        flip(run.local / "step_100")
        with pytest.raises(CheckpointCorrupt):
            checkpointer.load()  # and not, without a word, the state before
        flip(run.local / "step_100")
        checkpointer.save(101, numbers(4))
        checkpointer.wait()
        assert same(run.in_root(100), numbers(3))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_that_cannot_see_what_it_replaces(
    overwrite: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise StorageError("the network is down")

    with Checkpointer(run.root, options=FAST) as checkpointer:
        checkpointer.save(100, numbers(1))
    checkpointer = run.open()
    with monkeypatch.context() as patch:
        patch.setattr(checkpointer._steps.root, "version", fail)
        patch.setattr(checkpointer._steps.root, "open", fail)
        checkpointer.save(100, numbers(2), overwrite=overwrite).result(30)
        with pytest.raises(StorageError):
            checkpointer.wait()
    checkpointer.save(101, numbers(3))
    if overwrite:  # it was asked to replace whatever is there
        checkpointer.wait()
        assert same(run.in_root(100), numbers(2))
    else:
        with pytest.raises(SaveConflict, match=r"root/step_100: another job .*local/step_100"):
            checkpointer.wait()
        assert same(run.in_root(100), numbers(1))
        assert same(unickpt.load(run.local / "step_100"), numbers(2)), "what was saved is there"
    assert same(run.in_root(101), numbers(3))
    checkpointer.close()


# --- steps that another run abandoned ------------------------------------------------------------


def no_copy(*arguments: Any) -> None:
    raise StorageError("the network is down")


def save_uncopied(run: Run, patch: pytest.MonkeyPatch, *steps: int) -> None:
    """Saves steps into the local tier; their copies fail, as if the job were killed before them."""
    with patch.context() as inner:
        inner.setattr(tier_copies, "copy_version", no_copy)
        checkpointer = run.open()
        for step in steps:
            checkpointer.save(step, numbers(step)).result(30)
            with pytest.raises(StorageError):
                checkpointer.wait()
        checkpointer.close()


def save_all(run: Run, *steps: int) -> None:
    with run.open() as checkpointer:
        for step in steps:
            checkpointer.save(step, numbers(step)).result(30)


@pytest.mark.parametrize("how", ["drop", "delete", "after"])
def test_a_step_removed_by_a_run_without_the_local_tier_does_not_come_back(
    how: str, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    save_all(run, 1, 2, 3)
    arguments: dict[str, Any] = {"after": 2} if how == "after" else {}
    with Checkpointer(run.root, options=FAST, **arguments) as other:
        if how == "drop":
            other.load(step=2)
            assert other.drop_later_steps() == [3]
        elif how == "delete":
            other.delete(3)
        else:
            other.save(4, numbers(40))
    expected = {1: 1, 2: 2} | ({4: 40} if how == "after" else {})
    newest = max(expected)
    assert StepFolder(run.local).committed() == [3]
    with run.open() as checkpointer:
        assert checkpointer.steps() == list(expected)
        assert checkpointer.path(3) == f"{run.root}/step_3"
        with pytest.raises(unickpt.CheckpointNotFound, match="step 3 is not in"):
            checkpointer.load(step=3)
        assert same(checkpointer.load(), numbers(expected[newest]))
        checkpointer.save(newest + 1, numbers(50))  # 3, after "drop"
        checkpointer.wait()
        assert "local/step_3, which is stale: another run removed the step" in caplog.text
        assert checkpointer.steps() == [*expected, newest + 1]
    assert same(run.in_root(newest + 1), numbers(50))


def test_uncopied_steps_do_not_count_when_another_run_went_on_from_an_earlier_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(run, 1, 2)
    save_uncopied(run, monkeypatch, 3, 4)
    with run.open() as checkpointer:
        assert checkpointer.latest() == 4
    with Checkpointer(run.root, options=FAST) as other:
        assert other.latest() == 2
        other.save(3, numbers(30))
    with run.open() as checkpointer:
        assert checkpointer.steps() == [1, 2, 3]
        assert same(checkpointer.load(), numbers(30))
        checkpointer.save(4, numbers(40))
    assert StepFolder(run.root).committed() == [1, 2, 3, 4]
    assert same(run.in_root(3), numbers(30))
    assert same(run.in_root(4), numbers(40))


def test_uncopied_steps_count_when_another_run_only_removed_older_ones(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(run, 1, 2)
    save_uncopied(run, monkeypatch, 3, 4)
    with Checkpointer(run.root, options=FAST) as other:
        other.delete(1)
    with run.open() as checkpointer:
        assert checkpointer.steps() == [2, 3, 4]
        checkpointer.save(5, numbers(5))
    assert StepFolder(run.root).committed() == [2, 3, 4, 5]


def test_a_step_whose_copy_failed_counts_although_a_later_one_was_copied(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_uncopied(run, monkeypatch, 1)
    real = tier_copies.copy_version

    def copy_from(self: StepFolder, source: StepFolder, step: int, *arguments: Any) -> bool:
        if step == 1:
            raise StorageError("the network is down")
        return real(self, source, step, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(tier_copies, "copy_version", copy_from)
        with pytest.raises(StorageError):
            save_all(run, 2)
    assert StepFolder(run.root).committed() == [2]
    with run.open() as checkpointer:
        assert checkpointer.steps() == [1, 2]
        checkpointer.save(3, numbers(3))
    assert StepFolder(run.root).committed() == [1, 2, 3]


def test_the_steps_of_the_local_tier_count_if_the_root_is_lost(run: Run) -> None:
    save_all(run, 1, 2)
    shutil.rmtree(run.root)
    with run.open() as checkpointer:
        assert checkpointer.steps() == [2]
        assert same(checkpointer.load(), numbers(2))
        checkpointer.save(3, numbers(3))
    assert StepFolder(run.root).committed() == [2, 3]


def test_a_copy_whose_record_is_missing_is_recorded_by_the_next_job(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the job were killed between the two."""
    with monkeypatch.context() as patch:
        patch.setattr(lineage_notes, "record_copied", lambda *arguments, **options: None)
        save_all(run, 1, 2)
    with run.open() as checkpointer:
        checkpointer.save(2, numbers(20), overwrite=True)
    with Checkpointer(run.root, options=FAST) as other:
        other.delete(2)
    with run.open() as checkpointer:
        assert checkpointer.steps() == [1]


Operation = tuple[str, int]
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["save", "uncopied", "alone", "drop", "delete"]), st.integers(0, 5)),
    max_size=8,
)


@pytest.mark.integration
@examples(25)
@example([("save", 0), ("alone", 0), ("uncopied", 0), ("drop", 0)])
@given(OPERATIONS)
def test_runs_with_and_without_the_local_tier_see_one_history(operations: list[Operation]) -> None:
    """Beside a model: the steps of the root, those that only the local tier has, and which version
    was the newest in the root when these were saved. They count while it is."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        run, root, uncopied = Run(Path(folder)), dict[int, int](), dict[int, int]()
        base = saved = 0

        def newest() -> int:
            return root[max(root)] if root else 0

        for what, at in operations:
            saved += 1
            if what in ("save", "uncopied"):
                if newest() != base:
                    uncopied = {}
                step = max({**root, **uncopied}, default=0) + 1
                with patch.context() as inner, suppress(StorageError):
                    if what == "uncopied":
                        inner.setattr(tier_copies, "copy_version", no_copy)
                    with run.open() as job:
                        job.save(step, numbers(saved)).result(30)
                if what == "uncopied":
                    uncopied[step] = saved
                else:
                    root, uncopied = {**root, **uncopied, step: saved}, {}
                base = newest()
                continue
            with Checkpointer(run.root, options=FAST) as job:
                assert job.steps() == sorted(root)
                if what == "alone":
                    step = max(root, default=0) + 1
                    job.save(step, numbers(saved)).result(30)
                    root[step] = saved
                elif len(root) > 1:
                    step = sorted(root)[at % len(root)]
                    if what == "delete":
                        job.delete(step)
                        del root[step]
                    else:
                        job.drop_later_steps(step)
                        root = {s: n for s, n in root.items() if s <= step}
        expected = {**(uncopied if newest() == base else {}), **root}
        with run.open() as job:
            assert job.steps() == sorted(expected)
            for step, number in expected.items():
                assert same(job.load(step=step), numbers(number))


@pytest.mark.integration
def test_a_reader_always_sees_the_newest_step_of_two_tiers(run: Run) -> None:
    seen, errors, done = [0], list[str](), threading.Event()

    def read() -> None:
        with run.open() as reader:
            while not done.is_set():
                before = seen[0]
                newest = reader.latest() or 0
                if newest < before:
                    errors.append(f"{newest} after {before}")

    with run.open(keep_last=2) as checkpointer:
        thread = threading.Thread(target=read)
        thread.start()
        for step in range(1, 40):
            checkpointer.save(step, numbers(step)).result(30)
            seen[0] = step
        done.set()
        thread.join()
    assert not errors


# --- crashes -------------------------------------------------------------------------------------

JOB = f"""
import sys
sys.path.insert(0, {TESTS!r})
import unickpt
from support.dying import die_at
from support.saving import numbers
from unickpt.commit import lease

lease._RENEW_S, lease._EXPIRES_S = 0.1, 1.0
root, local, step, when = sys.argv[1:]
options = unickpt.SaveOptions(fsync=False, chunk_bytes=4096)
with unickpt.Checkpointer(root, local=local, options=options) as checkpointer:
    checkpointer.save(1, numbers(0))
    checkpointer.wait()
    die_at(step, when)
    checkpointer.save(1, numbers(1), overwrite=True)
    checkpointer.save(2, numbers(2))
"""


@pytest.mark.parametrize("storage", ["file", "s3"])
def test_a_job_killed_while_it_copies(
    storage: str,
    tmp_path: Path,
    processes: Processes,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease, "_RENEW_S", 0.1)
    monkeypatch.setattr(lease, "_EXPIRES_S", 1.0)
    root = ""
    moments = [("tools.copying:_copy_values", "during")]
    if storage == "s3":
        endpoint = request.getfixturevalue("moto")
        make_bucket(endpoint, "tiers")
        use(endpoint, monkeypatch)
        root = "s3://tiers"
    else:
        moments += [("tools.copying:_copy_values", "after"), ("tools.copying:check_copy", "after")]
        moments += [("commit.root.Root:replace", "after")]
    runs = [Run(tmp_path / str(n), root and f"{root}/{n}") for n in range(len(moments))]
    jobs = [
        processes.forked(JOB, run.root, run.local, *moment)
        for run, moment in zip(runs, moments, strict=True)
    ]
    for run, job, moment in zip(runs, jobs, moments, strict=True):
        _, errors = job.communicate(timeout=100)
        assert job.returncode == -9, f"{moment}: {errors}"
        for step in StepFolder(run.root).committed():
            assert any(same(run.in_root(step), numbers(n)) for n in (step, step - 1))
        with run.open() as checkpointer:
            newest = checkpointer.latest()
            assert newest is not None
            assert same(checkpointer.load(), numbers(newest))
            checkpointer.save(3, numbers(3))
        assert {1, newest, 3} == set(StepFolder(run.root).committed())
        for step in StepFolder(run.root).committed():
            assert same(run.in_root(step), numbers(step)), f"{moment}, step {step}"


LAST_COPY = f"""
import sys
sys.path.insert(0, {TESTS!r})
import threading
import unickpt
from support.saving import numbers
from unickpt.tools import copying as copying_tools

def slow(*arguments):
    threading.main_thread().join()
    real(*arguments)

real, copying_tools.check_copy = copying_tools.check_copy, slow
checkpointer = unickpt.Checkpointer(sys.argv[1], local=sys.argv[2])
checkpointer.save(1, numbers(1))
"""


def test_a_program_that_ends_copies_first(run: Run, processes: Processes) -> None:
    processes.finish([processes.forked(LAST_COPY, run.root, run.local)])
    assert same(run.in_root(1), numbers(1))


# --- which steps are the best ---------------------------------------------------------------------


def test_the_best_step_is_found_by_the_version_that_only_the_local_tier_has(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job was killed before it had copied a version that is better than the one in the root."""
    with run.open() as checkpointer:
        checkpointer.save(1, numbers(1), metrics={"loss": 2.0}, wait=True)
        checkpointer.save(2, numbers(2), metrics={"loss": 3.0}, wait=True)
    with monkeypatch.context() as inner:
        inner.setattr(tier_copies, "copy_version", no_copy)
        checkpointer = run.open()
        checkpointer.save(2, numbers(20), metrics={"loss": 1.0}, overwrite=True, wait=True)
        with pytest.raises(StorageError):
            checkpointer.close()
    with run.open(keep_best=1, metric="loss") as checkpointer:
        checkpointer.save(3, numbers(3), metrics={"loss": 4.0})
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3]
        assert same(run.in_root(2), numbers(20))


def test_the_best_step_is_found_by_the_version_that_another_job_saved(run: Run) -> None:
    with run.open(keep_best=1, metric="loss") as checkpointer:
        checkpointer.save(1, numbers(1), metrics={"loss": 2.0}, wait=True)
        checkpointer.release()
        with run.open() as other:
            other.save(1, numbers(10), metrics={"loss": 5.0}, overwrite=True, wait=True)
            other.save(2, numbers(2), metrics={"loss": 4.0}, wait=True)
        checkpointer.save(3, numbers(3), metrics={"loss": 6.0})
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3]
