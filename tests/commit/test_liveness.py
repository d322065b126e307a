"""A process that dies during a save is named in seconds; one that is stopped or slow is not."""

from __future__ import annotations

import os
import secrets
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import TESTS, s3_server
from support.forks import Ended, Forks
from support.saving import files, numbers, save_in_job, session, sound

import unickpt
from unickpt import CheckpointNotFound, ProcessGroup
from unickpt.commit import liveness, progress_reports
from unickpt.commit.attempt import Attempt
from unickpt.commit.liveness import Neighbour
from unickpt.commit.messages import MORE, OK, end_note
from unickpt.commit.progress_reports import Report
from unickpt.commit.progress_writer import reports_of
from unickpt.errors import ProcessFailed
from unickpt.frameworks.os_process_states import RUNS, STOPPED, Identity, own_identity
from unickpt.saving import writer
from unickpt.storage import paths

TIMEOUT_S = 600.0
SOON_S = 60.0
"""Far below `TIMEOUT_S`; far above what it takes on a busy machine."""

# One process of a job. When it comes to `step`, process `doomed` shows a sign of life, says
# "there", and waits to be killed or stopped; process `slow` waits for the file `go` before it
# writes.
PROCESS = f"""
import json, logging, sys, time
from pathlib import Path
sys.path.insert(0, {TESTS!r})
import unickpt
from support.dying import _dying
from support.saving import numbers
from unickpt.commit import attempt, coordinator, liveness, awaited_processes
from unickpt.frameworks import os_process_states
from unickpt.saving import writer

path, index, count, session, doomed, step, slow, place, silent_s = ARGS
logging.basicConfig(stream=sys.stdout, format="%(message)s")
awaited_processes._STOPPED_S = 1.0
if silent_s:
    liveness.SILENT_S, liveness._SILENT_SIGNS, liveness.SIGN_S = silent_s, 1, {{False: 0.2}}
    liveness.READ_S, liveness.LOOK_S = {{False: 0.2}}, 0.2
if place:
    os_process_states._place = lambda: place
name = "publish" if step == "published" else step
holders = {{"write_all": writer.ChunkWriter, "publish": attempt.Attempt}}
holder = holders.get(name, coordinator.Coordinator)
real, write_all = getattr(holder, name), writer.ChunkWriter.write_all

def here():
    while not list(Path(path).glob(f"processes/{{session}}-*/records/{{index:05d}}.at")):
        time.sleep(0.01)
    print("there", flush=True)
    time.sleep(1.0 if silent_s else 600)

def stepped(*arguments, **named):
    result = real(*arguments, **named) if step == "published" else None
    here()
    return result if step == "published" else real(*arguments, **named)

def slowly(*arguments, **named):
    while not Path(path, "..", "go").exists():
        time.sleep(0.01)
    return write_all(*arguments, **named)

if index == doomed:
    setattr(holder, name, stepped)
elif index == slow:
    writer.ChunkWriter.write_all = slowly
started = time.monotonic()
group = unickpt.ProcessGroup(index, count, session)
options = unickpt.SaveOptions(group=group, timeout_s={TIMEOUT_S}, chunk_bytes=4096)
try:
    unickpt.save(path, numbers(1), options=options)
    outcome = "saved"
except unickpt.UnickptError as error:
    outcome = f"{{type(error).__name__}}: {{error}}"
print(json.dumps([outcome, time.monotonic() - started]), flush=True)
"""


@dataclass
class Job:
    """Four processes that save; one of them says when it is where it waits."""

    forks: Forks
    path: Path
    doomed: int
    pids: list[int]

    @classmethod
    def start(
        cls,
        forks: Forks,
        path: Path,
        doomed: int,
        step: str,
        *,
        slow: int = -1,
        places: str = "",
        silent_s: float = 0.0,
    ) -> Job:
        name = session()
        pids = [
            forks.start(
                PROCESS, str(path), index, 4, name, doomed, step, slow, places[index:][:1], silent_s
            )
            for index in range(4)
        ]
        return cls(forks, path, doomed, pids)

    def signal_there(self, number: signal.Signals) -> None:
        """Sends the process a signal when it is there."""
        pid, deadline = self.pids[self.doomed], time.monotonic() + SOON_S
        while "there" not in self.forks.said(pid):
            assert time.monotonic() < deadline, self.forks.said(pid)
            time.sleep(0.01)
        os.kill(pid, number)

    def survivors(self) -> list[Ended]:
        """How the others ended, each with the outcome in its last line."""
        pids = [pid for index, pid in enumerate(self.pids) if index != self.doomed]
        ended = self.forks.wait_all(pids)
        for process in ended:
            assert process.code == 0, process.out
        return ended

    def check_named(self, text: str) -> None:
        """All others fail soon, with these words, and there is no checkpoint."""
        for process in self.survivors():
            outcome, seconds = process.last
            assert outcome.startswith("ProcessFailed: "), outcome
            assert text in outcome
            assert seconds < SOON_S
        with pytest.raises(CheckpointNotFound):
            unickpt.open(self.path)


STEPS = [
    (2, "write_all"),
    (2, "publish"),
    (3, "write_all"),
    (0, "write_all"),
    (0, "_merge"),
    (0, "_build_root"),
    (0, "_write_root"),
]


def test_a_killed_process_is_named_by_all_others_long_before_the_timeout(
    forks: Forks, tmp_path: Path
) -> None:
    jobs = [
        Job.start(forks, tmp_path / str(number), doomed, step)
        for number, (doomed, step) in enumerate(STEPS)
    ]
    for job in jobs:
        job.signal_there(signal.SIGKILL)
    for job in jobs:
        job.check_named(f"process {job.doomed} died: pid {job.pids[job.doomed]} on ")
        save_in_job(job.path, 2, lambda index: numbers(3))
        assert sound(job.path, 3)
        assert len(os.listdir(job.path / "processes")) == 1, "debris is left"


def test_a_process_that_dies_after_its_record_is_not_needed(forks: Forks, tmp_path: Path) -> None:
    job = Job.start(forks, tmp_path / "c", 2, "published", slow=1)
    job.signal_there(signal.SIGKILL)
    time.sleep(3)  # its neighbours look at it
    (tmp_path / "go").touch()
    assert [process.last[0] for process in job.survivors()] == ["saved"] * 3
    assert sound(tmp_path / "c", 1)


def test_a_process_that_stops_is_named_and_not_mistaken_for_a_dead_one(
    forks: Forks, tmp_path: Path
) -> None:
    jobs = [
        Job.start(forks, tmp_path / str(doomed), doomed, "write_all", silent_s=1.0)
        for doomed in (0, 2)
    ]
    for job in jobs:
        job.signal_there(signal.SIGSTOP)
    time.sleep(5)
    for job in jobs:
        os.kill(job.pids[job.doomed], signal.SIGCONT)
        for process in job.survivors():
            assert process.last[0] == "saved"
            assert f"for process {job.doomed} (stopped)" in process.out
        (ended,) = forks.wait_all([job.pids[job.doomed]])
        assert ended.last[0] == "saved"
        assert sound(job.path, 1)
        assert not list(job.path.glob("processes/*/records")), "what was said is removed"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_silence_of_a_process_on_another_machine_is_its_end(
    number: signal.Signals, forks: Forks, tmp_path: Path
) -> None:
    job = Job.start(forks, tmp_path / "c", 2, "write_all", places="abcd", silent_s=3.0)
    job.signal_there(number)
    job.check_named("process 2 is silent: no sign of life for 3 s, as process ")


def test_a_process_on_another_machine_is_vouched_for_by_its_neighbour_there(
    forks: Forks, tmp_path: Path
) -> None:
    job = Job.start(forks, tmp_path / "c", 1, "write_all", places="abba", silent_s=2.0)
    job.signal_there(signal.SIGSTOP)
    time.sleep(6)
    os.kill(job.pids[1], signal.SIGCONT)
    ended = job.survivors()
    assert [process.last[0] for process in ended] == ["saved"] * 3
    assert "for process 1 (stopped)" in ended[0].out, "as process 2 has told"


TWICE = f"""
import json, os, sys
sys.path.insert(0, {TESTS!r})
import unickpt
from support.saving import numbers

root, index, session = ARGS
group = unickpt.ProcessGroup(index, 3, session)
options = unickpt.SaveOptions(group=group, timeout_s={TIMEOUT_S}, fsync=False)
first = unickpt.save_async(f"{{root}}/1", numbers(1), options=options)
first.result()
if index == 1:
    os._exit(7)
try:
    unickpt.save(f"{{root}}/2", numbers(2), options=options)
except unickpt.UnickptError as error:
    print(json.dumps(str(error)))
"""


def test_a_process_that_dies_between_two_saves_is_named_too(forks: Forks, tmp_path: Path) -> None:
    name = session()
    source = TWICE.replace("import unickpt\n", "import unickpt\nimport time\n" + SLOW_MERGE, 1)
    pids = [forks.start(source, str(tmp_path), index, name) for index in range(3)]
    ended = forks.wait_all(pids)
    assert ended[1].code == 7
    for process in (ended[0], ended[2]):
        assert f"process 1 died: pid {pids[1]} on" in process.last, process.out


SLOW_MERGE = """
from unickpt.commit.coordinator import Coordinator
def merge(self, *arguments, real=Coordinator._merge):
    time.sleep(1)  # until all have seen the signs of all
    return real(self, *arguments)
Coordinator._merge = merge
"""


# --- object storage -------------------------------------------------------------------------------


@pytest.fixture
def bucket(moto: str, monkeypatch: pytest.MonkeyPatch) -> str:
    s3_server.use(moto, monkeypatch)
    name = f"liveness-{secrets.token_hex(4)}"
    s3_server.make_bucket(moto, name)
    return f"s3://{name}"


ON_S3 = f"""
import json, sys, time
sys.path.insert(0, {TESTS!r})
import unickpt
from support.saving import numbers
from unickpt.saving import writer

path, index, session = ARGS
if index == 1:
    writer.ChunkWriter.write_all = lambda *_: time.sleep(600)
group = unickpt.ProcessGroup(index, 2, session)
options = unickpt.SaveOptions(group=group, timeout_s={TIMEOUT_S})
started = time.monotonic()
try:
    unickpt.save(path, numbers(1), options=options)
except unickpt.UnickptError as error:
    print(json.dumps([str(error), time.monotonic() - started]))
"""


def test_a_killed_process_is_named_on_object_storage(bucket: str, forks: Forks) -> None:
    name = session()
    pids = [forks.start(ON_S3, f"{bucket}/c", index, name) for index in range(2)]
    attempt = paths.resolve(f"{bucket}/c/processes/{name}-000000/records")
    deadline = time.monotonic() + SOON_S
    while not progress_reports.read(attempt.store(paths.context()), [1]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    forks.kill(pids[1])
    error, seconds = forks.wait(pids[0]).last
    assert f"process 1 died: pid {pids[1]} on" in error
    assert seconds < SOON_S


def slowly(monkeypatch: pytest.MonkeyPatch, seconds: float, process: int = 0) -> None:
    """From here on, a process takes some seconds to write."""
    real = writer.ChunkWriter.write_all

    def slow(self: writer.ChunkWriter, items: Any) -> Any:
        if self._attempt.group.index == process:
            time.sleep(seconds)
        return real(self, items)

    monkeypatch.setattr(writer.ChunkWriter, "write_all", slow)


@pytest.mark.parametrize("count", [1, 3])
def test_signs_cost_a_request_of_each_process_in_ten_seconds(
    count: int, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch, 4.0)
    with s3_server.requests() as requests:
        save_in_job(f"{bucket}/c", count, lambda index: numbers(1), timeout_s=60)
    signs = [request for request in requests if request.key.endswith(".at")]
    puts = [request.key[-8:] for request in signs if request.method == "PUT"]
    assert sorted(puts) == ([] if count == 1 else [f"{p:05d}.at" for p in range(3)])
    if count == 1:
        assert not signs
    assert sound(f"{bucket}/c", 1)
    stored = paths.resolve(f"{bucket}/c").store(paths.context()).list().result()
    assert not [key for key in stored if b"/records/" in key]


# --- in one process -------------------------------------------------------------------------------


def test_a_sign_that_comes_after_the_commit_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "SIGN_S", {False: 0.01, True: 0.01})
    monkeypatch.setattr(liveness, "LOOK_S", 0.01)
    slowly(monkeypatch, 0.2)
    for number in range(3):
        results = save_in_job(tmp_path / str(number), 4, lambda index: numbers(1))
        assert not [result for result in results if isinstance(result, Exception)]
        assert not [name for name in files(tmp_path / str(number)) if "/records/" in name]
        assert sound(tmp_path / str(number), 1)


def attempt_of(folder: Path, process: int, count: int = 4) -> Attempt:
    group = ProcessGroup(process, count, "s")
    attempt = Attempt(paths.resolve(folder), group, "s-000000", paths.context(fsync=False), 60)
    attempt.check_destination(False)
    return attempt


class Clock:
    """The time that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


ELSEWHERE = Identity("far", "elsewhere", 77, 5)


def sign(
    attempt: Attempt, process: int, number: int, identity: Identity | None = ELSEWHERE
) -> None:
    report = Report("write", 1.0, 5, 10, attempt.group.count, number, identity)
    progress_reports.write(reports_of(attempt), process, report)


def errors(attempt: Attempt) -> list[str]:
    try:
        attempt.notes.poll()
    except ProcessFailed as error:
        return [str(error)]
    return []


PAUSES, EVENTS = [0.5, 2.0, 7.0, 40.0, 5000.0], ["", "", "", "sign", "fail"]


@settings(max_examples=60)
@given(
    events=st.lists(
        st.tuples(st.sampled_from(PAUSES), st.sampled_from(EVENTS)), min_size=5, max_size=60
    )
)
def test_a_process_elsewhere_is_dead_only_after_many_looks_without_a_sign(
    events: list[tuple[float, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However the watcher's own time jumps, and whatever fails."""
    attempt, clock = attempt_of(tmp_path_factory.mktemp("run"), 2, 3), Clock()
    neighbour, signs = Neighbour(attempt, 1, clock), iter(range(100))
    sign(attempt, 1, next(signs))
    neighbour.look()
    silent_s, looks = 0.0, 0
    for seconds, event in events:
        clock.now += seconds
        silent_s += seconds
        if event == "fail":
            continue
        if event == "sign":
            sign(attempt, 1, next(signs))
            silent_s, looks = 0.0, 0
        else:
            looks += 1
        neighbour.look()
        most_looks = liveness.SILENT_S / (2 * liveness.READ_S[False])
        if errors(attempt):
            assert silent_s >= liveness.SILENT_S
            assert looks >= most_looks
            return


def test_a_process_elsewhere_that_is_silent_is_dead_in_the_end(tmp_path: Path) -> None:
    attempt, clock = attempt_of(tmp_path, 2, 3), Clock()
    neighbour = Neighbour(attempt, 1, clock)
    neighbour.look()
    clock.now += 1000
    neighbour.look()
    assert not errors(attempt), "it has not begun"
    sign(attempt, 1, 0)
    looks = 0
    while not errors(attempt):
        clock.now += 2
        neighbour.look()
        looks += 1
        assert looks < 40
    (text,) = errors(attempt)
    assert text.startswith("process 1 is silent: no sign of life for 6")
    assert text.endswith("machine, found: pid 77 on far, or that machine, has died or hangs")


def test_nobody_reports_the_death_of_a_process_that_the_save_no_longer_needs(
    tmp_path: Path,
) -> None:
    attempt = attempt_of(tmp_path, 2)
    dead = replace(own_identity(), pid=own_identity().pid, started=0)
    sign(attempt, 1, 0, dead)
    records = attempt.folder.child("records").store(attempt.context)
    records.write(f"00001{OK}", b"x").result()
    neighbour = Neighbour(attempt, 1)
    for _ in range(3):
        neighbour.look()
    assert not errors(attempt)
    attempt.notes.request({3: {"w": [0]}})
    neighbour.look()
    assert not errors(attempt), "chunks are requested from another one"
    attempt.notes.request({1: {"w": [0]}})
    records.write(f"00001{MORE}", b"x").result()
    neighbour.look()
    assert not errors(attempt), "it has written them"
    records.write(f"00001{MORE}", None).result()
    neighbour.look()
    assert "process 1 died: pid" in errors(attempt)[0]


def test_a_process_that_ended_because_the_save_had_failed_has_not_died(tmp_path: Path) -> None:
    attempt, other = attempt_of(tmp_path, 1), attempt_of(tmp_path, 3)
    sign(attempt, 2, 0, replace(own_identity(), started=0))
    other.notes.publish_error(RuntimeError("no room"), settles=True, refused=False)
    neighbour = Neighbour(attempt, 2)
    neighbour.look()  # learns its id
    with pytest.raises(ProcessFailed, match="process 3 failed: no room"):
        neighbour.look()
    assert errors(attempt) == ["process 3 failed: no room"]


def test_the_death_of_the_first_process_counts_until_the_commit(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path, 1)
    sign(attempt, 0, 0, replace(own_identity(), started=0))
    neighbour = Neighbour(attempt, 0)
    unickpt.save(tmp_path, numbers(1))
    for _ in range(2):
        neighbour.look()
    assert not errors(attempt)


def test_a_process_that_died_is_named_before_those_that_learned_of_it(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path, 3)
    others = [attempt_of(tmp_path, process) for process in (0, 1)]
    for other in others:
        other.notes.publish_error(RuntimeError("process 2 died"), settles=False, refused=False)
    attempt.notes.put(*end_note(2, "died", "pid 5 is gone"))
    assert errors(attempt) == ["process 2 died: pid 5 is gone"]


def test_each_process_has_two_neighbours_and_every_survivor_of_a_job_watches_a_dead_one(
    tmp_path: Path,
) -> None:
    for count in (2, 3, 4, 7):
        watched = {}
        for process in range(count):
            group = ProcessGroup(process, count, "s")
            attempt = Attempt(paths.resolve(tmp_path), group, "a", paths.context(), 60)
            alive = liveness.Liveness(attempt, lambda: (0.0, 0, ""))
            watched[process] = {neighbour._number for neighbour in alive._neighbours}
        assert all(process not in watched[process] for process in watched)
        for dead in range(1, (1 << count) - 1):
            gone = {process for process in range(count) if dead >> process & 1}
            assert any(watched[process] & gone for process in watched if process not in gone)


@pytest.mark.parametrize("state", [STOPPED, RUNS])
def test_reports_say_what_neighbours_do(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = attempt_of(tmp_path, 1)
    sign(attempt, 2, 0, own_identity())
    monkeypatch.setattr(liveness, "state_of", lambda identity, threads=False: state)
    alive = liveness.Liveness(attempt, lambda: (1.0, 5, ""))
    alive.tick()
    alive._signed = None
    alive.tick()
    report = progress_reports.read(reports_of(attempt), [1])[1]
    assert report.neighbours == ((2, state),)
    assert report.identity == own_identity()
