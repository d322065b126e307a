"""Presets of transformers' Flax and PyTorch classes: the same parameters give the same outputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import LoadMismatch, Rules
from unickpt.errors import RuleError
from unickpt.rules.rule_files import preset_text

pytestmark = pytest.mark.integration

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
flax = pytest.importorskip("flax")
transformers = pytest.importorskip("transformers")
traverse = pytest.importorskip("flax.traverse_util")
# transformers' own converter, to hold ours against; it goes away together with the Flax classes
oracle = pytest.importorskip("transformers.modeling_flax_pytorch_utils")

# Pairwise different, so that no wrong order of axes can pass where the classes allow that.
DECODER = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "use_cache": False,
}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
GEMMA = {**DECODER, "head_dim": 10, "hidden_activation": "gelu_pytorch_tanh"}
GPT2 = {
    "vocab_size": 37,
    "n_embd": 24,
    "n_inner": 40,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 19,
    "use_cache": False,
}
BERT = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 19,
    "type_vocab_size": 5,
    "num_labels": 7,
}
VIT = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 15,
    "patch_size": 5,
    "num_channels": 2,
    "num_labels": 7,
}
RESNET = {
    "embedding_size": 8,
    "hidden_sizes": [16, 28],
    "depths": [1, 2],
    "num_channels": 5,
    "num_labels": 6,
}


def tokens(rng: np.random.Generator) -> dict[str, Any]:
    return {"input_ids": rng.integers(0, 37, (2, 11))}


def segments(rng: np.random.Generator) -> dict[str, Any]:
    return {**tokens(rng), "token_type_ids": rng.integers(0, 5, (2, 11))}


def encoded(rng: np.random.Generator) -> dict[str, Any]:
    states = rng.standard_normal((2, 7, 24), np.float32)
    return {**tokens(rng), "encoder_hidden_states": states}


def pixels(rng: np.random.Generator) -> dict[str, Any]:
    return {"pixel_values": rng.standard_normal((2, 2, 15, 15), np.float32)}


def larger_pixels(rng: np.random.Generator) -> dict[str, Any]:
    return {"pixel_values": rng.standard_normal((2, 5, 32, 32), np.float32)}


@dataclass(frozen=True)
class Case:
    """Two classes that a preset relates.

    Arguments:
        preset: its name.
        model: the name of the PyTorch class; that of the Flax class begins with `Flax`.
        config: the arguments of the configuration.
        inputs: makes the inputs of both.
        arguments: further ones of the Flax class.
    """

    preset: str
    model: str
    config: dict[str, Any]
    inputs: Callable[[np.random.Generator], dict[str, Any]] = tokens
    arguments: dict[str, Any] = field(default_factory=dict)


IMAGE = {"input_shape": (1, 32, 32, 5)}
BASIC = {**RESNET, "layer_type": "basic"}
CROSS = {**GPT2, "add_cross_attention": True}
CASES = {
    "llama": Case("transformers-llama", "LlamaForCausalLM", DECODER | UNTIED),
    "llama, biases": Case(
        "transformers-llama", "LlamaForCausalLM", DECODER | UNTIED | {"attention_bias": True}
    ),
    "llama, bare": Case("transformers-llama", "LlamaModel", DECODER),
    "gemma": Case("transformers-gemma", "GemmaForCausalLM", GEMMA | TIED),
    "gemma, bare": Case("transformers-gemma", "GemmaModel", GEMMA | TIED),
    "gemma, untied": Case("transformers-gemma", "GemmaForCausalLM", GEMMA | UNTIED),
    "mistral": Case("transformers-mistral", "MistralForCausalLM", DECODER | UNTIED),
    "gpt2": Case("transformers-gpt2", "GPT2LMHeadModel", GPT2 | TIED),
    "gpt2, bare": Case("transformers-gpt2", "GPT2Model", GPT2 | TIED),
    "gpt2, cross": Case("transformers-gpt2", "GPT2LMHeadModel", CROSS | TIED, encoded),
    "gpt2, untied": Case("transformers-gpt2", "GPT2LMHeadModel", CROSS | UNTIED, encoded),
    "bert": Case("transformers-bert", "BertModel", BERT, segments),
    "bert, words": Case("transformers-bert", "BertForMaskedLM", BERT, segments),
    "bert, both": Case("transformers-bert", "BertForPreTraining", BERT, segments),
    "bert, class": Case("transformers-bert", "BertForSequenceClassification", BERT, segments),
    "bert, answers": Case(
        "transformers-bert", "BertForQuestionAnswering", BERT | {"num_labels": 2}, segments
    ),
    "vit": Case("transformers-vit", "ViTModel", VIT, pixels),
    "vit, class": Case("transformers-vit", "ViTForImageClassification", VIT, pixels),
    "resnet": Case(
        "transformers-resnet", "ResNetForImageClassification", RESNET, larger_pixels, IMAGE
    ),
    "resnet, bare": Case("transformers-resnet", "ResNetModel", RESNET, larger_pixels, IMAGE),
    "resnet, basic": Case(
        "transformers-resnet-basic", "ResNetForImageClassification", BASIC, larger_pixels, IMAGE
    ),
}
OUTPUTS = (
    "logits",
    "last_hidden_state",
    "pooler_output",
    "prediction_logits",
    "seq_relationship_logits",
    "start_logits",
    "end_logits",
)
# Other cases have all of their parameters but those of a head; and
# test_presets_of_flax_classes.py compares the parameters of all classes.
CONTAINED = {
    *("llama, bare", "gemma, bare", "gpt2, bare", "vit", "resnet, bare"),
    *("bert, words", "bert, answers"),
}
each_case = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in CONTAINED else []) for n in CASES],
)


class Pair:
    """The two models of a case; neither has parameters that were made before."""

    def __init__(self, case: Case) -> None:
        settings = re.split("For|LMHead|Model", case.model)[0] + "Config"
        config = getattr(transformers, settings)(**case.config)
        make = getattr(transformers, f"Flax{case.model}")
        self._flax = make(config, _do_init=False, **case.arguments)
        self._make = lambda: getattr(transformers, case.model)(config).eval()
        self._inputs = case.inputs(np.random.default_rng(0))
        self._apply = jax.jit(
            lambda params: self._flax(**self._inputs, params=params),
            compiler_options={"xla_backend_optimization_level": 0},  # quicker to compile
        )
        self.like = flax.core.unfreeze(self._flax.params_shape_tree)
        self.rules = Rules.preset(case.preset)

    def params(self, seed: int) -> dict[str, Any]:
        """Random parameters of the Flax model."""
        rng = np.random.default_rng(seed)
        return traverse.unflatten_dict(
            {path: fill(rng, path[-1], x.shape) for path, x in self.flat(self.like).items()}
        )

    def module(self, seed: int) -> Any:
        """A torch module with random parameters."""
        module, rng = self._make(), np.random.default_rng(seed)
        with torch.no_grad():
            for name, tensor in module.state_dict().items():
                if tensor.is_floating_point():
                    tensor.copy_(torch.from_numpy(fill(rng, name, tuple(tensor.shape))))
        return module

    def flat(self, params: Any) -> dict[tuple[str, ...], Any]:
        found: dict[tuple[str, ...], Any] = traverse.flatten_dict(params)
        return found

    def expected(self, module: Any) -> Any:
        """What transformers makes of the torch module's state, for the Flax model."""
        state, paths = dict(module.state_dict()), list(self.flat(self.like))
        if any("layer_0" in path for path in paths):  # a name that it does not know
            state = {re.sub(r"\.layer\.(\d)", r".layer.layer_\1", k): x for k, x in state.items()}
        shim = SimpleNamespace(params=self.like, base_model_prefix=self._flax.base_model_prefix)
        found = self.flat(oracle.convert_pytorch_state_dict_to_flax(state, shim))
        return traverse.unflatten_dict({path: found[path] for path in paths})

    def check(self, params: Any, module: Any) -> None:
        """Makes sure that both are the same model."""
        assert bits(params) == bits(self.expected(module))
        with torch.no_grad():
            ours = module(**{k: torch.from_numpy(x) for k, x in self._inputs.items()})
        theirs = self._apply(params)
        compared = [key for key in OUTPUTS if key in ours and key in theirs]
        assert compared
        for key in compared:
            assert np.std(theirs[key]) > 1e-2, "an output that hardly depends on anything"
            np.testing.assert_allclose(ours[key].numpy(), theirs[key], rtol=1e-4, atol=1e-4)


def fill(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Any:
    values = rng.standard_normal(shape, np.float32) * np.float32(0.3)
    return np.exp(values) if name.endswith("var") else values


@cache
def pair(name: str) -> Pair:
    return Pair(CASES[name])


def bits(state: Any) -> dict[str, bytes]:
    """The bits of each array of a module or a tree, by name."""
    is_module = isinstance(state, torch.nn.Module)
    flat = state.state_dict() if is_module else traverse.flatten_dict(state, sep="/")
    return {name: np.asarray(x).tobytes() for name, x in flat.items()}


@each_case
def test_from_flax_to_torch_and_back(name: str, tmp_path: Path) -> None:
    both = pair(name)
    params, module = both.params(seed=1), both.module(seed=2)
    unickpt.save(tmp_path / "flax", params)
    assert unickpt.load(tmp_path / "flax", like=module, rules=both.rules) is module
    both.check(params, module)
    unickpt.save(tmp_path / "torch", module)
    back = unickpt.load(tmp_path / "torch", like=both.like, rules=both.rules.inverse)
    assert bits(back) == bits(params)


@each_case
def test_from_torch_to_flax_and_back(name: str, tmp_path: Path) -> None:
    both = pair(name)
    module, again = both.module(seed=3), both.module(seed=4)
    unickpt.save(tmp_path / "torch", module)
    params = unickpt.load(tmp_path / "torch", like=both.like, rules=both.rules.inverse)
    both.check(params, module)
    unickpt.save(tmp_path / "flax", params)
    unickpt.load(tmp_path / "flax", like=again, rules=both.rules)
    assert bits(again) == bits(module)


@each_case
def test_without_like_from_torch(name: str, tmp_path: Path) -> None:
    both = pair(name)
    module = both.module(seed=5)
    unickpt.save(tmp_path / "torch", module)
    made = bits(unickpt.load(tmp_path / "torch", rules=both.rules.inverse))
    asked = bits(both.expected(module))
    # nothing tells whether a head that torch ties is wanted
    assert made.keys() - asked.keys() <= {"lm_head/kernel"}
    assert {name: made[name] for name in asked} == asked


@each_case
def test_without_like_from_flax(name: str, tmp_path: Path) -> None:
    both = pair(name)
    module = both.module(seed=5)
    unickpt.save(tmp_path / "flax", both.expected(module))
    made, asked = bits(unickpt.load(tmp_path / "flax", rules=both.rules)), bits(module)
    # nothing tells that a decoder of masked words (the embedding again) is not wanted, and that
    # counts of batches are
    assert made.keys() - asked.keys() <= {"cls.predictions.decoder.weight"}
    asked = {name: x for name, x in asked.items() if not name.endswith("num_batches_tracked")}
    assert {name: made[name] for name in asked} == asked


def test_counts_of_batches_begin_anew(tmp_path: Path) -> None:
    both = pair("resnet")
    module, again = both.module(seed=6), both.module(seed=7)
    for name, tensor in [*module.state_dict().items(), *again.state_dict().items()]:
        if name.endswith("num_batches_tracked"):
            tensor.fill_(9)
    unickpt.save(tmp_path / "torch", module)
    params = unickpt.load(tmp_path / "torch", like=both.like, rules=both.rules.inverse)
    unickpt.save(tmp_path / "flax", params)
    unickpt.load(tmp_path / "flax", like=again, rules=both.rules)
    for name, tensor in again.state_dict().items():
        counts = name.endswith("num_batches_tracked")
        assert torch.equal(tensor, torch.tensor(0) if counts else module.state_dict()[name])


# --- what would go wrong ------------------------------------------------------------------------


def turned(line: str) -> str:
    """A rule with the axes of its right side in reverse order."""
    left, arrow, right = line.partition("<->")
    reverse = lambda found: " ".join(reversed(re.findall(r"\(.*?\)|\S+", found[0])))  # noqa: E731
    return left + arrow + re.sub(r"(?<=\[)[^]]*", reverse, right)


@pytest.mark.parametrize("preset", sorted({case.preset for case in CASES.values()}))
def test_a_wrong_order_of_axes_is_noticed(preset: str, tmp_path: Path) -> None:
    cases = [name for name, case in CASES.items() if case.preset == preset]
    for name in cases:
        unickpt.save(tmp_path / name, pair(name).params(seed=1))
    modules = {name: pair(name).module(seed=2) for name in cases}

    def passes(text: str, name: str) -> bool:
        try:
            unickpt.load(tmp_path / name, like=modules[name], rules=Rules.parse(text))
        except (RuleError, LoadMismatch):
            return False
        return bits(pair(name).expected(modules[name])) == bits(pair(name).params(seed=1))

    lines = preset_text(preset).splitlines()
    assert all(passes("\n".join(lines), name) for name in cases)
    for at, line in enumerate(lines):
        if turned(line) != line:
            text = "\n".join([*lines[:at], turned(line), *lines[at + 1 :]])
            assert not all(passes(text, name) for name in cases), line


# --- heads that are tied, or not ----------------------------------------------------------------

TIED_LLAMA = Case("transformers-llama", "LlamaForCausalLM", DECODER | TIED)
each_head = pytest.mark.parametrize(
    ("tied", "untied"), [("gemma", "gemma, untied"), ("gpt2, cross", "gpt2, untied")]
)


@each_head
def test_a_tied_head_into_one_of_its_own(tied: str, untied: str, tmp_path: Path) -> None:
    one, two = pair(tied), pair(untied)
    params, module = one.params(seed=1), two.module(seed=2)
    unickpt.save(tmp_path / "flax", params)
    one.check(params, unickpt.load(tmp_path / "flax", like=module, rules=one.rules))
    module = one.module(seed=3)
    unickpt.save(tmp_path / "torch", module)
    params = unickpt.load(tmp_path / "torch", like=two.like, rules=two.rules.inverse)
    two.check(params, module)


@each_head
def test_a_head_of_its_own_into_a_tied_one(tied: str, untied: str, tmp_path: Path) -> None:
    one, two = pair(tied), pair(untied)
    unickpt.save(tmp_path / "flax", two.params(seed=1))
    with pytest.raises(LoadMismatch, match=r"lm_head.weight .*an array of its own .*same memory"):
        unickpt.load(tmp_path / "flax", like=one.module(seed=2), rules=one.rules)
    unickpt.save(tmp_path / "torch", two.module(seed=3))
    with pytest.raises(LoadMismatch, match=r"lm_head.weight' are to become one, but differ"):
        unickpt.load(tmp_path / "torch", like=one.like, rules=one.rules.inverse)


def test_two_heads_of_llama_into_one(tmp_path: Path) -> None:
    """Flax's Llama has a head of its own, whatever its configuration says."""
    both, module = pair("llama"), Pair(TIED_LLAMA).module(seed=2)
    params = both.params(seed=1)
    unickpt.save(tmp_path / "other", params)
    with pytest.raises(LoadMismatch, match=r"lm_head.weight .*an array of its own .*same memory"):
        unickpt.load(tmp_path / "other", like=module, rules=both.rules)
    like = dict(module.named_parameters())  # without the head
    with pytest.raises(LoadMismatch, match="'lm_head/kernel' are to become one, but differ"):
        unickpt.load(tmp_path / "other", like=like, rules=both.rules)
    params["lm_head"]["kernel"] = params["model"]["embed_tokens"]["embedding"].T
    unickpt.save(tmp_path / "same", params)
    unickpt.load(tmp_path / "same", like=like, rules=both.rules)
    both.check(params, module)


def test_one_head_of_llama_into_two(tmp_path: Path) -> None:
    both, module = pair("llama"), Pair(TIED_LLAMA).module(seed=1)
    unickpt.save(tmp_path / "torch", module)
    unickpt.save(tmp_path / "without", dict(module.named_parameters()))
    for name in ("torch", "without"):
        for like in (both.like, None):
            params = unickpt.load(tmp_path / name, like=like, rules=both.rules.inverse)
            both.check(params, module)


def test_no_head_where_the_preset_has_one(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "flax", pair("gemma").params(seed=1))
    with pytest.raises(
        RuleError, match=r"'lm_head.weight' .* is requested, but no stored array is left for it"
    ):
        unickpt.load(
            tmp_path / "flax",
            like=pair("gemma, untied").module(seed=2),
            rules=Rules.preset("transformers-llama"),
        )


# --- optimizer state ----------------------------------------------------------------------------

TRAINED = """
include {preset} under params/ <-> model/
lift opt/mu/{{p}} <-> optim/{{p}}/exp_avg     for params/{{p}} <-> model/{{p}}  law=gradient
lift opt/nu/{{p}} <-> optim/{{p}}/exp_avg_sq  for params/{{p}} <-> model/{{p}}  law=square
lift opt/count as int32 <-> optim/{{p}}/step as float32  for params/{{p}} <-> model/{{p}}
"""


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_moments_go_where_their_parameters_go(name: str, tmp_path: Path) -> None:
    both, rules = pair(name), Rules.parse(TRAINED.format(preset=f"transformers-{name}"))
    params, mu, nu = (both.params(seed) for seed in (1, 2, 3))
    stored = {"params": params, "opt": {"mu": mu, "nu": nu, "count": np.int32(5)}}
    unickpt.save(tmp_path / "flax", stored)
    module, first, second = (both.module(seed) for seed in (4, 5, 6))
    slots = {
        name: {"exp_avg": a, "exp_avg_sq": b, "step": torch.zeros(())}
        for (name, a), (_, b) in zip(
            first.named_parameters(), second.named_parameters(), strict=True
        )
    }
    state = {"model": module.state_dict(), "optim": slots}
    unickpt.load(tmp_path / "flax", like=state, rules=rules)
    for found, asked in ((module, params), (first, mu), (second, nu)):
        assert bits(both.expected(found)) == bits(asked)
    assert all(slot["step"] == 5 for slot in slots.values())
    unickpt.save(tmp_path / "torch", state)
    like = {"params": both.like, "opt": {"mu": both.like, "nu": both.like, "count": np.int32(0)}}
    assert bits(unickpt.load(tmp_path / "torch", like=like, rules=rules.inverse)) == bits(stored)
