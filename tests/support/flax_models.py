"""Decoders in JAX for the tests of presets: what they are put together from, and one in flax.linen.

The names of the linen module's parameters are its own, as those of a user's are.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


def rotate(x: Any, *, interleaved: bool = False, theta: float = 10_000.0) -> Any:
    """Rotary embedding of [batch, position, head, dimension].

    Arguments:
        x: queries or keys.
        interleaved: whether the two parts of a pair are neighbours, not half the dimensions apart.
        theta: the longest wavelength.
    """
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] / theta ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else jnp.split(x, 2, axis=-1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    if interleaved:
        return jnp.stack(turned, axis=-1).reshape(x.shape)
    return jnp.concatenate(turned, axis=-1)


def attend(query: Any, key: Any, value: Any) -> Any:
    """Causal attention of [batch, position, head, dimension]; several heads may share a key.

    Nothing is scaled: that is up to whoever makes the queries.
    """
    shared = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, shared, axis=2) for x in (key, value))
    scores = jnp.einsum("bthd,bshd->bhts", query, key)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, value)


def normalize(x: Any, scale: Any, epsilon: float) -> Any:
    """RMS normalization."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + epsilon) * scale


def route(logits: Any, chosen: int) -> Any:
    """The weight of each expert: a softmax over the best ones."""
    best, experts = jax.lax.top_k(logits, chosen)
    weights = jax.nn.softmax(best, axis=-1)
    return jnp.einsum("...k,...kx->...x", weights, jax.nn.one_hot(experts, logits.shape[-1]))


class Attention(nn.Module):
    heads: int
    shared: int
    width: int
    bias: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def project(heads: int, name: str) -> Any:
            return nn.DenseGeneral((heads, self.width), use_bias=self.bias, name=name)(x)

        query, key = rotate(project(self.heads, "query")), rotate(project(self.shared, "key"))
        out = attend(query * self.width**-0.5, key, project(self.shared, "value"))
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False, name="out")(out)


class Gated(nn.Module):
    inner: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        gate, up = (nn.Dense(self.inner, use_bias=False, name=n)(x) for n in ("gate", "up"))
        return nn.Dense(x.shape[-1], use_bias=False, name="down")(nn.silu(gate) * up)


class Experts(nn.Module):
    inner: int
    experts: int
    chosen: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        init, width = nn.initializers.normal(0.1), x.shape[-1]
        weights = route(nn.Dense(self.experts, use_bias=False, name="router")(x), self.chosen)
        gate_up = self.param("gate_up", init, (self.experts, width, 2 * self.inner))
        down = self.param("down", init, (self.experts, self.inner, width))
        gate, up = jnp.split(jnp.einsum("bte,xef->btxf", x, gate_up), 2, axis=-1)
        return jnp.einsum("btxf,xfe,btx->bte", nn.silu(gate) * up, down, weights)


class Layer(nn.Module):
    attention: dict[str, Any]
    mlp: type[nn.Module]
    inner: dict[str, int]

    @nn.compact
    def __call__(self, x: Any, _: None) -> tuple[Any, None]:
        x = x + Attention(**self.attention, name="attention")(nn.RMSNorm(name="before")(x))
        return x + self.mlp(**self.inner, name="mlp")(nn.RMSNorm(name="between")(x)), None


class Decoder(nn.Module):
    """A decoder whose layers are scanned: their parameters have the layer as their first axis."""

    vocabulary: int
    width: int
    layers: int
    attention: dict[str, Any]
    mlp: type[nn.Module]
    inner: dict[str, int]

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(self.vocabulary, self.width, name="embed")(tokens)
        scan = nn.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
        )
        x, _ = scan(self.attention, self.mlp, self.inner, name="layers")(x, None)
        return nn.Dense(self.vocabulary, use_bias=False, name="head")(nn.RMSNorm(name="after")(x))


def fill(abstract: Any, seed: int = 0) -> Any:
    """Random arrays with the shapes of a tree."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0.1, 0.3, x.shape), x.dtype), abstract)
