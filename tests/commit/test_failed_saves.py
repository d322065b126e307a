"""A save that failed leaves nothing, unless it is uncertain whether it failed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import Processes
from support.saving import in_job, session

import unickpt
from unickpt import ProcessGroup, SaveConflict, SaveOptions, StorageError, UnickptError
from unickpt.commit import attempt, coordinator, merge, participant, root
from unickpt.commit.messages import Notes
from unickpt.errors import ProcessFailed, StateChanged
from unickpt.format import chunk_encoding
from unickpt.saving import snapshot, task, write_plan, writer
from unickpt.storage import data_files
from unickpt.storage.data_files import DataFile
from unickpt.storage.errors import Failed
from unickpt.types import Box, LocalFragments

STATE = {f"w{i}": np.arange(100_000.0) + i for i in range(4)}
# Several transactions, so that some are under way when a later one fails.
OPTIONS = SaveOptions(chunk_bytes=100_000, budget_bytes=800_000, fsync=False)


def everything(folder: Path) -> list[str]:
    """All files and folders below a folder."""
    found = [os.path.join(at, n) for at, dirs, names in os.walk(folder) for n in [*dirs, *names]]
    return sorted(os.path.relpath(path, folder) for path in found)


def failing_at(calls: int, error: BaseException, real: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose call of that number raises."""
    counted = iter(range(1, 1_000_000))

    def called(*arguments: Any, **named: Any) -> Any:
        if next(counted) == calls:
            raise error
        return real(*arguments, **named)

    return called


FULL = Failed("RESOURCE_EXHAUSTED: no space left")
PLACES: list[tuple[Any, str, int, BaseException]] = [
    (task, "describe", 1, FULL),
    (task.SaveTask, "plan", 1, FULL),
    (DataFile, "add", 1, FULL),
    (DataFile, "add", 25, FULL),
    (data_files._LocalFile, "close", 1, FULL),
    (data_files._LocalFile, "close", 2, KeyboardInterrupt()),
    (data_files, "_flush", 1, FULL),
    (data_files, "_flush", 2, KeyboardInterrupt()),
    (chunk_encoding, "compressed", 1, FULL),
    (chunk_encoding, "compressed", 25, FULL),
    (chunk_encoding, "compressed", 25, KeyboardInterrupt()),
    (write_plan, "stage", 20, StateChanged("its memory was freed")),
    (attempt.Attempt, "publish", 1, FULL),
    (coordinator.Coordinator, "_records", 1, KeyboardInterrupt()),
    (merge, "merged_chunks", 1, FULL),
    (root.Root, "build", 1, FULL),
    (coordinator.Coordinator, "_write_root", 1, SaveConflict("another job")),
]


@pytest.mark.parametrize("there", ["nothing", "a folder", "a checkpoint"])
@pytest.mark.parametrize(("module", "name", "calls", "error"), PLACES)
def test_one_process_leaves_nothing(
    module: Any,
    name: str,
    calls: int,
    error: BaseException,
    there: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "run/deep/c"
    if there == "a folder":
        path.mkdir(parents=True)
    if there == "a checkpoint":
        unickpt.save(path, {"old": 1})
    before = everything(tmp_path)
    monkeypatch.setattr(module, name, failing_at(calls, error, getattr(module, name)))
    compression = "zstd" if module is chunk_encoding else None
    options = replace(OPTIONS, compression=compression, fsync=name == "_flush")
    with pytest.raises((UnickptError, KeyboardInterrupt)):
        unickpt.save(path, STATE, overwrite=True, options=options)
    assert everything(tmp_path) == before
    monkeypatch.undo()
    unickpt.save(path, STATE, overwrite=True, options=OPTIONS)
    assert unickpt.verify(path).ok


def test_a_failure_is_told_before_all_that_was_begun_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    real = DataFile.add

    def slow(self: DataFile, value: Any, *arguments: Any) -> None:
        if value[0][0]:  # of the first array
            raise FULL
        time.sleep(0.05)
        written.append(value)
        real(self, value, *arguments)

    monkeypatch.setattr(DataFile, "add", slow)
    state = {f"w{n}": np.full(8 << 20, n == 0, np.uint8) for n in range(8)}  # each makes a file
    with pytest.raises(StorageError, match="no space left"):
        unickpt.save(tmp_path / "c", state, options=SaveOptions(chunk_bytes=1 << 18, fsync=False))
    assert len(written) < 20, "of the 32 chunks of each file that was begun"
    assert not (tmp_path / "c").exists()


def test_a_save_in_the_background_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = writer._Batch.write
    monkeypatch.setattr(writer._Batch, "write", failing_at(3, FULL, real))
    with unickpt.Checkpointer(tmp_path / "run", options=OPTIONS) as checkpointer:
        pending = checkpointer.save(1, STATE)
        with pytest.raises(UnickptError):
            pending.result(30)
        assert everything(tmp_path) == ["run", "run/.unickpt.lock"]


def test_a_place_that_is_taken_meanwhile_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, real = threading.Event(), snapshot.Snapshot.plan

    def late(self: Any) -> Any:
        assert opened.wait(30)
        return real(self)

    monkeypatch.setattr(snapshot.Snapshot, "plan", late)
    reference = SaveOptions(staging="reference", fsync=False)
    pending = unickpt.save_async(tmp_path / "c", {"w": np.ones(3)}, options=reference)
    unickpt.save(tmp_path / "c", {"w": np.zeros(3)})
    before = everything(tmp_path)
    opened.set()
    with pytest.raises(unickpt.CheckpointExists):
        pending.result(30)
    assert everything(tmp_path) == before


def test_what_may_be_committed_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage answers with an error, and yet the checkpoint is there."""
    real = root.Root.replace

    def lost(self: Any, *arguments: Any) -> bool:
        assert real(self, *arguments)
        raise Failed("UNAVAILABLE: the answer was lost")

    monkeypatch.setattr(root.Root, "replace", lost)
    with pytest.raises(UnickptError):
        unickpt.save(tmp_path / "c", STATE, options=OPTIONS)
    assert unickpt.verify(tmp_path / "c").ok


def job(path: Path, trees: Callable[[int], Any], count: int = 4, **options: Any) -> list[Any]:
    """Saves as several processes, which are threads; the error of each."""
    name = session()

    def run(group: ProcessGroup) -> Any:
        try:
            return unickpt.save(
                path,
                trees(group.index),
                overwrite=True,
                options=SaveOptions(
                    group=group, chunk_bytes=4096, fsync=False, **{"timeout_s": 30, **options}
                ),
            )
        except UnickptError as error:
            return error

    return in_job(count, run, name)


def piece(index: int, low: int = 0) -> Any:
    box = Box((index * 1000 + low,), ((index + 1) * 1000,))
    return LocalFragments((4000,), [(box, np.arange(float(1000 - low)))])


JOBS: dict[str, Callable[[int], Any]] = {
    "describe": lambda index: {"w": piece(index), "bad": object() if index == 2 else 1},
    "all of them": lambda index: {"w": object()},
    "coverage": lambda index: {"w": piece(index, low=10 if index == 3 else 0)},
    "contradiction": lambda index: {"w": piece(index), "value": index},
}


@pytest.mark.parametrize("there", ["nothing", "a folder", "a checkpoint"])
@pytest.mark.parametrize("kind", JOBS)
def test_all_processes_of_a_job_leave_nothing(kind: str, there: str, tmp_path: Path) -> None:
    path = tmp_path / "run/c"
    if there == "a folder":
        path.mkdir(parents=True)
    if there == "a checkpoint":
        unickpt.save(path, {"old": 1})
    before = everything(tmp_path)
    assert all(isinstance(e, UnickptError) for e in job(path, JOBS[kind]))
    assert everything(tmp_path) == before


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize(
    ("module", "name"), [(writer.ChunkWriter, "write_all"), (Notes, "publish")]
)
def test_one_of_a_job_that_fails_leaves_nothing(
    index: int, module: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(module, name)

    def broken(self: Any, *arguments: Any) -> Any:
        attempt = getattr(self, "_attempt", self)
        if getattr(attempt, "group", getattr(attempt, "_group", None)).index == index:
            raise FULL
        return real(self, *arguments)

    monkeypatch.setattr(module, name, broken)
    assert all(isinstance(e, UnickptError) for e in job(tmp_path / "c", lambda i: {"w": piece(i)}))
    assert everything(tmp_path) == []


def test_a_process_that_is_late_leaves_nothing_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participant, "_GRACE_S", 0.1)
    late, real = threading.Event(), writer.ChunkWriter.write_all

    def slow(self: Any, jobs: Any) -> Any:
        if self._attempt.group.index == 3:
            assert late.wait(30)
        return real(self, jobs)

    monkeypatch.setattr(writer.ChunkWriter, "write_all", slow)
    threading.Timer(2.0, late.set).start()
    ended = job(tmp_path / "c", lambda index: {"w": piece(index)}, timeout_s=0.5)
    assert all(isinstance(error, UnickptError) for error in ended)
    assert everything(tmp_path) == []


def test_where_a_process_died_the_next_save_removes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participant, "_GRACE_S", 0.1)
    name = session()

    def run(group: ProcessGroup) -> Any:
        if group.index == 3:
            return None
        options = SaveOptions(group=group, fsync=False, timeout_s=0.5)
        with pytest.raises(UnickptError):
            unickpt.save(tmp_path / "c", {"w": piece(group.index)}, options=options)
        return None

    in_job(4, run, name)
    assert not [name for name in everything(tmp_path) if name.endswith(("/d", ".ocdbt"))], "data"
    unickpt.save(tmp_path / "c", {"w": np.ones(3)})
    assert len(os.listdir(tmp_path / "c/processes")) == 1


RANKS = """
import os, sys
import torch
import torch.distributed as dist
import unickpt
from unickpt.saving import writer as write
from unickpt.storage import data_files
from unickpt.storage.errors import Failed

root, = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()

def listed():
    return sorted(n for at, dirs, names in os.walk(root) for n in [*dirs, *names])

def attempt(path, tree, **options):
    options = unickpt.SaveOptions(fsync=False, chunk_bytes=4096, timeout_s=30, **options)
    for asynchronous in (False, True):
        try:
            if asynchronous:
                unickpt.save_async(path, tree, options=options).result()
            else:
                unickpt.save(path, tree, options=options)
            raise SystemExit(f"{path} was saved")
        except unickpt.UnickptError as error:
            pass
        dist.barrier()
        assert listed() == [], (path, asynchronous, listed())
        dist.barrier()

w = torch.arange(10_000.)
attempt(root + "/describe", {"w": w, "bad": object() if rank == 1 else 1})
attempt(root + "/values", {"w": w, "step": rank})
real = write.ChunkWriter.write_all
def broken(self, jobs):
    record = real(self, jobs)
    if rank == 2:
        raise Failed("RESOURCE_EXHAUSTED: no space left")
    return record
write.ChunkWriter.write_all = broken
attempt(root + "/write", {"w": w})
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_of_torch_leave_nothing(processes: Processes, tmp_path: Path) -> None:
    processes.finish(processes.torch(4, RANKS, tmp_path))


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("its text cannot be made")


class FailingState:
    """A part of a model that cannot be saved."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def state_dict(self) -> Any:
        raise self.error

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize("error", [NoText(), OSError("no file 'a\udcff'")])
def test_processes_hear_of_an_error_whose_text_cannot_be_made_or_encoded(
    tmp_path: Path, error: Exception
) -> None:
    trees = {"w": STATE["w0"]}, {"w": STATE["w0"], "model": FailingState(error)}
    options = replace(OPTIONS, timeout_s=5)

    def save(group: ProcessGroup) -> Any:
        return unickpt.save(tmp_path, trees[group.index], options=replace(options, group=group))

    first, second = in_job(2, save)
    assert isinstance(first, ProcessFailed)
    assert second is error
