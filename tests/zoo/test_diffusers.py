"""Converters of diffusers, observed: all that benchmarks/zoo runs."""

import pytest

pytest.importorskip("diffusers")

from benchmarks.zoo import diffusers as source
from benchmarks.zoo.__main__ import observed


def test_all_become_rules_but_those_that_multiply_arrays():
    """A LoRA's factor by its `alpha`."""
    rows = [observed(each, None) for each in source.conversions()]
    assert {row["wrong"] for row in rows} == {0}, rows
    others = {row["name"]: row["why"] for row in rows if row["result"] != "rules"}
    assert sorted(others) == [
        "kohya-flux-alpha/lora",
        "kohya-qwen-alpha/lora",
        "lokr-alpha/lora",
        "mixed-flux-alpha/lora",
        "musubi-wan-alpha/lora",
        "wan-alpha/lora",
    ]
    assert all("depends on values" in why for why in others.values()), others
    assert len(rows) == 105
