"""`sanitize` of mlx-lm, observed: a few of the models that benchmarks/zoo runs."""

import pytest

pytest.importorskip("mlx_lm")
pytest.importorskip("transformers.conversion_mapping")

from benchmarks.zoo.__main__ import observed
from benchmarks.zoo.mlx_lm import conversion_of


@pytest.mark.parametrize("name", ["mixtral", "gpt_neox", "qwen3_moe"])
def test_it_becomes_rules(name):
    conversion = conversion_of(name)
    assert conversion is not None
    row = observed(conversion, None)
    assert (row["result"], row["wrong"]) == ("rules", 0), row
