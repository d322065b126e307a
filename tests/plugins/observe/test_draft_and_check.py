"""Rules from two sides that belong together, and checks of rules by a few elements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import unickpt
from unickpt import Rules
from unickpt.errors import RuleError
from unickpt.plugins.observe.drafting import Likeness, words
from unickpt.rules.observed import DraftReport

LAYERS = 4
DTYPES = [np.float32, ml_dtypes.bfloat16]


def pair(dtype: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model on two sides: stacked, fused and transposed."""
    random = np.random.default_rng(0)

    def values(*shape: int) -> Any:
        return random.standard_normal(shape).astype(dtype)

    layers = {
        "q": {"kernel": values(LAYERS, 12, 3, 5), "bias": values(LAYERS, 3, 5)},
        "gate_up": values(LAYERS, 12, 40),
        "square": values(LAYERS, 12, 12),
    }
    left = {"params": {"embed": values(33, 12), "norm": np.ones(12, dtype), "layers": layers}}
    right = {
        "model.embed_tokens.weight": left["params"]["embed"],
        "model.norm.weight": np.ones(12, dtype),
    }
    for n in range(LAYERS):
        at = f"model.layers.{n}."
        right |= {
            f"{at}self_attn.q_proj.weight": layers["q"]["kernel"][n].reshape(12, 15).T.copy(),
            f"{at}self_attn.q_proj.bias": layers["q"]["bias"][n].reshape(15),
            f"{at}mlp.gate.weight": layers["gate_up"][n][:, :20].T.copy(),
            f"{at}mlp.up.weight": layers["gate_up"][n][:, 20:].T.copy(),
            f"{at}square.weight": layers["square"][n].T.copy(),
        }
    return left, right


def report_of(rules: Rules) -> DraftReport:
    assert isinstance(rules.report, DraftReport)
    return rules.report


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_decide(dtype: Any) -> None:
    left, right = pair(dtype)
    rules = Rules.draft(left, right)
    report = report_of(rules)
    assert [" ".join(line.split()) for line in report.certain] == [
        "params/embed <-> model.embed_tokens.weight",
        "params/layers/q/kernel [a b c d] <-> "
        "model.layers.{a}.self_attn.q_proj.weight [(c d) b] c=3?",
        "params/layers/q/bias [a b c] <-> model.layers.{a}.self_attn.q_proj.bias [(b c)] b=3?",
        "params/layers/gate_up [a b (d + e)] <-> model.layers.{a}.mlp.gate.weight [d b], "
        "model.layers.{a}.mlp.up.weight [e b] d=20?",
        "params/layers/square [a b c] <-> model.layers.{a}.square.weight [c b]",
    ]
    assert list(report.guesses) == ["params/norm <-> model.norm.weight"], "ones tell nothing"
    assert not report.left_over + report.right_over


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_other_direction(dtype: Any) -> None:
    left, right = pair(dtype)
    rules = Rules.draft(right, left)
    assert len(report_of(rules).certain) == 5
    del right["model.norm.weight"], left["params"]["norm"]
    assert rules.check(right, left, probes=10**6)


def test_a_guess_is_no_rule_before_its_user_says_so() -> None:
    left, right = pair(np.float32)
    rules = Rules.draft(left, right)
    with pytest.raises(RuleError, match=r"'params/norm'.*is stored, and no rule takes it"):
        rules.check(left, right)
    text = report_of(rules).text
    assert "#? params/norm <-> model.norm.weight" in text
    assert Rules.parse(text.replace("#? ", "")).check(left, right, probes=10**6)


def test_ties_and_siblings() -> None:
    random = np.random.default_rng(1)
    embed, up = random.random((7, 3), np.float32), random.random((3, 5), np.float32)
    left = {"embed": embed, "up": {"kernel": up, "bias": np.zeros(5)}, "down": np.zeros((4, 4))}
    right = {"wte": embed, "lm_head": embed, "fc.weight": up.T.copy(), "fc.bias": np.zeros(5)}
    report = report_of(Rules.draft(left, right))
    assert report.certain == (
        "embed [i o] <-> wte [i o] = lm_head [i o]",
        "up/kernel [i o] <-> fc.weight [o i]",
        "up/bias <-> fc.bias",
    )
    assert report.left_over == ("down",)


def test_two_checkpoints(tmp_path: Path) -> None:
    left, right = pair(np.float32)
    unickpt.save(tmp_path / "a", left)
    unickpt.save(tmp_path / "b", right)
    assert report_of(Rules.draft(tmp_path / "a", unickpt.open(tmp_path / "b"))).certain == (
        report_of(Rules.draft(left, right)).certain
    )


def test_names_and_sizes_alone() -> None:
    left = {f"layer_{n}": {"mlp": {"up": {"kernel": (3, 5)}}, "norm": {"scale": (3,)},
            "attn": {"out": {"kernel": (4, 4)}}} for n in range(3)}  # fmt: skip
    right = {}
    for n in range(3):
        right |= {f"h.{n}.mlp.up.weight": (5, 3), f"h.{n}.norm.weight": (3,)}
        right |= {f"h.{n}.attn.out.weight": (4, 4)}
    report = report_of(Rules.draft(left, right))
    assert report.certain == (
        "layer_{l}/mlp/up/kernel [i o] <-> h.{l}.mlp.up.weight [o i]",
        "layer_{l}/norm/scale <-> h.{l}.norm.weight",
    )
    (guess,) = report.guesses.items()
    assert guess[0] == "layer_{l}/attn/out/kernel <-> h.{l}.attn.out.weight", "it is square"
    assert guess[1] == ("layer_0/attn/out/kernel [i o] <-> h.0.attn.out.weight [o i]",)


def test_a_model_without_memory() -> None:
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        model = torch.nn.Linear(3, 5)
    left = {"kernel": np.ones((3, 5), np.float32), "bias": np.ones(5, np.float32)}
    report = report_of(Rules.draft(left, model.state_dict()))
    assert "bias <-> bias" in report.certain
    assert "kernel [i o] <-> weight [o i]" in report.text


def test_words_of_names() -> None:
    assert words("params/layers_3/selfAttention/query/kernel") == {
        "params", "layer", "attn", "q", "weight"}  # fmt: skip
    likeness = Likeness(["a/query/kernel", "a/key/kernel", "x.q_proj.weight", "x.k_proj.weight"])
    near = likeness.of("a/key/kernel", "x.k_proj.weight")
    assert near > likeness.of("a/key/kernel", "x.q_proj.weight")


# --- check ----------------------------------------------------------------------------------------


@pytest.fixture(name="square")
def _square() -> Any:
    return np.random.default_rng(2).standard_normal((6, 6)).astype(np.float32)


def test_a_wrong_transpose_of_a_square_kernel(square: Any) -> None:
    left, right = {"w": square, "v": square + 1}, {"w": square.T.copy(), "v": square + 1}
    assert Rules.parse("w [i o] <-> w [o i]\nv <-> v").check(left, right)
    found = Rules.parse("w <-> w\nv <-> v").check(left, right)
    assert not found
    assert list(found.differences) == ["w"]
    assert "element [0, 1]" in found.differences["w"]
    assert "the same with its axes exchanged, [a b] as [b a]" in found.differences["w"]


def test_expert_weights_that_were_transposed_when_both_sizes_are_equal() -> None:
    """As in a converter of mixture-of-experts weights that others reported."""
    experts = np.random.default_rng(3).random((4, 8, 8), np.float32)
    right = {f"experts.{x}.down.weight": experts[x] for x in range(4)}
    rules = Rules.parse("down [x i o] <-> experts.{x}.down.weight [o i]")
    found = rules.check({"down": experts}, right)
    assert len(found.differences) == 4
    assert all("axes exchanged" in why for why in found.differences.values())


def test_names_that_are_exchanged_and_heads_in_another_order(square: Any) -> None:
    left = {"q": square, "k": square * 2, "o": square * 3}
    heads = (square * 3).reshape(2, 3, 6).transpose(1, 0, 2).reshape(6, 6)
    right = {"qq": square * 2, "kk": square, "oo": heads}
    found = Rules.parse("q <-> qq\nk <-> kk\no <-> oo").check(left, right)
    assert "it has the values of 'kk': two names are exchanged" in found.differences["qq"]
    assert "the same numbers in another order" in found.differences["oo"]


def test_arithmetic_may_differ_in_the_last_bits(square: Any) -> None:
    rules = Rules.parse("w [i o] * 3 + 0.1 <-> w [o i]")
    right = (square.astype(np.float64) * 3 + 0.1).T.astype(np.float32)
    assert rules.check({"w": square}, {"w": right})
    right[2, 2] += 0.01
    assert not rules.check({"w": square}, {"w": right})


def test_only_some_chunks_are_read(tmp_path: Path) -> None:
    big = np.random.default_rng(4).random((3, 200, 300), np.float32)
    options = unickpt.SaveOptions(chunk_bytes=1 << 12)
    unickpt.save(tmp_path / "a", {"w": big}, options=options)
    unickpt.save(tmp_path / "b", {f"w.{n}": big[n].T.copy() for n in range(3)}, options=options)
    rules = Rules.parse("w [l i o] <-> w.{l} [o i]")
    found = rules.check(tmp_path / "a", tmp_path / "b")
    assert found
    assert found.elements < 1000
    assert str(found).endswith("of 3 arrays are as the rules make them")
    assert rules.inverse.check(tmp_path / "b", tmp_path / "a")


def test_rules_that_do_not_fit(square: Any) -> None:
    with pytest.raises(RuleError, match=r"'v'.*is requested, but no stored array"):
        Rules.parse("w <-> w").check({"w": square}, {"w": square, "v": square})


@pytest.mark.parametrize("number", [5, 2.5, True])
def test_a_plain_number_is_checked_against_an_array(number: Any, tmp_path: Path) -> None:
    dtype = {int: np.int32, float: np.float32, bool: np.bool_}[type(number)]
    w = np.ones(3, np.float32)
    unickpt.save(tmp_path / "array", {"w": w, "step": np.asarray(number, dtype)})
    unickpt.save(tmp_path / "plain", {"w2": w, "step": number})
    unickpt.save(tmp_path / "other", {"w2": w, "step": type(number)(0)})
    unickpt.save(tmp_path / "text", {"w2": w, "step": "5"})
    rules = Rules.parse("w <-> w2\nstep <-> step")
    assert rules.check(tmp_path / "array", tmp_path / "plain")
    assert rules.inverse.check(tmp_path / "plain", tmp_path / "array")
    for other in ("other", "text"):
        assert "step" in rules.check(tmp_path / "array", tmp_path / other).differences
        assert "step" in rules.inverse.check(tmp_path / other, tmp_path / "array").differences
