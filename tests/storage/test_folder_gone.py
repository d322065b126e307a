"""A folder that another process removes between two looks at it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import unickpt


@pytest.mark.parametrize("moment", range(6))
def test_a_step_that_is_being_removed_is_not_found(
    moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, real, seen = tmp_path / "step_1", os.scandir, [0]
    unickpt.save(step, {"w": np.ones(3)})
    (step / "manifest.ocdbt").unlink()  # as retention does first

    def scandir(path: str = ".") -> object:
        if str(path).startswith(str(step)):
            if seen[0] == moment:
                monkeypatch.undo()
                shutil.rmtree(step)
            seen[0] += 1
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(unickpt.CheckpointNotFound):
        unickpt.load(step)
