"""Asynchronous saves of an accelerator's memory; run where there is one: pytest -m gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.saving import same

import unickpt
from unickpt import Checkpointer, SaveOptions, StateChanged
from unickpt.frameworks.host_memory import HostBuffers

pytestmark = pytest.mark.gpu

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device for torch")


def accelerator() -> Any:
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("no accelerator for JAX")


@cuda
@pytest.mark.parametrize("mode", ["auto", "copy", "lazy", "device", "reference"])
def test_cuda_tensors_are_saved_as_they_were(mode: Any, tmp_path: Path) -> None:
    tree = {
        "w": torch.randn(3000, 2000, device="cuda"),
        "turned": torch.randn(900, 700, device="cuda").t(),
        "flags": torch.rand(2_000_000, device="cuda") > 0.5,
        "bfloat16": torch.randn(1000, 1000, device="cuda").bfloat16(),
        "count": torch.tensor(7, device="cuda"),
        "host": torch.randn(500, 500),
    }
    expected = {k: v.float().cpu().numpy().copy() for k, v in tree.items()}
    pending = unickpt.save_async(tmp_path / "c", tree, options=SaveOptions(staging=mode))
    pending.wait_staged()
    for tensor in tree.values():
        tensor.zero_()
    pending.result(60)
    found = unickpt.load(tmp_path / "c")
    assert same({k: v.astype(np.float32) for k, v in found.items()}, expected)


@cuda
def test_work_that_is_queued_behind_the_call_changes_nothing(tmp_path: Path) -> None:
    w = torch.zeros(4096, 4096, device="cuda")
    for _ in range(50):
        w = w @ w * 0 + 1
    pending = unickpt.save_async(tmp_path / "c", {"w": w}, options=SaveOptions(staging="device"))
    w.mul_(5)
    pending.result(60)
    assert (unickpt.load(tmp_path / "c")["w"] == 1).all()


@cuda
def test_a_cuda_tensor_that_changes_before_the_fence_is_an_error(tmp_path: Path) -> None:
    tree = {f"w{i}": torch.randn(8192, 4096, device="cuda") for i in range(8)}
    pending = unickpt.save_async(tmp_path / "c", tree, options=SaveOptions(staging="lazy"))
    tree["w7"].add_(1)
    with pytest.raises(StateChanged, match="'w7'"):
        pending.result(60)


@cuda
def test_an_optimizer_on_cuda_waits_at_the_fence(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2000, 3000), torch.nn.BatchNorm1d(3000)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def train() -> None:
        model(torch.randn(16, 2000, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    with Checkpointer(tmp_path, optimizers=[optimizer]) as checkpointer:
        for step in range(4):
            expected = {k: v.cpu().numpy().copy() for k, v in model.state_dict().items()}
            checkpointer.save(step, {"model": model, "optimizer": optimizer})
            train()
            checkpointer.wait()
            assert same(checkpointer.load(step=step)["model"], expected)


@cuda
def test_host_buffers_for_cuda_are_pinned() -> None:
    from unickpt.adapters.torch_cuda import pinned

    buffer = HostBuffers(64 << 20, pinned).take(8 << 20)
    assert torch.from_numpy(buffer).is_pinned()


@pytest.mark.parametrize("mode", ["auto", "copy", "device"])
def test_jax_arrays_on_an_accelerator_may_be_donated_at_once(mode: Any, tmp_path: Path) -> None:
    state = {"w": jnp.arange(3_000_000.0, device=accelerator()), "n": jnp.int32(3)}
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    pending = unickpt.save_async(tmp_path / "c", state, options=SaveOptions(staging=mode))
    for _ in range(3):
        state = step(state)
    pending.result(60)
    found = unickpt.load(tmp_path / "c")
    assert (found["w"] == np.arange(3_000_000, dtype=np.float32)).all()


@pytest.mark.parametrize("mode", ["reference", "lazy"])
def test_jax_arrays_on_an_accelerator_are_right_or_an_error(mode: Any, tmp_path: Path) -> None:
    step = jax.jit(lambda s: s * 0 - 1, donate_argnums=0)
    expected = np.arange(30_000_000, dtype=np.float32)
    for number, wait in enumerate([True, False, False, False]):
        state = jax.block_until_ready(jnp.arange(30_000_000.0, device=accelerator()))
        path = tmp_path / str(number)
        pending = unickpt.save_async(path, state, options=SaveOptions(staging=mode))
        if wait:
            pending.wait_staged()
        jax.block_until_ready(step(state))
        try:
            pending.result(60)
        except StateChanged:
            assert not wait
        else:
            assert (unickpt.load(path) == expected).all()
