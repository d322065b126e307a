"""A plugin of pytest: redirects the imports of a trainer's tests, and notes how each test ended.

`UNICKPT_SUITE` names the module of the trainer, `UNICKPT_SUITE_OURS` is 1 where imports are
redirected, and `UNICKPT_SUITE_OUT` is the file that gets a line for each test.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

import pytest

_worst: dict[str, str] = {}
_RANK = {"passed": 0, "skipped": 1, "failed": 2}


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: Any) -> None:
    begin()


def begin() -> None:
    """Redirects the imports; `suites._ranks` does so in processes that tests start."""
    suite = importlib.import_module(f"suites.{os.environ['UNICKPT_SUITE']}")
    prepare = getattr(suite, "prepare", None)  # what both runs need
    if prepare is not None:
        prepare()
    if os.environ["UNICKPT_SUITE_OURS"] == "1":
        suite.redirect()


def pytest_runtest_logreport(report: Any) -> None:
    worst = _worst.get(report.nodeid, "passed")
    _worst[report.nodeid] = max(worst, report.outcome, key=_RANK.__getitem__)
    if report.when == "teardown":
        with open(os.environ["UNICKPT_SUITE_OUT"], "a") as out:
            out.write(json.dumps([report.nodeid, _worst[report.nodeid]]) + "\n")
