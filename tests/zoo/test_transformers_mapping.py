"""The conversion mapping of transformers 5, observed: a few of the models that benchmarks/zoo
runs.
"""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers.conversion_mapping")

import transformers

from benchmarks.zoo.__main__ import observed
from benchmarks.zoo.transformers_mapping import conversions_of, tiny_model


@pytest.mark.parametrize(
    "name", ["MixtralForCausalLM", "DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM"]
)
def test_both_directions_become_rules(name):
    model = tiny_model(getattr(transformers, name))
    rows = [observed(each, None) for each in conversions_of(name, model)]
    assert [(row["result"], row["wrong"]) for row in rows] == [("rules", 0)] * 2, rows
    assert all(row["lines"] <= 40 for row in rows)
