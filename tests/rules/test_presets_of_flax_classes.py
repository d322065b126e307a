"""Presets `transformers-*` against transformers 4.57's own converters, for each class of a family.

test_presets_transformers.py compares outputs of the models, too, of a few classes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import unickpt
from unickpt import LoadMismatch, Rules
from unickpt.errors import RuleError

pytestmark = [
    pytest.mark.integration,
    # transformers' converter makes tensors of JAX's memory
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
]

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
traverse = pytest.importorskip("flax.traverse_util")
pytest.importorskip("transformers.modeling_flax_pytorch_utils")

from support.broken_rules import each_broken, files, load  # noqa: E402

from benchmarks.zoo import tiny, transformers_flax  # noqa: E402

OTHER = {
    "hidden_size": 48, "d_model": 30, "n_embd": 30, "intermediate_size": 44, "d_ff": 44,
    "n_inner": 44, "encoder_ffn_dim": 46, "decoder_ffn_dim": 34, "d_kv": 11, "head_dim": 8,
    "projection_dim": 18, "vocab_size": 71, "num_labels": 7, "type_vocab_size": 5,
    "max_position_embeddings": 43, "n_positions": 43, "num_hidden_layers": 2, "num_layers": 3,
    "num_decoder_layers": 2, "n_layer": 2, "encoder_layers": 3, "decoder_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 3, "num_heads": 3, "n_head": 5,
    "encoder_attention_heads": 3, "decoder_attention_heads": 5,
    "relative_attention_num_buckets": 13, "image_size": 30, "patch_size": 6, "num_mel_bins": 14,
    "max_source_positions": 26, "max_target_positions": 31, "classifier_proj_size": 17,
    "mlp_ratio": 3,
}  # fmt: skip
"""Other sizes than those of benchmarks/zoo/tiny.py."""

OTHER_OF_FAMILY = {
    "whisper": {"classifier_proj_size": 17, "decoder_attention_heads": 5},
    "resnet": {"embedding_size": 14, "hidden_sizes": [16, 20, 28], "depths": [3, 1, 2]},
}

FAMILIES: dict[str, list[tuple[str, list[dict[str, Any]]]]] = {
    "transformers-bart": [
        ("bart", [{}, {"tie_word_embeddings": False}]),
        ("mbart", [{}, {"tie_word_embeddings": True}]), ("blenderbot", [{}])],
    "transformers-bert": [("bert", [{}])],
    "transformers-clip": [("clip", [{}])],
    "transformers-dinov2": [("dinov2", [{}])],
    "transformers-gemma": [("gemma", [{}, {"attention_bias": True, "tie_word_embeddings": False}])],
    "transformers-gpt2": [
        ("gpt2", [{}, {"add_cross_attention": True, "tie_word_embeddings": False}])],
    "transformers-llama": [("llama", [{}, {"attention_bias": True}])],
    "transformers-mistral": [("mistral", [{}])],
    "transformers-resnet": [("resnet", [{"layer_type": "bottleneck"}])],
    "transformers-roberta": [("roberta", [{}]), ("xlm_roberta", [{}])],
    "transformers-t5": [
        ("t5", [{}, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}]),
        ("mt5", [{"tie_word_embeddings": False}])],
    "transformers-vit": [("vit", [{}])],
    "transformers-whisper": [("whisper", [{}])],
}  # fmt: skip
"""Families of transformers that a preset is for, and configurations of them."""


def _cases() -> list[tuple[str, str, str, int, int]]:
    return [
        (preset, family, torch_class.__name__, variant, size)
        for preset, families in FAMILIES.items()
        for family, variants in families
        for _, torch_class in transformers_flax.classes(family)
        for variant in range(len(variants))
        for size in range(2)
    ]


CASES = _cases()


def _params() -> list[Any]:
    """All cases; `make soak` runs those that differ from others in the sizes alone, or in what
    another family or configuration has in common with the first one of its preset."""
    found, seen = [], set()
    for case in CASES:
        preset, family, name, variant, size = case
        is_first = variant == 0 and family == FAMILIES[preset][0][0]
        # The sizes of which the presets were made, once for each preset.
        alike = preset if size == 0 else (family, variant, name if is_first else "")
        again = alike in seen
        seen.add(alike)
        found.append(
            pytest.param(
                case,
                id=f"{preset}-{name}-{variant}-{'ab'[size]}",
                marks=[pytest.mark.slow] if again else [],
            )
        )
    return found


each_case = pytest.mark.parametrize("case", _params())


class Pair:
    """Both classes of a case, and transformers' functions between them."""

    def __init__(self, preset: str, family: str, name: str, variant: int, size: int) -> None:
        flax_class, torch_class = next(
            each for each in transformers_flax.classes(family) if each[1].__name__ == name
        )
        change = {**dict(FAMILIES[preset])[family][variant]}
        with (
            mock.patch.dict(tiny.SIZES, OTHER if size else {}),
            mock.patch.dict(tiny.OF_FAMILY, OTHER_OF_FAMILY if size else {}),
        ):
            config = tiny.tiny_config(torch_class, change)
        both = transformers_flax.conversions_of(name, flax_class, torch_class, config)
        there, back = both
        self.to_torch, self.to_flax = there.function, back.function
        self.flax, self.torch = there.example, back.example

    def params(self, seed: int) -> Any:
        """Random parameters of the Flax class."""
        random = np.random.default_rng(seed)
        return jax.tree.map(
            lambda x: np.array(random.standard_normal(x.shape), np.float32), self.flax
        )

    def state(self, seed: int) -> dict[str, Any]:
        """A random state of the torch class, whose tied weights are equal."""
        return {k: x.numpy() for k, x in self.to_torch(self.params(seed)).items()}


@cache
def pair(case: tuple[str, str, str, int, int]) -> Pair:
    return Pair(*case)


def flat(tree: Any) -> dict[str, Any]:
    found: dict[str, Any] = traverse.flatten_dict(tree, sep="/")
    return {name: np.asarray(x) for name, x in found.items()}


def same(found: dict[str, Any], asked: dict[str, Any]) -> bool:
    return found.keys() == asked.keys() and all(
        found[name].shape == x.shape and found[name].tobytes() == x.tobytes()
        for name, x in asked.items()
    )


def counted(state: dict[str, Any]) -> dict[str, Any]:
    """Without the counts of batches, which Flax does not have, and torch does not use."""
    return {k: np.asarray(x) for k, x in state.items() if not k.endswith("num_batches_tracked")}


@each_case
def test_both_directions(case: tuple[str, str, str, int, int], tmp_path: Path) -> None:
    both, rules = pair(case), Rules.preset(case[0])
    params = both.params(1)
    unickpt.save(tmp_path / "flax", params)
    asked = {k: np.zeros_like(x.numpy()) for k, x in both.torch.items()}
    made = unickpt.load(tmp_path / "flax", asked, rules=rules)
    expected = {k: x.numpy() for k, x in both.to_torch(params).items()}
    assert same(counted(made), counted(expected))

    unickpt.save(tmp_path / "torch", expected)
    like = jax.tree.map(np.zeros_like, both.flax)
    back = flat(unickpt.load(tmp_path / "torch", like, rules=rules.inverse))
    assert same(back, flat(params))
    theirs = flat(both.to_flax({k: torch.from_numpy(np.array(x)) for k, x in expected.items()}))
    assert same(back, theirs)


@pytest.mark.slow  # it tries hundreds of wrong presets
@pytest.mark.filterwarnings("ignore::unickpt.errors.RuleWarning")
@pytest.mark.parametrize("preset", FAMILIES)
def test_each_rule_matters(preset: str, tmp_path: Path) -> None:
    """A statement that is missing, or has another order of axes or names, is noticed."""
    cases = [case for case in CASES if case[0] == preset and case[4] == 1]
    for at, case in enumerate(cases):
        unickpt.save(tmp_path / f"{at}", pair(case).params(1))

    def passes(rules: Rules, at: int) -> bool:
        both = pair(cases[at])
        asked = {k: np.zeros_like(x) for k, x in both.state(2).items()}
        try:
            made = unickpt.load(tmp_path / f"{at}", asked, rules=rules)
        except (RuleError, LoadMismatch):
            return False
        return same(counted(made), counted(both.to_torch(both.params(1))))

    def all_pass(texts: dict[str, list[str]]) -> bool:
        try:
            rules = load(texts, preset, tmp_path, {})
        except RuleError:
            return False
        return all(passes(rules, at) for at in range(len(cases)))

    assert all_pass(files(preset))
    for wrong, what in each_broken(files(preset), FAMILIES.keys() - {preset}):
        assert not all_pass(wrong), what
