"""The example of docs/integrations/ray.md is run by a worker of Ray, with a small state."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import TESTS
from support.processes import Processes
from support.ray_cluster import ENVIRONMENT, START_TIMEOUT_S

import unickpt

pytest.importorskip("ray")
pytestmark = pytest.mark.integration

PAGE = Path(TESTS).parent.joinpath("docs", "integrations", "ray.md").read_text()
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
BEFORE = """
import sys

import torch


def make_state():
    return {"w": torch.zeros(3), "step": 0}


def train_step(state):
    state["w"] += 1
    state["step"] += 1
    return float(state["step"])


"""
AFTER = """
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

for steps in (2, 5):
    run = RunConfig("docs", sys.argv[1], checkpoint_config=CheckpointConfig(num_to_keep=1))
    config = {"steps": steps}
    scaling = ScalingConfig(num_workers=1)
    result = TorchTrainer(train, train_loop_config=config, run_config=run, scaling_config=scaling)
    found = result.fit()
    print(url_of(found.checkpoint), found.metrics)
"""


def test_ray_train_by_reference(processes: Processes, tmp_path: Path) -> None:
    job = processes.start(BEFORE + EXAMPLE + AFTER, tmp_path, env=ENVIRONMENT)
    (output,) = processes.finish([job], START_TIMEOUT_S)
    lines = [line for line in output.splitlines() if line.startswith(str(tmp_path))]
    assert lines == [f"{tmp_path}/docs/step_{n} {{'loss': {n}.0}}" for n in (2, 5)]
    assert unickpt.load(tmp_path / "docs" / "step_5")["w"].tolist() == [5, 5, 5]
