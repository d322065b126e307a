"""What becomes of a state that does not fit into the budget: wait, drain, spill."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.processes import Processes
from support.saving import in_job

import unickpt
from unickpt import Checkpointer, SaveOptions, SaveReport
from unickpt.saving.background import SaveQueue, SaveRequest
from unickpt.saving.writer import ChunkWriter
from unickpt.storage import spill_files
from unickpt.storage.spill_files import SpillFiles, file_system_of

MIB = 1 << 20
SMALL: dict[str, Any] = {"budget_bytes": 8 * MIB, "chunk_bytes": MIB, "fsync": False}


def tensors(count: int = 6) -> dict[str, Any]:
    return {f"w{i}": torch.full((MIB,), float(i)) for i in range(count)}  # of 4 MiB each


def overwrite(tree: dict[str, Any]) -> None:
    for tensor in tree.values():
        tensor.fill_(-1)


def assert_saved(path: Path, count: int = 6) -> None:
    found = unickpt.load(path)
    assert all((found[f"w{i}"] == i).all() for i in range(count))
    assert unickpt.verify(path).ok


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "spilled"
    if file_system_of(str(tmp_path)) in ("tmpfs", "ramfs"):
        pytest.skip("the folder of the tests is in memory")
    return folder


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written to the storage before it is set."""
    opened, real = threading.Event(), ChunkWriter.write_all

    def write_all(self: ChunkWriter, items: Any) -> Any:
        assert opened.wait(30)
        return real(self, items)

    monkeypatch.setattr(ChunkWriter, "write_all", write_all)
    yield opened
    opened.set()


# --- waiting ---------------------------------------------------------------------------------


def test_without_a_fence_and_a_folder_the_call_waits_and_says_so(
    tmp_path: Path, storage: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    tree = tensors()
    threading.Timer(0.3, storage.set).start()
    pending = unickpt.save_async(tmp_path / "c", tree, options=SaveOptions(**SMALL))
    overwrite(tree)
    report = pending.result(30)
    assert_saved(tmp_path / "c")
    assert (report.drained_bytes, report.spilled_bytes) == (0, 0)
    assert report.staged_bytes == 24 * MIB
    assert 0.1 < report.budget_wait_s <= report.blocked_s
    assert report.writers[0]["budget_wait_s"] == report.budget_wait_s
    assert "SaveOptions.budget_bytes (0.00629 GB)" in caplog.text
    assert "SaveOptions.spill" in caplog.text


def test_what_fits_does_not_wait(tmp_path: Path) -> None:
    report = unickpt.save_async(tmp_path / "c", tensors()).result(30)
    assert report.staged_bytes == 24 * MIB
    assert (report.drained_bytes, report.spilled_bytes, report.budget_wait_s) == (0, 0, 0)


# --- draining --------------------------------------------------------------------------------


class Training:
    """Parameters with momentum, of 4 MiB each."""

    def __init__(self, count: int = 3) -> None:
        self.parameters = [torch.nn.Parameter(torch.full((MIB,), float(i))) for i in range(count)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.5, momentum=0.9)
        self.step()

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    @property
    def tree(self) -> dict[str, Any]:
        state = self.optimizer.state
        return {f"p{i}": p.detach() for i, p in enumerate(self.parameters)} | {
            f"m{i}": state[p]["momentum_buffer"] for i, p in enumerate(self.parameters)
        }

    def values(self) -> dict[str, Any]:
        return {name: tensor.numpy().copy() for name, tensor in self.tree.items()}


def test_what_does_not_fit_is_copied_before_the_next_step(
    tmp_path: Path, storage: threading.Event
) -> None:
    training = Training()
    with Checkpointer(
        tmp_path, optimizers=[training.optimizer], options=SaveOptions(**SMALL)
    ) as run:
        expected = training.values()
        pending = run.save(1, training.tree)  # returns although nothing can be written yet
        assert not pending.done()
        threading.Timer(0.3, storage.set).start()
        training.step()
        report = pending.result(30)
        assert 24 * MIB - 6 * MIB <= report.drained_bytes <= 24 * MIB
        assert report.staged_bytes == 24 * MIB
        assert report.spilled_bytes == 0
        assert report.budget_wait_s < 0.1
        found = run.load(step=1)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert not np.array_equal(training.values()["p0"], expected["p0"])


CHANGES = {
    "one element through .data": lambda p: p.data[-77].fill_(-5),
    "one element through NumPy": lambda p: p.detach().numpy()[-77:-76].fill(-5),
    "in place": lambda p: p.detach().mul_(2),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_any_other_change_of_what_is_drained_is_an_error(
    change: str, tmp_path: Path, storage: threading.Event
) -> None:
    training = Training()
    options = SaveOptions(**SMALL)
    with Checkpointer(tmp_path, optimizers=[training.optimizer], options=options) as run:
        pending = run.save(1, {"first": training.parameters[:2], "last": training.parameters[2]})
        CHANGES[change](training.parameters[2])
        storage.set()
        with pytest.raises(unickpt.StateChanged, match=r"'last'.*did not fit.*budget_bytes"):
            pending.result(30)
        assert run.latest() is None


def test_what_no_optimizer_owns_is_not_drained(tmp_path: Path, storage: threading.Event) -> None:
    training, others = Training(1), tensors()
    threading.Timer(0.3, storage.set).start()
    options = SaveOptions(**SMALL)
    with Checkpointer(tmp_path, optimizers=[training.optimizer], options=options) as run:
        pending = run.save(1, others)
        overwrite(others)
        report = pending.result(30)
        assert report.drained_bytes == 0
        assert report.budget_wait_s > 0
        assert_saved(Path(run.path(1)))


@pytest.mark.parametrize("staging", ["copy", "reference"])
def test_who_asks_for_copies_gets_copies(
    staging: Any, tmp_path: Path, storage: threading.Event
) -> None:
    training = Training()
    threading.Timer(0.2, storage.set).start()
    options = SaveOptions(staging=staging, **SMALL)
    with Checkpointer(tmp_path, optimizers=[training.optimizer], options=options) as run:
        assert run.save(1, training.tree).result(30).drained_bytes == 0


# --- spilling --------------------------------------------------------------------------------


def test_what_does_not_fit_goes_to_files(
    tmp_path: Path, disk: Path, storage: threading.Event
) -> None:
    tree = tensors()
    tree["turned"] = torch.arange(MIB, dtype=torch.float32).reshape(1024, 1024).T
    tree["bools"] = torch.ones(2 * MIB, dtype=torch.bool)
    tree["half"] = torch.full((MIB,), 3.0, dtype=torch.bfloat16)
    turned = tree["turned"].numpy().copy()
    pending = unickpt.save_async(tmp_path / "c", tree, options=SaveOptions(spill=disk, **SMALL))
    overwrite(tree)
    assert not pending.done()
    assert os.listdir(disk) == []
    storage.set()
    report = pending.result(30)
    assert report.spilled_bytes >= 24 * MIB
    assert report.staged_bytes + report.spilled_bytes == 32 * MIB
    assert report.staged_bytes <= 6 * MIB
    assert report.drained_bytes == 0
    assert report.budget_wait_s == 0
    found = unickpt.load(tmp_path / "c")
    assert np.array_equal(found["turned"], turned)
    assert found["bools"].all()
    assert (found["half"] == 3).all()
    assert_saved(tmp_path / "c")
    assert os.listdir(disk) == []


def test_the_fence_opens_early_if_what_is_drained_is_spilled(
    tmp_path: Path, disk: Path, storage: threading.Event
) -> None:
    training = Training()
    options = SaveOptions(spill=disk, **SMALL)
    with Checkpointer(tmp_path / "run", optimizers=[training.optimizer], options=options) as run:
        expected = training.values()
        pending = run.save(1, training.tree)
        training.step()  # although nothing can be written yet
        assert not pending.done()
        storage.set()
        report = pending.result(30)
        assert report.spilled_bytes + report.staged_bytes == 24 * MIB
        assert report.drained_bytes >= 18 * MIB
        found = run.load(step=1)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_chunks_are_gone_from_memory_and_disk_after_every_save(tmp_path: Path, disk: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        tree = tensors()
        options = SaveOptions(spill=disk, **SMALL)
        unickpt.save_async(tmp_path / str(number), tree, options=options).result(30)
        assert_saved(tmp_path / str(number))
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_file_ends_when_nothing_in_it_is_needed(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill_files, "_FILE_BYTES", 2000)
    files = SpillFiles(str(disk))
    slots = [files.reserve(1000) for _ in range(5)]
    assert all(slots)
    data = np.arange(250, dtype=np.float32)
    opened = [slot._file for slot in slots if slot is not None]
    assert len(set(opened)) == 3
    for number, slot in enumerate(slots):
        assert slot is not None
        assert slot.write(data + number)
    for number, slot in enumerate(slots):
        assert slot is not None
        found = np.empty_like(data)
        slot.read(found)
        assert np.array_equal(found, data + number)
        slot.free()
    assert [file.is_open for file in opened] == [False] * 4 + [True]
    files.close()
    assert not opened[-1].is_open


@pytest.mark.parametrize("fails", [1, 5, 12])
def test_a_disk_that_fails_does_not_fail_the_save(
    fails: int,
    tmp_path: Path,
    disk: Path,
    storage: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real, calls = os.pwrite, []

    def pwrite(number: int, data: Any, offset: int) -> int:
        calls.append(number)
        if len(calls) == fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(number, data[: max(1, len(data) // 2)], offset)  # a piece at a time

    monkeypatch.setattr(spill_files.os, "pwrite", pwrite)
    threading.Timer(0.3, storage.set).start()
    tree = tensors()
    pending = unickpt.save_async(tmp_path / "c", tree, options=SaveOptions(spill=disk, **SMALL))
    overwrite(tree)
    report = pending.result(30)
    assert_saved(tmp_path / "c")
    assert report.staged_bytes + report.spilled_bytes == 24 * MIB
    assert report.budget_wait_s > 0, "the rest waited"
    assert "No space left on device" in caplog.text


def test_a_disk_that_is_nearly_full_is_left_alone(
    tmp_path: Path, disk: Path, storage: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill_files, "_KEPT_FREE", 1)
    threading.Timer(0.2, storage.set).start()
    pending = unickpt.save_async(
        tmp_path / "c", tensors(), options=SaveOptions(spill=disk, **SMALL)
    )
    assert pending.result(30).spilled_bytes == 0
    assert_saved(tmp_path / "c")


def test_a_disk_that_also_gets_the_checkpoint_keeps_room_for_it(disk: Path) -> None:
    system = os.statvfs(disk.parent)
    free, total = (n * system.f_frsize for n in (system.f_bavail, system.f_blocks))
    if free < total // 20 + (1 << 30):
        pytest.skip("the disk is nearly full")
    new = str(disk.parent / "new" / "c")
    for beside, has_room in (((new, MIB), True), ((new, free), False), (("/proc", free), True)):
        files = SpillFiles(str(disk), beside)
        assert (files.reserve(MIB) is not None) == has_room
        files.close()


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
def test_a_folder_in_memory_is_refused(
    tmp_path: Path, storage: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    threading.Timer(0.2, storage.set).start()
    options = SaveOptions(spill="/dev/shm", **SMALL)
    pending = unickpt.save_async(tmp_path / "c", tensors(), options=options)
    assert pending.result(30).spilled_bytes == 0
    assert "is in memory (tmpfs), so nothing is spilled" in caplog.text


def test_a_folder_that_cannot_be_made(
    tmp_path: Path, storage: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    threading.Timer(0.2, storage.set).start()
    options = SaveOptions(spill=tmp_path / "file" / "in", **SMALL)
    pending = unickpt.save_async(tmp_path / "c", tensors(), options=options)
    assert pending.result(30).spilled_bytes == 0
    assert "nothing is spilled" in caplog.text


@pytest.mark.parametrize("spill", ["s3://bucket/x", "file:///x", "", 3])
def test_a_folder_that_is_none(spill: Any) -> None:
    expected = re.escape(f"spill={spill!r} must be the path of a folder")
    with pytest.raises(ValueError, match=expected):
        SaveOptions(spill=spill)


def test_what_the_disk_has_lost_is_an_error(
    tmp_path: Path, disk: Path, storage: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    queue, tree = SaveQueue(), tensors()
    pending = queue.save(SaveRequest(tmp_path / "c", tree, SaveOptions(spill=disk, **SMALL)))
    spill = pending._snapshot._places.spill
    assert spill is not None
    (file,) = spill.files._files
    os.pwrite(file.number, b"\x01", MIB // 2)
    storage.set()
    with pytest.raises(unickpt.StorageError, match=r"array 'w1'.*a spilled copy is damaged"):
        pending.result(30)
    assert queue._area._held == 0
    assert not file.is_open


def test_replicas_are_spilled_rather_than_held_up_until_the_commit(
    tmp_path: Path, disk: Path
) -> None:
    """Every process keeps a copy of what others should write, until the commit."""

    def save(spill: Path | None, group: Any, gate: threading.Barrier) -> tuple[bool, SaveReport]:
        tree = tensors(8)
        options = SaveOptions(
            group=group, budget_bytes=64 * MIB, chunk_bytes=MIB, fsync=False, spill=spill
        )
        queue = SaveQueue()
        where = tmp_path / ("with" if spill else "without")
        pending = queue.save(SaveRequest(where, tree, options))
        was_done = (where / "manifest.ocdbt").exists()
        gate.wait(30)
        overwrite(tree)
        return was_done, pending.result(30)

    for spill in (disk, None):
        gate = threading.Barrier(4)
        for found in in_job(4, lambda group, s=spill, g=gate: save(s, group, g)):
            was_done, report = found
            if spill is None:
                assert was_done, "the call waited for the commit"
                assert report.budget_wait_s > 0
            else:
                assert report.spilled_bytes > 0
                assert report.staged_bytes <= 12 * MIB
                assert report.budget_wait_s == 0
        assert_saved(tmp_path / ("with" if spill else "without"), 8)


def test_nothing_is_left_of_a_process_that_is_killed(
    processes: Processes, tmp_path: Path, disk: Path
) -> None:
    source = """
import os, signal, sys, numpy as np, unickpt
from unickpt.storage import spill_files
writes, real = [], os.pwrite
def pwrite(number, data, offset):
    writes.append(number)
    if len(writes) == 4:
        print(os.path.basename(os.readlink(f"/proc/self/fd/{number}")), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(number, data, offset)
spill_files.os.pwrite = pwrite
options = unickpt.SaveOptions(spill=sys.argv[2], budget_bytes=8 << 20, chunk_bytes=1 << 20)
tree = {f"w{i}": np.ones(1 << 20, np.float32) for i in range(6)}
unickpt.save_async(sys.argv[1], tree, options=options)
"""
    process = processes.start(source, tmp_path / "c", disk)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert out.strip().endswith("(deleted)"), "it was writing to a file without a name"
    assert os.listdir(disk) == []


# --- several processes of a node -------------------------------------------------------------

RANKS = """
import sys, torch, torch.distributed as dist, unickpt
root, spill = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
mesh = init_device_mesh("cpu", (4,))
MIB = 1 << 20
tree = {f"w{i}": DTensor.from_local(torch.full((MIB,), float(i)), mesh, [Shard(0)])
        for i in range(8)}
def anonymous():
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Anonymous:"))
def save(name, budget_bytes):
    options = unickpt.SaveOptions(budget_bytes=budget_bytes, chunk_bytes=MIB, fsync=False,
                                  spill=spill or None)
    pending = unickpt.save_async(f"{root}/{name}", tree, options=options)
    return pending
save("warm", 8 * MIB).result()
dist.barrier()
from unickpt.saving.staging_memory import HostMemoryPool
most, real = [0], HostMemoryPool.take
def take(self, *arguments):
    most[0] = max(most[0], self._held)
    return real(self, *arguments)
HostMemoryPool.take = take
before = anonymous()
pending = save("c", 64 * MIB)
after = anonymous()
for tensor in tree.values():
    tensor.to_local().add_(1)
report = pending.result()
print(most[0], after - before, report.staged_bytes, report.spilled_bytes)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("spills", [False, True])
def test_the_ranks_of_a_node_share_its_budget(
    spills: bool, processes: Processes, tmp_path: Path, disk: Path
) -> None:
    """They hold 128 MiB, and may use 64 MiB, of which 16 are to write with."""
    outputs = processes.finish(processes.torch(4, RANKS, tmp_path, disk if spills else ""))
    found = [list(map(int, out.split())) for out in outputs]
    held, grown, staged, spilled = (sum(column) for column in zip(*found, strict=True))
    assert 0 < held <= 48 * MIB
    assert grown <= 64 * MIB + 16 * MIB, "and what Python takes"
    assert staged + spilled == 128 * MIB
    assert (spilled > 0) == spills
    whole = unickpt.load(tmp_path / "c")
    assert all((whole[f"w{i}"] == i).all() for i in range(8))


JAX = """
import sys, numpy as np, jax, jax.numpy as jnp, unickpt
from jax.sharding import NamedSharding, PartitionSpec as P
from unickpt.saving.staging_memory import HostMemoryPool
mesh = jax.make_mesh((2,), ("x",))
n = 1 << 20
tree = {f"w{i}": jax.make_array_from_callback((2 * n,), NamedSharding(mesh, P("x")),
            lambda index, i=i: np.full(n, i, np.float32)) for i in range(4)}
most, real = [0], HostMemoryPool.take
def take(self, *arguments):
    most[0] = max(most[0], self._held)
    return real(self, *arguments)
HostMemoryPool.take = take
options = unickpt.SaveOptions(staging="copy", budget_bytes=16 << 20, chunk_bytes=1 << 20,
                              fsync=False)
report = unickpt.save_async(sys.argv[1], tree, options=options).result()
print(most[0], report.staged_bytes)
"""


def test_the_processes_of_jax_share_a_nodes_budget(processes: Processes, tmp_path: Path) -> None:
    outputs = processes.finish(processes.jax(2, 1, JAX, tmp_path / "c"))
    held, staged = (
        sum(column) for column in zip(*(map(int, o.split()) for o in outputs), strict=True)
    )
    assert 0 < held <= 12 * MIB
    assert staged == 32 * MIB
    found = unickpt.load(tmp_path / "c")
    assert all((found[f"w{i}"] == i).all() for i in range(4))
