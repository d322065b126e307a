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
from unickpt import Checkpointer, SaveOptions
from unickpt.adapters import torch_digests
from unickpt.errors import StateChanged
from unickpt.frameworks.host_memory import HostBuffers
from unickpt.types import Box, LocalFragments

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
    optimizer = torch.optim.SGD(list(tree.values()))
    options = SaveOptions(staging="lazy")
    with Checkpointer(tmp_path, optimizers=[optimizer], options=options) as run:
        pending = run.save(0, tree)
        tree["w7"].add_(1)
        with pytest.raises(StateChanged, match="'w7'"):
            pending.result(60)


@cuda
@pytest.mark.parametrize("mode", ["auto", "lazy", "device", "copy"])
def test_a_fused_step_after_the_call_is_not_saved(mode: Any, tmp_path: Path) -> None:
    """No version counter shows it."""
    w = torch.nn.Parameter(torch.zeros(8192, 4096, device="cuda"))
    optimizer = torch.optim.SGD([w], lr=1, fused=True)
    w.grad = torch.ones_like(w)
    pending = unickpt.save_async(tmp_path / "c", {"w": w}, options=SaveOptions(staging=mode))
    optimizer.step()
    pending.result(60)
    assert not unickpt.load(tmp_path / "c")["w"].any()


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
def test_without_room_for_a_clone_it_is_copied_to_the_host(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.cuda.empty_cache()
    w = torch.arange(256 << 20, device="cuda", dtype=torch.float32)  # 1 GiB
    free, _ = torch.cuda.mem_get_info()
    filling = torch.empty(max(0, free - (512 << 20)), device="cuda", dtype=torch.uint8)
    pending = unickpt.save_async(tmp_path / "c", {"w": w}, options=SaveOptions(staging="device"))
    w.zero_()
    pending.result(120)
    del filling, w
    torch.cuda.empty_cache()
    assert "no room for a clone on the device" in caplog.text
    expected = np.arange(256 << 20, dtype=np.float32)
    assert (unickpt.load(tmp_path / "c")["w"] == expected).all()


@cuda
def test_what_did_not_change_on_a_gpu_is_neither_copied_nor_written(tmp_path: Path) -> None:
    frozen = {f"w{i}": torch.randn(1000, 1000, device="cuda") for i in range(8)}
    frozen["flags"] = torch.rand(1000, 1000, device="cuda") > 0.5
    adapter = torch.zeros(64, 1000, device="cuda")
    options = SaveOptions(changed="tracked", fsync=False)
    with Checkpointer(tmp_path, reuse=True, options=options) as run:
        for step in range(4):
            adapter.add_(1)
            if step == 3:
                frozen["w5"][7] += 1
            report = run.save(step, {"frozen": frozen, "adapter": adapter}).result()
            if step:
                changed = adapter.nbytes + (step == 3) * frozen["w5"].nbytes
                assert report.written_bytes <= changed
            found = unickpt.load(tmp_path / f"step_{step}")
            expected = {name: tensor.cpu().numpy() for name, tensor in frozen.items()}
            assert same(found["frozen"], expected)
            assert (found["adapter"] == step + 1).all()


@cuda
def test_a_fused_step_on_a_gpu_is_saved(tmp_path: Path) -> None:
    """As of an adapter beside frozen weights; no version counter shows it."""
    frozen = torch.randn(1000, 1000, device="cuda")
    adapter = torch.nn.Parameter(torch.zeros(64, 1000, device="cuda"))
    norm = torch.nn.BatchNorm1d(20_000).cuda()
    optimizer = torch.optim.AdamW([adapter], lr=0.1, fused=True)
    state = {"frozen": frozen, "adapter": adapter, "norm": norm}
    options = SaveOptions(changed="tracked", fsync=False)
    with Checkpointer(tmp_path, reuse=True, options=options) as run:
        for step in range(5):
            adapter.grad = torch.randn_like(adapter)
            optimizer.step()
            norm(torch.randn(16, 20_000, device="cuda"))
            report = run.save(step, state).result()
            assert not step or report.written_bytes < frozen.nbytes
            found = unickpt.load(tmp_path / f"step_{step}")
            assert same(found["adapter"], adapter.detach().cpu().numpy())
            assert same(found["frozen"], frozen.cpu().numpy())
            assert same(found["norm"]["running_mean"], norm.running_mean.cpu().numpy())


@cuda
def test_digests_on_a_gpu_are_those_on_the_host() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64):
        tensor = torch.randn(1001, 703).to(dtype)
        for part in (tensor, tensor.t(), tensor[1:, 3:], tensor[0, 0]):
            there = part.to("cuda")
            own = torch_digests.digest(there.clone(memory_format=torch.contiguous_format))
            expected = torch_digests.digest(part.clone(memory_format=torch.contiguous_format))
            assert torch.equal(own.cpu(), expected)
    tensor = torch.zeros(5 << 20, device="cuda")
    (token,) = torch_digests.tokens([tensor])
    tensor[77] = 1
    assert torch_digests.tokens([tensor]) != [token]


@cuda
def test_a_wrong_word_about_a_gpu_tensor_is_an_error(tmp_path: Path) -> None:
    state = {"w": torch.randn(300, 300, device="cuda")}
    unickpt.save(tmp_path / "0", state, options=SaveOptions(changed={"w": True}))
    state["w"].add_(1)
    told = SaveOptions(base=tmp_path / "0", changed={"w": False})
    with pytest.raises(StateChanged, match="'w'"):
        unickpt.save(tmp_path / "1", state, options=told)
    assert not (tmp_path / "1").exists()


@cuda
def test_host_buffers_for_cuda_are_pinned() -> None:
    from unickpt.adapters.torch_cuda import pinned

    buffer = HostBuffers(64 << 20, pinned).take(8 << 20)
    assert torch.from_numpy(buffer).is_pinned()


@pytest.mark.parametrize("mode", ["auto", "copy", "device"])
def test_jax_arrays_on_an_accelerator_may_be_donated_at_once(mode: Any, tmp_path: Path) -> None:
    device, large = accelerator(), 50_000_000
    state = {str(i): jnp.arange(large, device=device, dtype=jnp.float32) + i for i in range(8)}
    state |= {"n": jnp.int32(3), "flags": jnp.arange(3_000_000, device=device) % 3 == 0}
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    options = SaveOptions(staging=mode, chunk_bytes=8 << 20, budget_bytes=8 << 30)
    pending = unickpt.save_async(tmp_path / "c", state, options=options)
    for _ in range(3):
        state = step(state)
    pending.result(60)
    found = unickpt.load(tmp_path / "c")
    for i in range(8):
        assert (found[str(i)] == np.arange(large, dtype=np.float32) + np.float32(i)).all(), i
    assert (found["flags"] == (np.arange(3_000_000) % 3 == 0)).all()


def test_jax_arrays_without_room_in_page_locked_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unickpt.adapters import jax_transfer

    monkeypatch.setattr(jax_transfer, "_MOST_BYTES", 20 << 20)
    large, device = 30_000_000, accelerator()
    state = [jnp.arange(large, device=device, dtype=jnp.float32) + i for i in range(4)]
    state.append(jnp.ones(3_000_000, device=device))  # has room
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    pending = unickpt.save_async(tmp_path / "c", state, options=SaveOptions(chunk_bytes=8 << 20))
    step(state)
    pending.result(60)
    *found, ones = unickpt.load(tmp_path / "c")
    for i in range(4):
        assert (found[i] == np.arange(large, dtype=np.float32) + np.float32(i)).all(), i
    assert (ones == 1).all()
    assert jax_transfer._Arriving._bytes == 0


def of_jax() -> tuple[Any, Any]:
    state = {f"w{i}": jnp.full(4_000_000, float(i), device=accelerator()) for i in range(6)}
    step = jax.jit(lambda s: jax.tree.map(lambda x: x.at[::1000].add(1), s), donate_argnums=0)
    return state, step


def of_torch() -> tuple[Any, Any]:
    state = {f"w{i}": torch.full((4_000_000,), float(i), device="cuda") for i in range(6)}

    def step(state: Any) -> Any:
        for w in state.values():
            w[::1000] += 1
        return state

    return state, step


@pytest.mark.plugins
@pytest.mark.parametrize("made", [of_jax, pytest.param(of_torch, marks=cuda)])
@pytest.mark.parametrize("feature", ["budget", "tiers", "experts", "patches"])
@pytest.mark.parametrize("mode", ["auto", "copy", "lazy", "device"])
def test_what_changes_after_the_call_meets_other_features(
    mode: Any, feature: str, made: Any, tmp_path: Path
) -> None:
    small = {"budget_bytes": 24 << 20, "chunk_bytes": 4 << 20}
    options: dict[str, Any] = {"staging": mode, "fsync": False, "timeout_s": 60}
    arguments: dict[str, dict[str, Any]] = {
        "budget": {"options": SaveOptions(**small, **options)},
        "tiers": {"options": SaveOptions(**options), "local": tmp_path / "local"},
        "experts": {"options": SaveOptions(**options), "reuse": True},
        "patches": {"options": SaveOptions(**options), "reuse": "patch"},
    }
    if feature == "experts":
        arguments[feature]["experts"] = unickpt.Experts({"w{x}": 3})
    state, step = made()
    written = dict.fromkeys(state, 0)
    history = [{name: np.full(4_000_000, float(name[1:]), np.float32) for name in state}]
    with Checkpointer(tmp_path / "run", keep_last=None, **arguments[feature]) as run:
        for number in range(4):
            pending = run.save(number, state)
            if mode == "lazy":
                pending.wait_staged()
            state = step(state)  # JAX's arrays of the call are donated
            history.append({name: w.copy() for name, w in history[-1].items()})
            for w in history[-1].values():
                w[::1000] += 1
            pending.result(60)
            found = unickpt.load(run.path(number))
            if feature == "experts":
                said = unickpt.open(run.path(number)).metadata["unickpt"]["experts"]["steps"]
                written = {f"w{x}": at for x, at in said["w{x}"].items()}
            else:
                written = dict.fromkeys(state, number)
            assert same(found, {name: history[at][name] for name, at in written.items()}), number
    if feature == "experts":
        assert set(written.values()) == {2, 3}


@cuda
@pytest.mark.parametrize("mode", ["copy", "lazy"])
def test_what_is_freed_or_changed_while_a_gpu_copies_it(mode: Any, tmp_path: Path) -> None:
    other = torch.cuda.Stream()
    for number in range(3):
        with torch.cuda.stream(other):  # whose memory others of this stream get
            state = {str(i): torch.full((32 << 20,), float(i + number)) for i in range(8)}
            state = {name: tensor.cuda() for name, tensor in state.items()}
        torch.cuda.current_stream().wait_stream(other)
        path, options = tmp_path / str(number), SaveOptions(staging=mode, fsync=False)
        pending = unickpt.save_async(path, state, options=options)
        pending.wait_staged()
        for i in range(4):
            state[str(i)].fill_(-1)
        state.clear()
        with torch.cuda.stream(other):
            overwriting = [torch.full((32 << 20,), -2.0, device="cuda") for _ in range(12)]
        pending.result(60)
        del overwriting
        found = unickpt.load(path)
        assert all((found[str(i)] == i + number).all() for i in range(8))


@cuda
@pytest.mark.parametrize("mode", ["auto", "copy", "lazy", "device"])
def test_pieces_and_views_on_a_gpu(mode: Any, tmp_path: Path) -> None:
    numbers = torch.arange(4000 * 1000.0, device="cuda").reshape(4000, 1000)
    boxes = [Box((1000, 0), (4000, 1000)), Box((0, 0), (1000, 600)), Box((0, 600), (1000, 1000))]
    pieces = [(box, numbers[box.slices].clone()) for box in boxes]
    bytes_ = torch.arange(3 << 20, device="cuda").to(torch.uint8)
    state = {
        "pieces": LocalFragments((4000, 1000), pieces),
        "columns": numbers[:, 7:900],
        "flags": bytes_.view(torch.bool),
        "conjugated": torch.complex(numbers, -numbers).conj(),
    }
    options = SaveOptions(staging=mode, chunk_bytes=256 << 10, fsync=False)
    pending = unickpt.save_async(tmp_path / "c", state, options=options)
    pending.wait_staged()
    for _, piece in pieces:
        piece.zero_()
    bytes_.zero_()
    expected = numbers.cpu().numpy().copy()
    numbers.zero_()
    pending.result(60)
    found = unickpt.load(tmp_path / "c")
    assert np.array_equal(found["pieces"], expected)
    assert np.array_equal(found["columns"], expected[:, 7:900])
    assert np.array_equal(found["flags"], np.arange(3 << 20) % 256 != 0)
    assert np.array_equal(found["conjugated"].real, expected)
    assert np.array_equal(found["conjugated"].imag, expected)


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
