"""The names of `unickpt`: all are there, and what training jobs rarely need is imported later."""

from __future__ import annotations

import subprocess
import sys

import pytest

import unickpt

CODE = """
import sys, unickpt
names = "merging", "merge_methods", "conversion", "difference"
late = {f"unickpt.tools.{name}" for name in names} | {"unickpt.reporting.html_report"}
assert late.isdisjoint(sys.modules)
assert unickpt.merge.__name__ == "merge"
assert "unickpt.tools.merging" in sys.modules
assert unickpt.report.__name__ == "report"
"""


def test_every_public_name_is_there() -> None:
    assert {name: getattr(unickpt, name) for name in unickpt.__all__}.keys() <= {*dir(unickpt)}
    with pytest.raises(AttributeError, match="module 'unickpt' has no attribute 'marge'"):
        unickpt.marge  # noqa: B018


def test_tools_are_imported_when_they_are_used() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)
