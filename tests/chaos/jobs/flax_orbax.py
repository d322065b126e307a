"""Flax NNX with Orbax's `CheckpointManager` and our handler."""

import jax
import optax
import orbax.checkpoint as ocp
import target
from flax import nnx

from unickpt.integrations.orbax import registry


def begin():
    rngs = nnx.Rngs(0)
    layers = nnx.Linear(4, 32, rngs=rngs), nnx.Dropout(0.2, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)
    model = nnx.Sequential(*layers)
    return model, nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)


@nnx.jit
def update(model, optimizer):
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), optimizer.step[...]), (16, 4))
    optimizer.update(model, nnx.grad(lambda f: (f(x) ** 2).mean())(model))


both = begin()
kept = ocp.CheckpointManagerOptions(max_to_keep=target.KEPT)
with ocp.CheckpointManager(target.FOLDER, options=kept, handler_registry=registry()) as run:
    first = run.latest_step() or 0
    if first:
        graph, state = nnx.split(both)
        both = nnx.merge(graph, run.restore(first, args=ocp.args.StandardRestore(state)))
    target.resumed(first)
    for step in range(first + 1, target.STEPS + 1):
        update(*both)
        run.save(step, args=ocp.args.StandardSave(nnx.state(both)))
        run.wait_until_finished()
        target.committed(step)
is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
leaves = jax.tree.leaves(nnx.state(both))
leaves = [jax.random.key_data(x) if is_key(x) else x for x in leaves]
target.ended({f"{n:03}": x for n, x in enumerate(leaves)})
