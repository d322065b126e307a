"""Converters of transformers 4.57, observed: a few of the classes that benchmarks/zoo runs."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("flax")
pytest.importorskip("transformers.modeling_flax_pytorch_utils")

from benchmarks.zoo import transformers_flax
from benchmarks.zoo.__main__ import observed


@pytest.mark.parametrize("model", ["gpt2/GPT2LMHeadModel", "t5/T5ForCond", "resnet/ResNetForImage"])
def test_both_directions_become_rules(model):
    rows = [observed(each, None) for each in transformers_flax.conversions(model)]
    assert [(row["result"], row["wrong"]) for row in rows] == [("rules", 0)] * 2, rows
    assert all(row["lines"] <= 40 for row in rows)
