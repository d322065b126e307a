"""Functions of users that a Checkpointer calls, and forks: none of them makes it wait for ever."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import Processes

import unickpt
from unickpt import extend
from unickpt.commit.lease import Lease, holder
from unickpt.storage import paths
from unickpt.storage.local_folders import FileLock

pytestmark = pytest.mark.integration

KEEPS = """
import logging, sys, faulthandler, numpy as np, unickpt
faulthandler.dump_traceback_later(25, exit=True)  # else it would wait for ever


def exits(steps):
    sys.exit(3)

def fails(steps):
    logging.getLogger("unickpt").addFilter(lambda record: 1 / 0)
    raise ValueError

def waits(steps):
    run.wait()
    return steps[-2:]

def closes(steps):
    run.close()
    return steps[-2:]

run = unickpt.Checkpointer(sys.argv[1], keep=unickpt.Retention(keep_among=globals()[sys.argv[2]]))
for step in (1, 2, 3):
    try:
        run.save(step, {"w": np.ones(3)}).result()
    except ValueError as error:
        assert "is closed" in str(error)
run.wait()
run.close()
print("kept", *run.steps(), flush=True)
"""


@pytest.mark.parametrize(
    ("keep", "kept"), [("exits", "1 2 3"), ("fails", "1 2 3"), ("waits", "2 3")]
)
def test_what_keep_among_does_ends(
    processes: Processes, tmp_path: Path, keep: str, kept: str
) -> None:
    (said,) = processes.finish([processes.forked(KEEPS, tmp_path / "run", keep)])
    assert f"kept {kept}" in said


def test_keep_among_may_close_its_checkpointer(processes: Processes, tmp_path: Path) -> None:
    (said,) = processes.finish([processes.forked(KEEPS, tmp_path / "run", "closes")])
    assert "kept " in said  # which, depends on when it is called


WAITS = """
import sys, faulthandler, threading, time, numpy as np, unickpt
faulthandler.dump_traceback_later(25, exit=True)  # else it would wait for ever
root, action, local = sys.argv[1], sys.argv[2], sys.argv[3] or None
saves, more = [], []

def keep_among(steps):
    while len(saves) < 3:
        time.sleep(0.01)
    if action == "results":
        for pending in saves:
            pending.result()
    elif action == "elsewhere":
        waiting = threading.Thread(target=saves[-1].result)
        waiting.start()
        waiting.join()
    elif action == "saves":
        if not more:  # it may be called again before that step is there
            more.append(run.save(10, {"w": np.ones(3)}))
    else:
        run.wait()
    return steps[-2:]

rules = unickpt.Retention(keep_among=keep_among)
options = unickpt.SaveOptions(fsync=False, metrics=lambda report: run.wait())
run = unickpt.Checkpointer(root, keep=rules, local=local, options=options)
for step in (1, 2, 3):
    saves.append(run.save(step, {"w": np.ones(3)}))
    time.sleep(0.2)
for pending in saves:
    pending.result()
run.close()
print("kept", *run.steps(), flush=True)
"""


@pytest.mark.parametrize("local", ["", "local"])
@pytest.mark.parametrize("action", ["results", "elsewhere", "saves", "waits"])
def test_keep_among_may_wait_for_saves_that_follow(
    processes: Processes, tmp_path: Path, action: str, local: str
) -> None:
    """They do not wait for the removal that calls it, nor do the functions of other threads."""
    tier = str(tmp_path / local) if local else ""
    (said,) = processes.finish([processes.forked(WAITS, tmp_path / "run", action, tier)])
    assert f"kept {'3 10' if action == 'saves' else '2 3'}" in said


FORKS = """
import os, signal, sys, warnings, numpy as np, unickpt
warnings.filterwarnings("ignore")
run = unickpt.Checkpointer(sys.argv[1])
run.save(1, {"w": np.ones(3_000_000)})
child = os.fork()
if not child:
    signal.alarm(25)
    for function in (run.wait, run.close, lambda: run.save(2, {"w": 1})):
        try:
            function()
        except unickpt.errors.ForkedProcess as error:
            print("refused:", error, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
run.save(3, {"w": np.ones(3)})
run.close()
print("saved", *run.steps(), flush=True)
"""


def test_a_forked_process_neither_waits_nor_closes(processes: Processes, tmp_path: Path) -> None:
    (said,) = processes.finish([processes.start(FORKS, tmp_path / "run")])
    assert said.count("refused:") == 3
    assert said.count('started by "spawn"') == 3
    assert "saved 1 3" in said


BETWEEN = """
import sys, threading, numpy as np, unickpt
from unickpt.saving.background import SaveQueue
run = unickpt.Checkpointer(sys.argv[1])
begin, ends = SaveQueue.save, getattr(run, sys.argv[2])

def save(queue, request):  # the call of `save` is half way when another thread ends the run
    global ending
    ending = threading.Thread(target=ends)
    ending.start()
    ending.join(0.5)
    return begin(queue, request)

SaveQueue.save = save
run.save(1, {"w": np.ones(3)}).result()
ending.join()
with unickpt.Checkpointer(sys.argv[1]) as other:  # nothing holds the lease any more
    SaveQueue.save = begin
    other.save(2, {"w": np.ones(3)})
print("saved", *other.steps(), flush=True)
"""


@pytest.mark.parametrize("how", ["close", "release"])
def test_a_run_ends_after_the_save_that_another_thread_begins(
    processes: Processes, tmp_path: Path, how: str
) -> None:
    (said,) = processes.finish([processes.start(BETWEEN, tmp_path / "run", how)])
    assert "saved 1 2" in said


def test_threads_of_one_run_take_its_lease_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save and a removal take it at the same time."""
    acquire = FileLock.acquire

    def slowly(lock: FileLock, text: str) -> None:
        acquire(lock, text)
        time.sleep(0.2)

    monkeypatch.setattr(FileLock, "acquire", slowly)
    lease = Lease(paths.resolve(str(tmp_path / "run")))
    with ThreadPoolExecutor(2) as pool:
        taken = [pool.submit(lease.take) for _ in range(2)]
        assert sorted(future.result() for future in taken) == [False, True]
    lease.give_back()
    assert holder(paths.resolve(str(tmp_path / "run"))) is None


WHILE_SAVING = """
import os, signal, sys, threading, time, warnings, numpy as np, unickpt
from unickpt.commit.lease import Lease
warnings.filterwarnings("ignore")
run = unickpt.Checkpointer(sys.argv[1])
run.save(1, {"w": np.ones(3)}).result()
lease, may_end = run._steps.first.lease, threading.Event()

def hold():  # as a thread that begins a save, and takes the lease
    with run._queue.beginning, lease._changing:
        holding.set()
        may_end.wait(30)

holding = threading.Event()
threading.Thread(target=hold).start()
holding.wait()
child = os.fork()
if not child:
    signal.alarm(20)
    try:
        run.save(2, {"w": 1})
    except unickpt.errors.ForkedProcess as error:
        print("refused:", error, flush=True)
    lease.give_back()  # as at the child's exit
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
may_end.set()
run.save(2, {"w": np.ones(3)})
run.close()
print("saved", *run.steps(), flush=True)
"""


def test_a_process_that_is_forked_while_a_save_begins_waits_for_nothing(
    processes: Processes, tmp_path: Path
) -> None:
    (said,) = processes.finish([processes.start(WHILE_SAVING, tmp_path / "run")])
    assert said.count("refused:") == 1
    assert "saved 1 2" in said


def test_a_feature_that_fails_after_a_commit_does_not_fail_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other features must not take the step for failed: it exists."""
    heard: list[BaseException | None] = []

    class Failing(extend.SaveFeature, extend.RunFeature):
        name = "failing"

        def in_run(self, run: extend.Run) -> extend.RunFeature:
            return self

        def after_save(self, feature: Any, error: BaseException | None) -> None:
            heard.append(error)
            raise RuntimeError("of another package")

    options = unickpt.SaveOptions(fsync=False, features=[Failing()])
    with unickpt.Checkpointer(tmp_path, options=options) as run:
        assert run.save(1, {"w": np.ones(3)}).result().arrays == 1
        with pytest.raises(unickpt.UnsupportedLeaf):
            run.save(2, {"w": object()})
        assert run.save(3, {"w": np.ones(3)}, wait=True).done()
        assert run.steps() == [1, 3]
    assert [type(error) for error in heard] == [type(None), unickpt.UnsupportedLeaf, type(None)]
    assert caplog.text.count("Failing.after_save failed") == 3
