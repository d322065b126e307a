"""python examples/equinox_train.py runs/equinox 40

Killed at any moment and started again, also on other devices, it goes on where it was."""

import sys

import equinox as eqx
import jax
import optax

import unickpt
from unickpt.integrations import equinox as checkpoint

optimizer = optax.adam(0.01)


def begin():
    model = eqx.nn.MLP(4, 1, 32, 2, activation=jax.nn.tanh, key=jax.random.key(0))
    slots = optimizer.init(eqx.filter(model, eqx.is_array))
    return {"model": model, "slots": slots, "step": jax.numpy.zeros((), int)}


@eqx.filter_jit
def update(state):
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), state["step"]), (16, 4))
    mse = eqx.filter_value_and_grad(lambda f: ((jax.vmap(f)(x) - x[:, :1]) ** 2).mean())
    loss, grads = mse(state["model"])
    changes, slots = optimizer.update(grads, state["slots"])
    model = eqx.apply_updates(state["model"], changes)
    return {"model": model, "slots": slots, "step": state["step"] + 1}, loss


state = begin()
with unickpt.Checkpointer(sys.argv[1], keep_last=2) as run:
    if run.latest() is not None:
        state = checkpoint.load(run.path(run.latest()), eqx.filter_eval_shape(begin))
    while (step := int(state["step"])) < int(sys.argv[2]):
        state, loss = update(state)
        run.save(step + 1, checkpoint.arrays(state), metadata=checkpoint.metadata(state))
        print(f"iteration {step + 1} loss {float(loss).hex()}", flush=True)
