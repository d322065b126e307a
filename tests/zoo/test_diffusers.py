"""Converters of diffusers, observed: all that benchmarks/zoo runs."""

import pytest

pytest.importorskip("diffusers")

from benchmarks.zoo import diffusers as source
from benchmarks.zoo.__main__ import observed


def test_all_become_rules():
    rows = [observed(each, None) for each in source.conversions()]
    assert [(row["result"], row["wrong"]) for row in rows] == [("rules", 0)] * 11, rows
