"""Converters of timm, observed: all that benchmarks/zoo runs."""

import importlib.util

import pytest

if importlib.util.find_spec("timm") is None:  # its import needs what the source prepares
    pytest.skip("timm is not installed", allow_module_level=True)

from benchmarks.zoo import timm as source
from benchmarks.zoo.__main__ import observed


def test_all_but_one_become_rules():
    rows = [observed(each, None) for each in source.conversions()]
    assert [row["wrong"] for row in rows] == [0] * 22, rows
    # Two arrays are added: their sum is an element of neither.
    assert [row["name"] for row in rows if row["result"] != "rules"] == ["dinov2/filter"]
