"""python examples/orbax_run.py runs/orbax 200

A JAX job with Orbax's own CheckpointManager; one argument differs. Started again, on any number of
processes (jax.distributed), it resumes, also from steps that Orbax's own handler saved."""

import sys

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from unickpt.integrations.orbax import registry

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
optimizer = optax.adam(0.01)


def initialize():
    params = {"w": jax.random.normal(jax.random.key(0), (64, 8)), "b": jnp.zeros((4, 8))}
    return params, optimizer.init(params)


@jax.jit
def train_step(state, x):
    loss_of = lambda p: jnp.square(jnp.sin(x) @ p["w"] + p["b"].sum(0)).mean()  # noqa: E731
    loss, gradients = jax.value_and_grad(loss_of)(state[0])
    updates, moments = optimizer.update(gradients, state[1])
    return (optax.apply_updates(state[0], updates), moments), loss


spec = lambda x: NamedSharding(mesh, PartitionSpec(*["data"][: x.ndim]))  # noqa: E731
state = jax.tree.map(lambda x: jax.device_put(x, spec(x)), initialize())
keep = ocp.CheckpointManagerOptions(max_to_keep=3)
with ocp.CheckpointManager(sys.argv[1], options=keep, handler_registry=registry()) as run:
    if run.latest_step() is not None:
        state = run.restore(None, args=ocp.args.StandardRestore(state))
    for step in range((run.latest_step() or 0) + 1, int(sys.argv[2]) + 1):
        state, loss = train_step(state, jax.random.normal(jax.random.key(step), (32, 64)))
        run.save(step, args=ocp.args.StandardSave(state))
        print(f"step {step} loss {float(loss):.6f}", flush=True)
