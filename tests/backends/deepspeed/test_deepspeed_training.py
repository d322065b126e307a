"""Training goes on in torch and JAX from DeepSpeed's folders, with the losses of DeepSpeed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import TESTS, deepspeed_cases, deepspeed_job, foreign
from support.processes import Processes

import unickpt
import unickpt.adapters.torch
from unickpt import Rules

pytestmark = pytest.mark.integration

torch = pytest.importorskip("torch")

# The case of deepspeed_job.py, whose extents a mesh of 2x4 devices divides: written by 4 ranks.
FOLDERS = ["global_step3", "global_step3_universal"]

ON_TWO_RANKS = """
import importlib
import sys
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
sys.path.insert(0, sys.argv[2])
from unickpt import Rules, load
from unickpt.adapters.torch import NamedOptimizer

case = importlib.import_module(f"support.{sys.argv[3]}")
dist.init_process_group("gloo")
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
model = case.net(9)
for layer in (model.up, model.down):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = case.optimizer(model)
tree = {"model": model, "optim": NamedOptimizer(optimizer, model)}
load(sys.argv[1], tree, rules=Rules.preset("deepspeed"))
losses = []
for batch in case.batches()[3:]:
    loss = model(batch[4 * dist.get_rank() :][:4])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as DeepSpeed does by default
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(float(mean / 2))
print("losses", losses)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepspeed_cases.unpack(tmp_path_factory.mktemp("deepspeed"))


def expected(cases: Path) -> Any:
    """The losses of steps 4 to 7 of a run of DeepSpeed that was not interrupted."""
    return json.loads((cases / "z3-losses" / "losses.json").read_text())[3:]


def test_plain_torch(cases: Path) -> None:
    model = deepspeed_cases.net()
    optimizer = deepspeed_cases.optimizer(model)
    tree = {"model": model, "optim": unickpt.adapters.torch.NamedOptimizer(optimizer, model)}
    unickpt.load(cases / "z3-losses" / "ckpt", tree, rules=Rules.preset("deepspeed"))
    losses = []
    for batch in deepspeed_cases.batches()[3:]:
        loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as DeepSpeed does by default
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses == pytest.approx(expected(cases), rel=2e-6)
    assert losses[0] - losses[-1] > 1e-3


def test_two_ranks_of_fsdp(cases: Path, processes: Processes) -> None:
    ranks = processes.torch(2, ON_TWO_RANKS, cases / "z3-losses" / "ckpt", TESTS, "deepspeed_cases")
    for output in processes.finish(ranks):
        losses = json.loads(output.split("losses")[1])
        assert losses == pytest.approx(expected(cases), rel=2e-6)


@pytest.mark.parametrize("folder", FOLDERS)
def test_two_ranks_of_fsdp_from_both_kinds_of_folders(
    folder: str, tmp_path: Path, processes: Processes
) -> None:
    path = foreign.unpacked("ds-losses", tmp_path) / folder
    ranks = processes.torch(2, ON_TWO_RANKS, path, TESTS, "deepspeed_job")
    for output in processes.finish(ranks):
        losses = json.loads(output.split("losses")[1])
        assert losses == pytest.approx(uninterrupted(), rel=2e-6)


def uninterrupted() -> Any:
    """The losses of steps 4 to 7 of the job that wrote `ds-losses`."""
    return json.loads((foreign.FOLDER / "ds-losses" / "losses.json").read_text())[3:]


# --- in JAX -------------------------------------------------------------------------------------

TO_JAX = """
fp32/embed.weight <-> params/embed/embedding
fp32/norm.weight <-> params/norm/scale
default fp32/{m...}.weight [o i] <-> params/{m...}/kernel [i o]
fp32/{m...}.bias <-> params/{m...}/bias
lift exp_avg/{p} <-> opt_state/1/0/mu/{p} law=gradient
lift exp_avg_sq/{p} <-> opt_state/1/0/nu/{p} law=square
lift step/{p} as float32 <-> opt_state/1/0/count as int32
"""


def jax_loss(params: Any, tokens: Any) -> Any:
    """As the model of deepspeed_job.py."""
    import jax
    import optax

    def dense(name: str, x: Any) -> Any:
        return x @ params[name]["kernel"] + params[name].get("bias", 0)

    x = jax.nn.gelu(norm(params["norm"], dense("up", params["embed"]["embedding"][tokens])), False)
    logits = dense("head", dense("down", x))
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def norm(params: Any, x: Any) -> Any:
    """torch's LayerNorm."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred / (variance + 1e-5) ** 0.5 * params["scale"] + params["bias"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_jax_mesh_of_2_by_4(folder: str, tmp_path: Path) -> None:
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    spec = jax.sharding.PartitionSpec
    automatic = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), automatic, devices=jax.devices()[:8])
    columns, rows, vector = spec("data", "model"), spec("model", "data"), spec("model")
    specs = {
        "embed": {"embedding": rows},
        "up": {"kernel": columns, "bias": vector},
        "norm": {"scale": vector, "bias": vector},
        "down": {"kernel": rows},
        "head": {"kernel": columns, "bias": vector},
    }
    v, e, h = deepspeed_job.VOCABULARY, deepspeed_job.WIDTH, deepspeed_job.HIDDEN
    shapes = {
        "embed": {"embedding": (v, e)},
        "up": {"kernel": (e, h), "bias": (h,)},
        "norm": {"scale": (h,), "bias": (h,)},
        "down": {"kernel": (h, e)},
        "head": {"kernel": (e, v), "bias": (v,)},
    }

    def leaf(shape: Any, spec: Any, dtype: Any = "float32") -> Any:
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    params = {m: {n: leaf(s, specs[m][n]) for n, s in of.items()} for m, of in shapes.items()}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1))
    state = optax.tree_map_params(
        optimizer,
        lambda slot, spec: leaf(slot.shape, spec),
        jax.eval_shape(optimizer.init, params),
        specs,
        transform_non_params=lambda count: leaf((), spec(), count.dtype),
    )
    like = {"params": params, "opt_state": state}
    path = foreign.unpacked("ds-losses", tmp_path) / folder
    loaded = unickpt.load(path, like, rules=Rules.parse(TO_JAX), strict=False)
    params, state = loaded["params"], loaded["opt_state"]
    assert {s.data.shape for s in state[1][0].mu["up"]["kernel"].addressable_shards} == {(4, 6)}

    @jax.jit
    def step(params: Any, state: Any, tokens: Any) -> Any:
        loss, gradients = jax.value_and_grad(jax_loss)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for batch in deepspeed_job.batches()[3:]:
        tokens = jax.device_put(batch.numpy(), jax.sharding.NamedSharding(mesh, spec("data")))
        params, state, loss = step(params, state, tokens)
        losses.append(float(loss))
    assert losses == pytest.approx(uninterrupted(), rel=2e-6)
    assert not loaded["params"]["up"]["kernel"].is_fully_replicated


# --- all stages ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", ["z0-fp32-dp2", "z1-elastic-dp2", "z3-fp32-dp2", "uc-z3-fp32-dp2", "z3-bf16-dp4"]
)
def test_one_preset_serves_all_stages(cases: Path, case: str) -> None:
    model = deepspeed_cases.net()
    optimizer = deepspeed_cases.optimizer(model)
    named = unickpt.adapters.torch.NamedOptimizer(optimizer, model)
    # Without ZeRO, DeepSpeed numbers the parameters as torch does.
    tree = {"model": model, "optim": optimizer if case.startswith("z0") else named}
    path = cases / case / "ckpt"
    unickpt.load(path, tree, rules=Rules.preset("deepspeed"), cast="bf16" in case)
    stored = unickpt.open(path)
    for name, value in model.state_dict().items():
        assert (value.numpy() == stored[f"fp32/{name}"][...]).all()
    number = 2 if case.startswith("z0") else "down.weight"
    state = optimizer.state[model.down.weight]
    assert (state["exp_avg"].numpy() == stored[f"exp_avg/{number}"][...]).all()
    assert (state["exp_avg_sq"].numpy() == stored[f"exp_avg_sq/{number}"][...]).all()
    assert state["step"] == 3
