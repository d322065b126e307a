"""DTensors, FSDP2 and both frameworks on a GPU; run where there is one: pytest -m gpu."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.processes import Processes

import unickpt
from unickpt import LoadOptions, SaveOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

# NCCL has one rank for each GPU; with gloo, several ranks share one.
DTENSORS = """
import sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
import unickpt

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cuda", (2,))
whole = torch.arange(7 * 10.0, device="cuda").reshape(7, 10)


def spread(full, placement):
    if isinstance(placement, Replicate):
        local = full.clone()
    else:
        parts = full.chunk(2, placement.dim)
        local = parts[rank].contiguous()
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=full.shape, stride=full.stride()
    )


placements = [Shard(0), Shard(1), Replicate()]
for staging in ("auto", "device", "copy"):
    path = f"{sys.argv[1]}/{staging}"
    state = {str(n): spread(whole + n, each) for n, each in enumerate(placements)}
    options = unickpt.SaveOptions(staging=staging, chunk_bytes=64, timeout_s=60)
    pending = unickpt.save_async(path, state, options=options)
    for tensor in state.values():
        tensor.to_local().zero_()
    pending.result()
    for turn in range(3):
        like = {str(n): spread(whole * 0, placements[(n + turn) % 3]) for n in range(3)}
        unickpt.load(path, like)
        for n in range(3):
            expected = spread(whole + n, placements[(n + turn) % 3]).to_local()
            assert like[str(n)].to_local().is_cuda
            assert torch.equal(like[str(n)].to_local(), expected), (staging, turn, n)
dist.barrier()
dist.destroy_process_group()
"""


def test_dtensors_of_two_ranks_on_one_gpu(processes: Processes, tmp_path: Path) -> None:
    processes.finish(processes.torch(2, DTENSORS, tmp_path))


FSDP2 = """
import sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import unickpt

dist.init_process_group("cpu:gloo,cuda:nccl")
torch.cuda.set_device(0)


def made(seed):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(300, 300) for _ in range(4)]
    model = torch.nn.Sequential(*layers).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def train(model, optimizer, steps):
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(8, 300, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


for staging in ("auto", "lazy", "device", "copy"):
    model, optimizer = made(1)
    train(model, optimizer, 3)
    options = unickpt.SaveOptions(staging=staging)
    path = f"{sys.argv[1]}/{staging}"
    with unickpt.Checkpointer(path, optimizers=[optimizer], options=options) as run:
        run.save(3, {"model": model, "optimizer": optimizer})
        expected = train(model, optimizer, 3)
    again, fresh = made(2)
    with unickpt.Checkpointer(path) as run:
        run.load({"model": again, "optimizer": fresh})
    assert train(again, fresh, 3) == expected, staging
dist.destroy_process_group()
"""


def test_fsdp2_goes_on_from_what_was_saved_behind_its_steps(
    processes: Processes, tmp_path: Path
) -> None:
    processes.finish(processes.torch(1, FSDP2, tmp_path))


def test_from_torch_to_jax_and_back_on_a_gpu(tmp_path: Path) -> None:
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("JAX sees no GPU (JAX_PLATFORMS=cuda,cpu shows both)")
    tensor = torch.randn(513, 700, device="cuda").bfloat16()
    unickpt.save(tmp_path / "torch", {"w": tensor})
    home = jax.sharding.SingleDeviceSharding(device)
    like = jax.ShapeDtypeStruct((513, 700), jnp.bfloat16, sharding=home)
    array = unickpt.load(tmp_path / "torch", {"w": like})["w"]
    assert array.devices() == {device}
    bits = tensor.cpu().view(torch.int16).numpy()
    assert np.array_equal(np.asarray(array).view(np.int16), bits)
    unickpt.save(tmp_path / "jax", {"w": array})
    back = torch.zeros(513, 700, device="cuda", dtype=torch.bfloat16)
    unickpt.load(tmp_path / "jax", {"w": back})
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("budget", [None, 1 << 20, 64 << 20])
def test_many_and_large_tensors_are_loaded_onto_a_gpu(budget: int | None, tmp_path: Path) -> None:
    """Together, in parts, after work that the device has not done yet, into memory of any kind."""
    kinds = [torch.float32, torch.bfloat16, torch.int8, torch.complex64, torch.float8_e4m3fn]
    state = {
        f"{n} {kind}": torch.full((n, 3), n % 7).to(kind) for n in range(300) for kind in kinds
    }
    state |= {"large": torch.randn(60_000, 1000), "turned": torch.randn(3000, 5000)}
    unickpt.save(tmp_path / "c", state, options=SaveOptions(fsync=False))
    like = {name: torch.ones_like(tensor, device="cuda") for name, tensor in state.items()}
    like["turned"] = torch.ones(5000, 3000, device="cuda").T
    like["2 torch.complex64"] = torch.ones(2, 3, dtype=torch.complex64, device="cuda").conj()
    with torch.inference_mode():
        like["3 torch.int8"] = torch.ones(3, 3, dtype=torch.int8, device="cuda")
    torch.cuda._sleep(200_000_000)
    for name in ("large", "5 torch.int8"):  # runs before the copies
        like[name].fill_(3)
    options = LoadOptions(budget_bytes=budget)
    _, report = unickpt.load(tmp_path / "c", like, return_report=True, options=options)
    assert report.read_bytes == sum(tensor.nbytes for tensor in state.values())
    with torch.cuda.stream(torch.cuda.Stream()):
        for name, tensor in state.items():
            loaded = like[name].resolve_conj().cpu().contiguous()
            assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8)), name


def test_tied_tensors_are_loaded_onto_a_gpu(tmp_path: Path) -> None:
    tied = torch.randn(2000, 1000)
    unickpt.save(tmp_path / "c", {"a": tied, "b": tied})
    memory = torch.zeros(2000, 1000, device="cuda")
    unickpt.load(tmp_path / "c", {"a": memory, "b": memory.detach()})
    assert torch.equal(memory.cpu(), tied)


def test_tensors_of_all_sizes_are_loaded_onto_a_gpu(tmp_path: Path) -> None:
    kinds = [torch.float32, torch.bfloat16, torch.uint8]
    sizes = [0, 1, 1000, (1 << 20) - 1, 1 << 20, 5 << 20, (256 << 20) + 7]
    state = {f"{n} {kind}": torch.arange(n, dtype=kind) for n in sizes for kind in kinds}
    unickpt.save(tmp_path / "c", state)
    like = {name: torch.ones_like(tensor, device="cuda") for name, tensor in state.items()}
    like["turned"] = torch.ones(3000, 2000, device="cuda").T
    unickpt.save(tmp_path / "turned", {"turned": torch.arange(6e6).reshape(2000, 3000)})
    other = torch.cuda.Stream()
    unickpt.load(tmp_path / "turned", {"turned": like["turned"]})
    with torch.cuda.stream(other):
        unickpt.load(tmp_path / "c", {name: like[name] for name in state})
    for name, tensor in state.items():  # on another stream than the load
        assert torch.equal(like[name].cpu(), tensor), name
    assert torch.equal(like["turned"].cpu(), torch.arange(6e6).reshape(2000, 3000))
