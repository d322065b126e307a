"""How programs end with saves in flight: nothing is lost, and no failure passes for success."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.processes import Processes

import unickpt
from unickpt import Checkpointer, CheckpointNotFound

HEAD = """
import os, sys, time
import numpy as np
import threading
import unickpt
from unickpt.storage import tensorstore_calls
from unickpt.storage.data_files import DataFile

start = threading.Thread.start

def start_unless_ending(thread):
    if not threading.main_thread().is_alive():  # as Python does since 3.12
        raise RuntimeError("can't create new thread at interpreter shutdown")
    start(thread)

threading.Thread.start = start_unless_ending
root = sys.argv[1]
real = DataFile.add

def slow(*arguments):
    time.sleep(0.5)
    return real(*arguments)

def broken(*arguments):
    time.sleep(0.3)
    raise tensorstore_calls.Failed("RESOURCE_EXHAUSTED: the disk is full")

def work(outcome="slow", ask=False):
    DataFile.add = globals()[outcome]
    pending = unickpt.save_async(root + "/c", {"w": np.arange(50_000)})
    if ask:
        try:
            pending.result()
        except unickpt.StorageError as error:
            print("asked:", error)
"""


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def is_there(root: Path) -> bool:
    try:
        return bool((unickpt.load(root / "c")["w"] == np.arange(50_000)).all())
    except CheckpointNotFound:
        return False


@pytest.mark.parametrize("last", ["", "sys.exit(0)"])
def test_a_program_that_ends_completes_its_saves(
    last: str, processes: Processes, tmp_path: Path
) -> None:
    process = processes.start(f"{HEAD}\nwork()\n{last}", tmp_path)
    assert end(process) == (0, "", "")
    assert is_there(tmp_path)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="no thread can be started so late")
@pytest.mark.parametrize("outcome", ["slow", "broken"])
def test_a_save_that_a_handler_of_atexit_begins_is_completed(
    outcome: str, processes: Processes, tmp_path: Path
) -> None:
    source = HEAD.replace("threading.Thread.start =", "_ =")
    process = processes.start(
        f"{source}\nimport atexit\natexit.register(work, {outcome!r})", tmp_path
    )
    code, _, err = end(process)
    is_slow = outcome == "slow"
    assert (code, is_there(tmp_path), "disk is full" in err) == (not is_slow, is_slow, not is_slow)


@pytest.mark.parametrize(
    ("last", "code", "said"),
    [
        ("1 / 0", 1, "ZeroDivisionError"),
        ("sys.exit(3)", 3, ""),
        ("raise KeyboardInterrupt", -2, ""),
    ],
)
def test_an_exception_in_the_loop_loses_no_save(
    last: str, code: int, said: str, processes: Processes, tmp_path: Path
) -> None:
    found, _, err = end(processes.start(f"{HEAD}\nwork()\n{last}", tmp_path))
    assert found in (code, 128 - code)
    assert said in err
    assert is_there(tmp_path)


def test_a_failure_that_nobody_asked_for_fails_the_program(
    processes: Processes, tmp_path: Path
) -> None:
    text = f"""{HEAD}
import atexit, logging
atexit.register(print, "registered by others", flush=True)
work("broken")
print("the loop is over")
"""
    code, out, err = end(processes.start(text, tmp_path))
    assert code == 1
    assert out == "the loop is over\nregistered by others\n"
    assert f"unickpt: the save of {(tmp_path / 'c').as_uri()}/ failed, and its result" in err
    assert "StorageError" in err
    assert "the disk is full" in err
    assert not is_there(tmp_path)


def test_a_program_that_ends_right_after_the_call(processes: Processes, tmp_path: Path) -> None:
    """Three of them, forked before anything runs in the interpreter that has imported torch."""
    kinds = [("copy", 1 << 20), ("lazy", 1 << 20), ("lazy", 1 << 30)]
    text = f"""{HEAD}
import torch

def program(name, staging, budget_bytes):
    tree = {{str(i): torch.full((700_000,), i) for i in range(4)}}
    options = unickpt.SaveOptions(staging=staging, budget_bytes=budget_bytes)
    unickpt.save_async(f"{{root}}/{{name}}", tree, options=options)

children = {{}}
for name, kind in enumerate({kinds}):
    child = os.fork()
    if not child:
        program(name, *kind)
        break  # the program ends, as an interpreter does
    children[child] = name
else:
    for child, name in children.items():
        print(name, os.waitpid(child, 0)[1])
"""
    assert end(processes.start(text, tmp_path)) == (0, "0 0\n1 0\n2 0\n", "")
    for name in range(len(kinds)):
        found = unickpt.load(tmp_path / str(name))
        assert all((found[str(i)] == i).all() for i in range(4))


def test_a_failure_that_somebody_asked_for_does_not(processes: Processes, tmp_path: Path) -> None:
    code, out, err = end(processes.start(f"{HEAD}\nwork('broken', ask=True)", tmp_path))
    assert (code, err) == (0, "")
    assert out.startswith("asked: ")


def test_a_checkpointer_that_is_not_closed_loses_nothing(
    processes: Processes, tmp_path: Path
) -> None:
    text = f"""{HEAD}
DataFile.add = slow
checkpointer = unickpt.Checkpointer(root, local=root + "/local", keep_last=1)
for step in range(3):
    checkpointer.save(step, {{"w": np.arange(50_000) + step}})
"""
    assert end(processes.start(text, tmp_path)) == (0, "", "")
    assert Checkpointer(tmp_path).steps() == [2]
    assert unickpt.load(tmp_path / "step_2")["w"][0] == 2


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_of_multiprocessing(method: str, processes: Processes, tmp_path: Path) -> None:
    text = f"""{HEAD}
import multiprocessing

if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    codes = []
    for outcome in ("broken", "slow"):
        child = context.Process(target=work, args=(outcome,))
        child.start()
        child.join()
        codes.append(child.exitcode)
    print(codes)
"""
    code, out, err = end(processes.start(text, tmp_path))
    assert code == 0, err
    assert out == "[1, 0]\n"
    assert "and its result was not requested" in err
    assert is_there(tmp_path)


def test_a_child_that_forked_waits_for_no_save_of_its_parent(
    processes: Processes, tmp_path: Path
) -> None:
    text = f"""{HEAD}
DataFile.add = slow
checkpointer = unickpt.Checkpointer(root)
checkpointer.save(0, {{"w": np.arange(9)}}, wait=True)
pending = checkpointer.save(1, {{"w": np.arange(50_000)}})
child = os.fork()
if not child:
    try:
        pending.result()
    except unickpt.errors.ForkedProcess as error:
        print("refused:", error, flush=True)
    try:
        checkpointer.save(2, {{}})
    except unickpt.errors.ForkedProcess as error:
        print("refused:", error, flush=True)
    time.sleep(1.5)
    sys.exit(0)
pending.result()
os.kill(os.getpid(), 9)  # the child lives on, and must not keep the lease
"""
    process = processes.start(text, tmp_path)
    process.wait(60)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, {"w": np.arange(3)}, wait=True)
        assert checkpointer.steps() == [0, 1, 5]
    out, err = process.communicate(timeout=60)
    assert out.count("refused: ") == 2, err
    assert out.count("belongs to the parent process") == 2


@pytest.mark.parametrize(("method", "epochs"), [("fork", 2), ("spawn", 1)])
def test_workers_of_a_data_loader_live_through_saves(
    method: str, epochs: int, processes: Processes, tmp_path: Path
) -> None:
    text = """
import sys
import torch
import unickpt

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, at):
        return torch.full((1000,), float(at))

if __name__ == "__main__":
    root, method, epochs = sys.argv[1:]
    model = torch.nn.Linear(1000, 300)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=5, num_workers=1, multiprocessing_context=method
    )
    seen, step = 0, 0
    with unickpt.Checkpointer(root, keep_last=2, optimizers=[optimizer]) as checkpointer:
        for epoch in range(int(epochs)):  # each starts its workers while a save is in flight
            state = {"model": model, "optimizer": optimizer, "seen": seen}
            checkpointer.save(step := step + 1, state)
            for batch in loader:
                model(batch / 60).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                seen, step = seen + len(batch), step + 1
                checkpointer.save(step, {"model": model, "optimizer": optimizer, "seen": seen})
    print(seen, checkpointer.steps())
"""
    # Its workers, not the program, begin and end as they do.
    program = processes.forked(text, tmp_path, method, epochs, of=("torch",))
    code, out, err = end(program)
    last, seen = epochs * 13, epochs * 60
    assert code == 0, err
    assert out == f"{seen} [{last - 1}, {last}]\n"
    assert unickpt.load(tmp_path / f"step_{last}")["seen"] == seen
    assert unickpt.verify(tmp_path / f"step_{last}").ok
    names = [".unickpt.lock", f"step_{last - 1}", f"step_{last}"]
    assert sorted(os.listdir(tmp_path)) == names
