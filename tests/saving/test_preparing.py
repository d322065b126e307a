"""`Checkpointer.prepare`: what the first save would do before it writes, for nobody."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.processes import Processes
from support.recognised import note_recognised
from support.saving import in_job
from support.simulated import simulate_torch

import unickpt
from unickpt import Checkpointer, SaveOptions, UnsupportedLeaf
from unickpt.frameworks import host_memory

MIB = 1 << 20
OPTIONS = SaveOptions(fsync=False)


def tensors(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tree = {f"w{i}": torch.randn(MIB + 7 * i, generator=generator) for i in range(3)}
    return {**tree, "step": seed, "small": torch.full((5,), float(seed))}


def assert_saved(path: str, tree: dict[str, Any]) -> None:
    loaded = unickpt.load(path, {name: _like(leaf) for name, leaf in tree.items()})
    for name, leaf in tree.items():
        is_same = (
            torch.equal(loaded[name], leaf) if hasattr(leaf, "shape") else leaf == loaded[name]
        )
        assert is_same, name


def _like(leaf: Any) -> Any:
    return torch.zeros_like(leaf) if hasattr(leaf, "shape") else leaf


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the memory for copies, as it is taken from the system."""
    sizes, real = list[int](), host_memory._from_system

    def counted(nbytes: int) -> Any:
        sizes.append(nbytes)
        return real(nbytes)

    monkeypatch.setattr(host_memory, "_from_system", counted)
    return sizes


@pytest.mark.parametrize("is_prepared", [True, False])
def test_the_first_save_finds_its_memory_and_its_plan(
    is_prepared: bool, tmp_path: Path, allocated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    recognised = note_recognised(monkeypatch)
    tree = tensors(1)
    with Checkpointer(tmp_path / "run", options=OPTIONS) as run:
        if is_prepared:
            nbytes = run.prepare(tensors())
            assert nbytes == sum(leaf.nbytes for leaf in tree.values() if hasattr(leaf, "nbytes"))
            assert not (tmp_path / "run").exists()
            assert sum(allocated) >= 12 * MIB
            allocated.clear()
        run.save(1, tree).result(30)
        assert (allocated == []) == is_prepared
        assert recognised[-1] == is_prepared
        assert_saved(run.path(1), tree)


@pytest.mark.parametrize("budget_bytes", [1, 3 * MIB, 11 * MIB])
def test_it_takes_no_more_than_the_budget_and_waits_for_nobody(
    budget_bytes: int, tmp_path: Path
) -> None:
    options = SaveOptions(budget_bytes=budget_bytes, chunk_bytes=MIB, fsync=False)
    with Checkpointer(tmp_path, options=options) as run:
        assert run.prepare(tensors()) <= budget_bytes
        for step in range(3):
            tree = tensors(step)
            pending = run.save(step, {name: _copy(leaf) for name, leaf in tree.items()})
            run.prepare(tree)  # while it is written
            pending.result(30)
            assert_saved(run.path(step), tree)


def _copy(leaf: Any) -> Any:
    return leaf.clone() if hasattr(leaf, "shape") else leaf


def test_devices_copy_to_memory_that_they_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tensors(1)
    with pytest.MonkeyPatch.context() as patch:
        stream = simulate_torch(patch)
        with Checkpointer(tmp_path, options=OPTIONS) as run:
            assert run.prepare(tensors()) >= 12 * MIB
            assert stream.copies >= 3
            assert not stream.queue, "they have ended"
            run.save(1, tree).result(30)
    assert_saved(run.path(1), tree)


def test_with_optimizers_nothing_waits_for_it(tmp_path: Path) -> None:
    weights = [torch.nn.Parameter(torch.randn(2 * MIB)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    options = SaveOptions(staging="lazy", fsync=False)
    with Checkpointer(tmp_path, optimizers=[optimizer], options=options) as run:
        assert run.prepare({"w": weights}) == 16 * MIB
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        expected = [weight.detach().clone() for weight in weights]
        run.save(1, {"w": weights})
        optimizer.step()
    loaded = unickpt.load(run.path(1))["w"]
    assert all(np.array_equal(a, b) for a, b in zip(loaded, expected, strict=True))


@pytest.mark.plugins
def test_experts_do_not_miss_a_turn(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options=OPTIONS, partial={"ex/{x}": 1}, keep_last=None) as run:
        for step in range(4):
            tree = {"ex": [torch.full((MIB,), float(step)) for _ in range(2)]}
            assert run.prepare(tree) == 8 * MIB
            run.save(step, tree)
    stored = [[float(leaf[0]) for leaf in unickpt.load(run.path(step))["ex"]] for step in range(4)]
    assert stored == [[0, 0], [1, 0], [1, 2], [3, 2]]


def test_what_is_not_copied_needs_no_memory(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options=OPTIONS) as run:
        assert run.prepare({"w": jnp.arange(MIB)}) == 0
        run.save(1, {"w": jnp.arange(MIB)})
    assert np.array_equal(unickpt.load(run.path(1))["w"], np.arange(MIB))


def test_errors_leave_the_run_as_it_was(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run", options=OPTIONS) as run:
        with pytest.raises(UnsupportedLeaf, match="'f'"):
            run.prepare({"f": object()})
        assert not (tmp_path / "run").exists()
        run.save(1, tensors(1)).result(30)
        assert_saved(run.path(1), tensors(1))
    with pytest.raises(ValueError, match="is closed"):
        run.prepare(tensors())


def test_processes_prepare_together(tmp_path: Path) -> None:
    def work(group: Any) -> Sequence[int]:
        options = SaveOptions(group=group, fsync=False, timeout_s=20)
        with Checkpointer(tmp_path, options=options) as run:
            taken = [run.prepare(tensors())]
            for step in (1, 2):
                run.save(step, tensors(step))
                taken.append(run.prepare(tensors()))
        return taken

    for taken in in_job(3, work):
        assert len(taken) == 3, taken
    for step in (1, 2):
        assert_saved(str(tmp_path / f"step_{step}"), tensors(step))


RANK = """
import sys, torch, unickpt
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
whole = torch.arange(3 * (1 << 19) + 5, dtype=torch.float32)
tree = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "plain": torch.ones(1 << 20)}
with unickpt.Checkpointer(sys.argv[1]) as run:
    print("prepared", run.prepare(tree), flush=True)
    run.save(1, tree)
"""


@pytest.mark.integration
def test_ranks_prepare_together(processes: Processes, tmp_path: Path) -> None:
    texts = [process.communicate(timeout=60)[0] for process in processes.torch(3, RANK, tmp_path)]
    assert all("prepared" in text for text in texts), texts
    loaded = unickpt.load(tmp_path / "step_1")
    assert np.array_equal(loaded["w"], np.arange(3 * (1 << 19) + 5, dtype=np.float32))
    assert unickpt.verify(tmp_path / "step_1").ok
