"""The examples in docstrings do what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import sys

import pytest
from support.torch_versions import has_torch

import unickpt


def modules() -> list[str]:
    found = pkgutil.walk_packages(unickpt.__path__, "unickpt.")
    return ["unickpt", *sorted(m.name for m in found)]


@pytest.mark.parametrize("name", modules())
def test_docstrings(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as missing:  # a large trainer, which `make test` does not install
        known = isinstance(missing, ModuleNotFoundError) or not has_torch("2.9")
        if not (known and name.startswith("unickpt.integrations.")):
            raise
        pytest.skip(str(missing))
    result = doctest.testmod(module, verbose=False)
    assert result.failed == 0, f"{result.failed} examples of {name} fail; see above"
    assert sys.modules[name] is module
