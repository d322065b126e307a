"""Asynchronous saves: what is saved is the state of the moment of the call, or an error."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from jax.sharding import NamedSharding, PartitionSpec
from support.processes import Processes
from support.saving import numbers, same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import unickpt
from unickpt import (
    CheckpointExists,
    CheckpointNotFound,
    SaveConflict,
    SaveOptions,
    StorageError,
    UnsupportedLeaf,
)
from unickpt.adapters import jax as jax_adapter
from unickpt.adapters import torch as torch_adapter
from unickpt.errors import SaveTimeout, StateChanged
from unickpt.frameworks import host_memory
from unickpt.saving import saver, snapshot
from unickpt.saving.background import PendingSave, SaveCallbacks, SaveQueue, SaveRequest
from unickpt.saving.snapshot_policy import SnapshotMethod, SnapshotPolicy
from unickpt.saving.staging_memory import HostMemoryPool
from unickpt.saving.task import SaveEvent
from unickpt.storage.data_files import DataFile

MIB = 1 << 20
COPY, LAZY = SaveOptions(staging="copy", fsync=False), SaveOptions(staging="lazy", fsync=False)
REFERENCE = SaveOptions(staging="reference", fsync=False)


class Gate:
    """Stops threads at a place until it is opened."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()

    def before(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def stopped(*arguments: Any, **named: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(30), "nobody opened the gate"
            return real(*arguments, **named)

        return stopped


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


@pytest.fixture
def writing(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Nothing is written before it is opened."""
    monkeypatch.setattr(DataFile, "add", gate.before(DataFile.add))
    return gate


@pytest.fixture
def copying(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Nothing is copied to host memory in the background before it is opened."""
    real = host_memory.stage

    def stopped(*arguments: Any, **named: Any) -> Any:
        if threading.current_thread().name.startswith("unickpt stage"):
            return gate.before(real)(*arguments, **named)
        return real(*arguments, **named)

    monkeypatch.setattr(snapshot, "stage", stopped)
    return gate


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's CPU devices pass for accelerators, whose arrays must be read before they go."""
    monkeypatch.setattr(jax_adapter, "_on_cpu", lambda data: False)


def contents(path: Path | str) -> dict[str, Any]:
    """All that is stored at a path, by name."""
    stored = unickpt.open(path)
    blobs = {
        name: np.array([value.section("")[0] for value in stored.reader.per_process(name)])
        for name in stored.index.per_process
    }
    return {**{name: array[...] for name, array in stored.items()}, **stored.values, **blobs}


# --- copies --------------------------------------------------------------------------------------


def tensors() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    large = torch.randn(700, 900, generator=generator)
    return {
        "numpy": np.arange(60_000, dtype=np.int32).reshape(200, 300),
        "swapped": np.arange(50_000, dtype=">i4"),
        "large": large,
        "turned": torch.randn(600, 500, generator=generator).t(),
        "bfloat16": torch.randn(300, 400, generator=generator).bfloat16(),
        "flags": torch.rand(100_000, generator=generator) > 0.5,
        "small": torch.arange(5.0),
        "scalar": np.float32(3),
        "tied": large,
        "empty": torch.zeros(0, 3),
        "fragments": unickpt.types.LocalFragments.flat((90_000,), [(0, torch.rand(90_000))]),
        "mine": unickpt.PerProcess({"seen": torch.arange(7)}),
    }


def overwrite(tree: Any) -> None:
    """Changes all memory of a tree in place."""
    for leaf in tree.values():
        if isinstance(leaf, torch.Tensor):
            leaf.copy_(torch.zeros_like(leaf)) if leaf.dtype == torch.bool else leaf.fill_(77)
        elif isinstance(leaf, np.ndarray):
            leaf[...] = 77
        elif isinstance(leaf, unickpt.types.LocalFragments):
            leaf.fragments[0][1].fill_(77)


@pytest.mark.parametrize("mode", ["auto", "copy", "reference", "device"])
def test_what_changes_after_the_call_is_saved_as_it_was(
    mode: Any, writing: Gate, tmp_path: Path
) -> None:
    expected = tmp_path / "expected"
    writing.opened.set()
    tree = tensors()
    unickpt.save(expected, tree)
    writing.opened.clear()
    pending = unickpt.save_async(tmp_path / "c", tree, options=SaveOptions(staging=mode))
    pending.wait_staged(0)
    overwrite(tree)
    assert not pending.done()
    writing.opened.set()
    report = pending.result(30)
    assert report.staged_bytes > 3 * MIB
    assert report.blocked_s < report.seconds
    assert set(report.phases) == {"describe", "plan", "stage", "queue", "write", "commit"}
    assert same(contents(tmp_path / "c"), contents(expected))
    assert unickpt.verify(tmp_path / "c").ok


def test_a_state_larger_than_the_budget_waits_for_the_storage(tmp_path: Path) -> None:
    area, held = HostMemoryPool(), []
    real = area.take

    def watched(*arguments: Any) -> Any:
        held.append(area._held)
        return real(*arguments)

    area.take = watched  # type: ignore[method-assign]
    queue = SaveQueue()
    queue._area = area
    tree = {f"w{i}": torch.full((MIB,), float(i)) for i in range(12)}  # 48 MiB
    options = SaveOptions(staging="copy", budget_bytes=16 * MIB, chunk_bytes=2 * MIB, fsync=False)
    for number in range(3):
        queue.save(SaveRequest(tmp_path / str(number), tree, options))
        for tensor in tree.values():
            tensor += 1
    queue.wait()
    queue.errors.raise_first()
    assert max(held) <= 16 * MIB
    assert area._held == 0, "memory was not given back"
    for number in range(3):
        found = unickpt.load(tmp_path / str(number))
        assert all((found[f"w{i}"] == i + number).all() for i in range(12))


def test_a_budget_that_is_too_small_for_what_is_copied_at_once_and_lazily(tmp_path: Path) -> None:
    tree = {f"now{i}": np.full(MIB, i, np.float32) for i in range(4)}
    tree |= {f"later{i}": torch.full((MIB,), float(i)) for i in range(4)}
    options = SaveOptions(staging="lazy", budget_bytes=8 * MIB, chunk_bytes=2 * MIB, fsync=False)
    pending = unickpt.save_async(tmp_path / "c", tree, options=options)
    pending.wait_staged(30)
    expected = {name: np.full(MIB, float(name[-1]), np.float32) for name in tree}
    overwrite(tree)
    pending.result(30)
    assert same(unickpt.load(tmp_path / "c"), expected)


def test_a_chunk_larger_than_the_budget_goes_alone(tmp_path: Path) -> None:
    tree = {"a": np.arange(MIB, dtype=np.float32), "b": np.arange(MIB, dtype=np.float32) * 2}
    options = SaveOptions(staging="copy", budget_bytes=MIB, chunk_bytes=8 * MIB, fsync=False)
    unickpt.save_async(tmp_path / "c", tree, options=options).result(30)
    assert same(unickpt.load(tmp_path / "c"), tree)


def test_host_memory_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = host_memory._from_system

    def counted(nbytes: int) -> Any:
        made.append(nbytes)
        return real(nbytes)

    monkeypatch.setattr(host_memory, "_from_system", counted)
    queue = SaveQueue()
    tree = {f"w{i}": np.full(MIB, i, np.float32) for i in range(6)}
    counts = []
    for number in range(5):
        path = tmp_path / str(number)
        queue.save(SaveRequest(path, tree, COPY)).result(30)
        counts.append(len(made))
    assert counts[0] == 6
    assert counts[-1] == counts[0], "later saves made new memory"


# --- references ----------------------------------------------------------------------------------


def sharded(shape: tuple[int, ...], seed: int) -> jax.Array:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    values = jax.random.normal(jax.random.key(seed), shape)
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec("x", "y")))


@pytest.mark.parametrize("mode", ["auto", "reference", "lazy", "copy", "device"])
def test_a_step_that_donates_the_state_changes_nothing(
    mode: Any, writing: Gate, tmp_path: Path
) -> None:
    state = {"w": sharded((512, 256), 1), "b": jnp.arange(70_000.0), "n": jnp.float32(4)}
    expected = jax.tree.map(np.array, state)
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    pending = unickpt.save_async(tmp_path / "c", state, options=SaveOptions(staging=mode))
    for _ in range(3):
        state = step(state)
    jax.block_until_ready(state)
    writing.opened.set()
    report = pending.result(30)
    assert same(unickpt.load(tmp_path / "c"), expected)
    if mode != "copy":
        assert report.staged_bytes == 0, "JAX's arrays on CPU need no copy"


def test_deleted_arrays_are_saved_too(writing: Gate, tmp_path: Path) -> None:
    state = jnp.arange(100_000.0)
    pending = unickpt.save_async(tmp_path / "c", state, options=REFERENCE)
    state.delete()
    writing.opened.set()
    pending.result(30)
    assert (unickpt.load(tmp_path / "c") == np.arange(100_000)).all()


@pytest.mark.parametrize("mode", ["reference", "lazy"])
def test_an_accelerators_array_that_is_donated_too_early_is_an_error(
    mode: Any, accelerator: None, copying: Gate, tmp_path: Path
) -> None:
    state = {"w": jnp.arange(100_000.0), "v": jnp.ones(100_000)}
    pending = unickpt.save_async(tmp_path / "c", state, options=SaveOptions(staging=mode))
    state["v"].delete()
    copying.opened.set()
    with pytest.raises(StateChanged, match=r"'v' .*wait_staged\(\) before the update"):
        pending.wait_staged()
    with pytest.raises(StateChanged):
        pending.result(30)
    with pytest.raises(CheckpointNotFound):
        unickpt.open(tmp_path / "c")


@pytest.mark.parametrize("mode", ["reference", "lazy", "device", "auto", "copy"])
def test_an_accelerators_array_may_be_donated_when_it_is_staged(
    mode: Any, accelerator: None, writing: Gate, tmp_path: Path
) -> None:
    state = {"w": jnp.arange(100_000.0), "n": jnp.int32(5)}
    pending = unickpt.save_async(tmp_path / "c", state, options=SaveOptions(staging=mode))
    pending.wait_staged()
    for leaf in state.values():
        leaf.delete()
    writing.opened.set()
    pending.result(30)
    found = unickpt.load(tmp_path / "c")
    assert (found["w"] == np.arange(100_000)).all()
    assert found["n"] == 5


def test_clones_on_the_device_need_no_wait(
    accelerator: None, copying: Gate, tmp_path: Path
) -> None:
    state = sharded((512, 256), 3)
    expected = np.array(state)
    pending = unickpt.save_async(tmp_path / "c", state, options=SaveOptions(staging="device"))
    pending.wait_staged(0)
    state.delete()
    copying.opened.set()
    pending.result(30)
    assert (unickpt.load(tmp_path / "c") == expected).all()


def test_each_array_is_cloned_once(
    accelerator: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloned = []
    real = jax_adapter._clone
    monkeypatch.setattr(jax_adapter, "_clone", lambda x: cloned.append(x.nbytes) or real(x))
    state = sharded((512, 256), 3)  # on eight devices
    unickpt.save_async(tmp_path / "c", state, options=SaveOptions(staging="device")).result(30)
    assert sum(cloned) == state.nbytes


def test_nothing_of_the_state_is_held_after_the_save(writing: Gate, tmp_path: Path) -> None:
    memory = [np.ones(n, np.float32) for n in (MIB, 3)]
    kept = [weakref.ref(array) for array in memory]
    tree = [torch.from_numpy(array) for array in memory]
    pending = unickpt.save_async(tmp_path / "c", tree, options=LAZY)
    pending.wait_staged()
    del tree, memory
    assert kept[0]() is not None
    writing.opened.set()
    pending.result(30)
    deadline = time.monotonic() + 10
    while any(ref() is not None for ref in kept):
        gc.collect()
        assert time.monotonic() < deadline, "the state is still held"
        time.sleep(0.01)
    assert pending.done()


def test_without_room_on_the_device_it_is_copied_to_the_host(
    accelerator: None, writing: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(x: Any) -> Any:
        raise MemoryError("out of memory")

    monkeypatch.setattr(jax_adapter, "_clone", full)
    state = jnp.arange(100_000.0)
    pending = unickpt.save_async(tmp_path / "c", state, options=SaveOptions(staging="device"))
    state.delete()
    writing.opened.set()
    assert pending.result(30).staged_bytes == 400_000
    assert (unickpt.load(tmp_path / "c") == np.arange(100_000)).all()


# --- lazily --------------------------------------------------------------------------------------


def test_lazily_copied_tensors_may_change_after_the_fence(writing: Gate, tmp_path: Path) -> None:
    tree = {"w": torch.arange(500_000.0), "n": np.arange(300_000)}
    pending = unickpt.save_async(tmp_path / "c", tree, options=LAZY)
    pending.wait_staged()
    overwrite(tree)
    writing.opened.set()
    pending.result(30)
    found = unickpt.load(tmp_path / "c")
    assert (found["w"] == np.arange(500_000)).all()
    assert (found["n"] == np.arange(300_000)).all()


def save_lazily(path: Path, tree: dict[str, torch.Tensor]) -> PendingSave:
    """As if an optimizer owned all tensors, whose steps would wait."""
    owners: set[Hashable] = {tensor.untyped_storage()._cdata for tensor in tree.values()}
    return saver.begin(SaveRequest(path, tree, LAZY, owners=owners))


@pytest.mark.parametrize("ask", ["wait_staged", "result"])
def test_a_tensor_that_changes_before_the_fence_is_an_error(
    ask: str, copying: Gate, tmp_path: Path
) -> None:
    tree = {"same": torch.ones(500_000), "w": torch.arange(500_000.0)}
    pending = save_lazily(tmp_path / "c", tree)
    tree["w"] += 1
    copying.opened.set()
    with pytest.raises(StateChanged, match=r"'w' was changed .*optimizers=.*staging=\"copy\""):
        getattr(pending, ask)(30)
    with pytest.raises(StateChanged):
        pending.result(30)
    with pytest.raises(CheckpointNotFound):
        unickpt.open(tmp_path / "c")


def test_a_change_is_found_even_if_nobody_waits_at_the_fence(writing: Gate, tmp_path: Path) -> None:
    """Whether it came before or after the copy depends on luck, which no loop should rely on."""
    tree = {"w": torch.arange(500_000.0)}
    pending = save_lazily(tmp_path / "c", tree)
    assert writing.reached.wait(30)
    tree["w"] += 1
    writing.opened.set()
    with pytest.raises(StateChanged):
        pending.result(30)


def test_what_would_change_without_a_trace_is_never_lazy(copying: Gate, tmp_path: Path) -> None:
    norm = torch.nn.BatchNorm1d(400)
    array, generator = np.zeros(300_000), torch.get_rng_state()
    weight = torch.nn.Parameter(torch.zeros(20_000, 64))
    optimizer = torch.optim.SGD([weight], lr=1, fused=True)
    tree = {"norm": norm, "numpy": array, "rng": generator, "weight": weight}
    before = {k: v.clone() for k, v in norm.state_dict().items()}
    pending = unickpt.save_async(tmp_path / "c", tree, options=LAZY)
    norm(torch.randn(8, 400))
    array += 1
    weight.grad = torch.zeros_like(weight)
    weight.grad[77] = 1
    optimizer.step()
    weight.data[99] += 1
    assert not torch.equal(norm.state_dict()["running_mean"], before["running_mean"])
    copying.opened.set()
    pending.result(30)
    found = unickpt.load(tmp_path / "c")
    assert all(np.array_equal(found["norm"][k], v.numpy()) for k, v in before.items())
    assert not found["numpy"].any()
    assert not found["weight"].any()


@pytest.fixture
def lonely() -> Iterator[Any]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["data", "dtensor"])
@pytest.mark.parametrize("back", [False, True])
def test_a_change_without_a_trace_is_found(
    back: bool, kind: str, lonely: Any, copying: Gate, tmp_path: Path
) -> None:
    """As weights that are clipped, or swapped for their average while the model is evaluated."""
    start = torch.arange(1_200_000.0).reshape(1200, 1000)
    weight = distribute_tensor(start, lonely, [Shard(0)]) if kind == "dtensor" else start
    param = torch.nn.Parameter(weight)
    optimizer = torch.optim.SGD([param], lr=0.1)
    with unickpt.Checkpointer(tmp_path, optimizers=[optimizer], options=LAZY) as checkpointer:
        pending = checkpointer.save(1, {"w": param})
        assert copying.reached.wait(30)
        version, old = param._version, param.detach().clone()
        param.data.mul_(2)
        assert param._version == version
        if back:
            copying.opened.set()
            deadline = time.monotonic() + 30
            while pending._snapshot.chunks.error is None and time.monotonic() < deadline:
                time.sleep(0.001)
            param.data.copy_(old)
        copying.opened.set()
        with pytest.raises(StateChanged, match="'w'"):
            pending.result(30)
        param.data.copy_(old)
        checkpointer.save(2, {"w": param}, wait=True)
        assert checkpointer.steps() == [2]
        found = checkpointer.load({"w": torch.zeros(1200, 1000)})["w"]
        assert torch.equal(found, start)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "foreach", "fused"])
def test_an_optimizers_step_waits_at_the_fence(
    kind: str, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(600, 700), torch.nn.BatchNorm1d(700))
    ema = {k: v.clone() for k, v in model.state_dict().items()}
    arguments = {"foreach": {"foreach": True}, "fused": {"fused": True}}.get(kind, {})
    make = torch.optim.SGD if kind == "SGD" else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=0.1, **arguments)

    def train() -> None:
        model(torch.randn(4, 600)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, value in model.state_dict().items():
            ema[name].copy_(value)

    train()
    tree = {"model": model, "optimizer": optimizer, "ema": ema}
    unickpt.save(tmp_path / "expected", tree)
    lazily, real = [], host_memory.stage

    def slow(fragment: Any, box: Any, *rest: Any, **named: Any) -> Any:
        if threading.current_thread().name.startswith("unickpt stage"):
            time.sleep(0.1)
            lazily.append(box.shape)
        return real(fragment, box, *rest, **named)

    monkeypatch.setattr(snapshot, "stage", slow)
    with unickpt.Checkpointer(
        tmp_path / "run", optimizers=[optimizer], options=LAZY
    ) as checkpointer:
        pending = checkpointer.save(1, tree)
        train()
        train()
        assert pending.result(30).staged_bytes > 0
        assert (700, 600) in lazily, "the parameters were not copied lazily"
        assert same(contents(checkpointer.path(1)), contents(tmp_path / "expected"))
        count = len(optimizer._optimizer_step_pre_hooks)
    assert len(optimizer._optimizer_step_pre_hooks) == count - 1, "the hook is left"


# --- errors --------------------------------------------------------------------------------------


def failing(queue: SaveQueue, path: Path, when: threading.Event | None = None) -> Any:
    def fail(attempt: str) -> None:
        assert when is None or when.wait(30)
        raise StorageError("the disk is on fire")

    callbacks = SaveCallbacks(prepare=fail)
    return queue.save(SaveRequest(path, {"w": np.ones(3)}, COPY, callbacks=callbacks))


def good(queue: SaveQueue, path: Path) -> Any:
    return queue.save(SaveRequest(path, {"w": np.ones(3)}, COPY))


def test_an_error_in_the_background_is_raised_by_result_each_time(tmp_path: Path) -> None:
    queue = SaveQueue()
    pending = failing(queue, tmp_path / "a")
    for _ in range(2):
        with pytest.raises(StorageError, match="on fire") as caught:
            pending.result(30)
        assert any("a/ failed with this" in note for note in caught.value.__notes__)
    good(queue, tmp_path / "b").result(30)


def test_an_error_in_the_background_is_raised_by_the_next_save_once(tmp_path: Path) -> None:
    queue = SaveQueue()
    failing(queue, tmp_path / "a")
    queue.wait()
    with pytest.raises(StorageError, match="on fire"):
        good(queue, tmp_path / "b")
    assert not (tmp_path / "b").exists(), "the save that raised has begun"
    good(queue, tmp_path / "b").result(30)
    queue.errors.raise_first()


def test_several_errors_are_raised_as_one(tmp_path: Path) -> None:
    queue, both = SaveQueue(), threading.Event()
    pending = [failing(queue, tmp_path / name, both) for name in ("a", "b")]
    both.set()
    queue.wait()
    with pytest.raises(StorageError) as caught:
        good(queue, tmp_path / "c")
    assert any("b/ failed too" in note for note in caught.value.__notes__)
    queue.errors.raise_first()
    for one in pending:
        with pytest.raises(StorageError):
            one.result()


def test_an_error_is_raised_although_a_handler_of_logging_fails(tmp_path: Path) -> None:
    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("no place to log to")

    handler, queue = Failing(), SaveQueue()
    logging.getLogger("unickpt").addHandler(handler)
    try:
        with pytest.raises(StorageError, match="on fire"):
            failing(queue, tmp_path / "a").result(30)
    finally:
        logging.getLogger("unickpt").removeHandler(handler)
    queue.errors.raise_first()


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_call_that_is_interrupted_leaves_no_thread_and_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    """While its thread starts, which may have begun or not."""
    begin, queue = PendingSave._begin, SaveQueue()

    def interrupted(pending: PendingSave) -> None:
        if has_begun:
            begin(pending)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PendingSave, "_begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            good(queue, tmp_path / "a")
    assert good(queue, tmp_path / "b").result(5).arrays == 1
    names = [thread.name for thread in threading.enumerate()]
    assert not any(str(tmp_path / "a") in name for name in names)
    assert not (tmp_path / "a").exists()
    queue.errors.raise_first()


def test_a_handler_of_a_signal_that_interrupts_a_save_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called on the same thread while it stages, it would wait for itself."""
    stage, queue, refused = snapshot.Snapshot.stage_now, SaveQueue(), list[str]()

    def handle() -> None:
        calls = queue.check_process, queue.wait, lambda: good(queue, tmp_path / "b")
        for function in calls:
            with pytest.raises(SaveConflict, match="within this save") as raised:
                function()
            refused.append(str(raised.value))
        unickpt.save(tmp_path / "c", {"w": np.ones(3)})  # as this does not wait

    def interrupted(self: Any) -> None:
        handle()
        stage(self)

    with monkeypatch.context() as patch:
        patch.setattr(snapshot.Snapshot, "stage_now", interrupted)
        pending = good(queue, tmp_path / "a")
    assert pending.result(5).arrays == 1
    assert len(refused) == 3
    assert good(queue, tmp_path / "b").result(5).arrays == 1


def test_a_progress_function_that_waits_for_its_save_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue, returned = SaveQueue(), threading.Event()

    def progress(done: int, total: int) -> None:
        assert returned.wait(5)
        queue.wait()

    options = SaveOptions(fsync=False, staging="copy", progress=progress)
    pending = queue.save(SaveRequest(tmp_path / "a", {"w": np.ones(3)}, options))
    returned.set()
    assert pending.result(5).arrays == 1
    assert "such as progress=, neither save nor wait" in caplog.text


def test_a_bad_leaf_is_found_by_the_call(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeaf, match="'bad'"):
        unickpt.save_async(tmp_path / "c", {"good": np.ones(3), "bad": object()})
    assert not (tmp_path / "c").exists()
    unickpt.save_async(tmp_path / "c", {"good": np.ones(3)}).result(30)


def test_a_place_that_is_taken_is_found_by_the_call(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"w": np.ones(3)})
    with pytest.raises(CheckpointExists, match="overwrite=True"):
        unickpt.save_async(tmp_path / "c", {"w": np.zeros(3)})
    unickpt.save_async(tmp_path / "c", {"w": np.zeros(3)}, overwrite=True).result(30)
    assert not unickpt.load(tmp_path / "c")["w"].any()


def test_two_saves_to_one_place_are_one_checkpoint_and_an_error(
    writing: Gate, tmp_path: Path
) -> None:
    first = unickpt.save_async(tmp_path / "c", {"w": np.ones(3)})
    second = unickpt.save_async(tmp_path / "c", {"w": np.zeros(3)})
    writing.opened.set()
    first.result(30)
    with pytest.raises(CheckpointExists):
        second.result(30)
    assert unickpt.load(tmp_path / "c")["w"].all()


def test_an_error_while_staging_reaches_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **named: Any) -> Any:
        raise MemoryError("no more memory")

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "stage", fail)
        with pytest.raises(
            unickpt.errors.OutOfMemory, match="/c: out of memory: no more"
        ) as caught:
            unickpt.save_async(tmp_path / "c", {"w": np.ones(100_000)})
    assert any("'w'" in note for note in caught.value.__notes__)
    unickpt.save_async(tmp_path / "c", {"w": np.ones(100_000)}).result(30)


def test_waiting_may_take_too_long(writing: Gate, tmp_path: Path) -> None:
    pending = unickpt.save_async(tmp_path / "c", {"w": np.ones(3)})
    with pytest.raises(SaveTimeout, match=r"not committed within 0\.01 s; it continues"):
        pending.result(0.01)
    assert not pending.done()
    writing.opened.set()
    assert pending.result(30).arrays == 1
    assert pending.done()


def test_not_staged_in_time(copying: Gate, tmp_path: Path) -> None:
    pending = save_lazily(tmp_path / "c", {"w": torch.ones(MIB)})
    with pytest.raises(TimeoutError, match="not staged within"):
        pending.wait_staged(0.01)
    copying.opened.set()
    pending.wait_staged(30)
    pending.result(30)


def test_a_save_that_fails_gives_all_memory_back(tmp_path: Path) -> None:
    queue = SaveQueue()
    (tmp_path / "file").write_text("no folder")
    tree = {f"w{i}": np.ones(MIB) for i in range(4)}
    options = SaveOptions(budget_bytes=10 * MIB, staging="copy")
    for _ in range(3):

        def fail(attempt: str) -> None:
            raise StorageError("no")

        callbacks = SaveCallbacks(prepare=fail)
        pending = queue.save(SaveRequest(tmp_path / "c", tree, options, callbacks=callbacks))
        with pytest.raises(StorageError):
            pending.result(30)
        assert queue._area._held == 0
    queue.save(SaveRequest(tmp_path / "c", tree, options)).result(30)
    assert same(unickpt.load(tmp_path / "c"), tree)


# --- order ---------------------------------------------------------------------------------------


def test_saves_are_ordered_and_a_third_one_waits(writing: Gate, tmp_path: Path) -> None:
    pending = [unickpt.save_async(tmp_path / str(i), numbers(i)) for i in range(2)]
    third: list[Any] = []
    thread = threading.Thread(
        target=lambda: third.append(unickpt.save_async(tmp_path / "2", numbers(2)))
    )
    thread.start()
    time.sleep(0.2)
    assert not third, "three saves are in flight"
    assert not any(p.done() for p in pending)
    writing.opened.set()
    thread.join(30)
    ended = third[0].result(30)
    assert all(p.done() for p in pending), "a newer save was faster"
    assert ended.phases["queue"] >= 0
    for i in range(3):
        assert same(unickpt.load(tmp_path / str(i)), numbers(i))


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_the_training_has_the_processors_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = DataFile.add

    def look(self: DataFile, *arguments: Any) -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        real(self, *arguments)

    monkeypatch.setattr(DataFile, "add", look)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    tree = {"w": np.ones(MIB)}
    unickpt.save_async(tmp_path / "behind", tree, options=COPY).result(30)
    assert set(seen) == {min(before + 10, 19)}, "also for a program that runs under `nice`"
    seen.clear()
    unickpt.save(tmp_path / "waited", tree)
    assert set(seen) == {before}


def test_who_waits_at_the_fence_is_not_kept_by_a_thread_that_has_stepped_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk is copied only when all others were: threads of the caller help."""
    real, first = snapshot.stage, threading.Lock()
    others, priorities = threading.Semaphore(0), list[int]()

    def stage(*arguments: Any, **named: Any) -> Any:
        if first.acquire(blocking=False):
            for _ in range(15):
                assert others.acquire(timeout=30)
        else:
            tid = threading.get_native_id()
            priorities.append(os.getpriority(os.PRIO_PROCESS, tid))
            others.release()
        return real(*arguments, **named)

    monkeypatch.setattr(snapshot, "stage", stage)
    tensor = torch.arange(4.0 * MIB).reshape(16, MIB // 4)
    options = SaveOptions(staging="lazy", fsync=False, chunk_bytes=MIB)
    pending = unickpt.save_async(tmp_path / "c", {"w": tensor}, options=options)
    pending.wait_staged(timeout=60)
    if sys.platform == "linux":
        assert os.getpriority(os.PRIO_PROCESS, 0) in priorities
    kept = tensor.clone()
    tensor.zero_()
    pending.result()
    assert np.array_equal(unickpt.load(tmp_path / "c")["w"], kept.numpy())


def test_metrics_are_told_and_may_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[unickpt.types.SaveReport] = []

    def tell(report: unickpt.types.SaveReport) -> None:
        told.append(report)
        raise RuntimeError("the dashboard is down")

    with caplog.at_level("INFO", logger="unickpt"):
        options = SaveOptions(metrics=tell, fsync=False)
        report = unickpt.save_async(tmp_path / "c", numbers(1), options=options).result(30)
    assert told == [report]
    assert report.writers[0]["bytes"] == report.written_bytes
    assert report.writers[0]["staged_bytes"] == report.staged_bytes > 0
    assert report.writers[0]["chunks"] == report.chunks
    assert "the dashboard is down" in caplog.text
    assert "saved file://" in caplog.text


# --- metrics that save and wait ------------------------------------------------------------------


class Telling:
    """A function for `SaveOptions.metrics`, and what it did and raised, save by save."""

    def __init__(self, work: Callable[[unickpt.types.SaveReport], object]) -> None:
        self._work = work
        self.urls: list[str] = []
        self.errors: list[BaseException | None] = []

    def __call__(self, report: unickpt.types.SaveReport) -> None:
        error: BaseException | None = None
        try:
            self._work(report)
        except BaseException as raised:
            error = raised
        self.urls.append(report.url.rstrip("/").rpartition("_")[2])
        self.errors.append(error)
        if error is not None:
            raise error


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What some work returns, unless it hangs."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    return found[0]


def test_metrics_may_wait_for_their_own_save(tmp_path: Path) -> None:
    pending: list[unickpt.types.PendingSave] = []
    begun = threading.Event()

    def look(report: unickpt.types.SaveReport) -> None:
        assert begun.wait(30)
        pending[0].wait_staged()
        assert pending[0].done()
        assert pending[0].result() is report

    telling = Telling(look)
    options = SaveOptions(metrics=telling, fsync=False)
    pending.append(unickpt.save_async(tmp_path / "c_1", numbers(1), options=options))
    begun.set()
    within(60, pending[0].result)
    assert telling.errors == [None]


def test_who_waits_for_a_save_waits_for_its_metrics(tmp_path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def stop(report: unickpt.types.SaveReport) -> None:
        reached.set()
        assert go_on.wait(30)

    queue, options = SaveQueue(), SaveOptions(metrics=stop, fsync=False)
    first = queue.save(SaveRequest(tmp_path / "1", numbers(1), options))
    assert reached.wait(30)
    assert not first.done()
    with pytest.raises(unickpt.errors.SaveTimeout):
        first.result(0.01)
    good(queue, tmp_path / "2")
    second = queue._pending[-1]
    ended = second._events.wait(SaveEvent.ENDED, 30)
    assert ended, "a save waits for the metrics of the one before it"
    good(queue, tmp_path / "3")  # though two are told of yet
    assert not second.done(), "reports come one after another"
    go_on.set()
    queue.wait()
    assert first.done()
    assert second.done()


@pytest.mark.parametrize("verb", ["save", "wait", "close", "load", "delete", "unickpt.save"])
def test_metrics_may_use_the_checkpointer(verb: str, tmp_path: Path) -> None:
    """While the loop has as many saves in flight as there may be, and then waits for them."""

    def work(report: unickpt.types.SaveReport) -> None:
        step = int(report.url.rstrip("/").rpartition("_")[2])
        if verb == "save":
            if step < 1000:
                last = checkpointer.latest() or 0
                checkpointer.save(1000 + last, {"w": 1}, overwrite=True).wait_staged()
        elif verb == "load":
            assert checkpointer.load(step=step)["step"] == step
        elif verb == "delete":
            if step == 0:
                checkpointer.delete(step)
        elif verb == "unickpt.save":
            options = SaveOptions(metrics=lambda _: checkpointer.wait(), fsync=False)
            unickpt.save(tmp_path / f"best_{step}", {"w": 1}, options=options)
        else:
            getattr(checkpointer, verb)()

    telling = Telling(work)
    options = SaveOptions(metrics=telling, fsync=False)
    checkpointer = unickpt.Checkpointer(tmp_path / "run", options=options)

    def loop() -> list[int]:
        saved = []
        for step in range(6):
            try:
                checkpointer.save(step, {"w": np.ones(9), "step": step})
                saved.append(step)
            except unickpt.errors.LaterStepsExist:
                assert verb == "save"
            except ValueError:
                assert verb == "close"
        checkpointer.close()
        return saved

    saved = within(60, loop)
    assert len(saved) > 0
    assert [url for url in telling.urls if int(url) < 1000] == [str(step) for step in saved]
    assert [
        e for e in telling.errors if not isinstance(e, unickpt.errors.LaterStepsExist | None)
    ] == []


def test_metrics_that_raise_anything_hold_up_nothing(tmp_path: Path) -> None:
    def leave(report: unickpt.types.SaveReport) -> None:
        raise SystemExit(3)

    options = SaveOptions(metrics=Telling(leave), fsync=False)
    with unickpt.Checkpointer(tmp_path, options=options) as checkpointer:
        pending = [checkpointer.save(step, {"w": 1}) for step in range(4)]
        for one in pending:
            assert within(60, one.result).arrays == 0
        assert checkpointer.steps() == [0, 1, 2, 3]


def test_the_program_waits_for_metrics(processes: Processes, tmp_path: Path) -> None:
    source = (
        "import sys, time, unickpt\n"
        "def tell(report):\n"
        "    time.sleep(0.3)\n"
        "    print('told', pending.result().url == report.url, flush=True)\n"
        "options = unickpt.SaveOptions(metrics=tell, fsync=False)\n"
        "pending = unickpt.save_async(sys.argv[1], {'w': 1}, options=options)\n"
    )
    assert processes.finish([processes.start(source, tmp_path / "c")]) == ["told True\n"]


def test_metrics_of_a_save_that_is_waited_for(tmp_path: Path) -> None:
    def again(report: unickpt.types.SaveReport) -> None:
        if not (tmp_path / "b").exists():
            unickpt.save_async(tmp_path / "b", unickpt.load(report.url)).result()

    telling = Telling(again)
    options = SaveOptions(metrics=telling, fsync=False)
    within(60, lambda: unickpt.save(tmp_path / "a", {"w": 1}, options=options))
    assert telling.errors == [None]
    assert unickpt.load(tmp_path / "b") == {"w": 1}


def test_an_unknown_staging_is_refused() -> None:
    with pytest.raises(ValueError, match=r"staging 'pinned' is not one of auto, copy"):
        SaveOptions(staging="pinned")  # type: ignore[arg-type]


def test_optimizer_owners_are_storages() -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    fence = torch_adapter.fence(optimizer, lambda: None)
    assert fence is not None
    assert len(fence.owners()) == 2 * (1 + 3)  # parameters, moments and counters
    fence.remove()
    assert torch_adapter.fence(model, lambda: None) is None


def test_memory_of_a_save_that_fails_while_it_is_staged_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device: a clone is copied in the background, and meanwhile a change is found."""
    changing, behind = torch.zeros(1 << 19), torch.ones(1 << 19)
    began, may_end = threading.Event(), threading.Event()
    decide, stage, areas = SnapshotPolicy._decide, snapshot.stage, set[Any]()

    def decided(self: Any, fragment: Any, dtype: Any) -> Any:
        method, kept = decide(self, fragment, dtype)
        whole = kept.read(kept.box, lambda: np.empty(kept.box.shape, dtype))
        return (SnapshotMethod.CLONE if whole[0] == 1 else method), kept

    def staged(fragment: Any, box: Any, *arguments: Any, **named: Any) -> Any:
        if fragment.read(box, lambda: np.empty(box.shape, np.float32))[0] == 1:
            began.set()
            assert may_end.wait(30)
        return stage(fragment, box, *arguments, **named)

    def keeping_area(self: Any, job: Any, tree: Any, area: Any, *others: Any) -> None:
        areas.add(area)
        init(self, job, tree, area, *others)

    init = snapshot.Snapshot.__init__
    monkeypatch.setattr(SnapshotPolicy, "_decide", decided)
    monkeypatch.setattr(snapshot, "stage", staged)
    monkeypatch.setattr(snapshot.Snapshot, "__init__", keeping_area)
    pending = save_lazily(tmp_path / "c", {"a": changing, "b": behind})
    assert began.wait(30)
    changing.add_(1)
    with pytest.raises(unickpt.errors.StateChanged):
        pending.wait_staged()
    threading.Timer(0.3, may_end.set).start()  # the writer has noticed by then
    with pytest.raises(unickpt.errors.StateChanged):
        pending.result(30)
    for thread in threading.enumerate():
        if thread.name.startswith("unickpt stage"):
            thread.join(30)
    (area,) = areas
    assert area._held == 0


def test_a_function_is_called_when_a_save_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[bool] = []
    pending = unickpt.save_async("memory://async/done", {"w": np.ones(3)})
    called = threading.Event()

    def look() -> None:
        seen.append(pending.done())
        called.set()

    pending.add_done_callback(look)
    pending.add_done_callback(lambda: 1 / 0)
    assert called.wait(60)
    pending.result()
    pending.add_done_callback(look)  # at once
    assert seen == [True, True]
    while "division by zero" not in caplog.text:
        time.sleep(0.01)
