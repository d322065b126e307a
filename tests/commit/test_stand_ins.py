"""A process that is stopped, or far too slow, does not keep the others from a checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS
from support.forks import Forks
from support.mounts import NoMount
from support.mounts import run as run_command
from support.processes import Processes
from support.saving import in_job, numbers, same, save_in_job, session

import unickpt
from unickpt import ProcessGroup, SaveOptions
from unickpt.commit import awaited_processes, liveness, stand_ins
from unickpt.saving import writer
from unickpt.storage import local_folders
from unickpt.types import Box, LocalFragments

SECONDS = 60

# --- processes that are stopped -------------------------------------------------------------------

PROCESS = f"""
import dataclasses, json, logging, os, sys, time
from pathlib import Path
sys.path.insert(0, {TESTS!r})
import numpy as np
import unickpt
from support.saving import numbers
from unickpt.commit import attempt, awaited_processes, liveness
from unickpt.commit.messages import Notes
from unickpt.saving import writer
from unickpt.storage import errors

path, index, count, session, order = ARGS
logging.basicConfig(stream=sys.stdout, format="%(message)s")
awaited_processes._STOPPED_S, liveness.LOOK_S = 0.6, 0.1

def replace(name, replacement):
    holder = attempt.Attempt if name == "publish" else writer.ChunkWriter
    real = getattr(holder, name)

    def replaced(*arguments, **named):
        setattr(holder, name, real)
        replacement()
        return real(*arguments, **named)

    setattr(holder, name, replaced)

def stops():
    while not list(Path(path).glob(f"processes/{{session}}-*/records/{{index:05d}}.at")):
        time.sleep(0.01)
    print("there", flush=True)
    time.sleep(0.5)

def fills():
    with open(order["fills"], "wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                break
    print("full", flush=True)

def gone(self, record, kind):
    raise errors.Failed("the records were removed meanwhile")

group = unickpt.ProcessGroup(index, count, session)
options = unickpt.SaveOptions(
    group=group, timeout_s={SECONDS}, chunk_bytes=4096, changed=order.get("changed")
)
state = numbers(1)
if "base" in order:
    unickpt.save_async(order["base"], state | {{"seed": 0}}, options=options).result()
    options = dataclasses.replace(options, base=order["base"])
if index in order["stopped"]:
    replace(order["step"], stops)
if index == count - 1 and "fills" in order:
    replace("write_more", fills)
if index == 1 and "gone" in order:
    Notes.publish = gone
said = "saved"
try:
    if order.get("is_async"):
        pending = unickpt.save_async(path, state, options=options)
        pending.wait_staged()
        if "changed" not in order:
            state["large"] += 1
        pending.result()
    else:
        unickpt.save(path, state, options=options)
except unickpt.UnickptError as error:
    said = str(error)
print(said, flush=True)
if "again" in order:
    options = dataclasses.replace(options, base=None, changed=None)
    unickpt.save(path + "2", numbers(2), options=options)
    said += " again"
print(json.dumps(said))
"""


def start(
    path: Path, forks: Forks, *, stopped: Sequence[int], step: str, count: int = 3, **order: Any
) -> list[int]:
    """The ids of processes that save; some say "there" before a step, where they may be stopped."""
    order, name = {**order, "stopped": stopped, "step": step}, session()
    pids = [forks.start(PROCESS, str(path), index, count, name, order) for index in range(count)]
    for index in stopped:
        until(lambda pid=pids[index]: "there" in forks.said(pid))
    return pids


def until(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("step", ["write_all", "publish"])
def test_others_write_for_a_process_that_is_stopped(
    step: str, is_async: bool, forks: Forks, tmp_path: Path
) -> None:
    path = tmp_path / "c"
    order: dict[str, Any] = {"step": step, "is_async": is_async, "again": True}
    pids = start(path, forks, count=4, stopped=[2], **order)
    os.kill(pids[2], signal.SIGSTOP)
    try:
        for index in (0, 1, 3):
            until(lambda pid=pids[index]: "saved\n" in forks.said(pid))
        assert unickpt.verify(path).ok
        assert same(unickpt.load(path), numbers(1))
        assert "process 2 made no progress" in forks.said(pids[0])
        unickpt.copy(path, tmp_path / "copy")
    finally:
        os.kill(pids[2], signal.SIGCONT)
    assert [each.last for each in forks.wait_all(pids)] == ["saved again"] * 4
    assert same(unickpt.load(path), numbers(1))
    assert same(unickpt.load(f"{path}2"), numbers(2))
    assert same(unickpt.load(tmp_path / "copy"), numbers(1))
    assert not [*(tmp_path / "copy").glob("processes/*/00002")], "it may remove them meanwhile"
    folders = [folder.name for folder in path.glob("processes/*/*")]
    assert "00002" not in folders, "no checkpoint refers to its files"
    assert "records" not in folders
    assert len([*(tmp_path / "c2").glob("processes/*/00002")]) == 1, "it writes its part again"


def test_it_may_go_on_at_any_moment(forks: Forks, tmp_path: Path) -> None:
    jobs = []
    for number in range(4):
        path, stopped = tmp_path / f"c{number}", 1 + number % 2
        pids = start(path, forks, stopped=[stopped], step="write_all", again=True)
        os.kill(pids[stopped], signal.SIGSTOP)
        jobs.append((path, pids, pids[stopped]))
    began = time.monotonic()
    for at_s, (_, _, stopped) in zip((0.6, 0.75, 0.8, 0.85), jobs, strict=True):
        time.sleep(max(0.0, began + at_s - time.monotonic()))
        os.kill(stopped, signal.SIGCONT)
    for path, pids, _ in jobs:
        assert [each.last for each in forks.wait_all(pids)] == ["saved again"] * 3
        assert unickpt.verify(path).ok
        assert same(unickpt.load(path), numbers(1))


def test_its_record_may_fail_as_others_remove_the_records(forks: Forks, tmp_path: Path) -> None:
    path = tmp_path / "c"
    pids = start(path, forks, stopped=[1, 2], step="publish", gone=True)
    for pid in pids[1:]:
        os.kill(pid, signal.SIGSTOP)
    assert forks.wait(pids[0]).last == "saved"
    for pid in pids[1:]:
        os.kill(pid, signal.SIGCONT)
    assert [each.last for each in forks.wait_all(pids[1:])] == ["saved"] * 2
    assert not [*path.glob("processes/*/0000[12]"), *path.glob("processes/*/records")]
    assert same(unickpt.load(path), numbers(1))


def test_the_others_may_have_ended_when_it_goes_on(forks: Forks, tmp_path: Path) -> None:
    path = tmp_path / "c"
    first, stopped, last = start(path, forks, stopped=[1], step="publish")
    os.kill(stopped, signal.SIGSTOP)
    assert [each.last for each in forks.wait_all([first, last])] == ["saved"] * 2
    os.kill(stopped, signal.SIGCONT)
    assert forks.wait(stopped).last == "saved"
    assert not [*path.glob("processes/*/00001"), *path.glob("processes/*/notes/error-*")]


@pytest.mark.plugins
def test_what_it_would_reuse_may_be_gone_when_it_goes_on(forks: Forks, tmp_path: Path) -> None:
    """Retention removes the base after the commit."""
    base, path = tmp_path / "base", tmp_path / "c"
    order: dict[str, Any] = {"base": str(base), "changed": {"large": False}, "is_async": True}
    pids = start(path, forks, stopped=[1], step="write_all", again=True, **order)
    os.kill(pids[1], signal.SIGSTOP)
    for pid in (pids[0], pids[2]):
        until(lambda pid=pid: "saved" in forks.said(pid))
    shutil.rmtree(base)
    os.kill(pids[1], signal.SIGCONT)
    assert [each.last for each in forks.wait_all(pids)] == ["saved again"] * 3
    assert unickpt.verify(path).ok
    assert same(unickpt.load(path), numbers(1))


def test_a_full_disk_of_who_writes_for_it_is_an_error_at_once(forks: Forks, tmp_path: Path) -> None:
    """The note that says so needs room, too."""
    disk, path = tmp_path / "disk", tmp_path / "disk/c"
    disk.mkdir()
    try:
        run_command("mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk)
    except NoMount as error:
        pytest.skip(str(error))
    try:
        pids = start(path, forks, stopped=[1], step="publish", fills=str(disk / "full"))
        os.kill(pids[1], signal.SIGSTOP)
        first, last = (forks.wait(pids[index]).last for index in (0, 2))
        os.kill(pids[1], signal.SIGCONT)
        assert "No space left on device" in last
        for said in (first, forks.wait(pids[1]).last):
            assert "process 2 failed" in said
            assert "No space left on device" in said
        assert not path.exists()
    finally:
        run_command("umount", "--lazy", disk)


RANK = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, distribute_tensor
import unickpt
from unickpt.commit import awaited_processes
from unickpt.saving import writer

path = sys.argv[1]
awaited_processes._STOPPED_S = 0.3
dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
real = writer.ChunkWriter.write_all

def write_all(self, items):
    if dist.get_rank() == 1:
        time.sleep(0.5)
        print("writing", flush=True)
        time.sleep(0.5)
    return real(self, items)

writer.ChunkWriter.write_all = write_all
weights = distribute_tensor(torch.arange(300_000.0), mesh, [Replicate()])
state = {"w": weights, "plain": torch.ones(3)}
unickpt.save_async(path, state, options=unickpt.SaveOptions(chunk_bytes=65536)).result()
print("saved", flush=True)
dist.barrier()
"""


def test_declared_replicas_are_waited_for_as_nobody_keeps_those_of_others(
    processes: Processes, tmp_path: Path
) -> None:
    ranks = processes.torch(2, RANK, tmp_path / "c")
    stopped = ranks[1]
    assert stopped.stdout is not None
    assert stopped.stdout.readline() == "writing\n"
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        time.sleep(2)
        assert not (tmp_path / "c" / "manifest.ocdbt").exists()
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    for rank in ranks:
        assert rank.wait(SECONDS) == 0
    assert unickpt.verify(tmp_path / "c").ok
    assert np.array_equal(unickpt.open(tmp_path / "c")["w"], np.arange(300_000, dtype=np.float32))


# --- processes that are too slow ------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited_processes, "_STOPPED_S", 0.1)
    monkeypatch.setattr(liveness, "FIRST_S", {False: 0.01, True: 0.05})
    monkeypatch.setattr(stand_ins, "_LEAST_S", 0.3)
    monkeypatch.setattr(stand_ins, "_SLOWER", 1)


@contextmanager
def slow(processes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Processes that do not begin to write until the event is set."""
    may_write, real = threading.Event(), writer.ChunkWriter.write_all

    def write_all(self: writer.ChunkWriter, items: Any) -> Any:
        if self._attempt.group.index in processes:
            assert may_write.wait(SECONDS)
        return real(self, items)

    monkeypatch.setattr(writer.ChunkWriter, "write_all", write_all)
    try:
        yield may_write
    finally:
        may_write.set()


def saved_without(
    process: int | tuple[int, ...],
    path: Path,
    tree: Callable[[ProcessGroup], Any],
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> bool:
    """Whether a job of three has a checkpoint before some of them write; all save it anyway."""
    ended = threading.Event()
    processes = (process,) if isinstance(process, int) else process
    with slow(processes, monkeypatch) as may_write:

        def release() -> None:
            deadline = time.monotonic() + 1.5
            while time.monotonic() < deadline and not (path / "manifest.ocdbt").exists():
                time.sleep(0.01)
            if (path / "manifest.ocdbt").exists():
                ended.set()
            may_write.set()

        watcher = threading.Thread(target=release)
        watcher.start()
        results = in_job(
            3,
            lambda group: unickpt.save(
                path,
                tree(group),
                options=SaveOptions(
                    group=group, timeout_s=30, fsync=False, chunk_bytes=4096, **options
                ),
            ),
        )
        watcher.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert unickpt.verify(path).ok
    return ended.is_set()


@pytest.mark.integration
@pytest.mark.usefixtures("quick")
def test_others_write_for_a_process_that_is_far_too_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert saved_without(1, tmp_path / "c", lambda group: numbers(1), monkeypatch)
    assert same(unickpt.load(tmp_path / "c"), numbers(1))
    assert "process 1 made no progress" in caplog.text


@pytest.mark.integration
@pytest.mark.usefixtures("quick")
def test_others_write_for_several_processes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saved_without((1, 2), tmp_path / "c", lambda group: numbers(1), monkeypatch)
    assert same(unickpt.load(tmp_path / "c"), numbers(1))


@pytest.mark.integration
@pytest.mark.usefixtures("quick")
def test_process_0_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not saved_without(0, tmp_path / "c", lambda group: numbers(1), monkeypatch)
    assert same(unickpt.load(tmp_path / "c"), numbers(1))


@pytest.mark.integration
@pytest.mark.usefixtures("quick")
def test_a_process_is_waited_for_if_there_is_no_room_to_write_its_part_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_folders, "free_bytes", lambda *_: 70_000)  # a third is 80,000
    assert not saved_without(1, tmp_path / "c", lambda group: numbers(1), monkeypatch)
    assert same(unickpt.load(tmp_path / "c"), numbers(1))


@pytest.mark.plugins
@pytest.mark.integration
@pytest.mark.usefixtures("quick")
def test_it_takes_part_in_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later saves reuse chunks of such a checkpoint, and replace it."""
    path, base = tmp_path / "c", tmp_path / "base"
    assert saved_without(1, base, lambda group: numbers(1), monkeypatch)
    changed = {**numbers(1), "small": np.arange(5)}
    reports = in_job(
        3,
        lambda group: unickpt.save(
            path, changed, options=SaveOptions(group=group, base=base, chunk_bytes=4096)
        ),
    )
    assert sum(report.reused_bytes for report in reports) > 0.9 * changed["large"].nbytes
    assert same(unickpt.load(path), changed)
    save_in_job(base, 3, lambda index: numbers(2), overwrite=True)
    assert same(unickpt.load(base), numbers(2))
    assert unickpt.verify(path).ok, "the chunks that it uses stay"


def only_there(group: ProcessGroup) -> Any:
    """What a pipeline stage of one process has, and no other."""
    own = {"stage": np.arange(7.0)} if group.index == 1 else {}
    return numbers(1) | own


def fragments(group: ProcessGroup) -> Any:
    box = Box((group.index * 5,), ((group.index + 1) * 5,))
    own = LocalFragments((15,), [(box, np.arange(5.0) + 5 * group.index)])
    return numbers(1) | {"own": own}


CASES: dict[str, tuple[Callable[[ProcessGroup], Any], dict[str, Any]]] = {
    "a value of its own": (
        lambda group: numbers(1) | {"rng": unickpt.PerProcess(f"rng {group.index}")},
        {},
    ),
    "an array of its own": (only_there, {}),
    "a part of an array": (fragments, {}),
    "replicas are compared": (lambda group: numbers(1), {"check_replicas": True}),
}


@pytest.mark.integration
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("case", CASES)
def test_a_process_is_waited_for_if_it_has_what_no_other_has(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, options = CASES[case]
    assert not saved_without(1, tmp_path / "c", tree, monkeypatch, **options)
    stored = unickpt.open(tmp_path / "c")
    assert np.array_equal(stored["large"][...], numbers(1)["large"])
    if case == "an array of its own":
        assert np.array_equal(stored["stage"][...], np.arange(7.0))
    if case == "a part of an array":
        assert np.array_equal(stored["own"][...], np.arange(15.0))


FAILING = f"""
import json, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {TESTS!r})
import unickpt
from support.saving import numbers
from unickpt.commit import attempt, awaited_processes
from unickpt.saving import writer

path, index, session = ARGS
awaited_processes._STOPPED_S = 0.6
publish = attempt.Attempt.publish

def fails(self, items):
    while not list(Path(path).glob("processes/*/records/00001.at")):
        time.sleep(0.01)
    print("there", flush=True)
    while not os.path.exists(f"{{path}}/manifest.ocdbt"):
        time.sleep(0.01)
    raise OSError("no space left here")

def stops(self, record, kind=".ok"):
    publish(self, record, kind)
    if kind == ".more":
        print("wrote more", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)

if index == 1:
    writer.ChunkWriter.write_all = fails
if index == 2:
    attempt.Attempt.publish = stops
group = unickpt.ProcessGroup(index, 3, session)
options = unickpt.SaveOptions(group=group, timeout_s={SECONDS}, chunk_bytes=4096)
try:
    unickpt.save(path, numbers(1), options=options)
    said = "saved"
except Exception as error:
    said = str(error)
print(json.dumps(said))
"""


def test_its_error_after_that_removes_nothing_of_others(forks: Forks, tmp_path: Path) -> None:
    path, name = tmp_path / "c", session()
    pids = [forks.start(FAILING, str(path), index, name) for index in range(3)]
    until(lambda: "there" in forks.said(pids[1]))
    os.kill(pids[1], signal.SIGSTOP)
    until(lambda: "wrote more" in forks.said(pids[2]))
    until(lambda: "saved" in forks.said(pids[0]))
    os.kill(pids[1], signal.SIGCONT)
    assert "no space left here" in forks.wait(pids[1]).last
    os.kill(pids[2], signal.SIGCONT)
    said = forks.wait(pids[2]).last
    assert unickpt.verify(path).ok
    assert same(unickpt.load(path), numbers(1))
    assert said == "saved"
    assert not list(path.glob("processes/*/00001"))


# --- chunks that process 0 and others have to write -----------------------------------------------


@pytest.mark.integration
def test_others_write_what_is_requested_while_process_0_writes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, path = writer.ChunkWriter.write_more, tmp_path / "c"

    def write_more(self: writer.ChunkWriter, items: Any) -> Any:
        if self._attempt.group.index == 0:
            until(lambda: list(path.glob("processes/*/records/00001.more")))
        return real(self, items)

    monkeypatch.setattr(writer.ChunkWriter, "write_more", write_more)
    monkeypatch.setattr(f"{__name__}.SECONDS", 5)
    large = {f"{n}": np.full((300, 200), n, np.float32) for n in range(6)}
    results = save_in_job(path, 3, lambda index: large if index < 2 else {"c": np.ones(3)})
    assert not [result for result in results if isinstance(result, BaseException)]
    assert same(unickpt.load(path), large | {"c": np.ones(3)})
