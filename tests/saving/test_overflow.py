"""What becomes of a state that does not fit into the budget: the call waits, or it is drained."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.processes import Processes
from support.saving import in_job

import unickpt
from unickpt import Checkpointer, SaveOptions
from unickpt.arrays.box import Box
from unickpt.frameworks.adapter_protocol import Fragment, Memory, Transfer
from unickpt.saving.background import SaveQueue, SaveRequest
from unickpt.saving.snapshot_policy import SnapshotMethod, SnapshotPolicy
from unickpt.saving.staging_memory import HostMemoryPool
from unickpt.saving.writer import ChunkWriter
from unickpt.types import SaveReport

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


class Storage:
    """Nothing is written to it before `open`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._opened, self._patch = threading.Event(), patch
        self.open, real = self._opened.set, ChunkWriter.write_all

        def write_all(writer: ChunkWriter, items: Any) -> Any:
            assert self._opened.wait(30)
            return real(writer, items)

        patch.setattr(ChunkWriter, "write_all", write_all)

    def open_when_memory_is_short(self) -> None:
        """Opens a while after a save began to wait for memory."""
        real = HostMemoryPool.wait_and_reserve

        def wait_and_reserve(pool: HostMemoryPool, *arguments: Any) -> None:
            threading.Timer(0.3, self.open).start()
            real(pool, *arguments)

        self._patch.setattr(HostMemoryPool, "wait_and_reserve", wait_and_reserve)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    made = Storage(monkeypatch)
    yield made
    made.open()


# --- waiting ---------------------------------------------------------------------------------


def test_without_a_fence_the_call_waits_and_says_so(
    tmp_path: Path, storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    tree = tensors()
    storage.open_when_memory_is_short()
    pending = unickpt.save_async(tmp_path / "c", tree, options=SaveOptions(**SMALL))
    overwrite(tree)
    report = pending.result(30)
    assert_saved(tmp_path / "c")
    assert report.drained_bytes == 0
    assert report.staged_bytes == 24 * MIB
    assert 0.1 < report.budget_wait_s <= report.blocked_s
    assert report.writers[0]["budget_wait_s"] == report.budget_wait_s
    assert "SaveOptions.budget_bytes (0.00629 GB)" in caplog.text


def test_what_fits_does_not_wait(tmp_path: Path) -> None:
    report = unickpt.save_async(tmp_path / "c", tensors()).result(30)
    assert report.staged_bytes == 24 * MIB
    assert (report.drained_bytes, report.budget_wait_s) == (0, 0)


@pytest.mark.parametrize("budget_bytes", [1, 3 * MIB, 17 * MIB])
def test_states_of_any_size_save_within_any_budget(budget_bytes: int, tmp_path: Path) -> None:
    """Chunks of 5 MiB are larger than the budget, or than what one save leaves to the next."""
    options = SaveOptions(budget_bytes=budget_bytes, chunk_bytes=5 * MIB, fsync=False)
    with Checkpointer(tmp_path, options=options, keep_last=None) as run:
        pending = []
        for step in range(4):
            tree = tensors()
            pending.append(run.save(step, tree))
            overwrite(tree)
        assert [report.result(30).staged_bytes for report in pending] == [24 * MIB] * 4
        for step in range(4):
            assert_saved(Path(run.path(step)))


def test_a_save_waits_for_the_memory_of_the_save_before(tmp_path: Path, storage: Storage) -> None:
    with Checkpointer(tmp_path, options=SaveOptions(**SMALL), keep_last=None) as run:
        first = run.save(1, tensors(1))  # takes 4 of 6 MiB until the storage is there
        storage.open_when_memory_is_short()
        tree = tensors(2)
        second = run.save(2, tree)
        overwrite(tree)
        assert first.result(30).budget_wait_s == 0
        assert second.result(30).budget_wait_s > 0.1
        assert_saved(Path(run.path(2)), 2)


def on_device(self: SnapshotPolicy, fragment: Fragment, dtype: Any) -> Any:
    """Has a device copy the fragment, which keeps the copy until the save ends."""

    def read(box: Box, _: object) -> np.ndarray:
        return np.array(fragment.read(box, pytest.fail))

    def transfer(boxes: Sequence[Box]) -> Transfer:
        copies = {box: read(box, None) for box in boxes}
        return Transfer(lambda box, _: copies[box], wait=lambda: None)

    memory = Memory(on_device=True, transfer=transfer)
    return SnapshotMethod.COPY_NOW, Fragment(fragment.box, fragment.replicas, read, memory)


@pytest.mark.parametrize("budget_mib", [2, 8, 10, 40])
def test_what_devices_transfer_leaves_memory_for_the_rest(
    budget_mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays of 2 MiB in chunks of 1 MiB: three, or four, would take all of the memory."""
    monkeypatch.setattr(SnapshotPolicy, "_decide", on_device)
    tree = {f"w{i}": torch.full((MIB // 2,), float(i)) for i in range(6)}
    options = SaveOptions(budget_bytes=budget_mib * MIB, chunk_bytes=MIB, fsync=False)
    pending = unickpt.save_async(tmp_path / "c", tree, options=options)
    overwrite(tree)
    report = pending.result(30)
    assert report.staged_bytes == 12 * MIB
    assert (report.budget_wait_s == 0) == (budget_mib == 40)
    assert_saved(tmp_path / "c")


def test_replicas_that_do_not_fit_hold_the_call_up_until_the_commit(tmp_path: Path) -> None:
    """Every process keeps what others should write, until the commit."""

    def save(group: Any, gate: threading.Barrier) -> tuple[bool, SaveReport]:
        tree = tensors(8)
        options = SaveOptions(group=group, budget_bytes=64 * MIB, chunk_bytes=MIB, fsync=False)
        pending = SaveQueue().save(SaveRequest(tmp_path / "c", tree, options))
        was_done = (tmp_path / "c" / "manifest.ocdbt").exists()
        gate.wait(30)
        overwrite(tree)
        return was_done, pending.result(30)

    gate = threading.Barrier(4)
    for was_done, report in in_job(4, lambda group: save(group, gate)):
        assert was_done, "the call waited for the commit"
        assert report.budget_wait_s > 0
    assert_saved(tmp_path / "c", 8)


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


def test_what_does_not_fit_is_copied_before_the_next_step(tmp_path: Path, storage: Storage) -> None:
    training = Training()
    with Checkpointer(
        tmp_path, optimizers=[training.optimizer], options=SaveOptions(**SMALL)
    ) as run:
        expected = training.values()
        pending = run.save(1, training.tree)  # returns although nothing can be written yet
        assert not pending.done()
        threading.Timer(0.3, storage.open).start()
        training.step()
        report = pending.result(30)
        assert 24 * MIB - 6 * MIB <= report.drained_bytes <= 24 * MIB
        assert report.staged_bytes == 24 * MIB
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
    change: str, tmp_path: Path, storage: Storage
) -> None:
    training = Training()
    options = SaveOptions(**SMALL)
    with Checkpointer(tmp_path, optimizers=[training.optimizer], options=options) as run:
        pending = run.save(1, {"first": training.parameters[:2], "last": training.parameters[2]})
        CHANGES[change](training.parameters[2])
        storage.open()
        with pytest.raises(unickpt.errors.StateChanged, match=r"'last'.*did not fit.*budget_bytes"):
            pending.result(30)
        assert run.latest() is None


def test_what_no_optimizer_owns_is_not_drained(tmp_path: Path, storage: Storage) -> None:
    training, others = Training(1), tensors()
    storage.open_when_memory_is_short()
    options = SaveOptions(**SMALL)
    with Checkpointer(tmp_path, optimizers=[training.optimizer], options=options) as run:
        pending = run.save(1, others)
        overwrite(others)
        report = pending.result(30)
        assert report.drained_bytes == 0
        assert report.budget_wait_s > 0
        assert_saved(Path(run.path(1)))


@pytest.mark.parametrize("staging", ["copy", "reference"])
def test_who_asks_for_copies_gets_copies(staging: Any, tmp_path: Path, storage: Storage) -> None:
    training = Training()
    storage.open_when_memory_is_short()
    options = SaveOptions(staging=staging, **SMALL)
    with Checkpointer(tmp_path, optimizers=[training.optimizer], options=options) as run:
        assert run.save(1, training.tree).result(30).drained_bytes == 0


# --- several processes of a node -------------------------------------------------------------

RANKS = """
import sys, torch, torch.distributed as dist, unickpt
root = sys.argv[1]
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
    options = unickpt.SaveOptions(budget_bytes=budget_bytes, chunk_bytes=MIB, fsync=False)
    return unickpt.save_async(f"{root}/{name}", tree, options=options)
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
print(most[0], after - before, report.staged_bytes)
dist.barrier()
dist.destroy_process_group()
"""


def test_the_ranks_of_a_node_share_its_budget(processes: Processes, tmp_path: Path) -> None:
    """They hold 128 MiB, and may use 64 MiB, of which 16 are to write with."""
    outputs = processes.finish(processes.torch(4, RANKS, tmp_path))
    columns = zip(*(map(int, out.split()) for out in outputs), strict=True)
    held, grown, staged = map(sum, columns)
    assert 0 < held <= 48 * MIB
    assert grown <= 64 * MIB + 16 * MIB, "and what Python takes"
    assert staged == 128 * MIB
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
