"""The presets `maxtext-*`, against what MaxText's own conversion does to each array, and by logits.

`converted` and `forward` follow MaxText's checkpoint_conversion and models, with one layer after
the other in NumPy. MaxText itself is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rule_cases import flat_names, flat_tree

import unickpt
from unickpt import Rules
from unickpt.errors import RuleError

pytestmark = pytest.mark.integration

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("flax")
transformers = pytest.importorskip("transformers")

import jax.numpy as jnp  # noqa: E402
from support.flax_models import attend, normalize, rotate, route  # noqa: E402

V, E, F, H, G, D, L, X = 29, 10, 14, 6, 3, 16, 5, 4  # d is a power of 4: its root scales exactly
TOKENS = np.random.default_rng(0).integers(0, V, (3, 11))
SIZES = {
    "vocab_size": V,
    "hidden_size": E,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "head_dim": D,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-5,
}


@dataclass(frozen=True)
class Family:
    """A model of transformers, and how MaxText differs from it.

    Arguments:
        model: makes one.
        sizes: what its shapes do not tell, where nothing is known of MaxText's.
        interleaved: whether pairs of rotary dimensions are neighbours.
        norms: MaxText's names of the norms before attention and before the MLP.
        experts: whether the MLP is a mixture.
        gemma: whether norms are shifted, and embeddings scaled, padded and tied.
    """

    model: Any
    sizes: dict[str, int]
    interleaved: bool = False
    norms: tuple[str, str] = ("pre_self_attention_layer_norm", "post_self_attention_layer_norm")
    experts: bool = False
    gemma: bool = False

    @property
    def width(self) -> int:
        return 64 if self.gemma else E  # a power of 4, too

    @property
    def vocabulary(self) -> int:
        return 32 if self.gemma else V


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def mixtral() -> Any:
    moe = {"num_local_experts": X, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **moe))


def gemma() -> Any:
    config = transformers.GemmaConfig(**{**SIZES, "hidden_size": 64})
    return transformers.GemmaForCausalLM(config)


FAMILIES = {
    "llama": Family(llama, {"d": D, "half": D // 2}, interleaved=True),
    "llama2": Family(llama, {"d": D}),
    "mixtral": Family(mixtral, {"d": D}, experts=True),
    "gemma": Family(
        gemma, {"d": D, "_": 3}, norms=("pre_self_attention_norm", "pre_ffw_norm"), gemma=True
    ),
}
EACH = pytest.mark.parametrize("family", FAMILIES)


def random_model(family: Family) -> Any:
    """Weights are multiples of 2**-8, so that adding 1 to a norm loses nothing."""
    generator = torch.Generator().manual_seed(3)
    model = family.model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            random = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(torch.round(random * 256) / 256)
    return model


# --- what MaxText does ----------------------------------------------------------------------------


def converted(family: Family, state: dict[str, Any]) -> dict[str, Any]:
    """The parameters of transformers, as MaxText has them: names to arrays."""
    weights = {name: x.numpy() for name, x in state.items()}

    def stacked(name: str, convert: Any = lambda w: w.T) -> Any:
        of_layers = [convert(weights[f"model.layers.{layer}.{name}.weight"]) for layer in range(L)]
        return np.stack(of_layers, axis=1)  # param_scan_axis

    def heads(w: Any) -> Any:
        return w.T.reshape(family.width, -1, D)

    def pairs(w: Any) -> Any:
        first, second = np.split(heads(w), 2, axis=-1)
        return np.stack([first, second], axis=-1).reshape(heads(w).shape)

    def norm(w: Any) -> Any:
        return w + np.float32(1) if family.gemma else w

    rotated = pairs if family.interleaved else heads
    attention = {
        "query/kernel": stacked("self_attn.q_proj", rotated) * np.float32(D**-0.5),
        "key/kernel": stacked("self_attn.k_proj", rotated),
        "value/kernel": stacked("self_attn.v_proj", heads),
        "out/kernel": stacked("self_attn.o_proj", lambda w: w.T.reshape(H, D, family.width)),
    }
    layers = {f"self_attention/{name}": x for name, x in attention.items()}
    layers[f"{family.norms[0]}/scale"] = stacked("input_layernorm", norm)
    layers[f"{family.norms[1]}/scale"] = stacked("post_attention_layernorm", norm)
    if family.experts:
        moe = "block_sparse_moe"
        layers["MoeBlock_0/gate/kernel"] = stacked(f"{moe}.gate")
        for ours, theirs in {"wi_0": "w1", "wi_1": "w3", "wo": "w2"}.items():
            of_experts = [stacked(f"{moe}.experts.{x}.{theirs}").swapaxes(0, 1) for x in range(X)]
            layers[f"MoeBlock_0/{ours}"] = np.stack(of_experts)
    else:
        for ours, theirs in {"wi_0": "gate", "wi_1": "up", "wo": "down"}.items():
            layers[f"mlp/{ours}/kernel"] = stacked(f"mlp.{theirs}_proj")

    decoder = {f"layers/{name}": x for name, x in layers.items()}
    decoder["decoder_norm/scale"] = norm(weights["model.norm.weight"])
    embedding = weights["model.embed_tokens.weight"]
    if family.gemma:
        padding = np.zeros((family.vocabulary - V, family.width), np.float32)
        embedding = np.concatenate([embedding, padding]) * np.float32(family.width**0.5)
    else:
        decoder["logits_dense/kernel"] = weights["lm_head.weight"].T
    params = {f"decoder/{name}": x for name, x in decoder.items()}
    params["token_embedder/embedding"] = embedding
    return {f"params/params/{name}": x for name, x in params.items()}


def forward(family: Family, names: dict[str, Any], tokens: Any) -> Any:
    """Logits, out of MaxText's parameters."""
    of = {name.removeprefix("params/params/"): jnp.asarray(x) for name, x in names.items()}
    act = (lambda x: jax.nn.gelu(x, approximate=True)) if family.gemma else jax.nn.silu
    embedding = of["token_embedder/embedding"]
    x = embedding[tokens]
    for layer in range(L):
        here = "decoder/layers/"
        p = {n.removeprefix(here): jnp.take(w, layer, 1) for n, w in of.items() if here in n}
        y = normalize(x, p[f"{family.norms[0]}/scale"], 1e-5)
        q, k, v = (
            jnp.einsum("bte,ehd->bthd", y, p[f"self_attention/{n}/kernel"])
            for n in ("query", "key", "value")
        )
        q, k = (rotate(a, interleaved=family.interleaved) for a in (q, k))
        x = x + jnp.einsum("bthd,hde->bte", attend(q, k, v), p["self_attention/out/kernel"])
        y = normalize(x, p[f"{family.norms[1]}/scale"], 1e-5)
        if family.experts:
            weights = route(y @ p["MoeBlock_0/gate/kernel"], 2)
            inner = act(jnp.einsum("bte,xef->btxf", y, p["MoeBlock_0/wi_0"]))
            inner *= jnp.einsum("bte,xef->btxf", y, p["MoeBlock_0/wi_1"])
            x = x + jnp.einsum("btxf,xfe,btx->bte", inner, p["MoeBlock_0/wo"], weights)
        else:
            inner = act(y @ p["mlp/wi_0/kernel"]) * (y @ p["mlp/wi_1/kernel"])
            x = x + inner @ p["mlp/wo/kernel"]
    x = normalize(x, of["decoder/decoder_norm/scale"], 1e-5)
    if family.gemma:  # logits_via_embedding, normalize_embedding_logits
        return (x / x.shape[-1] ** 0.5) @ embedding.T
    return x @ of["decoder/logits_dense/kernel"]


# --- both directions ------------------------------------------------------------------------------


def zeros(tree: dict[str, Any]) -> dict[str, Any]:
    return flat_tree({name: np.zeros_like(x) for name, x in tree.items()})


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].shape == x.shape, name
        assert np.array_equal(found[name], x), name


@EACH
def test_transformers_to_maxtext_and_back(family: str, tmp_path: Path) -> None:
    rules, kind = Rules.preset(f"maxtext-{family}"), FAMILIES[family]
    model = random_model(kind)
    expected = converted(kind, model.state_dict())
    unickpt.save(tmp_path / "torch", model.state_dict())
    made = unickpt.load(tmp_path / "torch", zeros(expected), rules=rules.inverse)
    assert_same(flat_names(made), expected)

    unickpt.save(tmp_path / "maxtext", made)
    again = kind.model().eval()
    unickpt.load(tmp_path / "maxtext", again, rules=rules)
    assert_same(
        {name: x.numpy() for name, x in again.state_dict().items()},
        {name: x.numpy() for name, x in model.state_dict().items()},
    )


@EACH
def test_both_compute_the_same(family: str, tmp_path: Path) -> None:
    rules, kind = Rules.preset(f"maxtext-{family}"), FAMILIES[family]
    rng = np.random.default_rng(4)
    shapes = converted(kind, kind.model().state_dict())
    stored = {name: rng.normal(0.1, 0.3, x.shape).astype(np.float32) for name, x in shapes.items()}
    unickpt.save(tmp_path / "maxtext", flat_tree(stored))
    model = kind.model().eval()
    unickpt.load(tmp_path / "maxtext", model, rules=rules)
    ours = jax.jit(lambda names: forward(kind, names, TOKENS))(stored)[..., :V]
    np.testing.assert_allclose(logits(model), ours, rtol=1e-4, atol=1e-4)


@EACH
def test_without_like(family: str, tmp_path: Path) -> None:
    """Sizes that shapes of one side do not tell are asked for, and are enough."""
    kind = FAMILIES[family]
    model = random_model(kind)
    expected = converted(kind, model.state_dict())
    unickpt.save(tmp_path / "torch", model.state_dict())
    with pytest.raises(RuleError, match=r"the size of .* is unknown"):
        unickpt.load(tmp_path / "torch", rules=Rules.preset(f"maxtext-{family}").inverse)
    rules = Rules.preset(f"maxtext-{family}", sizes=kind.sizes)
    assert_same(flat_names(unickpt.load(tmp_path / "torch", rules=rules.inverse)), expected)


@EACH
def test_layers_in_front_are_refused(family: str, tmp_path: Path) -> None:
    """As param_scan_axis=0 stacks them."""
    kind = FAMILIES[family]
    stored = converted(kind, kind.model().state_dict())
    moved = {n: np.moveaxis(x, 1, 0) if "/layers/" in n else x for n, x in stored.items()}
    unickpt.save(tmp_path / "maxtext", flat_tree(moved))
    with pytest.raises(RuleError, match=r"elements here, but"):
        unickpt.load(tmp_path / "maxtext", kind.model(), rules=Rules.preset(f"maxtext-{family}"))


@pytest.mark.parametrize(("ours", "other"), [("llama", "llama2"), ("llama2", "llama")])
def test_the_other_order_of_rotary_dimensions_is_refused(
    ours: str, other: str, tmp_path: Path
) -> None:
    """Shapes do not show it, but a conversion records it."""
    kind = FAMILIES[ours]
    unickpt.save(tmp_path / "torch", kind.model().state_dict())
    rules = Rules.preset(f"maxtext-{ours}", sizes=kind.sizes)
    unickpt.convert(tmp_path / "torch", tmp_path / "maxtext", rules=rules.inverse)
    unickpt.load(tmp_path / "maxtext", kind.model(), rules=rules)
    with pytest.raises(RuleError, match="rope"):
        unickpt.load(tmp_path / "maxtext", kind.model(), rules=Rules.preset(f"maxtext-{other}"))


def test_the_padding_of_gemma_is_left_out(tmp_path: Path) -> None:
    kind = FAMILIES["gemma"]
    model = random_model(kind)
    stored = converted(kind, model.state_dict())
    stored["params/params/token_embedder/embedding"][V:] = 1  # as training leaves it
    unickpt.save(tmp_path / "maxtext", flat_tree(stored))
    with pytest.raises(RuleError, match=r"the size of .* is unknown"):
        unickpt.load(tmp_path / "maxtext", rules=Rules.preset("maxtext-gemma"))
    made = unickpt.load(tmp_path / "maxtext", rules=Rules.preset("maxtext-gemma", sizes={"v": V}))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert np.array_equal(made[name], model.state_dict()[name])


def test_a_train_state_with_its_moments(tmp_path: Path) -> None:
    """What a user adds: the optimizer's slots, of optax.adam and torch.optim.Adam."""
    rules = Rules.parse("""
        include maxtext-llama
        lift opt_state/0/mu/{p} <-> optim/{p}/exp_avg    for params/{p} <-> {p}  law=gradient
        lift opt_state/0/nu/{p} <-> optim/{p}/exp_avg_sq for params/{p} <-> {p}  law=square
        lift opt_state/0/count as int32 <-> optim/{p}/step as float32
        step <-> drop
    """)
    state = random_model(FAMILIES["llama"]).state_dict()
    params = converted(FAMILIES["llama"], state)
    slots = {n.removeprefix("params/"): x for n, x in params.items()}
    stored = params | {f"opt_state/0/mu/{n}": x for n, x in slots.items()}
    stored |= {f"opt_state/0/nu/{n}": x**2 for n, x in slots.items()}
    unickpt.save(
        tmp_path / "maxtext",
        flat_tree({**stored, "opt_state/0/count": np.int32(7), "step": np.int32(7)}),
    )
    made = flat_names(unickpt.load(tmp_path / "maxtext", rules=rules))
    for name, x in state.items():
        scale = np.float32(16 if "q_proj" in name else 1)  # a gradient goes with 1 / sqrt(d)
        assert np.array_equal(made[name], x)
        assert np.array_equal(made[f"optim/{name}/exp_avg"], x / scale)
        assert np.array_equal(made[f"optim/{name}/exp_avg_sq"], (x / scale) ** 2)
        assert made[f"optim/{name}/step"] == 7
