"""One run that moves from ZeRO 3 to FSDP2, to JAX, and back to ZeRO 2, without a conversion step:
`python -m support.deepspeed_chain ROLE FROM TO` is one part of it, and prints its losses."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import unickpt
from support.deepspeed_job import batches, engine_of, net, optimizer, train
from unickpt import Rules, SaveOptions

OPTIONS = SaveOptions(fsync=False, timeout_s=100)
TAG = "step"

# What optax.chain(clip, adamw) holds (left), and what FSDP2 has saved.
TO_JAX = Rules.parse("""
params/{p...} <-> model/{p...}
lift opt/1/0/mu/{p} <-> optim/state/{p}/exp_avg  for params/{p} <-> model/{p}
lift opt/1/0/nu/{p} <-> optim/state/{p}/exp_avg_sq  for params/{p} <-> model/{p}
lift opt/1/0/count as int32 <-> optim/state/{p}/step as float32  for params/{p} <-> model/{p}
drop <-> optim/param_groups/{g...}
""").inverse

# What JAX has saved (left), under the names of DeepSpeed's checkpoints.
TO_DEEPSPEED = Rules.parse("""
params/{p...} <-> fp32/{p...}
lift opt/1/0/mu/{p} <-> exp_avg/{p}  for params/{p} <-> fp32/{p}
lift opt/1/0/nu/{p} <-> exp_avg_sq/{p}  for params/{p} <-> fp32/{p}
lift opt/1/0/count as int32 <-> step/{p} as float32  for params/{p} <-> fp32/{p}
""")


def zero(stage: int, seed: int, **more: Any) -> Any:
    return engine_of(seed, zero_optimization={"stage": stage, "overlap_comm": False}, **more)


def zero3(_: Path, to: Path) -> list[float]:
    from unickpt.integrations.deepspeed import use_unickpt

    engine = zero(3, 0)
    checkpoints = use_unickpt(engine, options=OPTIONS)
    losses = train(engine, batches()[:2])
    engine.save_checkpoint(str(to), tag=TAG)
    checkpoints.wait()
    return losses


def fsdp2(of: Path, to: Path) -> list[float]:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from unickpt.adapters.torch import NamedOptimizer

    model = net(98)
    fully_shard(model)
    adam = optimizer(model)
    state = {"model": model, "optim": NamedOptimizer(adam, model)}
    unickpt.load(of / TAG, state, rules=Rules.preset("deepspeed"))
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for batch in batches()[2:4]:
        loss = model(batch.chunk(world)[rank])
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean / world))
    unickpt.save(to / TAG, state, options=OPTIONS)
    return losses


def in_jax(of: Path, to: Path) -> list[float]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    def linear(params: Any, name: str, x: Any) -> Any:
        bias = params.get(f"{name}.bias")
        out = x @ params[f"{name}.weight"].T
        return out if bias is None else out + bias

    def loss_of(params: Any, tokens: Any) -> Any:
        x = jax.nn.gelu(_norm(params, linear(params, "up", params["embed.weight"][tokens])), False)
        logits = linear(params, "head", linear(params, "down", x))
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    def _norm(params: Any, x: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        x = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)
        return x * params["norm.weight"] + params["norm.bias"]

    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("x", "y"))

    def spread(array: Any) -> Any:
        spec = P(*("x", "y")[2 - array.ndim :]) if array.ndim else P()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1))
    fresh = {name: jnp.asarray(p.detach().numpy()) for name, p in net(97).named_parameters()}
    like = {"params": fresh, "opt": adam.init(fresh)}
    state = unickpt.load(of / TAG, jax.tree.map(spread, like), rules=TO_JAX)

    @jax.jit
    def step(state: Any, tokens: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], tokens)
        updates, opt = adam.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    losses = []
    for batch in batches()[4:6]:
        state, loss = step(state, np.asarray(batch))
        losses.append(float(loss))
    unickpt.save(to / TAG, state, options=OPTIONS)
    return losses


def zero2(of: Path, _: Path) -> list[float]:
    from unickpt.integrations.deepspeed import use_unickpt

    engine = zero(2, 96)
    use_unickpt(engine, rules=TO_DEEPSPEED)
    engine.load_checkpoint(str(of), tag=TAG)
    return train(engine, batches()[6:])


def universal(of: Path, _: Path) -> list[float]:
    """DeepSpeed alone, from a folder that was made of what JAX has saved."""
    engine = zero(2, 95, checkpoint={"load_universal": True})
    engine.load_checkpoint(str(of))
    return train(engine, batches()[6:])


def uninterrupted(_: Path, __: Path) -> list[float]:
    return train(zero(3, 0), batches())


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    role, of, to = sys.argv[1:]
    if role == "fsdp2":
        torch.distributed.init_process_group("gloo")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for fact in ("RANK", "WORLD_SIZE"):  # without those of the node, DeepSpeed asks MPI, or waits
        os.environ.setdefault(f"LOCAL_{fact}", os.environ.get(fact, "0"))
    found = globals()[role](Path(of), Path(to))
    if os.environ.get("RANK", "0") == "0":
        print("losses", json.dumps(found), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0)  # threads of gloo may abort a process that ends in the usual way
