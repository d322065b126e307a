"""Thousands of hostile pickles: none is run, none names a module that is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import TESTS, hostile_pickles

# Runs in a process of its own, because audit hooks cannot be removed. What is opened before the
# hook imports everything that reading takes.
READER = """
import json, sys, tracemalloc
from pathlib import Path
import unickpt
from support import hostile_pickles

work, mark, every, *more = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:]
benign = bytes.fromhex("80027d58020000006f6b4b01732e")  # {"ok": 1}


def attempt(folder):
    try:
        return "read", repr(dict(unickpt.open(folder).index.values))
    except unickpt.UnickptError as error:
        return type(error).__name__, str(error)


def write(label, data):
    folder = work / str(label)
    folder.mkdir()
    if more:  # torch's distributed checkpoint
        (folder / ".metadata").write_bytes(data)
    else:
        hostile_pickles.write_torch_file(folder / "c.pt", data)
    return folder


attempt(write("benign", benign))
attempt(write("refused", benign[:-1]))
cases = [(label, write(n, data)) for n, (label, data) in
         enumerate(hostile_pickles.all_of_them(mark, every))]
events, on = [], False
READS = {"open", "os.scandir", "os.listdir"}  # of the checkpoint itself


def hook(event, args):
    if not on or event.startswith(("object.", "sys._getframe", "cpython.", "gc.", "builtins.id")):
        return
    if event in READS and str(work) in str(args[0]) and mark not in str(args[0]):
        return
    events.append([event, str(args)[:200]])


sys.addaudithook(hook)
outcomes = {}
on = True
for label, folder in cases:
    outcomes[label] = attempt(folder)
on = False
print(json.dumps([len(cases), events[:20], outcomes, "antigravity" in sys.modules]))
"""


each_part = pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])


def outcomes(tmp_path: Path, every: int, *more: str) -> dict[str, list[str]]:
    work, mark = tmp_path / "work", tmp_path / "mark"
    work.mkdir()
    run = subprocess.run(
        [sys.executable, "-c", READER, str(work), str(mark), str(every), *more],
        cwd=TESTS, check=False, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    count, events, found, imported = json.loads(run.stdout)
    whole = len(hostile_pickles.TARGETS) * len(hostile_pickles.WAYS)
    assert count >= whole // every > 3000 // every
    assert events == []
    assert not imported
    assert not mark.exists()
    return found  # type: ignore[no-any-return]


@pytest.mark.integration
@each_part
def test_torch_files_run_nothing_and_say_what_was_to_be_run(tmp_path: Path, every: int) -> None:
    found = outcomes(tmp_path, every)
    assert {kind for kind, _ in found.values()} <= {
        "read",
        "CheckpointCorrupt",
        "UnsupportedFormat",
    }
    for label, (kind, said) in found.items():
        way, _, target = label.partition(": ")
        if way in ("REDUCE", "INST", "OBJ", "NEWOBJ", "REDUCE of STACK_GLOBAL") and kind == "read":
            assert target.replace(" ", ".").split(".")[-1] in said, (label, said)


@pytest.mark.integration
@each_part
def test_metadata_of_distributed_checkpoints_runs_nothing(tmp_path: Path, every: int) -> None:
    found = outcomes(tmp_path, every, "dcp")
    assert {kind for kind, _ in found.values()} <= {"CheckpointCorrupt", "UnsupportedFormat",
                                                    "CheckpointNotFound"}  # fmt: skip
