"""Equinox with a `Checkpointer`."""

import equinox as eqx
import jax
import optax
import target

import unickpt
from unickpt.integrations import equinox as checkpoints

optimizer = optax.adam(0.01)


def begin():
    model = eqx.nn.MLP(4, 1, 32, 1, key=jax.random.key(0))
    slots = optimizer.init(eqx.filter(model, eqx.is_array))
    return {"model": model, "slots": slots, "step": jax.numpy.zeros((), int)}


@eqx.filter_jit
def update(state):
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), state["step"]), (16, 4))
    gradients = eqx.filter_grad(lambda f: (jax.vmap(f)(x) ** 2).mean())(state["model"])
    changes, slots = optimizer.update(gradients, state["slots"])
    model = eqx.apply_updates(state["model"], changes)
    return {"model": model, "slots": slots, "step": state["step"] + 1}


options = unickpt.SaveOptions(metrics=target.committed)
with unickpt.Checkpointer(target.FOLDER, keep_last=target.KEPT, options=options) as run:
    state = begin()
    if run.latest() is not None:
        state = checkpoints.load(run.path(run.latest()), eqx.filter_eval_shape(begin))
    target.resumed(int(state["step"]))
    while (step := int(state["step"])) < target.STEPS:
        state = update(state)
        run.save(step + 1, checkpoints.arrays(state), metadata=checkpoints.metadata(state))
leaves = jax.tree.leaves(eqx.filter(state, eqx.is_array))
target.ended({f"{n:03}": x for n, x in enumerate(leaves)})
