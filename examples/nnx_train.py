"""python examples/nnx_train.py runs/nnx 40: killed and started again, it goes on."""

import sys

import jax
import optax
from flax import nnx

import unickpt
from unickpt.integrations import flax

mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
split = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))


def begin():
    rngs = nnx.Rngs(0)
    layers = nnx.Linear(4, 32, kernel_init=split, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)
    model = nnx.Sequential(*layers, nnx.Linear(32, 1, rngs=rngs))
    return model, nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)


@nnx.jit
def update(model, optimizer):
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), optimizer.step[...]), (16, 4))
    loss, grads = nnx.value_and_grad(lambda f: ((f(x) - x[:, :1]) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


with jax.set_mesh(mesh), unickpt.Checkpointer(sys.argv[1], keep_last=2) as run:
    both = begin()
    if run.latest() is not None:
        graph, shapes = nnx.split(nnx.eval_shape(begin))
        flax.check_shardings(shapes)
        both = nnx.merge(graph, run.load(shapes))
    while (step := int(both[1].step[...])) < int(sys.argv[2]):
        loss = update(*both)
        print(f"iteration {step + 1} loss {float(loss).hex()}", flush=True)
        run.save(step + 1, nnx.state(both))
