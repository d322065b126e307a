"""Rules that a user would write: scanned layers of flax.linen <-> decoders of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import Rules
from unickpt.errors import RuleError

pytestmark = pytest.mark.integration

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("flax")
transformers = pytest.importorskip("transformers")

from support import flax_models  # noqa: E402

TOKENS = np.random.default_rng(0).integers(0, 29, (3, 11))
SIZES = {
    "vocab_size": 29,
    "hidden_size": 12,
    "intermediate_size": 14,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
}

COMMON = """
params/embed/embedding         [v e] <-> model.embed_tokens.weight                        [v e]
params/layers/before/scale     [l e] <-> model.layers.{l}.input_layernorm.weight          [e]
params/layers/between/scale    [l e] <-> model.layers.{l}.post_attention_layernorm.weight [e]
params/after/scale             [e]   <-> model.norm.weight                                [e]
params/head/kernel             [e v] <-> lm_head.weight                                   [v e]

params/layers/attention/query/kernel       [l e h d] <-> model.layers.{l}.self_attn.q_proj.weight     [(h d) e]
params/layers/attention/{key|value}/kernel [l e g d] <-> model.layers.{l}.self_attn.{k|v}_proj.weight [(g d) e]
params/layers/attention/out/kernel         [l h d e] <-> model.layers.{l}.self_attn.o_proj.weight     [e (h d)]
"""  # noqa: E501

QWEN2 = """
params/layers/attention/query/bias       [l h d] <-> model.layers.{l}.self_attn.q_proj.bias     [(h d)]
params/layers/attention/{key|value}/bias [l g d] <-> model.layers.{l}.self_attn.{k|v}_proj.bias [(g d)]

params/layers/mlp/{gate|up}/kernel [l e f] <-> model.layers.{l}.mlp.{gate|up}_proj.weight [f e]
params/layers/mlp/down/kernel      [l f e] <-> model.layers.{l}.mlp.down_proj.weight      [e f]
"""  # noqa: E501

MIXTRAL = """
params/layers/mlp/router/kernel [l e x]        <-> model.layers.{l}.block_sparse_moe.gate.weight                   [x e]
params/layers/mlp/gate_up       [l x e (gu f)] <-> model.layers.{l}.block_sparse_moe.experts.{x}.{gu:w1|w3}.weight [f e]
params/layers/mlp/down          [l x f e]      <-> model.layers.{l}.block_sparse_moe.experts.{x}.w2.weight         [e f]
"""  # noqa: E501


def qwen2() -> tuple[Any, Any, Rules]:
    config = transformers.Qwen2Config(**SIZES)
    mlp = {"mlp": flax_models.Gated, "inner": {"inner": 14}}
    return (
        transformers.Qwen2ForCausalLM(config),
        decoder(bias=True, **mlp),
        Rules.parse(COMMON + QWEN2),
    )


def mixtral() -> tuple[Any, Any, Rules]:
    config = transformers.MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, rope_theta=10_000.0
    )
    mlp = {"mlp": flax_models.Experts, "inner": {"inner": 14, "experts": 4, "chosen": 2}}
    return (
        transformers.MixtralForCausalLM(config),
        decoder(bias=False, **mlp),
        Rules.parse(COMMON + MIXTRAL),
    )


def decoder(*, bias: bool, mlp: Any, inner: dict[str, int]) -> Any:
    attention = {"heads": 6, "shared": 3, "width": 8, "bias": bias}
    return flax_models.Decoder(29, 12, 5, attention, mlp, inner)


CASES = pytest.mark.parametrize("make", [qwen2, mixtral], ids=["qwen2", "mixtral"])


def randomize(model: Any) -> Any:
    """Norms and biases begin with ones and zeros, which would hide that they are exchanged."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.1
    return model.eval()


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def shapes(module: Any) -> Any:
    return jax.eval_shape(module.init, jax.random.key(0), TOKENS)


def run(module: Any, variables: Any) -> Any:
    return jax.jit(module.apply)(variables, TOKENS)


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@CASES
def test_torch_to_flax_and_back(make: Any, tmp_path: Path) -> None:
    model, module, rules = make()
    unickpt.save(tmp_path / "torch", randomize(model).state_dict())
    variables = unickpt.load(tmp_path / "torch", shapes(module), rules=rules.inverse)
    np.testing.assert_allclose(run(module, variables), logits(model), atol=1e-5)

    unickpt.save(tmp_path / "flax", variables)
    again = make()[0].eval()
    unickpt.load(tmp_path / "flax", again, rules=rules)
    assert same(again.state_dict(), model.state_dict())
    assert np.array_equal(logits(again), logits(model))


@CASES
def test_flax_to_torch_and_back(make: Any, tmp_path: Path) -> None:
    model, module, rules = make()
    variables = flax_models.fill(shapes(module))
    unickpt.save(tmp_path / "flax", variables)
    unickpt.load(tmp_path / "flax", model, rules=rules)
    np.testing.assert_allclose(logits(model.eval()), run(module, variables), atol=1e-5)

    unickpt.save(tmp_path / "torch", model.state_dict())
    back = unickpt.load(tmp_path / "torch", shapes(module), rules=rules.inverse)
    assert jax.tree.all(jax.tree.map(np.array_equal, back, variables))


def test_without_like_sizes_tell_the_heads(tmp_path: Path) -> None:
    model, module, rules = qwen2()
    unickpt.save(tmp_path / "torch", randomize(model).state_dict())
    with pytest.raises(RuleError, match=r"the size of d, h is unknown: give it"):
        unickpt.load(tmp_path / "torch", rules=rules.inverse)
    sized = Rules.parse(COMMON + QWEN2, sizes={"d": 8}).inverse
    variables = unickpt.load(tmp_path / "torch", rules=sized)
    np.testing.assert_allclose(run(module, variables), logits(model), atol=1e-5)


def test_a_layer_that_is_missing_is_told(tmp_path: Path) -> None:
    model, _, rules = qwen2()
    state = model.state_dict()
    del state["model.layers.3.mlp.up_proj.weight"]
    unickpt.save(tmp_path / "torch", state)
    with pytest.raises(RuleError, match=r"it needs 'model.layers.3.mlp.up_proj.weight'"):
        unickpt.load(tmp_path / "torch", rules=rules.inverse)
