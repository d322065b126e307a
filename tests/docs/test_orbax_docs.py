"""The examples of docs/integrations/orbax.md run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS

import unickpt

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")
pytestmark = pytest.mark.integration  # imports Orbax
PAGE = Path(TESTS).parent.joinpath("docs", "integrations", "orbax.md").read_text()
MANAGER, VERSION_1, RULES = re.findall(r"```python\n(.*?)```", PAGE, re.S)
(BACK,) = re.findall(r"```sh\n(.*?)```", PAGE, re.S)


def test_the_changed_line_and_the_way_back(tmp_path: Path) -> None:
    names: dict[str, Any] = {"path": tmp_path / "run"}
    exec(MANAGER, names)
    args = ocp.args.StandardSave({"w": jax.numpy.ones(3)})
    with names["manager"] as manager:
        manager.save(4, args=args)
    assert unickpt.load(tmp_path / "run" / "4" / "default")["w"].tolist() == [1, 1, 1]
    (tmp_path / "back").mkdir()
    command = BACK.replace("unickpt export", f"{sys.executable} -m unickpt export")
    env = {**os.environ, "PYTHONPATH": str(Path(TESTS).parent)}
    subprocess.run(command, shell=True, check=True, cwd=tmp_path, env=env)
    with ocp.CheckpointManager(tmp_path / "back") as manager:
        restored = manager.restore(4, args=ocp.args.StandardRestore({"w": jax.numpy.zeros(3)}))
        assert restored["w"].tolist() == [1, 1, 1]


def test_version_1(tmp_path: Path) -> None:
    names: dict[str, Any] = {"path": tmp_path}
    exec(VERSION_1, names)
    with names["checkpointer"] as checkpointer:
        checkpointer.save(4, {"w": jax.numpy.ones(3)})
    assert unickpt.load(tmp_path / "4" / "state")["w"].tolist() == [1, 1, 1]


def test_rules(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        old = {"dense": {"kernel": np.arange(6.0).reshape(2, 3)}}
        manager.save(1, args=ocp.args.StandardSave(old))
    names: dict[str, Any] = {}
    exec(MANAGER.partition("manager =")[0] + RULES, names)
    with ocp.CheckpointManager(tmp_path, handler_registry=names["renaming"]) as manager:
        like = ocp.args.StandardRestore({"linear": {"weight": np.zeros((3, 2))}})
        restored = manager.restore(1, args=like)
        assert restored["linear"]["weight"].tolist() == old["dense"]["kernel"].T.tolist()
