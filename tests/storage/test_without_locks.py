"""File systems without locks: what is said to be saved is there all the same."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS

import unickpt
from unickpt import SaveOptions, StorageError
from unickpt.storage import local_folders

HERE = Path(TESTS)
# A job whose commit stops between the comparison of the manifest and the write, which TensorStore
# does one after the other where nothing is locked.
JOB = """
import errno, fcntl, json, os, sys, time
import numpy as np
import unickpt
from unickpt.commit import root

path, number, paused, go = sys.argv[1:]

def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")

fcntl.flock = no_locks

class Slow:
    def __init__(self, store):
        self.store = store

    def read(self, *arguments):
        return self.store.read(*arguments)

    def write(self, key, value, if_equal=None):
        if if_equal is None:  # no manifest
            return self.store.write(key, value)
        found = self.store.read(key).result().stamp.generation
        open(paused, "w").close()
        deadline = time.monotonic() + 60
        while not os.path.exists(go) and time.monotonic() < deadline:
            time.sleep(0.01)
        if found != if_equal:
            return self.store.write(key, value, if_equal=if_equal)
        return self.store.write(key, value)

real = root.Root.__init__

def slow(self, database):
    real(self, database)
    self._store = Slow(self._store)

root.Root.__init__ = slow
try:
    unickpt.save(path, {"job": int(number), "w": np.full(1000, int(number))}, overwrite=True,
                 options=unickpt.SaveOptions(fsync=False))
    print("saved")
except unickpt.UnickptError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def start(path: Path, number: int, paused: Path, go: Path) -> subprocess.Popen[str]:
    arguments = [str(x) for x in (path, number, paused, go)]
    command = [sys.executable, "-W", "ignore", "-c", JOB, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.01)


@pytest.mark.integration
@pytest.mark.parametrize("there", [False, True])
def test_of_two_jobs_that_commit_at_once_one_is_there(there: bool, tmp_path: Path) -> None:
    path, now = tmp_path / "c", tmp_path / "now"
    now.touch()
    if there:
        unickpt.save(path, {"job": 0})
    first = start(path, 1, tmp_path / "paused_1", tmp_path / "go")
    wait_for(tmp_path / "paused_1")
    second = start(path, 2, tmp_path / "paused_2", now)
    with suppress(subprocess.TimeoutExpired):  # it overtakes the first, or waits for it
        second.wait(4)
    (tmp_path / "go").touch()
    said = [job.communicate(timeout=60)[0].strip() for job in (first, second)]
    won = [number for number, text in enumerate(said, 1) if text == "saved"]
    assert won, said
    found = unickpt.load(path)
    assert found["job"] in won, said
    assert (found["w"] == found["job"]).all()
    assert unickpt.verify(path).ok
    assert all(text == "saved" or text.startswith("SaveConflict") for text in said)
    assert sorted(os.listdir(path)) == ["manifest.ocdbt", "processes"]


def test_saves_without_locks_leave_no_lock(no_locks: None, tmp_path: Path) -> None:
    for number in range(3):
        unickpt.save(tmp_path / "c", {"n": number}, overwrite=True)
    assert unickpt.load(tmp_path / "c") == {"n": 2}
    assert sorted(os.listdir(tmp_path / "c")) == ["manifest.ocdbt", "processes"]


def test_a_lock_that_was_left_is_named(
    no_locks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_folders, "_EXCLUSIVE_S", 0.2)
    path = tmp_path / "c"
    unickpt.save(path, {"n": 1})
    left = path / "manifest.ocdbt.exclusive.__lock"
    left.write_text("process 7 on node3")
    with pytest.raises(StorageError, match=rf"{left}: .*process 7 on node3 .*delete the file"):
        unickpt.save(path, {"n": 2}, overwrite=True, options=SaveOptions(fsync=False))
    assert unickpt.load(path) == {"n": 1}
    assert len(os.listdir(path / "processes")) == 1, "what was not committed is gone"
    left.unlink()
    unickpt.save(path, {"n": 2}, overwrite=True)
    assert unickpt.load(path) == {"n": 2}


def test_a_run_without_locks_is_warned(no_locks: None, tmp_path: Path) -> None:
    checkpointer = unickpt.Checkpointer(tmp_path / "run")
    with pytest.warns(RuntimeWarning, match=r"run.* has no locks .*no other job"):
        checkpointer.save(1, {"w": np.ones(3)}, wait=True)
    checkpointer.close()
    assert checkpointer.steps() == [1]


def test_other_errors_of_a_lock_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(StorageError, match="Input/output error"):
        unickpt.save(tmp_path / "c", {"w": np.ones(3)})
    with pytest.raises(StorageError, match="Input/output error"):
        unickpt.Checkpointer(tmp_path / "run").save(1, {"w": 1}, wait=True)


LOOP = """
import errno, fcntl, json, sys
import numpy as np
import unickpt

path, number = sys.argv[1:]

def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")

fcntl.flock = no_locks
said = []
for k in range(25):
    value = 1000 * int(number) + k
    try:
        options = unickpt.SaveOptions(fsync=False)
        unickpt.save(path, {"value": value, "w": np.full(1000, value)}, overwrite=True,
                     options=options)
        said.append(value)
        unickpt.load(path)
    except unickpt.CheckpointCorrupt:
        pass  # read while it was replaced
    except unickpt.UnickptError as error:
        assert type(error).__name__ == "SaveConflict", error
print(json.dumps(said))
"""


@pytest.mark.integration
def test_jobs_that_overwrite_in_turns_without_locks(tmp_path: Path) -> None:
    jobs = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", LOOP, str(tmp_path / "c"), str(k)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for k in (1, 2)
    ]
    said = [json.loads(job.communicate(timeout=100)[0]) for job in jobs]
    assert all(said)
    found = unickpt.load(tmp_path / "c")
    assert found["value"] in [values[-1] for values in said]
    assert (found["w"] == found["value"]).all()
