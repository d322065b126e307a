"""docs/list_presets.py, which is no module of a package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from support import TESTS


def _loaded() -> ModuleType:
    path = Path(TESTS).parent / "docs" / "list_presets.py"
    spec = importlib.util.spec_from_file_location("list_presets", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


list_presets = _loaded()
