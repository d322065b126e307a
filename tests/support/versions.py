"""Checkpoints that older and newer versions of the frameworks wrote: `tests/fixtures/versions`."""

from __future__ import annotations

import importlib
import json
import sys
import tarfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import unickpt
from support import TESTS
from unickpt.arrays import dtypes

FOLDER = Path(TESTS) / "fixtures" / "versions"
END = "end"  # not a checkpoint: how a run ends that nothing interrupts


class Case:
    """What one version wrote."""

    def __init__(self, folder: Path) -> None:
        self.name, self.path = folder.name, folder / "ckpt"
        self.about = json.loads((folder / "expected.json").read_text())
        self._npz = folder / "expected.npz"

    @property
    def checkpoints(self) -> list[str]:
        return [name for name in self.about["checkpoints"] if name != END]

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        with np.load(self._npz) as found:
            return dict(found)

    def arrays(self, checkpoint: str) -> dict[str, np.ndarray]:
        """What the framework says that the arrays of a checkpoint hold, in their dtypes."""
        facts = self.about["checkpoints"][checkpoint]["arrays"]
        return {
            name: self._arrays[f"{checkpoint}:{name}"].view(dtypes.from_name(each["dtype"]))
            for name, each in facts.items()
        }

    def values(self, checkpoint: str) -> dict[str, Any]:
        """Likewise, plain values."""
        return dict(self.about["checkpoints"][checkpoint]["values"])


def unpack(into: Path) -> dict[str, Case]:
    with tarfile.open(FOLDER / "checkpoints.tar.xz") as packed:
        packed.extractall(into, filter="data")
    return {folder.name: Case(folder) for folder in sorted(into.iterdir())}


def names() -> list[str]:
    """Of the cases."""
    with tarfile.open(FOLDER / "checkpoints.tar.xz") as packed:
        return sorted({name.split("/")[0] for name in packed.getnames()})


def written_by(framework: str) -> Any:
    """The module that wrote the cases of a framework: their models and optimizers."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(f"written_by_{framework}")
    finally:
        sys.path.remove(str(FOLDER))


def differences(case: Case, checkpoint: str, found: unickpt.Checkpoint) -> Iterator[str]:
    """The arrays and plain values that are not, bit for bit, what the framework says."""
    arrays = case.arrays(checkpoint)
    for name, wanted in arrays.items():
        if name not in found:
            yield f"{name} is missing"
            continue
        array = np.asarray(found[name][...])
        facts = (array.dtype, array.shape, array.tobytes())
        if facts != (wanted.dtype, wanted.shape, wanted.tobytes()):
            yield f"{name} is {array!r}, not {wanted!r}"
    for name, value in case.values(checkpoint).items():
        if name not in found.values:
            yield f"{name} is missing"
        elif found.values[name] != value or type(found.values[name]) is not type(value):
            yield f"{name} is {found.values[name]!r}, not {value!r}"
    for name in found:
        if name not in arrays:
            yield f"{name} is not in the checkpoint"
