"""The examples in docstrings do what they say."""

from __future__ import annotations

import doctest
import importlib
import os
import sys
from pathlib import Path

import pytest
from support.torch_versions import has_torch

import unickpt


def modules() -> list[str]:
    """The names of all modules, by their files: `pkgutil.walk_packages` would import trainers."""
    names = ["unickpt"]
    top = Path(unickpt.__file__).parent
    for folder, folders, files in os.walk(top, followlinks=True):
        folders[:] = [name for name in folders if Path(folder, name, "__init__.py").is_file()]
        package = ".".join(("unickpt", *Path(folder).relative_to(top).parts))
        stems = [name.removesuffix(".py") for name in files if name.endswith(".py")]
        names += [f"{package}.{name}" for name in (*folders, *stems) if name != "__init__"]
    return sorted(names)


@pytest.mark.parametrize("name", modules())
def test_docstrings(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as missing:  # a large trainer, which `make test` does not install
        known = isinstance(missing, ModuleNotFoundError) or not has_torch("2.9")
        if not (known and name.startswith("unickpt.integrations.")):
            raise
        pytest.skip(str(missing))
    if ">>>" in Path(str(module.__file__)).read_text():
        result = doctest.testmod(module, verbose=False)
        assert result.failed == 0, f"{result.failed} examples of {name} fail; see above"
    assert sys.modules[name] is module
