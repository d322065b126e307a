"""Checkpoints of format 1 that were stored long ago: `tests/fixtures/format_1`."""

from __future__ import annotations

import atexit
import importlib
import shutil
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

from support import TESTS

FOLDER = Path(TESTS) / "fixtures" / "format_1"
_PACKED = FOLDER / "checkpoints.tar.xz"


def names() -> list[str]:
    """The checkpoints, by their paths below `unpacked()`."""
    with tarfile.open(_PACKED) as packed:
        found = (Path(name) for name in packed.getnames())
        return sorted(str(path.parent) for path in found if path.name == "manifest.ocdbt")


@cache
def unpacked() -> Path:
    """The folder of all of them; for tests that change nothing there."""
    folder = Path(tempfile.mkdtemp(prefix="format_1-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with tarfile.open(_PACKED) as packed:
        packed.extractall(folder, filter="data")
    return folder


@cache
def states() -> ModuleType:
    """What they hold."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("states")
    finally:
        sys.path.remove(str(FOLDER))
