"""Converters of KerasHub, observed: a few of those that benchmarks/zoo runs."""

import pytest

pytest.importorskip("keras_hub")
pytest.importorskip("transformers.conversion_mapping")

import transformers

from benchmarks.zoo.__main__ import observed
from benchmarks.zoo.keras_hub import conversions_of
from benchmarks.zoo.transformers_mapping import tiny_model


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_both_directions_become_rules(name):
    model = tiny_model(getattr(transformers, name))
    rows = [observed(each, None) for each in conversions_of(name, model)]
    assert [(row["result"], row["wrong"]) for row in rows] == [("rules", 0)] * 2, rows
