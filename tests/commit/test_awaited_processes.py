"""Who is waited for: by name and phase, in the log of every process while a save is late."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import s3_server
from support.processes import Processes
from support.saving import files, numbers, save_in_job, sound
from typer.testing import CliRunner

import unickpt
from unickpt.arrays.box import Box
from unickpt.cli.app import app
from unickpt.commit import awaited_processes, liveness, progress_reports
from unickpt.commit.attempt import Attempt
from unickpt.commit.awaited_processes import Late, Waits
from unickpt.commit.progress_reports import Report
from unickpt.frameworks.adapter_protocol import Fragment, Memory
from unickpt.saving import task, writer
from unickpt.saving.task import SaveTask
from unickpt.storage import paths
from unickpt.storage.tensorstore_calls import KvStore
from unickpt.threads import Ticker

# --- real ranks -----------------------------------------------------------------------------------

RANK = """
import logging, os, sys, time
import torch
import torch.distributed as dist
logging.basicConfig(stream=sys.stdout, format="%(message)s")
import unickpt
from unickpt.commit import liveness, awaited_processes
from unickpt.saving import writer
path, slow, late_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
awaited_processes._FIRST_S, liveness.SIGN_S = late_s, {False: 0.2}
dist.init_process_group("gloo")
rank = dist.get_rank()
real = writer._Batch.write
def write(self):
    if rank == slow:
        print("writing", os.getpid(), flush=True)
        time.sleep(0.5)
    return real(self)
writer._Batch.write = write
options = unickpt.SaveOptions(timeout_s=float(sys.argv[4]), fsync=False)
try:
    unickpt.save(path, {"w": torch.full((1000,), 1.0), "mine": unickpt.PerProcess(rank)},
                 options=options)
except unickpt.errors.SaveTimeout as error:
    print("SaveTimeout", error, flush=True)
print("ended", flush=True)
time.sleep(1)
sys.stdout.flush()
os._exit(0)
"""


def until(found: Callable[[], Any], timeout_s: float = 60) -> Any:
    """Waits until something is found; returns it."""
    deadline = time.monotonic() + timeout_s
    while not (value := found()):
        assert time.monotonic() < deadline, "it was not found in time"
        time.sleep(0.05)
    return value


def output(process: Any) -> str:
    return str(process.communicate(timeout=60)[0])


@pytest.mark.plugins
@pytest.mark.parametrize("slow", [0, 2])
def test_a_stopped_rank_is_named_by_all_others_until_it_goes_on(
    slow: int, processes: Processes, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "step_1"
    ranks = processes.torch(3, RANK, path, slow, 1.0, 60)
    stopped = ranks[slow]
    assert stopped.stdout is not None
    while not stopped.stdout.readline().startswith("writing"):
        pass  # it writes
    until(lambda: list(path.glob(f"processes/*/records/{slow:05d}.at")))  # and has said so
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        watched = until(lambda: _seen(path.parent, slow))
        assert watched["processes"] == 3
        time.sleep(4)
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    said = [output(rank) for number, rank in enumerate(ranks) if number != slow]
    for text in said:
        lines = [line for line in text.splitlines() if " waiting " in line]
        is_named = [f"s for process {slow} (stopped)" in line for line in lines]
        assert sum(is_named) >= 2, text
        # On a busy machine, another one may have been late before it was stopped.
        assert all(is_named[is_named.index(True) :]), text
        assert str(path) in lines[0]
    assert "ended" in output(stopped)
    assert unickpt.verify(path).ok
    assert not list(path.glob("processes/*/records/*")), "what was said is removed"
    timing = unickpt.open(path).timing
    assert timing is not None
    assert timing.slowest[0] == slow
    assert timing.seconds["write"][slow] > 4


def _seen(run: Path, slow: int) -> dict[str, Any] | None:
    """What `watch` shows when all but one process have written, and that one has told."""
    result = CliRunner().invoke(app, ["watch", str(run), "--once", "--json"])
    for found in json.loads(result.output)["under_way"]:
        if slow in found["phases"].get("stopped", ()) and found["total"]:
            others = found["phases"].get("done", []) + found["phases"].get("waiting", [])
            if sorted(others) == [p for p in range(3) if p != slow]:
                return dict(found)
    return None


@pytest.mark.integration
def test_a_rank_whose_threads_get_no_turn_is_named(processes: Processes, tmp_path: Path) -> None:
    source = RANK.replace("time.sleep(0.5)", "time.sleep(0.5); ctypes.PyDLL(None).sleep(6)")
    ranks = processes.torch(3, f"import ctypes{source}", tmp_path / "c", 2, 1.0, 60)
    texts = [output(rank) for rank in ranks]
    assert "s for process 2 (holding Python's lock)" in texts[0]
    assert "(stopped)" not in texts[0]


def test_a_rank_that_never_comes_is_named_in_the_error_and_the_log(
    processes: Processes, tmp_path: Path
) -> None:
    source = RANK.replace("try:", "if rank == 1: time.sleep(4); os._exit(0)\ntry:")
    ranks = processes.torch(3, source, tmp_path / "c", -1, 0.5, 2)
    said = [output(rank) for rank in ranks]
    for rank in (0, 2):
        assert "s for process 1 (not begun)" in said[rank]
    assert "SaveTimeout" in said[0] + said[2]
    assert "process 1 (not begun) did not finish within 2 s" in said[0] + said[2]


# --- texts ----------------------------------------------------------------------------------------


def test_processes_are_grouped_by_what_they_do() -> None:
    late = Late(3, {17: "writing", 203: "writing", 5: "not begun"})
    assert str(late) == "processes 17, 203 (writing), 5 (not begun)"
    assert str(Late(1, {2: "writing"})) == "process 2 (writing)"
    assert str(Late(4080, {1: "writing"})) == "processes 1 (writing) and 4079 more"


@pytest.fixture
def records(tmp_path: Path) -> KvStore:
    return paths.resolve(tmp_path).child("records").store(paths.context())


def of(tmp_path: Path, process: int, count: int = 4) -> Waits:
    group = unickpt.ProcessGroup(process, count, "s")
    attempt = Attempt(paths.resolve(tmp_path), group, "s-1", paths.context(), 60)
    attempt.folder = attempt.location
    return Waits(attempt)


def say(records: KvStore, process: int, phase: str) -> None:
    records.write(progress_reports.name_of(process), Report(phase, 1.0, 5, 10, 4).encode()).result()


def test_what_a_process_does_is_seen_by_its_files_if_it_said_nothing(
    tmp_path: Path, records: KvStore
) -> None:
    say(records, 1, "write")
    (tmp_path / "00002" / "d").mkdir(parents=True)
    (tmp_path / "00002" / "d" / "x").touch()
    found = of(tmp_path, 0).describe([1, 2, 3])
    assert str(found) == "processes 1, 2 (writing), 3 (not begun)"


class Clock:
    """The time that a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(awaited_processes, "time", clock)
    return clock


def test_it_is_said_at_growing_intervals(
    tmp_path: Path, records: KvStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    looked = of(tmp_path, 0).patiently(lambda notes: False, [3])
    said = []
    for now in range(2000):
        clock.now = now
        with caplog.at_level(logging.WARNING, "unickpt"):
            looked(set())
        if caplog.records:
            said.append(now)
            assert f"waiting {now} s for process 3 (not begun)" in caplog.text
        caplog.clear()
    assert said == [30, 90, 210, 450, 930, 1530]


def test_a_stopped_process_is_said_within_seconds_and_once(
    tmp_path: Path,
    records: KvStore,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = {14: "stopped", 25: "waiting for a disk"}
    waits = of(tmp_path, 0)
    monkeypatch.setattr(
        waits,
        "describe",
        lambda late: Late(1, {3: next((s for n, s in states.items() if n > clock.now), "writing")}),
    )
    looked = waits.patiently(lambda notes: False, [3])
    said = []
    for now in range(100):
        clock.now = now
        with caplog.at_level(logging.WARNING, "unickpt"):
            looked(set())
        said += [(now, record.getMessage().partition(" for ")[2]) for record in caplog.records]
        caplog.clear()
    assert said == [
        (6, "process 3 (stopped)"),
        (14, "process 3 (waiting for a disk)"),
        (30, "process 3 (writing)"),
        (90, "process 3 (writing)"),
    ]


def test_a_save_in_time_says_and_stores_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_in_job(tmp_path, 3, lambda index: numbers(1))
    assert "waiting" not in caplog.text
    assert not [name for name in files(tmp_path) if ".at" in name or "late" in name]


def test_the_others_repeat_the_coordinator_until_it_falls_silent(
    tmp_path: Path, records: KvStore, clock: Clock
) -> None:
    first, other = of(tmp_path, 0), of(tmp_path, 2)
    assert str(other.as_told()) == "process 0 (not begun)"
    first._whom([3], 60.0)
    assert str(other.as_told()) == "process 3 (not begun)"
    clock.now = 85
    assert str(other.as_told()) == "process 3 (not begun)"
    clock.now = 95  # 60 s, and 30 s more
    say(records, 0, "wait")
    assert str(other.as_told()) == "process 0 (waiting)"
    say(records, 3, "write")
    first._whom([3], 60.0)
    assert str(other.as_told()) == "process 3 (writing)"


def test_a_coordinator_that_is_done_and_silent_commits(tmp_path: Path, records: KvStore) -> None:
    say(records, 0, "wait")
    for process in range(3):
        records.write(f"{process:05d}.ok", b"x").result()
    assert str(of(tmp_path, 1).as_told()) == "process 3 (not begun)", "not: process 0 (waiting)"
    records.write("00003.ok", b"x").result()
    assert str(of(tmp_path, 1).as_told()) == "process 0 (committing)"


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"[]",
        b"{}",
        b"7",
        b'{"count": 1, "phases": [], "again_s": 1}',
        b'{"count": 1, "phases": [[1, "\\u001b[2J"]], "again_s": 1}',
        b'{"count": 1, "phases": [[[], {}]], "again_s": 1}',
        b'{"count": "x", "phases": [[1, "writing"]], "again_s": 1}',
        b'{"count": 1e400, "phases": [[1, "writing"]], "again_s": 1}',
        b"[" * 4000,
        b'{"count": 1, "phases": [[1, "writing"]], "again_s": 1, "x": "' + b"x" * 1000 + b'"}',
    ],
)
def test_a_hostile_note_says_nothing(note: bytes, tmp_path: Path, records: KvStore) -> None:
    records.write("late", note.ljust(1024)).result()
    assert str(of(tmp_path, 1).as_told()) == "process 0 (not begun)"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"7",
        b"{}",
        b"[" * 4000,
        Report("x", 1, 1, 1, 1).encode(),
        Report("write", float("nan"), 1, 1, 1).encode(),
        Report("write", 1, -1, 1, 1).encode(),
        Report("write", 1, 1, 1, 1 << 62).encode(),
        Report("write", 1, True, 1, 1).encode(),
        b'{"phase": [], "seconds": 1, "nbytes": 1, "total": 1, "processes": 1}',
        b'{"phase": "write", "seconds": "1", "nbytes": 1, "total": 1, "processes": 1}',
    ],
)
def test_a_hostile_report_is_none(data: bytes) -> None:
    assert progress_reports.decode(data) is None
    sound = Report("write", 1.5, 3, 4, 5, 6)
    assert progress_reports.decode(sound.encode()) == sound


# --- the thread that reports ----------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(task, "FIRST_AFTER_S", 0.05)
    monkeypatch.setattr(liveness, "FIRST_S", {False: 0.01, True: 0.05})
    monkeypatch.setattr(liveness, "SIGN_S", {False: 0.05, True: 0.05})
    monkeypatch.setattr(liveness, "LOOK_S", 0.05)
    yield
    assert "unickpt report" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.usefixtures("quick")
def test_reports_end_with_the_last_of_them(records: KvStore) -> None:
    done, asked = [0], threading.Event()

    def now(number: int) -> None:
        found = Report("write", 1.0, done[0], 100, 1, number)
        if progress_reports.read(records, [7]):
            asked.set()
            time.sleep(0.3)  # it is under way when the reporter is closed
        progress_reports.write(records, 7, found)

    with closing(Ticker("unickpt report", 0.05, 60)) as told:
        told.start(now)
        assert asked.wait(60)
        done[0] = 100
    last = progress_reports.read(records, [7])[7]
    assert last.nbytes == 100, "the last report has all bytes"
    assert last.number >= 2
    time.sleep(0.5)
    assert progress_reports.read(records, [7])[7] == last, "it writes no more"


@pytest.mark.usefixtures("quick")
def test_a_report_that_cannot_be_written_does_not_disturb_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def refuse(process: int) -> str:
        asked.append(process)
        raise OSError("no")

    monkeypatch.setattr(progress_reports, "name_of", refuse)
    monkeypatch.setattr(writer.ChunkWriter, "write_all", slowly(writer.ChunkWriter.write_all, 0.3))
    unickpt.save(tmp_path, numbers(1))
    assert asked
    assert unickpt.verify(tmp_path).ok


def slowly(real: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return real(*arguments)

    return slow


@pytest.mark.usefixtures("quick")
def test_a_copy_from_a_device_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def put_on_device(self: SaveTask, tree: Any, metadata: Any) -> None:
        def slow(part: Fragment, box: Box, make_buffer: Any) -> Any:
            if self.group.index == 1:
                until(lambda: "s for process 1 (copying from its device)" in caplog.text)
            return np.array(part.read(box, make_buffer))

        real(self, tree, metadata)
        for source in self.description.sources.values():
            source.fragments = tuple(
                replace(part, read=partial(slow, part), memory=Memory(False, on_device=True))
                for part in source.fragments
            )

    real = SaveTask.describe
    monkeypatch.setattr(SaveTask, "describe", put_on_device)
    monkeypatch.setattr(awaited_processes, "_FIRST_S", 0.3)
    results = save_in_job(tmp_path / "c", 2, lambda index: numbers(1))
    assert not any(isinstance(result, Exception) for result in results), results
    assert sound(tmp_path / "c", 1)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_of_what_was_said(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*arguments: Any) -> Any:
        time.sleep(0.4)
        if fails:
            raise RuntimeError("no")
        return real(*arguments)

    real = writer.ChunkWriter.write_all
    monkeypatch.setattr(writer.ChunkWriter, "write_all", slow)
    results = save_in_job(tmp_path / "c", 3, lambda index: numbers(1))
    assert all(isinstance(result, Exception) for result in results) == fails
    left = [name for name in files(tmp_path) if "/records/" in name]
    assert left == []
    assert (tmp_path / "c").exists() == (not fails)


def test_few_requests_are_made_however_many_processes_there_are() -> None:
    for count in (1, 100, 4096, 100_000):
        for is_remote in (False, True):
            first_s, look_s = liveness.pauses(count, is_remote)
            assert count / first_s <= max(1000, count / 0.05)
            assert first_s <= look_s
            assert liveness.silent_s(count, is_remote) >= 60
        group = unickpt.ProcessGroup(0, count, "s")
        location = paths.resolve("memory://waits")
        wait = Waits(Attempt(location, group, "s-1", paths.context(), 60))
        assert count / wait._least_s <= max(100, count / 30)


@pytest.mark.plugins
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("of", "method", "words"),
    [
        (writer.ChunkWriter, "write_all", "writing"),
        (writer._Batch, "write", "sending to the storage"),
    ],
)
def test_on_object_storage(
    of: type,
    method: str,
    words: str,
    moto: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from unickpt.plugins.watch.watching import Watch

    s3_server.use(moto, monkeypatch)
    bucket = f"waits-{secrets.token_hex(4)}"
    s3_server.make_bucket(moto, bucket)
    run = f"s3://{bucket}/run"
    told, stop = threading.Event(), threading.Event()

    def slow(self: Any, *items: Any) -> Any:
        if getattr(self, "_writer", self)._attempt.group.index == 1:
            told.set()
            assert stop.wait(60)
        return real(self, *items)

    real = getattr(of, method)
    monkeypatch.setattr(of, method, slow)
    monkeypatch.setattr(awaited_processes, "_FIRST_S", 0.5)
    job = f"{run}/step_3", 2, lambda index: numbers(1)
    saving = threading.Thread(target=save_in_job, args=job, kwargs={"timeout_s": 60})
    saving.start()
    assert told.wait(60)
    try:
        watch = Watch(run)
        found = until(
            lambda: [
                save
                for save in watch.look().under_way
                if save.seconds > 0.5 and 1 in save.phases.get(words, ())
            ]
        )
        assert (found[0].name, found[0].processes) == ("step_3", 2)
        until(lambda: f"s for process 1 ({words})" in caplog.text)
    finally:
        stop.set()
        saving.join()
    assert [each.name for each in watch.look().committed] == ["step_3"]
    assert not watch.look().under_way
    assert unickpt.verify(f"{run}/step_3").ok
    timing = unickpt.open(f"{run}/step_3").timing
    assert timing is not None
    assert timing.slowest.tolist() == [1, 0]
