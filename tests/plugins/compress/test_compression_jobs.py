"""`compression="auto"` in jobs of real ranks, of JAX, and in object storage."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import s3_server
from support.processes import Processes

import unickpt
from unickpt import SaveOptions

STATE = """
import sys
import numpy as np, torch, torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
import unickpt

def whole():
    torch.manual_seed(0)
    scales = torch.exp(torch.randn(512, 1) * 0.5 - 4)
    weights = (torch.randn(512, 640) * scales).bfloat16()
    noise = torch.randint(-(2**31), 2**31, (512, 256), dtype=torch.int32)
    half = noise.clone()
    half[:256] = 0  # what rank 0 of 2 holds shrinks, the rest does not
    return {"weights": weights, "noise": noise, "half": half, "moment": weights.float() ** 2}

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
path = sys.argv[1]
options = unickpt.SaveOptions(compression="auto", chunk_bytes=1 << 16, fsync=False)
"""

SAVE = (
    STATE
    + """
tree = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole().items()}
stage = {f"stage {rank}": whole()["weights"] + rank}  # only this rank has it
with unickpt.Checkpointer(path, options=options, reuse=True) as run:
    for step in range(3):
        with torch.no_grad():
            tree["moment"].to_local().mul_(2)
        run.save(step, {**tree, **stage, "step": step})
    run.wait()
dist.destroy_process_group()
"""
)

LOAD = (
    STATE
    + """
like = {
    name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(value.ndim - 1)])
    for name, value in whole().items()
}
like["stage 1"] = torch.zeros(512, 640, dtype=torch.bfloat16)
for exchange in (False, True):
    found = unickpt.load(
        path + "/step_2", like, unexpected="skip", options=unickpt.LoadOptions(exchange=exchange)
    )
    for name, value in whole().items():
        expected = value * 8 if name == "moment" else value
        expected = distribute_tensor(expected, mesh, [Shard(value.ndim - 1)]).to_local()
        ours = found[name].to_local().contiguous()
        assert torch.equal(ours.view(torch.uint8), expected.contiguous().view(torch.uint8)), name
    assert torch.equal(found["stage 1"], whole()["weights"] + 1)
dist.destroy_process_group()
"""
)


def test_ranks_save_and_other_ranks_load(processes: Processes, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "run"
    processes.finish(processes.torch(2, SAVE, path))
    for step in range(3):
        stored = unickpt.open(path / f"step_{step}")
        found = {name: bool(e.encoding) for name, e in stored.index.arrays.items()}
        assert found == {
            **dict.fromkeys(("weights", "half", "moment", "stage 0", "stage 1"), True),
            "noise": False,
        }
        assert unickpt.verify(path / f"step_{step}").ok
    processes.finish(processes.torch(3, LOAD, path))


def tree() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((256, 1024)) * np.exp(rng.normal(-4, 0.5, (256, 1)))
    return {
        "w": weights.astype(ml_dtypes.bfloat16),
        "noise": rng.integers(0, 256, (256, 1024), np.uint8),
        "zeros": np.zeros((256, 256), np.float32),
    }


def test_arrays_of_jax_on_eight_devices() -> None:
    jax = pytest.importorskip("jax")
    from jax.sharding import NamedSharding, PartitionSpec

    count = len(jax.devices())
    mesh = jax.make_mesh((count,), ("x",))
    rows, columns = (NamedSharding(mesh, PartitionSpec(*s)) for s in (("x",), (None, "x")))
    state = {name: jax.device_put(value, rows) for name, value in tree().items()}
    path = f"memory://compression/{secrets.token_hex(6)}"
    options = SaveOptions(compression="auto", chunk_bytes=1 << 15)
    report = unickpt.save_async(path, state, options=options).result()
    assert report.saved_bytes > 0.3 * report.bytes
    like = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=columns) for n, x in state.items()}
    found = unickpt.load(path, like)
    for name, value in tree().items():
        assert np.asarray(found[name]).tobytes() == value.tobytes(), name


def test_object_storage(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = f"compress-{secrets.token_hex(4)}"
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, bucket)
    for reuse in ("digest", "patch"):
        state, before = tree(), None
        for step in range(3):
            state = {name: value.copy() for name, value in state.items()}
            state["w"][step::64, 7] *= 2
            state["noise"][step, step] ^= 1
            path = f"s3://{bucket}/{reuse}/{step}"
            options = SaveOptions(
                compression="auto", chunk_bytes=1 << 16, base=before, reuse=reuse, kept_cost=0.0
            )
            report = unickpt.save(path, state, options=options)
            assert (len(report.bases) > 0) == (step > 0)
            found = unickpt.load(path)
            for name, value in state.items():
                assert found[name].tobytes() == value.tobytes(), (reuse, step, name)
            assert unickpt.verify(path).ok
            before = path
        arrays = unickpt.open(before).index.arrays
        assert {name: bool(entry.encoding) for name, entry in arrays.items()} == {
            "w": True,
            "noise": False,
            "zeros": True,
        }
