"""Trains a small Llama in JAX, its layers stacked and scanned, and saves it with its optimizer.

    python examples/train_jax.py runs/jax                             # from the beginning
    python examples/train_jax.py runs/jax_2 --resume runs/torch       # from finetune_torch.py

With WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT set, as torchrun sets them, several processes
train together.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from text import VOCABULARY, batch

import unickpt

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 3, 192, 6, 2, 32, 512
OPTIMIZER = optax.adamw(1e-3, weight_decay=0.01)
RULES = Path(__file__).with_name("llama.rules")


def initialize() -> dict[str, Any]:
    """The state before the first step."""
    l, e, h, g, d, f, v = LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCABULARY  # noqa: E741
    keys = iter(jax.random.split(jax.random.key(0), 16))

    def kernel(*shape: int) -> dict[str, jax.Array]:
        return {"kernel": 0.02 * jax.random.normal(next(keys), shape)}

    params = {
        "embed": {"embedding": 0.02 * jax.random.normal(next(keys), (v, e))},
        "layers": {
            "attn_norm": {"scale": jnp.ones((l, e))},
            "attn": {"q": kernel(l, e, h, d), "k": kernel(l, e, g, d), "v": kernel(l, e, g, d),
                     "o": kernel(l, h, d, e)},
            "mlp_norm": {"scale": jnp.ones((l, e))},
            "mlp": {"gate": kernel(l, e, f), "up": kernel(l, e, f), "down": kernel(l, f, e)},
        },
        "norm": {"scale": jnp.ones(e)},
        "head": kernel(e, v),
    }  # fmt: skip
    return {"params": params, "opt_state": OPTIMIZER.init(params)}


def shardings(mesh: jax.sharding.Mesh) -> Any:
    """Kernels are split over both axes of the mesh, along their last two even dimensions."""

    def of(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        spec: list[str | None] = [None] * leaf.ndim
        axes = [axis for axis in ("model", "data") if leaf.ndim > 1]
        for dim in reversed(range(leaf.ndim)):
            if axes and leaf.shape[dim] % mesh.shape[axes[0]] == 0:
                spec[dim] = axes.pop(0)
        return NamedSharding(mesh, P(*spec))

    return jax.tree.map(of, jax.eval_shape(initialize))


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions of [b t heads d]; the two halves of a pair are neighbours (interleaved)."""
    d = x.shape[-1]
    angle = jnp.arange(x.shape[1])[:, None] / 10000 ** (jnp.arange(0, d, 2) / d)
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    a, b = x[..., 0::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


def logits_of(params: Any, tokens: jax.Array) -> jax.Array:
    """The logits [b t v] of tokens [b t]."""

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        y = rms_norm(x, p["attn_norm"]["scale"])
        q, k, v = (jnp.einsum("bte,ehd->bthd", y, p["attn"][n]["kernel"]) for n in "qkv")
        y = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + jnp.einsum("bthd,hde->bte", y, p["attn"]["o"]["kernel"])
        y = rms_norm(x, p["mlp_norm"]["scale"])
        y = jax.nn.silu(y @ p["mlp"]["gate"]["kernel"]) * (y @ p["mlp"]["up"]["kernel"])
        return x + y @ p["mlp"]["down"]["kernel"], None

    x, _ = jax.lax.scan(layer, params["embed"]["embedding"][tokens], params["layers"])
    return rms_norm(x, params["norm"]["scale"]) @ params["head"]["kernel"]


@partial(jax.jit, donate_argnums=0)
def train_step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    """One step of AdamW: state and tokens in; the next state and the loss out."""

    def loss_of(params: Any) -> jax.Array:
        logits = logits_of(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, loss


def save(arguments: argparse.Namespace, step: int, state: Any) -> None:
    """Saves the state, and the logits that the model now gives."""
    unickpt.save(arguments.save, {"step": step, **state})
    if arguments.logits:
        replicated = NamedSharding(state["params"]["norm"]["scale"].sharding.mesh, P())
        logits = jax.jit(logits_of, out_shardings=replicated)(state["params"], batch(0)[:, :-1])
        if jax.process_index() == 0:
            np.save(arguments.logits, logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("save", help="where the checkpoint is to be")
    parser.add_argument("--resume", help="a checkpoint of finetune_torch.py to resume from")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--further", type=int, default=0, help="steps after the save")
    parser.add_argument("--logits", help="where to write the logits of the first batch, as .npy")
    parser.add_argument("--mesh", type=int, nargs=2, default=(1, 1), metavar=("DATA", "MODEL"))
    arguments = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            int(os.environ["WORLD_SIZE"]),
            int(os.environ["RANK"]),
        )
    mesh = jax.make_mesh(tuple(arguments.mesh), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    split = NamedSharding(mesh, P("data"))

    if arguments.resume:
        like = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            jax.eval_shape(initialize),
            shardings(mesh),
        )
        rules = unickpt.Rules.load(RULES).inverse
        state = unickpt.load(arguments.resume, like={"step": 0, **like}, rules=rules)
        first = state.pop("step")
    else:
        state, first = jax.jit(initialize, out_shardings=shardings(mesh))(), 0

    last = first + arguments.steps
    for step in range(first, last + arguments.further):
        if step == last:
            save(arguments, step, state)
        tokens = batch(step)
        tokens = jax.make_array_from_callback(tokens.shape, split, tokens.__getitem__)
        state, loss = train_step(state, tokens)
        if jax.process_index() == 0:
            print(f"step {step} loss {float(loss):.6f}", flush=True)
    if not arguments.further:
        save(arguments, last, state)


if __name__ == "__main__":
    main()
