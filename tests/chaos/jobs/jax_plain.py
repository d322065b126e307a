"""Plain JAX with a `Checkpointer`: one process, or several with sharded arrays."""

import jax
import jax.numpy as jnp
import target
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import unickpt

if target.WORLD > 1:
    import os

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(at, target.WORLD, target.RANK)
mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
split = NamedSharding(mesh, PartitionSpec("x"))


@jax.jit
def update(state, step):
    x = jax.random.normal(jax.random.key(step), (16, 64))
    gradients = jax.grad(lambda w: ((x @ w) ** 2).mean())(state["w"])
    slots = 0.9 * state["slots"] + gradients
    return {"w": state["w"] - 0.01 * slots, "slots": slots}


state = {"w": jax.random.normal(jax.random.key(0), (64, 8)), "slots": jnp.zeros((64, 8))}
state = jax.device_put(state, split)
options = unickpt.SaveOptions(metrics=target.committed)
with unickpt.Checkpointer(target.FOLDER, keep_last=target.KEPT, options=options) as run:
    if run.latest() is not None:
        state = run.load(state)
    target.resumed(run.loaded_step or 0)
    for step in range((run.loaded_step or 0) + 1, target.STEPS + 1):
        state = update(state, step)
        run.save(step, state)
target.ended(multihost_utils.process_allgather(state, tiled=True))
if target.WORLD > 1:
    target.leave()
