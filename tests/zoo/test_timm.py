"""Converters of timm, observed: all that benchmarks/zoo runs."""

import importlib.util

import pytest

if importlib.util.find_spec("timm") is None:  # its import needs what the source prepares
    pytest.skip("timm is not installed", allow_module_level=True)

from benchmarks.zoo import timm as source
from benchmarks.zoo.__main__ import observed


def test_all_become_rules():
    rows = [observed(each, None) for each in source.conversions()]
    assert [(row["result"], row["wrong"]) for row in rows] == [("rules", 0)] * 4, rows
