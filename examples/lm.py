"""A small decoder-only transformer over bytes, its data and its training step (Flax NNX, optax)."""

import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, HEADS, DEPTH, CONTEXT, BATCH = 640, 8, 2, 64, 4
FILE_START = 256  # one token more than there are bytes: it stands before every file
VOCABULARY = 257

OPTIMIZER = optax.adamw(optax.linear_schedule(0, 1e-3, 10), mu_dtype=jnp.bfloat16)

# How each kind of parameter lies on the mesh ("data", "model"). The moments of the optimizer end
# in the names of their parameters, so that they follow them.
SPLITS = {
    "token/embedding": P(None, "model"),
    "query/kernel": P("data", "model"),
    "key/kernel": P("data", "model"),
    "value/kernel": P("data", "model"),
    "out/kernel": P("model", None, "data"),
    "up/kernel": P("data", "model"),
    "down/kernel": P("model", "data"),
    "head/kernel": P("data"),
}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attn_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        causal = nnx.make_causal_mask(x[..., 0])
        x = x + self.dropout(self.attn(self.attn_norm(x), mask=causal), rngs=rngs)
        hidden = nnx.gelu(self.up(self.mlp_norm(x)))
        return x + self.dropout(self.down(hidden), rngs=rngs)


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.token = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.position = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(DEPTH)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        x = self.token(tokens) + self.position(jnp.arange(tokens.shape[1]))
        x = jax.lax.with_sharding_constraint(x, P("data"))
        for layer in self.layers:
            x = layer(x, rngs)
        return self.head(self.norm(x))


GRAPH, _ = nnx.split(nnx.eval_shape(lambda: Transformer(nnx.Rngs(0))))


def initialize() -> dict[str, Any]:
    """The arrays of a run before its first step."""
    model = nnx.to_pure_dict(nnx.state(Transformer(nnx.Rngs(0))))
    return {
        "model": model,
        "opt_state": OPTIMIZER.init(model),
        # Raw words, not a typed key: PyTorch can then carry it like any other array.
        "rng": jax.random.key_data(jax.random.key(1)),
    }


def leaf_name(path: tuple[Any, ...]) -> str:
    """The name that a leaf has in a checkpoint: its path in the tree, joined by slashes."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def shardings(mesh: Mesh) -> Any:
    """The tree of `initialize()`, with a sharding for every array."""

    def of(path: tuple[Any, ...], _leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        kind = "/".join(leaf_name(path).split("/")[-2:])
        return NamedSharding(mesh, SPLITS.get(kind, P()))

    return jax.tree.map_with_path(of, jax.eval_shape(initialize))


def make_train_step(mesh: Mesh) -> Callable[[Any, jax.Array], tuple[Any, jax.Array]]:
    """Compile one step of AdamW: state and tokens in; the next state and the loss out."""
    layout = shardings(mesh)

    @partial(jax.jit, donate_argnums=0, out_shardings=(layout, NamedSharding(mesh, P())))
    def train_step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        dropout, rng = jax.random.split(jax.random.wrap_key_data(state["rng"]))

        def loss_of(model: Any) -> jax.Array:
            logits = nnx.merge(GRAPH, model)(tokens[:, :-1], nnx.Rngs(dropout))
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state["model"])
        updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"], state["model"])
        model = optax.apply_updates(state["model"], updates)
        return {"model": model, "opt_state": opt_state, "rng": jax.random.key_data(rng)}, loss

    return train_step


def read_corpus() -> np.ndarray:
    """The source of Python's standard library as one array of tokens."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    pieces: list[np.ndarray] = []
    for file in sorted(root.rglob("*.py")):
        if skipped.isdisjoint(file.relative_to(root).parts):
            pieces += [
                np.array([FILE_START], np.uint16),
                np.frombuffer(file.read_bytes(), np.uint8),
            ]
    return np.concatenate(pieces)


def batch(corpus: np.ndarray, step: int, mesh: Mesh) -> jax.Array:
    """The tokens of one step: they depend on nothing but the step, and are split over "data"."""
    starts = np.random.default_rng(step).integers(len(corpus) - CONTEXT, size=BATCH)
    tokens = corpus[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)
    sharding = NamedSharding(mesh, P("data"))
    return jax.make_array_from_callback(tokens.shape, sharding, tokens.__getitem__)
