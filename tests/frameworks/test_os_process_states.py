"""The states of processes: dead only on evidence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from unickpt.frameworks import os_process_states
from unickpt.frameworks.os_process_states import (
    DEAD,
    DISK,
    RUNS,
    STOPPED,
    Identity,
    own_identity,
    state_of,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


def identity_of(pid: int) -> Identity:
    stat = os_process_states._stat_of(pid)
    assert stat is not None
    return replace(own_identity(), pid=pid, started=stat.started)


def becomes(process: Identity, state: str) -> bool:
    deadline = time.monotonic() + 30
    while state_of(process) != state and time.monotonic() < deadline:
        time.sleep(0.01)
    return state_of(process) == state


def test_a_child_runs_is_stopped_and_dies_before_and_after_it_is_waited_for() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process = identity_of(child.pid)
    assert state_of(process) in (RUNS, DISK)
    os.kill(child.pid, signal.SIGSTOP)
    assert becomes(process, STOPPED)
    assert state_of(process, threads=True) == STOPPED
    os.kill(child.pid, signal.SIGCONT)
    child.kill()
    assert becomes(process, DEAD), "it is a zombie"
    child.wait()
    assert state_of(process) == DEAD


def test_a_process_with_a_used_id_that_began_later_is_another_one() -> None:
    mine = own_identity()
    assert state_of(mine, threads=True) in (RUNS, DISK)
    assert state_of(replace(mine, started=mine.started - 1)) == DEAD


@pytest.mark.parametrize("place", ["", "elsewhere"])
def test_nothing_is_known_of_another_machine(place: str) -> None:
    assert state_of(replace(own_identity(), place=place, pid=1 << 22)) is None


def test_a_main_thread_that_has_ended_is_not_the_end_of_its_process() -> None:
    source = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).syscall(60, 0)  # exit, of this thread alone
"""
    child = subprocess.Popen([sys.executable, "-c", source])
    try:
        process = identity_of(child.pid)
        deadline = time.monotonic() + 30
        while (stat := os_process_states._stat_of(child.pid)) and stat.letter != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert state_of(process) != DEAD
    finally:
        child.kill()
        child.wait()
    assert state_of(process) == DEAD


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `/proc` of this process and its threads that a test writes."""
    own_identity()
    folder = tmp_path / str(os.getpid())
    (folder / "task").mkdir(parents=True)
    monkeypatch.setattr(os_process_states, "_PROC", tmp_path)
    return folder


def stat(letter: str, threads: int = 1, name: str = "a) R (b") -> str:
    started = own_identity().started
    fields = [letter, *["0"] * 16, str(threads), "0", str(started), *["0"] * 20]
    return f"{os.getpid()} ({name}) {' '.join(fields)}\n"


@pytest.mark.parametrize(
    ("letter", "threads", "state"),
    [
        *[("R", 1, RUNS), ("S", 9, RUNS), ("I", 1, RUNS), ("T", 2, STOPPED), ("t", 1, STOPPED)],
        *[("D", 1, DISK), ("Z", 1, DEAD), ("Z", 0, DEAD), ("X", 1, DEAD), ("Z", 3, RUNS)],
    ],
)
def test_the_state_that_the_kernel_shows(letter: str, threads: int, state: str, proc: Path) -> None:
    (proc / "stat").write_text(stat(letter, threads))
    assert state_of(own_identity()) == state


def test_a_thread_that_waits_for_a_disk_counts_if_threads_are_asked_for(proc: Path) -> None:
    (proc / "stat").write_text(stat("S", 3))
    for name, letter in {"1": "S", "2": "D"}.items():
        (proc / "task" / name).mkdir()
        (proc / "task" / name / "stat").write_text(stat(letter))
    assert state_of(own_identity()) == RUNS
    assert state_of(own_identity(), threads=True) == DISK


@pytest.mark.parametrize("text", ["", "7", "7 (x)", "7 (x) R 1 2 3", "7 (x) " + "R " * 40])
def test_a_process_whose_state_is_hidden_runs(text: str, proc: Path) -> None:
    assert state_of(own_identity()) == RUNS
    (proc / "stat").write_text(text)
    assert state_of(own_identity()) == RUNS


@pytest.mark.filterwarnings("ignore:os.fork")  # of JAX, if another test has imported it
def test_a_forked_process_has_its_own_identity() -> None:
    mine, (out, into) = own_identity(), os.pipe()
    assert threading.current_thread() is threading.main_thread()
    if (child := os.fork()) == 0:
        os.write(into, str(own_identity().pid).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(out, 20)) == child != mine.pid
